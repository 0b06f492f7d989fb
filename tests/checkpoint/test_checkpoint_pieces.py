"""Optimizer states of another shape than a parameter's piece: kept for that piece, or with the parameter."""

import itertools

import pytest
import torch
import torch.distributed as dist
from checkpoints import differing, full_state, train, wrapped
from fsdp_models import Model, data, loss_of
from gloo import note, run_ranks
from torch.testing._internal.two_tensor import TwoTensor

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint
from flatparam.checkpoint import CheckpointError

pytestmark = pytest.mark.multiprocess


class Scaled(torch.optim.Adam):
    """Its state has tensors of several shapes that belong to what this process steps."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    state, grad = self.state[param], param.grad.flatten()
                    blocks = torch.stack([block.abs().max() for block in grad.split(4)])
                    state["blocks"] = state.get("blocks", 0) + blocks
                    state["largest"] = torch.maximum(state.get("largest", torch.tensor(0.0)), grad.abs().max())
                    state["pair"] = [blocks * 2, "text"]
                    state["history"] = state.get("history", torch.zeros(3)) + 1
                    param.sub_(1e-3 * state["blocks"].repeat_interleave(4)[: grad.numel()].view_as(param))


def adafactor(params):
    return torch.optim.Adafactor(params, lr=0.1)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict | list | tuple):
        items = zip(a.values(), b.values(), strict=True) if isinstance(a, dict) else zip(a, b, strict=True)
        return len(a) == len(b) and (not isinstance(a, dict) or a.keys() == b.keys()) and all(same(*i) for i in items)
    return a == b


def resumed(folder, strategy, uo, atomic, cls):
    note(f"{strategy} {uo} {atomic}")
    more = {"atomic": atomic} if atomic else {}
    first, second = (wrapped(strategy, uo, cls=Model, seed=seed, **more) for seed in (0, 1))
    one, two = (cls(model.parameters()) for model in (first, second))
    train(first, one, 0, 3)
    train(second, two, 8, 1)
    checkpoint.save(folder / "one", first, one)
    checkpoint.load(folder / "one", second, two)
    states = [optimizer.state_dict()["state"] for optimizer in (one, two)]
    for key, values in states[0].items():
        assert same(states[1].get(key, {}), values) or not one.param_groups[0]["params"][key].numel(), key
    assert train(first, one, 3, 2) == train(second, two, 3, 2)
    assert not differing(full_state(first), full_state(second))


CASES = [
    *itertools.product(("FULL_SHARD", "NO_SHARD", "ZERO_1", "LAYER_ZERO"), (True, False), (None,)),
    ("FULL_SHARD", True, "row"),
    ("FULL_SHARD", True, torch.Tensor.numel),
]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("cls", [Scaled, adafactor])
@pytest.mark.parametrize(("strategy", "uo", "atomic"), CASES)
def test_resumed_with_the_same_ranks(tmp_path, strategy, uo, atomic, cls):
    run_ranks(resumed, 2, tmp_path, strategy, uo, atomic, cls)


def elsewhere(folder, uo):
    model = wrapped("FULL_SHARD", uo, cls=Model)
    optimizer = Scaled(model.parameters())
    train(model, optimizer, 0, 2)
    checkpoint.save(folder / "one", model, optimizer)
    for strategy, units, orig in (("NO_SHARD", True, uo), ("FULL_SHARD", False, uo), ("FULL_SHARD", True, not uo)):
        other = wrapped(strategy, orig, units, cls=Model, seed=1)
        second = Scaled(other.parameters())
        before = full_state(other)
        with pytest.raises(CheckpointError, match=r"optimizer's `\w+` of `[\w.]+` was saved for each rank's piece"):
            checkpoint.load(folder / "one", other, second)
        assert not differing(full_state(other), before)
        assert not second.state
        checkpoint.load(folder / "one", other)
        assert not differing(full_state(other), full_state(model))


@pytest.mark.parametrize("uo", [True, False])
def test_other_pieces_are_refused(tmp_path, uo):
    run_ranks(elsewhere, 2, tmp_path, uo)


def whole(folder):
    """The oracle is the unsharded module, with the average of the ranks' gradients."""
    model = wrapped("FULL_SHARD", cls=Model, atomic=torch.Tensor.numel)
    optimizer = adafactor(model.parameters())
    train(model, optimizer, 0, 2)
    plain = Model()
    plain.load_state_dict(full_of(wrapped("NO_SHARD", cls=Model)))
    plain_optimizer = adafactor(plain.parameters())
    for step in range(2):
        for rank in range(2):
            (loss_of(plain, data(step, rank)) / 2).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    checkpoint.save(folder / "one", model, optimizer)
    for strategy, more in (("NO_SHARD", {}), ("FULL_SHARD", {"atomic": torch.Tensor.numel, "units": False})):
        other = wrapped(strategy, seed=2, cls=Model, **more)
        second = adafactor(other.parameters())
        checkpoint.load(folder / "one", other, second)
        for (name, param), expected in zip(other.named_parameters(), plain.parameters(), strict=True):
            if param.numel():
                found, wanted = second.state[param], plain_optimizer.state[expected]
                assert found.keys() == wanted.keys()
                for key, value in wanted.items():
                    assert found[key].shape == value.shape
                    torch.testing.assert_close(found[key], value, msg=f"{name} {key}")
    other = wrapped("FULL_SHARD", seed=2, cls=Model)
    with pytest.raises(CheckpointError, match=r"`\w+_var` of `[\w.]+` has shape \(\d, \d\).* lies whole on a rank"):
        checkpoint.load(folder / "one", other, adafactor(other.parameters()))


def full_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_whole_parameters_take_their_state_along(tmp_path):
    run_ranks(whole, 2, tmp_path)


class Few(torch.nn.Module):
    def __init__(self, *numels):
        super().__init__()
        self.params = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(numel)) for numel in numels])


def by_accident(folder):
    """A tensor that has the shape of a piece on one rank, or beside one parameter."""
    for path, numels, history in (("odd", (7,), 3), ("several", (8, 12), 2)):
        model = FSDP(Few(*numels), use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        params = [param for param in model.parameters() if param.numel()]
        for param in params:
            optimizer.state[param]["history"] = torch.arange(float(history))
        pieces = [param.numel() for param in params]
        if path == "odd":
            assert pieces == [4 - dist.get_rank()]
            with pytest.raises(CheckpointError, match=r"`history` of `params\.0` has the shape of the piece"):
                checkpoint.save(folder / path, model, optimizer)
            with pytest.raises(ValueError, match=r"`history` of parameter `params\.0`"):
                FSDP.full_optim_state_dict(model, optimizer)
            continue
        assert pieces == [[8, 2], [10]][dist.get_rank()]
        checkpoint.save(folder / path, model, optimizer)
        full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        for values in full["state"].values():
            assert torch.equal(values["history"], torch.arange(2.0))
        second = torch.optim.SGD(model.parameters(), lr=1.0)
        checkpoint.load(folder / path, model, second)
        third = torch.optim.SGD(model.parameters(), lr=1.0)
        third.load_state_dict(FSDP.shard_full_optim_state_dict(full, model, optim=third))
        for param in params:
            assert torch.equal(second.state[param]["history"], torch.arange(2.0))
            assert torch.equal(third.state[param]["history"], torch.arange(2.0))


def test_a_shape_that_is_the_pieces_by_accident(tmp_path):
    run_ranks(by_accident, 2, tmp_path)


def of_a_subclass():
    """Low-bit states are several tensors in the coat of one: refused by name, with nothing written."""
    model = wrapped("FULL_SHARD", True, cls=Model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 0, 1)
    for param in model.parameters():
        if param.numel():
            momentum = optimizer.state[param]["momentum_buffer"]
            optimizer.state[param]["momentum_buffer"] = TwoTensor(momentum, momentum.clone())
    with pytest.raises(CheckpointError, match=r"`momentum_buffer` of `[\w.]+` is a TwoTensor.* torch\.save\(\) each"):
        checkpoint.save("none", model, optimizer)


def test_states_of_a_tensor_subclass_are_refused():
    run_ranks(of_a_subclass, 2)
