"""Checkpoints of trainable parameters alone: an adapter's bytes, its optimizer, and the base that it needs.

Promises:
- `trainable_only=True` saves an adapter's bytes and its optimizer; another base is refused by name
"""

import pytest
import torch
import torch.distributed as dist
from checkpoints import groups
from gloo import note, run_ranks
from safetensors.torch import load_file
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy as S
from flatparam import checkpoint
from flatparam.checkpoint import CheckpointError
from flatparam.checkpoint.cli import show


class Lora(nn.Module):
    """A frozen layer and what is trained beside it."""

    def __init__(self, size):
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.base.weight = nn.Parameter(self.base.weight.detach().t(), requires_grad=False)  # columns first
        self.a, self.b = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.base(x) + self.b(self.a(x))


def net(base=0, adapter=0, size=40):
    torch.manual_seed(base)
    made = nn.Sequential(Lora(size), nn.Tanh(), Lora(size))
    torch.manual_seed(100 + adapter)
    for name, param in made.named_parameters():
        if param.requires_grad:
            nn.init.normal_(param)
        elif name == "2.base.bias":
            param.data.zero_()
    return made


def wrapped(strategy="FULL_SHARD", use_orig_params=True, **seeds):
    module = net(**seeds)
    arguments = {
        "process_group": groups(strategy),
        "sharding_strategy": S[strategy],
        "use_orig_params": use_orig_params,
        "segments": True,
    }
    module[2] = FSDP(module[2], **arguments)
    return FSDP(module, **arguments)


def adam(model):
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(model, optimizer, steps):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((2, 40), 0.1 * step)).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad()
    return losses


def on_ranks(folder):
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        note(strategy)
        model = wrapped(strategy)
        optimizer = adam(model)
        train(model, optimizer, 2)
        path = folder / strategy
        if strategy == "FULL_SHARD":
            checkpoint.async_save(path, model, optimizer, trainable_only=True).wait()
        else:
            checkpoint.save(path, model, optimizer, trainable_only=True)
        state = state_of(model)
        files = sum(file.stat().st_size for file in path.glob("*/*.safetensors"))
        assert files < 4 * (3 * 4 * 2 * 40) + 20000  # the adapters, and two moments of each
        wanted = train(model, optimizer, 2)
        for other_strategy, use_orig_params in (("FULL_SHARD", True), ("FULL_SHARD", False), ("NO_SHARD", True)):
            note(f"{strategy} {other_strategy} {use_orig_params}")
            again = wrapped(other_strategy, use_orig_params, adapter=1)
            other = adam(again)
            found = checkpoint.load(path, again, other)
            assert sorted(found.base) == ["0.base.bias", "0.base.weight", "2.base.bias", "2.base.weight"]
            assert not found.missing
            after = again.state_dict()
            assert state.keys() == after.keys()
            assert all(torch.equal(state[name], after[name]) for name in state)
            assert train(again, other, 2) == wanted
    wrong = wrapped(base=9, adapter=2)
    before = state_of(wrong)
    with pytest.raises(
        CheckpointError, match=r"needs the base of 4 .* `0\.base\.weight` has other values here, as 3 of 4"
    ):
        checkpoint.load(folder / "FULL_SHARD", wrong)
    after = wrong.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    found = checkpoint.load(folder / "FULL_SHARD", wrong, strict=False)
    after, first = state_of(wrong), wrapped()
    checkpoint.load(folder / "FULL_SHARD", first)
    state = state_of(first)
    assert all(torch.equal(after[name], (before if name in found.base else state)[name]) for name in after)
    with pytest.raises(CheckpointError, match=r"rank 1 saves with trainable_only=True, rank 0 with False"):
        checkpoint.save(folder / "bad", model, trainable_only=dist.get_rank() == 1)


@pytest.mark.multiprocess
def test_on_ranks(tmp_path):
    run_ranks(on_ranks, 2, tmp_path)


def test_another_base_is_refused_by_name(tmp_path):
    model = net()
    checkpoint.save(tmp_path / "one", model, trainable_only=True)
    shown = show(tmp_path / "one", trusted=False)
    assert "trained parameters alone: needs a base of 4 parameters" in shown
    assert ["{0,2}.base.weight", "2", "F32", "[40,", "40]"] in [line.split() for line in shown.splitlines()]
    checkpoint.export(tmp_path / "one", tmp_path / "one.safetensors")
    assert sorted(load_file(tmp_path / "one.safetensors")) == sorted(
        name for name in model.state_dict() if "base" not in name
    )

    def refused(change, pattern):
        other = net(adapter=1)
        change(other)
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(CheckpointError, match=pattern):
            checkpoint.load(tmp_path / "one", other)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
        return other

    def one_value(other):
        other[2].base.bias.data[7] = 1e-30

    other = refused(one_value, r"needs the base of 4 .*: `2\.base\.bias` has other values here, as 1 of 4")
    checkpoint.load(tmp_path / "one", other, strict=False)
    assert torch.equal(other[2].a.weight, model[2].a.weight)
    assert other[2].base.bias[7] == 1e-30
    refused(lambda other: other[0].base.bfloat16(), r"`0\.base\.weight` is F32 of shape \[40, 40\] there, and BF16")
    refused(lambda other: setattr(other[0].base, "bias", None), r"with `0\.base\.bias`, which the model has not")

    def turned(other):
        other[0].base.weight = nn.Parameter(other[0].base.weight.detach().t(), requires_grad=False)

    refused(turned, r"`0\.base\.weight` has other values")

    def more(other):
        other.append(nn.Linear(1, 1))

    refused(more, r"missing in the checkpoint: `3\.weight`, `3\.bias`")
    model[0].base.bias = nn.Parameter(torch.ones(41), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"`0\.base\.bias` is F32 of shape \[40\] there, and F32 \[41\]"):
        checkpoint.load(tmp_path / "one", model, strict=False)


def test_what_was_trained_before_it_was_frozen_is_saved(tmp_path):
    model = net()
    optimizer = adam(model)
    train(model, optimizer, 2)
    model[2].requires_grad_(False)
    checkpoint.save(tmp_path / "one", model, optimizer, trainable_only=True)
    other = net(adapter=1)
    checkpoint.load(tmp_path / "one", other, adam(other))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="the model has none"):
        checkpoint.save(tmp_path / "two", model.requires_grad_(False), trainable_only=True)
    assert not (tmp_path / "two").exists()


class Own(nn.Module):
    """Whose code names its frozen weight otherwise in a state dict."""

    def __init__(self):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
        self.register_state_dict_post_hook(self.give)
        self.register_load_state_dict_pre_hook(self.take)

    @staticmethod
    def give(self, destination, prefix, metadata):
        destination[prefix + "kernel"] = destination.pop(prefix + "weight")

    @staticmethod
    def take(self, state_dict, prefix, *args):
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")


def test_with_modules_that_have_code_of_their_own(tmp_path):
    one, other = nn.Sequential(Own()), nn.Sequential(Own())
    nn.init.normal_(one[0].gain)
    checkpoint.save(tmp_path / "one", one, trainable_only=True)
    assert checkpoint.load(tmp_path / "one", other).base == ["0.kernel"]
    assert torch.equal(one[0].gain, other[0].gain)
    other[0].weight.data += 1
    with pytest.raises(CheckpointError, match=r"`0\.kernel` has other values"):
        checkpoint.load(tmp_path / "one", other)


class Packed(nn.Parameter):
    """In the manner of 4-bit weights."""


def test_frozen_parameters_of_a_subclass_are_not_read(tmp_path):
    def made():
        module = net()
        module[0].base.weight = torch.Tensor._make_subclass(Packed, torch.zeros(40, 20, dtype=torch.uint8))
        return module

    one, other = made(), made()
    train_of = [param for param in one.parameters() if param.requires_grad]
    nn.init.normal_(train_of[0])
    with pytest.raises(CheckpointError, match=r"`0\.base\.weight` is a Packed"):
        checkpoint.save(tmp_path / "one", one)
    checkpoint.save(tmp_path / "one", one, trainable_only=True)
    checkpoint.load(tmp_path / "one", other)
    assert torch.equal(next(p for p in other.parameters() if p.requires_grad), train_of[0])
