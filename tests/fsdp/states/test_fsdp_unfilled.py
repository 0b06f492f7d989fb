"""Parameters that no file has brought since they were left without values stay so, and none of them is trained."""

import pytest
import torch
from fsdp_models import assert_same, data, loss_of, make, wrap_blocks
from gloo import note
from simulated_ranks import simulate_ranks
from torch.distributed.fsdp import StateDictType
from torch.nn.utils import parameters_to_vector

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint, defer_init, load_safetensors

pytestmark = pytest.mark.multiprocess
ABSENT = ("blocks.1.scale", "last.weight")


def deferred(uo):
    with torch.device("meta"):
        module = make()
    return wrap_blocks(module, param_init_fn=defer_init, use_orig_params=uo)


def part(state):
    return {name: value for name, value in state.items() if name.replace("_fsdp_wrapped_module.", "") not in ABSENT}


def from_checkpoint(model, whole, path):
    module = make(seed=7)
    for name in ABSENT:
        place, _, name = name.rpartition(".")
        del module.get_submodule(place)._parameters[name]
    if not path.exists():
        checkpoint.save(path, module)
    checkpoint.load(path, model, strict=False)


def from_file(model, whole, path):
    if torch.distributed.get_rank() == 0:
        from safetensors.torch import save_file

        save_file(part(whole.state_dict()), f"{path}.safetensors")
    torch.distributed.barrier()
    load_safetensors(model, f"{path}.safetensors", strict=False)


def from_full(model, whole, path):
    model.load_state_dict(part(whole.state_dict()), strict=False)


def from_sharded(model, whole, path):
    other = wrap_blocks(whole, use_orig_params=model._use_orig_params)
    for one in (model, other):
        FSDP.set_state_dict_type(one, StateDictType.SHARDED_STATE_DICT)
    model.load_state_dict(part(other.state_dict()), strict=False)
    for one in (model, other):
        FSDP.set_state_dict_type(one, StateDictType.FULL_STATE_DICT)


def some_are_missing(folder, uo):
    for load in (from_checkpoint, from_file, from_full, from_sharded):
        note(f"{uo} {load.__name__}")
        model = deferred(uo)
        with pytest.raises(ValueError, match="has no values yet"):
            loss_of(model, data(0))
        load(model, make(seed=7), folder / load.__name__)
        with FSDP.summon_full_params(model, writeback=False):
            unfilled = [name for name, value in model.named_parameters() if value.isnan().any()]
        assert [name.replace("_fsdp_wrapped_module.", "") for name in unfilled] == list(ABSENT)
        with pytest.raises(ValueError, match=r"parameter `\w+\.?\w*` of .* has no values yet"):
            loss_of(model, data(0))
        with pytest.raises(checkpoint.CheckpointError, match=r"`(blocks\.1\.scale|last\.weight)` has no values yet"):
            checkpoint.save(folder / "no", model)
        model.load_state_dict(make(seed=7).state_dict())
        assert torch.equal(loss_of(model, data(0)), loss_of(make(seed=7), data(0)))
        assert_same(model, make(seed=7))


def by_hand(uo):
    """Values that a program writes into its shards count."""
    model = deferred(uo)
    with torch.no_grad():
        for param in model.parameters():
            torch.nn.init.constant_(param, 0.5)
    assert not loss_of(model, data(0)).isnan()
    assert (parameters_to_vector(model.parameters()) == 0.5).all()


@pytest.mark.parametrize("uo", [False, True])
def test_parameters_that_are_missing_in_files_are_not_trained(tmp_path, uo):
    simulate_ranks(some_are_missing, 2, tmp_path, uo)


@pytest.mark.parametrize("uo", [False, True])
def test_written_by_hand(uo):
    simulate_ranks(by_hand, 2, uo)
