"""_C.CollectiveTrace and _C.ModelTrace: when they ask, which calls they refuse, and that they leak nothing."""

import gc

import pytest
from hand_built import module_with, part_of, run_of, step_of

from benchmarks.c_testing import _C_testing
from flatparam import _C


def test_an_order_asks_before_what_was_not_to_be_expected():
    asked, waits = [], []

    def begin(event, new_pass):
        order.note(event, new_pass)
        order.begin()

    order = _C.CollectiveTrace(lambda *question: asked.append(question), lambda: waits.append(1), print)
    for _ in range(3):
        for event in range(4):
            begin(event, event == 0)
    assert asked == [(0, 0, 1, 0), (1, 1, 0, 0), (2, 2, 0, 0), (3, 3, 0, 0), (4, 0, 1, 0)]
    begin(2, True)
    assert asked[5:] == [(12, 2, 1, 1)]
    assert (order.count, order.passes, order.at(12), order.at(13)) == (13, 4, (2, True), None)
    assert not waits
    order.broken = 1
    begin(3, False)
    begin(0, True)
    assert len(asked) == 8  # from then on always

    order.broken, order.always = 0, 1
    begin(1, False)
    begin(2, False)
    begin(3, False)
    begin(0, True)
    begin(1, False)
    assert asked[-1] == (19, 1, 0, 2)  # though it was expected

    def refuse(*question):
        raise KeyError(question)

    order = _C.CollectiveTrace(refuse, refuse, refuse)
    with pytest.raises(KeyError):
        order.note(5, True)
    assert order.count == 1


def test_an_order_asks_after_what_did_not_begin_until_it_is_settled():
    asked = []
    order = _C.CollectiveTrace(lambda *question: asked.append(question), print, print)
    for event in (0, 1) * 3:
        order.note(event, event == 0)
        order.begin()
    asked.clear()
    order.note(0, True)
    assert (asked, order.missed) == ([], None)  # not yet
    order.note(1, False)
    order.begin()
    index, digest = order.missed
    assert (index, asked) == (6, [(7, 1, 0, 2)])
    assert (order.at(6), order.at(7)) == ((_C.TRACE_MISSED, False), (1, False))
    assert [order.has_begun(i) for i in (5, 6, 7, 8)] == [True, False, True, False]
    order.note(0, True)
    order.note(1, False)
    assert order.missed[0] == 6
    assert order.missed[1] != digest
    order.begin()
    order.confirm_not_begun()
    asked.clear()
    order.note(0, True)
    assert (asked, order.missed) == ([], None)
    order.launch()
    order.note(1, False)
    assert order.missed[1] == 0  # nobody knows whether it has begun


def test_orders_that_are_refused():
    order = _C.CollectiveTrace(print, print, print)
    for call in (
        lambda: _C.CollectiveTrace(print, print),
        lambda: order.note(1),
        lambda: order.note("1", True),
        lambda: order.note(1, 1),
    ):
        with pytest.raises(TypeError):
            call()
    for event in (-1, _C.TRACE_MISSED):
        with pytest.raises(ValueError, match="below TRACE_MISSED"):
            order.note(event, False)
    with pytest.raises(TypeError):
        order.at("1")
    assert order.count == 0
    for arguments in ((), (3,), (order, order)):
        with pytest.raises(TypeError):
            _C.ModelTrace(*arguments)
    follower = _C.ModelTrace(order)
    step = step_of(part_of(module_with()))
    step.follow(0, follower, 0, True)
    for arguments in ((0, order, 0, True), (0, follower, "0", True), (0, follower, 0, 1), (0, follower, 0)):
        with pytest.raises(TypeError):
            step.follow(*arguments)
    for which, number in ((8, 0), (-1, 0), (0, -1), (0, 2**32)):
        with pytest.raises(ValueError, match="a group from 0 to 7"):
            step.follow(which, follower, number, True)
    run = run_of()
    for followers in ([follower], (follower, order)):
        with pytest.raises(TypeError, match="tuple of ModelTrace"):
            run.tell(followers)
    run.tell((follower,))


def test_orders_leak_nothing_and_each_allocation_may_fail():
    gc.collect()  # what other tests have left
    before = _C_testing.alloc_live()

    class Asker:
        def __init__(self):
            self.order = _C.CollectiveTrace(self.ask, self.ask, self.ask)  # a cycle

        def ask(self, *question):
            pass

    for failure in (1, 2):
        _C_testing.alloc_fail_at(failure)
        with pytest.raises(MemoryError):
            _C.CollectiveTrace(print, print, print)
        _C_testing.alloc_fail_at(0)
    asker = Asker()
    _C_testing.alloc_fail_at(1)

    def note_many(order=asker.order):
        for event in range(1000):
            order.note(event, event == 0)

    with pytest.raises(MemoryError):
        note_many()
    noted = asker.order.count
    assert 0 < noted < 1000
    asker.order.note(noted, False)
    assert asker.order.count == noted + 1
    del note_many
    run = run_of()
    follower = _C.ModelTrace(asker.order)
    run.tell((follower,))
    step = step_of(part_of(module_with()))
    step.follow(1, follower, 0, False)
    del asker, follower, run, step
    gc.collect()
    assert _C_testing.alloc_live() == before
