"""The original parameters of a unit: find them, refuse those that cannot be flattened, group them, lay them out.

The wrapper's constructor calls ``find_originals`` and ``choose_blocks``. ``Unit`` calls ``check_tensors`` and
``by_flat_param``, and ``FlatParam`` calls ``layout_of``. ``inspect`` calls all of them without processes. A
``ParamInfo`` lives as long as its unit. The module allocates no shard and issues no collective.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, MixedPrecision
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ... import _C
from ...common.layout import FlatLayout
from ...common.tensors import (
    check_memory,
    has_gradients,
    in_storage_order,
    is_dense,
    is_truly_contiguous,
    row_major,
    why_not_dense,
)
from ...common.torch_private import FSDPExtensions
from ..errors import DeviceError
from ..names import clean_tensor_name, join
from .deferred import template_of
from .extensions import Form, Kept, check_mesh, flattened, is_kept, plain_memory, stripped
from .placement import Placement

Atomic = Literal["row"] | Callable[[nn.Parameter], int] | None


def check_layout_arguments(shard_alignment: int | None, atomic: Atomic) -> None:
    """Check the two arguments. Raises: TypeError, ValueError naming the argument."""
    if shard_alignment is not None:
        if isinstance(shard_alignment, bool) or not isinstance(shard_alignment, int):
            raise TypeError(f"expected shard_alignment to be bytes, an int, got {shard_alignment!r}")
        if shard_alignment < 1 or shard_alignment & (shard_alignment - 1):
            raise ValueError(f"expected shard_alignment to be a power of two of bytes, got {shard_alignment}")
    if atomic is not None and atomic != "row" and not callable(atomic):
        raise ValueError(f'expected atomic to be "row", None or a callable(param) -> elements, got {atomic!r}')


def row_numel(shape: Sequence[int]) -> int:
    """Return the number of elements of one row. A row is one index of dimension 0."""
    return math.prod(shape[1:])


def has_rows(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether each row of a dense tensor is contiguous in memory, and the rows are in order."""
    return len(shape) == 0 or shape[0] <= 1 or stride[0] == row_numel(shape)


def block_of(fqn: str, param: nn.Parameter, shape: Sequence[int], stride: Sequence[int], atomic: Atomic) -> int:
    """Return how many consecutive elements of ``param`` stay on one rank.

    | ``atomic`` | block |
    |---|---|
    | None | 1 |
    | ``"row"`` | a row; the whole parameter if its rows are not contiguous (a transposed weight) |
    | a callable | its result |

    Raises: ValueError, TypeError naming the parameter if the callable returns no int >= 1 (>= 0 if it is empty).
    """
    if atomic is None:
        return 1
    if atomic == "row":
        return max(1, row_numel(shape) if has_rows(shape, stride) else math.prod(shape))
    block: Any = atomic(param)
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"expected atomic(param) to give an int for parameter `{fqn}`, got {block!r}")
    if block == 0 == math.prod(shape):
        return 1  # an empty parameter has nothing to cut
    if block < 1:
        raise ValueError(f"expected atomic(param) to give at least 1 element for parameter `{fqn}`, got {block}")
    return block


def keeps_rows(shape: Sequence[int], stride: Sequence[int], block: int) -> bool:
    """Whether blocks of ``block`` elements are whole rows, so that a piece can have the parameter's dimensions."""
    return block >= math.prod(shape) or (has_rows(shape, stride) and block % max(1, row_numel(shape)) == 0)


def alignment_of(shard_alignment: int | None, dtypes: Sequence[torch.dtype], use_orig_params: bool) -> int:
    """Return the alignment of parameters in elements; 0: none.

    Args: ``shard_alignment``: bytes; ``dtypes``: of the shard, of gathers and of reductions; the alignment holds in
    each. With ``use_orig_params`` it is at least 16 bytes in gathers, as in torch.
    """
    alignment = 16 // dtypes[1].itemsize if use_orig_params else 0
    if shard_alignment is not None:
        alignment = max(alignment, shard_alignment // min(dtype.itemsize for dtype in dtypes), 1)
    return alignment


def default_alignment(computes_on: torch.device | None) -> int | None:
    """Return ``shard_alignment`` where the user passes none: 16 bytes for NCCL, else None, which is torch's layout."""
    return 16 if computes_on is not None and computes_on.type == "cuda" else None


LOW = (torch.bfloat16, torch.float16)  # too low a precision for master weights and sums of gradients


class Name(NamedTuple):
    """One place of a parameter in the module tree."""

    module: nn.Module
    name: str
    fqn: str  # below the unit's module, without the names that wrappers add


@dataclass
class ParamInfo:
    """One original parameter. Shape, strides and contiguity are those of the tensor that is flattened."""

    param: nn.Parameter
    names: list[Name]  # one for each place; the first is the name in named_parameters()
    shape: torch.Size
    stride: tuple[int, ...]
    contiguous: bool
    fqns: list[str]  # all names: more than places if a module is registered twice
    block: int = 1  # consecutive elements that stay on one rank
    template: Tensor | None = None  # the meta tensor if param is a placeholder, until values are loaded
    form: Form | None = None  # if modules see an extension's tensor
    kept: Kept | None = None  # if param is frozen and of a subclass over plain memory

    @property
    def fqn(self) -> str:
        return self.names[0].fqn

    @property
    def in_bytes(self) -> bool:
        """Whether it is flattened as bytes: in a flat parameter for bytes, which mixed precision never converts."""
        return self.kept is not None or not has_gradients(self.param.dtype)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape that modules see; for a DTensor the global shape."""
        return tuple(self.shape if self.form is None else getattr(self.form.kept, "shape", self.shape))

    def formed(self, whole: Tensor) -> Any:
        """Make the tensor for modules and state dicts from the unsharded plain tensor ``whole``."""
        return whole if self.form is None else self.form.of(whole)

    def plain(self, value: Tensor) -> Tensor:
        """Return the plain tensor in ``value``: the opposite of ``formed``."""
        if self.kept is not None:
            return stripped(value)
        return value if self.form is None else self.form.local(value)

    def parameter(self, whole: Tensor, requires_grad: bool) -> nn.Parameter:
        """Make the parameter for modules from the unsharded plain tensor ``whole``, in the same memory."""
        if self.kept is None:
            return nn.Parameter(self.formed(whole), requires_grad)
        made = self.kept.dress(whole.detach()).requires_grad_(requires_grad)
        assert isinstance(made, nn.Parameter)  # its class derives from nn.Parameter
        return made


@dataclass(frozen=True)
class Options:
    """The settings of one unit."""

    placement: Placement
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    use_orig_params: bool = False
    segments: bool = False
    shard_alignment: int | None = None
    atomic: Atomic = None
    offload_grads: bool = False
    in_order: bool = False  # reduction="ordered"
    device: torch.device | None = None  # the device to compute on if the shards are on the host, else None
    offload_params: bool = False  # as the user passed it, also if there is no accelerator
    extensions: tuple[FSDPExtensions, ...] = ()
    min_unit_bytes: int = 0


def find_originals(
    own: Iterable[nn.Module],
    module: nn.Module,
    ignored_params: set[nn.Parameter],
    extensions: tuple[FSDPExtensions, ...] = (),
    placement: Placement | None = None,
) -> list[ParamInfo]:
    """Return the parameters of the modules ``own`` below ``module``, in the order of ``named_parameters()``.

    Changes nothing.
    Raises: ValueError naming a parameter that is uninitialized (lazy), is in a module of torch.jit, or is a DTensor on
    a mesh that does not fit ``placement``.
    """
    found: dict[int, ParamInfo] = {}  # by the parameters' ids
    mine = set(own)
    for path, submodule in module.named_modules(remove_duplicate=False):
        if submodule not in mine:
            continue
        for name, param in submodule._parameters.items():
            if param is None or (ignored_params and param in ignored_params):
                continue
            place = Name(submodule, name, clean_tensor_name(join(path, name)))
            if is_lazy(param):
                raise ValueError(
                    f"parameter `{place.fqn}` of a {type(submodule).__name__} is uninitialized and has no shape yet: "
                    "run a forward of the module before it is wrapped"
                )
            if isinstance(submodule, torch.jit.ScriptModule):
                raise ValueError(
                    f"parameter `{place.fqn}` belongs to a module of torch.jit, which lets nobody replace its "
                    "parameters: pass the module that was scripted or traced, or ignore this one (ignored_modules)"
                )
            original = found.get(id(param))
            if original is None:
                found[id(param)] = _info_of(param, place, extensions, placement)
                continue
            original.fqns.append(place.fqn)
            if (submodule, name) not in [(other.module, other.name) for other in original.names]:
                original.names.append(place)
    return list(found.values())


def _info_of(
    param: nn.Parameter, place: Name, extensions: tuple[FSDPExtensions, ...], placement: Placement | None
) -> ParamInfo:
    """Return the record of a parameter, with the plain tensor that is flattened in its place."""
    template: Tensor | None = template_of(param)
    whole: Tensor = param if template is None else template
    form = None
    if extensions:
        whole, form = flattened(whole, extensions)
        template = None if template is None else whole
    if form is not None and placement is not None:
        check_mesh(place.fqn, param, placement)
    kept = None
    if form is None and template is None and is_kept(param):
        whole, kept = stripped(param), Kept(param)
    strided = whole.layout == torch.strided
    contiguous = strided and is_truly_contiguous(whole)
    dense = contiguous or (strided and is_dense(whole))
    own = param if whole is param or template is not None else nn.Parameter(whole, param.requires_grad)
    stride = tuple(whole.stride()) if dense else row_major(whole.shape)
    return ParamInfo(
        own, [place], whole.shape, stride, contiguous or not dense, [place.fqn], template=template, form=form, kept=kept
    )


def choose_blocks(originals: Iterable[ParamInfo], atomic: Atomic) -> None:
    """Set ``block`` of each parameter. Raises: ValueError, TypeError naming the parameter."""
    for original in originals:
        whole: Any = original.param if original.template is None else original.template
        original.block = block_of(original.fqn, whole, original.shape, original.stride, atomic)


def check_tensors(originals: Sequence[ParamInfo], options: Options) -> None:
    """Refuse parameters that one unit cannot flatten. Changes nothing. Raises: ValueError naming the first of them."""
    if not originals:
        return
    first = next((original for original in originals if not original.in_bytes), originals[0])
    for original in originals:
        param = original.param
        if (
            original is not first
            and (param.device, param.dtype) == (first.param.device, first.param.dtype)
            and param.requires_grad == first.param.requires_grad
            and has_gradients(param.dtype)
            and _C.is_plain_tensor(param)
            and not isinstance(param, FlatParameter)
        ):
            continue  # it is like the first parameter, which passes the full checks below
        what = f"parameter `{original.fqn}` (shape {tuple(original.shape)}, {param.dtype} on {param.device})"
        if param.device != first.param.device:
            raise DeviceError(
                f"Must flatten tensors on the same device but got both {first.param.device} (`{first.fqn}`) and {what}"
            )
        _check_alone(original, options, what)
        if not original.in_bytes:  # bytes have a separate flat parameter, so the dtype need not match
            _check_beside(original, first, options, what)
    for group in by_flat_param(list(originals), options):
        if not any(original.shape.numel() for original in group):
            names = ", ".join(f"`{original.fqn}` {tuple(original.shape)}" for original in group)
            raise ValueError(f"Cannot flatten parameters without any element: {names}; ignore them (ignored_states)")
    there = [original for original in originals if original.template is None and not original.param.is_meta]
    check_memory([original.fqn for original in there], [original.param for original in there])


def _check_alone(original: ParamInfo, options: Options, what: str) -> None:
    """Raises: ValueError if no unit can flatten the parameter, which messages call ``what``."""
    param = original.param
    refusal = why_not_dense(param, what)
    if refusal is not None:
        raise ValueError(refusal)
    if param.is_inference() or torch.is_inference_mode_enabled():
        raise ValueError(f"Cannot flatten {what}, made or wrapped in torch.inference_mode(): do it outside")
    if not _C.is_plain_tensor(param):
        kind = "nested" if param.is_nested else f"a {type(param).__name__}, a subclass of torch's"
        freeze = "freeze it before it is wrapped, " if plain_memory(param) is not None else ""
        mesh = "pass another dimension of its mesh as device_mesh=, " if isinstance(param, DTensor) else ""
        raise ValueError(
            f"Cannot flatten {what}: it is {kind}, and a flat parameter would bypass its operations; "
            f"{mesh}{freeze}make it a plain nn.Parameter, or ignore it (ignored_states)"
        )
    if param.requires_grad and not has_gradients(param.dtype):
        raise ValueError(
            f"Cannot flatten {what}: no collective adds {param.dtype} up, so it cannot train; build it in a wider "
            "dtype, freeze it before it is wrapped, or ignore it (ignored_states)"
        )
    if not can_be_copied(param.dtype):
        raise ValueError(
            f"Cannot flatten {what}: torch copies no {param.dtype}; view it as torch.uint8, or ignore it "
            "(ignored_states)"
        )
    if options.placement.full_precision and param.dtype in LOW and param.requires_grad:
        raise ValueError(
            f"LayerZero keeps master weights and adds gradients in the parameter's own precision, which is low for "
            f"{what}: build it in torch.float32 and pass MixedPrecision(param_dtype={param.dtype}), or freeze it "
            "before it is wrapped"
        )
    if original.in_bytes:
        holder = None if original.kept is None else original.kept.holder(original.param, original.names[0].module)
        if holder is not None:
            raise ValueError(
                f"Cannot flatten {what}: `{holder}` shares its memory, and its module computes with that, so "
                "neither a shard nor a load would reach the module; ignore it (ignored_states)"
            )


def _check_beside(original: ParamInfo, first: ParamInfo, options: Options, what: str) -> None:
    """Raises: ValueError if the parameter cannot be in one unit with ``first``."""
    param = original.param
    if param.dtype != first.param.dtype and not options.segments:
        raise ValueError(
            f"Must flatten tensors with uniform dtype but got {first.param.dtype} (`{first.fqn}`) and "
            f"{param.dtype} ({what}); pass segments=True, or wrap them in separate units"
        )
    if param.requires_grad != first.param.requires_grad and not options.segments and not options.use_orig_params:
        raise ValueError(
            "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: "
            f"`{first.fqn}` has {first.param.requires_grad}, {what} has {param.requires_grad}; pass segments=True"
        )


@functools.cache
def can_be_copied(dtype: torch.dtype) -> bool:
    """Whether torch can copy elements of ``dtype``. It cannot copy elements smaller than a byte."""
    try:
        torch.empty(1, dtype=dtype).clone()
    except NotImplementedError:
        return False
    return True


def by_flat_param(originals: list[ParamInfo], options: Options) -> list[list[ParamInfo]]:
    """Group the originals of a unit, one group for each flat parameter; groups that train come first.

    Bytes form a group for each dtype. The others are grouped by dtype and requires_grad with ``segments``, else
    together.
    """
    groups: dict[Any, list[ParamInfo]] = {}
    for original in originals:
        apart = (original.param.dtype, original.param.requires_grad)
        key = apart if options.segments or original.in_bytes else None
        groups.setdefault((original.in_bytes, key), []).append(original)
    if not options.segments and len(groups) < 2:
        return list(groups.values())
    return sorted(groups.values(), key=lambda group: not group[0].param.requires_grad)


class Dtypes(NamedTuple):
    """The dtypes of mixed precision for one flat parameter."""

    compute: torch.dtype | None  # None: the parameters' dtype
    reduce: torch.dtype | None  # None: the dtype of computation


def layout_of(originals: Sequence[ParamInfo], shards: int, options: Options) -> tuple[FlatLayout, Dtypes]:
    """Return the layout of one flat parameter over ``shards`` ranks, and its dtypes.

    Mixed precision does not apply to complex parameters, whose imaginary part it would drop, nor to bytes.
    """
    first, precision = originals[0].param, options.mixed_precision
    real = first.is_floating_point() and not originals[0].in_bytes
    dtypes = Dtypes(precision.param_dtype, precision.reduce_dtype) if real else Dtypes(None, None)
    dtype = dtypes.compute or first.dtype
    arranged = options.atomic is not None or (options.shard_alignment or 1) > 1  # False: torch's layout, without blocks
    used = (first.dtype, dtype, dtypes.reduce or dtype)
    alignment = alignment_of(options.shard_alignment, used, options.use_orig_params)
    blocks = [original.block for original in originals] if arranged else None
    shapes = [original.shape for original in originals]
    itemsize = first.element_size()
    return FlatLayout.of_shapes(shapes, shards, itemsize=itemsize, alignment=alignment, blocks=blocks), dtypes


def check_not_rounded(name: str, original: ParamInfo, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``value`` in ``dtype``. Raises: ValueError naming the parameter if the conversion changes a value."""
    if value.dtype == dtype:
        return value
    converted = value.to(dtype)
    if not same_bytes(converted.to(value.dtype), value):
        raise ValueError(
            f"{name}: the new data of parameter `{original.fqn}` are of {value.dtype}, which {dtype} would round: "
            "convert them yourself, or the model before"
        )
    return converted


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit for bit: -0.0 differs from 0.0; equal NaN are equal."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def in_order(value: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the elements of ``value`` as a 1-D tensor, in the memory order of dense strides ``stride``.

    A view of dense strides that are ``stride``, except where a size is 1; else a copy.
    """
    pairs = zip(value.stride(), stride, value.shape, strict=True)
    if value.stride() == stride or (is_dense(value) and all(a == b or size == 1 for a, b, size in pairs)):
        return in_storage_order(value)
    ordered = value.new_empty(value.numel())
    ordered.as_strided(value.shape, stride).copy_(value)
    return ordered
