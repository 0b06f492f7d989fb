"""Checkpoints of modules that are not sharded, in one process: state of modules, of optimizers, summaries."""

import tracemalloc

import pytest
import torch
from torch import nn

import flatparam
from flatparam.checkpoint.files import Part, write_file


class Counting(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.count = 3
        self.weight = nn.Parameter(torch.ones(2))

    def get_extra_state(self):
        return {"count": self.count, "tensor": torch.ones(3)}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_in_the_background_what_is_changed_afterwards_is_not_saved(tmp_path):
    module = nn.Linear(300, 300)
    weight = module.weight.detach().clone()
    pending = flatparam.checkpoint.async_save(tmp_path / "one", module)
    module.weight.data.zero_()
    assert pending.wait().bytes > weight.numel() * 4
    flatparam.checkpoint.load(tmp_path / "one", module, progress=True)
    assert torch.equal(module.weight, weight)


def test_summaries_and_bars(tmp_path, capfd):
    module = nn.Linear(300, 300)
    summary = flatparam.checkpoint.save(tmp_path / "one", module, extra={"x": 1}, progress=True)
    assert "GB/s" in str(summary)
    assert "save one" in capfd.readouterr().err
    assert flatparam.checkpoint.read_extra(tmp_path / "one") == {"x": 1}
    found = flatparam.checkpoint.load(tmp_path / "one", module)
    assert (found.extra, found.world_size, found.summary.id) == ({"x": 1}, 1, summary.id)
    assert flatparam.checkpoint.verify(tmp_path / "one", check_finite=True).bytes == 300 * 301 * 4


def test_an_index_takes_no_more_memory_than_it_is_long(tmp_path):
    module = nn.Linear(3, 3)
    flatparam.checkpoint.save(tmp_path / "one", module)
    tracemalloc.start()
    try:
        flatparam.checkpoint.save(tmp_path / "two", module)
        flatparam.checkpoint.load(tmp_path / "one", module)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_what_modules_keep_beside_tensors(tmp_path):
    model = nn.Sequential(Counting())
    model[0].count = 9
    flatparam.checkpoint.save(tmp_path / "one", model)
    again = nn.Sequential(Counting())
    flatparam.checkpoint.load(tmp_path / "one", again)
    assert again[0].count == 9


def test_state_of_optimizers_of_any_kind(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    mine = {"note": ("a", 1, None), "row": torch.arange(5.0), "scale": torch.tensor(2.5), "none": None}
    optimizer.state[model.weight].update(mine)
    flatparam.checkpoint.save(tmp_path / "one", model, optimizer)
    again = nn.Linear(2, 3)
    second = torch.optim.SGD(again.parameters(), lr=2.0)
    flatparam.checkpoint.load(tmp_path / "one", again, second)
    found, wanted = second.state[again.weight], optimizer.state[model.weight]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in ("momentum_buffer", "row", "scale"))
    assert (found["note"], found["none"]) == (("a", 1, None), None)
    assert (second.param_groups[0]["lr"], second.param_groups[0]["momentum"]) == (1.0, 0.9)


@pytest.mark.parametrize("place", ["extra", "group", "state"])
def test_a_value_whose_dtype_no_file_has_is_named(tmp_path, place):
    module, wide = nn.Linear(2, 2), torch.ones(1, dtype=torch.complex128)
    optimizer = torch.optim.SGD(module.parameters())
    if place == "group":
        optimizer.param_groups[0]["wide"] = wide
    if place == "state":
        optimizer.state[module.weight]["wide"] = [wide]
    name = {"extra": "extra.wide", "group": "param_groups[0].wide", "state": "state.weight.wide[0]"}[place]
    with pytest.raises(flatparam.checkpoint.CheckpointError) as told:
        flatparam.checkpoint.save(tmp_path / "one", module, optimizer, {"wide": wide} if place == "extra" else None)
    assert f"`{name}` is of torch.complex128" in str(told.value)
    assert not list(tmp_path.iterdir())


def test_a_freed_tensor_in_the_state_of_a_module_is_refused_before_anything_is_written(tmp_path):
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)

    class Freed(Counting):
        def get_extra_state(self):
            return freed

    with pytest.raises(flatparam.checkpoint.CheckpointError, match="the storage of `_extra_state` was freed"):
        flatparam.checkpoint.save(tmp_path / "one", Freed())
    assert not list(tmp_path.iterdir())


class Noise(nn.Module):
    """A tensor in its extra state, and a list of tensors that it writes into its state dict."""

    def __init__(self, value):
        super().__init__()
        self.state, self.rng = torch.full((3,), value), [torch.full((4,), value + 1)]

    def get_extra_state(self):
        return {"step": self.state}

    def set_extra_state(self, state):
        self.state = state["step"]

    def _save_to_state_dict(self, state, prefix, keep_vars):
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[prefix + "rng"] = self.rng

    def _load_from_state_dict(self, state, prefix, *args):
        self.rng = state.pop(prefix + "rng")
        super()._load_from_state_dict(state, prefix, *args)


@pytest.mark.parametrize("name", ["extra", "kept", "own", "own_states", "state", "piece", "param_groups[0]"])
def test_modules_with_the_names_of_what_a_rank_writes(name, tmp_path):
    """Their states and the ``extra`` and optimizer states of the same names come back, each to its own."""

    def build(value):
        model = nn.Module()
        model.add_module(name, Noise(value))
        model.weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([model.weight], lr=torch.tensor(value))
        optimizer.state[model.weight]["_extra_state"] = {"step": [torch.full((2,), value)]}
        return model, optimizer

    saved, optimizer = build(1.0)
    extra = {"_extra_state": {"step": torch.zeros(3)}, "rng": [torch.zeros(4)], name: torch.zeros(1)}
    flatparam.checkpoint.save(tmp_path / "one", saved, optimizer, extra=extra)
    flatparam.checkpoint.verify(tmp_path / "one")
    model, optimizer = build(5.0)
    found = flatparam.checkpoint.load(tmp_path / "one", model, optimizer).extra
    assert torch.equal(found["_extra_state"]["step"], torch.zeros(3))
    assert torch.equal(found["rng"][0], torch.zeros(4))
    assert torch.equal(found[name], torch.zeros(1))
    noise = getattr(model, name)
    assert torch.equal(noise.state, torch.ones(3))
    assert torch.equal(noise.rng[0], torch.full((4,), 2.0))
    assert torch.equal(optimizer.state[model.weight]["_extra_state"]["step"][0], torch.ones(2))
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_two_tensors_of_one_name_are_refused_before_a_file_is_written(tmp_path):
    parts = [Part.whole("twice", torch.zeros(1)), Part.whole("twice", torch.ones(1))]
    with pytest.raises(flatparam.checkpoint.CheckpointError, match="two tensors named `twice` for ranks/one"):
        write_file(tmp_path, "ranks/one.safetensors", parts, lambda count: None)
    assert not list(tmp_path.iterdir())
