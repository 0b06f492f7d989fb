"""What tools read of torch's FullyShardedDataParallel beside its documented API, computed from a unit of ours.

Trainers and torch's own tests reach for these names. They show a unit and change nothing: what only torch's design has
(a padded unsharded tensor, streams, a queue of events) has no name here.
Source: torch 2.13, ``torch/distributed/fsdp/_common_utils.py`` and ``_flat_param.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from ..common.torch_private import FlatParamShardMetadata, HandleShardingStrategy, HandleTrainingState
from .api import TrainingState
from .collectives import Hooked
from .described import now
from .errors import StateError
from .originals import Original
from .segment import Segment
from .wrapper import Wrapper


class Handle:
    """One flat parameter of a unit, by the names of torch's ``FlatParamHandle``. Read-only."""

    def __init__(self, wrapper: Compatible, segment: Segment):
        self._wrapper, self._segment = wrapper, segment

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other._segment is self._segment

    def __hash__(self) -> int:
        return hash(id(self._segment))

    @property
    def flat_param(self) -> nn.Parameter:
        """This rank's shard ``[shard_numel]``, with the attributes of torch's ``FlatParameter`` that describe it.

        Inside of ``summon_full_params`` it has all elements ``[numel]``.
        """
        return self._segment.flat

    @property
    def uses_sharded_strategy(self) -> bool:
        """Whether each rank keeps a part of the parameters."""
        return self._segment.is_sharded

    @property
    def sharded_grad(self) -> Tensor | None:
        """The reduced gradient of the shard; None if there is none."""
        return self._segment.flat.grad

    @property
    def process_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._wrapper.process_group
        return group

    @property
    def rank(self) -> int:
        return self._wrapper.rank

    @property
    def world_size(self) -> int:
        return self._wrapper.world_size

    @property
    def device(self) -> torch.device:
        return self._segment.device

    @property
    def _fully_sharded_module(self) -> nn.Module:
        return self._wrapper.module

    @property
    def _use_orig_params(self) -> bool:
        return self._segment.use_orig_params

    @property
    def _offload_params(self) -> bool:
        return self._wrapper.cpu_offload.offload_params

    @property
    def _sharding_strategy(self) -> HandleShardingStrategy:
        """torch's strategy of this name; of those that torch has not, the one whose shards lie alike."""
        name = self._wrapper.sharding_strategy.name
        known: Any = getattr(HandleShardingStrategy, name, None)
        if known is None:
            known = (
                HandleShardingStrategy.SHARD_GRAD_OP if self.uses_sharded_strategy else HandleShardingStrategy.NO_SHARD
            )
        strategy: HandleShardingStrategy = known
        return strategy

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        return self._segment.flat.dtype

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

    def is_sharded(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` has the size of a shard that is less than the whole."""
        return self.uses_sharded_strategy and tensor.size() == torch.Size([self._segment.layout.shard_numel])

    def shard_metadata(self) -> FlatParamShardMetadata:
        """What this rank has: names, shapes, strides, contiguities, numels, and (first, last) elements of each."""
        pieces = zip(self._segment.originals, self._segment.pieces, strict=True)
        has: list[tuple[Original, Any]] = [(original, piece) for original, piece in pieces if piece.numel_in_shard]
        return FlatParamShardMetadata(
            tuple(original.fqn for original, _ in has),
            tuple(original.shape for original, _ in has),
            tuple(original.stride for original, _ in has),
            tuple(original.contiguous for original, _ in has),
            tuple(original.shape.numel() for original, _ in has),
            tuple((piece.intra_param_start_idx, piece.intra_param_end_idx) for _, piece in has),
        )

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
        handle = self._handle
        return None if handle is None else handle.flat_param

    @property
    def params(self) -> list[nn.Parameter]:
        """The flat parameters of this unit: shards, and while they are gathered or summoned, what is unsharded."""
        if self._unit.summoned is not None:
            return [segment.flat for segment in self._unit.segments]
        views = zip(self._unit.segments, self._unit.step.views(), strict=True)
        return [now(segment, some[0] if some else None) for segment, some in views]

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

    @property
    def _inter_node_pg(self) -> dist.ProcessGroup | None:
        """The group that reduces between replicas of the shards."""
        return self.placement.replicate

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
