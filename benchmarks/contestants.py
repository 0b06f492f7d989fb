"""Whom the step is measured of. A contestant is one entry of ``CONTESTANTS``: a function that wraps a model."""

import contextlib
import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import flatparam
from benchmarks.free_handle import set_free
from flatparam import traced


def current(device: str) -> torch.device:
    """The device of a type that tensors of this process go to: FSDP warns of one without an index."""
    return torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)


@dataclass(frozen=True)
class Wrapping:
    """How to wrap: modules of ``unit_types`` and the root are units; ``low``: the dtype to compute in, if not fp32."""

    unit_types: tuple[type[nn.Module], ...]
    low: torch.dtype | None = None
    device: str = "cpu"


def bare(model: nn.Module, how: Wrapping) -> nn.Module:
    """The module itself, in the dtype of computation."""
    return model if how.low is None else model.to(how.low)


def fsdp1(model: nn.Module, how: Wrapping, api: Any = FullyShardedDataParallel, **settings: Any) -> nn.Module:
    """FSDP1, or a wrapper with its interface, on whichever handle is installed."""
    mixed = None if how.low is None else MixedPrecision(param_dtype=how.low, reduce_dtype=how.low)
    policy = ModuleWrapPolicy(set(how.unit_types))
    wrapped: nn.Module = api(
        model, auto_wrap_policy=policy, mixed_precision=mixed, device_id=current(how.device), **settings
    )
    return wrapped


def fsdp2(model: nn.Module, how: Wrapping) -> nn.Module:
    """torch's fully_shard, unit by unit and on the root."""
    mesh = init_device_mesh(how.device, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(how.low, how.low) if how.low is not None else MixedPrecisionPolicy()
    for module in [module for module in model.modules() if isinstance(module, how.unit_types) and module is not model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def ddp(model: nn.Module, how: Wrapping) -> nn.Module:
    """torch's DistributedDataParallel: nothing is sharded."""
    return DistributedDataParallel(bare(model, how), gradient_as_bucket_view=True)


def on_flatparam(model: nn.Module, how: Wrapping, **settings: Any) -> nn.Module:
    """torch's FSDP1 with flatparam's handle."""
    with installed():
        return fsdp1(model, how, **settings)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Have FSDP1 use flatparam's handle for the models that are wrapped inside."""
    if flatparam.is_installed():
        yield
        return
    flatparam.install()
    try:
        yield
    finally:
        flatparam.uninstall()


def on_the_runtime(model: nn.Module, how: Wrapping, **settings: Any) -> nn.Module:
    """flatparam's own class."""
    return fsdp1(model, how, flatparam.FullyShardedDataParallel, **settings)


def compiled(model: nn.Module) -> nn.Module:
    """By inductor."""
    return cast(nn.Module, torch.compile(model))


def in_units(model: nn.Module, how: Wrapping) -> nn.Module:
    """The runtime, whose units' own modules are compiled."""
    wrapped = on_the_runtime(model, how)
    for unit in wrapped.modules():
        if isinstance(unit, how.unit_types):
            unit.compile()
    return wrapped


def in_one_graph(model: nn.Module, how: Wrapping) -> nn.Module:
    """flatparam.traced, compiled with its collectives."""
    sharded = traced.shard(model, auto_wrap_policy=ModuleWrapPolicy(set(how.unit_types)), param_dtype=how.low)
    return compiled(sharded)


def with_deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, batch: int) -> Any:
    """DeepSpeed's engine with its defaults: ``backward(loss)`` and ``step()``, which also clears gradients."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(torch.distributed.get_rank())}
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # names that torch replaces
    built = deepspeed.ops.__compatible_ops__
    built.update(dict.fromkeys(built, False))  # else DeepSpeed compiles a collective of its own, and prints that
    settings = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,  # of torch
        "zero_force_ds_cpu_optimizer": False,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]


Wrap = Callable[[nn.Module, Wrapping], nn.Module]

BARE, DDP = "bare", "DDP"
FSDP1, FSDP1_FLAT, FSDP2 = "FSDP1 orig", "FSDP1 flat", "FSDP2"
OURS, OURS_FLAT, RUNTIME = "flatparam orig", "flatparam flat", "flatparam runtime"
SMALL = "runtime, small units as one"
REPLICATED, ZERO_1 = "flatparam NO_SHARD", "flatparam ZERO_1"  # the runtime, beside DDP
CALLS = "bare + collectives"  # of benchmarks.gpu
FREE = "free handle"  # only of benchmarks.models
ZERO_STAGE_1, ZERO_STAGE_3 = "DeepSpeed ZeRO-1", "DeepSpeed ZeRO-3"  # of benchmarks.bench_deepspeed
STAGES = {ZERO_STAGE_1: 1, ZERO_STAGE_3: 3}
# of benchmarks.bench_traced
IN_UNITS, AROUND, TRACED = "runtime, units compiled", "runtime, compiled", "traced, compiled"

CONTESTANTS: dict[str, Wrap] = {
    BARE: bare,
    FSDP1: lambda model, how: fsdp1(model, how, use_orig_params=True),
    FSDP1_FLAT: lambda model, how: fsdp1(model, how, use_orig_params=False),
    FSDP2: fsdp2,
    OURS: lambda model, how: on_flatparam(model, how, use_orig_params=True),
    OURS_FLAT: lambda model, how: on_flatparam(model, how, use_orig_params=False),
    FREE: lambda model, how: set_free(on_flatparam(model, how, use_orig_params=True), how.low),
    RUNTIME: on_the_runtime,
    SMALL: functools.partial(on_the_runtime, min_unit_bytes=2**20),
    REPLICATED: functools.partial(on_the_runtime, sharding_strategy=flatparam.ShardingStrategy.NO_SHARD),
    ZERO_1: functools.partial(on_the_runtime, sharding_strategy=flatparam.ShardingStrategy.ZERO_1),
    DDP: ddp,
    IN_UNITS: in_units,
    AROUND: lambda model, how: compiled(on_the_runtime(model, how)),
    TRACED: in_one_graph,
}
