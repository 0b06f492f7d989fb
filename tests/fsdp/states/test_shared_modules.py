"""A module registered at several places: its parameters have all of these names. The oracles: the unwrapped module, and
torch's FSDP1."""

import itertools
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import assert_same, data, loss_of, make
from gloo import note, run_ranks
from safetensors.torch import load_file, save_file
from simulated_ranks import simulate_ranks
from test_model_states import FULL, LOCAL, SHARDED, local
from test_optimizer_states import OPTIMIZERS, assert_states, equal, names_of
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision
from torch.distributed.fsdp import FullyShardedDataParallel as Torchs
from torch.distributed.fsdp import ShardingStrategy as TorchsStrategy

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, checkpoint, defer_init, load_safetensors

pytestmark = pytest.mark.multiprocess

every_setting = pytest.mark.parametrize(
    ("strategy", "uo"), list(itertools.product(["FULL_SHARD", "NO_SHARD"], [True, False]))
)


class Shared(nn.Module):
    """A layer at four places, two of them in a container that is at two, and another that is tied to it; buffers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = self.a
        self.box = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), self.a)
        self.again = self.box
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.a.weight
        self.last = nn.Linear(3, 50)

    def forward(self, x):
        return self.last(self.tied(self.again(torch.tanh(self.box(self.b(self.a(x)))))))


NAMES = [name for name, _ in Shared().named_parameters(remove_duplicate=False)]
FIRST = [name for name, _ in Shared().named_parameters()]
LAST = {param: name for name, param in Shared().named_parameters(remove_duplicate=False)}.values()
FLAT = {"_flat_param", "box.0._flat_param", "again.0._flat_param"}


def wrapped(wrap, module, **settings):
    """In two units, of which the inner one is at two places."""
    module.box[0] = wrap(module.box[0], **settings)
    return wrap(module, **settings)


def ours(strategy, uo, seed=0, **more):
    settings = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo, **more}
    return wrapped(FSDP, make(seed, Shared), **settings)


def deferred(strategy, uo):
    """Without values: a forward is refused until all have some."""
    with torch.device("meta"):
        module = Shared()
    settings = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo, "param_init_fn": defer_init}
    return wrapped(FSDP, module, **settings)


def theirs(strategy, uo, seed=0):
    settings = {"sharding_strategy": TorchsStrategy[strategy], "use_orig_params": uo}
    return wrapped(Torchs, make(seed, Shared), device_id=torch.device("cpu"), **settings)


def trained(model):
    """Its optimizer after a step, in which all ranks see the same."""
    optimizer = OPTIMIZERS["adam"](model.parameters())
    loss_of(model, data(0, rank=0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def state_of(model, kind, config=None):
    """In the order of its names, which is not torch's."""
    with type(model).state_dict_type(model, kind, config), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not sharded is whole
        return dict(sorted(model.state_dict().items()))


def load(model, state, kind=FULL, strict=True):
    with type(model).state_dict_type(model, kind):
        return model.load_state_dict(dict(state), strict=strict)


def as_torchs(strategy, uo):
    """Every form has torch's keys and values, and goes into either; what was taken stays when training goes on."""
    note(f"{strategy} uo={uo}")
    model, other = ours(strategy, uo), theirs(strategy, uo)
    best = model.state_dict()
    optimizer, _ = trained(model), trained(other)
    assert all(torch.equal(best[name], param) for name, param in make(cls=Shared).state_dict().items() if name in NAMES)
    is_sharded = strategy != "NO_SHARD"
    for kind in (FULL, SHARDED) if uo else (FULL, SHARDED, LOCAL):
        note(f"{kind}")
        mine, wanted = state_of(model, kind), state_of(other, kind)
        assert list(mine) == list(wanted)
        for name, value in wanted.items():
            assert type(mine[name]) is type(value), (name, type(mine[name]), type(value))
            assert equal(local(mine[name]), local(value)), name
        if kind is FULL:
            assert len({mine[name].untyped_storage().data_ptr() for name in NAMES}) == len(NAMES)
            assert all(mine[name].untyped_storage().nbytes() == mine[name].nbytes for name in NAMES)
        for wrap, state in ((ours, mine), (ours, wanted), (theirs, mine)):
            fresh = wrap(strategy, uo, seed=5)
            assert str(load(fresh, state, kind)) == "<All keys matched successfully>"
            assert equal(state_of(fresh, FULL), state_of(model, FULL))
    only = state_of(model, FULL, FullStateDictConfig(rank0_only=True, offload_to_cpu=True))
    buffers = {name for name in best if name not in NAMES}
    assert only.keys() == (buffers if is_sharded and dist.get_rank() else set(best))
    flat = state_of(model, LOCAL)  # where torch's has no such form too
    assert flat.keys() == (buffers | FLAT if is_sharded else set(best))
    load(fresh := ours(strategy, uo, seed=5), flat, LOCAL)
    assert equal(state_of(fresh, FULL), state_of(model, FULL))
    set_model_state_dict(model, get_model_state_dict(other))
    mine, wanted = get_model_state_dict(model), get_model_state_dict(other)
    assert mine.keys() == wanted.keys()
    assert all(equal(local(mine[name]), local(value)) for name, value in wanted.items())
    plain = make(cls=Shared)
    plain_optimizer = trained(plain)
    states = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert_states(states, names_of(plain, plain_optimizer, plain_optimizer.state_dict()), exact=False)
    model.load_state_dict(best)
    assert_same(model, make(cls=Shared))
    with FSDP.summon_full_params(model):
        assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == NAMES


@every_setting
def test_states_are_torchs(strategy, uo):
    run_ranks(as_torchs, 2, strategy, uo)


def refused(module, state):
    """What ``load_state_dict`` says of keys."""
    with pytest.raises(RuntimeError) as caught:
        module.load_state_dict(state)
    return [line.strip() for line in str(caught.value).splitlines() if "key(s)" in line]


def by_some_names(strategy, uo):
    """One name of each parameter brings its values; those that lack are told as the unwrapped module tells them."""
    note(f"{strategy} uo={uo}")
    source = ours(strategy, uo, seed=7)
    optimizer = trained(source)
    states = FSDP.full_optim_state_dict(source, optimizer, rank0_only=False)
    for names in (FIRST, LAST):
        for kind in (FULL, SHARDED):
            state = state_of(source, kind)
            some = {name: value for name, value in state.items() if name in names or name not in NAMES}
            whole = {name: value for name, value in source.state_dict().items() if name in some}
            model, plain = deferred(strategy, uo), make(cls=Shared)
            assert load(model, some, kind, strict=False) == plain.load_state_dict(whole, strict=False)
            assert equal(dict(model.state_dict()), dict(source.state_dict()))
            model(data(0))
        assert refused(ours(strategy, uo), dict(whole)) == refused(make(cls=Shared), dict(whole))
        renamed = dict(zip(FIRST, names, strict=True))
        given = {
            "state": {renamed[name]: state for name, state in states["state"].items()},
            "param_groups": [{**states["param_groups"][0], "params": list(names)}],
        }
        fresh = OPTIMIZERS["adam"](model.parameters())
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, given))
        assert_states(FSDP.full_optim_state_dict(model, fresh, rank0_only=False), states)


@every_setting
def test_one_of_the_names_is_enough(strategy, uo):
    simulate_ranks(by_some_names, 2, strategy, uo)


def in_files(strategy, uo, folder):
    """Checkpoints of the unwrapped module go into units and the other way, by torch's reader and an export too."""
    note(f"{strategy} uo={uo}")
    folder, rank = Path(folder), dist.get_rank()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    plain = make(7, Shared)
    plain_optimizer = trained(plain)
    checkpoint.save(folder / f"plain {rank}", plain, plain_optimizer, process_group=alone)
    checkpoint.export(folder / f"plain {rank}", folder / f"plain {rank}.safetensors")
    save_file({name: value.clone() for name, value in plain.state_dict().items() if name in LAST}, folder / f"{rank}")
    dist.barrier()
    wanted = {name: plain.state_dict()[name] for name in NAMES}

    def check(model):
        found = model.state_dict()
        assert equal({name: found[name] for name in NAMES}, wanted)

    model = ours(strategy, uo)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    checkpoint.load(folder / "plain 0", model, optimizer)
    check(model)
    for files, strict in (("plain 0.safetensors", True), ("0", False)):
        loaded = deferred(strategy, uo)
        load_safetensors(loaded, folder / files, strict=strict)
        check(loaded)
        loaded(data(0))
    checkpoint.save(folder / "units", model, optimizer)
    plain = make(8, Shared)
    plain_again = OPTIMIZERS["adam"](plain.parameters())
    checkpoint.load(folder / "units", plain, plain_again, process_group=alone)
    check(plain)
    assert equal(plain_again.state_dict()["state"], plain_optimizer.state_dict()["state"])
    state = make(9, Shared).state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder / "units" / "model")))
    assert equal({name: state[name] for name in NAMES}, wanted)
    checkpoint.export(folder / "units", folder / f"units {rank}.safetensors", tied="all")
    plain = make(9, Shared)
    plain.load_state_dict(load_file(folder / f"units {rank}.safetensors"))
    check(plain)


@every_setting
def test_checkpoints_are_the_unwrapped_modules(strategy, uo, tmp_path):
    simulate_ranks(in_files, 2, strategy, uo, tmp_path)


def low_buffers():
    """Buffers that units keep in a lower precision have their own in a state dict, by every name; as torch has it."""
    plain = make(cls=Shared)
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = ours("FULL_SHARD", True, mixed_precision=low)
    model(data(0))
    assert model.module.box[1].running_mean.dtype == torch.bfloat16
    found = {name: value.dtype for name, value in model.state_dict().items()}
    assert found == {name: value.dtype for name, value in plain.state_dict().items()}


def test_buffers_have_their_own_precision():
    simulate_ranks(low_buffers, 2)
