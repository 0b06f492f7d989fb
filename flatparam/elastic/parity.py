"""Parities: what the ranks of a group keep, so that each rank's snapshot can be rebuilt if that rank is lost.

The ranks of the world are cut into groups of k ranks. Each rank cuts its snapshot into k - 1 stripes, one for each
other rank of its group. A rank keeps the XOR of the stripes that it got: its parity. With k = 2 the parity is a copy.
A group can lose one rank: each stripe of it is the XOR of one parity and of the other ranks' stripes in that parity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.errors import CheckpointError
from ..common.redundancy import stripe_of
from ..fsdp.desync.checked_collectives import issue, wait
from .epochs import Epoch
from .snapshot import Key, checksum, read
from .transport import exchange_bytes


class Kept(NamedTuple):
    """What a rank tells the others of a generation.

    ``members``: of the generation's epoch; ``number``: the rank's in it. ``has_copy``, ``has_parity``: its snapshot, or
    its parity, is complete and intact. ``corrupt``: a message for each of the two that has changed since the commit.
    """

    key: Key
    members: list[str]
    number: int
    has_copy: bool
    has_parity: bool
    corrupt: list[str]


class Generation:
    """The snapshots of one step on this rank: its own, ``data``, and its parity of the others in its group.

    ``ranks``: the group, numbers of ranks in ``epoch``. ``longest``: bytes of the longest snapshot in it. ``is_whole``:
    the parity is complete here. ``before``: the generation before; ``old``: one that is not used any more. This one
    takes memory that they do not need: the copy of ``old``, and the receive buffer of one of them. ``pinned``: ``data``
    is pinned memory, as it is copied from a device.
    """

    def __init__(
        self,
        epoch: Epoch,
        step: int,
        number: int,
        ranks: list[int],
        longest: int,
        before: Generation | None,
        old: Generation | None,
        pinned: bool = False,
    ):
        self.epoch, self.number, self.ranks = epoch, number, ranks
        self.key: Key = (epoch.number, step)
        self.stripe = stripe_of(longest, len(ranks))
        length = self.stripe * max(1, len(ranks) - 1)
        self.data: Tensor = _of_length(length, None if old is None else old.data, pinned)
        # a group of two keeps the receive buffer as its parity, so the next generation cannot take it
        giver = before if before is not None and before.is_whole and len(before.ranks) > 2 else old
        self._got: Tensor = _of_length(length if len(ranks) > 1 else 0, None if giver is None else giver._got)
        if giver is not None:
            giver._got = self._got[:0]
        self.parity = self._got[:0]
        self.is_whole: bool = len(ranks) == 1
        self._sums = 0
        self._work: Any = None
        self._over: Any = None

    def send(self, group: dist.ProcessGroup) -> None:
        """Begin to exchange stripes. ``group``: the process group of ``ranks``. A collective call of it."""
        if len(self.ranks) == 1:
            return
        splits = [0 if one == self.number else self.stripe for one in self.ranks]
        options = {"output_split_sizes": splits, "input_split_sizes": splits}
        self._over = group
        self._work = issue(dist.all_to_all_single, self._got, self.data, group=group, **options)

    def complete(self) -> None:
        """Wait for the other ranks' stripes, and compute the parity. Raises: OrderError if a rank is lost."""
        if self._work is not None:
            wait(self._work, self._over, self.data.device)
            first, *others = self._got.split(self.stripe)
            self.parity = add(first.clone(), others) if others else first
            self._sums = checksum(self.parity)
            self.drop_work()
            self.is_whole = True

    def check(self) -> Kept:
        """Compare this rank's copy and its parity with their checksums."""
        corrupt = []
        try:
            read(self.data, self.key, self.number)
        except CheckpointError as error:
            corrupt.append(str(error))
        has_copy = not corrupt
        has_parity = self.is_whole and (len(self.ranks) == 1 or checksum(self.parity) == self._sums)
        if self.is_whole and not has_parity:
            corrupt.append(f"rank {self.number}'s parity of step {self.key[1]} is corrupt: its checksum does not fit")
        return Kept(self.key, self.epoch.members, self.number, has_copy, has_parity, corrupt)

    def drop_work(self) -> None:
        """Wait no more for stripes: their ranks are lost."""
        self._work = self._over = None

    def stripe_for(self, number: int) -> Tensor:
        """Return the stripe that the rank ``number`` gets: they lie in the order of those ranks."""
        others = [one for one in self.ranks if one != self.number]
        at = others.index(number) * self.stripe
        return self.data[at : at + self.stripe]


def _of_length(length: int, old: Tensor | None, pinned: bool = False) -> Tensor:
    """Return ``length`` bytes: ``old`` if it fits, as fresh memory is slower to write."""
    if old is not None and old.numel() == length:
        return old
    return torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def add(out: Tensor, stripes: Sequence[Tensor]) -> Tensor:
    """XOR the bytes of ``stripes`` into ``out``, and return it."""
    for one in stripes:
        out.view(torch.int64).bitwise_xor_(one.view(torch.int64))
    return out


def rebuild(mine: Generation | None, lost: dict[int, list[int]], at: Callable[[int], int]) -> dict[int, Tensor]:
    """Rebuild the snapshots of lost ranks. A collective call of all ranks of the world.

    Args: ``mine``: this rank's generation of that step, or None; ``lost``: number of a lost rank -> its group; ``at``:
    returns the present rank of an old number. Returns: number of a lost rank -> its snapshot, on the first rank of its
    group that is left; elsewhere empty.
    """
    number = next((one for one, ranks in lost.items() if mine is not None and mine.number in ranks), None)
    if mine is None or number is None:  # no rank of this group is lost: take part in the others' collectives
        _exchanged({}, {})
        _exchanged({}, {})
        return {}
    survivors = [one for one in mine.ranks if one != number]
    stripes = {at(one): mine.stripe_for(one) for one in survivors if one != mine.number}
    others = _exchanged(stripes, dict.fromkeys(stripes, mine.stripe))
    builds = mine.number == survivors[0]
    piece = add(mine.parity.clone(), others)
    sizes = {at(one): mine.stripe for one in survivors} if builds else {}
    pieces = _exchanged({at(survivors[0]): piece}, sizes)
    return {number: torch.cat(pieces)} if builds else {}


def _exchanged(out: dict[int, Tensor], sizes: dict[int, int]) -> list[Tensor]:
    """Send ``out``, rank -> bytes, and return the bytes that came, in the order of ranks.

    ``sizes``: rank -> how many bytes come from it. A collective call of all ranks of the world.
    """
    ranks = range(dist.get_world_size())
    sent = torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *(out[rank] for rank in sorted(out))])
    got = torch.empty(sum(sizes.values()), dtype=torch.uint8, device="cpu")
    out_sizes = [out[rank].numel() if rank in out else 0 for rank in ranks]
    exchange_bytes(got, sent, [sizes.get(rank, 0) for rank in ranks], out_sizes)
    return list(got.split([sizes[rank] for rank in sorted(sizes)]))
