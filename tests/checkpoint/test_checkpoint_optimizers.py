"""Several optimizers in one checkpoint, each with other parameters."""

import warnings

import pytest
import torch
import torch.distributed as dist
from checkpoints import differing, full_state, wrapped
from fsdp_models import Model, data, loss_of
from gloo import fake_world, note
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, checkpoint
from flatparam.checkpoint import CheckpointError

pytestmark = pytest.mark.multiprocess


def two_of(model, lr=0.02):
    """One for matrices, of two groups, and another for the rest."""
    matrices = [p for n, p in model.named_parameters() if n.endswith("weight")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    return {
        "muon": torch.optim.SGD([{"params": matrices[:2], "lr": lr}, {"params": matrices[2:]}], lr=0.01, momentum=0.9),
        "adamw": torch.optim.AdamW(rest, lr=lr / 2),
    }


def run(model, optimizers, first, steps):
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, data(step))
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def form(optimizers, kind):
    return optimizers if kind == "dict" else list(optimizers.values())


def resumed(folder, kind):
    for strategy, asynchronous in (("FULL_SHARD", False), ("ZERO_1", True), ("NO_SHARD", False)):
        note(f"{kind} {strategy}")
        model = wrapped(strategy, cls=Model)
        one = two_of(model)
        run(model, one, 0, 2)
        if asynchronous:
            checkpoint.async_save(folder / strategy, model, form(one, kind)).wait()
        else:
            checkpoint.save(folder / strategy, model, form(one, kind))
        wanted = run(model, one, 2, 2)
        for other_strategy in ("FULL_SHARD", "NO_SHARD"):
            other = wrapped(other_strategy, cls=Model, seed=1)
            two = two_of(other, lr=5.0)
            checkpoint.load(folder / strategy, other, form(two, kind))
            assert [g["lr"] for o in two.values() for g in o.param_groups] == [0.02, 0.01, 0.01]
            assert run(other, two, 2, 2) == wanted
            if other_strategy == strategy:
                assert not differing(full_state(other), full_state(model))


def refused(folder):
    model = wrapped("FULL_SHARD", cls=Model)
    both = two_of(model)
    run(model, both, 0, 1)
    some = list(model.parameters())[:1]
    for given, said in (
        (
            {"a": both["muon"], "b": torch.optim.SGD(some, lr=1.0), "c": both["adamw"]},
            r"`first\.weight` is in two optimizers, `a` and `b`",
        ),
        ([both["muon"], both["muon"]], r"`first\.weight` is in two optimizers, `0` and `1`"),
        ({"a": both["muon"], "b": None}, "expected optimizer `b` to be an optimizer, got a NoneType"),
        ([], "no optimizer"),
        (both if dist.get_rank() else both["muon"], r"saves the optimizers .* rank 0 "),
    ):
        with pytest.raises(CheckpointError, match=said):
            checkpoint.save(folder / "bad", model, given)
    checkpoint.save(folder / "one", model, both)
    before = full_state(model)
    other = two_of(model)
    for given, said in (
        (other["adamw"], r"has an optimizer `muon`, of `first\.weight` and more, and none of the given .* pass all"),
        (
            {"muon": other["adamw"], "adamw": other["muon"]},
            r"`first\.bias` was saved in the optimizer `adamw`, and is in `muon` here",
        ),
        (torch.optim.SGD(model.parameters(), lr=1.0), "several saved groups"),
    ):
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(folder / "one", model, given)
    assert not differing(full_state(model), before)
    assert not other["adamw"].state
    checkpoint.load(folder / "one", model, other["adamw"], strict=False)
    assert other["adamw"].param_groups[0]["lr"] == 0.01
    # from one to several
    adam = torch.optim.AdamW(model.parameters(), lr=0.25)
    checkpoint.save(folder / "adam", model, adam)
    halves = [list(model.parameters())[:3], list(model.parameters())[3:]]
    several = [torch.optim.AdamW(half, lr=1.0) for half in halves]
    checkpoint.load(folder / "adam", model, several)
    assert [one.param_groups[0]["lr"] for one in several] == [0.25, 0.25]


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_resumed(tmp_path, kind):
    simulate_ranks(resumed, 2, tmp_path, kind)


def test_refused(tmp_path):
    simulate_ranks(refused, 2, tmp_path)


def of_padding(folder):
    """Ranks whose shards are padding have no state after a load; the states of the others are told all the same."""

    def made():
        torch.manual_seed(0)
        model = FSDP(nn.Linear(1, 3, bias=False))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model, optimizer):
        model(torch.ones(2, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def check(how):
        note(how)
        states = [FSDP.full_optim_state_dict(*one, rank0_only=False)["state"] for one in ((model, optimizer), other)]
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
        assert states[0]["weight"]["exp_avg"].shape == (3, 1)
        states = [FSDP.optim_state_dict(*one)["state"] for one in ((model, optimizer), other)]
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
        FSDP.sharded_optim_state_dict(*other)

    model, optimizer = made()
    train(model, optimizer)
    checkpoint.save(folder / "one", model, optimizer)
    other = made()
    checkpoint.load(folder / "one", *other)
    check("loaded")
    checkpoint.save(folder / "two", *other)
    train(model, optimizer)
    train(*other)
    check("trained on")
    other = made()
    checkpoint.load(folder / "two", *other)
    train(*other)
    check("saved right after a load")


def test_padding_has_no_state(tmp_path):
    simulate_ranks(of_padding, 4, tmp_path)


def test_states_that_one_flat_parameter_cannot_have_are_refused_by_name(tmp_path):
    """Saved of parameters; a flat parameter has one state for all in it."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    adam = torch.optim.Adam([{"params": [module.weight]}, {"params": [module.bias]}])
    for turn, name in enumerate(("steps", "states"), 1):
        adam.state.clear()
        for param, times in ((module.weight, 2), (module.bias, 2 - turn)):
            for _ in range(times):
                param.grad = torch.ones_like(param)
                adam.step()
                adam.zero_grad()
        checkpoint.save(tmp_path / name, module, adam)
    with fake_world(1):
        for name, said in (("steps", "`step`.*`weight`.*`bias`"), ("states", "`weight`.*`bias`")):
            model = FSDP(nn.Linear(3, 2), use_orig_params=False, device_id=torch.device("cpu"))
            optimizer = torch.optim.Adam(model.parameters())
            with pytest.raises(CheckpointError, match=said):
                checkpoint.load(tmp_path / name, model, optimizer)
            assert not optimizer.state


class Chain(nn.Sequential):
    """Linear layers with the given names."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(len(names))
        for name in names:
            self.add_module(name, nn.Linear(4, 4))


def chain(names, lr, steps, **arguments):
    """A model, and its optimizer after ``steps`` steps: two groups, a layer of its own in the second one."""
    model = FSDP(Chain(names), use_orig_params=True, **arguments)
    layers = [list(model.module.get_submodule(name).parameters()) for name in names]
    optimizer = torch.optim.AdamW(
        [{"params": [one for layer in layers[:-1] for one in layer]}, {"params": layers[-1], "lr": 10 * lr}], lr=lr
    )
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def of_other_layers(folder):
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        arguments = {"sharding_strategy": ShardingStrategy[strategy]}
        model, optimizer = chain("abc", 0.01, 2, **arguments)
        checkpoint.save(folder / strategy, model, optimizer)
        saved = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        for names, groups in (("abd", [0.01, 50.0]), ("abcd", [0.01, 50.0]), ("ab", [0.01, 0.01])):
            if names == "abcd":  # its second group is of d alone, and c was in the saved second group
                other, mine = chain(names, 5.0, 0, **arguments)
                third = mine.param_groups[0]["params"]
                mine = torch.optim.AdamW([{"params": third[:4]}, {"params": mine.param_groups[1]["params"]}], lr=50.0)
            else:
                other, mine = chain(names, 5.0, 0, **arguments)
            with pytest.raises(CheckpointError, match="pass strict=False to load the names that both have"):
                checkpoint.load(folder / strategy, other, mine)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of parameters without state: another test's
                found = checkpoint.load(folder / strategy, other, mine, strict=False)
            assert sorted(found.missing) == (["d.bias", "d.weight"] if "d" in names else [])
            assert [group["lr"] for group in mine.param_groups] == groups
            here = FSDP.full_optim_state_dict(other, mine, rank0_only=False)["state"]
            both = {name for name in saved if name[0] in names and not (names == "abcd" and name[0] == "c")}
            assert here.keys() == both
            for name in both:
                torch.testing.assert_close(here[name], saved[name], rtol=0, atol=0)
        other, mine = chain("abcd", 5.0, 0, **arguments)
        with pytest.raises(CheckpointError, match="several saved groups"):
            checkpoint.load(folder / strategy, other, mine, strict=False)


def test_what_both_optimizers_have_is_loaded_if_not_strict(tmp_path):
    simulate_ranks(of_other_layers, 2, tmp_path)
