"""Ranks that come to different collectives: an error on every rank that names rank, unit and step, and no hang.

Promises:
- if ranks run other units, or in another order or number, all raise the same error before collectives meet, naming
  rank, unit and step: `test_ranks_that_differ_are_told_so_alike`, `test_all_ranks_of_a_grid_are_told`,
  `test_a_rank_that_does_not_come_is_named_within_the_time_out`
- if a forward ended on one rank alone and is called again there, the error on every rank says which rank is where:
  `test_ranks_that_differ_are_told_so_alike`,
  `test_ctrl_c.py::test_a_forward_called_again_after_ctrl_c_on_one_rank_is_told`
- if ranks train other parameters, or not all units, the error names the parameters and the rank:
  `test_ranks_that_train_other_parameters_are_told_which`
- a rank that raises in the comparison of a unit, once others may have read its part and gone on, begins no collective
  that would meet another one of theirs:
  `test_an_error_of_one_rank_once_others_may_have_gone_on_begins_no_collective`
- one rank may do alone whatever needs no collective: `test_one_rank_may_do_alone_what_needs_no_other`
- calls that all ranks make alike are legal and ask no rank; a changed order warns when debugging:
  `test_what_all_ranks_do_alike_is_legal`, `test_a_changed_order_warns_when_debugging`,
  `test_gathering_ahead_warns_of_no_changed_order`
"""

import contextlib
import copy
import datetime
import inspect
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import wrap_blocks
from gloo import fake_world, note, run_ranks
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flatparam import FullyShardedDataParallel, ShardingStrategy
from flatparam.common.collectives import fake_group
from flatparam.fsdp.desync import checked_collectives, same_unit, trace
from flatparam.fsdp.desync.checked_collectives import trace_of
from flatparam.fsdp.desync.stores import Store
from flatparam.fsdp.desync.trace import GroupTrace, _limit
from flatparam.fsdp.errors import OrderError

pytestmark = pytest.mark.multiprocess

LIMIT = 30.0  # seconds that a collective of these groups may take
SOON = 12.0  # seconds in which a difference is told


class Chosen(nn.Module):
    """Runs the blocks that it is told, in that order."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
        self.last = nn.Linear(3, 1)

    def forward(self, x, which):
        for i in which:
            x = self.blocks[i](x)
        return self.last(x)


ALL = (0, 1, 2, 3)


def made(strategy, limit=LIMIT):
    """A model over a group of its own: one that cannot be used any more shall not disturb the others."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=limit))
    torch.manual_seed(0)
    return wrap_blocks(Chosen(), process_group=group, sharding_strategy=strategy)


def step(model, which=ALL, backward=True):
    loss = model(torch.ones(2, 3), which).sum()
    if backward:
        loss.backward()


def another_block(model, me, step_of):
    for number in range(1, step_of + 1):
        step(model, (0, 2, 3) if me and number == step_of else ALL)


def skipped_in_step_1(model, me):
    another_block(model, me, 1)


def skipped_in_step_3(model, me):
    another_block(model, me, 3)


def skipped_in_evaluation(model, me):
    step(model)
    with torch.no_grad():
        step(model, (0, 2, 3) if me else ALL, backward=False)
    step(model)


def another_order(model, me):
    step(model)
    step(model, (0, 2, 1, 3) if me else ALL)


def no_sync_on_one_rank(model, me):
    step(model)
    for _ in range(2):
        if me:
            with model.no_sync():
                step(model)
        else:
            step(model)
    step(model)


def saved_by_one_rank_at_first(model, me):
    if not me:
        model.state_dict()
    step(model)


def no_backward_on_one_rank(model, me):
    step(model)
    step(model, backward=not me)
    step(model)


def backward_twice_on_one_rank(model, me):
    step(model)
    loss = model(torch.ones(2, 3), ALL).sum()
    loss.backward(retain_graph=True)
    if not me:
        loss.backward()
    step(model)


def saved_by_one_rank(model, me):
    step(model)
    if not me:
        model.state_dict()
    step(model)


def clipped_by_one_rank(model, me):
    step(model)
    if not me:
        model.clip_grad_norm_(1.0)
    step(model)


def gradients_shown_by_one_rank(model, me):
    step(model)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=not me, writeback=False):
        pass
    step(model)


def called_again_on_one_rank(model, me):
    """Its forward has ended with an exception that the others know nothing of."""
    step(model)
    if not me:
        hook = model.blocks[2].register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model)
        hook.remove()
    step(model)


def all_have_saved(model):
    """So that nobody asks about any of it any more. Returns the states."""
    optim = torch.optim.Adam(model.parameters(), lr=0.0)
    for _ in range(2):
        step(model)
        optim.step()
        states = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optim)
        model.load_state_dict(states[0])
    return optim, *states


def optimizer_states_in_place_of_a_step(model, me):
    optim, *_ = all_have_saved(model)
    if me:
        FullyShardedDataParallel.optim_state_dict(model, optim)
    step(model)


def optimizer_states_in_place_of_a_models(model, me):
    optim, *_ = all_have_saved(model)
    model.state_dict()
    if me:
        FullyShardedDataParallel.optim_state_dict(model, optim)
    model.state_dict()


def optimizer_states_spread_by_one_rank(model, me):
    _, _, state = all_have_saved(model)
    if me:
        FullyShardedDataParallel.scatter_full_optim_state_dict(state, model, group=model.process_group)
    step(model)


def loaded_by_one_rank(model, me):
    _, state, _ = all_have_saved(model)
    if me:
        model.load_state_dict(state)
    step(model)


def built_by_one_rank(model, me):
    all_have_saved(model)
    if me:
        FullyShardedDataParallel(nn.Linear(3, 3), process_group=model.process_group)
    step(model)


def sent_by_one_rank(model, me):
    """Values for a further unit."""
    FullyShardedDataParallel(nn.Linear(3, 3), process_group=model.process_group, sync_module_states=not me)
    step(model)


GATHERS = (r"rank 0 gathers .*`blocks\.1`, in step %d", r"rank \d gathers .*`blocks\.2`, in step %d")
DIFFERENT = {
    skipped_in_step_1: [pattern % 1 for pattern in GATHERS],
    skipped_in_step_3: [pattern % 3 for pattern in GATHERS],
    skipped_in_evaluation: [pattern % 2 for pattern in GATHERS],
    another_order: [pattern % 2 for pattern in GATHERS],
    no_sync_on_one_rank: [r"rank 0 reduces the gradients of .*in step 2", r"rank \d .* in step [23]"],
    saved_by_one_rank: [
        "^the ranks do different things: ",
        r"rank 0 gathers, to show or to save it, the unit .*, for state_dict\(\), summon_full_params\(\) or the like",
        r"rank \d gathers the unit .*in step 2, for a forward or a backward",
        r"\. Every rank must make these calls in the same order, as often: none of them under `if rank == 0:` alone\.",
    ],
    saved_by_one_rank_at_first: [r"rank 0 gathers, to show or to save it, the unit", r"rank \d gathers the unit "],
    clipped_by_one_rank: [
        r"^the ranks do different things: .*rank 0 clips the gradients of the unit .*, for clip_grad_norm_\(\)",
        r"rank \d gathers the unit .*in step 2, for a forward or a backward",
    ],
    gradients_shown_by_one_rank: [
        r"rank 0 compares, to show them, which gradients there are of the unit of Chosen",
        r"rank \d gathers, to show or to save it, the unit of Linear",
    ],
    no_backward_on_one_rank: [r"rank 0 .*in step 2", r"rank \d gathers .*in step 3"],
    backward_twice_on_one_rank: [r"rank 0 (gathers|compares, to reduce them,) .*in step 3", r"rank \d .*in step 3"],
    optimizer_states_in_place_of_a_step: [
        r"rank 0 gathers the unit .*, for a forward or a backward",
        r"rank \d tells which optimizer states it has, in step 2, for optim_state_dict\(\)",
    ],
    optimizer_states_in_place_of_a_models: [r"rank 0 gathers, to show", r"rank \d tells which optimizer states it has"],
    optimizer_states_spread_by_one_rank: [r"rank 0 gathers the unit", r"rank \d takes the optimizer state that rank 0"],
    loaded_by_one_rank: [r"rank 0 gathers the unit", r"rank \d .*(compares what it loads|to show)"],
    built_by_one_rank: [r"rank 0 gathers the unit", r"rank \d builds a unit"],
    sent_by_one_rank: [r"rank 0 builds a unit that rank 0 gives values", r"rank \d gathers the unit"],
    called_again_on_one_rank: [r"rank 0 (gathers|compares) .* in step 3", r"rank \d gathers .*`blocks.2`, in step 2"],
}


def told(scenario, strategy):
    """What this rank was told, and after how many seconds."""
    note(f"{scenario.__name__} with {strategy}")
    model = made(ShardingStrategy[strategy])
    begin = time.monotonic()
    with pytest.raises(OrderError) as raised:
        scenario(model, dist.get_rank() > 0)
    first = str(raised.value)
    seconds = time.monotonic() - begin
    with pytest.raises(OrderError, match=re.escape(first)):  # nor is it forgotten
        step(model)
    return first, seconds


def differences(*cases):
    return {(scenario.__name__, strategy): told(scenario, strategy) for scenario, strategy in cases}


CASES = {
    "each scenario": (2, [(scenario, "FULL_SHARD") for scenario in DIFFERENT]),
    "other strategies": (
        2,
        [
            (no_sync_on_one_rank, "NO_SHARD"),
            (backward_twice_on_one_rank, "ZERO_1"),
            *itertools.product((skipped_in_step_3, called_again_on_one_rank), ("SHARD_GRAD_OP", "ZERO_1")),
        ],
    ),
    "3 ranks": (
        3,
        [(skipped_in_step_1, "FULL_SHARD"), (skipped_in_step_3, "FULL_SHARD"), (no_sync_on_one_rank, "NO_SHARD")],
    ),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("ranks", "cases"), CASES.values(), ids=CASES)
def test_ranks_that_differ_are_told_so_alike(ranks, cases):
    results = simulate_ranks(differences, ranks, *cases)
    for (name, strategy), (text, _) in results[0].items():
        [patterns] = [patterns for scenario, patterns in DIFFERENT.items() if scenario.__name__ == name]
        for pattern in patterns:
            assert re.search(pattern, text), (name, strategy, text)
        for result in results:
            found, seconds = result[name, strategy]
            assert found == text
            assert seconds < SOON, (name, strategy)


def trains_other_parameters(strategy, use_orig_params, names):
    """What each rank is told when rank 1 alone freezes ``names`` of a block after a step: in no_sync nothing, yet."""
    note(f"{names} with {strategy}, {use_orig_params=}")
    group = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT))
    torch.manual_seed(0)
    strategy = ShardingStrategy[strategy]
    groups = (group, group) if strategy is ShardingStrategy.LAYER_ZERO else group
    model = wrap_blocks(Chosen(), process_group=groups, sharding_strategy=strategy, use_orig_params=use_orig_params)
    step(model)
    for name, param in model.blocks[1].named_parameters():
        param.requires_grad_(dist.get_rank() == 0 or name.rpartition(".")[2] not in names)
    with model.no_sync():
        step(model)
    begin = time.monotonic()
    with pytest.raises(OrderError) as raised:
        train(model, 2)
    return str(raised.value), time.monotonic() - begin


def frozen_on_one_rank():
    strategies = ("FULL_SHARD", "NO_SHARD", "ZERO_1")
    one = {strategy: trains_other_parameters(strategy, True, ("bias",)) for strategy in strategies}
    whole = {
        (strategy, orig): trains_other_parameters(strategy, orig, ("weight", "bias", "_flat_param"))
        for strategy, orig in (("FULL_SHARD", False), ("FULL_SHARD", True), ("LAYER_ZERO", True))
    }
    return one, whole


def test_ranks_that_train_other_parameters_are_told_which():
    results = simulate_ranks(frozen_on_one_rank, 2)
    one, whole = results[0]
    for text, _ in one.values():
        assert re.search(r"`blocks\.1`, in step \d: `bias` requires grad on rank 0 and not on rank 1", text), text
    for key, (text, _) in whole.items():
        assert re.search(r"rank 0 reduces.*`blocks\.1`|`weight`, `bias` require grad on rank 0", text), (key, text)
    for mine, others in zip(results[0], results[1], strict=True):
        assert {key: text for key, (text, _) in mine.items()} == {key: text for key, (text, _) in others.items()}
    assert all(seconds < SOON for result in results for cases in result for _, seconds in cases.values())


def differ_on_a_grid():
    """Rank 3 alone skips a block, and the ranks that share nothing with it are told too."""
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    model = wrap_blocks(Chosen(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    step(model)
    begin = time.monotonic()
    with pytest.raises(OrderError, match=r"rank 2 gathers .*`blocks\.1`, in step 2; rank 3 gathers .*`blocks\.2`"):
        step(model, (0, 2, 3) if dist.get_rank() == 3 else ALL)
    return time.monotonic() - begin


def test_all_ranks_of_a_grid_are_told():
    assert max(simulate_ranks(differ_on_a_grid, 4)) < SOON


def saved(model):
    """The optimizer's states; all ranks train and save them twice, and nobody asks about the last ones."""
    optim = torch.optim.Adam(model.parameters(), lr=0.0)
    for _ in range(2):
        step(model)
        optim.step()
        states = FullyShardedDataParallel.optim_state_dict(model, optim)
    return sorted(states["state"])


def built_anew_after_a_failure():
    """Of rank 0 alone, once the ranks had compared the first unit over the group."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT))
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            stack.enter_context(pytest.raises(MemoryError))
            unit = "flatparam.fsdp.wrapper.fully_sharded.Unit"
            stack.enter_context(mock.patch(unit, side_effect=MemoryError("on this rank")))
        FullyShardedDataParallel(nn.Linear(3, 3), process_group=group)
    return saved(wrap_blocks(Chosen(), process_group=group))


def pickled():
    return pickle.dumps(FullyShardedDataParallel(Chosen(), sharding_strategy=ShardingStrategy.NO_SHARD))


def loaded_and_run_by_one_rank(model):
    """It is no collective. Nothing was built over the group before."""
    if dist.get_rank() == 0:
        with torch.no_grad():
            step(pickle.loads(model), backward=False)
    return saved(wrap_blocks(Chosen()))


def collectives_that_wait():
    """Replaced by a user's, which return no work."""
    original = dist.all_gather

    def all_gather(tensors, tensor, group=None, async_op=False):
        return original(tensors, tensor, group=group)

    model = made(ShardingStrategy.FULL_SHARD)
    with mock.patch.object(dist, "all_gather", all_gather):
        saved(model)
    return saved(model)


@pytest.mark.parametrize(
    "case",
    [built_anew_after_a_failure, loaded_and_run_by_one_rank, collectives_that_wait],
    ids=lambda case: case.__name__,
)
def test_ranks_that_do_the_same_are_told_nothing(case):
    arguments = run_ranks(pickled, 2)[:1] if case is loaded_and_run_by_one_rank else ()
    found = run_ranks(case, 2, *arguments)
    assert found[0] == found[1] != []


def fails_alone():
    """Rank 0, to build a further unit; the others come after a while, or do something else."""
    model = wrap_blocks(Chosen())
    saved(model)
    found = []
    if dist.get_rank() == 0:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with pytest.raises(TypeError, match="'nonsense'"):
                FullyShardedDataParallel(nn.Linear(3, 3), sharding_strategy="nonsense")
    else:
        time.sleep(4.0)  # twice as long as its patience
        with pytest.raises(ValueError, match=r"rank 0 could not build its unit: .*nonsense"):
            FullyShardedDataParallel(nn.Linear(3, 3))
    saved(model)
    return [str(each.message) for each in found if "waiting to tell" in str(each.message)]


def test_an_error_of_one_rank_is_seen_before_the_others_come():
    [text], none = simulate_ranks(fails_alone, 2)
    assert "rank 0 could not build its unit" in text
    assert none == []


def fails_once_compared(module, name):
    """Rank 0, in ``module.name``, which it calls once the others can read its part of the comparison, and go on."""
    module = sys.modules[module]
    call, failed = getattr(module, name), []

    def fail(*args, **options):
        if dist.get_rank() == 0 and not failed:
            failed.append(True)
            raise TimeoutError("of a handler of signals")
        return call(*args, **options)

    setattr(module, name, fail)
    with pytest.raises(TimeoutError) if dist.get_rank() == 0 else contextlib.nullcontext():
        FullyShardedDataParallel(nn.Linear(3, 3))
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize(("module", "name"), [(checked_collectives, "wait"), (same_unit, "_is_same")])
def test_an_error_of_one_rank_once_others_may_have_gone_on_begins_no_collective(module, name):
    assert simulate_ranks(fails_once_compared, 2, module.__name__, name) == [3.0, 3.0]


def tell_from_child(model, end):
    told = []
    group = model.process_group
    for call in (lambda: step(model), model.state_dict, lambda: wrap_blocks(Chosen(), process_group=group)):
        try:
            told.append(call())
        except OrderError as error:
            told.append(str(error))
    end.send(told)


def forked():
    """What a child process of each rank is told, between two steps of the ranks."""
    model = made(ShardingStrategy.FULL_SHARD)
    step(model)
    mine, theirs = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        try:
            tell_from_child(model, theirs)
        finally:
            os._exit(0)
    try:
        assert mine.poll(SOON)
        told = mine.recv()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    step(model)
    return told


def test_a_forked_process_is_told_that_its_groups_do_not_work():
    for rank, told in enumerate(run_ranks(forked, 2)):
        assert all(f"forked from rank {rank}, and process groups do not work" in text for text in told), told


class CountingStore:
    """What the order of ``model``'s group asks of the store from now on, and what it writes there."""

    def __init__(self, model):
        sequence = trace_of(model.process_group, torch.device("cpu"))
        self.store, self.read, self.written = sequence._store, 0, 0
        sequence._own_store = self

    def __getattr__(self, name):
        self._count(name in ("set", "add", "delete"))
        return getattr(self.store, name)

    def compare_set(self, key, expected, desired):
        self._count(expected != desired)
        return self.store.compare_set(key, expected, desired)

    def _count(self, writes):
        self.read, self.written = self.read + (not writes), self.written + writes


TIME_OUT = 12.0  # seconds: a rank gives up after half of it, and 2 to call the others


def late():
    """Rank 1 has one batch less, and goes on with something else; a while before, it has waited, and seldom asked."""
    model = made(ShardingStrategy.FULL_SHARD)
    train(model, 2)
    store = CountingStore(model)
    if dist.get_rank() == 0:
        time.sleep(4.0)
    step(model)
    # 3 in each of 6 or 7 looks, and in one more where the machine stalls; there would be 13 without pauses
    assert (store.read < 36, store.written) == (True, 0), (store.read, store.written)
    trace._LAST_MOMENT = TIME_OUT / 2
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIME_OUT), model.process_group)
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(
            OrderError, match=r"rank 0 gathers the unit of Chosen, in step 4 .* rank 1 came to no collective"
        ):
            step(model)
    return time.monotonic() - begin


def test_a_rank_that_does_not_come_is_named_within_the_time_out():
    assert max(simulate_ranks(late, 2)) < TIME_OUT


class Questions:
    """How often this rank has asked the others since ``of`` was called the last time."""

    def __init__(self, model):
        self.sequence = trace_of(model.process_group, torch.device("cpu"))
        self.asked = 0
        self.original = self.sequence._first
        self.sequence._first = self._first

    def _first(self, *args):
        self.asked += 1
        return self.original(*args)

    def of(self, call):
        self.asked = 0
        call()
        return self.asked


def train(model, n=1):
    for _ in range(n):
        step(model)


@torch.no_grad()
def evaluate(model, n=1):
    for _ in range(n):
        step(model, backward=False)


def accumulate(model):
    with model.no_sync():
        train(model, 3)
    train(model)


def drop(model, seed):
    torch.manual_seed(seed)
    for _ in range(10):
        step(model, [i for i in ALL if torch.rand(()) > 0.3])


def legal(strategy):
    """What is the same on all ranks is never refused, and is asked about a few times only where it changes."""
    model = made(ShardingStrategy[strategy])
    step(model)
    asked = Questions(model)
    train(model)
    assert asked.of(lambda: train(model, 5)) == 0
    for _ in range(2):
        evaluate(model, 3)
        train(model, 3)
    assert asked.of(lambda: evaluate(model, 5)) <= 1
    assert asked.of(lambda: train(model, 5)) <= 2
    for _ in range(8):
        accumulate(model)
    assert asked.of(lambda: accumulate(model)) == 0
    step(model, (0, 1, 3))
    step(model, (0, 1, 3))
    assert asked.of(lambda: step(model, (0, 1, 3))) == 0
    step(model, (3, 2, 1, 0))
    for seed in range(3):
        drop(model, seed)
    step(model, ())
    for _ in range(3):  # an exception on all ranks
        with pytest.raises(IndexError):
            step(model, (0, 9))
    train(model, 2)
    if strategy == "NO_SHARD" and dist.get_rank() == 0:  # nobody else is needed for it
        evaluate(model)
    train(model, 2)
    assert asked.of(lambda: train(model, 2)) == 0
    keys = [key for key in range(asked.sequence.core.count) if asked.sequence._store.check([str(key)])]
    assert len(keys) < 20, keys  # they are not kept for ever
    other = wrap_blocks(Chosen(), process_group=model.process_group, sharding_strategy=ShardingStrategy[strategy])

    def both():
        train(model)
        train(other, 2)

    for _ in range(20):
        both()
    assert asked.of(both) == 0
    for _ in range(3):
        model.state_dict()
        train(model, 2)
    assert asked.of(model.state_dict) <= 1
    assert asked.of(lambda: train(model, 2)) <= 1


@pytest.mark.sweep(1)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_what_all_ranks_do_alike_is_legal(strategy):
    simulate_ranks(legal, 2, strategy)


def changes_are_told():
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    model = made(ShardingStrategy.FULL_SHARD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(model, (3, 2, 1, 0))
    if dist.get_rank() == 0:
        assert re.search(
            r"order of collectives has changed: rank 0 gathers .*`blocks\.3`, in step 4", str(told[0].message)
        )
    assert [each.filename for each in told] == [inspect.getfile(step)] * (1 - dist.get_rank())
    dist.set_debug_level(dist.DebugLevel.OFF)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)


def test_a_changed_order_warns_when_debugging():
    simulate_ranks(changes_are_told, 2)


def learns_and_gathers_ahead():
    """What ranks tell each other once, of the first forwards, is no change of the order in the steps after it."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    torch.manual_seed(0)
    model = wrap_blocks(Chosen(), forward_prefetch=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, 6)
        evaluate(model, 3)
        train(model, 3)


def test_gathering_ahead_warns_of_no_changed_order():
    simulate_ranks(learns_and_gathers_ahead, 2)


class Endless:
    """Work that never says that it is done."""

    waited = False

    def is_completed(self):
        return False

    def wait(self):
        self.waited = True


def test_work_of_a_fake_group_is_waited_for():
    work = Endless()
    checked_collectives.wait(work, fake_group(0, 2), torch.device("cuda"), is_read=True)
    assert work.waited


def test_a_device_is_waited_for_where_the_host_reads_alone():
    """NCCL's work in a step, as of LayerZero's reductions, is left to the stream."""

    class Group:
        def _get_backend(self, device):
            return Named("nccl")

    work = Endless()
    checked_collectives.wait(work, Group(), torch.device("cuda"))
    assert work.waited


def test_groups_whose_ranks_are_no_processes_are_not_asked():
    with fake_world(4):
        model = wrap_blocks(Chosen())
        train(model, 2)
        assert trace_of(dist.group.WORLD, torch.device("cpu")) is None


def rank_0_alone():
    """What comes to no collective may be done by one rank alone, before anything else, in between, of a copy."""
    for first in (True, False):
        note(f"alone, first={first}")
        group = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT))
        torch.manual_seed(0)
        whole, sharded, other = (
            wrap_blocks(Chosen(), process_group=group, sharding_strategy=ShardingStrategy[name])
            for name in ("NO_SHARD", "FULL_SHARD", "FULL_SHARD")
        )
        alone = dist.get_rank() == 0
        if alone and first:
            evaluate(whole)
        train(sharded, 2)
        if alone:
            evaluate(copy.deepcopy(whole), 2)
        for model in (other, whole, sharded, copy.deepcopy(sharded)):
            train(model, 2)
            loss = model(torch.ones(2, 3), ALL).sum()
            if alone:
                evaluate(whole)
            loss.backward()
            model.state_dict()
            train(model)
        more = wrap_blocks(Chosen(), process_group=group)
        train(more)
        with pytest.raises(OrderError, match=r"rank 0 gathers .*`blocks\.1`.*; rank 1 gathers .*`blocks\.2`"):
            step(more, (0, 2, 3) if dist.get_rank() else ALL)


def test_one_rank_may_do_alone_what_needs_no_other():
    simulate_ranks(rank_0_alone, 2)


def copies_in_another_order():
    model = wrap_blocks(Chosen(), process_group=dist.new_group(timeout=datetime.timedelta(seconds=LIMIT)))
    both = [model, copy.deepcopy(model)]
    for each in both:
        train(each)
    with pytest.raises(OrderError, match=r"rank 0 gathers (.*); rank 1 gathers \1, of another model"):
        train(both[dist.get_rank()])


def test_models_of_the_same_names_are_told_apart():
    simulate_ranks(copies_in_another_order, 2)


def through_a_server():
    """With a TCPStore, as torchrun has it; the same one for two groups, one after the other."""
    port = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)] if dist.get_rank() == 0 else []
    ports = [server.port for server in port]
    everyone = [None, None]
    dist.all_gather_object(everyone, ports)
    store = port[0] if port else dist.TCPStore("127.0.0.1", everyone[0][0], is_master=False)
    for strategy in ("NO_SHARD", "FULL_SHARD", "FULL_SHARD"):
        model = made(ShardingStrategy[strategy])
        group = model.process_group
        groups = dist.distributed_c10d._world.pg_map
        groups[group] = (groups[group][0], store)
        if strategy == "NO_SHARD":
            if dist.get_rank() == 0:  # who alone has an order there must not be in another life from then on
                evaluate(model)
            continue
        for _ in range(3):
            train(model)
            evaluate(model)
            accumulate(model)
            model.state_dict()
        with pytest.raises(OrderError, match=r"rank 0 gathers .*`blocks\.1`, in step 19; rank 1 gathers .*`blocks\.2`"):
            step(model, (0, 2, 1, 3) if dist.get_rank() else ALL)
    dist.barrier()  # the server ends last


def test_any_store_will_do():
    run_ranks(through_a_server, 2)


def test_the_time_out_of_a_group_is_that_of_its_backend():
    default = dist.constants.default_pg_timeout.total_seconds()
    given = {"store": dist.HashStore(), "timeout": datetime.timedelta(seconds=7)}
    dist.init_process_group("gloo", rank=0, world_size=1, **given)
    try:
        name = dist.group.WORLD.group_name
        assert _limit(name, "cpu") == 7.0
        dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(datetime.timedelta(seconds=5.5))
        assert _limit(name, "cpu") == 5.5
        assert _limit(name, "meta") == default  # for which it has no backend
    finally:
        dist.destroy_process_group()
    assert _limit(name, "cpu") == _limit(None, "cpu") == default


def test_a_group_has_an_order_for_each_kind_of_device():
    """One may be gloo's, whose waits can be given up, and one NCCL's, whose cannot."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        store = Store(dist.HashStore())
        made = [
            GroupTrace(dist.group.WORLD, Named(name), store, kind) for name, kind in (("gloo", "cpu"), ("nccl", "cuda"))
        ]
        assert [one.sliced for one in made] == [True, False]
        assert [one.core.broken for one in made] == [0, 0]
        with pytest.raises(OrderError):
            made[0]._break("for a reason")
        made[1]._look()  # knows nothing of it
    finally:
        dist.destroy_process_group()


class Named:
    def __init__(self, name):
        self._name = name

    def name(self):
        return self._name
