"""The loop of ``flatparam.elastic`` on one rank: calls that it cannot carry through a loss are refused by name.

Promises:
- gradients that no_sync() has added up over the end of a step are refused at the commit:
  `test_a_step_ends_with_reduced_gradients`
- ``extra`` with a wrapped model is refused at the start, and a name in it that came after the commit at the loss:
  `test_extra_that_cannot_go_back_is_refused`
- a process that joins is told that it has no rank before ``steps``; another thread, such as one that loads data, knows
  the rank while there is a world, and is told if there is none: `test_a_rank_is_known_in_the_loop`
- training, commits and a resize do not depend on torch's default device: `test_another_default_device_changes_nothing`;
  the end of the loop takes no copies, and leaves no exchange under way
- ranks that give another ``until`` are told so, all alike: `test_ranks_with_another_end_are_told`
- a second call of ``steps``, and an ``until`` that is no integer, are refused: `test_a_second_loop_is_refused`
- a rank that skips a step alone is told with all others, and no process ends in gloo:
  `test_a_rank_that_skips_a_step_is_told`
- ranks that are no integers are refused on all ranks: `test_ranks_that_are_no_integers_are_refused_by_all`
- a rank that leaves the loop by ``break`` says so, as one does that comes to its end:
  `test_a_break_ends_the_loop_like_its_end`
- ``samples`` makes the permutation of an epoch once: `test_samples_of_an_epoch_are_ordered_once`
- a model, or an optimizer, that differs in a new process is told with the function that makes it:
  `test_a_state_that_does_not_fit_names_build`
"""

import datetime
import threading

import gloo
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import elastic
from flatparam.checkpoint.errors import CheckpointError
from flatparam.elastic import sampling, training
from flatparam.elastic.epochs import Epoch
from flatparam.fsdp.desync.stores import in_memory
from flatparam.fsdp.errors import OrderError, StateError
from tests.elastic.test_worlds import begun, build


@pytest.fixture
def session():
    return training.Session(in_memory(), "0.0", 2, "parity", 1, datetime.timedelta(seconds=60))


def leaves_gradients():
    """Returns: the error of a step that ends in no_sync()."""
    _, mine = begun()
    try:
        for _ in elastic.steps(mine.model, mine.optimizer, until=3):
            with elastic.survive(), mine.model.no_sync():
                mine.model(torch.ones(2, 4)).sum().backward()
    except StateError as error:
        return str(error)


@pytest.mark.multiprocess
def test_a_step_ends_with_reduced_gradients():
    for _, told, _ in gloo.ends_of_ranks(leaves_gradients, 2):
        assert told.startswith("elastic.steps: gradients of the unit of Linear come from no_sync() and are not reduced")


def trains_and_moves(default):
    """Returns: the parameters at the end."""
    torch.manual_seed(0)
    _, mine = begun()
    torch.set_default_device(default)
    try:
        for step in elastic.steps(mine.model, mine.optimizer, until=3):
            with elastic.survive():
                data = torch.full((2, 4), step + elastic.rank(), dtype=torch.float32, device="cpu")
                mine.model(data).sum().backward()
                mine.optimizer.step()
        assert all(one.is_whole for one in mine.generations)  # gloo sends nothing as the script ends
        elastic.resize(mine.model, mine.optimizer, [1])
        elastic.resize(mine.model, mine.optimizer, [0, 1])
    finally:
        torch.set_default_device("cpu")
    with FSDP.summon_full_params(mine.model):
        return [param.tolist() for param in mine.model.parameters()]


@pytest.mark.multiprocess
def test_another_default_device_changes_nothing():
    assert gloo.run_ranks(trains_and_moves, 2, "meta") == gloo.run_ranks(trains_and_moves, 2, "cpu")


def ends_at(every, ends):
    rank, mine = begun(every)
    try:
        for _ in elastic.steps(mine.model, mine.optimizer, until=ends[rank]):
            with elastic.survive():
                mine.model(torch.ones(2, 4)).sum().backward()
    except StateError as error:
        return str(error)


@pytest.mark.multiprocess
def test_ranks_with_another_end_are_told():
    text = "elastic.steps: expected the same `until` on all ranks, got [3, 4]"
    for every in (1, 2):
        assert gloo.run_ranks(ends_at, 2, every, [3, 4]) == [text, text]


def loops_again(when):
    """Returns: the steps that are done, and the error of the second call."""
    _, mine = begun()
    done = []
    with pytest.raises(ValueError, match=r"expected `until` to be an int, got 2\.5"):
        elastic.steps(mine.model, mine.optimizer, until=2.5)
    with pytest.raises(ValueError, match=r"to be an int, got tensor\(2\.5"):
        elastic.steps(mine.model, mine.optimizer, until=torch.tensor(2.5))
    try:
        for step in elastic.steps(mine.model, mine.optimizer, until=3):
            done.append(step)
            if when == "in the loop":
                elastic.steps(mine.model, mine.optimizer, until=3)
            elif when == "after a break" and step == 1:
                break
        elastic.steps(mine.model, mine.optimizer, until=5)
    except StateError as error:
        return done, str(error)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("when", "steps"), [("in the loop", [0]), ("after a break", [0, 1]), ("after the loop", [0, 1, 2])]
)
def test_a_second_loop_is_refused(when, steps):
    for done, told in gloo.run_ranks(loops_again, 2, when):
        assert done == steps
        assert told == "elastic.steps: was called before: one call yields all steps; `until` is their number"


def skips_alone(who, skipped):
    rank, mine = begun()
    try:
        for step in elastic.steps(mine.model, mine.optimizer, until=4):
            if rank == who and step == skipped:
                continue  # a batch that this rank could not read
            with elastic.survive():
                mine.model(torch.ones(2, 4)).sum().backward()
                mine.optimizer.step()
                mine.optimizer.zero_grad()
    except OrderError as error:
        gloo.note(str(error))
        raise


@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "who", "skipped"), [(2, 0, 1), (2, 1, 1), (3, 2, 1), (3, 1, 3)])
def test_a_rank_that_skips_a_step_is_told(ranks, who, skipped):
    for code, _, told in gloo.ends_of_ranks(skips_alone, ranks, who, skipped):
        assert code == 1, told  # by an exception, not by a signal
        assert f"rank {who} commits a step" in told
        assert "gathers the unit of Linear" in told


def moves_to(ranks):
    model, optimizer = build()
    with pytest.raises(CheckpointError) as raised:
        elastic.resize(model, optimizer, ranks[torch.distributed.get_rank()])
    return str(raised.value)


@pytest.mark.multiprocess
def test_ranks_that_are_no_integers_are_refused_by_all():
    for told in gloo.run_ranks(moves_to, 2, [[0], ["0"]]):
        assert "rank 1" in told
        assert "'str' object cannot be interpreted as an integer" in told


def test_extra_that_cannot_go_back_is_refused(session):
    with gloo.fake_world(2):
        model, optimizer = build()
        extra = {"mean": AveragedModel(model)}
    with pytest.raises(ValueError, match="has a wrapped AveragedModel, and only the model of"):
        elastic.steps(None, None, until=3, extra=extra)
    extra = {"new": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    with pytest.raises(StateError, match="`extra` had no 'new' at the last commit"):
        training._set_state(extra, {})


def run_thread(body):
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


def test_a_rank_is_known_in_the_loop(session):
    told = []
    with gloo.fake_world(2, rank=1):
        assert (elastic.rank(), elastic.size()) == (1, 2)
        run_thread(lambda: told.append((elastic.rank(), elastic.size())))
    assert told.pop() == (1, 2)
    session.joins = Epoch(1, ["0.0", "1.1"])
    for ask in (elastic.rank, elastic.size):
        with pytest.raises(StateError, match="a process that joins has a rank from"):
            ask()

    def ask_in_another_thread():
        with pytest.raises(StateError) as raised:
            elastic.rank()
        told.append(str(raised.value))

    run_thread(ask_in_another_thread)
    assert told[0].startswith("flatparam.elastic: there is no world before elastic.start, and none while it is made")


def test_a_break_ends_the_loop_like_its_end(session):
    session._steps = lambda: iter(range(session._until))
    for step in elastic.steps(None, None, until=3):
        assert not session.epochs.has_left()
        if step == 1:
            break
    assert session.epochs.has_left()


def test_samples_of_an_epoch_are_ordered_once(session, monkeypatch):
    sampling._order.cache_clear()
    expected = torch.randperm(10, generator=torch.Generator().manual_seed(3)).tolist()
    calls, order = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *args, **options: calls.append(args) or order(*args, **options))
    with gloo.fake_world(2):
        assert [sample for step in range(5) for sample in elastic.samples(step, 2, 10, seed=3)] == expected[::2]
        assert calls == [(10,)]
        elastic.samples(5, 2, 10, seed=3)
    assert len(calls) == 2


def test_a_state_that_does_not_fit_names_build(session, monkeypatch):
    def enter(*_):
        raise CheckpointError("the optimizer has another group")

    monkeypatch.setattr(training, "enter", enter)
    found = training._Found((0, 0), {}, {}, [], {})
    with pytest.raises(CheckpointError, match=r"another group$"):
        session._bind(found)
    session.epoch = Epoch(1, ["0.0"], asks=1)
    with pytest.raises(CheckpointError, match="another group; in a new process `build` must return the model"):
        session._bind(found)
