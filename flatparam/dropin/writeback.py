"""Writeback: parameters and gradients whose storage the user changed are copied into the flat parameter."""

import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from .. import _C
from ..common.storage import has_memory, same_storage
from .cleared_grads import Zeroing


class Writeback(Zeroing):
    """The part of FlatParamHandle that notices changed storages. The look at each parameter is one C call a unit."""

    def _writeback_orig_params(self) -> bool:
        """Copy into the flat parameter what the user put in place of an original parameter or its gradient.

        Returns whether a parameter was written back. The flat parameter keeps its device and dtype.
        Source: torch 2.13 ``FlatParamHandle._writeback_orig_params``.
        Raises: RuntimeError naming the parameter if its shape no longer is the expected one.
        """
        flat_param, skipped, sharded = self.flat_param, self._skipped_use_sharded_views, self.uses_sharded_strategy
        if sharded and not self.is_sharded(flat_param) and not skipped:
            return False
        owner = flat_param
        if skipped and sharded:
            owner = self._unsharded_flat_param_for_skipped_views
            if not has_memory(owner):
                raise AssertionError(self._about("the unsharded flat parameter was freed between forward and backward"))
        if self._grad_is_unsharded():
            with torch.no_grad():
                self._zero_dropped_grads()
        changed, wroteback = self._changed(owner), False
        if changed:
            with torch.no_grad():
                for i in changed:
                    wroteback |= self._writeback_one(i, owner)
        for info in flat_param._shared_param_infos:
            if getattr(info.module, info.param_name) is not getattr(info.prim_module, info.prim_param_name):
                raise NotImplementedError(
                    f"Changing shared parameters is not supported yet: `{info.module_name}.{info.param_name}` no "
                    f"longer is `{info.prim_module_name}.{info.prim_param_name}`"
                )
        return wroteback

    def _flat_grad_for_writeback(self) -> Tensor | None:
        if self.uses_sharded_strategy or not self._offload_params:
            grad: Tensor | None = self.flat_param.grad
        else:
            grad = self.flat_param._cpu_grad
        return grad

    def _changed(self, owner: Tensor) -> list[int]:
        """Indices of the original parameters in the shard that need a closer look; all of them without C loops.

        Whole ones that lie elsewhere in the owner's storage (transposed, exchanged) are given a copy of their own.
        """
        flat_param, infos = self.flat_param, self.flat_param._shard_param_infos
        skipped = self._skipped_use_sharded_views
        grad = None if skipped else self._flat_grad_for_writeback()  # no gradients are shown while skipping
        if self._unit is None or not _C.is_plain(owner, *(() if grad is None else (grad,))):
            return [i for i, piece in enumerate(infos) if piece.in_shard]
        params = flat_param._tensors if skipped else flat_param._params
        changed: list[int] = self._unit.scan(params, owner, grad, infos)
        return changed

    def _writeback_one(self, i: int, owner: Tensor) -> bool:
        flat_param = self.flat_param
        info, piece = flat_param._param_infos[i], flat_param._shard_param_infos[i]
        if not hasattr(info.module, info.param_name):
            return False  # deregistered, as during a state dict
        current = getattr(info.module, info.param_name)
        skipped = self._skipped_use_sharded_views
        param = flat_param._tensors[i] if skipped else flat_param._params[i]
        if not skipped and current is flat_param._tensors[i]:
            current = param  # forward's own view, left by a backward that did not come to the parameters
        if skipped and param is None:
            raise AssertionError(self._about("the views of its forward are gone", i))
        moved = current is not param or not same_storage(param, owner)
        if skipped:
            if moved:
                raise AssertionError(
                    self._about(
                        "FSDP does not support changing the parameters between forward and backward for "
                        f"{self._sharding_strategy}",
                        i,
                    )
                )
            return False
        if current is not param:
            param = flat_param._params[i] = current
        shape = torch.Size([piece.numel_in_shard])
        if moved:
            self._writeback_tensor(self._as_piece(param, i), flat_param, i, shape, piece.offset_in_shard, True)
        self._writeback_grad(i, param, shape, piece.offset_in_shard)
        return moved

    def _writeback_grad(self, i: int, param: nn.Parameter, shape: torch.Size, offset: int) -> None:
        flat_param = self.flat_param
        if param.grad is None:
            if self._grad_is_unsharded():
                flat_param._is_grad_none_mask[i] = True  # as below; the zeros are there
            elif flat_param.grad is not None:
                self._writeback_tensor(None, flat_param.grad, i, shape, offset, False)
            return
        if not self.uses_sharded_strategy and self._offload_params:
            return  # `_cpu_grad` owns the memory all the time
        flat_grad = self._flat_grad_for_writeback()
        if flat_grad is not None and same_storage(param.grad, flat_grad):
            return
        if flat_grad is None:
            flat_grad = torch.zeros_like(flat_param)
        self._writeback_tensor(self._as_piece(param.grad, i), flat_grad, i, shape, offset, False)
        flat_param.grad = flat_grad

    def _as_piece(self, tensor: Tensor, i: int) -> Tensor:
        """What the user put in place of parameter ``i`` (or its gradient), flat, in the order of the flat parameter.

        Where all of the parameter is here (one rank, NO_SHARD) a tensor of another shape fits if its numel does:
        pytorch#151223. Else it is returned as it is.
        """
        flat_param = self.flat_param
        numel, shape = flat_param._numels[i], flat_param._shapes[i]
        is_flat = tensor.dim() == 1 and self.uses_sharded_strategy
        if is_flat or tensor.numel() != numel or flat_param._shard_param_infos[i].numel_in_shard != numel:
            return tensor if self.uses_sharded_strategy else tensor.reshape(-1)
        tensor = tensor.reshape(shape)
        if flat_param._contiguities[i]:
            return tensor.reshape(-1)
        strided = torch.empty_strided(shape, flat_param._strides[i], dtype=tensor.dtype, device=tensor.device)
        return strided.copy_(tensor).as_strided((numel,), (1,))

    def _writeback_tensor(
        self,
        src_tensor: Tensor | None,
        dst_tensor: Tensor,
        tensor_index: int,
        expected_shape: torch.Size,
        offset: int,
        is_param: bool,  # else a gradient
    ) -> None:
        """Copy ``src_tensor`` (zeros if None) to elements ``[offset, offset + numel)`` of ``dst_tensor``.

        Shapes: ``expected_shape`` is 1-D; ``src_tensor`` must have it. Raises: RuntimeError naming the parameter.
        """
        if len(expected_shape) != 1:
            raise AssertionError(self._about(f"Expects a 1D expected shape but got {expected_shape}", tensor_index))
        what = "parameter" if is_param else "gradient"
        if self._debug_level == dist.DebugLevel.INFO:
            shape = None if src_tensor is None else src_tensor.shape
            device = None if src_tensor is None else src_tensor.device
            warnings.warn(
                f"[Rank {self.rank}] {what.capitalize()} needs writeback in {self._training_state}: "
                f"{self.flat_param._fqns[tensor_index]}\n"
                f"expected shape={expected_shape} shape={shape} expected device={dst_tensor.device} device={device}",
                stacklevel=2,
            )
        target = dst_tensor[offset : offset + expected_shape.numel()]
        if src_tensor is None:
            target.zero_()
            self.flat_param._is_grad_none_mask[tensor_index] = True
            return
        if src_tensor.shape != expected_shape:
            raise RuntimeError(
                f"Cannot writeback when the {what} shape changes\nExpects {expected_shape} but got {src_tensor.shape} "
                f"for `{self.flat_param._fqns[tensor_index]}`; assign a tensor of the expected shape, or change the "
                "parameter inside summon_full_params()"
            )
        target.copy_(src_tensor)
