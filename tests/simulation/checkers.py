"""What must be true of a run in which faults have struck. A checker raises AssertionError with the run's story."""

import re
from typing import Any

import torch

from flatparam.fsdp.desync.trace import _LOST

from .faults import HEARTBEAT, Fault

# Seconds from a fault until each rank that needs the struck one has raised: docs/ranks.md. A waiting rank looks once a
# second, and stays until the others have read its reason, 2 s at most
READING = 2.0
TROUBLED = 2.0  # for which a rank that has caught an error may come back
AT_ONCE = 1.0 + READING
WATCHED = 5.0  # where a device waits: docs/gpu.md
STOPPED = 1.2 * HEARTBEAT + AT_ONCE  # it calls the others after 0.2 of the heartbeat
APPEARS = 3  # points of a rank, at most, before others can see it in the store
PROMISED = {
    "is stopped": STOPPED,
    "is interrupted in a wait": AT_ONCE,
    "is interrupted": AT_ONCE,
    "is out of memory": AT_ONCE,
    "raises in user code": AT_ONCE,
    "finds the disk full": AT_ONCE,
}
# What a save or a load raises if a rank of it has raised an error
PASSED_ON = re.compile(r"checkpoint\.(?:save|load): (?:rank \d+: )?(OrderError|StoreGoneError): (.*)", re.DOTALL)

NAMED = r"\brank {0}\b|\branks \[[^]]*\b{0}\b"


def again(fault: Fault) -> float:
    """Return the seconds by which ``fault`` delays what is told of another: its rank should read, or call for all."""
    return READING + (HEARTBEAT if fault.kind == "is stopped" else 0.0)


def told(run: Any) -> dict[int, tuple[str, str, str]]:
    """Return the errors of the ranks that no fault struck: class, text and traceback.

    Of an error in which a save or a load passes on what a rank was told, it is the class and the text of that.
    """
    struck = {fault.rank for fault in run.struck}
    return {rank: error for rank, error in everyones(run).items() if rank not in struck}


def everyones(run: Any) -> dict[int, tuple[str, str, str]]:
    """Return the errors of all ranks, as ``told`` does, without what a rank says of its own device."""
    found = {}
    for rank, (kind, text, where) in run.errors.items():
        text = text.removesuffix(f". {_LOST}")
        passed_on = PASSED_ON.fullmatch(text)
        found[rank] = (kind, text, where) if passed_on is None else (*passed_on.groups(), where)
    return found


def nobody_waits_for_ever(run: Any) -> None:
    killed = {fault.rank for fault in run.struck if fault.kind.startswith("is killed")}
    assert run.reason == 0, run.story
    assert set(run.ended) == set(range(run.size)) - killed, run.story


def nobody_computes_other_values(run: Any) -> None:
    """The programs of training.py compare at each step."""
    assert all(kind != "AssertionError" for kind, _, _ in run.errors.values()), run.story


def all_are_told_in_time(run: Any, gone: float = AT_ONCE, least: float = 0.0) -> None:
    """Each rank raises in the promised time after one of the faults.

    ``gone``: that of a process which has gone; ``least``: what is allowed after each fault.

    Who is late comes late to the wait in which it is told, and a rank is out of memory at its next allocation.
    """
    late = [struck + fault.seconds for fault, struck in run.struck.items() if fault.kind == "is late"]
    last = []
    for fault, struck in run.struck.items():
        if fault.kind != "is late":
            begins = run.raised.get(fault.rank, struck) if fault.kind == "is out of memory" else struck
            others = sum(again(other) for other in run.struck if other != fault)
            promised = max(PROMISED.get(fault.kind, gone), least)
            if fault.kind == "raises in user code" and fault.seconds:  # it has caught the error, and goes on later
                promised += TROUBLED
                last.append((struck + fault.seconds, struck + fault.seconds + promised + others))
            last.append((struck, max(begins, *late, 0.0) + promised + others))
    for rank in told(run):
        assert any(struck <= run.raised[rank] <= end for struck, end in last), run.story


def all_are_told_alike(run: Any, texts: int = 1) -> None:
    """One text, an OrderError's, that names a struck rank, and no text of gloo.

    Or that rank could not build a unit, save or load, and the text is its error. ``texts``: how many there may be.
    """
    errors = told(run)
    assert len({text for _, text, _ in errors.values()}) <= texts, run.story
    for kind, text, _ in errors.values():
        own = (kind == "ValueError" and " could not build its unit: " in text) or kind == "CheckpointError"
        assert kind == "OrderError" or own, run.story
        assert "gloo/" not in text, run.story
        has_appeared = all(fault.point >= APPEARS for fault in run.struck)
        assert not has_appeared or "have not come to their first unit" not in text, run.story
        assert any(re.search(NAMED.format(fault.rank), text) for fault in run.struck), run.story


def nobody_waits_until_the_lost_have_read(run: Any) -> None:
    """A rank that is told ends once the living have read. For one fault, by which a rank of the same machine has ended.

    Who waits looks once a second.
    """
    for rank in told(run):
        assert run.ended[rank] - run.raised[rank] < 1.1, run.story


def all_raise_alike(run: Any, texts: int = 1) -> None:
    """After ranks have caught an error and gone on: all end well, or all but those raise, and one text.

    Who goes on later may find that the others have ended. A rank that has left out the first step has no optimizer
    state: a StateError. ``texts``: how many there may be.
    """
    late = {fault.rank for fault in run.struck if fault.seconds}
    assert len({text for rank, (_, text, _) in everyones(run).items() if rank not in late}) <= texts, run.story
    struck = {fault.rank for fault in run.struck}
    assert not run.errors or set(run.results) <= struck, run.story
    assert {kind for kind, _, _ in run.errors.values()} <= {"OrderError", "CheckpointError", "StateError"}, run.story


def all_are_told_that_the_disk_is_full(run: Any) -> None:
    """All ranks raise in the save."""
    assert set(run.errors) == set(run.ended), run.story
    for kind, text, _ in run.errors.values():
        assert kind in ("CheckpointError", "OSError"), run.story
        assert "No space left on device" in text, run.story


def all_are_told_that_the_store_is_gone(run: Any) -> None:
    for kind, text, _ in told(run).values():
        assert kind in ("OrderError", "StoreGoneError"), run.story
        assert re.match(r"(checkpoint\.\w+: )?the store of the process group cannot be reached any more", text), (
            run.story
        )


def nobody_raises(run: Any, size: int, expected: list[torch.Tensor]) -> None:
    """All ranks return ``expected``, bit for bit."""
    assert not run.errors, run.story
    for rank in range(size):
        assert all(map(torch.equal, run.results[rank], expected)), run.story
