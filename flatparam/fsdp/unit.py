"""One unit: its parameters flattened into shards, and the C core's step over them.

A unit has one segment for each (dtype, requires_grad) that it holds apart: a flat parameter with a layout of its own.
"""

import copy
import dataclasses
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FlatParameter, MixedPrecision
from torch.nn.utils import stateless
from torch.utils.weak import WeakIdKeyDictionary

from .. import _C
from ..common.layout import FlatLayout
from ..common.storage import lacks_memory
from ..common.tensors import (
    check_memory,
    in_storage_order,
    is_dense,
    is_truly_contiguous,
    row_major,
    why_not_flat,
)
from . import collectives, order
from .blocks import Atomic, alignment_of, block_of, keeps_rows, row_numel
from .deferral import blank, template_of
from .errors import StateError
from .names import FLAT_PARAM, listed
from .outputs import DeviceError
from .placement import Placement
from .register import enroll_copy

LOW = (torch.bfloat16, torch.float16)  # dtypes that no gradients are added in
PADDING_VALUE = 42.0  # torch's: it is never read
_FREED = (
    "flatparam: a parameter of {unit} was used while it is sharded: {names}. It has its full data during the forward "
    "and backward of {unit}; outside of them use summon_full_params(), and call the wrapped module instead of one of "
    "its parts."
)
_IN_BACKWARD = (
    " In backward this means that what the unit computed reached the loss by another way than its output, or "
    "that a gradient is differentiated again (create_graph=True), after the unit was freed."
)


_units: "weakref.WeakSet[Unit]" = weakref.WeakSet()
_owners: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Unit]]" = weakref.WeakKeyDictionary()


_of_params: Any = WeakIdKeyDictionary()  # parameter -> (weak reference to its unit, its name there, its segment)


def _why_sharded(tensor: Tensor) -> str | None:
    """What is said of a shard that is taken for a whole parameter, by whatever name."""
    owner = owner_of_param(tensor)
    if owner is not None:
        return _FREED.format(unit=owner[0].name, names=f"`{owner[1]}`")
    storage, at = tensor.untyped_storage()._cdata, tensor.storage_offset()  # of a view of one
    for unit in _units:
        for here in (here for segment in unit.segments for here in segment.here()):
            piece = here.original.param
            begin = piece.storage_offset()
            if piece.untyped_storage()._cdata == storage and begin <= at < begin + max(1, piece.numel()):
                return _FREED.format(unit=unit.name, names=f"`{here.original.fqn}`")
    return None


_C.explain_shards(_why_sharded)


def all_units() -> "list[Unit]":
    """The units of this process."""
    return list(_units)


def owner_of_param(param: Tensor) -> "tuple[Unit, str] | None":
    """The unit that has ``param``, an original or a flat one, wherever that is, and the name it has there."""
    owner, fqn, _ = _of_params.get(param, (None, "", 0))
    unit = None if owner is None else owner()
    return None if unit is None else (unit, fqn)


def segment_of(param: Tensor) -> "Segment | None":
    """The segment that ``param``, an original or a flat one, is in."""
    owner, _, index = _of_params.get(param, (None, "", 0))
    unit = None if owner is None else owner()
    return None if unit is None else unit.segments[index]


def owner_of(module: nn.Module) -> "Unit | None":
    """The unit that has ``module``'s own parameters."""
    owner = _owners.get(module)
    return None if owner is None else owner()


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


class Here(NamedTuple):
    """What this rank's shard holds of one original parameter, and the shape that its piece has."""

    original: Original
    start: int  # in the shard
    numel: int  # -1: nothing
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, shard: Tensor) -> Tensor:
        """The piece of a tensor like the shard; empty where there is nothing."""
        if self.numel < 0:
            return shard.new_empty(self.shape)
        return shard.as_strided(self.shape, self.stride, shard.storage_offset() + self.start)


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


class Segment:
    """One flat parameter of a unit.

    Shapes: ``flat`` is the shard of this rank, ``[layout.shard_numel]``; the unsharded data are
    ``[layout.padded_numel]``, on ``device``.
    """

    def __init__(self, originals: list[Original], options: Options):
        placement = options.placement
        self.originals = originals
        self.placement = placement
        self.computes_on = options.device  # None: where the shard lies
        self.use_orig_params = options.use_orig_params
        self._reduce_dtype = options.mixed_precision.reduce_dtype
        self.layout, self.compute_dtype = layout_of(originals, placement.shards, options)
        self.in_rows = [
            options.atomic is not None and keeps_rows(original.shape, original.stride, original.block)
            for original in originals
        ]
        self.pieces = self.layout.param_shards(placement.rank)
        self.flat = FlatParameter(
            self._flatten(), requires_grad=any(original.param.requires_grad for original in originals)
        )
        if options.use_orig_params:
            self.point_at_pieces()

    def _flatten(self) -> Tensor:
        """This rank's shard, filled one parameter at a time; each is freed as soon as it was copied."""
        first = self.originals[0].param
        on_host = self.computes_on is not None
        shard = torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=first.device, pin_memory=on_host)
        begin = self.placement.rank * self.layout.shard_numel
        shard[: max(0, min(self.layout.shard_numel, self.layout.numel - begin))] = PADDING_VALUE
        for original, piece in zip(self.originals, self.pieces, strict=True):
            with torch.no_grad():
                if piece.in_shard and piece.numel_in_shard:
                    start: Any = piece.intra_param_start_idx
                    target = shard.narrow(0, piece.offset_in_shard or 0, piece.numel_in_shard)
                    if original.template is not None:
                        blank(target)
                        continue
                    target.copy_(in_storage_order(original.param).narrow(0, start, piece.numel_in_shard))
                original.param.data = torch.empty(0, dtype=first.dtype, device=first.device)
        return shard

    @property
    def device(self) -> torch.device:
        """Where the unsharded data are."""
        return self.computes_on or self.flat.device

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """What gradients are reduced in; None: what is computed in."""
        return self._reduce_dtype or (self.flat.dtype if self.placement.full_precision else None)

    def pin(self) -> None:
        """Have the shard in pinned memory again, if it lies on the host to be copied to a device."""
        if self.computes_on is not None and self.flat.is_cpu and not self.flat.is_pinned():
            self.flat.data = self.flat.detach().pin_memory()

    def trains(self, original: Original) -> bool:
        """Whether ``original`` requires grad now."""
        return original.param.requires_grad if self.use_orig_params else self.flat.requires_grad

    @property
    def is_trained(self) -> bool:
        """Whether any of it does, so that it has gradients."""
        return any(self.trains(original) for original in self.originals)

    @property
    def is_deferred(self) -> bool:
        """Whether some of its parameters have no values yet."""
        return any(original.template is not None for original in self.originals)

    @property
    def is_sharded(self) -> bool:
        return self.placement.shards > 1

    def piece_ranges(self) -> tuple[tuple[int, int], ...]:
        """``(start, numel)`` in the shard of each original parameter's piece; numel -1: none here."""
        return tuple(
            (piece.offset_in_shard or 0, piece.numel_in_shard or 0) if piece.in_shard else (0, -1)
            for piece in self.pieces
        )

    def here(self) -> Iterator[Here]:
        """What this rank holds of each original parameter.

        A piece is 1-D; it has the parameter's own shape where that is not sharded, and whole rows of it,
        ``(rows, *shape[1:])``, where ``atomic`` keeps them together.
        """
        for original, (start, numel), in_rows in zip(self.originals, self.piece_ranges(), self.in_rows, strict=True):
            shape, stride = tuple(original.shape), original.stride
            if self.is_sharded and not in_rows:
                shape, stride = (max(numel, 0),), (1,)
            elif self.is_sharded and numel < original.shape.numel():
                rows = max(numel, 0) // max(1, row_numel(shape))
                shape, stride = (rows, *shape[1:]), stride if shape else (1,)
            yield Here(original, start, numel, shape, stride)

    def view(self, flat: Tensor, original: Original, start: int) -> Tensor:
        """``original``'s shape and strides at ``start`` of ``flat``."""
        return flat.as_strided(original.shape, original.stride, flat.storage_offset() + start)

    def point_at_pieces(self) -> None:
        """Let the original parameters' data be their pieces of the shard."""
        shard = self.flat.detach()
        for here in self.here():
            if self.is_sharded:
                _C.set_shard(here.original.param, here.of(shard))
            else:
                here.original.param.data = here.of(shard)

    def unsharded(self, flat: Tensor) -> Iterator[Tensor]:
        """Views of an unsharded tensor ``[padded_numel]``, one an original parameter."""
        for original, offset in zip(self.originals, self.layout.offsets, strict=True):
            yield self.view(flat, original, offset)

    def gather(self, shard: Tensor) -> Tensor:
        """A new unsharded tensor ``[padded_numel]`` of ``shard`` on every rank, in its own dtype.

        Raises: ValueError naming a parameter if ``shard`` has no memory.
        """
        if lacks_memory(shard):
            raise ValueError(
                f"the storage of the shard that holds `{self.originals[0].fqn}` was freed or resized outside of "
                "flatparam, and its values are lost"
            )
        if not self.is_sharded:
            return shard.to(self.device)
        shard = shard.to(self.device)
        placement = self.placement
        groups = (placement.optim,) if placement.outer is None else (placement.outer, placement.param)
        sequence = order.before(self, order.GATHERS_OUTSIDE, self.device)
        for group in groups:
            assert group is not None
            whole = shard.new_empty(shard.numel() * dist.get_world_size(group))
            collectives.all_gather(whole, shard.contiguous(), group, None if sequence is None else sequence.wait)
            shard = whole
        return shard

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of an unsharded tensor."""
        return whole.narrow(0, self.placement.rank * self.layout.shard_numel, self.layout.shard_numel)

    def part(self, options: Options) -> tuple[Any, ...]:
        """What ``_C.Unit`` takes for this segment."""
        placement, precision = options.placement, options.mixed_precision
        entries = tuple(
            (item.names[0].module, item.names[0].name, tuple(item.shape), None if item.contiguous else item.stride, at)
            for item, at in zip(self.originals, self.layout.offsets, strict=True)
        )
        shared = tuple((n.module, n.name, i) for i, item in enumerate(self.originals) for n in item.names[1:])
        before, after = placement.factors
        if placement.full_precision and self.reduce_dtype in (torch.float32, torch.float64):
            before, after = 1.0, before * after  # nothing overflows: divide the shard instead of the whole
        use_orig_params = options.use_orig_params
        return (
            entries,
            shared,
            self.flat,
            tuple(item.param for item in self.originals) if use_orig_params else None,
            self.piece_ranges() if use_orig_params else ((0, self.layout.shard_numel),),
            self.layout.numel,
            self.layout.shard_numel,
            placement.rank,
            placement.shards,
            describe_group(placement.optim),
            describe_group(placement.replicate),
            before,
            after,
            self.compute_dtype,
            self._reduce_dtype,
            precision.keep_low_precision_grads,
            placement.stays_full,
            placement.param_rank,
            placement.param_shards,
            describe_group(placement.param) if placement.copied else None,
            describe_group(placement.outer),
            options.offload_grads,
            placement.full_precision,
            options.device,
        )


def describe_group(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, str | None] | None:
    """A group as the C core takes it: with the name under which C++ knows it, if it does."""
    if group is None:
        return None
    name = group.group_name
    try:
        known = dist.distributed_c10d._resolve_process_group(name) is not None
    except (RuntimeError, KeyError, ValueError):
        known = False
    return group, name if known else None


class Unit:
    """The parameters that one wrapper manages. Source of the layout: torch 2.13 ``FlatParamHandle``.

    Raises: ValueError naming the parameter that cannot be flattened with the others.
    """

    def __init__(self, module: nn.Module, originals: list[Original], options: Options, name: str):
        self.module = module
        self.options = options
        self.name = name
        check_tensors(originals, options)
        self.segments = [Segment(group, options) for group in _by_segment(originals, options)]
        if not options.use_orig_params:
            self._hide_originals()
        self.summoned: Any = None  # what summon.py keeps while the full parameters are there
        self.apart: str | None = None  # how ranks' values differ, as no values were given to all of them since
        self._make_step()

    def _make_step(self) -> None:
        name, options = self.name, self.options
        self.step = _C.Unit(
            name,
            tuple(segment.part(options) for segment in self.segments),
            options.placement.reshard_after_forward,
            functools.partial(_take_back, weakref.ref(self)),
            self._freed_reason(),
        )
        self.step.make_views()
        _units.add(self)
        owner = weakref.ref(self)
        for k, (name, segment) in enumerate(zip(self.flat_names(), self.segments, strict=True)):
            _of_params[segment.flat] = owner, name, k
            for original in segment.originals:
                _of_params[original.param] = owner, original.fqn, k
                _owners.update((place.module, owner) for place in original.names)

    def _freed_reason(self) -> str:
        """What is said when freed parameters are used."""
        names = [f"`{original.fqn}`" for segment in self.segments for original in segment.originals]
        *others, last = listed(names) or ["none"]
        return (_FREED + _IN_BACKWARD).format(
            unit=self.name, names=f"one of {', '.join(others)} and {last}" if others else last
        )

    def rename(self, name: str) -> None:
        """Be called ``name`` in messages."""
        self.name = self.step.name = name
        self.step.reason = self._freed_reason()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unit":
        copied = object.__new__(Unit)
        memo[id(self)] = copied
        memo.update((id(segment.layout), segment.layout) for segment in self.segments)  # layouts never change
        for key, value in vars(self).items():
            if key != "step":
                setattr(copied, key, copy.deepcopy(value, memo))
        copied.come_alive()
        enroll_copy(copied, self)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: all but the step. The blocks were chosen, so what chose them need not be picklable."""
        atomic = None if callable(self.options.atomic) else self.options.atomic
        return {
            **{key: value for key, value in vars(self).items() if key != "step"},
            "options": dataclasses.replace(self.options, atomic=atomic),
        }

    def come_alive(self) -> None:
        """Make the step of a copy, whose modules are all there, and let them have their pieces or views."""
        for segment in self.segments:
            segment.pin()
            if self.options.use_orig_params:
                segment.point_at_pieces()
        self._make_step()

    def _hide_originals(self) -> None:
        """Take the original parameters from their modules and register the flat ones instead."""
        for segment in self.segments:
            for original in segment.originals:
                _warn_of_hooks(self.name, original)
                for place in original.names:
                    delattr(place.module, place.name)
        self.register_flat()

    def flat_names(self) -> list[str]:
        return [FLAT_PARAM if i == 0 else f"{FLAT_PARAM}_{i}" for i in range(len(self.segments))]

    def register_flat(self) -> None:
        if not self.options.use_orig_params:
            for name, segment in zip(self.flat_names(), self.segments, strict=True):
                self.module.register_parameter(name, segment.flat)

    def unregister_flat(self) -> None:
        if not self.options.use_orig_params:
            for name in self.flat_names():
                self.module._parameters.pop(name, None)

    def filled(self) -> None:
        """Note that the shards were written, and have values."""
        for segment in self.segments:
            for original in segment.originals:
                original.template = None
        self.step.invalidate()

    def check_registered(self) -> None:
        """Raises: StateError if its module has another tensor in place of a flat parameter."""
        for name, segment in zip(self.flat_names(), self.segments, strict=True):
            if self.module._parameters.get(name, segment.flat) is not segment.flat:
                _let_swap_back()
                how = " by functional_call()" if _in_functional_call() else ""
                raise StateError(
                    f"{self.name}: its flat parameter `{name}` was exchanged{how}, and only the one it has is used: "
                    "set the data of that one, or call the module before it is wrapped"
                )

    def explain(self, error: BaseException) -> None:
        """Raises: RuntimeError from ``error``, which ended a forward, if that comes of a write in place."""
        if self.step.is_written and isinstance(error, RuntimeError) and "modified inplace" in str(error):
            raise RuntimeError(
                f"{self.name}: a parameter was changed in place in the middle of its forward, where gradients are "
                "recorded; the change is dropped. Set the parameter's .data there, or change it between steps"
            ) from error

    def check_shards(self, error: BaseException) -> None:
        """Raises: ValueError from ``error`` if a flat parameter was given data of another shape: it comes from that."""
        for name, segment in zip(self.flat_names(), self.segments, strict=True):
            if segment.flat.shape != (segment.layout.shard_numel,):
                raise ValueError(
                    f"{self.name}: expected the data of its flat parameter `{name}` to have shape "
                    f"({segment.layout.shard_numel},), got {tuple(segment.flat.shape)}: a shard keeps its size"
                ) from error

    def look_over(self) -> None:
        """Take what users have written to parameters, or put in their place, into the shards: before these are read."""
        if self.summoned is None:
            self.step.look_over()

    @torch.no_grad()
    def take_back(self) -> None:
        """Copy the values of parameters that were replaced, or whose data were, into the shard.

        Another Parameter that stands in an original one's place is that from now on; with ``use_orig_params=False`` its
        place is the view's again.

        Raises: ValueError naming a parameter whose values do not fit, or in whose place is no Parameter, and StateError
        in ``functional_call``; the shards are as they were.
        """
        writes: list[tuple[Tensor, Tensor]] = []
        replaced: list[tuple[int, int, Original, nn.Parameter]] = []
        try:
            for k, (segment, views) in enumerate(zip(self.segments, self.step.views(), strict=True)):
                shard = segment.flat.detach()
                for i, (piece, here) in enumerate(zip(segment.pieces, segment.here(), strict=True)):
                    now = self.standing_for(here.original, None if views is None else views[i])
                    if now is not None and now is not here.original.param:
                        replaced.append((k, i, here.original, now))
                    elif not segment.use_orig_params:
                        continue
                    value = here.original.param.detach() if now is None else now.detach()
                    held = max(here.numel, 0)
                    target = shard.narrow(0, here.start, held)
                    if value.numel() + held and not _lies_at(value, here, target):
                        writes.append((target, self._fit(here, piece.intra_param_start_idx or 0, value, target)))
        except ValueError:
            for segment in self.segments if self.options.use_orig_params else ():
                segment.point_at_pieces()
            raise
        for k, i, original, now in replaced:
            self.adopt(k, i, original, now)
        for target, value in writes:
            target.copy_(value)
        for segment in self.segments if self.options.use_orig_params else ():
            segment.point_at_pieces()
        if replaced:
            self.step.put(self.step.shows_views)

    def standing_for(self, original: Original, view: Tensor | None) -> nn.Parameter | None:
        """What modules have in place of ``original`` or its ``view``, if it is neither; None: one of the two.

        Raises: ValueError naming the parameter if it cannot stand there.
        """
        found: list[Any] = []
        for place in original.names:
            own = [vars(place.module).get(place.name), place.module._parameters.get(place.name)]
            have = [value for value in own if value is not None] or [_attribute(place)]
            found.append(next((value for value in have if value is not original.param and value is not view), original))
        if all(value is original for value in found):
            return None
        what = f"{self.name}: parameter `{original.fqn}`"
        if _in_functional_call():
            _let_swap_back()
            raise StateError(
                f"{what} is exchanged by functional_call(), for tensors that are not sharded: call it on the module "
                "before it is wrapped, or on a copy with the values of state_dict()"
            )
        now = found[0]
        if not isinstance(now, nn.Parameter):
            raise ValueError(
                f"{what} was deleted, or replaced by something that is no nn.Parameter ({type(now).__name__}): do that "
                "before wrapping (ties, parametrizations, weight norm and pruning too)"
            )
        if any(value is not now for value in found):
            names = ", ".join(f"`{place.fqn}`" for place in original.names)
            raise ValueError(f"{what} is shared by {names}, and not all of them were replaced: replace all, or none")
        if not _C.is_plain(now):
            raise ValueError(f"{what} was replaced by a {type(now).__name__} that is not plain and dense")
        owner = owner_of_param(now)
        if owner is not None:
            raise ValueError(
                f"{what} was replaced by `{owner[1]}` of {owner[0].name}: tie parameters before wrapping, in one unit; "
                "to exchange values, set their .data"
            )
        if not self.options.use_orig_params and now.requires_grad != original.param.requires_grad:
            raise ValueError(
                f"{what} was replaced by one that {'requires' if now.requires_grad else 'does not require'} grad; that "
                "is decided for all of a flat parameter: use use_orig_params=True, or replace it before wrapping"
            )
        return now

    def _fit(self, here: Here, start: int, value: Tensor, target: Tensor) -> Tensor:
        """``value``, of the whole or of the piece here, as what ``target`` is to be.

        ``start``: of the piece in the whole. Raises: ValueError for another shape, and where the dtype would round.
        """
        original = here.original
        if not _C.is_plain(value):
            raise ValueError(f"{self.name}: the new data of parameter `{original.fqn}` are not plain and dense")
        if lacks_memory(value):
            raise ValueError(
                f"{self.name}: the storage of the new data of parameter `{original.fqn}` was freed or resized: it has "
                "no values"
            )
        if value.shape == original.shape:
            value = in_order(value, original.stride).narrow(0, start, target.numel())
        elif value.shape == here.shape:
            value = in_order(value, here.stride)
        elif value.numel() != target.numel():
            raise ValueError(
                f"{self.name}: expected the new data of parameter `{original.fqn}` to have its shape "
                f"{tuple(original.shape)} or that of its piece here, {here.shape}, got {tuple(value.shape)}; it is as "
                "before"
            )
        value = check_not_rounded(self.name, original, value.reshape(-1), target.dtype)
        return value.clone() if value.untyped_storage().data_ptr() == target.untyped_storage().data_ptr() else value

    def adopt(self, k: int, i: int, original: Original, param: nn.Parameter) -> None:
        """Let ``param`` be the i-th original parameter of the k-th segment; the one before keeps its values."""
        if self.options.use_orig_params:
            old = original.param
            old.data = old.detach().clone()
            _of_params.pop(old, None)
            original.param = param
            self.step.adopt(k, i, param)
            _of_params[param] = weakref.ref(self), original.fqn, k
            for place in original.names:
                place.module._parameters[place.name] = param
        else:
            for place in original.names:
                place.module._parameters.pop(place.name, None)
                vars(place.module)[place.name] = None  # the view comes there

    def parameters(self) -> Iterator[tuple[Segment, nn.Parameter]]:
        """What the optimizer steps: the original parameters, or the flat ones."""
        for segment in self.segments:
            if self.options.use_orig_params:
                for original in segment.originals:
                    yield segment, original.param
            else:
                yield segment, segment.flat


def _warn_of_hooks(name: str, original: Original) -> None:
    """Say that hooks of a parameter that becomes a part of a flat one will not be called."""
    if original.param._backward_hooks or getattr(original.param, "_post_accumulate_grad_hooks", None):
        warnings.warn(
            f"{name}: hooks of `{original.fqn}` are not called, as it becomes a part of a flat parameter: register "
            "them on that when it is wrapped, or pass use_orig_params=True",
            stacklevel=5,
        )


def _attribute(place: Name) -> Any:
    """What the class of a module makes of a parameter's name, which the module does not have; None if it fails."""
    try:
        return getattr(place.module, place.name, None)
    except Exception:
        return None


def _in_functional_call() -> bool:
    """Whether ``torch.func.functional_call``, or its older names, is calling this."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None


def _let_swap_back() -> None:
    """Have ``functional_call`` put the views back where it has put Parameters: it would register them, and cannot."""
    for unit in _units:
        for segment in unit.segments if unit.summoned is None and not unit.options.use_orig_params else ():
            for place in (place for original in segment.originals for place in original.names):
                given = place.module._parameters.pop(place.name, None)
                if given is not None:
                    vars(place.module)[place.name] = given


def _lies_at(value: Tensor, here: Here, target: Tensor) -> bool:
    """Whether ``value`` is ``target``, the piece of the shard, as ``point_at_pieces`` has made it."""
    return (
        value.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
        and value.storage_offset() == target.storage_offset()
        and value.dtype == target.dtype
        and value.shape == torch.Size(here.shape)
        and value.stride() == here.stride
    )


def check_not_rounded(name: str, original: Original, value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` in ``dtype``. Raises: ValueError naming the parameter if that loses something."""
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
    """Whether tensors of one dtype and shape are equal bit for bit: -0.0 is not 0.0, and a NaN is itself."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def in_order(value: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The elements of ``value`` as a 1-D tensor in the order of memory that dense strides give."""
    if value.stride() == stride:
        return in_storage_order(value)
    ordered = value.new_empty(value.numel())
    ordered.as_strided(value.shape, stride).copy_(value)
    return ordered


def check_reduced(optimizer: torch.optim.Optimizer, *args: Any) -> None:
    """Before ``optimizer`` steps. What no_sync has kept in fp32 of parameters that are in less is rounded for it.

    Raises: ValueError naming a parameter whose gradient no_sync has kept, where that is to be reduced first.
    """
    if _C.unfit() == 0:
        return
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"] if param.grad is not None}
    for unit in _units:
        kept = {tensor.untyped_storage().data_ptr() for tensor in unit.step.kept() if tensor is not None}
        for segment, param in unit.parameters() if kept else ():
            grad = param.grad
            if id(param) not in stepped or grad is None or grad.untyped_storage().data_ptr() not in kept:
                continue
            if not unit.step.unreduced:
                _C.set_grad(param, grad.to(param.dtype))
            else:
                names = [original.fqn for original in segment.originals if original.param is param]
                raise ValueError(
                    f"{type(optimizer).__name__}.step(): the gradient of {names[0] if names else FLAT_PARAM} of "
                    f"{unit.name} comes from no_sync() and is not reduced over the ranks yet: run the last micro-batch "
                    "outside of no_sync(), or clear the gradients"
                )


def _take_back(unit: "weakref.ref[Unit]") -> None:
    """``take_back`` of a unit that the step must not keep alive."""
    alive = unit()
    if alive is not None and alive.summoned is None:
        alive.take_back()


def check_tensors(originals: Sequence[Original], options: Options) -> None:
    """Refuse what one unit cannot flatten together. Raises: ValueError naming the first offender."""
    if not originals:
        return
    first = originals[0]
    for original in originals:
        param = original.param
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
    for group in _by_segment(list(originals), options):
        if not any(original.shape.numel() for original in group):
            names = ", ".join(f"`{original.fqn}` {tuple(original.shape)}" for original in group)
            raise ValueError(f"Cannot flatten parameters without any element: {names}; ignore them (ignored_states)")
    there = [original for original in originals if original.template is None and not original.param.is_meta]
    check_memory([original.fqn for original in there], [original.param for original in there])


def _by_segment(originals: list[Original], options: Options) -> list[list[Original]]:
    if not originals:
        return []
    if not options.segments:
        return [originals]
    groups: dict[Any, list[Original]] = {}
    for original in originals:
        groups.setdefault((original.param.dtype, original.param.requires_grad), []).append(original)
    return sorted(groups.values(), key=lambda group: not group[0].param.requires_grad)


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
                dense = whole.layout == torch.strided and is_dense(whole)
                found[param] = Original(
                    param,
                    [place],
                    whole.shape,
                    tuple(whole.stride()) if dense else row_major(whole.shape),
                    is_truly_contiguous(whole) if dense else True,
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


def units_of(modules: Iterable[nn.Module]) -> Iterator[Unit]:
    """The units of wrappers among ``modules``."""
    for module in modules:
        unit = vars(module).get("_unit")
        if isinstance(unit, Unit):
            yield unit
