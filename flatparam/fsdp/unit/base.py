"""What every part of the wrapper builds on: its attributes, its place in the tree of units, and its questions."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, StateDictSettings

from ...common.switches import Fakes
from ...common.torch_private import TorchsFSDP
from ..api import ShardingStrategy, TrainingState
from ..desync import torch_collectives
from ..errors import StateError
from ..names import FSDP_WRAPPED_MODULE, without_wrappers
from ..sharding.parameters import ParamInfo
from ..sharding.placement import Placement
from .markers import RefusingMarkers
from .memory_plan import MemoryPlan, plan_of_unit, plan_tree
from .printed import ShowingFreed, of_unit
from .shard_map import ShardMap, shard_map
from .summon import Summoned
from .unit import Unit, units_of


class Wrapper(RefusingMarkers, nn.Module):
    """The attributes of a wrapper, and its questions, which change nothing."""

    limit_all_gathers: bool
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    _backward_prefetch: BackwardPrefetch | None
    _buffer_dtypes: dict[str, torch.dtype]  # own dtypes of the buffers that are cast
    _casts_to: torch.dtype | None = None
    _hooked: torch_collectives.Hooked | None = None  # the communication hook
    _device_id: torch.device | None
    _forward_prefetch: bool
    _fakes: Fakes
    _full_in_eval: bool
    _ignored_params: set[nn.Parameter]
    _in_full = False  # now
    _loading: Summoned | None = None
    _missing: list[ParamInfo]  # in the local state dict that is loaded
    _moves_to: torch.device | None = None  # inputs of the root
    _outer: weakref.ref[Any] | None = None
    _placement: Placement
    _root_set: bool | None = None  # by a program, what _is_root is
    _settings: StateDictSettings
    _strategy: ShardingStrategy
    _unit: Unit
    _use_orig_params: bool

    def _outermost(self) -> Any:
        outer: Any = self._outer() if self._outer is not None else None
        return self if outer is None else outer._outermost()

    def _check_root(self, what: str, modules: Iterable[nn.Module] | None = None) -> None:
        """Raises: StateError unless this is the outermost unit and nothing is under way. ``modules``: all of its."""
        if self._outermost() is not self:
            raise StateError(f"`{what}()` should only be called on the root FSDP instance; this is {self._unit.name}")
        self._check_idle(what, modules)

    def _check_idle(self, what: str, modules: Iterable[nn.Module] | None = None) -> None:
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
        """This unit is what the units below it are in, unless another one is."""
        for inner in self.fsdp_modules(self)[1:]:
            if inner._outer is None:
                inner._outer = weakref.ref(self)

    def _move_inputs(self) -> None:
        """From now on the root moves its inputs to where its shards were moved, if it does that."""
        outermost = self._outermost()
        if outermost._moves_to is not None:
            outermost._moves_to = outermost.compute_device

    def _forget_interrupted(self) -> None:
        """After an exception in a backward the modules shall have their parameters again."""
        root = self._unit.core.root
        if root is not None and root.state == "INTERRUPTED":
            root.recover()

    # What there is

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """The units in ``module``, itself included, depth first; ``root_only``: those that no other one holds.

        Where there are none, those that torch's class has wrapped.
        """
        found: list[Any] = [inner for inner in module.modules() if isinstance(inner, Wrapper)]
        if not found:
            found = [*TorchsFSDP.fsdp_modules(module, root_only)]
            return found
        return [inner for inner in found if inner._outermost() is inner] if root_only else found

    def _units_below(self) -> list[tuple[str, Unit]]:
        """This unit and those below it, each with its path in this one's module."""
        return [(without_wrappers(path), m._unit) for path, m in self.named_modules() if isinstance(m, Wrapper)]

    def shard_map(self) -> ShardMap:
        """What every rank holds of every parameter of this unit and of those below it. No communication.

        Returns: a list of ``Piece``; ``print`` shows it as tables.
        """
        return shard_map(self._units_below())

    def memory_plan(self, optimizer_bytes: int = 8) -> MemoryPlan:
        """The bytes that this rank will hold, before training. No communication.

        ``optimizer_bytes``: of optimizer state for each element of the shard; 8 for Adam in fp32.
        Returns: the plan, whose units have their paths in this one's module; ``print`` shows it as a table.
        """
        prefetches = self._backward_prefetch is not None or self._forward_prefetch
        plans = (plan_of_unit(path or "(root)", unit, optimizer_bytes) for path, unit in self._units_below())
        return plan_tree(plans, prefetches, gathers_ahead=self.compute_device.type != "cpu")

    def __repr__(self) -> str:
        with ShowingFreed():
            return super().__repr__()

    def extra_repr(self) -> str:
        """What ``print`` shows of this unit: its strategy, ranks and sizes."""
        unit = self.__dict__.get("_unit")  # there is none while it is made
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
        """What this unit is doing."""
        unit = self._unit
        if unit.summoned is not None:
            return TrainingState.SUMMON_FULL_PARAMS
        if unit.core.root is not None and unit.core.root.state in ("FORWARD", "BACKWARD"):
            return TrainingState.FORWARD_BACKWARD
        return TrainingState.IDLE

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy it was made with."""
        return self._strategy

    @property
    def placement(self) -> Placement:
        """The groups over which this unit is spread."""
        return self._placement

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward gathers the next unit."""
        return self._backward_prefetch

    @property
    def process_group(self) -> Any:
        """The group that shares this unit, or that reduces its gradient."""
        placement = self._placement
        return placement.optim or placement.replicate or placement.given or dist.group.WORLD

    @property
    def rank(self) -> int:
        """This rank in ``process_group``."""
        return int(self.process_group.rank())

    @property
    def world_size(self) -> int:
        """The ranks in ``process_group``."""
        return int(self.process_group.size())

    @property
    def compute_device(self) -> torch.device:
        """Where forward and backward of this unit run; if it has no parameters, those of the units below."""
        for unit in units_of(self.modules()):
            for flat_param in unit.flat_params:
                return flat_param.device
        return next((param.device for param in self.module.parameters()), torch.device("cpu"))

    # Names of torch 1.12

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient, those of units below too."""
        return [param for param in self.parameters() if param.grad is not None]

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are summed over the ranks."""
        return self._placement.factors[0]

    @property
    def gradient_postdivide_factor(self) -> float:
        """And after."""
        return self._placement.factors[1]

    @property
    def reshard_after_forward(self) -> bool:
        """Whether the unsharded parameters are freed between forward and backward."""
        return self._placement.reshard_after_forward

    @property
    def numel_padded_per_param(self) -> list[int]:
        """Of each flat parameter of this unit: how many elements at the end of this rank's shard are padding."""
        return [flat_param.layout.shard(flat_param.placement.rank).padding for flat_param in self._unit.flat_params]

    @property
    def device_id(self) -> torch.device | None:
        """The device that was asked for."""
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
                return getattr(inner, name)
            except AttributeError:
                if not name.startswith("_") or hasattr(type(inner), name):
                    raise
            raise  # of the wrapper: who asks for a private attribute means that of a class

    def __getitem__(self, key: Any) -> Any:
        return self.module.__getitem__(key)  # type: ignore[operator]
