"""The base of all parts of the LayerZero handle: its flat parameter, groups, dtypes and state."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from ..common.tensors import free, is_allocated
from ..dropin.base import Driven
from ..dropin.handle import FlatParamHandle as FlatParam
from .states import IDLE, HandleTrainingState


class Base(Driven):
    """Owns ``_flat``, the drop-in's handle over the zero1 group: it flattens, and knows the layout.

    ``_core`` is the runtime's unit of the same parameters, without hooks: it gathers, frees, and shows views and
    gradients, when the handle says so. The names of groups, dtypes and states are the reference's.
    """

    flat_param: Any  # a FlatParameter: ``_flat``'s
    _core: Any = None  # a _C.Unit, from shard() on
    _state: HandleTrainingState = IDLE

    zero1_process_group: dist.ProcessGroup
    zero3_process_group: dist.ProcessGroup
    zero1_group_rank: int
    zero1_world_size: int
    zero3_group_rank: int
    zero3_group_size: int
    device: torch.device
    _device_handle: Any  # a _FSDPDeviceHandle
    _flat: FlatParam
    _zero3_module: nn.Module
    _orig_param_dtype: torch.dtype
    _fwd_bwd_param_dtype: torch.dtype
    _reduce_dtype: torch.dtype
    _offload_grads: bool
    _is_on_host: bool
    _has_zero3_copy: bool  # the zero3 group is smaller than the zero1 group, and has more than one rank
    _stays_unsharded: bool  # the zero3 group has one rank

    # Drivers may set the first two, as in the reference
    _needs_param_sync = True
    _param_synced = False
    _is_bound = False  # init_flat_param_attributes() has run
    _is_unsharded = False  # modules have views, or whole parameters
    _is_whole = False  # they have whole parameters
    _gathered = False  # the unsharded tensor has the values of some gather
    _confirmed = False  # ranks have agreed that these are current, for this forward
    _is_gathering = False  # nobody has waited for the last gather yet
    _was_given_up = False  # a wait was interrupted
    _is_from_masters = False  # the last gather was from the masters
    _in_backward = False  # a backward has begun to add to the prepared gradient
    _is_shown = False  # .grad shows the sum
    _prepared = -1  # the version of the prepared gradient when it was set to zeros; -1: none is prepared
    _agreed: bool | None = None  # what ranks have agreed on staleness, for the next unshard

    # Attributes of the driving runtime
    _ran_pre_backward_hook = False
    _ran_post_backward_hook = False
    _grad_synced = False
    enter_backward = False
    prev_iter_synced = True
    _ag_handle: Any = None

    @property
    def full_prec_dtype(self) -> torch.dtype:
        """The dtype of masters, accumulated and reduced gradients: the parameters' dtype, at least float32."""
        return torch.promote_types(self._orig_param_dtype, torch.float32)

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of forward, backward and all-gathers."""
        return self._fwd_bwd_param_dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of the reduce-scatter."""
        return self._reduce_dtype

    def _set_state(self, state: HandleTrainingState) -> None:
        flat: Any = self._flat
        self._state = flat._state = state

    def _names(self) -> str:
        return self._flat._names()

    def _about(self, message: str) -> str:
        return self._flat._about(message)

    def _free(self, tensor: Tensor) -> None:
        free(tensor, self._flat._freed_message)

    # Checks with the reference's names

    def _check_on_compute_device(self, tensor: Tensor) -> None:
        if tensor.device != self.device:
            self._flat._check_on_compute_device(tensor)

    def _check_padded_unsharded(self, tensor: Tensor) -> None:
        self._flat._check_size(tensor, "unsharded and padded", self.flat_param._padded_unsharded_size)

    @staticmethod
    def _is_storage_freed(tensor: Tensor | None) -> bool:
        return tensor is not None and not is_allocated(tensor)
