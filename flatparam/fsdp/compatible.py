"""What tools read of torch's FullyShardedDataParallel beside its documented API, computed from a unit of ours.

Trainers and torch's own tests reach for these names. They show a unit and change nothing: what only torch's design has
(a padded unsharded tensor, streams, a queue of events) has no name here.
Source: torch 2.13, ``torch/distributed/fsdp/_common_utils.py`` and ``_flat_param.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn

from ..common.torch_private import HandleShardingStrategy, HandleTrainingState, torch_flat_param
from .api import TrainingState
from .collectives import Hooked
from .described import now
from .errors import StateError
from .segment import Segment
from .wrapper import Wrapper


class Handle:
    """One flat parameter of a unit, by the names of torch's ``FlatParamHandle``. Read-only.

    ``flat_param``: this rank's shard ``[shard_numel]``, with the attributes of torch's ``FlatParameter`` that describe
    it; inside of ``summon_full_params`` it has all elements ``[numel]``.
    """

    def __init__(self, wrapper: Compatible, segment: Segment):
        self._wrapper, self._segment = wrapper, segment

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other._segment is self._segment

    def __hash__(self) -> int:
        return hash(id(self._segment))

    flat_param = property(attrgetter("_segment.flat"))
    uses_sharded_strategy = property(attrgetter("_segment.is_sharded"))
    sharded_grad = property(attrgetter("_segment.flat.grad"))
    process_group = property(attrgetter("_wrapper.process_group"))
    rank = property(attrgetter("_wrapper.rank"))
    world_size = property(attrgetter("_wrapper.world_size"))
    device = property(attrgetter("_segment.device"))
    _fully_sharded_module = property(attrgetter("_wrapper.module"))
    _use_orig_params = property(attrgetter("_segment.use_orig_params"))
    _offload_params = property(attrgetter("_wrapper.cpu_offload.offload_params"))
    _orig_param_dtype = property(attrgetter("_segment.flat.dtype"))
    is_sharded = torch_flat_param.FlatParamHandle.is_sharded
    shard_metadata = torch_flat_param.FlatParamHandle.shard_metadata

    @property
    def _sharding_strategy(self) -> HandleShardingStrategy:
        """torch's strategy of this name; of those that torch has not, the one whose shards lie alike."""
        like = HandleShardingStrategy.SHARD_GRAD_OP if self.uses_sharded_strategy else HandleShardingStrategy.NO_SHARD
        return HandleShardingStrategy.__members__.get(self._wrapper.sharding_strategy.name, like)

    @property
    def _fwd_bwd_param_dtype(self) -> torch.dtype:
        return self._segment.compute_dtype or self._segment.flat.dtype

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return self._segment.reduce_dtype or self._fwd_bwd_param_dtype

    @property
    def _training_state(self) -> HandleTrainingState:
        """Idle, summoned, or in the forward or the backward of the model."""
        if self._wrapper._unit.summoned is not None:
            return HandleTrainingState.SUMMON_FULL_PARAMS
        root = self._wrapper._unit.step.root
        states = {"FORWARD": HandleTrainingState.FORWARD, "BACKWARD": HandleTrainingState.BACKWARD_PRE}
        return states.get(root.state if root is not None else "", HandleTrainingState.IDLE)

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to move the shard alone. Raises: StateError, unless it is there already."""
        flat = self._segment.flat
        if flat.detach().to(*args, **kwargs).device != flat.device:
            raise StateError(
                f"flat_param_to() would move a shard of {self._wrapper._unit.name} from under its parameters: call "
                "model.to(device), which moves all of the model"
            )


class Unshard:
    """What ``_unshard(async_op=True)`` returns: a unit gathers in its own forward, so there is nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class Compatible(Wrapper):
    """The part of the wrapper that has torch's private names."""

    @property
    def _all_handles(self) -> list[Handle]:
        """Of this unit and of those below it."""
        return [Handle(unit, segment) for unit in self.fsdp_modules(self) for segment in unit._unit.segments]

    @property
    def _handle(self) -> Handle | None:
        """Of the first flat parameter of this unit; None if it has none. With ``segments`` there are others."""
        segments = self._unit.segments
        return Handle(self, segments[0]) if segments else None

    @property
    def _flat_param(self) -> nn.Parameter | None:
        segments = self._unit.segments
        return segments[0].flat if segments else None

    @property
    def params(self) -> list[nn.Parameter]:
        """The flat parameters of this unit: shards, and while they are gathered or summoned, what is unsharded."""
        if self._unit.summoned is not None:
            return [segment.flat for segment in self._unit.segments]
        views = zip(self._unit.segments, self._unit.step.views(), strict=True)
        return [now(segment, segment.originals[0].plain(some[0]) if some else None) for segment, some in views]

    @property
    def _comm_hook(self) -> Any:
        """The communication hook of the tree; None: there is none."""
        return None if self._hooked is None else self._hooked.hook

    @_comm_hook.setter
    def _comm_hook(self, hook: Any) -> None:
        self._hooked = None if hook is None else Hooked(hook, self._comm_hook_state)

    @property
    def _comm_hook_state(self) -> Any:
        """What the hook is called with."""
        return None if self._hooked is None else self._hooked.state

    @property
    def _has_params(self) -> bool:
        """Whether this unit has parameters of its own."""
        return bool(self._unit.segments)

    @property
    def forward_prefetch(self) -> bool:
        """As it was asked for."""
        return self._forward_prefetch

    _inter_node_pg = property(attrgetter("placement.replicate"))

    def _assert_state(self, state: TrainingState | Iterable[TrainingState]) -> None:
        """Raises: ValueError unless the unit is in this state, or in one of these."""
        allowed = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state not in allowed:
            raise ValueError(f"expected {self._unit.name} to be in {allowed}, it is in {self.training_state}")

    def _unshard(self, async_op: bool = False) -> Unshard | None:
        """A hint in torch. Here a unit gathers in its own forward, or one ahead by its own order."""
        return Unshard() if async_op else None

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Return at once, as ``Unshard.wait`` does."""
