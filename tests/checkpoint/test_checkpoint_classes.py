"""A saved state of another class of optimizer is refused: the error names both classes, and nothing is changed.

Promises:
- a state of another class of optimizer is refused: the error names both classes and nothing changes; `convert=` takes
  the states that it lists
"""

import copy
import json
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import StateDictType

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint
from flatparam.checkpoint import CheckpointError
from flatparam.fsdp.states.optimizer_classes import KEPT, class_of, why_not

MAKERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "Adam": lambda params: torch.optim.Adam(params, lr=2e-3, weight_decay=0.5),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    "plain SGD": lambda params: torch.optim.SGD(params, lr=0.5),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.5),
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(8.0).view(2, 4)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(folder, maker, name="one"):
    model = net()
    optimizer = maker(model.parameters())
    step(model, optimizer)
    checkpoint.save(folder / name, model, optimizer)
    return model, optimizer


def forget_classes(folder):
    """Make a checkpoint one of before classes were saved."""
    path = folder / "checkpoint.json"
    first, text = path.read_bytes().splitlines()
    body = json.loads(text)
    del body["optimizer"]["classes"]
    text = json.dumps(body, separators=(",", ":")).encode()
    path.write_bytes(json.dumps({**json.loads(first), "crc32": zlib.crc32(text)}).encode() + b"\n" + text + b"\n")


def seen(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def refused(folder, model, optimizer, pattern):
    before = seen(model, optimizer)
    with pytest.raises(CheckpointError, match=pattern):
        checkpoint.load(folder, model, optimizer)
    assert str(seen(model, optimizer)) == str(before)


@pytest.mark.parametrize("theirs", MAKERS)
@pytest.mark.parametrize("ours", MAKERS)
def test_classes(tmp_path, theirs, ours):
    first, optimizer = saved(tmp_path, MAKERS[theirs])
    model = net(1)
    other = MAKERS[ours](model.parameters())
    kinds = [one.split()[-1] for one in (ours, theirs)]
    if kinds[0] != kinds[1]:
        refused(
            tmp_path / "one", model, other, rf"is torch\.optim\.{kinds[0]}, .* torch\.optim\.{kinds[1]}\. .*convert="
        )
        return
    checkpoint.load(tmp_path / "one", model, other)
    step(first, optimizer)
    step(model, other)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("theirs", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.parametrize("ours", ["AdamW", "SGD", "Adagrad"])
def test_checkpoints_without_classes(tmp_path, theirs, ours):
    _, optimizer = saved(tmp_path, MAKERS[theirs])
    forget_classes(tmp_path / "one")
    model = net(1)
    other = MAKERS[ours](model.parameters())
    if ours == theirs:
        checkpoint.load(tmp_path / "one", model, other)
        assert str(other.state_dict()) == str(optimizer.state_dict())
    else:
        refused(tmp_path / "one", model, other, rf"another class: .*torch\.optim\.{ours}")


class Logging(torch.optim.AdamW):
    """Someone's, which changes nothing of what is kept."""


class Own(torch.optim.Optimizer):
    """Of no class of torch's."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("last", torch.zeros_like(param)).copy_(param.grad)
                    param -= group["lr"] * param.grad


class Around(torch.optim.Optimizer):
    """In the manner of accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)


@pytest.mark.parametrize(
    "maker",
    [
        lambda params: Logging(params, lr=1.0),
        lambda params: torch.optim.AdamW(params, lr=1.0, foreach=True),
        lambda params: torch.optim.AdamW(params, lr=1.0, fused=True),
        lambda params: torch.optim.AdamW(params, lr=1.0, amsgrad=True),
        lambda params: Around(torch.optim.AdamW(params, lr=1.0)),
    ],
)
def test_variants_of_one_class(tmp_path, maker):
    saved(tmp_path, MAKERS["AdamW"])
    model = net(1)
    other = maker(model.parameters())
    checkpoint.load(tmp_path / "one", model, other)
    assert other.param_groups[0]["lr"] == 1e-3
    assert all("exp_avg_sq" in state for state in other.state.values())
    checkpoint.save(tmp_path / "two", model, other)
    checkpoint.load(tmp_path / "two", model, MAKERS["AdamW"](model.parameters()))


def test_classes_that_are_not_torchs(tmp_path):
    saved(tmp_path, Own)
    model = net(1)
    other = Own(model.parameters(), lr=3.0)
    checkpoint.load(tmp_path / "one", model, other)
    assert other.param_groups[0]["lr"] == 0.1
    refused(tmp_path / "one", model, MAKERS["AdamW"](model.parameters()), r"saved of test_checkpoint_classes\.Own")


class Momentum(torch.optim.AdamW):
    """A class of torch by inheritance, which steps, and keeps, otherwise."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    buffer = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param)).add_(param.grad)
                    param.sub_(buffer, alpha=group["lr"])


def test_a_subclass_that_steps_by_itself_keeps_its_own_state(tmp_path):
    _, before = saved(tmp_path, Momentum)
    forget_classes(tmp_path / "one")
    model = net(1)
    optimizer = Momentum(model.parameters())
    checkpoint.load(tmp_path / "one", model, optimizer)
    assert str(optimizer.state_dict()) == str(before.state_dict())


def test_a_setting_of_a_later_release_is_no_other_class():
    """What schedulers put into groups, and the parameters, are of every class."""
    later = Own(net().parameters(), lr=0.1)
    later.defaults["decay"] = 0.0
    group = {"lr": 0.1, "initial_lr": 0.1, "max_lr": 0.2, "params": ["0.weight"]}
    assert why_not(later, [group], {}) is None
    assert "`momentum`" in why_not(later, [{**group, "momentum": 0.9}], {})


def test_converting(tmp_path):
    first, optimizer = saved(tmp_path, MAKERS["AdamW"])
    for convert, keys in (({}, []), ({"exp_avg": "momentum_buffer"}, ["momentum_buffer"])):
        model = net(1)
        other = MAKERS["SGD"](model.parameters())
        settings = dict(other.param_groups[0])
        checkpoint.load(tmp_path / "one", model, other, convert=convert)
        assert other.param_groups[0] == settings
        assert all(torch.equal(p, q) for p, q in zip(first.parameters(), model.parameters(), strict=True))
        assert [list(state) for state in other.state.values()] == [keys] * (4 if keys else 0)
        for param, one in zip(model.parameters(), first.parameters(), strict=True):
            if keys:
                assert torch.equal(other.state[param]["momentum_buffer"], optimizer.state[one]["exp_avg"])
        step(model, other)
    model = net(1)
    other = MAKERS["SGD"](model.parameters())
    for convert, said in (
        ({"exp_avg": "exp_avg"}, r"the state of `0\.weight` has \['exp_avg'\], and no `momentum_buffer`"),
        ({"exp_avg": "momentum_buffer", "exp_avg_sq": "momentum_buffer"}, "two states of `0.weight` one name"),
        ({"exp_avg": 3}, "expected convert= to have str"),
    ):
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(tmp_path / "one", model, other, convert=convert)
    assert not other.state
    # of the same class it changes nothing
    same = MAKERS["AdamW"](model.parameters())
    checkpoint.load(tmp_path / "one", model, same, convert={})
    assert str(same.state_dict()) == str(optimizer.state_dict())


@pytest.mark.parametrize("name", KEPT)
def test_what_each_class_of_torch_keeps(name):
    param = nn.Parameter(torch.ones(2, 2))
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)([param], lr=0.1, **momentum)
    param.grad = torch.ones(2, 2)
    optimizer.step()
    assert KEPT[name] in optimizer.state[param]
    assert class_of(optimizer) == f"torch.optim.{name}"


def on_ranks(folder):
    def made(maker, seed=0):
        model = FSDP(net(seed), use_orig_params=True)
        return model, maker(model.parameters())

    model, optimizer = made(MAKERS["AdamW"])
    step(model, optimizer)
    checkpoint.save(folder / "one", model, optimizer)
    again, other = made(MAKERS["SGD"], 1)
    before = again.state_dict()
    with pytest.raises(CheckpointError, match=r"is torch\.optim\.SGD, .* saved of torch\.optim\.AdamW"):
        checkpoint.load(folder / "one", again, other)
    checkpoint.load(folder / "one", again, other, convert={"exp_avg": "momentum_buffer"})
    after = again.state_dict()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    states = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    mine = FSDP.full_optim_state_dict(again, other, rank0_only=False)["state"]
    assert all(torch.equal(mine[name]["momentum_buffer"], states[name]["exp_avg"]) for name in states)
    # the functions of states refuse it, too
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            given = FSDP.optim_state_dict(model, optimizer)
        again, other = made(MAKERS["SGD"], 1)
        with (
            FSDP.state_dict_type(again, kind),
            pytest.raises(ValueError, match=r"another class of optimizer than torch\.optim\.SGD: "),
        ):
            FSDP.optim_state_dict_to_load(again, other, given)


@pytest.mark.multiprocess
def test_on_ranks(tmp_path):
    simulate_ranks(on_ranks, 2, tmp_path)


def test_states_of_torchs_files(tmp_path):
    model = net()
    optimizer = MAKERS["AdamW"](model.parameters())
    step(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": model.state_dict(), "optim": states}, checkpoint_id=str(tmp_path / "one"), no_dist=True)
    again = net(1)
    other = MAKERS["SGD"](again.parameters())
    with pytest.raises(CheckpointError, match=r"is torch\.optim\.SGD, .* another class: "):
        checkpoint.load(tmp_path / "one", again, other, trusted=True)
    same = MAKERS["AdamW"](again.parameters())
    checkpoint.load(tmp_path / "one", again, same, trusted=True)
    assert torch.equal(same.state[again[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
