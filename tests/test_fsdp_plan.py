"""What the runtime says before training: the map of shards, the plan of memory, and that the ranks agree."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from fsdp_models import make, wrap_blocks
from gloo import fake_world, run_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy

PEAK = """
import sys
sys.path.insert(0, "tests")
import torch
from torch import nn
from gloo import fake_world
from flatparam import FullyShardedDataParallel as FSDP, ShardingStrategy, MixedPrecision, BackwardPrefetch

strategy, low, prefetch, whole = sys.argv[1], sys.argv[2] == "low", sys.argv[3] == "prefetch", sys.argv[4] == "whole"


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        small = 2**19 if whole else 2**20  # then a quarter of the shards is padding
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.ones(n)) for n in (2**20, 2**20, small, small))

    def forward(self, x):
        return x * (self.a * self.b).sum() * (self.c * self.d).sum()


def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


torch.set_num_threads(1)
with fake_world(4):
    settings = {
        "sharding_strategy": ShardingStrategy[strategy],
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else None,
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE if prefetch else None,
        "atomic": torch.Tensor.numel if whole else None,
    }
    tiny = FSDP(nn.Sequential(*(FSDP(nn.Linear(1, 1), **settings) for _ in range(2))), **settings)
    tiny(torch.ones(1, 1)).sum().backward()
    before = status("VmRSS")
    model = FSDP(nn.Sequential(*(FSDP(Scale(), **settings) for _ in range(6))), **settings)
    plan = model.memory_plan(optimizer_bytes=0)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    for _ in range(2):
        model(torch.ones(1)).backward()
    print(status("VmHWM") - before, plan.peak)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "settings",
    [
        ("FULL_SHARD", "same", "prefetch", "even"),
        ("FULL_SHARD", "low", "none", "whole"),
        ("SHARD_GRAD_OP", "same", "prefetch", "even"),
        ("ZERO_1", "low", "prefetch", "even"),
        ("NO_SHARD", "same", "prefetch", "even"),
    ],
    ids="-".join,
)
def test_the_plan_is_what_a_process_takes(settings):
    arguments = [sys.executable, "-c", PEAK, *settings]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.getcwd()}
    printed = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True).stdout
    measured, planned = map(int, printed.split())
    assert measured == pytest.approx(planned, rel=0.05), (measured / 2**20, planned / 2**20)


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_the_map_says_where_every_element_is(world, uo):
    whole = {name: param.detach().clone() for name, param in make().named_parameters()}
    found = {name: torch.full_like(value, torch.nan) for name, value in whole.items()}
    for rank in range(world):
        with fake_world(world, rank):
            model = wrap_blocks(make(), use_orig_params=uo)
            pieces = model.shard_map()
            flats = {}
            for path, unit in model.named_modules():
                if isinstance(unit, FSDP):
                    for segment in unit._unit.segments:
                        for original in segment.originals:
                            prefix = path.replace("_fsdp_wrapped_module", "").strip(".").replace("..", ".")
                            flats[f"{prefix}.{original.fqn}".strip(".")] = segment.flat.detach()
            for piece in pieces:
                if piece.rank != rank:
                    continue
                values = flats[piece.fqn][piece.flat_start : piece.flat_start + piece.numel]
                found[piece.fqn].view(-1)[piece.start : piece.start + piece.numel] = values
                assert piece.shape == tuple(whole[piece.fqn].shape)
                assert piece.trained
                assert sum(torch.Size(box.sizes).numel() for box in piece.boxes) == piece.numel
    for name, value in whole.items():
        assert torch.equal(found[name], value), name


def other_builds():
    """One rank has another layer, dtype, setting: every rank says which, at construction."""
    rank = dist.get_rank()

    def wider():
        return nn.Linear(3, 3 + rank)

    def renamed():
        module = nn.Module()
        setattr(module, f"weight{rank}", nn.Parameter(torch.ones(3)))
        return module

    def frozen():
        return nn.Linear(3, 3).requires_grad_(rank == 0)

    builds = [
        (wider, {}, r"weight.*\(3, 3\).*weight.*\(4, 3\)"),
        (renamed, {}, r"weight0.*weight1"),
        (frozen, {"use_orig_params": True}, r"requires_grad=True.*requires_grad=False"),
        (lambda: nn.Linear(3, 3).to(torch.float64 if rank else torch.float32), {}, "float32.*float64"),
        (lambda: nn.Linear(3, 3), {"use_orig_params": rank == 1}, "use_orig_params=False.*use_orig_params=True"),
        (lambda: nn.Linear(3, 3), {"sharding_strategy": list(ShardingStrategy)[rank]}, "reshard_after_forward"),
        (
            lambda: nn.Linear(3, 3),
            {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16 if rank else None)},
            "reduce_dtype=None.*reduce_dtype=torch.bfloat16",
        ),
    ]
    for build, arguments, message in builds:
        with pytest.raises(ValueError, match=message):
            FSDP(build(), **arguments)
    model = FSDP(nn.Linear(3, 3))
    model(torch.ones(1, 3)).sum().backward()


@pytest.mark.multiprocess
def test_ranks_that_build_different_models():
    run_ranks(other_builds, 2)
