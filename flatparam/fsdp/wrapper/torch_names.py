"""Private names of torch's FullyShardedDataParallel and of its handle, computed from a unit of ours.

Trainers and torch's own tests use them. Most only show the unit; the few that trainers set or call act on the unit.
``absent_names.py`` refuses names that only make sense in torch's design, such as its streams and its queue of events.
Source: torch 2.13, ``torch/distributed/fsdp/_common_utils.py`` and ``_flat_param.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...common.torch_private import HandleShardingStrategy, HandleTrainingState, torch_flat_param
from ..api import TrainingState
from ..desync.torch_collectives import Hooked
from ..errors import StateError
from ..sharding.flat_param import FlatParam
from ..sharding.torch_attributes import now
from ..unit.base import Wrapper
from . import stored
from .absent_names import ABSENT_NAMES, Absent, why_absent


class Handle:
    """One flat parameter of a unit, with the names of torch's ``FlatParamHandle``.

    A property makes it anew for each read, so it has no state; two of one flat parameter are equal.
    ``flat_param``: this rank's shard ``[shard_numel]``, with the attributes of torch's ``FlatParameter`` that describe
    it; inside of ``summon_full_params`` it has all elements ``[numel]``.
    """

    _wrapper: TorchNames
    _flat_param: FlatParam

    def __init__(self, wrapper: TorchNames, flat_param: FlatParam):
        vars(self).update(_wrapper=wrapper, _flat_param=flat_param)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(why_absent(name, of_handle=True) or f"flatparam's handle has no attribute `{name}`")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _SETTABLE:
            why = why_absent(name, of_handle=True) or f"`{name}` of flatparam's handle, which shows a unit as it is"
            raise AttributeError(f"cannot set {why}")
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other._flat_param is self._flat_param

    def __hash__(self) -> int:
        return hash(id(self._flat_param))

    flat_param = property(attrgetter("_flat_param.flat"))
    uses_sharded_strategy = property(attrgetter("_flat_param.is_sharded"))
    sharded_grad = property(attrgetter("_flat_param.flat.grad"))
    process_group = property(attrgetter("_wrapper.process_group"))
    rank = property(attrgetter("_wrapper.rank"))
    world_size = property(attrgetter("_wrapper.world_size"))
    device = property(attrgetter("_flat_param.device"))
    _fully_sharded_module = property(attrgetter("_wrapper.module"))
    _use_orig_params = property(attrgetter("_flat_param.use_orig_params"))
    _offload_params = property(attrgetter("_wrapper.cpu_offload.offload_params"))
    is_sharded = torch_flat_param.FlatParamHandle.is_sharded
    shard_metadata = torch_flat_param.FlatParamHandle.shard_metadata

    @property
    def _sharding_strategy(self) -> HandleShardingStrategy:
        """torch's strategy of the same name; if torch has none, NO_SHARD or SHARD_GRAD_OP, with equal shards."""
        like = HandleShardingStrategy.SHARD_GRAD_OP if self.uses_sharded_strategy else HandleShardingStrategy.NO_SHARD
        return HandleShardingStrategy.__members__.get(self._wrapper.sharding_strategy.name, like)

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The dtype of the shard. Setting it casts the shard: see ``stored.store``."""
        return self._flat_param.flat.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        stored.store(self._wrapper, self._flat_param, dtype)

    @property
    def _fwd_bwd_param_dtype(self) -> torch.dtype:
        return self._flat_param.compute_dtype or self._flat_param.flat.dtype

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return self._flat_param.reduce_dtype or self._fwd_bwd_param_dtype

    @property
    def _training_state(self) -> HandleTrainingState:
        """Idle, summoned, or in the forward or the backward of the model."""
        if self._wrapper._unit.summoned is not None:
            return HandleTrainingState.SUMMON_FULL_PARAMS
        root = self._wrapper._unit.core.root
        states = {"FORWARD": HandleTrainingState.FORWARD, "BACKWARD": HandleTrainingState.BACKWARD_PRE}
        return states.get(root.state if root is not None else "", HandleTrainingState.IDLE)

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move this rank's shard and its gradients, with the arguments of ``Tensor.to``: see ``stored.move``.

        Local. Call it on each rank, and for each handle of the model, before the next forward.
        """
        stored.move(self._wrapper, self._flat_param, *args, **kwargs)

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Free the gathered data of the unit if the argument is True: the next forward or backward gathers again.

        Call it on all ranks, as the next gather is a collective. Raises: StateError while a forward or backward runs.
        """
        self._wrapper._check_idle_here("reshard")
        if free_unsharded_flat_param and self.uses_sharded_strategy:
            self._wrapper._unit.core.release()


_SETTABLE = ("_orig_param_dtype",)


class Unshard:
    """The result of ``_unshard(async_op=True)``: a unit gathers in its own forward, so there is nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class TorchNames(Wrapper):
    """The wrapper's base with torch's private names."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            why = why_absent(name)
            if why is None:
                raise
        raise AttributeError(why)

    @property
    def _is_root(self) -> bool:
        """Whether this unit is the root, or the value that a program has set."""
        return self.check_is_root() if self._root_set is None else self._root_set

    @_is_root.setter
    def _is_root(self, is_root: bool | None) -> None:
        """Store the value for the getter alone. Programs set True to summon an inner unit, which works without it.

        None: forget the stored value. Raises: StateError for False on the root.
        """
        if is_root is not None and not is_root and self.check_is_root():
            raise StateError(f"{self._unit.name} is in no other unit, so it is the root: wrap its model to change that")
        self._root_set = None if is_root is None or bool(is_root) == self.check_is_root() else bool(is_root)

    @property
    def _all_handles(self) -> list[Handle]:
        """The handles of this unit and of the units below."""
        return [Handle(unit, flat_param) for unit in self.fsdp_modules(self) for flat_param in unit._unit.flat_params]

    @property
    def _handle(self) -> Handle | None:
        """The handle of the first flat parameter of this unit; None: it has none. ``_all_handles`` has the others."""
        return next((Handle(self, flat_param) for flat_param in self._unit.flat_params), None)

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return next((flat_param.flat for flat_param in self._unit.flat_params), None)

    @property
    def params(self) -> list[nn.Parameter]:
        """The flat parameters of this unit: as shards, or unsharded while the unit is gathered or summoned."""
        if self._unit.summoned is not None:
            return [flat_param.flat for flat_param in self._unit.flat_params]
        views = zip(self._unit.flat_params, self._unit.core.views(), strict=True)
        return [now(flat_param, flat_param.originals[0].plain(some[0]) if some else None) for flat_param, some in views]

    @property
    def _comm_hook(self) -> Any:
        """The communication hook of the tree; None: there is none."""
        return None if self._hooked is None else self._hooked.hook

    @_comm_hook.setter
    def _comm_hook(self, hook: Any) -> None:
        self._hooked = None if hook is None else Hooked(hook, self._comm_hook_state)

    @property
    def _comm_hook_state(self) -> Any:
        """The first argument of the communication hook."""
        return None if self._hooked is None else self._hooked.state

    @property
    def _has_params(self) -> bool:
        """Whether this unit has parameters, not counting units below."""
        return bool(self._unit.flat_params)

    @property
    def forward_prefetch(self) -> bool:
        """The constructor's argument ``forward_prefetch``."""
        return self._forward_prefetch

    _inter_node_pg = property(attrgetter("placement.replicate"))

    def _assert_state(self, state: TrainingState | Iterable[TrainingState]) -> None:
        """Raises: ValueError unless ``training_state`` is ``state``, or one of ``state``."""
        allowed = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state not in allowed:
            raise ValueError(f"expected {self._unit.name} to be in {allowed}, it is in {self.training_state}")

    def _unshard(self, async_op: bool = False) -> Unshard | None:
        """Do nothing. In torch it is a hint to gather early; here the forward gathers, one unit ahead where it can."""
        return Unshard() if async_op else None

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Return at once, as ``Unshard.wait`` does."""


for _name in ABSENT_NAMES:
    setattr(TorchNames, _name, Absent(_name))
