"""What must be true of a run in which faults have struck. A checker raises AssertionError with the run's story."""

from typing import Any

import torch

from .faults import HEARTBEAT

# Seconds from a fault until each rank that needs the struck one has raised: docs/ranks.md. A waiting rank looks once a
# second, and stays until the others have read its reason, 2 s at most
AT_ONCE = 3.0
STOPPED = 1.2 * HEARTBEAT + AT_ONCE  # it calls the others after 0.2 of the heartbeat
PROMISED = {
    "is killed": AT_ONCE,
    "is stopped": STOPPED,
    "is interrupted in a wait": AT_ONCE,
    "is interrupted": AT_ONCE,
    "is out of memory": AT_ONCE,
    "raises in user code": AT_ONCE,
    "has fewer batches": AT_ONCE,
    "is killed in a write": AT_ONCE,
}


def told(run: Any) -> dict[int, tuple[str, str, str]]:
    """Return the errors of the ranks that no fault struck: class, text and traceback."""
    struck = {fault.rank for fault in run.struck}
    return {rank: error for rank, error in run.errors.items() if rank not in struck}


def nobody_waits_for_ever(run: Any, size: int) -> None:
    killed = {fault.rank for fault in run.struck if fault.kind.startswith("is killed")}
    assert run.reason == 0, run.story
    assert set(run.ended) == set(range(size)) - killed, run.story


def all_are_told_in_time(run: Any) -> None:
    """Each rank raises in the promised time after one of the faults.

    Who is late comes late to the wait in which it is told, and a rank is out of memory at its next allocation.
    """
    late = [struck + fault.seconds for fault, struck in run.struck.items() if fault.kind == "is late"]
    last = []
    for fault, struck in run.struck.items():
        if fault.kind in PROMISED:
            begins = run.raised.get(fault.rank, struck) if fault.kind == "is out of memory" else struck
            last.append((struck, max(begins, *late, 0.0) + PROMISED[fault.kind]))
    for rank in told(run):
        assert any(struck <= run.raised[rank] <= end for struck, end in last), run.story


def all_are_told_alike(run: Any) -> None:
    """One text, an OrderError's, that names a struck rank, and no text of gloo; or that it could not build a unit."""
    errors = told(run)
    assert len({text for _, text, _ in errors.values()}) <= 1, run.story
    for kind, text, _ in errors.values():
        assert kind == "OrderError" or (kind == "ValueError" and " could not build its unit: " in text), run.story
        assert "gloo/" not in text, run.story
        assert any(f"rank {fault.rank} " in text for fault in run.struck), run.story


def all_are_told_that_the_store_is_gone(run: Any) -> None:
    for kind, text, _ in told(run).values():
        assert kind in ("OrderError", "StoreGoneError"), run.story
        assert text.startswith("the store of the process group cannot be reached any more"), run.story


def nobody_raises(run: Any, size: int, expected: list[torch.Tensor]) -> None:
    """All ranks return ``expected``, bit for bit."""
    assert not run.errors, run.story
    for rank in range(size):
        assert all(map(torch.equal, run.results[rank], expected)), run.story
