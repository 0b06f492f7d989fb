"""LayerZero's FlatParamHandle: one unit, sharded over two groups, driven call by call without a wrapper."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .. import _C
from ..common.tensors import in_storage_order
from ..common.torch_private import FlatParameter
from ..dropin.base import TORCH_HANDLE
from ..dropin.handle import FlatParamHandle as DropInHandle
from ._base import owners
from ._gradients import Gradients
from .metadata import FlatParamShardMetadata


class FlatParamHandle(Gradients):
    """Owns the flat parameter of one unit: masters sharded over the zero1 group, zero3 shards over the zero3 group.

    Args:
        params: the parameters to flatten: at least one, all in ``zero3_module``'s tree, real, floating-point, of one
            dtype and device, in no other handle.
        zero3_module: the module whose forward needs them.
        device: the device of computation and communication.
        mp_param_dtype: dtype of forward, backward and all-gathers; None for the parameters' own.
        mp_reduce_dtype: dtype of the reduce-scatter; None for the masters' dtype: the parameters', at least float32.
        zero3_process_group: the ranks over which forward and backward gather; disjoint groups of one size.
        zero1_process_group: the ranks that share masters, gradients and optimizer state; it contains the zero3 group.
        offload_grads: keep the sum of the micro-batches in pinned host memory, ``4 * N`` bytes.

    All ranks of ``zero1_process_group`` must construct it with equal arguments. Shapes: ``flat_param`` is 1-D: N
    elements unsharded, N / ranks of zero1 sharded; `_parameters.py` has the other tensors.
    Raises: ValueError or TypeError on all ranks alike, in the cases that docs/layerzero.md lists.
    Source: MindSpeed's LayerZeRO, ``zero3/flat_param.py``: its names and order of calls. docs/layerzero.md lists the
    differences.
    """

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Call ``flat_param.to(...)``, before ``shard()``. Raises: RuntimeError after it: the master would not move."""
        if hasattr(self.flat_param, "_zero1_shard"):
            raise RuntimeError(
                f"{self._names()} is sharded already: move or convert the module before its handle is constructed"
            )
        self.flat_param.data = self.flat_param.to(*args, **kwargs)

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Describe the elements of each original parameter in the zero1 shard; leave out parameters without any."""
        flat = self.flat_param
        fields: Any = _C.held(flat._shard_param_infos, flat._fqns, flat._shapes, flat._numels)
        return FlatParamShardMetadata(*fields)

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(self._no_copies)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(self._no_copies)

    @property
    def _no_copies(self) -> str:
        return (
            f"{self._names()} cannot be copied or pickled: it belongs to its process groups; copy the module before it "
            "is flattened, or save the parameters"
        )

    def __repr__(self) -> str:
        return f"layer_zero.FlatParamHandle(flat_param.fqns={self.flat_param._fqns})"

    # Methods that the drop-in's handle has, too

    def flatten_tensors(self, tensors: list[Tensor], aligned_numel: int, div: int | None = None) -> Tensor:
        """Concatenate ``tensors``, padded as the flat parameter if ``aligned_numel`` > 0. ``div``: ranks of zero1."""
        if div not in (None, self.zero1_world_size):
            raise ValueError(self._about(f"expected div to be {self.zero1_world_size}, the ranks of zero1, got {div}"))
        if not tensors:
            raise ValueError("Expects non-empty `tensors`")
        self._validate_tensors_to_flatten(tensors)
        layout = _C.Layout([tensor.numel() for tensor in tensors], self.zero1_world_size, 1, aligned_numel)
        return layout.flatten([in_storage_order(tensor) for tensor in tensors], 0.0, 0, layout.numel)

    def flatten_tensors_into_flat_param(
        self, tensors: list[Tensor], aligned_numel: int, requires_grad: bool, div: int | None = None
    ) -> FlatParameter:
        """Concatenate ``tensors`` into a new flat parameter without metadata."""
        return FlatParameter(self.flatten_tensors(tensors, aligned_numel, div), requires_grad=requires_grad)

    _get_unflat_views = DropInHandle._get_unflat_views_aligned
    _use_unsharded_grad_views = TORCH_HANDLE._use_unsharded_grad_views

    def _deregister_orig_params(self) -> None:
        """Remove the original parameters from their modules. Users' replacements are written back first."""
        self._reset_flat_param_grad_info_if_needed()
        self._write_back()
        TORCH_HANDLE._deregister_orig_params(self)

    # Looking things up

    def _named_module_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(FQN, the module's current attribute)`` for each original parameter."""
        for fqn, info in zip(self.flat_param._fqns, self.flat_param._param_infos, strict=True):
            yield fqn, getattr(info.module, info.param_name)

    def _get_orig_param_by_name(self, total_name: str) -> nn.Parameter | None:
        """Return the original parameter with the FQN ``total_name``, or None."""
        return dict(zip(self.flat_param._fqns, self.flat_param._params, strict=True)).get(total_name)

    def _get_module_param_by_name(self, total_name: str) -> Tensor | None:
        """Return the module's current attribute for the FQN ``total_name``, or None."""
        return dict(self._named_module_parameters()).get(total_name)

    def _shard_grad_list(self) -> Iterator[Tensor | None]:
        """Return an iterator over the gradients of the original parameters."""
        return (param.grad for param in self.flat_param._params)


def owner_of(param: Tensor) -> FlatParamHandle | None:
    """Return the handle that has flattened ``param``, or None."""
    return owners.get(id(param))


# Methods that torch's handle has, too. They read attributes that a LayerZero handle has under the same names
for _name in (
    *("is_sharded", "param_module_names", "shared_param_module_names", "unflatten_as_params", "_fqns_in_shard"),
    *("_get_flat_param_offsets", "_get_modules", "_get_shard", "_get_unflat_views_aligned", "_get_unpadded_shard"),
    *("_get_unflat_views_unaligned", "_skipped_use_sharded_views", "_validate_tensors_to_flatten"),
):
    setattr(FlatParamHandle, _name, inspect.getattr_static(DropInHandle, _name))
