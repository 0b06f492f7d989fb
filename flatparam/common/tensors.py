"""The memory of tensors: whether a tensor can be flattened, the order of its elements, its storage.

Storages of flat tensors are allocated and freed in place, so earlier views stay valid objects. The C functions for
plain tensors have a fallback here for subclasses, with torch's private functions. The drop-in, the runtime and
LayerZero use this module; it knows no flat parameter.
"""

import ctypes
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from .. import _C
from .patches import flat_params_live
from .torch_private import FlatParameter, _alloc_storage, _detach_if_needed, _free_storage, torch_flat_param


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill a contiguous range of memory, each once, in some order of its dimensions."""
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
    """Return the elements as a 1-D tensor: in memory order if dense, else row-major; a view where possible."""
    tensor = _detach_if_needed(tensor)
    if is_truly_contiguous(tensor) or not is_dense(tensor):
        return tensor.flatten()
    return tensor.as_strided((tensor.numel(),), (1,))


def why_not_dense(tensor: Tensor, what: str) -> str | None:
    """Return an error message if ``tensor`` has no strided memory to flatten, else None. ``what``: its description."""
    if isinstance(tensor, FlatParameter):
        return f"Cannot flatten a `FlatParameter`: {what} is flattened already"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return (
            f"Cannot flatten sparse or quantized tensors: {what} has layout {tensor.layout}; convert it to a dense "
            "floating-point tensor, or ignore it (ignored_states)"
        )
    return None


def has_gradients(dtype: torch.dtype) -> bool:
    """Whether tensors of ``dtype`` can require grad and be reduced. Collectives move all others as bytes."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def rounds(source: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` lacks numbers that ``source`` has. torch's promotion has no floating dtypes of one byte."""
    if source == dtype:
        return False
    if not (source.is_floating_point and dtype.is_floating_point):
        return torch.promote_types(source, dtype) != dtype
    there, here = torch.finfo(source), torch.finfo(dtype)
    return there.eps < here.eps or there.max > here.max


def as_sent(tensor: Tensor) -> Tensor:
    """View a contiguous 1-D ``tensor`` for a collective: as uint8 if not every backend knows its dtype."""
    return tensor if has_gradients(tensor.dtype) else tensor.view(torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, borrowed: the caller keeps the tensor alive."""
    return memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of ``shape``, equal to ``Tensor.stride()``: a size of 0 counts as 1."""
    inner = (max(extent, 1) for extent in shape[:0:-1])
    return tuple(itertools.accumulate(inner, operator.mul, initial=1))[::-1][: len(shape)]


def check_memory(names: list[str], tensors: list[Tensor]) -> None:
    """Refuse parameters that share elements of memory, as flattened copies would train apart, and freed parameters.

    ``tensors`` has each Parameter once, also if it has several names. Raises: ValueError naming the parameters.
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
                f"strides {tensor.stride()}; copy it with .clone()"
            )
    open_spans: list[tuple[int, int]] = []  # (end, index) of the spans that end behind the start of the current one
    for start, stop, i in spans:
        open_spans = [span for span in open_spans if span[0] > start]
        for _, other in open_spans:
            if _share_elements(tensors[other], tensors[i]):
                raise ValueError(
                    f"parameters `{names[other]}` and `{names[i]}` overlap in memory without being one Parameter: "
                    "copy one of them with .clone(), or register one Parameter under both names"
                )
        open_spans.append((stop, i))


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the length of memory from the first to the last element, in elements; for a tensor that is not empty."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _span(tensor: Tensor) -> int:
    """Return ``span_of`` a tensor, which may be empty."""
    return tensor.numel() if tensor.is_contiguous() or tensor.numel() == 0 else span_of(tensor.shape, tensor.stride())


def _elements(tensor: Tensor) -> Tensor:
    """Return the address of every element of ``tensor``, in units of its element size."""
    first = tensor.data_ptr() // tensor.element_size()
    return torch.arange(first, first + _span(tensor)).as_strided(tensor.shape, tensor.stride()).reshape(-1)


def _share_elements(a: Tensor, b: Tensor) -> bool:
    if is_dense(a) and is_dense(b):
        return True  # the caller has found that their spans overlap, and dense spans have no holes
    return bool(torch.isin(_elements(a), _elements(b)).any())


def allocate(tensor: Tensor, size: torch.Size) -> None:
    """Allocate memory for ``size`` elements in ``tensor``'s freed storage."""
    if _C.allocate(tensor, size.numel()) is None:  # a subclass
        _alloc_storage(tensor, size)


def free(tensor: Tensor, reason: str | None = None, keeps_size: bool = False) -> None:
    """Free the storage of ``tensor``, in place.

    Args: ``reason``: the message of the RuntimeError on a later read or write; ``keeps_size``: the storage keeps its
    size without memory, so that the error also comes through views that are made later.
    """
    if not _C.free(tensor, reason, keeps_size):
        _free_storage(tensor)


def is_allocated(tensor: Tensor) -> bool:
    """Whether the storage of ``tensor`` has exactly the size of ``tensor``."""
    if _C.is_plain_tensor(tensor):
        return _C.storage_numel(tensor) == tensor.numel()
    return bool(torch_flat_param._same_storage_size(tensor, tensor.numel()))


def refuse_freed(tensor: Any, what: str) -> None:
    """Check the storage before ``tensor`` is read or written. torch does not check it and would access freed memory.

    ``what``: the description of ``tensor``. Raises: ValueError if a user has freed or resized the storage.
    """
    if _C.lacks_memory(tensor):
        raise ValueError(
            f"the storage of {what} was freed or resized outside of flatparam, and its values are lost. Leave storages "
            "as they are"
        )


def has_memory(tensor: Tensor) -> bool:
    """Whether the storage of ``tensor`` has any memory."""
    is_plain = _C.is_plain_tensor(tensor)
    return _C.storage_numel(tensor) > 0 if is_plain else torch_flat_param._storage_size_allocated(tensor)


def pinned(tensor: Tensor) -> Tensor:
    """Return a copy of a CPU ``tensor``, in pinned memory if the host has an accelerator."""
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor.clone()


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether both use one storage. Two freed storages count as one, as in torch's ``_same_storage``."""
    are_plain = _C.is_plain_tensor(a) and _C.is_plain_tensor(b)
    return _C.same_storage(a, b) if are_plain else bool(torch_flat_param._same_storage(a, b))


def is_at(value: Tensor, place: Tensor) -> bool:
    """Whether ``value`` and ``place`` are the same elements of memory, with equal dtype, shape and strides."""
    return (
        value.device == place.device
        and value.dtype == place.dtype
        and same_storage(value, place)  # an address of freed memory would raise
        and value.storage_offset() == place.storage_offset()
        and value.shape == place.shape
        and value.stride() == place.stride()
    )


_LENT = "tests/fsdp/unit/test_fsdp_storages.py"


@flat_params_live.around("torch._C:_to_dlpack", "torch:to_dlpack", "torch.utils.dlpack:to_dlpack", test=_LENT)
@flat_params_live.around("torch._C:_to_dlpack_versioned", test=_LENT)
def _lending(export: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Mark memory that DLPack exports as borrowed, as torch marks memory that NumPy has taken.

    Else a reshard would free memory that an importer still reads, or a gather would overwrite it.
    """
    capsule = export(tensor, *args, **kwargs)
    _C.lend(tensor)
    return capsule


@flat_params_live.replace("torch:Tensor.__dlpack_c_exchange_api__", test=_LENT)
def _lending_exchange(capsule: Any) -> Any:
    """Mark memory that DLPack exports through C as borrowed."""
    return _C.lending_exchange(capsule)


@flat_params_live.around("torch:UntypedStorage.is_shared", test=_LENT, is_needed=_C.has_freed)
def _readable(is_shared: Callable[..., bool], storage: torch.UntypedStorage) -> bool:
    """Raise the error of freed memory: torch reads the address where no error may pass, and the process would end."""
    storage.data_ptr()
    return is_shared(storage)
