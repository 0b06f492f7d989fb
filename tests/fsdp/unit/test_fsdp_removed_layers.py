"""A layer that all ranks remove from the model is gone for all of them, also where one rank still has it in memory.

Promises:
- training goes on as of an unsharded module without the layer, for each strategy, whichever layer is removed, with
  sums that `no_sync` has kept and without: `test_training_goes_on_without_the_layer`
- the same where units are gathered ahead, one by one or joined: `test_a_removed_layer_is_not_gathered_ahead`
- sums that `no_sync` has kept for the layer are reduced on no rank; those of a layer that is still in the model, and
  was not used since, are: `test_sums_of_layers_that_do_not_run`
- a layer that a plain list holds in place of a module, or that comes back, trains as before:
  `test_a_layer_in_a_plain_list_trains`, `test_a_layer_that_comes_back_trains`
- a unit inside of another one is removed, or moved into a third one: `test_units_in_units_are_removed_and_moved`
- ranks that do not remove the same layers: all of them raise an error that names the units:
  `test_ranks_that_remove_other_layers`
"""

import contextlib
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from fsdp_models import assert_same, counts_of, data, loss_of, make, wrap_blocks
from gloo import note
from layer_zero_ranks import group_of, layer_zero, rows
from pairs import cover
from simulated_ranks import simulate_ranks
from torch import nn

import flatparam
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

pytestmark = pytest.mark.multiprocess
BLOCKS = 4
LAST = BLOCKS - 1
TWO_RANKS = ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO_1", "NO_SHARD")  # bit for bit as the oracle
FOUR_RANKS = ("HYBRID_SHARD", "LAYER_ZERO", "LAYER_ZERO_NESTED")  # the oracle adds over ranks in another order
WAYS = {  # of removing a layer
    "del": lambda module, i: module.blocks.__delitem__(i),
    "slice": lambda module, i: setattr(module, "blocks", module.blocks[:i] + module.blocks[i + 1 :]),
    "list": lambda module, i: setattr(module, "blocks", nn.ModuleList([*module.blocks[:i], *module.blocks[i + 1 :]])),
}


def wrapped(strategy, uo, **arguments):
    arguments["use_orig_params"] = uo
    module = make(blocks=BLOCKS)
    if strategy.startswith("LAYER_ZERO"):
        return layer_zero(2, strategy, module, **arguments)
    if strategy == "HYBRID_SHARD":
        inner, outer = ([group_of(row) for row in rows(2, strided)] for strided in (False, True))
        rank = dist.get_rank()
        arguments["process_group"] = inner[rank // 2], outer[rank % 2]
    return wrap_blocks(module, sharding_strategy=ShardingStrategy[strategy], **arguments)


class Oracle:
    """The unsharded module. A gradient is the mean over ranks of the sum over micro-batches, which add() brings."""

    def __init__(self):
        self.module, self.ranks, self.sums = make(blocks=BLOCKS), dist.get_world_size(), []

    def add(self, step, left):
        """``left``: the parameters that are trained in the end."""
        losses = [loss_of(self.module, data(step, rank)) for rank in range(self.ranks)]
        grads = [torch.autograd.grad(loss, left, allow_unused=True, materialize_grads=True) for loss in losses]
        sums = self.sums or [[0.0] * len(left)] * self.ranks
        self.sums = [[a + b for a, b in zip(*both, strict=True)] for both in zip(sums, grads, strict=True)]

    def step(self, left):
        before, after = flatparam.fsdp.sharding.placement.averaging_factors(self.ranks)
        for param, *grads in zip(left, *self.sums, strict=True):
            total = sum((grad / before for grad in grads[1:]), grads[0] / before)
            param.grad = total / after
        torch.optim.SGD(left, lr=0.1).step()
        self.sums = []


def left_without(module, index):
    gone = {id(param) for param in module.blocks[index].parameters()}
    return [param for param in module.parameters() if id(param) not in gone]


def backward(model, step, drop=None):
    """``drop``: called between forward and backward."""
    loss = loss_of(model, data(step))
    if drop is not None:
        drop()
    loss.backward()


def check(model, oracle, what):
    if oracle.ranks == 2:
        assert_same(model, oracle.module, what)
        return
    with FSDP.summon_full_params(model, writeback=False):
        found = dict(model.named_parameters())
        for name, param in oracle.module.named_parameters():
            torch.testing.assert_close(found[name], param, msg=lambda text, name=name: f"{what} {name}: {text}")


def train(strategy, uo, pending, index, holder, way, **arguments):
    """``holder``: the rank that keeps the layer; "all" do until after a forward, then rank 0 lets it go; or None."""
    rank = dist.get_rank()
    what = f"{strategy} uo={uo} pending={pending} index={index} holder={holder} {way} {arguments}"
    note(what)
    model, oracle = wrapped(strategy, uo, **arguments), Oracle()
    for step in range(2):
        backward(model, step)
        oracle.add(step, every := list(oracle.module.parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        oracle.step(every)
        model.zero_grad()
    left = left_without(oracle.module, index)
    for step in range(2, 2 + pending):
        with model.no_sync():
            backward(model, step)
        oracle.add(step, left)
    kept = [model.module.blocks[index]]
    alive = weakref.ref(kept[0]._unit)
    del optimizer
    WAYS[way](model.module, index)
    WAYS[way](oracle.module, index)
    if holder != "all" and rank != holder:
        kept.clear()
        assert alive() is None, what  # else this test shows nothing
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4, 7):
        if step == 5:
            with model.no_sync():
                backward(model, step)
            oracle.add(step, left)
            continue
        backward(model, step, kept.clear if holder == "all" and rank == 0 and step == 4 else None)
        oracle.add(step, left)
        optimizer.step()
        oracle.step(left)
        model.zero_grad()
        check(model, oracle, f"{what} step {step}")
    assert (alive() is None) == (rank != holder and (holder != "all" or rank == 0)), what


def each_way(strategy, cases):
    for case in cases:
        train(strategy, *case)


CASES = list(itertools.product((False, True), (0, 2), (0, 1, LAST), (0, 1, "all", None), WAYS))


@pytest.mark.parametrize("cases", [cover(CASES), pytest.param(CASES, marks=pytest.mark.thorough)], ids=len)
@pytest.mark.parametrize("strategy", TWO_RANKS + FOUR_RANKS)
def test_training_goes_on_without_the_layer(strategy, cases):
    simulate_ranks(each_way, 4 if strategy in FOUR_RANKS else 2, strategy, cases, timeout=2000.0)


AHEAD = ({"forward_prefetch": True}, {"min_unit_bytes": 1 << 20}, {"min_unit_bytes": 600, "backward_prefetch": None})


def ahead(strategy):
    for number, *case in cover(list(itertools.product(range(len(AHEAD)), (0, 1), (0, 1, LAST), (0, 1, "all")))):
        train(strategy, True, *case, "del", **AHEAD[number])


@pytest.mark.parametrize("strategy", TWO_RANKS[:3])
def test_a_removed_layer_is_not_gathered_ahead(strategy):
    simulate_ranks(ahead, 2, strategy, timeout=2000.0)


class Skipping(nn.Module):
    """Blocks, of which a call may leave out one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.skipped = None

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = x if i == self.skipped else torch.tanh(block(x))
        return x


def sums():
    for strategy, removes in itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "ZERO_1"), (False, True)):
        note(f"{strategy} {removes}")
        model = wrap_blocks(make(cls=Skipping), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)
        with model.no_sync():
            backward(model, 0)
        block, pieces = model.blocks[1], list(model.blocks[1].parameters())
        assert block._unit.core.unreduced
        reduced = counts_of(model).reductions
        model.module.skipped = None if removes else 1
        if removes:
            del model.blocks[1]
        backward(model, 1)
        assert counts_of(model).reductions - reduced == (2 if removes else 3)  # the root has no parameters
        assert not block._unit.core.unreduced
        assert all((piece.grad is None) == removes for piece in pieces if piece.numel())


def test_sums_of_layers_that_do_not_run():
    simulate_ranks(sums, 2)


class Listed(Skipping):
    """The layers after the blocks are in a plain list: they are no modules of the model."""

    def __init__(self):
        super().__init__()
        self.listed = []

    def forward(self, x):
        x = super().forward(x)
        for layer in self.listed:
            x = torch.tanh(layer(x))
        return x


def listed(strategy):
    for uo, arguments in itertools.product(
        (False, True), ({}, {"forward_prefetch": True}, {"min_unit_bytes": 1 << 20})
    ):
        note(f"{strategy} uo={uo} {arguments}")
        model, module = (make(cls=Listed) for _ in range(2))
        arguments = {**arguments, "use_orig_params": uo, "sharding_strategy": ShardingStrategy[strategy]}
        model = wrap_blocks(model, **arguments)
        optimizer, wanted = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, module))
        for step in range(6):
            if step == 2:
                for each in (model.module, module):
                    each.listed.append(each.blocks[2])
                    del each.blocks[2]
            if step % 2 == 0:
                with model.no_sync():
                    backward_alike(model, step)
            backward_alike(model, step + 10)
            for each in (step, step + 10) if step % 2 == 0 else (step + 10,):
                backward_alike(module, each)
            if step == 4:
                with torch.no_grad():  # a write of a user
                    for each in (model.module, module):
                        write(each.listed[0])
            for each in (optimizer, wanted):
                each.step()
                each.zero_grad()
            assert_same(model, module, f"step {step}")
            for layers in zip(model.module.listed, module.listed, strict=True):
                assert_same(*layers, f"step {step}")


def backward_alike(model, step):
    """All ranks have the same data, so the mean over ranks is the gradient of one."""
    loss_of(model, data(step, 0)).backward()


@torch.no_grad()
def write(layer):
    if isinstance(layer, FSDP):
        with FSDP.summon_full_params(layer):
            layer.module.weight.mul_(0.5)
    else:
        layer.weight.mul_(0.5)


@pytest.mark.parametrize("strategy", TWO_RANKS[:3])
def test_a_layer_in_a_plain_list_trains(strategy):
    simulate_ranks(listed, 2, strategy)


def comes_back(strategy):
    for uo, steps in itertools.product((False, True), (1, 2)):
        note(f"{strategy} uo={uo} {steps}")
        model, oracle = wrapped(strategy, uo), Oracle()
        every = list(oracle.module.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        blocks = [(each.blocks[1], each.blocks) for each in (model.module, oracle.module)]
        for step in range(6):
            if step == 1:
                for _, of_model in blocks:
                    del of_model[1]
            if step == 1 + steps:
                for block, of_model in blocks:
                    of_model.insert(1, block)
            backward(model, step)
            oracle.add(step, every)
            optimizer.step()
            oracle.step(every)
            model.zero_grad()
            check(model, oracle, f"step {step}")


@pytest.mark.parametrize("strategy", TWO_RANKS[:3])
def test_a_layer_that_comes_back_trains(strategy):
    simulate_ranks(comes_back, 2, strategy)


class Chain(nn.Sequential):
    pass


def nested(strategy):
    model, module = (
        make(cls=lambda: Chain(*(Chain(*(nn.Linear(3, 3) for _ in range(3))) for _ in range(3)))) for _ in "ab"
    )
    arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}
    for chain in model:
        for i, layer in enumerate(chain):
            chain[i] = FSDP(layer, **arguments)
    for i in range(2):  # the third chain is no unit
        model[i] = FSDP(model[i], **arguments)
    model, kept = FSDP(model, **arguments), []
    for step in range(6):
        for each in (model.module, module):
            chains = [getattr(chain, "module", chain) for chain in each]
            if step == 2:
                kept.append(chains[0][1])
                del chains[0][1]
            if step == 3:
                chains[1].append(chains[2][0])
                del chains[2][0]
        if dist.get_rank() == 0:
            kept.clear()
        with model.no_sync() if step % 2 else contextlib.nullcontext():
            backward_alike(model, step)
        backward_alike(module, step)
        if step % 2 == 0:
            for each in (model, module):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
                each.zero_grad()
            assert_same(model, module, f"step {step}")


@pytest.mark.parametrize("strategy", TWO_RANKS)
def test_units_in_units_are_removed_and_moved(strategy):
    simulate_ranks(nested, 2, strategy)


def differ():
    group = dist.new_group()  # which cannot be used any more afterwards
    model = wrapped("ZERO_1", True, process_group=group)
    backward(model, 0)
    if dist.get_rank() == 1:
        del model.module.blocks[LAST]
    with pytest.raises(flatparam.OrderError) as raised:
        backward(model, 1)
    return str(raised.value)


def test_ranks_that_remove_other_layers():
    for text in simulate_ranks(differ, 2):
        assert "rank 0 compares changes of the unit of Block" in text, text
        assert "more, in step" in text, text
