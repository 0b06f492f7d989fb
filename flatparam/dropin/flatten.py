"""Constructing a flat parameter: which tensors go in, in which order and place, and what is recorded of each."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from .. import _C
from ..common.tensors import check_memory, in_storage_order, is_dense, is_truly_contiguous, row_major, why_not_flat
from ..common.torch_private import (
    _FLAT_PARAM_PADDING_VALUE,
    FlatParameter,
    ParamInfo,
    SharedParamInfo,
    _construct_padding_tensor,
    _convert_to_params,
    _ext_pre_flatten_transform,
    _named_parameters_with_duplicates,
    logger,
)
from .overrides import FLATTEN, STREAM, step_of
from .streaming import Streaming

_MOST_ELEMENTS = 2**63 - 1


class _Place(NamedTuple):
    """One name of a parameter in the module tree."""

    info: ParamInfo
    order: int  # of all the names that the walk of the tree came to

    @property
    def fqn(self) -> str:
        return f"{self.info.module_name}.{self.info.param_name}" if self.info.module_name else self.info.param_name


class _Found(NamedTuple):
    """One original parameter with what is recorded of it."""

    tensor: Tensor  # after the extension's transform (a DTensor's local shard)
    info: ParamInfo
    stride: tuple[int, ...]
    contiguous: bool
    extension: Any


class Flattening(Streaming):
    """The part of FlatParamHandle that builds ``flat_param`` and its metadata. Run once, at construction."""

    _fqn_of: Mapping[Tensor, str] = MappingProxyType({})  # while there is no metadata to name parameters from

    def _init_flat_param_and_metadata(
        self, params: list[Tensor | nn.Parameter], module: nn.Module, aligned_numel: int, use_orig_params: bool
    ) -> None:
        """Flatten ``params`` into ``self.flat_param``, in the order in which ``module``'s tree names them.

        Source: torch 2.13 ``FlatParamHandle._init_flat_param_and_metadata``: the same order, padding and metadata.
        Differences: a parameter that is not in the tree is an error; one that is not dense in memory (a column
        slice, ``x[::2]``) keeps its values, row-major.
        Raises: ValueError naming the parameter.
        """
        if len(params) == 0:
            raise ValueError("Expects non-empty `params`")
        if aligned_numel < 0:
            raise ValueError(f"Expects non-negative `aligned_numel` but got {aligned_numel}")
        places = self._find_places(params, module)
        self._fqn_of = {param: names[0].fqn for param, names in places.items()}
        dtype, requires_grad, device = self._validate_tensors_to_flatten(params)
        found = [self._transformed(param, names[0].info) for param, names in places.items()]
        further = sorted(
            (name.order, i, name, param) for i, (param, names) in enumerate(places.items()) for name in names[1:]
        )
        shared_infos = [SharedParamInfo(*name.info, *found[i].info) for _, i, name, _ in further]

        self._check_memory([item.tensor for item in found])
        numels, is_padding = self._place_with_padding([item.tensor.numel() for item in found], aligned_numel)
        tensors = [item.tensor for item in found]
        self._unit = self._make_unit(found, [(name.info, i) for _, i, name, _ in further], numels, is_padding)
        if self._unit is None or self._is_replaced(*self._steps[FLATTEN]):
            unpadded = iter(tensors)
            pieces = [
                _construct_padding_tensor(numel, dtype, False, device) if padding else next(unpadded)
                for numel, padding in zip(numels, is_padding, strict=True)
            ]
            self.flat_param = self.flatten_tensors_into_flat_param(pieces, aligned_numel=0, requires_grad=requires_grad)
        else:
            if self._may_stream(item.info.module for item in found):
                flat = self._unwritten(sum(numels), tensors[0])
                self._unflattened = tensors
            else:
                flat = self._unit.flatten(tensors, float(_FLAT_PARAM_PADDING_VALUE))
            self.flat_param = FlatParameter(flat, requires_grad=requires_grad)
        originals = iter(_convert_to_params(tensors))
        kept: list[Any] = [None if padding else next(originals) for padding in is_padding]
        FlatParameter._init_metadata(
            self.flat_param,
            [item.info for item in found],
            numels,
            [item.tensor.shape for item in found],
            [item.stride for item in found],
            [item.contiguous for item in found],
            list(self._fqn_of.values()),
            shared_infos,
            [item.extension for item in found],
            kept if use_orig_params else None,
            _convert_to_params([param for _, _, _, param in further]) if use_orig_params else None,
            is_padding,
        )
        del self._fqn_of  # the metadata has the names now

    def _find_places(self, params: Sequence[Tensor], module: nn.Module) -> dict[Tensor, list[_Place]]:
        """Every name in ``module``'s tree of each of ``params``, in the order of the walk."""
        wanted = set(params)
        places: dict[Tensor, list[_Place]] = {}
        order = 0
        param: Tensor
        for module_name, submodule in module.named_modules(remove_duplicate=False):
            for name, param in _named_parameters_with_duplicates(submodule, recurse=False):
                if param in wanted:
                    places.setdefault(param, []).append(_Place(ParamInfo(name, submodule, module_name), order))
                    order += 1
        for i, param in enumerate(params):
            if param not in places:
                raise ValueError(
                    f"`params` were not found in `module`'s tree: params[{i}] (shape {tuple(param.shape)}, "
                    f"{param.dtype}) is not a parameter of this {type(module).__name__}; "
                    "pass only parameters that module.parameters() gives"
                )
        return places

    def _transformed(self, param: Tensor, info: ParamInfo) -> _Found:
        tensor, extension = _ext_pre_flatten_transform(param, self._fsdp_extension)
        if is_truly_contiguous(tensor):
            return _Found(tensor, info, tensor.stride(), True, extension)
        if is_dense(tensor):
            return _Found(tensor, info, tensor.stride(), is_truly_contiguous(tensor), extension)
        return _Found(tensor, info, row_major(tensor.shape), True, extension)

    def _check_memory(self, tensors: list[Tensor]) -> None:
        check_memory(list(self._fqn_of.values()), tensors)

    def _place_with_padding(self, numels: list[int], aligned_numel: int) -> tuple[list[int], list[bool]]:
        """The sizes with padding between them, and which of them are padding.

        Padding comes before a parameter, so that it starts at a multiple of ``aligned_numel`` elements, and after the
        last, so that the total is a multiple of the world size; none of either if ``aligned_numel`` is 0.
        """
        placed: list[int] = []
        is_padding: list[bool] = []
        total = 0

        def add(numel: int, padding: bool) -> None:
            nonlocal total
            if numel > 0 or not padding:
                placed.append(numel)
                is_padding.append(padding)
                total += numel

        for numel in numels:
            add(-total % aligned_numel if aligned_numel else 0, True)
            add(numel, False)
        if total > _MOST_ELEMENTS - self.world_size:
            raise _C.ShardError(
                f"the flat parameter would have {total} elements, more than 64 bits count; wrap it in more units"
            )
        if self.rank == 0 and total != sum(numels):
            logger.debug(
                "FSDP FlatParameter address alignment created %s numel of padding (%s vs. %s)",
                total - sum(numels),
                total,
                sum(numels),
            )
        world_padding = -total % self.world_size if aligned_numel else 0
        if self.rank == 0 and world_padding > 0:
            logger.info("FSDP FlatParameter world size divisibility created %s numel of padding", world_padding)
        add(world_padding, True)
        return placed, is_padding

    def _make_unit(
        self, found: list[_Found], further: list[tuple[ParamInfo, int]], numels: list[int], is_padding: list[bool]
    ) -> _C.ModuleParams | None:
        """The loops in C; None where each tensor needs torch's own operations (extensions, wrappers, meta)."""
        if any(item.extension is not None for item in found) or not _C.is_plain(*(item.tensor for item in found)):
            return None
        geometry = [(item.info, item.tensor.shape, None if item.contiguous else item.stride) for item in found]
        return make_unit(geometry, further, numels, is_padding)

    def _describe(self, tensor: Tensor) -> str:
        name = self._fqn_of.get(tensor)
        what = f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"
        return f"parameter `{name}` ({what})" if name else f"a tensor ({what})"

    def _validate_tensors_to_flatten(self, tensors: list[Tensor | nn.Parameter]) -> tuple[Any, ...]:
        """Check that ``tensors`` can share one flat tensor: ``(dtype, whether any requires grad, device)``.

        Raises: ValueError naming the first that differs.
        """
        if not tensors:
            raise AssertionError("Requires a non-empty `tensors` list, got none")
        first = tensors[0]
        dtype, device, layout, uniform = first.dtype, first.device, torch.strided, not self._use_orig_params
        for tensor in tensors:
            if (
                tensor is not first
                and tensor.dtype == dtype
                and tensor.device == device
                and tensor.layout == layout
                and not (uniform and tensor.requires_grad != first.requires_grad)
                and not isinstance(tensor, FlatParameter)
            ):
                continue  # as the first one, which is looked at more closely
            refusal = why_not_flat(tensor, self._describe(tensor))
            if refusal is not None:
                raise ValueError(refusal)
            if tensor.dtype != first.dtype:
                raise ValueError(
                    f"Must flatten tensors with uniform dtype but got {first.dtype} and {tensor.dtype}: "
                    f"{self._describe(first)} and {self._describe(tensor)}"
                )
            if not self._use_orig_params and tensor.requires_grad != first.requires_grad:
                raise ValueError(
                    "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: "
                    f"{self._describe(first)} has {first.requires_grad}, {self._describe(tensor)} has "
                    f"{tensor.requires_grad}"
                )
            if tensor.device != first.device:
                raise ValueError(
                    f"Must flatten tensors on the same device but got both {first.device} and {tensor.device}: "
                    f"{self._describe(first)} and {self._describe(tensor)}"
                )
        return first.dtype, any(tensor.requires_grad for tensor in tensors), first.device

    @step_of(STREAM, FLATTEN)
    def flatten_tensors(self, tensors: list[Tensor], aligned_numel: int) -> Tensor:
        """Concatenate ``tensors`` into one 1-D tensor, padded as the flat parameter is if ``aligned_numel`` > 0.

        Shapes: returns ``[sum of numels + padding]``, in the tensors' dtype and device; padding holds 42.
        Source: torch 2.13 ``FlatParamHandle.flatten_tensors``.
        Raises: ValueError for no tensors, a negative ``aligned_numel``, or tensors that do not fit together.
        """
        if len(tensors) == 0:
            raise ValueError("Expects non-empty `tensors`")
        if aligned_numel < 0:
            raise ValueError(f"Expects non-negative `aligned_numel` but got {aligned_numel}")
        dtype, _, device = self._validate_tensors_to_flatten(tensors)
        numels, is_padding = self._place_with_padding([tensor.numel() for tensor in tensors], aligned_numel)
        unpadded = iter(tensors)
        return torch.cat(
            [
                _construct_padding_tensor(numel, dtype, False, device) if padding else in_storage_order(next(unpadded))
                for numel, padding in zip(numels, is_padding, strict=True)
            ]
        )

    @step_of(STREAM, FLATTEN)
    def flatten_tensors_into_flat_param(
        self, tensors: list[Tensor], aligned_numel: int, requires_grad: bool
    ) -> FlatParameter:
        return FlatParameter(self.flatten_tensors(tensors, aligned_numel), requires_grad=requires_grad)


def make_unit(
    geometry: Iterable[tuple[ParamInfo, Sequence[int], Sequence[int] | None]],
    further: Iterable[tuple[ParamInfo | SharedParamInfo, int]],
    numels: Sequence[int],
    is_padding: Sequence[bool],
) -> _C.ModuleParams:
    """The loops in C.

    Args:
        geometry: place, shape and strides (None if contiguous) of each original parameter.
        further: further places of shared ones, with the index of the parameter.
        numels, is_padding: of all segments of the flat parameter, padding included.
    """
    parameters = []
    originals = iter(geometry)
    offset = 0
    for numel, padding in zip(numels, is_padding, strict=True):
        if not padding:
            info, shape, stride = next(originals)
            parameters.append((info.module, info.param_name, shape, stride, offset))
        offset += numel
    return _C.ModuleParams(parameters, [(info.module, info.param_name, i) for info, i in further], offset)
