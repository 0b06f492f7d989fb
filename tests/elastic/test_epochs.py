"""The epochs of an elastic job, on a store in memory.

Promises:
- a member that comes late is waited for as long as the heartbeat says, and for ever where that is 0:
  `test_a_late_member_is_waited_for`
- if a rank does not come to the first epoch in time, all ranks are told which, also those that come later or join, and
  those that would have waited longer: `test_a_rank_that_does_not_start_is_named_on_all`
- a process that asks to join, and says its name when the others have grown already, asks again:
  `test_a_process_that_says_its_name_late_joins_later`
- a rank gives up to connect to a world that is not made before the others drop it from the next one:
  `test_a_world_is_made_in_less_time_than_the_next_one_waits`
- who was lost or joined in an epoch whose world was never made is told with the next epoch, and once:
  `test_the_reasons_of_epochs_without_a_world_are_told`
- ranks that call ``start`` with other arguments, also a process that joins, are told so, all alike:
  `test_ranks_that_start_with_other_arguments_are_told`
- that error is not taken for the loss of a rank: `test_the_error_of_a_start_is_no_loss`
"""

import datetime
import threading
import time

import pytest

from flatparam.elastic import epochs, training
from flatparam.elastic.epochs import Epoch, Epochs
from flatparam.fsdp.desync.stores import in_memory
from flatparam.fsdp.errors import StateError


@pytest.mark.parametrize(("beat", "members"), [("0", ["0.0", "1.0"]), ("0.01", ["0.0"])])
def test_a_late_member_is_waited_for(monkeypatch, beat, members):
    monkeypatch.setenv("FLATPARAM_HEARTBEAT", beat)
    monkeypatch.setattr(epochs, "PATIENCE", 0.01)
    store = in_memory()
    store.set("flatparam elastic/epoch/1", '[["0.0", "1.0"], 0, ""]')

    def come_late():
        time.sleep(0.5)
        store.set("flatparam elastic/here/1/1.0", "")

    late = threading.Thread(target=come_late)
    late.start()
    try:
        found = Epochs(store, "0.0").meet(Epoch(1, ["0.0", "1.0"]))
    finally:
        late.join()
    assert found.members == members


def test_a_process_that_says_its_name_late_joins_later(monkeypatch):
    monkeypatch.setattr(epochs, "_SAYING", 0.01)
    store = in_memory()
    rank, joiner = Epochs(store, "0.0"), Epochs(store, "1.1")
    has_grown, found, say = threading.Event(), [], joiner._store.set

    def say_late(key, value):
        assert has_grown.wait(30.0)
        say(key, value)

    monkeypatch.setattr(joiner._store, "set", say_late)

    def joins():
        joiner.ask()
        found.append(joiner.wait_to_join(2))

    joining = threading.Thread(target=joins, daemon=True)
    joining.start()
    epoch = rank.first(2)
    for asks in (1, 2):
        end = time.monotonic() + 30.0
        while rank.asks() < asks and time.monotonic() < end:
            time.sleep(0.01)
        epoch = rank.grown(epoch, asks)
        has_grown.set()
    joining.join(30.0)
    assert (epoch.members, found) == (["0.0", "1.1"], [epoch])


@pytest.mark.parametrize("beat", ["2", "6", "60"])
def test_a_world_is_made_in_less_time_than_the_next_one_waits(monkeypatch, beat):
    monkeypatch.setenv("FLATPARAM_HEARTBEAT", beat)
    store = in_memory()
    session = training.Session(store, "0.0", 2, "parity", 1, datetime.timedelta(seconds=60))
    store.set("flatparam elastic/here/1/1.0", session.epochs.settings)  # it has come, and does not connect
    began = time.monotonic()
    asked = []

    def connect(timeout):
        asked.append(timeout)
        raise ZeroDivisionError

    monkeypatch.setattr(
        training.dist,
        "init_process_group",
        lambda *_, timeout, **__: session.make_group(connect, [], "gloo", "", timeout),
    )
    with pytest.raises(ZeroDivisionError):
        session.make_world(Epoch(1, ["0.0", "1.0"]))
    left = began + float(beat) + epochs.PATIENCE - time.monotonic()
    assert 2.0 <= 5 * asked[0].total_seconds() < left - 0.5  # gloo waits 5 times as long for a connection


def test_a_rank_that_does_not_start_is_named_on_all():
    store, told = in_memory(), {}

    def meets(member, seconds):
        mine = Epochs(store, member, seconds)
        try:
            mine.meet(mine.first(4)) if member.endswith(".0") else mine.wait_to_join(4)
        except StateError as error:
            told[member] = str(error)

    waiting = [threading.Thread(target=meets, args=one) for one in (("0.0", 0.3), ("3.0", 60.0), ("3.1", 60.0))]
    for one in waiting:
        one.start()
    for one in waiting:
        one.join(30.0)
    meets("1.0", 60.0)
    expected = (
        "elastic.start: of 4 ranks the ranks [1, 2] have not come within 0.3 s: find out why they have not called it, "
        "or give it a longer `timeout`"
    )
    assert told == dict.fromkeys(["0.0", "3.0", "3.1", "1.0"], expected)


@pytest.mark.parametrize(
    ("member", "changed", "said"),
    [
        ("1.0", {"redundancy": "buddy"}, "redundancy='buddy', every=1, backend='gloo'"),
        ("2.1", {"every": 2}, "redundancy='parity', every=2, backend='gloo'"),
    ],
)
def test_ranks_that_start_with_other_arguments_are_told(member, changed, said):
    store, told = in_memory(), []
    members = ["0.0", "1.0", "2.1" if member == "2.1" else "2.0"]

    def comes(one):
        settings = {"redundancy": "parity", "every": 1} | (changed if one == member else {})
        hour = datetime.timedelta(hours=1)
        session = training.Session(store, one, 3, time_out=hour, backend="gloo", **settings)
        with pytest.raises(StateError) as raised:
            session.make_world(Epoch(int(member == "2.1"), members))
        told.append(str(raised.value))

    coming = [threading.Thread(target=comes, args=(one,), daemon=True) for one in members]
    for one in coming:
        one.start()
    for one in coming:
        one.join(30.0)
    first = "redundancy='parity', every=1, backend='gloo'"
    text = f"expected the same arguments on all ranks, got {first} on rank 0 and {said} on rank {members.index(member)}"
    assert told == [f"elastic.start: {text}"] * 3


def test_the_error_of_a_start_is_no_loss():
    store = in_memory()
    session = training.Session(store, "0.0", 4, "parity", 1, datetime.timedelta(seconds=60))
    session._attempts = 1
    error = StateError("give it a longer `timeout`")
    with pytest.raises(StateError) as found:
        session.epoch_after(error)
    assert found.value is error
    assert session.epochs.after(Epoch(-1, [])) is None


def test_the_reasons_of_epochs_without_a_world_are_told():
    store = in_memory()
    first, later = Epochs(store, "0.0"), Epochs(store, "1.0")
    later.end("2.0", "2.0 was killed by SIGKILL")
    told = [first.reasons(epoch := first.without(first.first(3), ["2.0"]))]
    Epochs(store, "2.1").ask()
    joined = first.grown(epoch, 1)
    again = first.without(first.without(joined, []), [])
    told.append(first.reasons(again))
    told.append(later.reasons(later.without(later.without(again, ["0.0"]), ["2.1"])))  # another rank is the first now
    assert told == [
        "2.0 was killed by SIGKILL",
        "2.1 joined; its world has failed",
        "0.0 does not answer; 2.1 does not answer",
    ]
