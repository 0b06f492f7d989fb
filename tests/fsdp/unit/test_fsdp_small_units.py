"""Small units that follow each other are gathered as one collective, and train as before, bit for bit.

Promises:
- with `min_unit_bytes` small units that follow each other are gathered as one in forward, and each by itself in
  backward; a larger unit is gathered by itself; parameters, losses and gradients are those of the unsharded module,
  bit for bit:
  `test_five_steps_equal_the_unsharded_module_in_fewer_gathers`
- the same with units that are skipped, used in another order or twice, recomputed, frozen, frozen and unfrozen between
  steps, or written to in forward, in `no_sync`, in evaluation, with `summon_full_params`, `state_dict` and
  `load_state_dict` between steps, where another thread is refused meanwhile, and where a rank has replaced a function
  of torch.distributed: `test_programs_equal_those_without_it`
- with one rank, `NO_SHARD`, and secondary shards it changes nothing: `test_strategies_without_it`
- on an accelerator (simulated) training with it equals that without it: `test_on_an_accelerator`
- a bad `min_unit_bytes` is refused, and one that differs between units or ranks: `test_refusals`
"""

import contextlib
import functools
import itertools
import logging
import re

import pytest
import replacing
import simulated
import torch
import torch.distributed as dist
from fsdp_models import (
    Averaged,
    Block,
    assert_same,
    assert_same_grads,
    counts_of,
    data,
    full_grads,
    full_params,
    loss_of,
    make,
    wrap_blocks,
)
from gloo import note, run_ranks
from simulated_ranks import simulate_ranks
from test_fsdp_device import assert_equal, train
from test_fsdp_threads import ELSEWHERE, in_thread
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.utils.checkpoint import checkpoint

from flatparam import CPUOffload, MixedPrecision, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.multiprocess

SMALL = 2**16  # more than all units of Mixed together, but for the large one
PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST


class Mixed(nn.Module):
    """Blocks of a few bytes, the fourth one larger than SMALL."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([Block(5) for _ in range(7)])
        self.blocks[3] = nn.Sequential(nn.Linear(5, 2_000), nn.Tanh(), nn.Linear(2_000, 5))
        self.last = nn.Linear(5, 1, bias=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Lines(logging.Handler):
    """Keeps which units are gathered, of each line about a gather that was not expected."""

    def __init__(self):
        super().__init__()
        self.gathers, self.rank = [], dist.get_rank()  # ranks may be threads, with one logger

    def emit(self, record):
        if found := re.search(
            rf"rank {self.rank} gathers .*?(?:`blocks\.(\d)`)?( and (\d+) flat parameters|, in step)",
            record.getMessage(),
        ):
            self.gathers.append((None if found[1] is None else int(found[1]), 1 + int(found[3] or 0)))


@contextlib.contextmanager
def gathers():
    """The list of (first block, number of flat parameters) of the gathers in the block; None: the root."""
    logger, lines = logging.getLogger("flatparam"), Lines()
    before = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.DEBUG)
    try:
        yield lines.gathers
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)


def trains(strategy, uo, prefetch):
    note(f"{strategy} uo={uo} {prefetch}")
    module = make(cls=Mixed)
    model = wrap_blocks(
        make(cls=Mixed),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=uo,
        backward_prefetch=prefetch,
        min_unit_bytes=SMALL,
    )
    ours, plain = (torch.optim.SGD(each.parameters(), lr=0.001, momentum=0.9) for each in (model, module))
    oracle = Averaged(module, 2)
    for step in range(5):
        oracle.backward(lambda rank, step=step: [data(step, rank)])
        with gathers() as seen:
            loss = loss_of(model, data(step))
            forward = list(seen)
            loss.backward()
        assert torch.equal(loss, loss_of(module, data(step)))
        if step == 0:
            assert forward == [(None, 1), *((i, 1) for i in range(7))]
            assert_same_grads(model, module)
        if step == 1:  # the last time that the order is new
            assert forward == [(None, 1), (0, 3), (3, 1), (4, 3)]
        if step == 0:
            assert seen[len(forward) :] == ([(i, 1) for i in reversed(range(7))] if strategy == "FULL_SHARD" else [])
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, module)


@pytest.mark.parametrize(
    ("strategy", "uo", "prefetch"),
    [("FULL_SHARD", True, PRE), ("FULL_SHARD", False, POST), ("FULL_SHARD", True, None), ("SHARD_GRAD_OP", False, PRE)],
)
def test_five_steps_equal_the_unsharded_module_in_fewer_gathers(strategy, uo, prefetch):
    simulate_ranks(trains, 2, strategy, uo, prefetch)


class Chosen(nn.Module):
    """Seven blocks, used in the order that the caller gives."""

    def __init__(self, recomputed=False):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([Block(5) for _ in range(7)])
        self.last = nn.Linear(5, 1, bias=False)
        self.recomputed, self.writes = recomputed, None

    def forward(self, x, order=range(7)):
        x = self.first(x)
        for i in order:
            if self.writes == i:
                with torch.no_grad():
                    for param in self.blocks[-1].parameters():
                        param.mul_(0.5)
            x = (
                checkpoint(self.blocks[i], x, use_reentrant=self.recomputed == "reentrant")
                if self.recomputed
                else self.blocks[i](x)
            )
        return self.last(x)


ORDERS = {
    "skipped": [range(7), (0, 2, 5), (1, 3, 6), range(7)],
    "other order": [range(7), range(7), (6, 5, 4, 3, 2, 1, 0), (3, 4, 0, 1, 2, 6, 5)],
    "twice": [(0, 1, 2, 0, 1, 2, 3)] * 3 + [(2, 1, 1, 0)],
}
REFUSED = []  # what other threads got


@contextlib.contextmanager
def replaced(on):
    if not on:
        yield
        return
    with replacing.collectives(
        ("all_gather_into_tensor", "all_gather_single"),
        lambda name, original: lambda *args, **kwargs: original(*args, **kwargs),
    ):
        yield


def between_steps(what, model, step):
    """What a program does before a step; whether that step is one of `no_sync`."""
    if what == "unfrozen":
        for block in model.blocks[1:3]:
            block.requires_grad_(step % 3 != 1)
    elif what == "evaluated" and step % 3 == 1:
        model.eval()
        with torch.no_grad():
            model(data(step))
    elif what == "trained in evaluation":
        model.train(step % 2 == 0)
    elif what == "summoned" and step % 2:
        with FSDP.summon_full_params(model):
            model.blocks[step % 7].scale.data.mul_(0.5)
    elif what == "saved" and step % 3 == 1:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    elif what == "threads":
        raised = in_thread(lambda: model(data(step)))
        assert raised is None, raised
    return what == "no_sync" and step % 3 < 2


def values_of(what, **arguments):
    """Losses, gradients and parameters of eight steps."""
    torch.manual_seed(0)
    module = Chosen({"recomputed": "plain", "reentrant": "reentrant"}.get(what, False))
    if what == "frozen":
        for block in module.blocks[1:4]:
            block.requires_grad_(False)
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if what == "low" else None
    model = wrap_blocks(module, use_orig_params=True, segments=what == "segments", mixed_precision=low, **arguments)
    module.writes = {"written": 2}.get(what)
    if what == "threads":  # in a group, while its units are gathered
        model.blocks[2].register_forward_hook(
            lambda *_: REFUSED.append(str(in_thread(lambda: model(data(0))))) or None  # None: the output stays
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = []
    for step in range(8):
        order = ORDERS.get(what, [range(7)])[step % len(ORDERS.get(what, [1]))]
        accumulates = between_steps(what, model, step)
        with (
            replaced(what == "replaced" and dist.get_rank() == 1 and step > 3),
            model.no_sync() if accumulates else contextlib.nullcontext(),
        ):
            loss = model(data(step).requires_grad_(what == "reentrant"), order).square().mean()
            loss.backward()
        seen.append(loss.detach().clone())
        if accumulates:
            continue
        if step in (2, 5):
            seen += [grad for grad in full_grads(model).values() if grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen + list(full_params(model).values())


def compares(what):
    note(what)
    with_it, without = (values_of(what, min_unit_bytes=small) for small in (SMALL, 0))
    assert len(with_it) == len(without)
    for one, other in zip(with_it, without, strict=True):
        assert torch.equal(one, other), what
    assert all(ELSEWHERE in text for text in REFUSED)
    assert bool(REFUSED) == (what == "threads")


PROGRAMS = (
    *("skipped", "other order", "twice", "recomputed", "reentrant", "frozen", "unfrozen", "written", "no_sync"),
    *("evaluated", "trained in evaluation", "summoned", "saved", "threads", "replaced", "low", "segments"),
)


@pytest.mark.parametrize("what", PROGRAMS)
def test_programs_equal_those_without_it(what):
    simulate_ranks(compares, 3, what)


def changes_nothing(strategy):
    counts = []
    for small in (0, SMALL):
        model = wrap_blocks(make(cls=Chosen), sharding_strategy=ShardingStrategy[strategy], min_unit_bytes=small)
        with gathers() as seen:
            for step in range(4):
                loss_of(model, data(step)).backward()
        counts.append((vars(counts_of(model)), seen))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("strategy", "ranks"), [("FULL_SHARD", 1), ("NO_SHARD", 2), ("ZERO_1", 2)])
def test_strategies_without_it(strategy, ranks):
    simulate_ranks(changes_nothing, ranks, strategy)


def on_device(library):
    simulated.use(library)
    arguments = {"process_group": simulated.new_group(), "device_id": torch.device("sim", 0), "use_orig_params": True}
    for strategy, offloaded in itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "ZERO_1"), (False, True)):
        note(f"{strategy}, offloaded: {offloaded}")
        model = functools.partial(
            wrap_blocks,
            sharding_strategy=ShardingStrategy[strategy],
            cpu_offload=CPUOffload(offloaded),
            **arguments,
        )
        with_it, without = (
            train(model(make(cls=Chosen), min_unit_bytes=small), arguments["device_id"]) for small in (SMALL, 0)
        )
        assert_equal(with_it, without, strategy)


def test_on_an_accelerator():
    run_ranks(on_device, 2, str(simulated.build()))


def refused():
    for bad in ("1 MiB", True, 1.5):
        with pytest.raises(TypeError, match="expected min_unit_bytes to be an int"):
            FSDP(nn.Linear(2, 2), min_unit_bytes=bad)
    with pytest.raises(ValueError, match="expected min_unit_bytes to be between 0 and"):
        FSDP(nn.Linear(2, 2), min_unit_bytes=-1)
    with pytest.raises(ValueError, match=r"min_unit_bytes=0.*min_unit_bytes=1|min_unit_bytes=1.*min_unit_bytes=0"):
        FSDP(nn.Linear(2, 2), min_unit_bytes=dist.get_rank())
    tree = make(blocks=1)
    tree.blocks[0] = FSDP(tree.blocks[0], min_unit_bytes=5)
    with pytest.raises(ValueError, match=r"homogeneous value for _min_unit_bytes in a tree of units: .* has 0, .* 5"):
        FSDP(tree)(data(0))


def test_refusals():
    simulate_ranks(refused, 2)
