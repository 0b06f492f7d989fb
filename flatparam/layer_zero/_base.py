"""The base of all parts of the LayerZero handle: its flat parameter, groups, dtypes and state."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from .. import _C
from ..common.tensors import free, is_allocated
from ..dropin import gathering
from ..dropin.base import Driven
from ..dropin.handle import FlatParamHandle as FlatParam


class Base(_C.HandleSteps, Driven):
    """Owns ``_flat``, the drop-in's handle over the zero1 group: it flattens, makes views, and knows the layout.

    The names of groups, dtypes and states are the reference's.
    """

    zero1_process_group: dist.ProcessGroup
    zero3_process_group: dist.ProcessGroup
    zero1_group_rank: int
    zero1_world_size: int
    zero3_group_rank: int
    zero3_group_size: int
    device: torch.device
    _zero1_gather: _C.Gather | None  # None: use torch.distributed's functions (a user may have replaced them)
    _zero3_gather: _C.Gather | None
    _device_handle: Any  # a _FSDPDeviceHandle
    _flat: FlatParam
    _zero3_module: nn.Module
    _orig_param_dtype: torch.dtype
    _fwd_bwd_param_dtype: torch.dtype
    _reduce_dtype: torch.dtype
    _offload_grads: bool

    # Attributes of the driving runtime
    _ran_pre_backward_hook = False
    _ran_post_backward_hook = False
    _grad_synced = False
    enter_backward = False
    prev_iter_synced = True

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

    def _names(self) -> str:
        return self._flat._names()

    def _about(self, message: str) -> str:
        return self._flat._about(message)

    def _free(self, tensor: Tensor) -> None:
        free(tensor, self._flat._freed_message)

    def _free_after_use(self, tensor: Tensor) -> None:
        """Free ``tensor`` when the current stream has done the work that it has now."""
        if self._is_on_host:
            self._free(tensor)
        else:
            gathering.free_after_use(self._flat, tensor)

    # Checks with the reference's names

    def _check_on_compute_device(self, tensor: Tensor) -> None:
        if tensor.device != self.device:
            self._flat._check_on_compute_device(tensor)

    def _check_padded_unsharded(self, tensor: Tensor) -> None:
        self._flat._check_size(tensor, "unsharded and padded", self.flat_param._padded_unsharded_size)

    @staticmethod
    def _is_storage_freed(tensor: Tensor | None) -> bool:
        return tensor is not None and not is_allocated(tensor)

    def _versions(self) -> tuple[int, int, int]:
        """Return counts that change with users' writes.

        ``(sum of versions of parameters and masters, number of gradients, sum of their versions)``.
        """
        flat_param = self.flat_param
        params, masters = flat_param._params, (flat_param, flat_param._zero1_shard)
        found = _C.versions(params, *masters)
        if found is None:
            grads = [param.grad for param in params if param.grad is not None]
            values = sum(tensor._version for tensor in (*params, *masters))
            found = values, len(grads), sum(grad._version for grad in grads)
        return found
