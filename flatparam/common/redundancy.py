"""How ``elastic`` keeps the state of each rank on others: groups of ranks, stripes, and their bytes."""

MOST = {"parity": 4, "buddy": 2}  # ranks of a group
_GENERATIONS = 2  # the newest committed step, and the one before it or the one that is being sent
_WORD = 8


def _groups(size: int, redundancy: str) -> int:
    return max(1, min(-(-size // MOST[redundancy]), size // 2))


def group_of(rank: int, size: int, redundancy: str) -> list[int]:
    """Return the ranks of the group of ``rank``: at least two, if ``size`` is, and ranks that lie apart.

    Neighbours are often in one machine, so they are in different groups where there are several.
    """
    groups = _groups(size, redundancy)
    return list(range(rank % groups, size, groups))


def stripe_of(length: int, ranks: int) -> int:
    """Return the bytes that each of the others in a group of ``ranks`` gets of a snapshot of ``length`` bytes."""
    return -(-length // (max(1, ranks - 1) * _WORD)) * _WORD


def bytes_of_copies(state: int, size: int, redundancy: str) -> int:
    """Return the bytes of host memory that ``elastic`` keeps on a rank of ``size`` at most.

    ``state``: the bytes of its shards and their optimizer states, once for all replicas. Of each generation there are
    the copy and the parity, in a group of two as large as the copy; a larger group receives into one more buffer.
    """
    if size < 2:
        return 0
    groups = _groups(size, redundancy)
    found = []
    for ranks in (size // groups, -(-size // groups)):
        stripe = stripe_of(state, ranks)
        copy = stripe * (ranks - 1)
        found.append(_GENERATIONS * (copy + stripe) + (copy if ranks > 2 else 0))
    return max(found)
