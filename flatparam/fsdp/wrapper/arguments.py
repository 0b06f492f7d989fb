"""Check and resolve the arguments of the wrapper's constructor, and warn of costly ones.

The constructor calls these functions before it builds the unit, and ``warn_of_padding`` after.
"""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision

from ...common.torch_private import _init_utils
from ...common.warned import warn_user
from ..api import ShardingStrategy
from ..sharding.extensions import is_bytes
from ..sharding.placement import Placement, groups_of, place
from ..unit.base import Wrapper
from ..unit.registry import owner_of, owner_of_param
from ..unit.unit import Unit
from .materialize import own_modules, parameters_of


def default_groups(process_group: Any, device_mesh: Any, placement: Any) -> list[dist.ProcessGroup]:
    """The groups over which other ranks will compare their unit, as long as this rank has no placement yet.

    An error in the arguments is told to these ranks. Empty if an argument names groups.
    """
    if not dist.is_initialized() or not (process_group is None and device_mesh is None and placement is None):
        return []
    world: Any = dist.group.WORLD
    return [world]


def placement_of(
    strategy: ShardingStrategy, process_group: Any, device_mesh: Any, sharding_strategy: Any, placement: Any
) -> Placement:
    """The placement from ``placement``, or from strategy and groups. Raises: ValueError if both are given."""
    check_types(device_mesh=device_mesh)
    if placement is None:
        placed = place(strategy, groups_of(strategy, process_group, device_mesh))
        return placed if device_mesh is None else dataclasses.replace(placed, mesh=device_mesh)
    check_types(placement=placement)
    if process_group is not None or device_mesh is not None or sharding_strategy is not None:
        raise ValueError("placement= replaces process_group, device_mesh and sharding_strategy: pass only one")
    given: Placement = placement
    return given


def strategy_of_one_rank(strategy: ShardingStrategy, placement: Placement) -> ShardingStrategy:
    """Return NO_SHARD, with torch's warning, for FULL_SHARD or SHARD_GRAD_OP over one rank; else ``strategy``."""
    shards = strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    if not shards or placement.given is None or placement.given.size() > 1:
        return strategy
    warn_user(f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.")
    return ShardingStrategy.NO_SHARD


def ignored(module: nn.Module, ignored_modules: Any, ignored_states: Any) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The ignored modules, descendants included, and the ignored parameters.

    Raises: ValueError if both arguments are given or one names a unit; torch's errors for other types.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
        )
    states = list(ignored_states if ignored_states is not None else ignored_modules or ())
    _init_utils._check_ignored_states(states, ignored_modules is None)
    if all(isinstance(state, nn.Parameter) for state in states):
        return set(), set(states)
    for state in states:
        if isinstance(state, Wrapper):
            raise ValueError(f"`ignored_modules` should not include FSDP modules, got {type(state).__name__}")
        if state is module:
            warn_user(
                "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
                f"parameters being ignored: the unit of {type(module).__name__} manages none"
            )
    modules = {inner for state in states for inner in state.modules() if not isinstance(inner, Wrapper)}
    return modules, {param for inner in modules for param in inner._parameters.values() if param is not None}


def check_not_shared(module: nn.Module, own: list[nn.Module]) -> None:
    """Raises: ValueError naming a module or parameter in ``own`` that belongs to another unit, and the unit."""
    for inner in own:
        unit = owner_of(inner)
        if unit is not None:
            raise ValueError(
                f"a {type(inner).__name__} in {type(module).__name__} is shared with {unit.name}, which shards its "
                "parameters: called outside of that unit it would have no full parameters. Wrap it as a separate unit, "
                "or wrap both places in one unit"
            )
        for name, param in inner._parameters.items():
            owner = None if param is None else owner_of_param(param)
            if owner is not None:
                raise ValueError(
                    f"parameter `{name}` of a {type(inner).__name__} in {type(module).__name__} is shared with "
                    f"`{owner.name}` of {owner.unit.name}: each would train its copy. Wrap both in one unit, or "
                    "ignore the parameter"
                )


def first_name(unit: Unit) -> str:
    """The first parameter of ``unit``, for messages."""
    originals = unit.originals
    return f"parameter `{originals[0].fqn}`" if originals else "no parameters"


def planned(root: nn.Module, targets: Iterable[nn.Module]) -> str:
    """The number and classes of the units of ``root`` and ``targets``, for messages."""
    counts = collections.Counter(type(module).__name__ for module in [*targets, root])
    return f"{counts.total()} units ({', '.join(f'{count} of {name}' for name, count in sorted(counts.items()))})"


def warn_of_frozen(
    root: nn.Module, targets: set[nn.Module], ignored_modules: set[nn.Module], ignored_params: set[nn.Parameter]
) -> None:
    """Warn of units that will hold frozen and trained parameters in one flat parameter (LoRA).

    Then frozen parameters have gradient memory and are reduced too.
    """
    of_module = dict.fromkeys([root, *targets])
    mixed, total, trained, example = 0, 0, 0, ""
    for unit in of_module:
        own = list(own_modules(unit, targets.__contains__, ignored_modules))
        params = dict.fromkeys(param for param in parameters_of(own).values() if param not in ignored_params)
        numels = [(param.requires_grad, param.numel()) for param in params if not is_bytes(param)]
        trains = sum(numel for requires_grad, numel in numels if requires_grad)
        if trains == 0 or all(requires_grad for requires_grad, _ in numels):
            continue
        mixed, total, trained = mixed + 1, total + sum(numel for _, numel in numels), trained + trains
        example = example or type(unit).__name__
    if mixed:
        warn_user(
            f"{mixed} of {len(of_module)} units ({example}, ...) have frozen parameters beside those that train: "
            f"gradients take memory, and are reduced, for {total} elements where {trained} train. Pass segments=True, "
            "which gives frozen parameters a flat parameter of their own"
        )


def warn_of_padding(unit: Unit) -> None:
    """Warn if ``atomic`` makes more than half of the gathered bytes, and more than 1 MiB, padding."""
    layouts = [flat_param.layout for flat_param in unit.flat_params]
    padded = sum(layout.shard_bytes * layout.world_size for layout in layouts)
    held = sum(sum(layout.numels) * layout.itemsize for layout in layouts)
    if unit.options.atomic is not None and padded - held > max(held, 2**20):
        shards = unit.options.placement.shards
        warn_user(
            f"{unit.name}: {1 - held / padded:.0%} of the gathered bytes is padding: with atomic= its {held} "
            f"bytes take {shards} shards of {padded // shards}. Make larger units, or smaller blocks"
        )


_FLAGS = (
    *("sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params"),
    *("segments", "offload_grads", "check_values"),
)
_CLASSES: dict[str, type] = {
    **dict.fromkeys(_FLAGS, int),
    "module": nn.Module,
    "cpu_offload": CPUOffload,
    "mixed_precision": MixedPrecision,
    "placement": Placement,
    "device_mesh": DeviceMesh,
}


def check_types(**arguments: object) -> None:
    """Raises: TypeError naming the first argument with a wrong type, the expected type and the value."""
    for name, value in arguments.items():
        cls, may_be_none = _CLASSES.get(name, object), name not in ("module", *_FLAGS)
        if not isinstance(value, cls) and not (value is None and may_be_none):
            wanted = f"{cls.__module__.split('.')[0]}'s {cls.__name__}{' or None' if may_be_none else ''}"
            wanted = "True or False" if cls is int else wanted
            if cls is MixedPrecision:
                dtype = value if isinstance(value, torch.dtype) else torch.bfloat16
                wanted += f", as in MixedPrecision(param_dtype={dtype})"
            if cls is CPUOffload:
                wanted += ", as in CPUOffload(offload_params=True)"
            raise TypeError(f"expected {name} to be {wanted}, got {value!r:.200} ({type(value).__name__})")
    precision = arguments.get("mixed_precision")
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        check_dtype(f"mixed_precision.{name}", getattr(precision, name, None))


def check_bytes(name: str, value: object) -> None:
    """Raises: TypeError naming the argument unless it is an int; ValueError if it is negative, or over 2**62."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected {name} to be an int, a number of bytes, got {value!r}")
    if not 0 <= value <= 2**62:
        raise ValueError(f"expected {name} to be between 0 and 2**62, got {value}")


def check_dtype(name: str, dtype: object) -> None:
    """Raises: TypeError naming the argument, unless it is None or a floating-point dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"expected {name} to be a floating-point torch.dtype or None, got {dtype!r}")
