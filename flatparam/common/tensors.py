"""How tensors lie in memory: whether they can be flattened, and the order of their elements if they are.

Storages of flat tensors are allocated and freed in place, so that views made before stay valid objects.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from .. import _C
from .torch_private import (
    FlatParameter,
    _alloc_storage,
    _detach_if_needed,
    _free_storage,
    _same_storage,
    _same_storage_size,
    _storage_size_allocated,
)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill one run of memory, each once, in some order of its dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def is_truly_contiguous(tensor: Tensor) -> bool:
    """torch's ``_is_truly_contiguous`` (a 1x1 channels_last weight is not), defined for 0-dim tensors too."""
    return tensor.is_contiguous() and (tensor.dim() == 0 or tensor.stride(-1) == 1)


def in_storage_order(tensor: Tensor) -> Tensor:
    """The elements as a 1-D tensor: in memory order if dense, else row-major; a view where that is possible."""
    tensor = _detach_if_needed(tensor)
    if is_truly_contiguous(tensor) or not is_dense(tensor):
        return tensor.flatten()
    return tensor.as_strided((tensor.numel(),), (1,))


def why_not_dense(tensor: Tensor, what: str) -> str | None:
    """Why ``tensor``, ``what`` in words, is no run of memory that can be flattened; None: it is one."""
    if isinstance(tensor, FlatParameter):
        return f"Cannot flatten a `FlatParameter`: {what} is flattened already"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return (
            f"Cannot flatten sparse or quantized tensors: {what} has layout {tensor.layout}; convert it to a dense "
            "floating-point tensor, or ignore it (ignored_states)"
        )
    return None


def has_gradients(dtype: torch.dtype) -> bool:
    """Whether tensors of ``dtype`` can require grad and be reduced; else they are moved as bytes."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def as_sent(tensor: Tensor) -> Tensor:
    """``tensor``, contiguous and 1-D, as collectives move it: as bytes where not every backend knows its dtype."""
    return tensor if has_gradients(tensor.dtype) else tensor.view(torch.uint8)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of ``shape``, as ``Tensor.stride()`` gives them: an extent of 0 counts as 1."""
    return tuple(math.prod(max(extent, 1) for extent in shape[d + 1 :]) for d in range(len(shape)))


def check_memory(names: list[str], tensors: list[Tensor]) -> None:
    """Refuse parameters that share elements of memory: flattened apart, they would not train as one; and freed ones.

    Raises: ValueError naming both, or the one. One Parameter under several names is no such case.
    """
    if _C.survey(tensors) is not None or not _C.is_plain(*tensors):
        return
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size(), i)
        for i, tensor in enumerate(tensors)
        if (span := _span(tensor)) > 0
    )
    for i, tensor in enumerate(tensors):
        if _C.lacks_memory(tensor):
            raise ValueError(
                f"parameter `{names[i]}` has no memory for its shape {tuple(tensor.shape)}: its storage was freed or "
                "resized"
            )
        if not is_dense(tensor) and _elements(tensor).unique().numel() < tensor.numel():
            raise ValueError(
                f"parameter `{names[i]}` has elements that share memory (expanded?): shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}; make it a tensor of its own with .clone()"
            )
    open_spans: list[tuple[int, int]] = []  # (end, parameter) of those that reach beyond the start of the next
    for start, stop, i in spans:
        open_spans = [span for span in open_spans if span[0] > start]
        for _, other in open_spans:
            if _share_elements(tensors[other], tensors[i]):
                raise ValueError(
                    f"parameters `{names[other]}` and `{names[i]}` overlap in memory without being one Parameter: "
                    "give them memory of their own with .clone(), or register one Parameter under both names"
                )
        open_spans.append((stop, i))


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from the first to the last of a tensor that has some, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _span(tensor: Tensor) -> int:
    """The same of any tensor."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.numel()
    return span_of(tensor.shape, tensor.stride())


def _elements(tensor: Tensor) -> Tensor:
    """The address of every element of ``tensor``, in elements of its dtype."""
    first = tensor.data_ptr() // tensor.element_size()
    return torch.arange(first, first + _span(tensor)).as_strided(tensor.shape, tensor.stride()).reshape(-1)


def _share_elements(a: Tensor, b: Tensor) -> bool:
    if is_dense(a) and is_dense(b):
        return True  # their spans meet, and have no holes
    return bool(torch.isin(_elements(a), _elements(b)).any())


def allocate(tensor: Tensor, size: torch.Size) -> bool:
    """Give ``tensor``'s freed storage room for ``size`` elements. False: it is plain, and has that already."""
    given = _C.allocate(tensor, size.numel())
    if given is None:
        _alloc_storage(tensor, size)
        return True
    return given


def free(tensor: Tensor, reason: str | None = None, keeps_size: bool = False) -> None:
    """Free ``tensor``'s storage.

    ``reason`` is what a RuntimeError says when the freed data is read or written. With ``keeps_size`` it also does for
    a view that is made of it then; the storage goes on to say the size that it had.
    """
    if not _C.free(tensor, reason, keeps_size):
        _free_storage(tensor)


def is_allocated(tensor: Tensor) -> bool:
    """Whether ``tensor``'s storage has exactly the room that it needs."""
    if _C.is_plain_tensor(tensor):
        return _C.storage_numel(tensor) == tensor.numel()
    return bool(_same_storage_size(tensor, tensor.numel()))


def refuse_freed(tensor: Any, what: str) -> None:
    """Before ``tensor`` is read or written, which would go beyond a storage that is too small: torch does not look.

    Raises: ValueError that begins with ``what`` if a user has freed or resized its storage.
    """
    if _C.lacks_memory(tensor):
        raise ValueError(
            f"the storage of {what} was freed or resized outside of flatparam, and its values are lost. Leave storages "
            "as they are"
        )


def has_memory(tensor: Tensor) -> bool:
    """Whether ``tensor``'s storage has any memory."""
    return _C.storage_numel(tensor) > 0 if _C.is_plain_tensor(tensor) else _storage_size_allocated(tensor)


def pinned(tensor: Tensor) -> Tensor:
    """A copy of a CPU ``tensor``, in pinned memory where the host has an accelerator."""
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor.clone()


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether both use the same memory; two freed storages count as the same, as for torch's ``_same_storage``."""
    if _C.is_plain_tensor(a) and _C.is_plain_tensor(b):
        return _C.same_storage(a, b)
    return bool(_same_storage(a, b))


def is_at(value: Tensor, place: Tensor) -> bool:
    """Whether ``value`` is ``place``: the same elements of memory, in the same shape."""
    return (
        value.device == place.device
        and value.dtype == place.dtype
        and value.data_ptr() == place.data_ptr()
        and value.shape == place.shape
        and value.stride() == place.stride()
    )


@functools.cache
def watch_exports() -> None:
    """Lend what DLPack exports from now on: who takes a full parameter by its address keeps the memory.

    It would else be freed or gathered into. torch marks memory that NumPy has, not what DLPack's readers have.
    """
    native: Any = torch._C
    for name in ("_to_dlpack", "_to_dlpack_versioned"):
        export = getattr(native, name)
        lending = _lending(export)
        for module in (native, torch, torch.utils.dlpack):
            for alias in [alias for alias, value in vars(module).items() if value is export]:
                setattr(module, alias, lending)
    tensor: Any = torch.Tensor
    if "__dlpack_c_exchange_api__" in vars(tensor):
        tensor.__dlpack_c_exchange_api__ = _C.lending_exchange(tensor.__dlpack_c_exchange_api__)


def _lending(export: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(export)
    def lending(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        capsule = export(tensor, *args, **kwargs)
        _C.lend(tensor)
        return capsule

    return lending
