"""Tools that do not know the class: an error names each before it changes anything, or it is corrected.

Promises:
- DDP, `fully_shard`, torch's class and functions, distributed checkpoints of shards are refused by name and change
  nothing
- `save_pretrained()` of a module in a unit is refused where it would save pieces: `test_save_pretrained_of_pieces`;
  that of transformers and PEFT also without the wrapper (`model.module`), and of a module that has units inside:
  `test_save_pretrained_of_libraries`, `integrations/test_peft.py` (`save_pretrained`)
- `torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` are those of the unsharded module:
  `test_clipping_and_scaling`; a `ShardedGradScaler` steps a fused optimizer and another one:
  `test_a_scaler_steps_a_fused_optimizer_and_another_one`
"""

import gc
import importlib
import inspect
import itertools
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import Averaged, data, full_grads, full_params, loss_of, make, wrap_blocks
from gloo import fake_world, note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad_norm_, get_total_norm  # bound before any model is wrapped

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.fsdp.errors import StateError
from flatparam.fsdp.interop import patches

CPU = torch.device("cpu")


def settings(strategy):
    """What a strategy takes to have ranks of its own."""
    pair = {"process_group": (dist.group.WORLD, dist.group.WORLD)} if strategy == "LAYER_ZERO" else {}
    return {"sharding_strategy": ShardingStrategy[strategy], **pair}


def enter(context):
    with context:
        pass


def an_optimizer(model):
    return torch.optim.SGD(model.parameters())


EMPTY = {"state": {}, "param_groups": []}
AROUND = {  # what is called with a tree that holds units
    "DDP": nn.parallel.DistributedDataParallel,
    "DDP's keyword": lambda model: nn.parallel.DistributedDataParallel(module=model, init_sync=False),
    "DataParallel": nn.DataParallel,
    "fully_shard": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))),
    "replicate": lambda model: replicate(model, device_mesh=init_device_mesh("cpu", (2,)))(torch.ones(1, 3)),
    "torch's class": lambda model: TorchsFSDP(model, device_id=CPU, use_orig_params=True),
    "its summon_full_params": lambda model: enter(TorchsFSDP.summon_full_params(model)),
    "its state_dict_type": lambda model: enter(TorchsFSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)),
    "its set_state_dict_type": lambda model: TorchsFSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT),
    "its get_state_dict_type": TorchsFSDP.get_state_dict_type,
    "its fsdp_modules": lambda model: TorchsFSDP.fsdp_modules(model),
    "its fsdp_modules, roots": lambda model: TorchsFSDP.fsdp_modules(model, root_only=True),
    "its optim_state_dict": lambda model: TorchsFSDP.optim_state_dict(model, an_optimizer(model)),
    "its optim_state_dict_to_load": lambda model: TorchsFSDP.optim_state_dict_to_load(
        model, an_optimizer(model), EMPTY
    ),
    "its full_optim_state_dict": lambda model: TorchsFSDP.full_optim_state_dict(model, an_optimizer(model)),
    "its sharded_optim_state_dict": lambda model: TorchsFSDP.sharded_optim_state_dict(model, an_optimizer(model)),
    "its shard_full_optim_state_dict": lambda model: TorchsFSDP.shard_full_optim_state_dict(EMPTY, model),
}


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("nested", [False, True], ids=["itself", "below"])
@pytest.mark.parametrize("tool", AROUND)
def test_tools_around_units_are_refused(tool, nested, uo):
    with fake_world(2):
        model = wrap_blocks(make(), use_orig_params=uo)
        tree = nn.Sequential(nn.Linear(3, 3), model) if nested else model
        kinds = [type(module) for module in tree.modules()]
        before = [(param, param.detach().clone(), param.data_ptr()) for param in tree.parameters()]
        with pytest.raises(RuntimeError, match=r"know the unit of \w+.* of flatparam's FullyShardedDataParallel"):
            AROUND[tool](tree)
        assert kinds[1:] == [type(module) for module in tree.modules()][1:]  # replicate() has changed the first
        assert [id(param) for param in tree.parameters()] == [id(param) for param, _, _ in before]
        assert all(torch.equal(param, value) and param.data_ptr() == at for param, value, at in before)
        loss_of(model, data(0)).backward()


def test_what_the_marks_leave_alone():
    with fake_world(2):
        tree = nn.Sequential(nn.Linear(3, 3), wrap_blocks(make(), use_orig_params=True))
        assert dict(inspect.getmembers(tree[1]))["limit_all_gathers"]
        units = [f"1.{name}" for name, _ in tree[1].named_parameters()]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(tree, units)
        nn.parallel.DistributedDataParallel(tree, init_sync=False)  # it leaves the units alone
        nn.parallel.DistributedDataParallel(nn.Linear(3, 3), init_sync=False)


def saved_and_loaded(folder):
    """Distributed checkpoints of shards are refused on every rank; those of whole states are right."""
    for strategy, uo in (("FULL_SHARD", False), ("ZERO_1", True), ("NO_SHARD", True)):
        note(f"{strategy} {uo}")
        model = wrap_blocks(make(), use_orig_params=uo, sharding_strategy=ShardingStrategy[strategy])
        optimizer = torch.optim.Adam(model.parameters())
        loss_of(model, data(0)).backward()
        optimizer.step()
        where = f"{folder}/{strategy}{uo}"
        if strategy == "NO_SHARD":  # it is whole
            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=where)
            dcp.load({"optimizer": optimizer.state_dict()}, checkpoint_id=where)
            continue
        dcp.save({"optimizer": torch.ones(1), "parameters": torch.ones(1)}, checkpoint_id=where)
        for state, functions in (
            ({"optimizer": optimizer.state_dict()}, (dcp.save, dcp.load)),
            ({"optimizer": optimizer}, (dcp.async_save,)),
            ({"parameters": [param.detach() for param in model.parameters()]}, (dcp.save,)),
        ):
            for function in functions:
                with pytest.raises(BaseException, match="has this rank's shards of"):  # torch has a class of its own
                    function(state, checkpoint_id=where)
        dcp.save({"model": model.state_dict()}, checkpoint_id=where)
        other = wrap_blocks(make(1), use_orig_params=uo, sharding_strategy=ShardingStrategy[strategy])
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=where)
        other.load_state_dict(state["model"])
        loaded = other.state_dict()
        for name, value in model.state_dict().items():
            assert torch.equal(value, loaded[name]), name


def wrapped_twice():
    """Units around what another class has wrapped."""
    for wrapper, name in (
        (nn.parallel.DistributedDataParallel, "a DistributedDataParallel of torch"),
        (lambda m: TorchsFSDP(m, device_id=CPU), "a FullyShardedDataParallel of torch"),
        (fully_shard, r"a FSDPLinear that fully_shard\(\) has sharded"),
    ):
        inner = wrapper(nn.Linear(3, 3))
        with pytest.raises(ValueError, match=rf"would hold {name} \(itself\)"):
            FSDP(inner)
        with pytest.raises(ValueError, match=rf"the unit of Sequential would hold {name} \(at `0`\)"):
            FSDP(nn.Sequential(inner))


@pytest.mark.multiprocess
def test_distributed_checkpoints_of_shards(tmp_path):
    simulate_ranks(saved_and_loaded, 2, str(tmp_path))


@pytest.mark.multiprocess
def test_units_around_other_classes_are_refused():
    simulate_ranks(wrapped_twice, 2)


def clipped_and_scaled():
    """torch's clipping and scaling are those of the unsharded module; a step is skipped by all ranks or by none."""
    for strategy, uo in itertools.product(("FULL_SHARD", "ZERO_1", "LAYER_ZERO", "NO_SHARD"), (False, True)):
        for function, norm_type in ((clip_grad_norm_, 2.0), (nn.utils.clip_grad_norm_, torch.inf)):
            note(f"{strategy} {uo} {norm_type}")
            model, whole = wrap_blocks(make(), use_orig_params=uo, **settings(strategy)), make()
            oracle = Averaged(whole, 2)
            loss_of(model, data(0)).backward()
            oracle.backward(lambda rank: [data(0, rank)])
            wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm_type)
            norm = function(model.parameters(), 0.01, norm_type=norm_type)
            torch.testing.assert_close(norm, wanted)
            found = full_grads(model)
            for name, param in whole.named_parameters():
                torch.testing.assert_close(found[name], param.grad)
        model.zero_grad()
        with model.no_sync():
            loss_of(model, data(0)).backward()
        if strategy != "NO_SHARD":
            with pytest.raises(RuntimeError, match=r"gradients of the unit of .* come from no_sync"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()

        scalers, each = (torch.amp.GradScaler, ShardedGradScaler), (False, True)
        for sick, which, fused, unscaled in itertools.product(((0,), (1,), (0, 1)), scalers, each, each):
            note(f"{strategy} {uo}: {sick} {which} {fused=} {unscaled=}")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
            before = full_params(model)
            scaler = which(device="cpu", init_scale=4.0)
            scaler.scale(loss_of(model, data(1))).backward()
            if dist.get_rank() in sick or strategy == "NO_SHARD":  # as an overflow in the shard of one rank
                next(param.grad for param in model.parameters() if param.grad is not None).fill_(torch.inf)
            with pytest.raises(RuntimeError, match=r"is inf: nothing was clipped|non-finite"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0
            for name, value in full_params(model).items():
                assert torch.equal(value, before[name]), name
            optimizer.zero_grad()
        scaler.scale(loss_of(model, data(2))).backward()
        scaler.step(optimizer)
        assert any(not torch.equal(value, before[name]) for name, value in full_params(model).items())


@pytest.mark.multiprocess
def test_clipping_and_scaling():
    simulate_ranks(clipped_and_scaled, 2)


def scaled_with_two_optimizers():
    """A fused optimizer and another one under one scaler: torch makes their flags of different shapes."""
    for strategy, sick in itertools.product(("FULL_SHARD", "NO_SHARD"), (None, 0, 1)):
        note(f"{strategy} {sick}")
        model = wrap_blocks(make(), use_orig_params=True, **settings(strategy))
        params = list(model.parameters())
        optimizers = [torch.optim.SGD(params[i::2], lr=0.1, fused=i == 0) for i in range(2)]
        scaler = ShardedGradScaler(device="cpu", init_scale=4.0)
        scaler.scale(loss_of(model, data(0))).backward()
        if sick is not None:
            next(p.grad for p in params[sick::2] if p.grad is not None and p.numel()).fill_(torch.inf)
        before = [param.detach().clone() for param in params]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (4.0 if sick is None else 2.0)
        for i in range(2):
            is_same = all(map(torch.equal, params[i::2], before[i::2]))
            assert is_same == (i == sick), i


@pytest.mark.multiprocess
def test_a_scaler_steps_a_fused_optimizer_and_another_one():
    simulate_ranks(scaled_with_two_optimizers, 2)


def test_a_scaler_that_is_off_does_nothing():
    with fake_world(2):
        optimizer = torch.optim.SGD(wrap_blocks(make()).parameters())
        ShardedGradScaler(device="cpu", enabled=False).unscale_(optimizer)


@pytest.mark.parametrize("where", [0, 1, None])
def test_an_overflow_counts_once_for_all_devices(where):
    """Optimizers that are fused take the sum over devices, and skip where it is 1."""
    found = {torch.device("cpu"): torch.zeros(1), torch.device("cpu", 0): torch.zeros(1)}
    if where is not None:
        list(found.values())[where].fill_(1.0)
    with fake_world(2):
        optimizer = torch.optim.SGD(wrap_blocks(make()).parameters())
        scaler = torch.amp.GradScaler("cpu")
        patches._agreeing(lambda *arguments: found, scaler, optimizer, torch.ones(1), torch.zeros(1), True)
    assert sum(found.values()).item() == (where is not None)


def test_clipping_of_what_is_whole():
    """Other models, and full parameters in summon_full_params, are clipped as before."""
    with fake_world(2):
        model, module = wrap_blocks(make(), use_orig_params=True), make()
        with FSDP.summon_full_params(model, with_grads=True):
            for one in (module, model):
                for param in one.parameters():
                    param.grad = torch.ones_like(param)
            wanted = clip_grad_norm_(module.parameters(), 1.0)
            assert torch.equal(clip_grad_norm_(model.parameters(), 1.0), wanted)
        with pytest.warns(UserWarning, match="empty generator"):
            clip_grad_norm_((param for param in ()), 1.0)
        assert torch.equal(clip_grad_norm_(module.last.weight, 1.0), module.last.weight.grad.norm())


@pytest.mark.parametrize("uo", [False, True])
def test_a_norm_of_shards_is_refused(uo):
    """``get_total_norm`` takes gradients and asks no other rank."""
    with fake_world(2):
        model, module = wrap_blocks(make(), use_orig_params=uo), make()
        for one in (module, model):
            loss_of(one, data(0)).backward()
        grads, others = ([p.grad for p in one.parameters() if p.grad is not None] for one in (model, module))
        with pytest.raises(StateError, match=r"get_total_norm: a gradient of the unit of .* is this rank's shard"):
            get_total_norm(grads)
        with pytest.raises(StateError, match="clip_grad_norm_"):
            get_total_norm(grads[-1])
        wanted = torch.stack([grad.norm() for grad in others]).norm()
        compiled = torch.compile(get_total_norm, backend="eager", fullgraph=True)
        assert get_total_norm(iter(others)) == compiled(others) == wanted
        with FSDP.summon_full_params(model, with_grads=True):
            whole = [param.grad for param in model.parameters() if param.grad is not None]
            assert get_total_norm(whole) == get_total_norm([grad.clone() for grad in whole])


class Pretrained(nn.Module):
    """Saves as libraries do: the state dict that it gets, or its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head, self.saved = nn.Linear(3, 3), nn.Linear(3, 5), None

    def save_pretrained(self, folder, state_dict=None):
        self.saved = self.state_dict() if state_dict is None else state_dict
        return folder


def saves_pretrained(uo):
    whole = Pretrained().state_dict()
    for strategy in ("FULL_SHARD", "ZERO_1", "NO_SHARD"):
        module = Pretrained()
        module.block = FSDP(module.block, use_orig_params=uo, sharding_strategy=ShardingStrategy[strategy])
        model = FSDP(module, use_orig_params=uo, sharding_strategy=ShardingStrategy[strategy])
        note(f"{strategy} {uo}")
        assert not hasattr(module.block, "save_pretrained")
        if strategy == "NO_SHARD" and uo:
            assert model.save_pretrained("folder") == "folder"
        elif strategy != "NO_SHARD":
            for call in (
                model.save_pretrained,
                lambda *args, model=model: model.save_pretrained(*args, state_dict=None),
            ):
                with pytest.raises(
                    StateError, match=r"save_pretrained\(\): the parameters of the unit of .* are this rank"
                ):
                    call("folder")
            assert module.saved is None
            state = model.state_dict()
            for given in ((("a", state), {}), (("a",), {"state_dict": state})):
                model.save_pretrained(*given[0], **given[1])
                assert module.saved is state
            with FSDP.summon_full_params(model, writeback=False):
                model.save_pretrained("folder")
                module.saved = {name: value.clone() for name, value in module.saved.items()}
        else:
            continue
        assert list(module.saved) == list(whole)
        assert all(torch.equal(value, whole[name]) for name, value in module.saved.items())


@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
def test_save_pretrained_of_pieces(uo):
    simulate_ranks(saves_pretrained, 2, uo)


LIBRARIES = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}
LIBRARY = """
from torch import nn

class {name}(nn.Module):
    saved = None

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(3, 3)

    def save_pretrained(self, folder, state_dict=None):
        self.saved = self.state_dict() if state_dict is None else state_dict
"""


@pytest.fixture
def library(request, tmp_path, monkeypatch):
    """A stand-in for a library: its module's name and its class's, not imported yet; real ones take seconds."""
    module = request.param
    package, _, file = module.partition(".")
    (tmp_path / package).mkdir()
    (tmp_path / package / f"{file}.py").write_text(LIBRARY.format(name=LIBRARIES[module]))
    monkeypatch.syspath_prepend(tmp_path)
    for name in (package, module):
        monkeypatch.setitem(sys.modules, name, None)  # what was there comes back after the test
        del sys.modules[name]
    yield lambda: getattr(importlib.import_module(module), LIBRARIES[module])
    gc.collect()


@pytest.mark.parametrize("is_imported", [False, True])
@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_save_pretrained_of_libraries(library, is_imported):
    with fake_world(2):
        held = None if is_imported else FSDP(nn.Linear(3, 3))
        cls = library()
        original = inspect.unwrap(vars(cls)["save_pretrained"])
        for uo in (False, True):
            for part in ("whole", "block"):
                module = cls()
                if part == "whole":
                    model = FSDP(module, use_orig_params=uo)
                else:
                    model = module.block = FSDP(module.block, use_orig_params=uo)
                with pytest.raises(
                    StateError, match=r"save_pretrained\(\): the parameters of the unit of .* are this rank"
                ):
                    module.save_pretrained("folder")
                assert module.saved is None
                state = {"whole": torch.ones(3)}
                module.save_pretrained("folder", state_dict=state)
                assert module.saved is state
                with FSDP.summon_full_params(model, writeback=False):
                    module.save_pretrained("folder")
                assert [value.numel() for value in module.saved.values()] == [9, 3]
        module = cls()
        model = FSDP(module, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
        module.save_pretrained("folder")
        assert [value.numel() for value in module.saved.values()] == [9, 3]
        cls().save_pretrained("folder")
        del held, module, model
        gc.collect()
        assert vars(cls)["save_pretrained"] is original
