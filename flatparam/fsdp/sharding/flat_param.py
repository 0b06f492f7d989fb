"""One flat parameter of a unit: its shard, and how original parameters lie in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

from ... import _C
from ...common.collectives import name_in_cpp
from ...common.tensors import as_sent, in_storage_order, refuse_freed
from ...common.torch_private import FSDPExtensions
from ..desync import checked_collectives, torch_collectives
from .deferred import blank
from .extensions import Extended, dress_all
from .parameters import Options, ParamInfo, keeps_rows, layout_of, row_numel

Group = tuple[dist.ProcessGroup, str | None, str | None]  # see describe_group()


class FlatParamSpec(NamedTuple):
    """One flat parameter as ``_C.Unit`` takes it. C reads the fields by position, in ``fp_flat_param_read``."""

    entries: tuple[tuple[Any, ...], ...]  # (module, name, shape, strides if not contiguous, offset) of each original
    shared: tuple[tuple[nn.Module, str, int], ...]  # further names: (module, name, which original)
    shard: nn.Parameter
    params: tuple[nn.Parameter, ...] | None  # the originals, with use_orig_params
    # (start, numel) in the shard of what has .grad, whether its piece has the shape of rows; numel -1: nothing here
    pieces: tuple[tuple[int, int, bool], ...]
    numel: int  # of the unsharded flat parameter, without padding
    shard_numel: int
    rank: int
    shards: int
    shard_group: Group | None
    replicate_group: Group | None
    predivide: float  # what gradients are divided by before they are reduced
    postdivide: float  # and after
    compute_dtype: torch.dtype | None  # None: that of the shard
    reduce_dtype: torch.dtype | None  # None: the dtype of computation
    keep_reduce_dtype: bool
    stays_full: bool
    param_rank: int
    param_shards: int
    param_group: Group | None  # which gathers for forward and backward, where that is not the shard group
    outer_group: Group | None
    offloads: bool  # gradients, to the host
    full_precision: bool
    device: torch.device | None  # to compute on, where the shard lies on the host
    extension: Extended | None  # what makes of views what modules have, where that is something else
    dress: Callable[[tuple[Tensor, ...]], None] | None  # makes new views objects of their parameters' classes


class ShardSlice(NamedTuple):
    """What this rank's shard holds of one original parameter, and the shape that its piece has."""

    original: ParamInfo
    start: int  # in the shard
    numel: int  # -1: nothing
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, shard: Tensor) -> Tensor:
        """The piece of a tensor like the shard; empty where there is nothing."""
        if self.numel < 0:
            return shard.new_empty(self.shape)
        return shard.as_strided(self.shape, self.stride, shard.storage_offset() + self.start)


class FlatParam:
    """One flat parameter of a unit.

    Shapes: ``flat`` is the shard of this rank, ``[layout.shard_numel]``; the unsharded data are
    ``[layout.padded_numel]``, on ``device``.
    """

    dtype: torch.dtype  # of the shard, as far as flatparam has put it in one
    keeps_dtype = (
        False  # it computes in the dtype from before the shard was put in another, and the inputs may change that
    )

    def __init__(self, originals: list[ParamInfo], options: Options):
        placement = options.placement
        self.originals = originals
        self.placement = placement
        self.computes_on = options.device  # None: where the shard lies
        self._of_slice = next((one for one in options.extensions if isinstance(one, DTensorExtensions)), None)
        self.use_orig_params = options.use_orig_params
        self.has_forms = any(original.form is not None for original in originals)  # modules have other than plain ones
        self.in_bytes = originals[0].in_bytes  # frozen, and nothing converts them
        self.keeps_class = any(original.kept is not None for original in originals)  # modules have objects of those
        self.layout, (self.compute_dtype, self._reduce_dtype) = layout_of(originals, placement.shards, options)
        self.in_rows = [
            options.atomic is not None and keeps_rows(original.shape, original.stride, original.block)
            for original in originals
        ]
        self.pieces = self.layout.param_shards(placement.rank)
        self.flat = FlatParameter(
            self._flatten(), requires_grad=any(original.param.requires_grad for original in originals)
        )

    @torch.no_grad()
    def _flatten(self) -> Tensor:
        """This rank's shard, filled one parameter at a time; each is freed as soon as it was copied.

        Padding is zero, so that norms and decay of a flat parameter are those of its parameters. It stays zero, as its
        gradient is.
        """
        first = self.originals[0].param
        on_host = self.computes_on is not None
        shard = torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=first.device, pin_memory=on_host)
        for original, piece in zip(self.originals, self.pieces, strict=True):
            if piece.in_shard and piece.numel_in_shard:
                start: Any = piece.intra_param_start_idx
                target = shard.narrow(0, piece.offset_in_shard or 0, piece.numel_in_shard)
                if original.template is not None:
                    blank(target)
                    continue
                target.copy_(in_storage_order(original.param).narrow(0, start, piece.numel_in_shard))
            original.param.data = torch.empty(0, dtype=first.dtype, device=first.device)
        return shard

    @functools.cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """``(start, numel)`` of each run of padding in the shard."""
        found, end = [], 0
        for start, numel in (piece for piece in self.piece_ranges() if piece[1] > 0):
            found.append((end, start - end))
            end = start + numel
        found.append((end, self.layout.shard_numel - end))
        return tuple(gap for gap in found if gap[1] > 0)

    def clear_padding(self) -> None:
        """Set padding to zero, which is no write to a parameter: versions stay."""
        if self.gaps:
            torch._foreach_zero_([self.flat.data.narrow(0, start, numel) for start, numel in self.gaps])

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share it."""
        return self.placement.optim

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All groups that its collectives are issued over."""
        return self.placement.groups

    @property
    def device(self) -> torch.device:
        """Where the unsharded data are, and its collectives are issued."""
        return self.computes_on or self.flat.device

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """What gradients are reduced in; None: what is computed in."""
        return self._reduce_dtype or (self.flat.dtype if self.placement.full_precision else None)

    def pin(self) -> None:
        """Have the shard in pinned memory again, if it lies on the host to be copied to a device."""
        if self.computes_on is not None and self.flat.is_cpu and not self.flat.is_pinned():
            self.flat.data = self.flat.detach().pin_memory()

    def trains(self, original: ParamInfo) -> bool:
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

    def extension_of(self, original: ParamInfo) -> FSDPExtensions | None:
        """What cuts and gathers the rows of ``original`` in sharded states, where that is not flatparam."""
        return self._of_slice if original.form is None else original.form.extension

    def piece_ranges(self) -> tuple[tuple[int, int], ...]:
        """``(start, numel)`` in the shard of each original parameter's piece; numel -1: none here."""
        return tuple(
            (piece.offset_in_shard or 0, piece.numel_in_shard or 0) if piece.in_shard else (0, -1)
            for piece in self.pieces
        )

    def shard_slices(self) -> Iterator[ShardSlice]:
        """What this rank holds of each original parameter.

        A piece is 1-D; it has the parameter's own shape where that is not sharded, and whole rows of it,
        ``(rows, *shape[1:])``, where ``atomic`` keeps them together.
        """
        is_sharded = self.is_sharded
        for original, (start, numel), in_rows in zip(self.originals, self.piece_ranges(), self.in_rows, strict=True):
            shape, stride = tuple(original.shape), original.stride
            if is_sharded and not in_rows:
                shape, stride = (max(numel, 0),), (1,)
            elif is_sharded and numel < original.shape.numel():
                rows = max(numel, 0) // max(1, row_numel(shape))
                shape, stride = (rows, *shape[1:]), stride if shape else (1,)
            yield ShardSlice(original, start, numel, shape, stride)

    def view(self, flat: Tensor, original: ParamInfo, start: int) -> Tensor:
        """``original``'s shape and strides at ``start`` of ``flat``."""
        return flat.as_strided(original.shape, original.stride, flat.storage_offset() + start)

    def unsharded(self, flat: Tensor) -> Iterator[Tensor]:
        """Views of an unsharded tensor ``[padded_numel]``, one an original parameter."""
        for original, offset in zip(self.originals, self.layout.offsets, strict=True):
            yield self.view(flat, original, offset)

    def refuse_freed(self, shard: Tensor | None) -> None:
        """Raises: ValueError naming a parameter if ``shard``, or what else has its length, has no memory."""
        refuse_freed(shard, f"the shard that holds `{self.originals[0].fqn}`")

    def gather(self, shard: Tensor) -> Tensor:
        """A new unsharded tensor ``[padded_numel]`` of ``shard`` on every rank, in its own dtype.

        Raises: ValueError naming a parameter if ``shard`` has no memory.
        """
        self.refuse_freed(shard)
        if not self.is_sharded:
            return shard.to(self.device)
        shard = shard.to(self.device)
        placement = self.placement
        groups = (placement.optim,) if placement.outer is None else (placement.outer, placement.param)
        for group in groups:
            assert group is not None
            trace = checked_collectives.before(self, _C.EVENT_GATHERS_OUTSIDE, self.device)
            whole = shard.new_empty(shard.numel() * dist.get_world_size(group))
            torch_collectives.all_gather(as_sent(whole), as_sent(shard.contiguous()), group, trace)
            shard = whole
        return shard

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of an unsharded tensor."""
        return whole.narrow(0, self.placement.rank * self.layout.shard_numel, self.layout.shard_numel)

    def spec(self, options: Options) -> FlatParamSpec:
        """What ``_C.Unit`` takes for this flat parameter."""
        placement = options.placement
        entries = tuple(
            (item.names[0].module, item.names[0].name, tuple(item.shape), None if item.contiguous else item.stride, at)
            for item, at in zip(self.originals, self.layout.offsets, strict=True)
        )
        shared = tuple((n.module, n.name, i) for i, item in enumerate(self.originals) for n in item.names[1:])
        predivide, postdivide = placement.factors
        if placement.full_precision and self.reduce_dtype in (torch.float32, torch.float64):
            predivide, postdivide = 1.0, predivide * postdivide  # nothing overflows: divide the shard, not the whole
        use_orig_params = options.use_orig_params
        return FlatParamSpec(
            entries=entries,
            shared=shared,
            shard=self.flat,
            params=tuple(item.param for item in self.originals) if use_orig_params else None,
            pieces=tuple((*piece, in_rows) for piece, in_rows in zip(self.piece_ranges(), self.in_rows, strict=True))
            if use_orig_params
            else ((0, self.layout.shard_numel, False),),
            numel=self.layout.numel,
            shard_numel=self.layout.shard_numel,
            rank=placement.rank,
            shards=placement.shards,
            shard_group=describe_group(placement.optim, placement.host),
            replicate_group=describe_group(placement.replicate),
            predivide=predivide,
            postdivide=postdivide,
            compute_dtype=self.compute_dtype,
            reduce_dtype=self._reduce_dtype,
            keep_reduce_dtype=options.mixed_precision.keep_low_precision_grads,
            stays_full=placement.stays_full,
            param_rank=placement.param_rank,
            param_shards=placement.param_shards,
            param_group=describe_group(placement.param) if placement.has_secondary_shard else None,
            outer_group=describe_group(placement.outer),
            offloads=options.offload_grads,
            full_precision=placement.full_precision,
            device=options.device,
            extension=Extended([item.form for item in self.originals]) if self.has_forms else None,
            dress=functools.partial(dress_all, [item.kept for item in self.originals]) if self.keeps_class else None,
        )


def describe_group(group: dist.ProcessGroup | None, host: dist.ProcessGroup | None = None) -> Group | None:
    """A group, and one of its ranks for the host, as the C core takes it: with the names under which C++ knows them."""
    if group is None:
        return None
    return group, name_in_cpp(group), None if host is None else name_in_cpp(host)
