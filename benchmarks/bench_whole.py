"""f. What is done with all parameters of a unit outside of a step: wrapping it, summoning them, clipping gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from benchmarks import main
from benchmarks.measuring import clock, in_turn
from benchmarks.models import SHAPE, Unit
from benchmarks.rows import Row, Table, Target
from benchmarks.worlds import fake_world
from flatparam import FullyShardedDataParallel

WORLD, PARAMETERS = 8, 4000
TORCH, OURS = "FSDP1", "flatparam runtime"
CLIPS = {True: 1, False: 20}  # in a sample: one flat gradient is clipped in a fraction of a millisecond


def measure(quick: bool) -> Table:
    """Both runtimes in turn, with original parameters and with a flat one."""
    torch.set_num_threads(1)
    table = Table(
        "f",
        f"a unit of {PARAMETERS} parameters outside of a step, fake process group of {WORLD}",
        "parameters of 32 elements; ratios to FSDP1, median (least-most)",
    )
    apis = {TORCH: FSDP1, OURS: FullyShardedDataParallel}
    with fake_world(WORLD):
        for orig in (True, False):
            for make in (_wrapping, _using):
                samples = {name: make(api, orig) for name, api in apis.items()}
                for what, medians in in_turn(samples, 3, 3 if quick else 8).items():
                    mode = "orig" if orig else "flat"
                    table.rows.append(Row.of(what, mode, "ms", TORCH, medians, 1e3, [Target(OURS, 1.0)]))
    return table


def _wrapped(api: Any, orig: bool) -> Any:
    return api(Unit(PARAMETERS), use_orig_params=orig, device_id=torch.device("cpu"))


def _wrapping(api: Any, orig: bool) -> Callable[[], dict[str, float]]:
    def sample() -> dict[str, float]:
        module = Unit(PARAMETERS)
        start = clock()
        kept = api(module, use_orig_params=orig, device_id=torch.device("cpu"))
        taken = clock() - start
        del kept
        return {"wrapping": taken}

    return sample


def _using(api: Any, orig: bool) -> Callable[[], dict[str, float]]:
    model = _wrapped(api, orig)
    model(torch.ones(SHAPE)).sum().backward()

    def summon(name: str, **flags: bool) -> dict[str, float]:
        begin = clock()
        block = api.summon_full_params(model, **flags)
        block.__enter__()
        middle = clock()
        block.__exit__(None, None, None)
        return {f"entering summon_full_params({name})": middle - begin, f"leaving it ({name})": clock() - middle}

    def sample() -> dict[str, float]:
        taken = summon("") | summon("writeback=False", writeback=False)
        if orig:
            taken |= summon("with_grads=True", with_grads=True)
        start = clock()
        for _ in range(CLIPS[orig]):
            model.clip_grad_norm_(1.0)
        return taken | {"clip_grad_norm_": (clock() - start) / CLIPS[orig]}

    return sample


if __name__ == "__main__":
    main.run_one(measure)
