"""Freezing and unfreezing, also by hooks in the middle of a forward, where modules have views: as unsharded.

Promises:
- parameters that are frozen or unfrozen by a hook in the middle of a forward
- weights in a forward carry nothing of ours into files, pickles and copies, in the drop-in too; `saved_tensors_hooks`
  that write files: `test_weights_in_a_forward_carry_nothing_into_files_and_copies`,
  `test_activations_saved_to_files_and_read_for_backward`
"""

import copy
import io
import itertools
import pickle

import pytest
import torch
from fsdp_models import STRATEGIES, assert_same, assert_same_grads, data, loss_of, make, wrap_blocks
from gloo import fake_world, handle_of, note, run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

FROZEN = {  # by a part of their names
    "whole units": ("blocks.0", "blocks.1"),
    "parts of units": ("inner", "first.weight"),
    "all but the last layer": ("first", "blocks"),
}


def frozen(which):
    module = make()
    for name, p in module.named_parameters():
        p.requires_grad_(not any(part in name for part in FROZEN[which]))
    return module


class Unfreezes:
    """A forward hook that lets every parameter of ``model`` be trained, or none, once it is told to."""

    def __init__(self, model):
        self.model, self.is_on, self.trains = model, False, True

    def __call__(self, *ignored):
        if self.is_on:
            for p in self.model.parameters():
                p.requires_grad_(self.trains)


def hooked(model, where):
    hook = Unfreezes(model)
    place = getattr(model.blocks[1], "module", model.blocks[1]) if where == "a block" else getattr(model, where)
    place.register_forward_hook(hook)
    return hook


class Ranks:
    """The oracle: an unsharded module for each rank, whose gradients are the mean of theirs."""

    def __init__(self, modules):
        self.modules = modules

    def backward(self, step):
        for rank, module in enumerate(self.modules):
            loss_of(module, data(step, rank)).backward()
        for params in zip(*(module.parameters() for module in self.modules), strict=True):
            grads = [p.grad for p in params]
            if grads[0] is not None:
                mean = grads[0] / 2 + grads[1] / 2
                for p in params:
                    p.grad = mean.clone()


def unfrozen_by_hooks():
    for i, (strategy, which) in enumerate(itertools.product(STRATEGIES, FROZEN)):
        where = ("last", "a block")[i % 2]
        what = f"{strategy}, {which} frozen, hook of {where}"
        note(what)
        modules = [frozen(which) for _ in range(2)]
        model = wrap_blocks(frozen(which), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)
        oracle = Ranks(modules)
        hook, *others = (hooked(m, where) for m in (model, *modules))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, *modules)]
        for step in range(4):
            for one in (hook, *others):
                one.is_on = step == 1
            trained = {id(p): p.requires_grad for p in modules[0].parameters()}
            loss_of(model, data(step)).backward()
            oracle.backward(step)
            if step == 1:  # whether that pass counts already is the user's guess, as it is in torch
                for params in zip(*(m.parameters() for m in (model, *modules)), strict=True):
                    for p, was in zip(params, (trained[id(params[1])],) * 3, strict=True):
                        p.grad = p.grad if was else None
            flags = [p.requires_grad for p in modules[0].parameters()]
            assert [p.requires_grad for p in model.parameters()] == flags, (what, step)
            assert_same_grads(model, modules[0], f"{what}, step {step}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same(model, modules[0], what)


def frozen_by_turns():
    """Other parameters are frozen in every step, all of them by a hook in the last; what is frozen has no gradient."""
    for strategy in STRATEGIES:
        note(strategy)
        modules = [make() for _ in range(2)]
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)
        oracle = Ranks(modules)
        hooks = [hooked(m, "last") for m in (model, *modules)]
        for step in range(6):
            for hook in hooks:
                hook.is_on, hook.trains = step == 5, False
            for i, params in enumerate(zip(*(m.parameters() for m in (model, *modules)), strict=True)):
                for p in params:
                    p.requires_grad_((i + step) % 3 != 0)
                    p.grad = None
            loss_of(model, data(step)).backward()
            oracle.backward(step)
            assert_same_grads(model, modules[0], f"{strategy} step {step}")
        assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def both():
    unfrozen_by_hooks()
    frozen_by_turns()


@pytest.mark.multiprocess
def test_what_is_frozen_and_unfrozen_in_the_middle():
    run_ranks(both, 2)


class Late(nn.Module):
    """Lets its weight be trained between two uses of it."""

    def __init__(self, trains):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)
        self.bias = nn.Parameter(torch.ones(3), requires_grad=trains)

    def forward(self, x):
        x = x * self.weight + self.bias
        if self.training:
            self.weight.requires_grad_(True)
        return (x * self.weight).sum()


def test_what_would_be_lost_is_refused():
    with fake_world(2):
        model = FSDP(Late(True), use_orig_params=True)
        model(torch.ones(3)).backward()
        assert all(p.requires_grad for p in model.parameters())
        assert model.module.weight.grad is not None
        model = FSDP(Late(False), use_orig_params=True)
        named = "requires_grad of parameter `weight` of a Late in the unit of Late was set in the middle"
        with pytest.raises(RuntimeError, match=named):
            model(torch.ones(3))
        model.eval()
        assert all(p.requires_grad or name.endswith("bias") for name, p in model.named_parameters())
        model(torch.ones(3)).backward()
        whole = FSDP(Late(False).requires_grad_(False))
        with pytest.raises(RuntimeError, match="where it is a part of the flat parameter"):
            whole(torch.ones(3))
        assert not any(p.requires_grad for p in whole.parameters())


class Inside(nn.Module):
    """Goes backward itself, if it is told to."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x, inside=False):
        y = (x * self.weight + self.bias).sum()
        if inside:
            y.backward()
        return y


def test_what_trains_has_its_gradient_though_it_was_frozen_in_another_forward():
    x = torch.ones(3)
    with fake_world(2):
        for strategy in STRATEGIES:
            model = FSDP(Inside(), use_orig_params=True, sharding_strategy=ShardingStrategy[strategy])
            weight = model.module.weight
            weight.requires_grad_(False)
            model(x)  # an evaluation that forgot no_grad
            weight.requires_grad_(True)
            model(x, inside=True)
            assert weight.grad.abs().sum() > 0, strategy
            model.zero_grad()
            with model.no_sync():
                model(2 * x).backward()
            weight.requires_grad_(False)
            loss = model(x)
            weight.requires_grad_(True)
            loss.backward()
            assert weight.grad.abs().sum() > 0, strategy


def by_torch(tensor, weights_only=True):
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


COPIES = {
    "torch.save": by_torch,
    "torch.save, all of it": lambda tensor: by_torch(tensor, weights_only=False),
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("kind", ["runtime", "dropin"])
@pytest.mark.parametrize("orig", [True, False])
def test_weights_in_a_forward_carry_nothing_into_files_and_copies(kind, orig):
    """What is set on them, and what is made of them, is what the unsharded module's weights have: nothing of ours."""
    wrapper, settings = (FSDP, {}) if kind == "runtime" else (TorchsFSDP, {"device_id": torch.device("cpu")})
    found = []

    def look(module, *ignored):
        for name, weight in module.named_parameters():
            plain = weight.detach()  # no history: only leaves can be copied deeply
            found.append((name, vars(weight), vars(plain)))
            for way, made in COPIES.items():
                copied = made(plain if way != "torch.save" else weight)
                assert torch.equal(copied, plain), (name, way)
                assert not vars(copied), (name, way)

    with fake_world(1), handle_of("flatparam"):
        module = make()
        for part in (module.first, module.last):
            part.register_forward_hook(look)
        model = wrap_blocks(module, wrapper, use_orig_params=orig, **settings)
        loss_of(model, data(0)).backward()
        with torch.no_grad():
            model(data(0))
    assert len(found) == 6 if orig else not found
    assert all(own == detached == {} for _, own, detached in found), found


def test_activations_saved_to_files_and_read_for_backward():
    """PyTorch's tutorial of saved_tensors_hooks: ``torch.load`` has weights_only=True by default."""

    def pack(tensor):
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return buffer

    def unpack(buffer):
        buffer.seek(0)
        return torch.load(buffer)

    with fake_world(1):
        plain, model = make(), wrap_blocks(make(), use_orig_params=True)
        for module in (plain, model):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = loss_of(module, data(0))
            loss.backward()
        assert_same_grads(model, plain)


def test_requires_grad_of_other_tensors_is_torchs():
    with fake_world(1):
        model = FSDP(nn.Linear(3, 3), use_orig_params=True)
        model(torch.ones(2, 3)).sum().backward()
        made = torch.ones(3, requires_grad=True) * 2
        assert made.requires_grad_() is made
        with pytest.raises(RuntimeError, match="you can only change requires_grad flags of leaf variables"):
            made.requires_grad_(False)
        leaf = torch.ones(3)
        assert leaf.requires_grad_(requires_grad=True) is leaf
        assert leaf.requires_grad
        with pytest.raises(TypeError):
            leaf.requires_grad_("no flag", 1)
