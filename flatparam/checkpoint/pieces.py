"""What this rank holds of each parameter and buffer: its names, the whole's shape, a range of elements, a tensor.

A range is counted in memory order, which is row-major except for dense parameters with other strides (a transposed
weight): boxes of it are given in the parameter's own dimensions.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from ..common.layout import Box, boxes_of_range
from ..common.tensors import is_dense, row_major
from ..fsdp.loading import join, managed_places, units_in
from ..fsdp.names import clean_tensor_name
from ..fsdp.placement import Placement
from ..fsdp.segment import Segment
from ..fsdp.unit import Unit
from ..layer_zero.handle import FlatParamHandle, owner_of
from ..layer_zero.states import IDLE


@dataclass(frozen=True)
class Dense:
    """The memory order of a dense tensor. ``shape``, ``stride``: its own; ``order``: dimensions, outermost first."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], stride: Sequence[int]) -> "Dense":
        """Of dense strides; those of dimensions of one element may be anything."""
        if tuple(stride) == row_major(shape):
            return cls(tuple(shape), tuple(stride), tuple(range(len(shape))))
        order = sorted(range(len(shape)), key=lambda d: (shape[d] > 1, -stride[d]))
        inner = row_major([shape[d] for d in order])
        strides = dict(zip(order, inner, strict=True))
        return cls(tuple(shape), tuple(strides[d] for d in range(len(shape))), tuple(order))

    @property
    def is_row_major(self) -> bool:
        """Whether memory order is row-major order."""
        return self.order == tuple(range(len(self.shape)))

    def boxes(self, begin: int, end: int) -> list[Box]:
        """Elements ``[begin, end)`` in memory order as boxes of the tensor."""
        found = boxes_of_range([self.shape[d] for d in self.order], begin, end)
        if self.is_row_major:
            return found
        back = sorted(range(len(self.order)), key=lambda i: self.order[i])
        return [Box(tuple(box.offsets[i] for i in back), tuple(box.sizes[i] for i in back)) for box in found]

    def view(self, flat: Tensor, start: int, box: Box) -> Tensor:
        """``box`` in ``flat``, 1-D, whose first element is the whole's element ``start``."""
        at = sum(offset * stride for offset, stride in zip(box.offsets, self.stride, strict=True)) - start
        return flat.as_strided(box.sizes, self.stride, flat.storage_offset() + at)


@dataclass
class Held:
    """What this rank holds of one parameter or buffer.

    ``names``: all that the unwrapped model has for it; ``dense``: shape and order of the whole; ``start``: which of
    its elements is the first one here; ``flat``: those here, 1-D; ``owner``: what an optimizer steps: the parameter, or
    the flat one, in whose memory order ``flat`` begins at ``offset``; ``sharded``: whether ranks hold different
    elements; ``written``: the elements ``[begin, end)`` of the whole that this rank writes, not another replica of it;
    ``unit`` or ``handle``: what manages it, if anything does; ``segment``, ``number``: which original of which flat
    parameter of the unit it is.
    """

    names: list[str]
    dense: Dense
    start: int
    flat: Tensor
    owner: Tensor
    offset: int
    sharded: bool
    written: tuple[int, int]
    has_values: bool = True
    is_buffer: bool = False
    unit: Unit | None = None
    segment: Segment | None = None
    number: int = 0
    handle: FlatParamHandle | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return self.flat.numel()

    @property
    def is_flat(self) -> bool:
        """Whether optimizers step it as a part of a flat parameter."""
        return self.unit is not None and not self.unit.options.use_orig_params


def held_by(module: nn.Module, rank: int) -> Iterator[Held]:
    """What this rank holds of ``module``: first what units manage, in the order of their layouts, then the rest.

    The rest is parameters that no unit manages and persistent buffers: the same on all ranks, written by the one whose
    ``rank``, among those that save, is 0.
    """
    paths: dict[Unit, list[str]] = {}
    for path, unit in units_in(module):
        paths.setdefault(unit, []).append(path)
    for unit, places in paths.items():
        unit.look_over()
        for segment in unit.segments:
            yield from _of_segment(unit, places, segment)
    yield from _unmanaged(module, managed_places(paths), rank == 0)


def share(numel: int, placement: Placement) -> tuple[int, int]:
    """Which of a shard's ``numel`` elements this rank writes: its replicas write the others."""
    replica = 0 if placement.replicate is None else dist.get_rank(placement.replicate)
    return numel * replica // placement.replicas, numel * (replica + 1) // placement.replicas


def _of_segment(unit: Unit, paths: list[str], segment: Segment) -> Iterator[Held]:
    shard = segment.flat.detach()
    first, last = share(segment.layout.shard_numel, segment.placement)
    for number, (original, piece) in enumerate(zip(segment.originals, segment.pieces, strict=True)):
        offset, numel = piece.offset_in_shard or 0, piece.numel_in_shard or 0
        start = piece.intra_param_start_idx or 0
        begin, end = max(first, offset), min(last, offset + numel)
        written = (start + begin - offset, start + end - offset) if begin < end else (start, start)
        yield Held(
            [clean_tensor_name(join(path, name.fqn)) for path in paths for name in original.names],
            Dense.of(original.shape, original.stride),
            start,
            shard.narrow(0, offset, numel),
            original.param if segment.use_orig_params else segment.flat,
            0 if segment.use_orig_params else offset,
            segment.is_sharded,
            written,
            original.template is None,
            unit=unit,
            segment=segment,
            number=number,
        )


def _unmanaged(module: nn.Module, managed: set[tuple[nn.Module, str]], writes: bool) -> Iterator[Held]:
    found: dict[int, Held] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        persistent = {n: b for n, b in inner._buffers.items() if n not in inner._non_persistent_buffers_set}
        for name, tensor in itertools.chain(inner._parameters.items(), persistent.items()):
            if tensor is None or (inner, name) in managed:
                continue
            key = clean_tensor_name(join(path, name))
            if id(tensor) in found:
                found[id(tensor)].names.append(key)
                continue
            handle = owner_of(tensor)
            if handle is not None and handle._flat.is_sharded(handle.flat_param):
                found[id(tensor)] = _of_handle(key, handle, tensor)
                continue
            if type(tensor) not in (Tensor, nn.Parameter):
                raise ValueError(
                    f"`{key}` is a {type(tensor).__name__}, which is sharded by something else: save it by that"
                )
            if tensor.is_meta or not is_dense(tensor):
                raise ValueError(
                    f"`{key}` is {'on the meta device' if tensor.is_meta else 'not dense'}: replace it first"
                )
            found[id(tensor)] = Held(
                [key],
                Dense.of(tensor.shape, tensor.stride()),
                0,
                tensor.detach().as_strided((tensor.numel(),), (1,)),
                tensor,
                0,
                False,
                (0, tensor.numel() if writes else 0),
                is_buffer=not isinstance(tensor, nn.Parameter),
            )
    yield from found.values()


def _of_handle(name: str, handle: FlatParamHandle, param: Tensor) -> Held:
    """Raises: ValueError for a handle that is in the middle of a pass."""
    flat_param = handle.flat_param
    if handle._state is not IDLE or handle._is_unsharded:
        raise ValueError(f"`{name}`: its handle is in {handle._state.name}, expected it to be IDLE and sharded")
    handle._write_back()
    i = next(i for i, one in enumerate(flat_param._params) if one is param)
    piece = flat_param._shard_param_infos[i]
    start, numel = piece.intra_param_start_idx or 0, piece.numel_in_shard or 0
    return Held(
        [name],
        Dense.of(flat_param._shapes[i], flat_param._strides[i]),
        start,
        flat_param._zero1_shard.detach().narrow(0, piece.offset_in_shard or 0, numel),
        param,
        0,
        handle.zero1_world_size > 1,
        (start, start + numel),
        handle=handle,
    )
