"""Gradients over inputs that are differentiated again (create_graph=True): forces, gradient penalties. As unsharded.

What a graph was made of stays gathered from a backward with create_graph=True to the next one, through forwards, too.

Promises:
- gradients over inputs that are differentiated again: forces, gradient penalties, `torch.autograd.functional`; the data
  that stays gathered for them, and refused uses
"""

import contextlib
import copy
import itertools

import pytest
import simulated
import torch
from fsdp_models import SETTINGS, Model, data, full_grads, full_params, have_memory, make, wrap_blocks
from gloo import fake_world, note, run_ranks
from pairs import cover
from simulated_ranks import simulate_ranks
from torch.utils.checkpoint import checkpoint

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy


def seen(model, step, rank):
    return data(step, rank).to(next(model.parameters()).device)


def slope(model, x):
    """The output's sum, and its gradient over ``x`` with a history."""
    x = x.clone().requires_grad_()
    output = model(x).sum()
    return output, torch.autograd.grad(output, x, create_graph=True)[0]


def alone(model, step, rank):
    slope(model, seen(model, step, rank))[1].square().sum().backward()


def beside_the_output(model, step, rank):
    energy, force = slope(model, seen(model, step, rank))
    (energy.square() + (force.norm(dim=1) - 1).square().mean()).backward()


def of_two_forwards(model, step, rank):
    first, second = slope(model, seen(model, step, rank)), slope(model, seen(model, step + 50, rank))
    (first[1].square().sum() + second[1].square().sum() + second[0]).backward()


def before_forwards(model, step, rank):
    """As penalties are, that come first; one of the forwards belongs to the loss, the other one to nothing."""
    energy, force = slope(model, seen(model, step, rank))
    with torch.no_grad():
        model(seen(model, step + 50, rank))
    (model(seen(model, step + 60, rank)).square().sum() + force.square().sum() + energy).backward()


def after_an_unused_forward(model, step, rank):
    _, force = slope(model, seen(model, step, rank))
    unused = model(seen(model, step + 50, rank))
    force.square().sum().backward()
    assert unused.requires_grad


def of_the_third_order(model, step, rank):
    x = seen(model, step, rank).requires_grad_()
    energy = model(x).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    (curvature,) = torch.autograd.grad(force.square().sum(), x, create_graph=True)
    (curvature.square().sum() + energy).backward()


def in_no_sync(model, step, rank):
    with model.no_sync() if isinstance(model, FSDP) else contextlib.nullcontext():
        beside_the_output(model, step + 50, rank)
    beside_the_output(model, step, rank)


def of_a_hessian(model, step, rank):
    """Whose rows are backwards through one graph."""
    x = seen(model, step, rank).requires_grad_()
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    rows = [torch.autograd.grad(each, x, retain_graph=True)[0] for each in force[0]]
    loss = (force * torch.stack(rows).sum()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def around_state_dicts(model, step, rank):
    _, force = slope(model, seen(model, step, rank))
    if isinstance(model, FSDP):
        model.state_dict()
        with FSDP.summon_full_params(model):
            assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in make().parameters())
    force.square().sum().backward()


def after_one_that_is_not_gone_on_with(model, step, rank):
    slope(model, seen(model, step + 50, rank))
    model(seen(model, step, rank)).square().sum().backward()


PATTERNS = (
    alone,
    beside_the_output,
    of_two_forwards,
    before_forwards,
    after_an_unused_forward,
    of_the_third_order,
    of_a_hessian,
    in_no_sync,
    around_state_dicts,
    after_one_that_is_not_gone_on_with,
)


class Twice(Model):
    """Its first block is its last one, too."""

    def forward(self, x):
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.last(x)


class CheckpointedUnits(Model):
    """What is recomputed is a whole unit."""

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def made(kind):
    module = make(cls={"twice": Twice, "checkpointed units": CheckpointedUnits}.get(kind, Model))
    if kind == "frozen":
        module.blocks[0].requires_grad_(False)
        module.blocks[1].inner.requires_grad_(False)
    for block in module.blocks if kind == "checkpointed" else ():
        inner = type(block).forward
        block.forward = lambda x, block=block, inner=inner: checkpoint(inner, block, x, use_reentrant=False)
    return module


def assert_equal(found, wanted, exact, what):
    bounds = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for name, value in wanted.items():
        if value is None:
            assert found[name] is None or not found[name].any(), (what, name)
        else:
            torch.testing.assert_close(found[name].cpu(), value.detach(), **bounds, msg=f"{what}, {name}")


def average(modules):
    for params in zip(*(m.parameters() for m in modules), strict=True):
        grads = [p.grad for p in params]
        for p in params if grads[0] is not None else ():
            p.grad = grads[0] / 2 + grads[1] / 2


def trained(kind, cases, library=None):
    ways = {}
    if library is not None:
        simulated.use(library)
        torch.sim.get_amp_supported_dtype = lambda: []  # which checkpoints ask for
        ways = {"process_group": simulated.new_group(), "device_id": torch.device("sim", 0)}
    for strategy, uo, name in cases:
        pattern, what = globals()[name], f"{strategy} uo={uo} {name} {kind}"
        note(what)
        # What no_sync has kept is reduced by the first backward after it, and the second one's beside it.
        exact = pattern is not in_no_sync and not ways  # the simulated device adds up in another order
        modules = [made(kind) for _ in range(2)]
        model = wrap_blocks(
            made(kind), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo, segments=True, **ways
        )
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, *modules)]
        for step in range(2):
            pattern(model, step, None)
            for rank, module in enumerate(modules):
                pattern(module, step, rank)
            average(modules)
            assert_equal(full_grads(model), {n: p.grad for n, p in modules[0].named_parameters()}, exact, what)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_equal(full_params(model), dict(modules[0].named_parameters()), exact, what)


def some_of(kinds, settings, kind):
    """Those of ``kind``, of cases in which each kind, strategy, use_orig_params and pattern meets each other one."""
    cases = itertools.product(kinds, dict(settings), (False, True), [pattern.__name__ for pattern in PATTERNS])
    cases = [rest for of, *rest in cover(list(cases)) if of == kind]
    assert {name for *_, name in cases} == {pattern.__name__ for pattern in PATTERNS}
    return cases


def all_of(settings):
    return [(*setting, pattern.__name__) for setting in settings for pattern in PATTERNS]


KINDS = ("plain", "frozen", "twice", "checkpointed", "checkpointed units")
LATE = ("frozen", "twice", "checkpointed units")


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", KINDS)
def test_penalties_train_as_unsharded(kind):
    simulate_ranks(trained, 2, kind, some_of(KINDS, SETTINGS, kind))


@pytest.mark.thorough
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", KINDS)
def test_penalties_train_as_unsharded_in_all_settings(kind):
    run_ranks(trained, 2, kind, all_of(SETTINGS))


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", LATE)
def test_they_do_where_gathers_come_late(kind):
    run_ranks(trained, 2, kind, some_of(LATE, SETTINGS[:4], kind), str(simulated.build()))


@pytest.mark.thorough
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", LATE)
def test_they_do_where_gathers_come_late_in_all_settings(kind):
    run_ranks(trained, 2, kind, all_of(SETTINGS[:4]), str(simulated.build()))


class Forces(Model):
    """Takes them in its forward, which goes on with weights of its own."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=self.training)
            return self.last(self.first(force))


def forces_in_forward():
    for strategy, uo in SETTINGS:
        note(f"{strategy} uo={uo}")
        modules = [make(cls=Forces) for _ in range(2)]
        model = wrap_blocks(make(cls=Forces), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        rank = torch.distributed.get_rank()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, *modules)]
        for step in range(3):
            for one in (model, *modules):
                one.eval()
            assert torch.equal(model(data(step)), modules[rank](data(step)))
            with torch.no_grad():
                assert torch.equal(model(data(step)), modules[rank](data(step)))
            for one in (model, *modules):
                one.train()
            model(data(step)).square().sum().backward()
            for each, module in enumerate(modules):
                module(data(step, each)).square().sum().backward()
            average(modules)
            assert_equal(full_grads(model), {n: p.grad for n, p in modules[0].named_parameters()}, None, strategy)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert strategy in ("NO_SHARD", "ZERO_1") or gathered(model) == 0


@pytest.mark.multiprocess
def test_forces_taken_in_a_forward_are_as_unsharded():
    simulate_ranks(forces_in_forward, 2)


def by_functionals():
    """These go through one graph several times."""
    x = torch.ones(2, 3)
    of_outputs = {"jvp": (x,), "vjp": (torch.ones(2, 1),), "jacobian": ()}
    of_a_number = {"hvp": (x,), "vhp": (x,), "hessian": ()}
    for strategy, uo in SETTINGS:
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        for name, args in (of_outputs | of_a_number).items():
            note(f"{strategy} uo={uo} {name}")
            function = getattr(torch.autograd.functional, name)
            ours, wanted = (
                function(lambda x, one=one: one(x) if name in of_outputs else one(x).sum(), x, *args)  # noqa: B023
                for one in (model, make())
            )
            torch.testing.assert_close(ours, wanted, rtol=0, atol=0)
        if strategy == "NO_SHARD":
            _, product = torch.func.jvp(model, (x,), (x,))
            assert torch.equal(product, torch.func.jvp(make(), (x,), (x,))[1])


@pytest.mark.multiprocess
def test_functionals_of_autograd_are_as_unsharded():
    simulate_ranks(by_functionals, 2)


@pytest.fixture
def model():
    with fake_world(2):
        yield wrap_blocks(make(), use_orig_params=True)


def gathered(model):
    return sum(any(have_memory(unit._unit.core)) for unit in FSDP.fsdp_modules(model))


def test_what_is_kept_for_a_graph_is_freed_after_it(model):
    def backward(pattern):
        pattern(model, 0, 0)
        return gathered(model)

    assert backward(beside_the_output) == 0
    slope(model, data(0, 0))
    assert gathered(model) == 4
    assert backward(after_one_that_is_not_gone_on_with) == 0
    slope(model, data(0, 0))
    with torch.no_grad():
        model(data(0, 0))
    assert gathered(model) == 4
    model(data(0, 0)).sum().backward()
    assert gathered(model) == 0


def test_between_the_two_backwards_parameters_are_shards(model):
    names = dict(model.named_parameters()).keys()
    shards = list(model.parameters())
    _, force = slope(model, data(0, 0))
    assert all(a is b for a, b in zip(model.parameters(), shards, strict=True))
    assert dict(model.named_parameters()).keys() == names
    twin = copy.deepcopy(model)
    assert [p.shape for p in twin.parameters()] == [p.shape for p in shards]
    model.zero_grad()
    force.square().sum().backward()
    beside_the_output(twin, 0, 0)
    assert gathered(model) == gathered(twin) == 0


def test_a_graph_whose_weights_are_freed_says_so(model):
    _, force = slope(model, data(0, 0))
    loss = force.square().sum()
    model(data(1, 0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"differentiated again \(create_graph=True\), after the unit was freed"):
        loss.backward()
    beside_the_output(model, 2, 0)
    assert gathered(model) == 0


def stepping_before():
    """torch refuses a graph whose weights an optimizer has changed; so is one that has run before any hook."""
    for (strategy, uo), wrap in itertools.product(SETTINGS, (FSDP, wrap_blocks)):
        note(f"{strategy} uo={uo} {wrap.__name__}")
        model = wrap(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        model(data(0)).sum().backward()
        output, force = slope(model, data(0))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for loss in (force.square().sum(), force.square().sum() + output):
            with pytest.raises(RuntimeError, match="were changed between a backward with create_graph=True and the"):
                loss.backward(retain_graph=True)
        model.zero_grad()
        slope(model, data(0))
        model(data(1)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        beside_the_output(model, 2, None)


@pytest.mark.multiprocess
def test_an_optimizer_that_steps_before_is_refused():
    simulate_ranks(stepping_before, 2)


def test_gradients_of_parameters_have_no_history(model):
    with pytest.raises(RuntimeError, match=r"cannot take part in backward\(create_graph=True\)"):
        model(data(0, 0)).sum().backward(create_graph=True)
    beside_the_output(model, 2, 0)
    assert gathered(model) == 0
