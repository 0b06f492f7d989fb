"""Checkpoints of compiled models and of DDP have the names of the bare model. Oracle: torch's state-dict helpers.

Promises:
- `load_safetensors` has the names of the bare model, and lets modules load by their hooks and overrides, as
  `load_state_dict(load_file())` does: `test_checkpoint_modules.py::test_modules_load_safetensors_by_their_own_code`,
  `test_checkpoint_modules.py::test_names_that_a_load_hook_renames`
- compiled models and blocks, and DDP, around units and inside of them, are saved and loaded under the names of the
  bare model
"""

import pytest
import torch
from gloo import note
from safetensors.torch import save_file
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint, load_safetensors
from flatparam.checkpoint.exporting import open_source


class Net(nn.Module):
    """A buffer, a state of the module, a module that is called ``module``, and code of a state dict."""

    def __init__(self, hooked=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.module, self.norm, self.count = nn.Linear(3, 4), nn.BatchNorm1d(4), seed
        if hooked:
            self.register_state_dict_post_hook(_add_more)
            self.register_load_state_dict_pre_hook(_take_more)

    def forward(self, x):
        return self.norm(self.module(x))

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def _add_more(module, state, prefix, metadata):
    state[prefix + "more"] = torch.tensor([7.0])


def _take_more(module, state, prefix, *args):
    state.pop(prefix + "more", None)


def compiled(model):
    return torch.compile(model, backend="eager")


def with_compiled_block(model):
    model.module = compiled(model.module)
    return model


WRAPS = {
    "plain": lambda model: model,
    "compiled": compiled,
    "a compiled block": with_compiled_block,
    "DDP": DistributedDataParallel,
    "compiled DDP": lambda model: compiled(DistributedDataParallel(model)),
    "DDP of compiled": lambda model: DistributedDataParallel(compiled(model)),
    "units": lambda model: FSDP(model, use_orig_params=True),
    "flat units": FSDP,
    "compiled units": lambda model: compiled(FSDP(model, use_orig_params=True)),
    "units of compiled": lambda model: FSDP(compiled(model), use_orig_params=True),
    "a compiled block in units": lambda model: FSDP(with_compiled_block(model), use_orig_params=True),
    "units in a compiled block": lambda model: with_compiled_block(
        with_module(model, FSDP(model.module, use_orig_params=True))
    ),
}


def with_module(model, inner):
    model.module = inner
    return model


def values_of(model):
    return {
        name: value.detach().clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)
    }


def save_to(path, model):
    checkpoint.save(path, model)
    return path


def names(folder, hooked):
    """Each way to wrap saves, and each loads what the plain model has saved, and the other way."""
    plain = Net(hooked, seed=1)
    plain_optimizer = torch.optim.Adam(plain.parameters())
    plain(torch.ones(2, 3)).sum().backward()
    plain_optimizer.step()
    checkpoint.save(f"{folder}/plain", plain, plain_optimizer)
    expected = values_of(plain)
    if torch.distributed.get_rank() == 0:
        save_file(expected, f"{folder}/plain.safetensors")
    torch.distributed.barrier()
    for number, (how, wrap) in enumerate(WRAPS.items()):
        model = wrap(Net(hooked, seed=2))
        optimizer = torch.optim.Adam(model.parameters())
        checkpoint.load(f"{folder}/plain", model, optimizer)
        checkpoint.save(f"{folder}/{number}", model, optimizer)
        note(how)
        third = wrap(Net(hooked, seed=4))
        found = load_safetensors(third, f"{folder}/plain.safetensors")
        assert not any(found), (how, found)
        loaded = open_source(save_to(f"{folder}/third {number}", third))
        tensors = {name: loaded.whole(name, chunks) for name, chunks in loaded.model.items()}
        loaded.close()
        assert tensors.keys() >= expected.keys() - {"more"}
        assert all(torch.equal(tensors[name], value) for name, value in expected.items()), how
        source = open_source(f"{folder}/{number}")
        source.close()
        saved = set(source.model)
        assert saved >= {"module.weight", "module.bias", "norm.running_mean"}, (how, saved)
        assert not [name for name in saved if "_orig_mod" in name or name.startswith("module.module")], (how, saved)
        if "units" not in how and not hooked:
            theirs = get_model_state_dict(model)
            assert saved == {name for name, value in theirs.items() if isinstance(value, torch.Tensor)}, how
        back = Net(hooked, seed=3)
        back_optimizer = torch.optim.Adam(back.parameters())
        checkpoint.load(f"{folder}/{number}", back, back_optimizer)
        assert back.count == 1, how
        found = values_of(back)
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (how, name)
        for one, other in zip(back_optimizer.state.values(), plain_optimizer.state.values(), strict=True):
            assert all(torch.equal(one[key], other[key]) for key in other), how


@pytest.mark.multiprocess
@pytest.mark.parametrize("hooked", [False, True])
def test_names_are_those_of_the_bare_model(tmp_path, hooked):
    simulate_ranks(names, 2, str(tmp_path), hooked)
