"""Move boxes of tensors from the ranks that hold them to the ranks that read them: the intersections and no more.

A plan of a save lists the boxes of a rank, and a plan of a load the parts of boxes that a rank reads. ``Pieces`` is the
source of that load: a file of it is the memory of a rank. It owns the small tensors alone. The boxes are views of the
model's memory (``resizing.py``), or of a snapshot (``training.py``).
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.boxes import Read, check_whole
from ..checkpoint.errors import CheckpointError
from ..checkpoint.files import NAMES, Chunk, Part
from ..checkpoint.index import OPTIMIZER, RANKS, Index
from ..checkpoint.planning import SavePlan
from ..checkpoint.reading import Source
from ..checkpoint.saving import merge
from ..common.tensors import bytes_of, row_major, span_of
from ..fsdp.desync.checked_collectives import exchange, gather_objects
from ..fsdp.desync.events import SetupCollective
from ..fsdp.sharding.placement import world
from . import peers

ROUND_BYTES = 2**24  # a rank sends another one less than this at once, plus at most one part of a box
Round = list[list[tuple[int, Any]]]  # by rank: boxes to send, or reads, with their bytes
Request = tuple[str, int, int, tuple[int, ...]]  # file, number of the box in it, first element, shape


At = tuple[str, int]  # file, number of the box in it
# (folder, key) -> dtype, shape, where each box is, and its offsets and sizes
Boxes = dict[tuple[str, str], tuple[str, tuple[int, ...], list[At], list[tuple[tuple[int, ...], tuple[int, ...]]]]]
Small = dict[At, bytes]  # the values as bytes: a tensor takes 90 us to pickle and load
Table = tuple[dict[str, Any], Boxes, Small]


class Held(NamedTuple):
    """The part of a model and its optimizers that one of the old ranks had. ``parts``: file -> boxes."""

    table: Table
    parts: dict[str, list[Part]]


def described(plan: SavePlan) -> Table:
    """Return what other ranks must know of ``plan``: its table, its boxes, and small tensors with their values.

    A small tensor is a value that describes a whole parameter, such as a number of steps, or one in ``extra``.
    """
    states = plan.told.get("optimizer", {}).get("states", {})
    small = {f"state.{name}.{key}" for name, values in states.items() for key, kind in values.items() if kind == "one"}
    boxes: Boxes = {}
    sent: Small = {}
    for file, parts in plan.parts.items():
        folder = file.split("/")[0]
        for number, part in enumerate(parts):
            tensor = part.tensor
            *_, at, places = boxes.setdefault((folder, part.key), (NAMES[tensor.dtype], part.shape, [], []))
            at.append((file, number))
            places.append((part.offsets, tuple(tensor.shape)))
            if folder == RANKS or (folder == OPTIMIZER and part.key in small):
                host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                sent[file, number] = bytes(bytes_of(host))
    return plan.told, boxes, sent


class Pieces(Source):
    """The boxes of all ranks that held a model, for rank ``me``.

    ``told``: of each old rank its table, and the rank that has its boxes now.
    Replicas have equal boxes. A rank takes its own, else that of replica number ``me`` modulo their number: so the
    reads are spread. ``holder``: file -> the rank that has its boxes.
    """

    def __init__(self, told: Sequence[tuple[Table, int]], me: int):
        self.index: Index = Index("", len(told), {})
        self._small: Small = {}
        self.holder: dict[str, int] = {}
        replicas: dict[Any, list[tuple[int, list[At]]]] = {}
        for (_, boxes, small), rank in told:
            self._small |= small
            for (folder, key), (dtype, shape, at, places) in boxes.items():
                self.holder.update((file, rank) for file, _ in at)
                alike = folder, key, dtype, shape, tuple(places), at[0][0] if folder == RANKS else None
                replicas.setdefault(alike, []).append((rank, at))
        for (folder, key, dtype, shape, found, _), those in replicas.items():
            at = next((at for rank, at in those if rank == me), those[me % len(those)][1])
            chunks = self.index.tensors.setdefault(folder, {}).setdefault(key, [])
            chunks += [Chunk(file, dtype, shape, box[0], box[1], i) for (file, i), box in zip(at, found, strict=True)]
        merge(self.index, (table for (table, _, _), _ in told))
        self.about, tensors = self.index.about, self.index.tensors
        self.model, self.optimizer, self.own = (tensors.get(folder, {}) for folder in ("model", OPTIMIZER, RANKS))
        self.digest = ""

    def whole(self, key: str, chunks: list[Chunk]) -> Tensor:
        """Return a small tensor, which is one box. All other tensors are read by ``move``, as planned."""
        check_whole(key, chunks)
        (chunk,) = chunks
        small = torch.empty(chunk.sizes, dtype=chunk.torch_dtype(key), device="cpu")
        bytes_of(small)[:] = self._small[chunk.file, chunk.begin]
        return small


def box_of(tensor: Tensor, begin: int, shape: Sequence[int]) -> Tensor:
    """Return the box of ``shape`` in ``tensor`` whose first element has the row-major number ``begin``."""
    for dim, (stride, size) in enumerate(zip(row_major(tensor.shape), shape, strict=True)):
        at, begin = divmod(begin, stride)
        tensor = tensor.narrow(dim, at, size) if size < tensor.shape[dim] else tensor
    return tensor


class Reading:
    """The reads of this rank, sorted by how their bytes come. ``shown``: of all ranks.

    ``here``: of boxes on this rank; ``direct``: rank -> reads in its memory, each with the address there; ``wanted``:
    rank -> reads that it must send the bytes of.
    """

    def __init__(self, source: Pieces, reads: Sequence[Read], shown: Sequence[peers.Shown]):
        self.shown = shown
        self.here: list[Read] = []
        self.direct: dict[int, list[tuple[Tensor, int]]] = {}
        self.wanted: list[list[Read]] = [[] for _ in shown]
        me, readable = dist.get_rank(), dict[int, bool]()
        for read in reads:
            rank = source.holder[read.chunk.file]
            if rank == me:
                self.here.append(read)
                continue
            if rank not in readable:
                readable[rank] = peers.read(shown[rank])
            at = shown[rank].boxes[read.chunk.file][read.chunk.begin]
            if at and readable[rank] and _is_run(read):
                self.direct.setdefault(rank, []).append((read.out, at + read.begin * read.out.element_size()))
            else:
                self.wanted[rank].append(read)

    def told(self) -> list[Any]:
        """Return for ``together``: rank -> bytes that are read in its memory; whether others must be sent."""
        direct = {str(rank): sum(out.nbytes for out, _ in theirs) for rank, theirs in self.direct.items()}
        return [direct, any(self.wanted)]


def together(said: list[list[Any]]) -> list[Any]:
    """Add up what all ranks have ``told``. Returns: rank -> bytes read in its memory; whether any are sent."""
    counts: Counter[str] = Counter()
    for direct, _ in said:
        counts.update(direct)
    return [counts, any(wanted for _, wanted in said)]


def _is_run(read: Read) -> bool:
    """Whether the bytes of ``read`` can be copied as they are: one run here and there."""
    out = read.out
    is_here = out.is_cpu and out.is_contiguous() and out.dtype == _dtype(read)
    return is_here and span_of(out.shape, row_major(read.chunk.sizes)) == out.numel()


def move(reading: Reading, ways: list[Any], parts: Mapping[str, list[Part]], problems: list[Exception]) -> int:
    """Carry out the reads of all ranks. ``ways``: what ``together`` returned; ``parts``: the boxes here.

    Bytes that are sent go through memory that the world has collectives for: the host's if it has any, else the
    device's. A rank does not wait for reads in its memory: after the caller's next ``agree`` they have ended.
    A collective call of all ranks of the world. An error of this rank alone goes into ``problems``, and the rank takes
    part in the collectives that remain: the others would wait for it, and the next call would meet theirs. Each rank
    has the memory for all rounds before the first: without it there could be no such part.
    Returns: the number of bytes that other ranks get from this one. Raises: OrderError if another rank cannot come
    to it.
    """
    me = dist.get_rank()
    via = torch.device(dist.distributed_c10d._get_object_coll_device(world()))
    wanted, sent = reading.wanted, int(ways[0].get(str(me), 0))
    with keeping(problems):
        for read in reading.here:
            read.out.copy_(box_of(parts[read.chunk.file][read.chunk.begin].tensor, read.begin, read.out.shape))
        for rank, theirs in reading.direct.items():
            if not peers.read(reading.shown[rank], theirs):
                raise CheckpointError(f"rank {rank} has ended, or has left the call, as its memory was read")
    if not ways[1]:
        return sent
    requests = [[(r.chunk.file, r.chunk.begin, r.begin, tuple(r.out.shape)) for r in theirs] for theirs in wanted]
    everyone: list[list[list[Request]]] = gather_objects(SetupCollective.RESIZES, requests, world())
    sides: list[list[Round]] = [[], []]  # rounds to give, and to take
    buffers = [torch.empty(0), torch.empty(0)]
    blank: Round = [[] for _ in wanted]
    with keeping(problems):
        gives = [[box_of(parts[file][i].tensor, at, shape) for file, i, at, shape in asked[me]] for asked in everyone]
        sides[0] = _rounds([[(one.nbytes, one) for one in theirs] for theirs in gives])
        sides[1] = _rounds([[(r.out.numel() * _dtype(r).itemsize, r) for r in theirs] for theirs in wanted])
        longest = [max((sum(_sizes(one)) for one in side), default=0) for side in sides]
        buffers = [torch.empty(length, dtype=torch.uint8, device=via) for length in longest]
    told = torch.tensor([max(map(len, sides)), len(problems)], device=via)
    exchange(SetupCollective.RESIZES, dist.all_reduce, told, group=world(), op=dist.ReduceOp.MAX)
    rounds, failed = told.tolist()
    for i in range(0 if failed else rounds):
        giving, taking = (side[i] if i < len(side) else blank for side in sides)
        out, got = (buffer[: sum(_sizes(one))] for buffer, one in zip(buffers, (giving, taking), strict=True))
        with keeping(problems):
            torch.cat([out[:0], *(_bytes(one).to(via) for run in giving for _, one in run)], out=out)
        exchange_bytes(got, out, _sizes(taking), _sizes(giving))
        sent += len(out)
        with keeping(problems):
            at = 0
            for count, read in (one for run in taking for one in run):
                read.out.copy_(got[at : at + count].clone().view(_dtype(read)).view(read.out.shape))
                at += count
    return sent


def exchange_bytes(got: Tensor, out: Tensor, sizes: list[int], out_sizes: list[int]) -> None:
    """Send ``out_sizes[i]`` bytes of ``out`` to rank ``i`` of the world, and put ``sizes[i]`` from it into ``got``."""
    splits = {"output_split_sizes": sizes, "input_split_sizes": out_sizes}
    exchange(SetupCollective.RESIZES, dist.all_to_all_single, got, out, group=world(), **splits)


@contextlib.contextmanager
def keeping(problems: list[Exception]) -> Iterator[None]:
    """Put an exception of the block into ``problems``: the other ranks wait for this one, which must go on."""
    try:
        yield
    except Exception as problem:
        problems.append(problem)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _dtype(read: Read) -> torch.dtype:
    return read.chunk.torch_dtype(read.chunk.file)


def _rounds(counted: Sequence[Sequence[tuple[int, Any]]]) -> list[Round]:
    """Cut ``counted``, by rank pairs with a number of bytes, into rounds of about ``ROUND_BYTES`` for each rank.

    Sender and receiver cut alike: the sizes decide.
    """
    runs: list[Round] = [[] for _ in counted]
    for mine, theirs in zip(runs, counted, strict=True):
        total = ROUND_BYTES
        for count, one in theirs:
            if total >= ROUND_BYTES:
                mine.append([])
                total = 0
            mine[-1].append((count, one))
            total += count
    return [list(one) for one in itertools.zip_longest(*runs, fillvalue=[])]


def _sizes(one: Round) -> list[int]:
    """Return the bytes in a round that go to each rank, or come from it."""
    return [sum(count for count, _ in run) for run in one]
