"""An exception before a rank begins the collective to which it has come: other ranks may have begun it, or not.

Where all ranks were kept from it they go on, and train as a model that nobody has interrupted. Where one has begun it
all ranks are told so before collectives of different units meet.

Promises:
- an exception after a rank has come to a collective and before it has begun it: all ranks go on, or all are told that a
  rank has begun it; also where the device waits: `test_so_they_are_where_the_device_waits`,
  `test_so_they_do_where_the_device_waits`
"""

import contextlib
import functools
import itertools
import re
import time

import pytest
import simulated
import torch
import torch.distributed as dist
from gloo import note, run_ranks
from interrupting import Interrupted
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.fsdp.desync import checked_collectives
from flatparam.fsdp.desync.trace import GroupTrace
from flatparam.fsdp.errors import OrderError

pytestmark = pytest.mark.multiprocess

SOON = 8.0  # seconds in which a difference is told


class Chain(nn.Module):
    """Layers of one size, and nothing else: a gather of one fits that of another."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def made(strategy="FULL_SHARD", **settings):
    torch.manual_seed(0)
    chain = Chain()
    settings |= {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}
    for i, layer in enumerate(chain.layers):
        chain.layers[i] = FSDP(layer, **settings)
    model = FSDP(chain, **settings)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer, clip=False):
    optimizer.zero_grad()
    device = next(model.parameters()).device
    model(torch.full((2, 4), 1.0 + dist.get_rank(), device=device)).sum().backward()
    if clip:
        model.clip_grad_norm_(0.1)
    optimizer.step()


@contextlib.contextmanager
def raising(where, name, call=1, after=False, late=0.0, counts=lambda *args: True):
    """The ``call``-th of ``where.name`` that ``counts`` raises; after it has done what it does, or instead.

    ``late``: for how many seconds it does nothing before.
    """
    function, calls = getattr(where, name), []

    @functools.wraps(function)
    def raises(*args, **kwargs):
        raises_now = len(calls) == call - 1 and counts(*args)
        if counts(*args):
            calls.append(args)
        if after or not raises_now:
            result = function(*args, **kwargs)
        if raises_now:
            time.sleep(late)
            raise Interrupted
        return result

    setattr(where, name, raises)
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        setattr(where, name, function)


@contextlib.contextmanager
def raising_as_it_begins():
    """A collective outside of a step is issued, and raises before its trace has noted that."""

    def raises(trace, issue):
        trace.core.launch()
        issue()
        raise Interrupted

    begin, GroupTrace.begin = GroupTrace.begin, raises
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        GroupTrace.begin = begin


def in_a_question(model, optimizer):
    """In the first step ranks ask each other before each collective: rank 1 does not come to its third one."""
    if dist.get_rank():
        interrupted = raising(GroupTrace, "_first", 3, after=True)
    else:
        interrupted = raising(GroupTrace, "_look", counts=lambda sequence: sequence.core.count == 3)
    with interrupted:
        step(model, optimizer)


def in_clipping(model, optimizer):
    """Later on only what is new is asked: a step that clips, the second time."""
    for clip in (False, True, True):
        step(model, optimizer, clip)
    with raising(checked_collectives, "before", after=True) if dist.get_rank() else raising(GroupTrace, "_look"):
        step(model, optimizer, clip=True)


def on_one_alone(model, optimizer):
    """The other rank waits for it, and is not interrupted."""
    for _ in range(3):
        step(model, optimizer, clip=True)
    if dist.get_rank():
        with raising(checked_collectives, "before", after=True):
            step(model, optimizer, clip=True)
        time.sleep(0.5)
    else:
        step(model, optimizer, clip=True)


def and_the_next_one(model, optimizer):
    """Rank 1 is interrupted again in what it does next: it has missed two, and rank 0 one."""
    for _ in range(3):
        step(model, optimizer, clip=True)
    with raising(checked_collectives, "before", after=True):
        step(model, optimizer, clip=True)
    if dist.get_rank():
        with raising(GroupTrace, "_point_at"):
            step(model, optimizer)


def told(scenario, strategy):
    begin = time.monotonic()
    with pytest.raises(OrderError) as raised:  # noqa: PT012
        model, optimizer = made(strategy, process_group=dist.new_group())  # nobody can use it afterwards
        scenario(model, optimizer)
        for _ in range(3):
            step(model, optimizer)
    return str(raised.value), time.monotonic() - begin


def where_the_other_one_asks_too(model, optimizer):
    """What comes is unexpected, so that rank 0 waits for all who ask, and rank 1 was kept from asking."""
    for _ in range(4):
        step(model, optimizer)
    model.eval()
    if dist.get_rank():
        with raising(GroupTrace, "_first"):
            loss_of_two(model)
    loss_of_two(model)


def loss_of_two(model):
    """The layers in another order."""
    layers = model.module.layers
    return layers[0](layers[2](torch.ones(2, 4))).sum()


def as_it_begins(model, optimizer):
    """Rank 1 has begun it, and rank 0 has not, and to both the exception comes outside of flatparam."""
    for _ in range(3):
        step(model, optimizer, clip=True)
    with raising_as_it_begins() if dist.get_rank() else raising(checked_collectives, "before", after=True):
        step(model, optimizer, clip=True)


def in_a_hook(model, optimizer):
    """Of the user, before rank 1 has begun the reduction, and after rank 0 has."""
    group = model.process_group

    def hook(state, gradient, output):
        if dist.get_rank() == 0:
            dist.reduce_scatter_tensor(output, gradient, group=group, async_op=True)
        raise KeyboardInterrupt

    model.register_comm_hook(None, hook)
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer)


KEPT = "rank 1 raised before it issued a collective that rank 0 "


STRATEGIES = ("FULL_SHARD", "ZERO_1")
EXPECTED = {
    in_a_question: KEPT + r".*`layers\.\d`, in step 1",
    in_clipping: KEPT + "clips the gradients of .*, in step 4",
    on_one_alone: KEPT + "clips the gradients of .*, in step 4",
    where_the_other_one_asks_too: KEPT + r".*`layers\.\d`, in step 5",
    as_it_begins: "rank 1 was interrupted while it issued a collective; it is unknown",
    in_a_hook: "rank [01] was interrupted while it issued a collective; it is unknown",
    and_the_next_one: "exceptions have kept the ranks from different collectives",
}


def each_told():
    found = {}
    for scenario, strategy in itertools.product(EXPECTED, STRATEGIES):
        note(f"{scenario.__name__} with {strategy}")
        found[scenario.__name__, strategy] = told(scenario, strategy)
    return found


@pytest.fixture(scope="module")
def what_ranks_were_told():
    """In one world: each case has a group of its own."""
    return run_ranks(each_told, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scenario", EXPECTED)
def test_all_ranks_are_told_that_one_has_missed_what_another_has_begun(what_ranks_were_told, scenario, strategy):
    for of_rank in what_ranks_were_told:
        text, seconds = of_rank[scenario.__name__, strategy]
        assert re.search(EXPECTED[scenario], text), text
        assert seconds < SOON


def told_on_a_device(library):
    simulated.use(library)
    model, optimizer = made(process_group=simulated.new_group(), device_id=torch.device("sim", 0))
    for _ in range(3):
        step(model, optimizer, clip=True)
    begin = time.monotonic()

    def go_on():
        if dist.get_rank():
            with raising(checked_collectives, "before", after=True):
                step(model, optimizer, clip=True)
        for _ in range(3):
            step(model, optimizer)
            sum(param.sum() for param in model.parameters()).item()

    with pytest.raises(OrderError) as raised:
        go_on()
    return str(raised.value), time.monotonic() - begin


def test_so_they_are_where_the_device_waits():
    """Rank 0 does as it expects, and its host waits for nothing: a thread finds it."""
    for text, seconds in run_ranks(told_on_a_device, 2, str(simulated.build()), timeout=60.0):
        assert re.search(KEPT, text), text
        assert seconds < SOON


WHERE = {
    "in a question": (GroupTrace, "_first", 3, False),
    "in the next question": (GroupTrace, "_point_at", 1, False),
    "as it says what it has missed": (dist.PrefixStore, "set", 2, True),
    "in clipping": (checked_collectives, "before", 1, True),
}


def going_on(first, then, late, away, where="in the next question"):
    """``then``: how often it is interrupted, from the second time on ``where``.

    There rank 0 comes to it ``late``, and is ``away`` after it, in seconds.
    """
    group = dist.new_group()
    [model, optimizer], [other, of_other] = (made(process_group=group) for _ in range(2))
    if first != "in a question":
        for _ in range(3):
            step(model, optimizer, clip=True)
            step(other, of_other, clip=True)
    for k in range(then):
        again = k > 0 and dist.get_rank() == 0
        with raising(*WHERE[where if k else first], late * again):
            step(model, optimizer, clip=first == "in clipping")
        time.sleep(away * again)
    for k in range(4):
        step(model, optimizer, clip=k % 2)
        step(other, of_other, clip=k % 2)
    with FSDP.summon_full_params(model), FSDP.summon_full_params(other):
        for param, expected in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(param, expected)


WAYS = [  # how often, how late, how long away, and where
    *((n, 0.0, 0.0) for n in (1, 2, 3)),
    (6, 0.4, 0.0),
    (2, 0.0, 2.0),
    (2, 0.0, 2.0, "as it says what it has missed"),
]


def each_going_on(first):
    for way in WAYS:
        note(way)
        going_on(first, *way)


@pytest.mark.parametrize("first", ["in a question", "in clipping"])
def test_what_all_ranks_have_missed_they_go_on_after(first):
    run_ranks(each_going_on, 2, first)


def failing(late, **settings):
    """Each rank's first reduction raises, by code of the user, late on rank 1."""
    note(f"{late} s late")
    model, optimizer = made(**settings)
    group = model.process_group
    failed = []

    def hook(state, gradient, output):
        if not failed:
            failed.append(True)
            time.sleep(late * dist.get_rank())
            raise ValueError("not yet")
        dist.reduce_scatter_tensor(output, gradient, group=group)

    model.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match="not yet"):
        step(model, optimizer)
    for _ in range(4):
        step(model, optimizer)


def each_failing():
    for late in (0.0, 0.4, 1.5):
        failing(late, process_group=dist.new_group())


def test_what_fails_on_all_ranks_they_go_on_after_whoever_is_first():
    run_ranks(each_failing, 2, timeout=60.0)


def failing_on_a_device(library):
    simulated.use(library)
    for late in (0.0, 1.5):
        failing(late, process_group=simulated.new_group(), device_id=torch.device("sim", 0))


def test_so_they_do_where_the_device_waits():
    """The thread of rank 1 finds what rank 0 asks while rank 1 has come to the reduction and not begun it."""
    run_ranks(failing_on_a_device, 2, str(simulated.build()), timeout=60.0)


def counted(on):
    """A user's own function around torch's gathers, on some ranks."""
    note(f"on {on}")
    model, optimizer = made(process_group=dist.new_group())
    step(model, optimizer)
    names = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]
    before = {name: getattr(dist, name) for name in names}
    if dist.get_rank() in on:
        for name, function in before.items():
            setattr(dist, name, functools.partial(function))
    values = [model.state_dict() for _ in range(3)]
    for name, function in before.items():
        setattr(dist, name, function)
    step(model, optimizer)
    for state in values[1:]:
        assert all(torch.equal(state[name], value) for name, value in values[0].items())


def each_counted():
    for on in ((0,), (0, 1)):
        counted(on)


def test_what_functions_of_the_user_begin_is_begun():
    run_ranks(each_counted, 2, timeout=60.0)
