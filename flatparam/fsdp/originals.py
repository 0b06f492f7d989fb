"""The original parameters of a unit: which of them one flat parameter can hold, and where they lie in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.fsdp import FlatParameter, MixedPrecision

from .. import _C
from ..common.layout import FlatLayout
from ..common.tensors import check_memory, is_dense, is_truly_contiguous, row_major, why_not_flat
from .blocks import Atomic, alignment_of, block_of
from .deferral import template_of
from .outputs import DeviceError
from .placement import Placement

LOW = (torch.bfloat16, torch.float16)  # dtypes that no gradients are added in


class Name(NamedTuple):
    """One place of a parameter in the module tree."""

    module: nn.Module
    name: str
    fqn: str  # from the unit's module on, without the names of wrappers


@dataclass
class Original:
    """One original parameter."""

    param: nn.Parameter
    names: list[Name]  # the first is the one that named_parameters() gives
    shape: torch.Size
    stride: tuple[int, ...]
    contiguous: bool
    block: int = 1  # elements that stay on one rank
    template: nn.Parameter | None = None  # where param is a placeholder: what it stands for, on the meta device

    @property
    def fqn(self) -> str:
        return self.names[0].fqn


@dataclass(frozen=True)
class Options:
    """What a unit needs to know of its settings."""

    placement: Placement
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    use_orig_params: bool = False
    segments: bool = False
    shard_alignment: int | None = None
    atomic: Atomic = None
    offload_grads: bool = False
    device: torch.device | None = None  # to compute on, where the shards lie on the host


def find_originals(
    own: Iterable[nn.Module], module: nn.Module, ignored_params: set[nn.Parameter], clean: Callable[[str], str]
) -> list[Original]:
    """The parameters of the modules ``own`` below ``module``, in the order of ``named_parameters()``."""
    found: dict[nn.Parameter, Original] = {}
    mine = set(own)
    for path, submodule in module.named_modules(remove_duplicate=False):
        if submodule not in mine:
            continue
        for name, param in submodule._parameters.items():
            if param is None or param in ignored_params:
                continue
            place = Name(submodule, name, clean(f"{path}.{name}" if path else name))
            original = found.get(param)
            if original is None:
                template = template_of(param)
                whole = param if template is None else template
                strided = whole.layout == torch.strided
                contiguous = strided and is_truly_contiguous(whole)
                dense = contiguous or (strided and is_dense(whole))
                found[param] = Original(
                    param,
                    [place],
                    whole.shape,
                    tuple(whole.stride()) if dense else row_major(whole.shape),
                    contiguous or not dense,
                    template=template,
                )
            elif (submodule, name) not in [(other.module, other.name) for other in original.names]:
                original.names.append(place)
    return list(found.values())


def choose_blocks(originals: Iterable[Original], atomic: Atomic) -> None:
    """Note what of each parameter stays on one rank. Raises: ValueError, TypeError naming the parameter."""
    for original in originals:
        whole = original.param if original.template is None else original.template
        original.block = block_of(original.fqn, whole, original.shape, original.stride, atomic)


def check_tensors(originals: Sequence[Original], options: Options) -> None:
    """Refuse what one unit cannot flatten together. Raises: ValueError naming the first offender."""
    if not originals:
        return
    first = originals[0]
    for original in originals:
        param = original.param
        if (
            original is not first
            and (param.device, param.dtype) == (first.param.device, first.param.dtype)
            and param.requires_grad == first.param.requires_grad
            and _C.is_plain(param)
            and not isinstance(param, FlatParameter)
        ):
            continue  # as the first one, which is looked at more closely
        what = f"parameter `{original.fqn}` (shape {tuple(original.shape)}, {param.dtype} on {param.device})"
        if param.device != first.param.device:
            raise DeviceError(
                f"Must flatten tensors on the same device but got both {first.param.device} (`{first.fqn}`) and {what}"
            )
        refusal = why_not_flat(param, what)
        if refusal is not None:
            raise ValueError(refusal)
        if not _C.is_plain(param):
            kind = "nested" if param.is_nested else f"a {type(param).__name__}, a subclass of torch's"
            raise ValueError(
                f"Cannot flatten {what}: it is {kind}, whose own operations a flat parameter would pass by; make it "
                "a plain nn.Parameter, or ignore it (ignored_states)"
            )
        if param.dtype.itemsize == 1:
            raise ValueError(
                f"Cannot flatten {what}: no collective moves {param.dtype} and no gradient has it; build it in a wider "
                "dtype, or ignore it (ignored_states)"
            )
        if options.placement.full_precision and param.dtype in LOW and param.requires_grad:
            raise ValueError(
                f"LayerZero keeps master weights and adds gradients in the parameter's own precision, which is low for "
                f"{what}: build it in torch.float32 and pass MixedPrecision(param_dtype={param.dtype}), or freeze it "
                "before it is wrapped"
            )
        if param.dtype != first.param.dtype and not options.segments:
            raise ValueError(
                f"Must flatten tensors with uniform dtype but got {first.param.dtype} (`{first.fqn}`) and "
                f"{param.dtype} ({what}); pass segments=True, or wrap them in units of their own"
            )
        if param.requires_grad != first.param.requires_grad and not options.segments and not options.use_orig_params:
            raise ValueError(
                "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: "
                f"`{first.fqn}` has {first.param.requires_grad}, {what} has {param.requires_grad}; pass segments=True"
            )
    for group in by_segment(list(originals), options):
        if not any(original.shape.numel() for original in group):
            names = ", ".join(f"`{original.fqn}` {tuple(original.shape)}" for original in group)
            raise ValueError(f"Cannot flatten parameters without any element: {names}; ignore them (ignored_states)")
    there = [original for original in originals if original.template is None and not original.param.is_meta]
    check_memory([original.fqn for original in there], [original.param for original in there])


def by_segment(originals: list[Original], options: Options) -> list[list[Original]]:
    """The originals of each flat parameter of a unit."""
    if not originals:
        return []
    if not options.segments:
        return [originals]
    groups: dict[Any, list[Original]] = {}
    for original in originals:
        groups.setdefault((original.param.dtype, original.param.requires_grad), []).append(original)
    return sorted(groups.values(), key=lambda group: not group[0].param.requires_grad)


def layout_of(originals: Sequence[Original], shards: int, options: Options) -> tuple[FlatLayout, torch.dtype | None]:
    """Where parameters of one segment lie; and the dtype that they compute in, None for their own."""
    first, precision = originals[0].param, options.mixed_precision
    compute_dtype = precision.param_dtype if first.is_floating_point() else None
    dtype = compute_dtype or first.dtype
    arranged = options.atomic is not None or options.shard_alignment is not None
    layout = FlatLayout.of_shapes(
        [original.shape for original in originals],
        shards,
        itemsize=first.element_size(),
        alignment=alignment_of(
            options.shard_alignment, (first.dtype, dtype, precision.reduce_dtype or dtype), options.use_orig_params
        ),
        blocks=[original.block for original in originals] if arranged else None,
    )
    return layout, compute_dtype
