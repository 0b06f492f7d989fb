"""LAYER_ZERO where ranks differ: in the parameters that they use, and in an error on one of them.

Promises:
- a rank that uses no parameter, or no output, of a unit, or skips one with its inner group, adds zeros, and
  micro-batches before: `test_who_has_no_gradient_adds_zeros`
- all ranks gather the same units ahead, also if a rank used no output of a unit, or skipped one before:
  `test_what_is_gathered_ahead_where_ranks_differ`
- a gradient that is cleared on the ranks with its pieces is cleared on all; pairs are counted anew with a process
  group: `test_what_one_rank_alone_clears`
- errors of one rank are raised by all, which go on then: `test_errors_of_one_rank_are_raised_by_all`
- a pickled model knows all shards; frozen parameters keep a low precision: `test_a_pickle_knows_all_shards`,
  `test_frozen_parameters_keep_a_low_precision`
"""

import functools
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Block, counts_of, data, full_grads, full_params, loss_of, make
from gloo import note, run_ranks
from layer_zero_ranks import MODES, layer_zero
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import BackwardPrefetch, MixedPrecision
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.desync import liveness
from flatparam.fsdp.sharding import placement

pytestmark = pytest.mark.multiprocess

USES = ("all", "own ops only", "nothing of it", "its output is dropped", "skipped")


class Used(Block):
    """A block of whose parameters nothing may be used in a forward: it has other operations, or returns its input."""

    use = "all"

    def forward(self, x):
        return x * 2.0 if self.use == "own ops only" else x if self.use == "nothing of it" else super().forward(x)


class Ranks(nn.Module):
    """Blocks that a rank may use in any of these ways; the root's own parameters come first and last."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([Used(5) for _ in range(5)])
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if block.use != "skipped":
                found = block(x)
                x = x if block.use == "its output is dropped" else found
        return self.last(x)


def use(model, ways):
    """Set how ``model``, wrapped or not, uses its blocks."""
    for block, way in zip(getattr(model, "module", model).blocks, ways, strict=True):
        getattr(block, "module", block).use = way


def oracle(module, steps, ways):
    """The mean over ranks of their gradients of ``steps``, blocks used in ``ways(rank, step)``; None: of nobody."""
    world = dist.get_world_size()
    total = [None] * len(list(module.parameters()))
    for rank, step in itertools.product(range(world), steps):
        use(module, ways(rank, step))
        loss = loss_of(module, data(step, rank))
        for i, grad in enumerate(torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)):
            if grad is not None:
                total[i] = grad / world if total[i] is None else total[i] + grad / world
    return total


def check(model, module, wanted, what):
    """Gradients as wanted; of a unit that no rank has used there is none."""
    found = full_grads(model)
    names = [name for name, _ in module.named_parameters()]
    units = {name: name.split(".")[1] if name.startswith("blocks") else "root" for name in names}
    used = {units[name] for name, grad in zip(names, wanted, strict=True) if grad is not None}
    for name, grad in zip(names, wanted, strict=True):
        if units[name] not in used:
            assert found[name] is None, (what, name)
        elif grad is None:
            assert found[name] is None or not found[name].any(), (what, name)
        else:
            assert found[name] is not None, (what, name)
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6, msg=f"{what} {name}")


def same_everywhere(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    assert everyone == [value] * len(everyone), everyone


ALL = ("all",) * 5


def programs():
    """``(name, ways(rank, step))``: who uses what in a micro-batch; step 0 is the last, in which they are reduced."""
    for way in USES[1:4]:
        for blocks in ((0,), (1, 2), (0, 1, 2, 3, 4)):
            for ranks in ((3,), (0, 1, 2), range(4)):

                def ways(rank, step, way=way, blocks=blocks, ranks=ranks):
                    return tuple(way if i in blocks and rank in ranks and step != 2 else "all" for i in range(5))

                yield f"{way} {blocks} on {list(ranks)}", ways

    def all_differ(rank, step):
        return tuple(USES[(rank + i + step) % 4] for i in range(5))

    yield "all differ", all_differ


def skipping(inner):
    """The same of branches that are skipped where no other rank has a part in their gathers, after a first forward."""
    for blocks in ((1, 2), (0, 4)):
        for group in (0, 4 // inner - 1):

            def ways(rank, step, blocks=blocks, group=group):
                return tuple("skipped" if i in blocks and rank // inner == group else "all" for i in range(5))

            yield f"skipped {blocks} in group {group}", ways


def without_gradients():
    """Who has no gradient of a unit adds zeros, and what it has from before; nobody waits for anybody for ever."""
    for (mode, inner), uo in itertools.product((("LAYER_ZERO", 1), *((mode, 2) for mode in MODES)), (False, True)):
        module = make(cls=Ranks)
        model = layer_zero(inner, mode, make(cls=Ranks), use_orig_params=uo)
        cases = [(*program, 3 - 2 * (i // 2 % 2)) for i, program in enumerate(programs())]
        cases += [(*program, 2) for program in skipping(inner)]
        for name, ways, count in cases[int(uo) :: 2]:
            note(f"{mode} {inner} {uo} {name} {count}")
            if name.startswith("skipped"):
                with torch.no_grad():
                    use(model, ALL)
                    model(data(0))  # gathers from the shards all that has changed
            before = counts_of(model).reductions
            for step in reversed(range(count)):
                use(model, ways(dist.get_rank(), step))
                if step > 0:
                    with model.no_sync():
                        loss_of(model, data(step)).backward()
                else:
                    loss_of(model, data(step)).backward()
            if not name.startswith("skipped"):
                same_everywhere(counts_of(model).reductions - before)
            check(model, module, oracle(module, range(count), ways), f"{mode} {inner} {uo} {name} {count}")
            model.zero_grad()


class Chain(Ranks):
    """The root has nothing after its blocks: its output is the last one that is used."""

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if block.use != "skipped":
                found = block(x)
                x = x if block.use == "its output is dropped" else found
        return x


def the_last_output():
    """An output that is the root's too may be used by some ranks only, as any other, whatever is gathered ahead."""
    for mode, prefetch in itertools.product(MODES, (*BackwardPrefetch, None)):
        module = make(cls=Chain)
        model = layer_zero(2, mode, make(cls=Chain), backward_prefetch=prefetch)
        for unused, ranks in itertools.product(range(5), ((3,), (0, 1, 2))):
            note(f"{mode} {prefetch} {unused} on {ranks}")

            def ways(rank, step, unused=unused, ranks=ranks):
                return tuple("its output is dropped" if i == unused and rank in ranks else "all" for i in range(5))

            use(model, ways(dist.get_rank(), 0))
            loss_of(model, data(0)).backward()
            check(model, module, oracle(module, (0,), ways), f"{mode} {prefetch} {unused} on {ranks}")
            model.zero_grad()


def prefetched_after_skipping():
    """A rank that has skipped a unit that was fresh gathers the same ahead as the others when all is out of date."""
    for mode, inner in (("LAYER_ZERO", 1), *((mode, 2) for mode in MODES)):
        module = make(cls=Ranks)
        model = layer_zero(inner, mode, make(cls=Ranks), forward_prefetch=True)
        for blocks in ((), (1, 2), (0, 4), (3,), ()):
            note(f"{mode} {inner} {blocks}")

            def ways(rank, step, blocks=blocks, inner=inner):
                return tuple("skipped" if i in blocks and rank < inner and step == 0 else "all" for i in range(5))

            for step in (2, 1):
                use(model, ALL)
                hold_back(model, data(step))
            use(model, ways(dist.get_rank(), 0))
            loss_of(model, data(0)).backward()
            check(model, module, oracle(module, range(3), ways), f"{mode} {inner} {blocks}")
            model.zero_grad()


def cleared_in_part():
    """An optimizer that has only the pieces with elements clears a micro-batch on all ranks."""
    for which in ("all", "blocks.1", "blocks.2.outer"):
        module = make()
        model = layer_zero(2, "LAYER_ZERO_NESTED", use_orig_params=True)
        names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]
        pieces = [(name, param) for name, param in zip(names, model.parameters(), strict=True) if param.numel()]
        mine = [param for name, param in pieces if which == "all" or name.startswith(which)]
        hold_back(model, data(0))
        if mine:
            torch.optim.SGD(mine).zero_grad()
        hold_back(model, data(1))
        loss_of(model, data(2)).backward()
        total = {name: None for name in names}
        for rank, step in itertools.product(range(4), range(3)):
            grads = torch.autograd.grad(loss_of(module, data(step, rank)), list(module.parameters()))
            for name, grad in zip(names, grads, strict=True):
                if step == 0 and (which == "all" or name.startswith(which)):
                    continue
                total[name] = grad / 4 if total[name] is None else total[name] + grad / 4
        for name, grad in full_grads(model).items():
            torch.testing.assert_close(grad, total[name], rtol=1e-5, atol=1e-6, msg=f"{which} {name}")


def hold_back(model, x):
    with model.no_sync():
        loss_of(model, x).backward()


def all_raise(culprit, error, message, call):
    """``call`` raises on every rank: on ``culprit`` what is wrong, on the others who that is."""
    if dist.get_rank() == culprit:
        with pytest.raises(error, match=message):
            call()
    else:
        with pytest.raises(RuntimeError, match=rf"the unit of .*: rank {culprit} has raised an error that concerns"):
            call()


def errors_of_one_rank(mode, inner):
    """What one rank alone can see is raised by all, each naming it; then all go on."""
    wanted = make()
    loss_of(wanted, data(0, 0)).backward()
    model = layer_zero(inner, mode, use_orig_params=True)
    for culprit in (2, 3):
        note(f"{mode} {inner} {culprit}")
        owned = max(model.blocks[1].parameters(), key=torch.Tensor.numel)
        kept = owned.data
        if dist.get_rank() == culprit:
            owned.data = torch.zeros(kept.numel() + 1)
        with torch.no_grad():
            all_raise(culprit, ValueError, "expected the new data of parameter", functools.partial(model, data(0)))
        owned.data = kept
        if mode == "LAYER_ZERO_NESTED":
            hold_back(model, data(0))
            if dist.get_rank() == culprit:
                owned.grad.mul_(0.5)
            all_raise(
                culprit,
                ValueError,
                "was changed between micro-batches",
                functools.partial(hold_back, model, data(0)),
            )
            model.zero_grad()
            hold_back(model, data(0))
            if dist.get_rank() == culprit:
                owned.grad.mul_(0.5)
            all_raise(culprit, ValueError, "was changed between micro-batches", loss_of(model, data(0)).backward)
            model.zero_grad()
        loss_of(model, data(0, 0)).backward()
        for (name, grad), param in zip(full_grads(model).items(), wanted.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-6, msg=name)
        model.zero_grad()


def counted_anew():
    """A process group that is made anew with the same store counts its pairs from one again, on their own."""
    for inner in (2, 1, 4):
        dist.barrier()
        placement._exchanged.clear()
        liveness._lives.clear()
        liveness._counting.clear()
        layer_zero(inner, module=nn.Linear(2, 2), wrap=FSDP)


def pickled(mode, uo):
    """A model that was loaded knows what every rank holds without asking, also in a new process."""
    model = layer_zero(2, mode, use_orig_params=uo)
    loss_of(model, data(0)).backward()
    wanted, grads = model.shard_map(), full_grads(model)
    model.zero_grad()
    text = pickle.dumps(model)
    placement._cuts.clear()
    loaded = pickle.loads(text)
    assert loaded.shard_map() == wanted
    loss_of(loaded, data(0)).backward()
    for name, grad in full_grads(loaded).items():
        assert torch.equal(grad, grads[name]), (mode, uo, name)
    dist.barrier()


class Adapted(nn.Module):
    """A frozen layer in bf16 and a trained one in fp32 beside it."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(3, 5, dtype=torch.bfloat16).requires_grad_(False)
        self.trained = nn.Linear(3, 5)

    def forward(self, x):
        parts = (part(x.to(part.weight.dtype)).float() for part in (self.frozen, self.trained))
        return sum(parts)


def frozen_in_low_precision(mode, inner, uo, low):
    """Frozen parameters need no master in full precision: they keep their own, in segments and units of their own."""
    note(f"{mode} {inner} {uo} {low}")
    precision = None if low is None else MixedPrecision(param_dtype=low, cast_root_forward_inputs=False)
    module = make(cls=Adapted)
    arguments = {"use_orig_params": uo, "mixed_precision": precision}
    model = layer_zero(inner, mode, make(cls=Adapted), FSDP, segments=True, **arguments)
    optims = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, module)]
    for _ in range(2):
        for x in (data(1, 0), data(2, 0)):
            hold_back(model, x)
            if low is None:
                loss_of(module, x).backward()
        loss_of(model, data(0, 0)).backward()
        if low is None:
            loss_of(module, data(0, 0)).backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()
    for (name, value), param in zip(full_params(model).items(), module.parameters(), strict=True):
        assert value.dtype == param.dtype
        if low is None or "frozen" in name:
            torch.testing.assert_close(value, param, rtol=1e-5, atol=1e-5)
    alone = layer_zero(inner, mode, make(cls=Adapted).frozen, FSDP, **arguments)
    with torch.no_grad():
        alone(data(0).bfloat16())
    alone.requires_grad_(True)
    with pytest.raises(ValueError, match=r"frozen when it was wrapped, of a low precision, require grad now"):
        alone(data(0).bfloat16())


def in_turn(checks):
    for one in checks:
        note(one.__name__)
        one()
        dist.barrier()


@pytest.mark.thorough
def test_who_has_no_gradient_adds_zeros():
    simulate_ranks(in_turn, 4, [without_gradients])


@pytest.mark.thorough
def test_what_is_gathered_ahead_where_ranks_differ():
    simulate_ranks(in_turn, 4, [the_last_output, prefetched_after_skipping])


def test_what_one_rank_alone_clears():
    simulate_ranks(in_turn, 4, [cleared_in_part, counted_anew])


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("mode", "inner"), [(MODES[1], 2), (MODES[0], 1), (MODES[0], 2)])
def test_errors_of_one_rank_are_raised_by_all(mode, inner):
    simulate_ranks(errors_of_one_rank, 4, mode, inner)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("mode", "uo"), [(MODES[0], False), (MODES[0], True), (MODES[1], True), (MODES[1], False)])
def test_a_pickle_knows_all_shards(mode, uo):
    run_ranks(pickled, 4, mode, uo)


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("mode", "inner", "uo", "low"),
    [
        (mode, inner, uo, low)
        for mode, inner in ((MODES[0], 1), (MODES[0], 2), (MODES[1], 2))
        for uo, low in itertools.product((False, True), (None, torch.bfloat16))
    ],
)
def test_frozen_parameters_keep_a_low_precision(mode, inner, uo, low):
    simulate_ranks(frozen_in_low_precision, 4, mode, inner, uo, low)
