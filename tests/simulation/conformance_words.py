"""The words of the table of conformance: rows, and facts that several rows have. See conformance.py."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tests.simulation import conformance

REST = "the rest"
DIED = (conformance.DIED,)
STOPPED = (conformance.STOPPED,)


@dataclasses.dataclass(frozen=True)
class Row:
    """A program, and the facts that each rank returns: by name, by several names, or ``REST`` for the other names.

    ``processes``: a rank is stopped by a signal, so that real processes are needed.
    """

    id: str
    world_size: int
    program: Callable[[], Any]
    ranks: Sequence[Any]
    processes: bool = False


class Either(tuple):
    """Facts of which one is found: ranks that fail at the same time may see each other's failure first."""


# Collectives, by how they are tried
PAIRS = conformance.POINT_TO_POINT
BLOCKING = ("all_gather_object", "monitored_barrier")  # they return when they have ended
MOST = tuple(name for name in conformance.COLLECTIVES if name not in (*PAIRS, *BLOCKING))
MOVING = tuple(name for name in conformance.COLLECTIVES if name not in (*BLOCKING, "barrier"))

# Facts
ENDS = "ends at once"
ENDS_LATE = "ends in time"
LOST = "wait, at once: RuntimeError: connection lost"
LOST_AT_BEGIN = "begin, at once: RuntimeError: connection lost"
LOST_LATER = "wait, in time: RuntimeError: connection lost"
LOST_AT_TIME_OUT = "wait, at time-out: RuntimeError: connection lost"
NOT_RECEIVED = "wait, at time-out: RuntimeError: [source] Timed out waiting #ms for recv operation to complete"
NOT_SENT = "wait, at time-out: RuntimeError: [source] Timed out waiting #ms for send operation to complete"
NOT_RECEIVED_AT_BEGIN = (
    "begin, at time-out: RuntimeError: [source] Timed out waiting #ms for recv operation to complete"
)
NOT_SENT_AT_BEGIN = "begin, at time-out: RuntimeError: [source] Timed out waiting #ms for send operation to complete"
CLOSED_ITSELF = "wait, at once: RuntimeError: Application timeout caused pair closure"
RANK_FAILED = "begin, at once: RuntimeError: [Rank #]: Rank # failed to pass monitoredBarrier in # ms"
RANK_FAILED_AT_TIME_OUT = "begin, at time-out: RuntimeError: [Rank #]: Rank # failed to pass monitoredBarrier in # ms"
SLICE_OVER = "raises, at once: RuntimeError: Operation timed out!"
NO_FUTURE = "raises, at once: RuntimeError: Work::getFuture not implemented."
INVALID_NUMEL = (
    "begin, at once: RuntimeError: ProcessGroupGloo::allgather: invalid tensor size at index # (expected (#), got ("
)
NOT_RECEIVED_OR_LOST = Either((NOT_RECEIVED, LOST_AT_TIME_OUT, LOST))
NOT_SENT_OR_LOST = Either((NOT_SENT, LOST_AT_TIME_OUT, LOST))
CLOSED_OR_LOST = Either((CLOSED_ITSELF, LOST))
ENDS_OR_LOST = Either((ENDS, LOST))
LOST_SOON = Either((LOST, LOST_LATER))  # a rank needs a while to close many groups
LOST_OR_LATE = Either((*LOST_SOON, LOST_AT_TIME_OUT, NOT_RECEIVED, NOT_SENT))  # of three ranks: the lost one or another
ANY_END = Either((ENDS, *LOST_OR_LATE))  # the root may have served this rank before it saw the loss
WHENS = ("at once", "in time", "at time-out", "later")
NO_MESH = Either(f"begin, {when}: RuntimeError: Gloo connectFullMesh failed" for when in WHENS)
CANNOT = "The client socket has timed out after #ms while trying to connect to (<address>,"
CANNOT_CONNECT = Either(f"raises, {when}: DistNetworkError: {CANNOT}" for when in WHENS[2:])
STORE_CLOSED = Either(f"raises, {when}: DistNetworkError: Failed to recv, got # bytes" for when in WHENS)
STORE_LOST = Either(f"raises, {when}: DistNetworkError: connection lost" for when in WHENS)  # some calls take 5 s
NO_STORE = Either(f"begin, {when}: DistNetworkError: connection lost" for when in WHENS)
