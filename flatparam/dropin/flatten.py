"""Construct a flat parameter: check the parameters, choose their order and layout, copy them, record their metadata.

Between construction and ``shard()`` the unsharded flat parameter exists, and the driver of the handle may use it. But
torch's runtime constructs and shards in one function, and no user code runs in between. Then the unsharded memory is
allocated and never written ("Wrapping streams" in csrc/README.md): on Linux's host it takes no memory.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _C
from ..common import optimizers
from ..common.tensors import check_memory, in_storage_order, is_dense, is_truly_contiguous, row_major, why_not_dense
from ..common.torch_private import (
    _FLAT_PARAM_PADDING_VALUE,
    FlatParameter,
    ParamInfo,
    SharedParamInfo,
    _construct_padding_tensor,
    _convert_to_params,
    _ext_pre_flatten_transform,
    _init_utils,
    _named_parameters_with_duplicates,
    logger,
)
from ..common.warned import warn_user
from .base import FLATTEN, STREAM, Handle, installed
from .views import primaries

construct_and_shard = _init_utils._init_param_handle_from_params


# Replicas' group -> the number of its next handle: all ranks of a group build the same units over it, in one order
_serials: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


class _Here(threading.local):
    """Whether this thread constructs a handle for torch's runtime, which shards it at once."""

    constructs_and_shards = False  # in construct_and_shard(), before its handle is constructed


_here = _Here()


@installed.around(
    "torch.distributed.fsdp._init_utils:_init_param_handle_from_params", test="tests/dropin/test_streaming.py"
)
def _noting(construct: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> None:
    """Note for this thread that the next handle is sharded at once, and for the handle the group of its replicas.

    Neither if a user has replaced torch's function.
    """
    is_torchs = construct is construct_and_shard
    _here.constructs_and_shards = is_torchs
    try:
        construct(state, *args, **kwargs)
    finally:
        _here.constructs_and_shards = False
    handle, replicas = state._handle, vars(state).get("_inter_node_pg")
    if replicas is None or handle is None or not is_torchs:
        return
    if handle.uses_sharded_strategy:
        handle._replicas = replicas
        handle._replicas_serial = next(_serials.setdefault(replicas, itertools.count()))
    elif replicas.size() > 1:
        warn_user(
            f"torch's FullyShardedDataParallel takes {replicas.size()} replicas of HYBRID_SHARD with one rank each "
            "for NO_SHARD over that rank: gradients are not averaged over the replicas, which train apart. Say "
            "NO_SHARD over all ranks, or shard over two or more",
            [replicas],
        )


def is_sharded_next(kind: type, own_constructor: Any) -> bool:
    """Whether the handle that this thread constructs now is sharded before any user code runs.

    Each handle asks once. False if a user has replaced ``own_constructor`` or the class: his code may run in between.
    """
    answer, _here.constructs_and_shards = _here.constructs_and_shards, False
    return answer and kind is _init_utils.FlatParamHandle and getattr(kind, "__init__") is own_constructor  # noqa: B009


def _unwritten(numel: int, like: Tensor) -> Tensor:
    """Allocate memory without writing it, even under torch.use_deterministic_algorithms."""
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        return torch.empty(numel, dtype=like.dtype, device=like.device)
    finally:
        settings.fill_uninitialized_memory = before


def _own_parameters(module: nn.Module) -> Iterable[tuple[str, Tensor | None]]:
    """Return ``(name, parameter)`` of ``module`` itself; a parameter with several names comes under each."""
    kind = type(module)
    usual = (kind.named_parameters, kind._named_members) == (nn.Module.named_parameters, nn.Module._named_members)
    if usual and module.__dict__.keys().isdisjoint(("named_parameters", "_named_members")):
        return module._parameters.items()
    return _named_parameters_with_duplicates(module, recurse=False)


class _Originals(NamedTuple):
    """The tensors to flatten, in order, after the fsdp extension has transformed them; and their metadata."""

    tensors: list[Any]
    extensions: list[Any]
    strides: list[tuple[int, ...]]
    contiguities: list[bool]
    numels: Sequence[int]
    requires_grad: bool


def init_flat_param_and_metadata(
    handle: Handle, params: list[Tensor | nn.Parameter], module: nn.Module, aligned_numel: int, use_orig_params: bool
) -> None:
    """Flatten ``params`` into ``handle.flat_param``, in the order in which ``module``'s tree names them.

    Source: torch 2.13 ``FlatParamHandle._init_flat_param_and_metadata``: the same order, padding and metadata.
    Differences: a parameter that is not in the tree is an error; one that is not dense in memory (a column
    slice, ``x[::2]``) keeps its values, row-major.
    Raises: ValueError naming the parameter.
    """
    if len(params) == 0:
        raise ValueError("Expects non-empty `params`")
    if aligned_numel < 0:
        raise ValueError(f"Expects non-negative `aligned_numel` but got {aligned_numel}")
    handle._padded_to = aligned_numel
    found, infos, fqns, further = find(handle, params, module)
    originals = _originals(handle, params, found, fqns)
    layout = _lay_out(handle, originals.numels, aligned_numel)
    # The loops in C do not know extensions, wrappers and meta tensors
    plain = all(extension is None for extension in originals.extensions) and _C.is_plain(*originals.tensors)
    in_c = layout if plain else None
    handle.flat_param = _flat_param_of(handle, originals, infos, layout, in_c)
    is_padding = [False] * len(found) if layout is None else list(layout.is_padding_mask)
    parameters = iter(_convert_to_params(originals.tensors))
    kept: list[Any] = [None if padding else next(parameters) for padding in is_padding]
    FlatParameter._init_metadata(
        handle.flat_param,
        infos,
        list(originals.numels if layout is None else layout.numels_with_padding),
        [tensor.shape for tensor in originals.tensors],
        originals.strides,
        originals.contiguities,
        fqns,
        [SharedParamInfo(*info, *infos[i]) for info, i in further],
        originals.extensions,
        kept if use_orig_params else None,
        _convert_to_params([found[i] for _, i in further]) if use_orig_params else None,
        is_padding,
    )
    if not use_orig_params:
        optimizers.take_out(zip(found, fqns, strict=True), handle, _warn_of_step)
    handle._unit = None if in_c is None else unit_of(handle.flat_param, in_c)
    del handle._fqn_of  # the metadata has the names now


def _originals(handle: Handle, params: list[Tensor], found: list[Tensor], fqns: list[str]) -> _Originals:
    """Check and transform the tensors ``found``; ``params`` are the same in the caller's order, for error messages."""
    usual = _survey(handle, found)
    if usual is not None:
        numels, requires_grad = usual
        strides = [tensor.stride() for tensor in found]
        return _Originals(found, [None] * len(found), strides, [True] * len(found), numels, requires_grad)
    _, requires_grad, _ = handle._validate_tensors_to_flatten(params)
    transformed = [_ext_pre_flatten_transform(param, handle._fsdp_extension) for param in found]
    tensors = [tensor for tensor, _ in transformed]
    check_memory(fqns, tensors)
    return _Originals(
        tensors,
        [extension for _, extension in transformed],
        [tensor.stride() if is_dense(tensor) else row_major(tensor.shape) for tensor in tensors],
        [is_truly_contiguous(tensor) or not is_dense(tensor) for tensor in tensors],
        [tensor.numel() for tensor in tensors],
        requires_grad,
    )


def _flat_param_of(
    handle: Handle, originals: _Originals, infos: Sequence[ParamInfo], layout: _C.Layout | None, in_c: _C.Layout | None
) -> FlatParameter:
    """Flatten ``originals``, or leave the flat data unwritten if ``shard()`` follows at once."""
    tensors, requires_grad = originals.tensors, originals.requires_grad
    if in_c is None or handle._is_replaced(*FLATTEN):
        pieces = list(_with_paddings(tensors, layout, _FLAT_PARAM_PADDING_VALUE))
        return handle.flatten_tensors_into_flat_param(pieces, aligned_numel=0, requires_grad=requires_grad)
    if _may_stream(handle, (info.module for info in infos)):
        flat = _unwritten(in_c.numel, tensors[0])
        handle._unflattened = tensors
    else:
        flat = in_c.flatten(tensors, _FLAT_PARAM_PADDING_VALUE, 0, in_c.numel)
    return FlatParameter(flat, requires_grad=requires_grad)


def find(
    handle: Handle, params: Sequence[Tensor], module: nn.Module
) -> tuple[list[Tensor], list[ParamInfo], list[str], list[tuple[ParamInfo, int]]]:
    """Return ``(params in the order of module's tree, their places, their FQNs, further places with indices)``.

    Raises: ValueError for a parameter that is not in the tree.
    """
    found: list[Tensor] = []
    infos: list[ParamInfo] = []
    fqns: list[str] = []
    further: list[tuple[ParamInfo, int]] = []
    index_of: dict[int, int | None] = dict.fromkeys(map(id, params))  # in found
    for module_name, submodule in module.named_modules(remove_duplicate=False):
        prefix = f"{module_name}." if module_name else ""
        for name, param in _own_parameters(submodule):
            if param is None or id(param) not in index_of:
                continue
            info, index = ParamInfo(name, submodule, module_name), index_of[id(param)]
            if index is not None:
                further.append((info, index))
                continue
            index_of[id(param)] = len(found)
            found.append(param)
            infos.append(info)
            fqns.append(prefix + name)
    for i, param in enumerate(params):
        if index_of[id(param)] is None:
            raise not_in_tree(module, i, param)
    handle._fqn_of = dict(zip(map(id, found), fqns, strict=True))
    return found, infos, fqns, further


def not_in_tree(module: nn.Module, i: int, param: Tensor) -> ValueError:
    """Return the error for ``params[i]``, which is no parameter of ``module``."""
    return ValueError(
        f"`params` were not found in `module`'s tree: params[{i}] (shape {tuple(param.shape)}, {param.dtype}) is not a "
        f"parameter of this {type(module).__name__}; pass only parameters that module.parameters() gives"
    )


def _survey(handle: Handle, tensors: Sequence[Tensor]) -> tuple[Sequence[int], bool] | None:
    """Check all tensors in C. Return ``(numels, whether any requires grad)``; None: check each in Python."""
    if handle._fsdp_extension is not None or handle._is_replaced("_validate_tensors_to_flatten"):
        return None
    numels, trained = _C.survey(tensors) or ((), 0)
    mixed = 0 < trained < len(tensors) and not handle._use_orig_params
    if not numels or mixed or any("_is_flat_param" in vars(tensor) for tensor in tensors):
        return None
    return numels, trained > 0


def _lay_out(handle: Handle, numels: Sequence[int], aligned_numel: int) -> _C.Layout | None:
    """Return the layout and log as torch does; None: no parameter has elements."""
    if not any(numels):
        return None
    layout = handle._layout_of(numels, aligned_numel)
    if handle.rank == 0 and layout.numel != layout.numel_params:
        world_padding = layout.numels_with_padding[-1] if layout.is_padding_mask[-1] else 0
        aligned = layout.numel - world_padding
        if aligned != layout.numel_params:
            logger.debug(
                "FSDP FlatParameter address alignment created %s numel of padding (%s vs. %s)",
                aligned - layout.numel_params,
                aligned,
                layout.numel_params,
            )
        if world_padding > 0:
            logger.info("FSDP FlatParameter world size divisibility created %s numel of padding", world_padding)
    return layout


def describe(handle: Any, tensor: Tensor) -> str:
    name = handle._fqn_of.get(id(tensor))
    what = f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"
    return f"parameter `{name}` ({what})" if name else f"a tensor ({what})"


def validate_tensors_to_flatten(handle: Handle, tensors: list[Tensor | nn.Parameter]) -> tuple[Any, ...]:
    """Check that ``tensors`` can share one flat tensor. Return ``(dtype, whether any requires grad, device)``.

    Raises: ValueError naming the first tensor that does not fit.
    """
    if not tensors:
        raise AssertionError("Requires a non-empty `tensors` list, got none")
    first = tensors[0]
    for tensor in tensors:
        refusal = why_not_dense(tensor, describe(handle, tensor))
        if refusal is not None:
            raise ValueError(refusal)
        if not tensor.is_floating_point() and not tensor.is_complex():
            raise ValueError(
                f"Cannot flatten integer dtype tensors: {describe(handle, tensor)}; register it as a buffer, "
                "ignore it (ignored_states), or store quantized weights in a floating dtype (bitsandbytes: "
                "quant_storage=torch.bfloat16). flatparam's runtime shards quantized weights of any dtype"
            )
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"Must flatten tensors with uniform dtype but got {first.dtype} and {tensor.dtype}: "
                f"{describe(handle, first)} and {describe(handle, tensor)}"
            )
        if not handle._use_orig_params and tensor.requires_grad != first.requires_grad:
            raise ValueError(
                "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: "
                f"{describe(handle, first)} has {first.requires_grad}, {describe(handle, tensor)} has "
                f"{tensor.requires_grad}"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"Must flatten tensors on the same device but got both {first.device} and {tensor.device}: "
                f"{describe(handle, first)} and {describe(handle, tensor)}"
            )
    return first.dtype, any(tensor.requires_grad for tensor in tensors), first.device


def flatten_tensors(handle: Handle, tensors: list[Tensor], aligned_numel: int) -> Tensor:
    """Concatenate ``tensors`` into one 1-D tensor, padded as the flat parameter is if ``aligned_numel`` > 0.

    Shapes: returns ``[sum of numels + padding]``, in the tensors' dtype and device; padding is 42.
    Raises: ValueError for no tensors, a negative ``aligned_numel``, or tensors that do not fit together.
    """
    if len(tensors) == 0:
        raise ValueError("Expects non-empty `tensors`")
    if aligned_numel < 0:
        raise ValueError(f"Expects non-negative `aligned_numel` but got {aligned_numel}")
    usual = _survey(handle, tensors)
    if usual is None:
        handle._validate_tensors_to_flatten(tensors)
    layout = _lay_out(handle, usual[0] if usual else [tensor.numel() for tensor in tensors], aligned_numel)
    if layout is not None and (usual or _C.is_plain(*tensors)):
        return layout.flatten(tensors, _FLAT_PARAM_PADDING_VALUE, 0, layout.numel)
    return torch.cat([in_storage_order(piece) for piece in _with_paddings(tensors, layout, _FLAT_PARAM_PADDING_VALUE)])


def flatten_tensors_into_flat_param(
    handle: Handle, tensors: list[Tensor], aligned_numel: int, requires_grad: bool
) -> FlatParameter:
    return FlatParameter(handle.flatten_tensors(tensors, aligned_numel), requires_grad=requires_grad)


# Sharding without flattening


def _may_stream(handle: Handle, modules: Iterable[nn.Module]) -> bool:
    """Whether nothing can read the unsharded data before ``shard()``."""
    return (
        handle._shards_next
        and handle.uses_sharded_strategy
        and not handle._is_replaced(*STREAM)
        and all(kind.__setattr__ is nn.Module.__setattr__ for kind in {type(module) for module in modules})
    )


def shard_of(handle: Handle, originals: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return ``(this rank's shard, number of padding elements at its end)``, as ``_get_shard`` does.

    ``originals``: the tensors in the flat parameter, without paddings.
    """
    layout = handle._layout
    begin, end = layout.shard_range(handle.rank)
    padding = end - max(begin, min(end, layout.numel))
    return layout.flatten(originals, _FLAT_PARAM_PADDING_VALUE, begin, end), padding


def _warn_of_step(handle: Handle, fqn: str, optimizer: str) -> None:
    module = type(handle._fully_sharded_module).__name__
    warn_user(
        f"{optimizer}.step(): the optimizer holds `{fqn}` from before the {module} around it was wrapped, whose flat "
        "parameter is trained instead (use_orig_params=False): it trains nothing. Wrap the model first, then make the "
        "optimizer, from the parameters() of the wrapped model",
        (handle.process_group,),
    )


def _with_paddings(tensors: Sequence[Tensor], layout: _C.Layout | None, value: float) -> Iterator[Tensor]:
    if layout is None:
        yield from tensors
        return
    unpadded, first = iter(tensors), tensors[0]
    for numel, padding in zip(layout.numels_with_padding, layout.is_padding_mask, strict=True):
        if padding:
            yield _construct_padding_tensor(numel, first.dtype, False, first.device).fill_(value)
        else:
            yield next(unpadded)


def unit_of(flat_param: Any, layout: _C.Layout) -> _C.ModuleParams:
    """Make the C object that loops over the original parameters of ``flat_param``, laid out as in ``layout``."""
    infos, shapes, contiguities = flat_param._param_infos, flat_param._shapes, flat_param._contiguities
    strides = [None if so else stride for so, stride in zip(contiguities, flat_param._strides, strict=True)]
    shared = zip(flat_param._shared_param_infos, primaries(flat_param), strict=True)
    given = zip(infos, shapes, strides, layout.offsets, strict=True)
    first = ((info.module, info.param_name, *rest) for info, *rest in given)
    further = ((info.module, info.param_name, i) for info, i in shared)
    return _C.ModuleParams(first, further, layout.numel)
