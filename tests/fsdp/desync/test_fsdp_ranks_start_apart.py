"""Ranks that start with other values, load others or add parameters later get an error, and no mixture.

Promises:
- errors name ranks that start from other weights or load others, parameters that are added after wrapping (trainable,
  unfrozen later, or in a frozen module that was added), and tensors that cannot be flattened
- ranks that start from other weights, also where meta modules get values, give no mixture: full state dicts, summon
  and checkpoints raise: `test_ranks_that_start_apart`,
  `test_ranks_whose_random_states_differ_where_meta_modules_get_values`
"""

import copy
import itertools
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_models import assert_same, data, first_rank_warns, full_params, loss_of, make, wrap_blocks
from gloo import fake_world, note, run_ranks
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import _C, ShardingStrategy, checkpoint, load_safetensors
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.errors import StateError

APART = r"parameter `{}` of the unit of {}(?: at `.*`)? has other values on rank 1 than on rank 0.*check_values=False"


def apart(name, kind, **settings):
    """Building with a seed for each rank warns, and the first forward raises, on all ranks."""
    with first_rank_warns(APART.format(name, kind)):
        model = wrap_blocks(make(dist.get_rank()), **settings)
    with pytest.raises(ValueError, match=APART.format(name, kind)):
        model(data(0))
    return model


def give_no_mixture(model):
    """Neither of what shows whole values, nor of what saves them; rows are what a checkpoint may be read into."""
    for call in (model.state_dict, model.module.state_dict, lambda: checkpoint.save("none", model)):
        with pytest.raises(
            (ValueError, checkpoint.CheckpointError),
            match="has other values on rank 1",
        ):
            call()
    for flags in ({}, {"writeback": False}, {"rank0_only": True, "writeback": False}):
        with (
            pytest.raises(ValueError, match=r"summon_full_params: .* has other values"),
            FSDP.summon_full_params(model, **flags),
        ):
            pass
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.state_dict()
    assert not os.path.exists("none")


def put_values(module):
    """Those of all ranks, in each module that has some of its own."""
    for param in module.parameters(recurse=False):
        with torch.no_grad():
            param.copy_(torch.arange(1.0, param.numel() + 1).view(param.shape) / 100)


def starting_apart_from_meta():
    torch.manual_seed(dist.get_rank())  # as where dropout is to differ
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with first_rank_warns("`0.weight` of the unit of Sequential has other values"):
        model = FSDP(module)
    with pytest.raises(ValueError, match=r"state_dict: parameter `0.weight` .* has other values"):
        model.state_dict()


@pytest.mark.multiprocess
def test_ranks_whose_random_states_differ_where_meta_modules_get_values():
    run_ranks(starting_apart_from_meta, 2)


def starting_apart():
    state = make().state_dict()
    for strategy, uo in itertools.product(("FULL_SHARD", "NO_SHARD", "ZERO_1"), (False, True)):
        note(f"{strategy} {uo}")
        settings = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
        model = apart("inner.weight", "Block", **settings)
        give_no_mixture(model)
        with pytest.raises(RuntimeError):  # nothing is loaded
            model.load_state_dict({})
        with pytest.raises(ValueError, match="has other values"):
            model(data(0))
        model.load_state_dict(state)
        loss_of(model, data(0)).backward()
        assert_same(model, make())
        written = apart("inner.weight", "Block", **settings)
        give_no_mixture(written)
        written.apply(put_values)
        loss_of(written, data(0)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            synced = wrap_blocks(make(dist.get_rank()), sync_module_states=True, **settings)
            synced.state_dict()
            with FSDP.summon_full_params(synced):
                pass
            synced(data(0))
            wrap_blocks(make(dist.get_rank()), check_values=False, **settings)(data(0))
            policy = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
            FSDP(make(dist.get_rank()), check_values=False, **policy, **settings)(data(0))
            wrap_blocks(make(), **settings)(data(0))
    for changed in range(16):  # one element of one parameter, on one rank
        module = make()
        param = list(module.parameters())[changed % 4]
        if dist.get_rank() == 1:
            param.data.view(-1)[changed % param.numel()] = -0.0
        with first_rank_warns("has other values on rank 1"):
            FSDP(module)
    strided = nn.Module()
    strided.weight = nn.Parameter((torch.arange(12.0) + dist.get_rank()).view(3, 4)[:, :2])
    with first_rank_warns("`weight` of the unit of Module has other values on rank 1"):
        FSDP(strided)


def loading_a_part(folder):
    """What was not loaded is told as before; what was is as the others' now."""
    state = make().state_dict()
    path = f"{folder}/part{dist.get_rank()}.safetensors"
    for strategy, use_orig_params in itertools.product(("FULL_SHARD", "NO_SHARD"), (False, True)):
        settings = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": use_orig_params}

        def load_state(model, part):
            model.load_state_dict(part, strict=False)

        def load_file(model, part):
            save_file(part, path)
            load_safetensors(model, path, strict=False)

        def load_checkpoint(model, part):
            save_file(part, path)
            checkpoint.load(path, model, strict=False)

        for load in (load_state, load_file, load_checkpoint):
            note(f"{strategy} {use_orig_params} {load.__name__}")
            model = apart("inner.weight", "Block", **settings)
            names = list(state)
            for others in (names[:-1], names[1:]):
                with pytest.raises(ValueError, match="has other values"):
                    model(data(0))
                load(model, {name: state[name] for name in others})
            loss_of(model, data(0)).backward()
            assert_same(model, make())


@pytest.mark.multiprocess
def test_ranks_that_start_apart_and_load_a_part(tmp_path):
    run_ranks(loading_a_part, 2, tmp_path)


@pytest.mark.multiprocess
def test_ranks_that_start_apart():
    run_ranks(starting_apart, 2)


def starting_apart_in_a_grid():
    for sick in range(4):
        module = make(1 if dist.get_rank() == sick else 0)
        mesh = init_device_mesh("cpu", (2, 2))
        with first_rank_warns(r"has other values on rank \d than on rank \d"):
            model = FSDP(module, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        with pytest.raises(ValueError, match="has other values"):
            model(data(0))


@pytest.mark.multiprocess
def test_ranks_of_a_grid_that_start_apart():
    run_ranks(starting_apart_in_a_grid, 4)


def loading_apart(folder):
    """Each rank has a state, or a file, of its own; or one of another kind."""
    rank = dist.get_rank()
    ours, theirs = make(2).state_dict(), make(2).state_dict()
    theirs["blocks.1.inner.weight"] = theirs["blocks.1.inner.weight"] + 1
    given = (ours, theirs)[rank]
    path = f"{folder}/rank{rank}.safetensors"
    save_file(given, path)
    counted = {**ours, "first.bias": torch.arange(5)}
    for strategy, uo in itertools.product(("FULL_SHARD", "NO_SHARD"), (False, True)):
        note(f"{strategy} {uo}")
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        told = r"nothing was loaded: rank 1: its values are not those of rank 0: `blocks.1.inner.weight` differs"
        with pytest.raises(RuntimeError, match=told):
            model.load_state_dict(given)
        with pytest.raises(RuntimeError, match=told):
            load_safetensors(model, path)
        with pytest.raises(RuntimeError, match=r"`first.bias` has dtype torch.int64, which cannot be loaded into .*32"):
            model.load_state_dict(counted)
        with pytest.raises(
            RuntimeError, match=r"nothing was loaded: rank 1: .*int64|`first.bias` has dtype torch.int64"
        ):
            model.load_state_dict(counted if rank else ours)
        assert_same(model, make())
        model.load_state_dict({name: value.double() for name, value in ours.items()})
        assert_same(model, make(2))


@pytest.mark.multiprocess
def test_ranks_that_load_apart(tmp_path):
    run_ranks(loading_apart, 2, str(tmp_path))


def test_kinds_of_buffers():
    with fake_world(1):
        model = FSDP(nn.BatchNorm1d(3))
        state = model.state_dict()
        model.load_state_dict({**state, "num_batches_tracked": torch.tensor(3, dtype=torch.int32)})
        assert model.num_batches_tracked == 3
        for name, value, message in (
            ("num_batches_tracked", torch.tensor(3.5), "torch.float32, which cannot be loaded into torch.int64"),
            ("running_mean", torch.ones(3, dtype=torch.int8), "torch.int8, which cannot be loaded into torch.float32"),
            ("weight", torch.ones(3, dtype=torch.complex64), "torch.complex64, which cannot be loaded into"),
        ):
            with pytest.raises(RuntimeError, match=f"`{name}` has dtype {message}"):
                model.load_state_dict({**state, name: value})
        small = FSDP(nn.Linear(1, 1))
        small.module.register_buffer("small", torch.zeros(2, dtype=torch.int8))
        with pytest.raises(RuntimeError, match=r"`small` of torch.int64 has values that torch.int8 cannot hold"):
            small.load_state_dict({**small.state_dict(), "small": torch.tensor([1, 300])})


@pytest.mark.parametrize("uo", [False, True])
def test_what_is_added_later(uo):
    """A parameter, or a module with some, that a wrapped tree gets is refused unless nobody would train it."""
    with fake_world(2):
        ignored = nn.Parameter(torch.ones(2))
        module = make()
        module.own = ignored
        model = wrap_blocks(module, use_orig_params=uo, ignored_states=[ignored])
        later = (
            (model, "more"),
            (model.module, "more"),
            (model.first, "more"),
            (model.blocks[0].module.inner, "more"),
            (model.module.blocks, "3"),
        )
        for round_ in range(2):
            for place, name in later:
                for value in (nn.Parameter(torch.ones(2)), nn.Sequential(nn.Linear(2, 2))):
                    with pytest.raises(
                        ValueError, match=rf"parameter `{name}.*added to a \w+ in the unit of \w+.* another copy"
                    ):
                        setattr(place, name, value)
                    assert not hasattr(place, name)
            model = FSDP.fsdp_modules(model)[0]
            if round_ == 0:
                model(data(0)).sum().backward()
        if uo:
            with pytest.raises(
                ValueError, match=r"`more` of a Linear .* cannot be tied to `inner.weight` of the unit of"
            ):
                model.first.more = model.blocks[0].module.inner.weight
        model.module.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        model.module.again = ignored
        model.module.tanh = nn.Sequential(nn.Tanh())
        with pytest.raises(ValueError, match="`more` was added to a Tanh"):
            model.module.tanh[0].more = nn.Parameter(torch.ones(2))
        model.first.register_parameter("nothing", None)
        nn.Linear(2, 2).more = nn.Parameter(torch.ones(2))
        model(data(0)).sum().backward()
        assert len(full_params(model)) == len(list(make().parameters())) + 2  # own and frozen


@pytest.mark.parametrize("uo", [False, True])
def test_what_is_added_to_a_copy(uo):
    """To a copy, to a model that was loaded, and to a copy of that: refused as of the model itself."""
    with fake_world(2):
        ignored = nn.Parameter(torch.ones(2))
        module = make()
        module.own = ignored
        model = wrap_blocks(module, use_orig_params=uo, ignored_states=[ignored])
        model(data(0)).sum().backward()
        model.zero_grad()
        loaded = pickle.loads(pickle.dumps(model))
        copied = copy.deepcopy(nn.Sequential(model))[0]
        del model, module
        for each in (loaded, copied, copy.deepcopy(loaded)):
            for place, name in ((each, "more"), (each.first, "more"), (each.module.blocks, "3")):
                for value in (nn.Parameter(torch.ones(2)), nn.Linear(2, 2)):
                    with pytest.raises(ValueError, match=rf"parameter `{name}.*added to a \w+ in the unit of"):
                        setattr(place, name, value)
            with pytest.raises(ValueError, match=r"`more` was added to a Linear in the unit of Block"):
                each.blocks[0].module.inner.more = nn.Parameter(torch.ones(2))
            each.module.again = each.module.own
            each(data(0)).sum().backward()
            with FSDP.summon_full_params(each):
                assert each.module.last.weight.shape == (1, 5)
            each(data(0)).sum().backward()


def lora():
    """A frozen layer that is added; its trainable part comes later."""
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return layer.requires_grad_(False)


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("at", ["root", "unit", "copy", "pickle"])
def test_what_is_added_frozen_and_trained_later(uo, at):
    """The next forward of a training step refuses it, by name; evaluation and what is ignored or removed go on."""
    with fake_world(2):
        ignored = nn.Parameter(torch.ones(2), requires_grad=False)
        module = make()
        module.own = ignored
        model = wrap_blocks(module, use_orig_params=uo, ignored_states=[ignored])
        assert not any(each._forward_pre_hooks for each in FSDP.fsdp_modules(model))
        path = "blocks.0." if at == "unit" else ""
        (model.blocks[0] if at == "unit" else model).module.more = lora()
        (model.blocks[0] if at == "unit" else model).module.one = nn.Parameter(torch.ones(2), requires_grad=False)
        if at == "copy":
            model = copy.deepcopy(model)
        elif at == "pickle":
            model = pickle.loads(pickle.dumps(model))
        holder = (model.blocks[0] if at == "unit" else model).module
        model.module.own.requires_grad_(True)
        model(data(0)).sum().backward()
        for param, name in ((holder.more[1].weight, "more.1.weight"), (holder.one, "one")):
            param.requires_grad_(True)
            message = (
                rf"parameter `{path}{name}` was added to the unit of \w+.* after that was wrapped, and is trainable"
            )
            with pytest.raises(StateError, match=message):
                model(data(0))
            model.eval()
            with torch.no_grad():
                model(data(0))
            model.train()
            param.requires_grad_(False)
            model(data(0)).sum().backward()
        added = holder.more
        del holder.more
        added.requires_grad_(True)
        model(data(0)).sum().backward()


@pytest.mark.parametrize("uo", [False, True])
def test_what_is_added_to_an_addition(uo):
    """A trainable parameter or module that a frozen addition gets, or that insert() puts into a list, is refused."""
    with fake_world(2):
        module = make()
        module.chain, module.ignored = nn.Sequential(nn.Tanh()), nn.Sequential(nn.Linear(2, 2))
        model = wrap_blocks(module, use_orig_params=uo, ignored_modules=[module.ignored])
        model.module.more = lora()
        for place, name in ((model.module.more, "2"), (model.module.more[0], "inner")):
            with pytest.raises(ValueError, match=rf"parameter `{name}.weight` was added to a \w+ in the unit of"):
                place.add_module(name, nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"parameter `weight` was added to a Linear in the unit of"):
            model.module.more[0].weight = nn.Parameter(torch.ones(2, 2))
        for place, added in ((model.module.blocks, nn.Linear(2, 2)), (model.module.chain, nn.Linear(2, 2))):
            before = list(place)
            with pytest.raises(ValueError, match=r"parameter `0.weight` was added to a \w+ in the unit of"):
                place.insert(0, added)
            assert list(place) == before
        model.module.chain.insert(0, nn.Linear(2, 2).requires_grad_(False))
        model.module.chain[0].bias.requires_grad_(True)
        with pytest.raises(StateError, match=r"parameter `chain.0.bias` was added"):
            model(data(0))
        model.module.chain[0].bias.requires_grad_(False)
        model.module.again = model.module.ignored
        model.module.ignored.append(nn.Linear(2, 2))  # ignored modules may get more
        model.module.more[0]._parameters["weight"] = nn.Parameter(torch.ones(2, 2))  # past torch's hooks
        with pytest.raises(StateError, match=r"parameter `more.0.weight` was added"):
            model(data(0))


def trained_by_each_rank():
    rank = dist.get_rank()
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = wrap_blocks(make(), use_orig_params=True, sharding_strategy=strategy)
        model(data(rank)).sum().backward()
        model.first.more = nn.Linear(3, 3).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.first.more.weight.requires_grad_(True)
        for _ in range(2):
            with pytest.raises(StateError, match=r"parameter `first.more.weight` was added to the unit of Model"):
                model(data(rank))
        model.first.more.requires_grad_(False)
        model(data(rank)).sum().backward()
        optimizer.step()


@pytest.mark.multiprocess
def test_what_is_trained_later_on_each_rank():
    run_ranks(trained_by_each_rank, 2)


def trained_on(model):
    """Whether it goes on as before."""
    model(data(0)).sum().backward()
    return all(wrapper._unit.summoned is None for wrapper in FSDP.fsdp_modules(model))


def test_ties_made_later():
    """With ``use_orig_params=False`` attributes are no Parameters but in summon_full_params()."""
    with fake_world(1):
        model = wrap_blocks(make())
        before = full_params(model)
        blocks = [block.module for block in model.blocks]
        for one, other, names in (
            (blocks[0].inner, blocks[1].inner, "`inner.weight` of the unit of Block"),
            (model.last, blocks[1].inner, "`inner.weight` of the unit of Block"),
            (blocks[1].inner, model.last, "`last.weight` of the unit of Model"),
        ):
            with (
                pytest.raises(ValueError, match=rf"weight` of .* was replaced by {names}.*: tie parameters before"),
                FSDP.summon_full_params(model),
            ):
                one.weight = other.weight
            assert trained_on(model)
        with FSDP.summon_full_params(model):  # an exchange is no tie
            one, other = blocks[0].inner, blocks[1].inner
            one.weight, other.weight = other.weight, one.weight
        after = full_params(model)
        assert torch.equal(after["blocks.0.inner.weight"], before["blocks.1.inner.weight"])
        assert torch.equal(after["blocks.1.inner.weight"], before["blocks.0.inner.weight"])
        blocks[0].inner.weight = blocks[1].inner.weight
        with pytest.raises(ValueError, match=r"`inner.weight` was deleted, or replaced by .* before wrapping \(ties"):
            model(data(0))


def test_a_replaced_parameter_is_known():
    with fake_world(2):
        model = FSDP(nn.Linear(3, 3), use_orig_params=True)
        model.module.weight = nn.Parameter(torch.ones(3, 3))
        model(torch.ones(1, 3)).sum().backward()
        other = nn.Linear(3, 3)
        other.weight = model.module.weight
        with pytest.raises(ValueError, match=r"shared with `weight` of the unit of Linear"):
            FSDP(other)


class Tagged(torch.Tensor):
    """A subclass."""


def of(value, **settings):
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.weight = nn.Parameter(value, **settings)
    return module


def test_what_cannot_be_flattened_is_named():
    eye = torch.eye(3)
    for value, message in (
        (eye.to_sparse(), "sparse or quantized tensors: .* has layout torch.sparse_coo; convert"),
        (eye.to_sparse_csr(), "has layout torch.sparse_csr"),
        (eye.to_mkldnn(), "has layout torch._mkldnn"),
        (eye.as_subclass(Tagged), "it is a Tagged, a subclass of torch's"),
        (torch.zeros(0, 3), r"without any element: `inner.weight` \(0, 3\); ignore"),
        (eye.to(torch.float8_e4m3fn), "no collective adds torch.float8_e4m3fn up"),
    ):
        for uo in (False, True):
            with (
                fake_world(1),
                pytest.raises(ValueError, match=rf"(?s)Cannot flatten .*`inner.weight`.*{message}|{message}"),
            ):
                FSDP(of(value), use_orig_params=uo)


def test_a_lazy_parameter_is_named():
    with fake_world(2), pytest.raises(ValueError, match=r"`1.weight` of a LazyLinear is uninitialized.*run a forward"):
        FSDP(nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2)))


@pytest.mark.parametrize("uo", [False, True])
def test_what_would_lose_a_wrapped_model_is_refused(uo):
    with fake_world(2):
        model = wrap_blocks(make(), use_orig_params=uo)
        before = full_params(model)
        for moved in (lambda: model.to("meta"), lambda: model.to_empty(device="meta")):
            with pytest.raises(
                ValueError, match=r"the unit of \w+ would lose the values of parameter `[a-z.]+`.*defer_init"
            ):
                moved()
        with pytest.raises(
            ValueError, match=r"already, the unit of Model with parameter `first.weight`: wrap a module once"
        ):
            FSDP(model)
        model.to(torch.float64).to(torch.float32)
        assert all(torch.equal(value, before[name]) for name, value in full_params(model).items())
        loss_of(model, data(0)).backward()


def test_digests():
    """Of every dtype and of what is dense in another order; nothing else."""
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool, torch.int8):
        one = torch.ones(5, 7).to(dtype)
        assert _C.digest(one) == _C.digest(one.clone())
        assert _C.digest(one) != _C.digest(torch.zeros(5, 7).to(dtype))
        assert _C.digest(one.t()) == _C.digest(one)
    large = torch.zeros(2**20)
    for i in range(0, 2**20 - 4096, 50021):
        other = large.clone()
        other[i : i + 2100] = 1
        assert _C.digest(other) != _C.digest(large)
    assert _C.digest(torch.empty(0)) == _C.digest(torch.empty(0, 3))
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed or resized"):
        _C.digest(freed)
    for wrong in (3, None, torch.ones(4)[::2], torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(TypeError, match="expected a"):
            _C.digest(wrong)
