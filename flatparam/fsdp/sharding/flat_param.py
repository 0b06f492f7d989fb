"""One flat parameter of a unit: it owns this rank's shard and knows the place of each original parameter in it.

``unit/unit.py`` builds it and hands its ``spec`` to ``_C.Unit``, which gathers, frees and reduces in a step. State
dicts, summons and clipping read and write the shard through it. It does not know its unit or the modules' forwards.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

from ... import _C
from ...common.collectives import name_in_cpp
from ...common.tensors import as_sent, free, in_storage_order, refuse_freed, same_storage
from ...common.torch_private import FSDPExtensions
from ..desync import checked_collectives, torch_collectives
from .deferred import blank
from .extensions import Extended, dress_all
from .parameters import Options, ParamInfo, keeps_rows, layout_of, row_numel
from .placement import Placement

AWAY = "this rank holds no shards since elastic.resize() gave them to others: call it with this rank in `ranks`"
Group = tuple[dist.ProcessGroup, str | None, str | None]  # see describe_group()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatParamSpec:
    """The description of one flat parameter for ``_C.Unit``. C reads the fields by name: fp_flat_param_spec.c."""

    entries: tuple[tuple[Any, ...], ...]  # (module, name, shape, strides if not contiguous, offset) of each original
    shared: tuple[tuple[nn.Module, str, int], ...]  # further names of originals: (module, name, index in entries)
    shard: nn.Parameter
    params: tuple[nn.Parameter, ...] | None  # the originals, with use_orig_params
    # one for each tensor with a .grad: (start in the shard, numel, whether it is whole rows); numel -1: none here
    pieces: tuple[tuple[int, int, bool], ...]
    numel: int  # of the unsharded flat parameter, without padding
    shard_numel: int
    rank: int
    shards: int
    shard_group: Group | None
    compute_dtype: torch.dtype | None  # None: the shard's dtype
    stays_full: bool
    param_rank: int
    param_shards: int
    param_group: Group | None  # the group of the secondary shard, if there is one
    full_precision: bool
    reduce_dtype: torch.dtype | None = None  # None: compute_dtype
    keep_reduce_dtype: bool = False
    replicate_group: Group | None = None
    outer_group: Group | None = None
    predivide: float = 1.0  # gradients are divided by it before the reduction
    postdivide: float = 1.0  # and by this afterwards
    offloads: bool = False  # accumulated gradients lie in host memory
    in_order: bool = False  # parts of the ranks are added to the gradient one after the other, and not divided
    device: torch.device | None = None  # the device to compute on if the shard is on the host, else None
    extension: Extended | None = None  # makes other tensors for modules from views; None: modules see the views
    # makes new views objects of their parameters' classes
    dress: Callable[[tuple[Tensor, ...]], None] | None = None


class ShardSlice(NamedTuple):
    """The piece of one original parameter in this rank's shard."""

    original: ParamInfo
    start: int  # first element, in the shard
    numel: int  # -1: this rank holds nothing of the parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, shard: Tensor) -> Tensor:
        """Return the piece as a view of ``shard``, any tensor with the shard's layout; empty if numel is -1."""
        if self.numel < 0:
            return shard.new_empty(self.shape)
        return shard.as_strided(self.shape, self.stride, shard.storage_offset() + self.start)


class FlatParam:
    """One flat parameter of a unit.

    Shapes: ``flat`` is this rank's shard, ``[layout.shard_numel]``; the unsharded data are ``[layout.padded_numel]``,
    on ``device``. The constructor copies the originals into the shard and frees their memory.
    """

    dtype: torch.dtype  # the shard's when describe() was last called
    # The user converted the shard, and compute_dtype is its dtype from before; the first forward's inputs may change it
    keeps_dtype = False

    def __init__(self, originals: list[ParamInfo], options: Options):
        placement = options.placement
        self.originals = originals
        self.placement = placement
        self.computes_on = options.device  # None: on the shard's device
        self._of_slice = next((one for one in options.extensions if isinstance(one, DTensorExtensions)), None)
        self.use_orig_params = options.use_orig_params
        self.has_forms = any(original.form is not None for original in originals)  # modules see an extension's tensors
        self.in_bytes = originals[0].in_bytes  # frozen bytes, which nothing converts
        self.keeps_class = any(original.kept is not None for original in originals)  # modules see subclasses
        self.layout, (self.compute_dtype, self._reduce_dtype) = layout_of(originals, placement.shards, options)
        self.in_rows = [
            options.atomic is not None and keeps_rows(original.shape, original.stride, original.block)
            for original in originals
        ]
        self.pieces = self.layout.param_shards(placement.rank)
        is_trained = any(original.param.requires_grad for original in originals)
        self.flat = FlatParameter(self._flatten(), requires_grad=is_trained)

    @torch.no_grad()
    def _flatten(self) -> Tensor:
        """Make this rank's shard. Each parameter is freed as soon as it is copied, to need little memory besides.

        Padding is zero, so norms and weight decay of the flat parameter equal those of its parameters. It stays zero
        because its gradient is zero.
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

    def bind(self, placement: Placement, holds: bool) -> Callable[[], None]:
        """Take a new shard, without values, for ``placement``. Return a function that takes the old one again.

        ``holds``: False: this rank holds nothing from now on: the shard has no memory, and an access raises why.
        """
        layout, data, before = self.layout.over(placement.shards), self.flat.data, dict(vars(self))
        pinned = holds and data.is_cpu and self.computes_on is not None
        shard = data.new_empty(layout.shard_numel, pin_memory=pinned)
        if not holds:
            free(shard, f"flatparam: {AWAY}", keeps_size=True)  # parameters are views of it
        vars(self).pop("gaps", None)
        self.placement, self.layout, self.pieces = placement, layout, layout.param_shards(placement.rank)
        self.flat.data = shard

        def undo() -> None:
            vars(self).clear()
            vars(self).update(before)
            self.flat.data = data

        return undo

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
        """Set the padding to zero. The version counter of ``flat`` stays: no parameter is written."""
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
        """The device of the unsharded data and of the collectives."""
        return self.computes_on or self.flat.device

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of the reduction; None: the dtype of computation."""
        return self._reduce_dtype or (self.flat.dtype if self.placement.full_precision else None)

    def pin(self) -> None:
        """Move a shard on the host to pinned memory if the unit computes on a device. No-op if it is pinned."""
        if self.computes_on is not None and self.flat.is_cpu and not self.flat.is_pinned():
            self.flat.data = self.flat.detach().pin_memory()

    def leave_memory(self) -> bool:
        """Move the shard if the user has kept data of a parameter (``kept = param.data``), so that the kept data stay.

        Call it before other data of a parameter are copied into the shard. A shard that nobody else holds stays.
        Without original parameters the core does this itself (``leave_memory`` in tensor/fp_flat_buffer.hpp).
        Returns whether it has moved: call ``describe()`` then.
        """
        shard = self.flat.detach()
        ours = 3 if self.is_sharded else 5 + len(self.originals)  # flat, _local_shard, shard; flat buffer and views
        ours += sum(here.numel > 0 and same_storage(here.original.param, shard) for here in self.shard_slices())
        by_hand = hasattr(self.flat, "_zero1_shard")  # LayerZero's handle has more tensors of it
        moves = self.use_orig_params and not by_hand and _C.storage_holders(shard) > ours
        if moves:
            self.flat.data = shard.clone()
            self.pin()
        return moves

    def trains(self, original: ParamInfo) -> bool:
        """Whether ``original`` requires grad now."""
        return original.param.requires_grad if self.use_orig_params else self.flat.requires_grad

    @property
    def stepped(self) -> list[nn.Parameter]:
        """The parameters that an optimizer steps: the originals, or with ``use_orig_params=False`` ``flat``."""
        return [original.param for original in self.originals] if self.use_orig_params else [self.flat]

    @property
    def is_trained(self) -> bool:
        """Whether any original parameter requires grad now."""
        return any(self.trains(original) for original in self.originals)

    @property
    def is_deferred(self) -> bool:
        """Whether an original parameter has no values yet (``defer_init``)."""
        return any(original.template is not None for original in self.originals)

    @property
    def is_sharded(self) -> bool:
        return self.placement.shards > 1

    def extension_of(self, original: ParamInfo) -> FSDPExtensions | None:
        """Return the extension that cuts and gathers rows of ``original`` in sharded states; None: flatparam does."""
        return self._of_slice if original.form is None else original.form.extension

    def piece_ranges(self) -> tuple[tuple[int, int], ...]:
        """Return ``(start, numel)`` of each original parameter's piece in the shard; numel -1: no piece."""
        return tuple(
            (piece.offset_in_shard or 0, piece.numel_in_shard or 0) if piece.in_shard else (0, -1)
            for piece in self.pieces
        )

    def shard_slices(self) -> Iterator[ShardSlice]:
        """Yield this rank's piece of each original parameter.

        A piece is 1-D. It has the parameter's shape if the flat parameter is not sharded, and the shape
        ``(rows, *shape[1:])`` if ``atomic`` keeps rows together.
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
        """Return a view of 1-D ``flat`` from element ``start`` with the shape and strides of ``original``."""
        return flat.as_strided(original.shape, original.stride, flat.storage_offset() + start)

    def unsharded(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield views of an unsharded tensor ``[padded_numel]``, one for each original parameter."""
        for original, offset in zip(self.originals, self.layout.offsets, strict=True):
            yield self.view(flat, original, offset)

    def refuse_freed(self, shard: Tensor | None) -> None:
        """Raises: ValueError naming a parameter if ``shard``, the shard or a tensor like it, has no memory."""
        refuse_freed(shard, f"the shard that holds `{self.originals[0].fqn}`")

    def gather(self, shard: Tensor) -> Tensor:
        """Gather ``shard`` ``[shard_numel]`` of all ranks into ``[padded_numel]``, on ``device`` in its own dtype.

        A collective call outside of a step; if the flat parameter is not sharded, ``shard`` itself, on ``device``.
        ``shard``: the shard or a tensor like it, such as an optimizer state.
        Raises: ValueError naming a parameter if ``shard`` has no memory; OrderError if other ranks do not gather it.
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
        """Return this rank's part of an unsharded tensor, as a view."""
        return whole.narrow(0, self.placement.rank * self.layout.shard_numel, self.layout.shard_numel)

    def spec(self, options: Options) -> FlatParamSpec:
        """Return the description of this flat parameter for ``_C.Unit``."""
        placement = options.placement
        entries = tuple(
            (item.names[0].module, item.names[0].name, tuple(item.shape), None if item.contiguous else item.stride, at)
            for item, at in zip(self.originals, self.layout.offsets, strict=True)
        )
        shared = tuple((n.module, n.name, i) for i, item in enumerate(self.originals) for n in item.names[1:])
        predivide, postdivide = placement.factors
        if placement.full_precision and self.reduce_dtype in (torch.float32, torch.float64):
            predivide, postdivide = 1.0, predivide * postdivide  # no overflow in fp32: divide the smaller shard
        if options.in_order:
            predivide = postdivide = 1.0
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
            keep_reduce_dtype=bool(options.mixed_precision.keep_low_precision_grads),
            stays_full=placement.stays_full,
            param_rank=placement.param_rank,
            param_shards=placement.param_shards,
            param_group=describe_group(placement.param) if placement.has_secondary_shard else None,
            outer_group=describe_group(placement.outer),
            offloads=bool(options.offload_grads),
            in_order=options.in_order,
            full_precision=placement.full_precision,
            device=options.device,
            extension=Extended([item.form for item in self.originals]) if self.has_forms else None,
            dress=functools.partial(dress_all, [item.kept for item in self.originals]) if self.keeps_class else None,
        )


def describe_group(group: dist.ProcessGroup | None, host: dist.ProcessGroup | None = None) -> Group | None:
    """Return ``(group, its name in C++, the name of host in C++)`` for the C core; None for no group.

    ``host``: a gloo group with the same ranks, for flags on the host.
    """
    return None if group is None else (group, name_in_cpp(group), None if host is None else name_in_cpp(host))
