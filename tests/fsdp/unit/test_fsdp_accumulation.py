"""Users' actions between micro-batches in no_sync: they count correctly, or an error says what to do instead.

Promises:
- between them: parameters that are frozen, unfrozen or written to, gradients that are scaled:
  `test_freezing_writing_and_scaling_between_micro_batches`,
  `test_freezing_and_writing_between_micro_batches_of_layer_zero`
- where torch 2.13 goes wrong, and the drop-in with it: a unit of one element, a backward in `no_sync` between synced
  ones: `test_a_unit_of_one_element_is_accumulated_as_unsharded`
- blocks of `no_sync` in each other: `test_an_inner_block_does_not_end_an_outer_one`
- between them: a gradient that is not reduced is not clipped or shown as a reduced one; gradients that users clear or
  assign, of any strides; penalties over parameters
"""

import contextlib
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    Averaged,
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
from gloo import fake_world, handle_of, note, run_ranks
from layer_zero_ranks import layer_zero
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Torchs

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

LAYER_ZERO = ("LAYER_ZERO", "LAYER_ZERO_NESTED")
SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO_1")
TO_DO = (
    r"the unit of (Model|\w+ at `.+`) come from no_sync\(\) and are not reduced .* run the last micro-batch outside of"
)
CLEARED = {
    "zero_grad": lambda model: model.zero_grad(),
    "zero_grad in place": lambda model: model.zero_grad(set_to_none=False),
    "p.grad = None": lambda model: [setattr(p, "grad", None) for p in model.parameters()],
    "nothing": lambda model: None,
}


def wrapped(strategy, uo):
    if strategy in LAYER_ZERO:
        return layer_zero(2, strategy, use_orig_params=uo)
    return wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)


def backward(model, step, *, synced=True):
    if synced:
        loss_of(model, data(step)).backward()
        return
    with model.no_sync():
        loss_of(model, data(step)).backward()


def summoned_grads(model):
    """Inside of the block as full_grads does it, on NO_SHARD what this rank has."""
    with FSDP.summon_full_params(model, with_grads=True):
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def looked_at(strategy, uo):
    """Clipping and looking at gradients that are not reduced, where torch clips by a wrong norm and asserts sizes."""
    for first in (True, False):
        note(f"{strategy} uo={uo} first synced={first}")
        model, module = wrapped(strategy, uo), make()
        oracle = Averaged(module, 2)
        backward(model, 0, synced=first)
        if first:
            oracle.backward(lambda rank: [data(0, rank)])
        backward(model, 1, synced=False)
        with pytest.raises(ValueError, match=r"clip_grad_norm_: gradients of " + TO_DO):
            model.clip_grad_norm_(0.1)
        with pytest.raises(ValueError, match=r"summon_full_params\(with_grads=True\): gradients of " + TO_DO):
            summoned_grads(model)
        assert_same(model, make())
        backward(model, 2)
        rest = (1, 2) if first else (0, 1, 2)
        oracle.backward(lambda rank, rest=rest: [data(k, rank) for k in rest])
        assert_same_grads(model, module, f"{strategy} uo={uo}")
        wanted = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        torch.testing.assert_close(model.clip_grad_norm_(0.1), wanted)
        for name, clear in CLEARED.items():
            if name == "nothing":
                continue
            backward(model, 3, synced=False)
            clear(model)
            assert all(grad is None or not grad.any() for grad in full_grads(model).values()), (strategy, uo, name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert model.clip_grad_norm_(1.0) == 0.0
            backward(model, 4)
            module.zero_grad()
            oracle.backward(lambda rank: [data(4, rank)])
            assert_same_grads(model, module, f"{strategy} uo={uo} {name}")
            model.zero_grad()


def unsharded(uo):
    """Without sharding each rank has its own sum, as DDP has; with a reduced part beside it, it is refused."""
    model, module = wrapped("NO_SHARD", uo), make()
    backward(model, 0, synced=False)
    loss_of(module, data(0)).backward()
    for found in (summoned_grads(model), full_grads(model)):
        assert all(torch.equal(found[name], p.grad) for name, p in module.named_parameters())
    model.clip_grad_norm_(0.1)
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    found = full_grads(model)
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[name], p.grad)
    backward(model, 1)  # what was clipped is what is reduced
    mean = {name: sum(clipped_then_added(rank)[name] for rank in range(2)) / 2 for name in full_grads(model)}
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, mean[name], rtol=1e-5, atol=1e-6)
    backward(model, 2, synced=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call, *args in ((model.clip_grad_norm_, 0.1), (summoned_grads, model), (optimizer.step,)):
        with pytest.raises(ValueError, match=r"no_sync\(\).* run the last micro-batch"):
            call(*args)
    assert_same(model, make())


def clipped_then_added(rank):
    """Of a rank's own: what backward adds to what was clipped."""
    module = make()
    loss_of(module, data(0, rank)).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    loss_of(module, data(1, rank)).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def with_closures(strategy, uo):
    """The last micro-batch is run by the step itself, as Lightning does. Where that is in no_sync too: refused."""
    model, module = wrapped(strategy, uo), make()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, module)]
    for i in range(0, 6, 2):
        backward(model, i, synced=False)
        assert optimizers[0].step(lambda i=i: backward(model, i + 1) or "a loss") == "a loss"
        Averaged(module, 2).backward(lambda rank, i=i: [data(i, rank), data(i + 1, rank)])
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert_same(model, module, f"{strategy} uo={uo} {i}")
    backward(model, 6)
    with pytest.raises(ValueError, match=r"SGD.step\(\): .* run the last micro-batch outside of no_sync"):
        optimizers[0].step(closure=lambda: backward(model, 7, synced=False))
    assert_same(model, module)


def assigned(strategy, uo):
    """A gradient that was assigned after micro-batches is added to, not averaged: every rank has its piece of it."""
    for cleared, more in itertools.product(CLEARED, (False, True)):
        what = f"{strategy} uo={uo} {cleared} more={more}"
        note(what)
        model, module = wrapped(strategy, uo), make()
        oracle = Averaged(module, 2)
        for synced in (True, False) if more else (False,):
            backward(model, 0, synced=synced)
        CLEARED[cleared](model)
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.25)
        for p in module.parameters():
            p.grad = torch.full_like(p, 0.25)
        if more:
            backward(model, 1, synced=False)
        backward(model, 2)
        oracle.backward(lambda rank, more=more: [data(k, rank) for k in ((1, 2) if more else (2,))])
        for name, grad in full_grads(model).items():
            wanted = dict(module.named_parameters())[name].grad
            torch.testing.assert_close(grad, wanted, msg=lambda text, name=name, what=what: f"{what} {name}: {text}")
        if strategy != "NO_SHARD":
            assert_same_grads(model, module, what)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = full_params(model)
        grads = full_grads(model)
        optimizer.step()
        for name, value in full_params(model).items():
            torch.testing.assert_close(value, before[name] - 0.1 * grads[name])


def assigned_in_part():
    """Only some get one, the others have none; a backward that skips a unit leaves what it was given."""
    for strategy, cleared in itertools.product(("FULL_SHARD", "ZERO_1"), ("zero_grad", "zero_grad in place")):
        model, module = wrapped(strategy, True), make()
        oracle = Averaged(module, 2)
        backward(model, 0, synced=False)
        CLEARED[cleared](model)
        for name, p in model.named_parameters():
            if name.endswith("weight"):
                p.grad = torch.full_like(p, 0.5)
        backward(model, 1)
        for name, p in module.named_parameters():
            p.grad = torch.full_like(p, 0.5) if name.endswith("weight") else None
        oracle.backward(lambda rank: [data(1, rank)])
        assert_same_grads(model, module, f"{strategy} {cleared}")
    model = wrapped("FULL_SHARD", False)
    backward(model, 0, synced=False)
    model.zero_grad()
    flat = model.blocks[1].params[0]
    flat.grad = torch.ones_like(flat)
    hidden = model.blocks[0]
    hidden(torch.ones(2, 5)).sum().backward()  # a pass of its own, which never comes to blocks.1
    assert torch.equal(flat.grad, torch.ones_like(flat))
    with pytest.raises(RuntimeError, match="size"):
        flat.grad = torch.ones(3)


def penalty_of(model):
    return sum(p.square().sum() for p in model.parameters())


def penalized(strategy, uo):
    """A loss with the parameters themselves in it: their gradients come from autograd, each rank has its piece's."""
    what = f"{strategy} uo={uo}"
    note(what)
    groups = {"process_group": (dist.new_group([0, 1]), dist.group.WORLD)} if strategy.startswith("LAYER") else {}
    arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo, **groups}
    model, module = wrap_blocks(make(), **arguments), make()
    oracle = Averaged(module, 2)
    for alone in (False, True):
        for step, synced in enumerate((False, False, True)):
            with contextlib.nullcontext() if synced else model.no_sync():
                if alone and synced:
                    penalty_of(model).backward()
                else:
                    (loss_of(model, data(step)) + penalty_of(model)).backward()
            if not (alone and synced):
                oracle.backward(lambda rank, step=step: [data(step, rank)])
            penalty_of(module).backward()
        for name, grad in full_grads(model).items():
            wanted = dict(module.named_parameters())[name].grad
            torch.testing.assert_close(grad, wanted, msg=lambda text, at=f"{what} {name}": f"{at}: {text}")
        model.zero_grad()
        module.zero_grad()


@pytest.mark.multiprocess
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("strategy", "uo"), list(itertools.product(SHARDED, (False, True))))
def test_what_is_not_reduced_is_not_clipped_or_shown(strategy, uo):
    simulate_ranks(looked_at, 2, strategy, uo)


@pytest.mark.multiprocess
@pytest.mark.sweep(1)
@pytest.mark.parametrize("uo", [False, True])
def test_without_sharding_each_rank_has_its_own_sum(uo):
    simulate_ranks(unsharded, 2, uo)


@pytest.mark.multiprocess
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("strategy", "uo"), list(itertools.product(("FULL_SHARD", "ZERO_1", "NO_SHARD"), (False, True)))
)
def test_assigned_gradients_are_added_to(strategy, uo):
    simulate_ranks(assigned, 2, strategy, uo)


def in_part_and_of_any_strides():
    assigned_in_part()
    pieces_of_any_strides()


@pytest.mark.multiprocess
def test_gradients_assigned_in_part_and_of_any_strides():
    simulate_ranks(in_part_and_of_any_strides, 2)


@pytest.mark.multiprocess
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("uo", "strategy"), list(itertools.product((False, True), (*SHARDED, "NO_SHARD", *LAYER_ZERO)))
)
def test_penalties_over_parameters(strategy, uo):
    simulate_ranks(penalized, 2, strategy, uo)


@pytest.mark.multiprocess
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("uo", "strategy"), list(itertools.product((False, True), (*SHARDED, "NO_SHARD", *LAYER_ZERO)))
)
def test_a_step_may_run_the_last_micro_batch(strategy, uo):
    simulate_ranks(with_closures, 2, strategy, uo)


@pytest.mark.parametrize("uo", [False, True])
def test_one_rank_adds_up_as_autograd_does(uo):
    with fake_world(1):
        model, module = wrapped("FULL_SHARD", uo), make()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, module)]
        for step, synced in enumerate((True, False, False)):
            backward(model, step, synced=synced)
            loss_of(module, data(step)).backward()
            assert_same_grads(model, module, f"after {step}")
        torch.testing.assert_close(model.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(module.parameters(), 1.0))
        for optimizer in optimizers:
            optimizer.step()
        assert_same(model, module)


@pytest.mark.parametrize("uo", [False, True])
def test_an_inner_block_does_not_end_an_outer_one(uo):
    with fake_world(2):
        model = wrapped("FULL_SHARD", uo)
        backward(model, 0)
        reductions = counts_of(model).reductions
        first, second = model.no_sync(), model.no_sync()
        with model.no_sync():
            with model.no_sync():
                backward(model, 1)
            with pytest.raises(KeyError), model.no_sync():
                raise KeyError
            backward(model, 2)
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)  # not the one that was entered last
            backward(model, 3)
            second.__exit__(None, None, None)
            assert counts_of(model).reductions == reductions
        backward(model, 4)
        assert counts_of(model).reductions == reductions + 4


def parts_of(module, part):
    """Parameters by a part of their names; of a unit wrapped with flat parameters, all or none of it."""
    return [p for name, p in module.named_parameters() if part in name]


def means(*steps):
    """The mean gradients of each step alone, and their sum, by name."""
    found = []
    for step in steps:
        module = make()
        Averaged(module, dist.get_world_size()).backward(lambda rank, step=step: [data(step, rank)])
        found.append({name: p.grad for name, p in module.named_parameters()})
    return found


def assert_close_grads(model, wanted, what):
    found = full_grads(model)
    for name, grad in wanted.items():
        assert (found[name] is None) == (grad is None), (what, name, found[name], grad)
        if grad is not None:
            torch.testing.assert_close(found[name], grad, msg=lambda text, name=name: f"{what} {name}: {text}")


def frozen_in_between(strategy, uo):
    """Frozen with a gradient: it stays as it is. Unfrozen after a micro-batch: it has that of the next ones."""
    zeroth, first, second = means(0, 1, 2)
    for part, synced in itertools.product(("blocks.1", "inner") if uo else ("blocks.1",), (True, False)):
        what = f"{strategy} uo={uo} {part} synced={synced}"
        note(what)
        model = wrapped(strategy, uo)
        backward(model, 0, synced=synced)
        for p in parts_of(model, part):
            p.requires_grad_(False)
        backward(model, 1, synced=False)
        backward(model, 2)
        wanted = {n: g if part in n else g + first[n] + second[n] for n, g in zeroth.items()}
        assert_close_grads(model, wanted, what)
        for p in parts_of(model, part):
            p.requires_grad_(True)
        backward(model, 1, synced=False)
        for p in parts_of(model, part):
            p.requires_grad_(False)
        backward(model, 2)
        wanted = {n: g + first[n] + (0 if part in n else second[n]) for n, g in wanted.items()}
        assert_close_grads(model, wanted, f"{what} again")
    model = wrapped(strategy, uo)
    for p in parts_of(model, "blocks.1"):
        p.requires_grad_(False)
    backward(model, 0, synced=False)
    for p in parts_of(model, "blocks.1"):
        p.requires_grad_(True)
    backward(model, 1, synced=False)
    backward(model, 2)
    wanted = {n: first[n] + second[n] + (0 if "blocks.1" in n else g) for n, g in zeroth.items()}
    assert_close_grads(model, wanted, f"{strategy} uo={uo} unfrozen")


WRITES = {
    "p.mul_": lambda p: p.mul_(0.5),
    "p.data =": lambda p: setattr(p, "data", p.data * 0.5),
}


@torch.no_grad()
def write(model, how):
    for p in model.parameters():
        WRITES[how](p)


def written_in_between(strategy, uo):
    """The next micro-batch computes with the weights of now, whoever has written them."""
    for how in WRITES:
        note(f"{strategy} uo={uo} {how}")
        model, module = wrapped(strategy, uo), make()
        oracle = Averaged(module, dist.get_world_size())
        backward(model, 0, synced=False)
        oracle.backward(lambda rank: [data(0, rank)])
        write(model, how)
        write(module, how)
        backward(model, 1, synced=False)
        backward(model, 2)
        oracle.backward(lambda rank: [data(1, rank), data(2, rank)])
        assert_close_grads(model, {n: p.grad for n, p in module.named_parameters()}, f"{strategy} uo={uo} {how}")


def scaled_in_between(strategy, uo):
    """What is shown alone can be scaled; beside a gradient that is put aside it is refused, and nothing stays of it."""
    zeroth, first, second = means(0, 1, 2)
    what = f"{strategy} uo={uo}"
    note(what)
    model = wrapped(strategy, uo)
    backward(model, 0, synced=False)
    for p in model.parameters():
        p.grad.mul_(0.5)
    backward(model, 1)
    assert_close_grads(model, {n: 0.5 * g + first[n] for n, g in zeroth.items()}, what)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)  # reduced: as of any module
    backward(model, 2, synced=False)
    for p in parts_of(model, "blocks.2"):
        p.grad.mul_(0.5)
    with pytest.raises(
        ValueError, match=r"the unit of Block at `blocks.2`: the gradient of (parameter `scale`|its flat para)"
    ):
        backward(model, 2)
    wanted = {n: 0.5 * (0.5 * g + first[n]) for n, g in zeroth.items()}
    if strategy != "ZERO_1":  # there all ranks go on to the end before they raise
        assert_close_grads(model, wanted, f"{what}: what was reduced")
    model.zero_grad()
    backward(model, 0)
    backward(model, 2, synced=False)
    model.blocks[2].zero_grad(set_to_none=False)  # of some units only
    backward(model, 1)
    wanted = {n: first[n] + (0 if "blocks.2" in n else g + second[n]) for n, g in zeroth.items()}
    assert_close_grads(model, wanted, f"{what}: some cleared in place")


def beside(strategy, uo):
    frozen_in_between(strategy, uo)
    written_in_between(strategy, uo)
    if strategy not in LAYER_ZERO:
        scaled_in_between(strategy, uo)


@pytest.mark.multiprocess
@pytest.mark.sweep(3)
@pytest.mark.parametrize(("strategy", "uo"), list(itertools.product((*SHARDED, "NO_SHARD"), (False, True))))
def test_freezing_writing_and_scaling_between_micro_batches(strategy, uo):
    simulate_ranks(beside, 2, strategy, uo)


@pytest.mark.thorough
@pytest.mark.multiprocess
@pytest.mark.parametrize(("strategy", "uo"), list(itertools.product(LAYER_ZERO, (False, True))))
def test_freezing_and_writing_between_micro_batches_of_layer_zero(strategy, uo):
    simulate_ranks(beside, 4, strategy, uo)


def strided(shape):
    return torch.arange(3.0 * shape.numel()).reshape(*shape, 3)[..., 0]


def expanded(shape):
    return torch.tensor(3.0).expand(shape)


def transposed(shape):
    return torch.arange(float(shape.numel())).reshape(shape[::-1]).permute(*reversed(range(len(shape))))


def sparse(shape):
    return torch.arange(float(shape.numel())).reshape(shape).to_sparse()


KINDS = (strided, expanded, transposed, sparse)


def assign(model, module, kind, uo):
    """The same gradients to both; what the flat parameter is given is that of its parameters one after the other."""
    if uo:
        for p, plain in zip(model.parameters(), module.parameters(), strict=True):
            p.grad = kind(p.shape)
            plain.grad = kind(p.shape).to_dense().clone(memory_format=torch.contiguous_format)
        return
    (flat,) = model.parameters()
    flat.grad = kind(flat.shape)
    pieces = kind(flat.shape).to_dense().split([p.numel() for p in module.parameters()])
    for p, piece in zip(module.parameters(), pieces, strict=True):
        p.grad = piece.reshape(p.shape).clone()


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_gradients_of_any_strides_are_assigned(strategy, kind, uo):
    with fake_world(1):
        arguments = {"use_orig_params": uo, "sharding_strategy": ShardingStrategy[strategy]}
        model = FSDP(make(cls=nn.Linear, in_features=7, out_features=5), **arguments)
        module = make(cls=nn.Linear, in_features=7, out_features=5)
        x = torch.ones(2, 7)
        for synced in (False, False, True, False, True):  # assigned before the first, and between them
            assign(model, module, kind, uo)
            with contextlib.nullcontext() if synced else model.no_sync():
                model(x).sum().backward()
            module(x).sum().backward()
            found = torch.cat([p.grad.flatten() for p in model.parameters()])
            torch.testing.assert_close(found, torch.cat([p.grad.flatten() for p in module.parameters()]))
        assert model.training_state.name == "IDLE"


def test_a_gradient_that_no_sync_shows_is_transposed():
    with fake_world(1):
        model, module = (make(cls=nn.Linear, in_features=4, out_features=4, bias=False) for _ in range(2))
        model = FSDP(model, use_orig_params=True)
        x = torch.arange(8.0).reshape(2, 4)
        for synced in (False, False, True):
            with contextlib.nullcontext() if synced else model.no_sync():
                model(x).square().sum().backward()
            module(x).square().sum().backward()
            for m in (model, module):
                for p in m.parameters():
                    p.grad = p.grad.t()
        torch.testing.assert_close(next(model.parameters()).grad, module.weight.grad)


def pieces_of_any_strides():
    """Each rank's piece of what it is given, whatever its strides; sums of small numbers are exact."""
    for strategy, atomic in (("FULL_SHARD", None), ("FULL_SHARD", "row"), ("ZERO_1", None)):
        note(f"{strategy} {atomic}")
        model = FSDP(
            make(cls=nn.Linear, in_features=7, out_features=5),
            use_orig_params=True,
            sharding_strategy=ShardingStrategy[strategy],
            atomic=atomic,
        )
        for kind in (strided, expanded):
            for p in model.parameters():
                p.grad = kind(p.shape)
            given = [p.grad.clone() for p in model.parameters()]
            for synced in (False, False, True):
                with contextlib.nullcontext() if synced else model.no_sync():
                    model(torch.ones(2, 7)).sum().backward()
            for p, before in zip(model.parameters(), given, strict=True):
                assert p.grad is None or torch.equal(p.grad, before + 6.0), (strategy, atomic, p.grad, before)
            model.zero_grad()


class OneElement(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (self.weight * x).sum()


def of_one_element(wrapper, **settings):
    """This rank's gradient after a synced backward, one in no_sync and a synced one."""
    model = wrapper(OneElement(), **settings)
    for i, scale in enumerate((1.0, 10.0, 100.0)):
        with model.no_sync() if i == 1 else contextlib.nullcontext():
            model(torch.full((1,), scale * (dist.get_rank() + 1))).backward()
    return [param.grad.item() for param in model.parameters() if param.grad is not None and param.grad.numel()]


def units_of_one_element():
    """torch's class takes the first, sharded gradient for an unsharded one, which has one element too."""
    [expected] = of_one_element(nn.parallel.DistributedDataParallel)
    of_rank = [[expected], []][dist.get_rank()]
    for uo in (False, True):
        ours = of_one_element(FSDP, use_orig_params=uo)
        assert (ours or [0.0]) == (of_rank or [0.0])
        theirs = {}
        for kind in ("torch", "flatparam"):
            with handle_of(kind):
                theirs[kind] = of_one_element(Torchs, use_orig_params=uo, device_id=torch.device("cpu"))
        assert theirs["torch"] == theirs["flatparam"]
        assert uo or dist.get_rank() or theirs["torch"] == [165.75] != [expected]  # silently


@pytest.mark.multiprocess
def test_a_unit_of_one_element_is_accumulated_as_unsharded():
    run_ranks(units_of_one_element, 2)
