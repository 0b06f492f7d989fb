"""What every part of the LayerZero handle builds on: its groups, dtypes and state."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from .. import _C
from ..common.storage import is_allocated
from ..dropin.handle import FlatParamHandle as DropIn
from .states import BEFORE, FORWARD, IDLE, IN_BACKWARD, SUMMON_FULL_PARAMS, state_of


class Base(DropIn):
    """The drop-in's handle over the zero1 group, with the reference's names for groups, dtypes and states."""

    zero1_process_group: dist.ProcessGroup
    zero3_process_group: dist.ProcessGroup
    zero1_group_rank: int
    zero1_world_size: int
    zero3_group_rank: int
    zero3_group_size: int
    _offload_grads: bool
    _layer_zero_state = IDLE

    @property
    def full_prec_dtype(self) -> torch.dtype:
        """Of masters, accumulated and reduced gradients: the parameters' own, and fp32 at least."""
        return torch.promote_types(self._orig_param_dtype, torch.float32)

    @property
    def param_dtype(self) -> torch.dtype:
        """Of forward and backward, and of what is all-gathered."""
        return self._fwd_bwd_param_dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of the reduce-scatter."""
        return self._reduce_dtype

    def _init_param_reduce_dtypes(
        self, mp_param_dtype: torch.dtype | None, mp_reduce_dtype: torch.dtype | None
    ) -> None:
        super()._init_param_reduce_dtypes(mp_param_dtype, mp_reduce_dtype)
        self._reduce_dtype = mp_reduce_dtype or self.full_prec_dtype

    @property
    def _uses_param_mixed_precision(self) -> bool:
        return self._fwd_bwd_param_dtype != self.full_prec_dtype

    @property
    def _force_full_precision(self) -> bool:
        return self._layer_zero_state is SUMMON_FULL_PARAMS

    @property
    def _zero3_module(self) -> nn.Module:
        return self._fully_sharded_module

    @property
    def _has_zero3_copy(self) -> bool:
        """Whether there is a second shard: over all ranks the master is it, over one the unsharded parameter."""
        return 1 < self.zero3_group_size < self.zero1_world_size

    @property
    def _stays_unsharded(self) -> bool:
        return self.zero3_group_size == 1

    # States

    @property
    def _training_state(self) -> Any:
        """Raises when set: ValueError for no state, RuntimeError if it may not follow that which it is in."""
        return self._layer_zero_state

    @_training_state.setter
    def _training_state(self, value: Any) -> None:
        state, before = state_of(value), self._layer_zero_state
        if before not in BEFORE[state]:
            broken_off = before in IN_BACKWARD
            if not (state is FORWARD and broken_off and torch._C._current_graph_task_id() != -1):
                raise RuntimeError(
                    f"{state.name} is not possible in {before.name}, only in "
                    f"{', '.join(other.name for other in BEFORE[state])}, for {self._names()}"
                    + (
                        ": its last backward was not ended by IDLE. Where an exception ended it, call recover() of "
                        "every handle on every rank, and run all micro-batches of the step again"
                        if broken_off
                        else ": set IDLE first"
                    )
                )
        self._layer_zero_state = state
        if state is IDLE and before in IN_BACKWARD:
            self._leave_backward()

    def _leave_backward(self) -> None:
        raise NotImplementedError

    # Checks, as the reference has them

    def _check_padded_unsharded(self, tensor: Tensor) -> None:
        self._check_size(tensor, "unsharded and padded", self.flat_param._padded_unsharded_size)

    @staticmethod
    def _is_storage_freed(tensor: Tensor | None) -> bool:
        return tensor is not None and not is_allocated(tensor)

    def _versions(self, tensors: Any) -> tuple[int, int, int]:
        """Sums of the versions of tensors and of their gradients, and how many have one: ``_C.versions`` of any."""
        found = _C.versions(tensors)
        if found is None:
            grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
            found = sum(tensor._version for tensor in tensors), len(grads), sum(grad._version for grad in grads)
        return found
