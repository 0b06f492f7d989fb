"""Copies of a wrapped model: their content and cost, when they are refused, and which ranks may load them.

One process, which is rank 0 of two that do not exist: nothing is computed here that needs the other.
"""

import copy
import copyreg
import gc
import pickle
import pickletools
import types
import weakref

import pytest
import torch
import torch.distributed as dist
from copies import WAYS
from dropin_models import Tied
from gloo import handle_of
from recording import Recorder
from torch import nn
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import flatparam
from flatparam import FlatParamHandle

WIDTH = 64
MODES = [(strategy, orig) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") for orig in (True, False)]

every_mode = pytest.mark.parametrize(
    ("strategy", "orig"), MODES, ids=[f"{strategy.lower()}-{'orig' if orig else 'flat'}" for strategy, orig in MODES]
)
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
orig_or_flat = pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])


@pytest.fixture(autouse=True)
def world():
    start()
    with handle_of("flatparam"):
        yield
    stop()


def start(world_size=2, rank=0):
    stop()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def nothing_stays_registered(world):
    """No reduction is left in ``copyreg``: other pickles are what they were."""
    before = dict(copyreg.dispatch_table)
    yield
    assert copyreg.dispatch_table == before


def settings(strategy="FULL_SHARD", orig=True, **more):
    keywords = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": orig}
    return keywords | {"device_id": torch.device("cpu")} | more


def wrapped(strategy="FULL_SHARD", orig=True, module=None, **more):
    """Return two nested units, or ``module`` wrapped."""
    torch.manual_seed(0)
    keywords = settings(strategy, orig, **more)
    if module is None:
        inner = FullyShardedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), **keywords)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH))
    return FullyShardedDataParallel(module, **keywords)


def step(model, backward=True):
    loss = model(torch.ones(2, WIDTH)).square().mean()
    if backward:
        loss.backward()


def handles(model):
    return [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model)]


def assert_same(found, wanted):
    """Before torch 2.13 a fake group writes nothing, and what lay in memory may be no number."""
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0, equal_nan=True)


def plain_values(thing, names):
    kinds = (bool, int, str, tuple, list, torch.dtype, torch.device, types.NoneType)
    values = {name: value for name, value in vars(thing).items() if name in names}
    return {name: value for name, value in values.items() if isinstance(value, kinds) and "module" not in repr(value)}


# What is in a copy


@pytest.mark.sweep(4)
@every_way
@every_mode
def test_is_as_if_it_was_wrapped_anew(way, strategy, orig):
    """Nothing of the steps in the original's past is in a copy: it has what a model has that was just wrapped."""
    fresh, model = wrapped(strategy, orig), wrapped(strategy, orig)
    step(model)
    step(model, backward=False)
    twin = way(model)
    units = FullyShardedDataParallel.fsdp_modules(twin), FullyShardedDataParallel.fsdp_modules(fresh)
    for new, old in zip(*units, strict=True):
        for ours, expected in (
            (new, old),
            (new._handle, old._handle),
            (new._handle.flat_param, old._handle.flat_param),
        ):
            assert vars(ours).keys() <= vars(expected).keys() | {"_training_state", "_state", "_is_of_backward"}
            names = vars(expected).keys() - {"_params", "_shared_params", "params"}
            assert plain_values(ours, names) == plain_values(expected, names)
            assert len(plain_values(expected, names)) > 8
    assert [(n, p.shape, p.requires_grad, type(p)) for n, p in twin.named_parameters()] == [
        (n, p.shape, p.requires_grad, type(p)) for n, p in fresh.named_parameters()
    ]
    assert repr(twin) == repr(fresh)
    assert twin.state_dict().keys() == fresh.state_dict().keys()


@pytest.mark.sweep(4)
@every_way
@every_mode
def test_shares_nothing_with_the_original(way, strategy, orig):
    model = wrapped(strategy, orig)
    step(model)
    twin = way(model)
    theirs = {id(module) for module in model.modules()}
    assert theirs.isdisjoint(id(module) for module in twin.modules())
    for unit, new, old in zip(FullyShardedDataParallel.fsdp_modules(twin), handles(twin), handles(model), strict=True):
        assert isinstance(new, FlatParamHandle)
        assert type(new._unit) is type(old._unit), "the loops in C"
        assert isinstance(new.flat_param, FlatParameter)
        assert torch.equal(new.flat_param, old.flat_param)
        assert new.flat_param.data_ptr() != old.flat_param.data_ptr()
        assert new.process_group is old.process_group is dist.group.WORLD
        modules = {id(module) for module in unit.modules()}
        infos = [*new.flat_param._param_infos, *new.flat_param._shared_param_infos]
        assert {id(info.module) for info in infos} <= modules
        assert new.flat_param._modules == {info.module for info in infos}
        assert unit._fully_sharded_module_to_handle == {new._fully_sharded_module: new}
        assert unit.params[0] is new.flat_param
        for param in new.flat_param._params or ():
            if param.numel():
                assert param.untyped_storage().data_ptr() == new.flat_param.untyped_storage().data_ptr()
    old = {p.untyped_storage().data_ptr() for p in model.parameters() if p.numel()}
    assert old.isdisjoint(p.untyped_storage().data_ptr() for p in twin.parameters() if p.numel())


@every_way
@orig_or_flat
def test_leaves_the_original_as_it_was(way, orig):
    model = wrapped(orig=orig)
    step(model)
    before = [(name, p, p.data_ptr(), p.grad, p._version) for name, p in model.named_parameters()]
    way(model)
    after = [(name, p, p.data_ptr(), p.grad, p._version) for name, p in model.named_parameters()]
    assert all(a is b or a == b for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True))
    assert any(p.grad is not None for p in model.parameters())


@every_way
def test_a_copy_outlives_its_original_which_goes_at_once(way):
    model = wrapped()
    step(model)
    twin = way(model)
    gc.collect()
    gone = [weakref.ref(handle.flat_param) for handle in handles(model)]
    gone += [weakref.ref(handle) for handle in handles(model)]
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    step(twin)


@every_way
def test_a_copy_of_a_copy(way):
    model = wrapped()
    twin = way(way(model))
    step(twin)
    for new, old in zip(handles(way(twin)), handles(model), strict=True):
        assert torch.equal(new.flat_param, old.flat_param)


@every_way
def test_shared_parameters_stay_shared(way):
    model = wrapped(module=Tied())
    twin = way(model)
    inner = twin.module
    assert inner.embedding.weight is inner.head.weight
    assert inner.head.bias is inner.bias_again.bias
    assert inner.embedding.weight is not model.module.embedding.weight


@every_way
def test_no_gradient_is_copied_as_of_an_unsharded_module(way):
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    assert way(plain).weight.grad is None, "the oracle: what torch does with the gradients of any module"
    model = wrapped()
    step(model)
    assert all(p.grad is None for p in way(model).parameters())


@every_way
@orig_or_flat
def test_a_copy_taken_inside_no_sync_is_outside_of_it(way, orig):
    model = wrapped(orig=orig)
    step(model)  # its gradients wait, for those of the next to be added, apart from the parameters
    with model.no_sync():
        step(model)
        twin = way(model)
        assert not model._sync_gradients
    assert all(unit._sync_gradients for unit in FullyShardedDataParallel.fsdp_modules(twin))
    assert all(not hasattr(handle.flat_param, "_saved_grad_shard") for handle in handles(twin))
    assert all(handle.flat_param.grad is None for handle in handles(twin))


@every_way
@orig_or_flat
def test_what_the_user_changed_since_the_last_step_is_in_the_copy(way, orig):
    model = wrapped(orig=orig)
    step(model)
    if orig:
        first, last = model.module[0].bias, model.module[2]
        first.data = torch.full_like(first, 5.0)
        last.weight = nn.Parameter(torch.full_like(last.weight, 7.0))
        twin = way(model)
        assert not twin.module[0].bias.numel() or twin.module[0].bias[0] == 5
        flat = twin._handle.flat_param
        for value, param in ((5.0, first), (7.0, last.weight)):
            assert int((flat == value).sum()) == param.numel()
        assert twin.module[2].weight is twin._handle.flat_param._params[2]
        assert model._handle.flat_param._params[2] is not model.module[2].weight, "a query changes nothing"
    else:
        model._handle.flat_param.data.fill_(3.0)
        assert bool((way(model)._handle.flat_param == 3).all())


@every_way
def test_attributes_of_users_are_copied(way):
    model = wrapped()
    for place in (model, model._handle, model._handle.flat_param, model.module[0]):
        place.note = ["mine"]
    model._handle._needs_my_own = 5
    twin = way(model)
    for place, original in ((twin, model), (twin._handle, model._handle), (twin.module[0], model.module[0])):
        assert place.note == ["mine"]
        assert place.note is not original.note
    assert twin._handle.flat_param.note == ["mine"]
    assert twin._handle._needs_my_own == 5


@every_way
@orig_or_flat
def test_an_optimizer_copied_with_the_model_has_the_copied_parameters(way, orig):
    model = wrapped(orig=orig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    step(model)
    optimizer.step()
    check_copies(model, *way((model, optimizer)))


@every_way
@pytest.mark.parametrize(("strategy", "orig"), MODES)
def test_an_optimizer_copied_before_the_model(way, strategy, orig):
    model = wrapped(strategy, orig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    step(model)
    optimizer.step()
    twins, twin = way((optimizer, model))
    check_copies(model, twin, twins)


def check_copies(model, twin, optimizer):
    """The copied optimizer steps on the copied model, and the original is not touched by that."""
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(owned, twin.parameters(), strict=True))
    assert optimizer.state, "the step above made some"
    assert {id(p) for p in optimizer.state} <= {id(p) for p in owned}
    before = [handle.flat_param.detach().clone() for handle in handles(twin)]
    for new, old in zip(before, handles(model), strict=True):
        assert_same(new, old.flat_param)
    step(twin)
    optimizer.step()
    for new, twins, old in zip(before, handles(twin), handles(model), strict=True):
        assert not torch.equal(new, twins.flat_param)
        assert_same(new, old.flat_param)


@every_way
def test_a_module_that_contains_wrapped_ones(way):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)
            self.first = wrapped()
            self.second = wrapped("NO_SHARD", False)

        def forward(self, x):
            return self.second(self.first(self.own(x)))

    globals()["Model"] = Model  # where pickle looks for it
    Model.__qualname__ = "Model"
    model = Model()
    step(model)
    twin = way(model)
    step(twin)
    assert len(handles(twin)) == 4
    assert twin.first is not model.first
    assert twin.own.weight is not model.own.weight


@every_way
def test_an_inner_unit_alone_becomes_a_root(way):
    model = wrapped()
    step(model)
    inner = way(model.module[1])
    step(inner)
    assert inner.check_is_root()
    assert not model.module[1].check_is_root()


@pytest.mark.sweep(4)
@every_way
@every_mode
def test_a_handle_alone(way, strategy, orig):
    handle = wrapped(strategy, orig, module=nn.Linear(WIDTH, 3))._handle
    twin = way(handle)
    assert torch.equal(twin.flat_param, handle.flat_param)
    assert twin._fully_sharded_module is not handle._fully_sharded_module
    twin.init_flat_param_attributes()
    twin._training_state = flatparam.dropin.flat_param.HandleTrainingState.FORWARD
    twin.pre_unshard()
    twin.unshard()
    assert twin._fully_sharded_module.weight.shape == (3, WIDTH)


def test_copies_before_wrapping_are_plain_copies():
    plain = Tied()
    twin = copy.deepcopy(plain)
    first, second = wrapped(module=plain), wrapped(module=twin)
    assert torch.equal(first._handle.flat_param, second._handle.flat_param)
    assert first._handle.flat_param.data_ptr() != second._handle.flat_param.data_ptr()


@pytest.mark.parametrize("way", ["pickle", "torch_save"])
def test_hooks_of_batch_norm_in_mixed_precision(way):
    """torch keeps it in fp32 by hooks that are local functions, which pickle refuses."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    policy = ModuleWrapPolicy({nn.Linear})
    low = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    model = wrapped(module=module, mixed_precision=low, auto_wrap_policy=policy)
    seen = []
    for one in (WAYS[way](model), model):  # the original has been pickled by then
        norm = next(module for module in one.modules() if isinstance(module, nn.BatchNorm1d))
        norm.register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
        step(one)
    assert seen == [torch.float32] * 2


@every_way
def test_communication_hooks_and_their_state(way):
    model = wrapped()
    model.register_comm_hook(DefaultState(dist.group.WORLD), allreduce_hook)
    twin = way(model)
    assert twin._comm_hook is allreduce_hook
    assert twin._comm_hook_state is not model._comm_hook_state
    assert twin._comm_hook_state.process_group is dist.group.WORLD


@every_way
def test_a_wrapper_without_parameters_of_its_own(way):
    model = wrapped(module=nn.Sequential(wrapped(), wrapped()))
    assert model._handle is None
    step(model)
    twin = way(model)
    assert twin._handle is None
    step(twin)


@every_way
def test_the_device_handle_of_a_gpu(way, monkeypatch):
    """It is the module torch.cuda itself, which neither copy nor pickle takes; here torch.cpu stands for it."""
    monkeypatch.setattr(_FSDPDeviceHandle, "from_device", lambda device: torch.cpu)
    model = wrapped()
    assert way(model)._device_handle is way(model)._handle._device_handle is torch.cpu


@every_way
def test_switches_of_the_environment(way, monkeypatch):
    monkeypatch.setenv("FSDP_USE_FAKE_ALL_GATHER", "1")
    monkeypatch.setenv("FSDP_USE_UNSAFE_SETATTR", "1")
    model = wrapped()
    monkeypatch.undo()
    twin = way(model)
    assert twin._handle._use_fake_all_gather
    assert twin._handle._setattr_param is model._handle._setattr_param
    assert (twin._handle._fake_process_group.rank(), twin._handle._fake_process_group.size()) == (0, 2)
    assert twin._handle._fake_process_group is not model._handle._fake_process_group


def test_a_shallow_copy_of_a_wrapper_shares_everything():
    model = wrapped()
    step(model)
    twin = copy.copy(model)
    assert twin is not model
    assert twin._handle is model._handle
    assert twin._is_root is True
    with pytest.raises(TypeError, match=r"0\.weight.*copy\.deepcopy"):
        copy.copy(model._handle)


def test_averaged_model():
    model = wrapped()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    step(model)
    averaged.update_parameters(model)
    assert isinstance(averaged.module._handle, FlatParamHandle)
    step(averaged)


@every_way
@orig_or_flat
def test_device_meshes_and_parameters_that_are_tensors_of_one(way, orig):
    mesh = mesh_of_two_dimensions()
    layer = nn.Linear(WIDTH, WIDTH)
    for name, param in list(layer.named_parameters()):
        layer.register_parameter(name, nn.Parameter(distribute_tensor(param, mesh["tp"], [Shard(0)])))
    model = wrapped(orig=orig, module=layer, device_mesh=mesh["dp"])
    twin = way(way(model))
    assert twin._device_mesh == model._device_mesh
    assert twin._fsdp_extension is twin._handle._fsdp_extension is not model._fsdp_extension
    assert twin._handle.process_group is model._handle.process_group
    # as numbers: where the fake group scatters nothing there may be NaNs
    shards = [each._handle.flat_param.detach().view(torch.int32) for each in (twin, model)]
    assert torch.equal(*shards)
    with FullyShardedDataParallel.summon_full_params(twin):
        assert isinstance(twin.module.weight, DTensor)
        assert twin.module.weight.device_mesh == mesh["tp"]


@orig_or_flat
def test_deepcopy_of_a_tensor_parallel_model(orig):
    """torch's hooks of tensor parallelism are local functions, which no way of pickling takes, wrapped or not."""
    mesh = mesh_of_two_dimensions()
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model = wrapped(orig=orig, module=layers, device_mesh=mesh["dp"])
    for _ in range(2):
        twin = copy.deepcopy(model)
        step(twin)
        step(model)
    assert_same(twin._handle.flat_param, model._handle.flat_param)


def mesh_of_two_dimensions():
    start(world_size=4)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


# What it costs


@every_mode
def test_a_pickle_holds_each_shard_once(strategy, orig):
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(20)))
    model = wrapped(strategy, orig, module=layers)
    step(model)
    shard = model._handle.flat_param.numel() * 4
    assert shard < len(pickle.dumps(model)) < 1.4 * shard, "40 parameters, whose storage is the shard"


def test_a_shard_inside_other_memory_is_pickled_without_that():
    model = wrapped(orig=False, module=nn.Linear(WIDTH, WIDTH))
    flat_param = model._handle.flat_param
    flat_param.data = torch.zeros(100 * flat_param.numel())[: flat_param.numel()].copy_(flat_param.data)
    assert len(pickle.dumps(model)) < 10 * flat_param.numel() * 4


@every_mode
def test_deepcopy_allocates_the_shards_and_communicates_nothing(strategy, orig):
    model = wrapped(strategy, orig)
    step(model)
    shards = [handle.flat_param.numel() * 4 for handle in handles(model)]
    recorder = Recorder()
    with recorder.collectives(), torch.profiler.profile(profile_memory=True) as profile:
        twin = copy.deepcopy(model)
    assert recorder.events == []
    cloned = sum(event.self_cpu_memory_usage for event in profile.events() if event.name == "aten::clone")
    copies = [event for event in profile.events() if event.name == "aten::copy_"]
    assert len(copies) == len(shards), "only the shards are copied, each once"
    held = sum(handle.flat_param.untyped_storage().nbytes() for handle in handles(twin))
    assert held == sum(shards)
    assert cloned <= sum(shards)


@orig_or_flat
def test_a_freed_parameter_of_a_copy_says_which_it_is(orig):
    model = wrapped(orig=False) if not orig else wrapped()
    twin = copy.deepcopy(model)
    if orig:
        assert twin.module[0].weight.dim() == 1
    else:
        assert twin.module[0].weight.shape == (WIDTH, WIDTH)
        with pytest.raises(RuntimeError, match=r"0\.weight.*summon_full_params"):
            twin.module[0].weight + 1


# When it is refused


@every_way
def test_refused_in_forward_and_backward_with_the_units_name(way):
    model = wrapped()
    errors = []

    def attempt(*_):
        with pytest.raises(RuntimeError, match=r"cannot be copied or pickled in .*outside of forward") as caught:
            way(model)
        errors.append(str(caught.value))

    hook = model.module[0].register_forward_hook(attempt)
    output = model(torch.ones(2, WIDTH))
    output.register_hook(attempt)
    output.sum().backward()
    hook.remove()
    assert len(errors) == 2
    assert all("Sequential (0.weight, 0.bias, 2.weight, ... (4 in all))" in error for error in errors)
    way(model)


@every_way
def test_a_handle_is_refused_with_its_parameters_names(way):
    """What the wrapper's refusal cannot say, and what users of a handle alone get."""
    handle = wrapped()._handle
    handle._training_state = flatparam.dropin.flat_param.HandleTrainingState.FORWARD
    with pytest.raises(RuntimeError, match=r"0\.weight, 0\.bias, 2\.weight.* in FORWARD: do it outside of forward"):
        way(handle)


@every_way
def test_refused_where_a_forward_failed_until_the_next_one(way):
    model = wrapped()
    hook = model.module[1].module[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)
    hook.remove()
    with pytest.raises(RuntimeError, match="where an exception ended one of them, after the next forward"):
        way(model)
    step(model)
    step(way(model))


@every_way
@orig_or_flat
def test_refused_inside_summon_full_params(way, orig):
    model = wrapped(orig=orig)
    with FullyShardedDataParallel.summon_full_params(model):
        with pytest.raises(RuntimeError, match=r"copied or pickled in SUMMON_FULL_PARAMS.*summon_full_params"):
            way(model)
        with pytest.raises(RuntimeError, match=r"0\.weight.*inside summon_full_params\(\): do it before or after"):
            way(model._handle)
    way(model)


def test_summoned_parameters_can_be_copied_with_their_module():
    model = wrapped(module=nn.Linear(WIDTH, 3))
    with FullyShardedDataParallel.summon_full_params(model):
        twin = copy.deepcopy(model.module)
        assert torch.equal(twin.weight, model.module.weight)
    assert twin.weight.shape == (3, WIDTH)


def test_a_pickle_that_fails_leaves_the_model_as_it_was():
    model = wrapped()
    model.module[2].unpicklable = lambda: None
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(model)
    del model.module[2].unpicklable
    step(model)
    WAYS["pickle"](model)


# Process groups


def test_loading_needs_the_same_ranks():
    pickled = pickle.dumps(wrapped())
    stop()
    with pytest.raises(RuntimeError, match=r"rank 0 of 2.*init_process_group\(\) before loading"):
        pickle.loads(pickled)
    for rank, size in ((1, 2), (0, 3)):
        start(size, rank)
        with pytest.raises(RuntimeError, match=f"rank 0 of 2 .* is rank {rank} of {size}"):
            pickle.loads(pickled)
    start()
    assert pickle.loads(pickled).process_group is dist.group.WORLD


def test_a_group_is_found_by_its_ranks():
    alone, both = dist.new_group([0]), dist.new_group([0, 1])
    model = wrapped(process_group=alone)
    other = wrapped(process_group=both)
    assert WAYS["pickle"](model).process_group is alone
    assert WAYS["pickle"](other).process_group is both, "the name decides between groups of the same ranks"
    pickled, alone_name = pickle.dumps(model), alone.group_name
    start()
    with pytest.raises(RuntimeError, match=r"of ranks \[0\].*new_group\(\[0\]\) before loading"):
        pickle.loads(pickled)
    dist.new_group([0, 1])
    dist.new_group([0, 1])
    again = dist.new_group([0])
    assert again.group_name != alone_name
    assert pickle.loads(pickled).process_group is again


def test_a_pickle_names_only_modules_that_can_be_imported():
    """What a pickle refers to is torch's and flatparam's: no local class, no path of a test."""
    names = {
        str(argument).split(" ")[0].split(".")[0]
        for opcode, argument, _ in pickletools.genops(pickle.dumps(wrapped(), 2))
        if opcode.name == "GLOBAL"
    }
    assert names <= {"torch", "flatparam", "collections", "builtins", "__builtin__", "_codecs", "copyreg", "copy_reg"}


# torch's own handle


def test_models_on_torchs_handle_are_treated_as_before():
    flatparam.uninstall()
    model = wrapped()
    assert not isinstance(model._handle, FlatParamHandle)
    outcomes = []
    for _ in range(2):
        for way in WAYS.values():
            with pytest.raises((TypeError, RuntimeError, AttributeError)) as caught:
                way(model)
            outcomes.append((type(caught.value), str(caught.value)))
        flatparam.install()
    assert outcomes[:3] == outcomes[3:]


def test_uninstall_takes_the_methods_away():
    names = {"__copy__", "__deepcopy__", "__reduce_ex__"}
    assert names <= vars(FullyShardedDataParallel).keys()
    assert hasattr(nn.Parameter.__reduce_ex__, "__wrapped__")
    flatparam.uninstall()
    assert names.isdisjoint(vars(FullyShardedDataParallel))
    assert not hasattr(nn.Parameter.__reduce_ex__, "__wrapped__")
    flatparam.install()
