"""Write users' changes of original parameters and gradients back into the flat parameter.

A parameter or gradient whose storage the user has changed is copied. A gradient that he has cleared or zeroed is
zeroed.

A pass in ``no_sync()`` leaves ``flat_param.grad`` unsharded. Without a ``zero_grad()`` the reduced shard of earlier
passes lies beside it, in ``_saved_grad_shard`` or ``_offloaded_grad``. torch's handle has two faults there. It adds
that shard to the next gradient even if the user has zeroed his. And for a single gradient that he sets to None it
zeroes the elements of another one.
"""

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from .. import _C
from ..common.tensors import has_memory, refuse_freed, same_storage
from ..common.torch_private import HandleTrainingState
from .views import Views


class Writeback(Views):
    """The part of FlatParamHandle that detects changed storages. One call to C scans all parameters of a unit."""

    # Offloading: (gradient of earlier backwards, version of `_cpu_grad` that held it). torch keeps only the last
    # gradient when gradients are accumulated outside of no_sync()
    _offloaded_grad: tuple[Tensor, int] | None = None
    _versions_left_by_backward: Sequence[int | None] = ()  # of gradients, after the last backward in no_sync()
    _put_aside = False  # this backward has moved the earlier gradient aside

    def _writeback_orig_params(self) -> bool:
        """Copy the user's replacements of original parameters and gradients into the flat parameter.

        Returns: whether a parameter was written back. The flat parameter keeps its device and dtype.
        Raises: RuntimeError naming a parameter whose shape has changed.
        """
        flat_param, skipped, sharded = self.flat_param, self._skipped_use_sharded_views, self.uses_sharded_strategy
        if sharded and not self.is_sharded(flat_param) and not skipped:
            return False
        owner = flat_param
        if skipped and sharded:
            owner = self._unsharded_flat_param_for_skipped_views
            if not has_memory(owner):
                raise self._wrong("the unsharded flat parameter was freed between forward and backward")
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

    def _changed(self, owner: Tensor) -> list[int]:
        """Return the indices of original parameters in the shard that may have changed; all indices without C loops.

        A whole parameter at another place of the owner's storage (transposed, exchanged) gets a copy as its data.
        """
        flat_param, infos = self.flat_param, self.flat_param._shard_param_infos
        skipped = self._skipped_use_sharded_views
        grad = None if skipped else flat_param.grad  # no gradients are shown while skipping
        params = flat_param._tensors if skipped else flat_param._params
        changed: list[int] | None = None if self._unit is None else self._unit.scan(params, owner, grad, infos)
        return [i for i, piece in enumerate(infos) if piece.in_shard] if changed is None else changed

    def _writeback_one(self, i: int, owner: Tensor) -> bool:
        flat_param = self.flat_param
        info, piece = flat_param._param_infos[i], flat_param._shard_param_infos[i]
        if not hasattr(info.module, info.param_name):
            return False  # it is deregistered, as during a state dict
        current = getattr(info.module, info.param_name)
        skipped = self._skipped_use_sharded_views
        param = flat_param._tensors[i] if skipped else flat_param._params[i]
        if not skipped and current is flat_param._tensors[i]:
            current = param  # forward's view, left by a backward that did not reach the parameters
        if skipped and param is None:
            raise self._wrong("the views of its forward are gone", i)
        moved = current is not param or not same_storage(param, owner)
        if skipped:
            if moved:
                raise self._wrong(
                    "FSDP does not support changing the parameters between forward and backward for "
                    f"{self._sharding_strategy}",
                    i,
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
                flat_param._is_grad_none_mask[i] = True  # the gradient is zeroed already
            elif flat_param.grad is not None:
                self._writeback_tensor(None, flat_param.grad, i, shape, offset, False)
            return
        flat_grad = flat_param.grad
        if flat_grad is not None and same_storage(param.grad, flat_grad):
            return
        if flat_grad is None:
            flat_grad = torch.zeros_like(flat_param)
        self._writeback_tensor(self._as_piece(param.grad, i), flat_grad, i, shape, offset, False)
        flat_param.grad = flat_grad

    def _as_piece(self, tensor: Tensor, i: int) -> Tensor:
        """Return the user's tensor for parameter ``i``, or for its gradient, 1-D in the order of the flat parameter.

        If the whole parameter is on this rank (one rank, NO_SHARD), a tensor of another shape with the same numel fits
        (pytorch#151223). Else the tensor is returned unchanged.
        """
        flat_param = self.flat_param
        refuse_freed(tensor, self._about("the new data or gradient", i))
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
            raise self._wrong(f"Expects a 1D expected shape but got {expected_shape}", tensor_index)
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
        refuse_freed(dst_tensor, self._about("the shard, or its gradient,", tensor_index))
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

    # Zeroed gradients

    def _drop_saved_grad_if_zeroed(self) -> None:
        """Drop the shard of earlier backwards, if the user has zeroed the gradient since a backward in ``no_sync()``.

        ``_post_backward_called`` is True after such a backward; a backward that reduces resets it at its end.
        """
        flat_param = self.flat_param
        if not (flat_param._post_backward_called and self._keeps_grad_of_earlier_backwards()):
            return
        grad, left = flat_param.grad, self._versions_left_by_backward  # () if the user drives the handle himself
        pairs = zip(self._versions_of_grads(), left, strict=False)
        changed = [i for i, (version, before) in enumerate(pairs) if version != before]
        if grad is None or (changed and _C.is_zeroed(grad)):
            self._offloaded_grad = None
            vars(flat_param).pop("_saved_grad_shard", None)
        elif changed and self._use_orig_params:
            views = list(self._get_unflat_views(grad))
            for i in changed:
                if _C.is_zeroed(views[i]):
                    self._zero_grad_of_earlier_backwards(i)

    def _give_back_unused_grad(self) -> None:
        """After a backward without a gradient, put the gradient of earlier backwards back into ``flat_param.grad``.

        torch leaves None, and loses the earlier gradient if this backward was to reduce one. With use_orig_params
        nothing is to be done: the original parameters have kept their gradients.
        """
        self._put_aside = False
        flat_param = self.flat_param
        if self._use_orig_params or flat_param.grad is not None:
            return
        if self._offloaded_grad is not None:
            flat_param.grad, self._offloaded_grad = flat_param._cpu_grad, None
        elif hasattr(flat_param, "_saved_grad_shard"):
            flat_param.grad = flat_param._saved_grad_shard
            del flat_param._saved_grad_shard

    def _keeps_grad_of_earlier_backwards(self) -> bool:
        return self._offloaded_grad is not None or hasattr(self.flat_param, "_saved_grad_shard")

    def _note_grads_left_by_backward(self) -> None:
        """After a backward, note the versions of the gradients: later versions are the user's changes.

        Zeros are marked, so that zeroing can be told from other changes: csrc/tensor/fp_gradients.h has the rule.
        """
        if self._training_state == HandleTrainingState.BACKWARD_POST and self._keeps_grad_of_earlier_backwards():
            grad = self.flat_param.grad
            if grad is not None and _C.is_plain(grad) and (self._use_orig_params or not self._is_reduced_next()):
                _C.mark_zeros(grad)
            self._versions_left_by_backward = self._versions_of_grads()

    def _versions_of_grads(self) -> list[int | None]:
        flat_param = self.flat_param
        shown = flat_param._params if self._use_orig_params else (flat_param,)
        return [None if param.grad is None else param.grad._version for param in shown]

    def _grad_is_unsharded(self) -> bool:
        """Whether ``flat_param.grad`` is an unsharded gradient of ``no_sync()``: of the whole unit, on every rank."""
        flat_param = self.flat_param
        if flat_param.grad is None or not self.uses_sharded_strategy or self._skipped_use_sharded_views:
            return False
        size = flat_param._unpadded_unsharded_size
        is_whole: bool = flat_param.grad.shape == size
        return is_whole and size != flat_param._sharded_size  # equal sizes: one rank has the whole

    def _zero_dropped_grads(self) -> None:
        """Zero the parts of the unsharded gradient whose ``.grad`` the user has set to None, in the shard or not.

        torch's handle zeroes at the parameter's offset in the *shard*: in the unsharded gradient another parameter.
        """
        flat_param = self.flat_param
        dropped = [i for i, param in enumerate(flat_param._params) if param.grad is None]
        views = list(self._get_unflat_views(flat_param.grad)) if dropped else []
        for i in dropped:
            views[i].data.zero_()  # no change of a user's: the versions of the other gradients stay
            self._zero_grad_of_earlier_backwards(i)

    def _zero_grad_of_earlier_backwards(self, i: int) -> None:
        """Zero parameter ``i`` in the reduced gradient of earlier backwards, which lies beside an unsharded one."""
        piece = self.flat_param._shard_param_infos[i]
        offloaded = self._offloaded_grad
        for shard in (getattr(self.flat_param, "_saved_grad_shard", None), None if offloaded is None else offloaded[0]):
            if shard is not None and piece.in_shard:
                shard[piece.offset_in_shard : piece.offset_in_shard + piece.numel_in_shard].zero_()
