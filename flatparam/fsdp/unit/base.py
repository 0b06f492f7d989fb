"""The base class of the wrapper: attributes, place in the tree of units, properties of torch's class.

Functions in ``states`` and ``wrapper`` take a ``Wrapper``; ``FullyShardedDataParallel`` has them as methods, and its
constructor sets the attributes. This file does not know the forward or state dicts. It issues no collective.
"""

import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, StateDictSettings

from ...common.switches import Fakes
from ...common.torch_private import TorchsFSDP
from ..api import ShardingStrategy, TrainingState
from ..desync import torch_collectives
from ..errors import StateError
from ..names import FSDP_WRAPPED_MODULE, without_wrappers
from ..sharding.parameters import ParamInfo
from ..sharding.placement import Placement
from .markers import RefusingMarkers, of_whole_values
from .memory_plan import MemoryPlan, plan_of_unit, plan_tree
from .printed import ShowingFreed, of_unit
from .shard_map import ShardMap, shard_map
from .summon import Summoned
from .unit import Unit, units_of

W = TypeVar("W", bound="Wrapper")


class Wrapper(RefusingMarkers, nn.Module):
    """The attributes of a wrapper, and queries about its unit and the units below."""

    limit_all_gathers: bool
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    _backward_prefetch: BackwardPrefetch | None
    _buffer_dtypes: dict[str, torch.dtype]  # name of a buffer that is cast -> its dtype before
    _casts_to: torch.dtype | None = None  # forward casts floating inputs to it
    _hooked: torch_collectives.Hooked | None = None  # the communication hook
    _device_id: torch.device | None
    _forward_prefetch: bool
    _min_unit_bytes: int
    _fakes: Fakes  # collectives that are left out, to measure the time without them
    _full_in_eval: bool  # whether evaluation computes in full precision
    _ignored_params: set[nn.Parameter]
    _in_full = False  # whether it computes in full precision now
    _loading: Summoned | None = None  # full parameters while a state dict is loaded
    _missing: list[ParamInfo]  # parameters without a value in the local state dict that is loaded
    _moves_to: torch.device | None = None  # the root's forward moves its inputs there
    _outer: weakref.ref[Any] | None = None  # the next wrapper around this one
    _placement: Placement
    _root_set: bool | None = None  # the value that a program has set for _is_root
    _settings: StateDictSettings
    _strategy: ShardingStrategy
    _unit: Unit
    _use_orig_params: bool
    _watched: Any = None  # during a load of this unit: states.model's record of the parameters that it writes to
    _written: Mapping[str, tuple[Unit | None, str]] = MappingProxyType({})  # the last load's values

    def _outermost(self) -> Any:
        """The root of the tree that this unit is in: itself, if no unit is around it."""
        outer: Any = self._outer() if self._outer is not None else None
        return self if outer is None else outer._outermost()

    def _check_root(self, what: str, modules: Iterable[nn.Module] | None = None) -> None:
        """Raises: StateError unless this is the root and no forward, backward or summon runs in its tree.

        ``modules``: ``self.modules()``, for a caller that has the list already.
        """
        if self._outermost() is not self:
            raise StateError(f"`{what}()` should only be called on the root FSDP instance; this is {self._unit.name}")
        self._check_idle(what, modules)

    def _check_idle(self, what: str, modules: Iterable[nn.Module] | None = None) -> None:
        """Raises: StateError, naming the call ``what``, unless this unit and all units below are idle."""
        for module in self.modules() if modules is None else modules:
            if isinstance(module, Wrapper):
                module._check_idle_here(what)

    def _check_idle_here(self, what: str) -> None:
        self._forget_interrupted()
        if self.training_state is not TrainingState.IDLE:
            raise StateError(
                f"{what}: {self._unit.name} is expected to be in states IDLE, it is in {self.training_state.name}"
            )

    def _hold_those_below(self) -> None:
        """Become the outer wrapper of all units below that have none. For copies and loaded models."""
        for inner in self.fsdp_modules(self)[1:]:
            if inner._outer is None:
                inner._outer = weakref.ref(self)

    def _move_inputs(self) -> None:
        """After shards were moved: the root moves its inputs to the new device, if it moves inputs at all."""
        outermost = self._outermost()
        if outermost._moves_to is not None:
            outermost._moves_to = outermost.compute_device

    def _forget_interrupted(self) -> None:
        """Recover from a backward that an exception has ended: all units are idle, and modules have their parameters.

        Calls between passes do this first, because nothing of ours runs at the end of such a backward.
        """
        root = self._unit.core.root
        if root is not None and root.state == "INTERRUPTED":
            root.recover()

    # Queries

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """Return the units in ``module``, itself included, depth first. ``root_only``: only units that are roots.

        If ``module`` has no unit of ours, return the units of torch's class.
        """
        found: list[Any] = wrappers_in(module)
        if not found:
            return [*TorchsFSDP.fsdp_modules(module, root_only)]
        return [inner for inner in found if inner._outermost() is inner] if root_only else found

    def _units_below(self) -> list[tuple[str, Unit]]:
        """This unit and the units below, each with its path in this unit's module."""
        return [(without_wrappers(path), m._unit) for path, m in self.named_modules() if isinstance(m, Wrapper)]

    def shard_map(self) -> ShardMap:
        """List the pieces that every rank holds of each parameter of this unit and the units below.

        No communication. Returns: a list of ``Piece``; ``print`` shows it as tables.
        """
        return shard_map(self._units_below())

    def memory_plan(self, optimizer_bytes: int = 8) -> MemoryPlan:
        """Compute the bytes that this rank will hold, before training. No communication.

        ``optimizer_bytes``: bytes of optimizer state for each element of the shard; 8 for Adam in fp32.
        Returns: the plan. It names units by their paths in this unit's module; ``print`` shows it as a table.
        """
        prefetches = self._backward_prefetch is not None or self._forward_prefetch
        plans = (plan_of_unit(path or "(root)", unit, optimizer_bytes) for path, unit in self._units_below())
        on_device = self.compute_device.type != "cpu"
        return plan_tree(plans, prefetches, gathers_ahead=on_device, min_unit_bytes=self._min_unit_bytes)

    def __repr__(self) -> str:
        with ShowingFreed():
            return super().__repr__()

    def extra_repr(self) -> str:
        """The line that ``print`` shows for this unit: strategy, ranks and sizes."""
        unit = self.__dict__.get("_unit")  # None while the constructor runs
        return "" if unit is None else of_unit(self._strategy.name, unit)

    def check_is_root(self) -> bool:
        """Whether no other unit holds this one. Changes nothing."""
        return self._outermost() is self

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        module: Any = self._modules[FSDP_WRAPPED_MODULE]
        inner = getattr(module, "_checkpoint_wrapped_module", None)
        found: nn.Module = module if inner is None else inner
        return found

    @property
    def training_state(self) -> TrainingState:
        """IDLE, FORWARD_BACKWARD while the model runs, or SUMMON_FULL_PARAMS while this unit is summoned."""
        unit = self._unit
        if unit.summoned is not None:
            return TrainingState.SUMMON_FULL_PARAMS
        if unit.core.root is not None and unit.core.root.state in ("FORWARD", "BACKWARD"):
            return TrainingState.FORWARD_BACKWARD
        return TrainingState.IDLE

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy that this unit was built with."""
        return self._strategy

    @property
    def placement(self) -> Placement:
        """The groups over which this unit's parameter, gradient and optimizer state are sharded."""
        return self._placement

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward gathers the next unit; None: not ahead."""
        return self._backward_prefetch

    @property
    def process_group(self) -> Any:
        """The group over which this unit is sharded; without sharding, the group that reduces its gradient."""
        placement = self._placement
        return placement.optim or placement.replicate or placement.given or dist.group.WORLD

    @property
    def rank(self) -> int:
        """This rank in ``process_group``."""
        return int(self.process_group.rank())

    @property
    def world_size(self) -> int:
        """The number of ranks in ``process_group``."""
        return int(self.process_group.size())

    @property
    def compute_device(self) -> torch.device:
        """The device of this unit's forward and backward.

        A unit without parameters has the device of the first unit below that has some, else of the first parameter,
        else the CPU.
        """
        for unit in units_of(self.modules()):
            for flat_param in unit.flat_params:
                return flat_param.device
        return next((param.device for param in self.module.parameters()), torch.device("cpu"))

    # Names of torch 1.12

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters with a gradient, in this unit and below."""
        return [param for param in self.parameters() if param.grad is not None]

    @property
    def gradient_predivide_factor(self) -> float:
        """The divisor of gradients before they are summed over the ranks."""
        return self._placement.factors[0]

    @property
    def gradient_postdivide_factor(self) -> float:
        """The divisor of gradients after they were summed over the ranks."""
        return self._placement.factors[1]

    @property
    def reshard_after_forward(self) -> bool:
        """Whether the unsharded parameters are freed between forward and backward."""
        return self._placement.reshard_after_forward

    @property
    def numel_padded_per_param(self) -> list[int]:
        """The padding at the end of this rank's shard, in elements, for each flat parameter of this unit."""
        return [flat_param.layout.shard(flat_param.placement.rank).padding for flat_param in self._unit.flat_params]

    @property
    def device_id(self) -> torch.device | None:
        """The argument ``device_id`` as a device; None: it was not given."""
        return self._device_id

    def __getattr__(self, name: str) -> Any:
        if name == "_unit":
            raise StateError(
                "this FullyShardedDataParallel was not wrapped to the end: its constructor has raised an error, or is "
                "still running"
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if FSDP_WRAPPED_MODULE not in modules:
                raise
            inner = modules[FSDP_WRAPPED_MODULE]
            try:
                found = getattr(inner, name)
                return of_whole_values(found, self) if name == "save_pretrained" else found
            except AttributeError:
                if not name.startswith("_") or hasattr(type(inner), name):
                    raise
            raise  # the wrapper's error, as callers look for a private name on the wrapper

    def __getitem__(self, key: Any) -> Any:
        return self.module.__getitem__(key)  # type: ignore[operator]


def wrappers_in(module: nn.Module) -> list[Wrapper]:
    """Return the wrappers in ``module``, itself included, depth first."""
    return [inner for inner in module.modules() if isinstance(inner, Wrapper)]
