"""Making units: policies, ignored state, meta modules, equal starts, grids of ranks, copies.

Promises:
- each wrap policy gives the expected units, in both generations of its call; one may override settings; a module
  under two names: `test_policies`
- ignored modules and parameters keep names and shapes, have gradients of their rank alone, and are in no shard:
  `test_ignored_states`, `test_fsdp_every_strategy.py::test_corners`
- `sync_module_states` makes ranks that start apart equal to the first, on a line and on a grid of 4:
  `test_how_it_starts`, `test_grids_of_ranks`
- meta modules: `param_init_fn` once a module, the default way, a class without `reset_parameters` is named:
  `test_how_it_starts`
- hybrids on a grid of 2 by 2, by groups and by mesh; grids of one row or column; other strategies refuse a 2-D mesh:
  `test_grids_of_ranks`, `test_what_a_grid_refuses`, `test_thin_grids_average_over_all_ranks`
- CPU offload on a host with nothing else, accumulation of any kind: `test_how_it_starts`,
  `test_fsdp_every_strategy.py::test_corners_of_each_strategy`
- batch norm stays in fp32: `test_batch_norm_stays_in_full_precision`
- a dtype set before or after the first forward; queries of a child change nothing; wrapping a used root; copies:
  `test_copies_moves_and_replacements`
- where torch 2.13 goes wrong: a hybrid of one column never reduces: `test_thin_grids_average_over_all_ranks`
- where torch 2.13 goes wrong: a 2-D mesh with a strategy that is no hybrid reduces over one dimension:
  `test_what_a_grid_refuses`
- where torch 2.13 goes wrong: a parameter of two units is untied, or dies of its size:
  `test_a_parameter_of_two_units`
- where torch 2.13 goes wrong: a query of a child before the first forward makes it the root for good:
  `test_copies_moves_and_replacements`
- where torch 2.13 goes wrong: a module under two names is wrapped under one: `test_policies`
- where torch 2.13 goes wrong: `.double()` after the first forward: `test_copies_moves_and_replacements`
"""

import copy
import itertools
import os
import pickle
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    Averaged,
    Block,
    Model,
    assert_same,
    assert_same_grads,
    data,
    first_rank_warns,
    full_grads,
    full_params,
    loss_of,
    make,
    wrap_blocks,
)
from gloo import note, run_ranks
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from flatparam import CPUOffload, MixedPrecision, Placement, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp import defer_init
from flatparam.fsdp.wrapper import materialize

pytestmark = pytest.mark.multiprocess


def units(model):
    return [unit.module for unit in FSDP.fsdp_modules(model)]


def train(model, steps=2, ranks=2, base=0, module=None):
    """SGD steps of ``model`` and of the oracle; fails unless they agree bit for bit."""
    module = make() if module is None else module
    oracle = Averaged(module, ranks)
    ours, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, module))
    for step in range(base, base + steps):
        loss_of(model, data(step)).backward()
        oracle.backward(lambda rank, step=step: [data(step, rank)])
        for optim in (ours, plain):
            optim.step()
            optim.zero_grad()
    assert_same(model, module)
    return module


def old_policy(module, recurse, unwrapped_params, wanted=Block):
    """As torch 1.12 called policies."""
    assert unwrapped_params >= 0
    return recurse or isinstance(module, wanted)


def policies():
    blocks = ModuleWrapPolicy({Block})

    def by_class(cls):
        return lambda module, recurse, nonwrapped_numel: transformer_auto_wrap_policy(
            module, recurse, nonwrapped_numel, transformer_layer_cls={cls}
        )

    def by_lambda(module, recurse, nonwrapped_numel):
        return lambda_auto_wrap_policy(module, recurse, nonwrapped_numel, lambda m: isinstance(m, Block))

    def by_size(module, recurse, nonwrapped_numel):
        return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=100)

    for policy in (blocks, by_class(Block), by_lambda, old_policy, by_size):
        note(str(policy))
        model = FSDP(make(), auto_wrap_policy=policy, use_orig_params=True)
        assert [type(module) for module in units(model)] == [Model, Block, Block, Block]
        train(model)
    model = FSDP(make(), auto_wrap_policy=always_wrap_policy)
    assert len(units(model)) == 1 + 1 + 1 + 3 * 3 + 1  # all but the ModuleList's blocks' parents are in it, too
    train(model)
    other = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    model = FSDP(
        make(), auto_wrap_policy=CustomPolicy(lambda m: other if isinstance(m, Block) else type(m) is nn.Linear)
    )
    strategies = {type(unit.module): unit.sharding_strategy.name for unit in FSDP.fsdp_modules(model)}
    assert strategies == {Model: "FULL_SHARD", Block: "SHARD_GRAD_OP", nn.Linear: "FULL_SHARD"}
    train(model)
    with enable_wrap(wrapper_cls=FSDP, use_orig_params=True):
        module = make()
        module.blocks[1] = wrap(module.blocks[1])
        model = wrap(module)
    assert [type(module) for module in units(model)] == [Model, Block]
    train(model)

    twice = make()  # one module under two names: every reference becomes the unit
    twice.again = twice.blocks[1]
    model = FSDP(twice, auto_wrap_policy=blocks)
    assert model.module.again is model.module.blocks[1]
    assert isinstance(model.again, FSDP)
    train(model)

    with pytest.raises(ValueError, match="already"):
        FSDP(wrap_blocks(make()).module, auto_wrap_policy=blocks)
    with pytest.raises(TypeError, match="auto_wrap_policy"):
        FSDP(make(), auto_wrap_policy=3)


def test_policies():
    run_ranks(policies, 2)


def ignoring():
    rank = dist.get_rank()
    for uo, by_module in itertools.product((False, True), (False, True)):
        note(f"uo={uo} by_module={by_module}")
        module = make()
        inner = module.blocks[1].inner
        ignored = [inner] if by_module else list(inner.parameters())
        model = wrap_blocks(module, use_orig_params=uo, ignored_states=ignored)
        name = "_fsdp_wrapped_module.blocks.1._fsdp_wrapped_module.inner.weight"
        assert dict(model.named_parameters())[name] is inner.weight
        assert inner.weight.shape == (11, 5)
        loss_of(model, data(0)).backward()
        plain = make()
        loss_of(plain, data(0)).backward()
        assert torch.equal(inner.weight.grad, plain.blocks[1].inner.weight.grad)  # of this rank's data alone
        assert torch.equal(model.state_dict()["blocks.1.inner.weight"], inner.weight)
        assert model.state_dict()["blocks.1.inner.weight"].shape == (11, 5)
    with pytest.raises(ValueError, match=r"nn\.Parameter"):
        FSDP(make(), ignored_states=[make(), nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=r"ignored_modules expects nn.Module list .* types \[.*Parameter"):
        FSDP(make(), ignored_modules=[nn.Parameter(torch.ones(1))])
    wrapped = wrap_blocks(make())
    with pytest.raises(ValueError, match="FSDP modules"):
        FSDP(nn.Sequential(wrapped), ignored_modules=[wrapped])
    assert rank < 2


class Alone:
    """A group of this process, which is none of torch's."""

    def rank(self):
        return 0

    def size(self):
        return 1


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"])
def test_a_group_of_one_rank_is_asked_for_nothing(strategy):
    """So torch.distributed need not be there, and training is that of the bare module."""
    assert not dist.is_initialized()
    group, module = Alone(), make()
    arguments = {"process_group": group, "sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = wrap_blocks(make(), **arguments)
    switches = strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    told = f"FSDP is switching to use `NO_SHARD` instead of ShardingStrategy.{strategy} since the world size is 1."
    assert {str(each.message) for each in said} == ({told} if switches else set())
    assert model.sharding_strategy.name == ("NO_SHARD" if switches else strategy)
    assert (model.process_group, model.rank, model.world_size) == (group, 0, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, module)]
    for step, (each, optimizer) in itertools.product(range(2), zip((model, module), optimizers, strict=True)):
        optimizer.zero_grad()
        loss_of(each, data(step, 0)).backward()
        optimizer.step()
    assert_same(copy.deepcopy(model), module)
    loaded = pickle.loads(pickle.dumps(model))
    assert_same(loaded, module)
    other = mock.Mock(rank=lambda: 0, size=lambda: 2)
    with pytest.raises(ValueError, match="expected a process group that this rank is in, got <Mock"):
        FSDP(make(), process_group=other)


def groups_of_one():
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model = FSDP(make(), process_group=group, sharding_strategy=ShardingStrategy[strategy])
        assert (model.process_group, model.rank, model.world_size) == (group, 0, 1)


def test_groups_of_one_rank_in_a_world_of_two():
    simulate_ranks(groups_of_one, 2)


def frozen_beside_trained(segments, use_orig_params):
    module = make()
    module.blocks[1].scale.requires_grad_(False)
    arguments = {"process_group": Alone(), "use_orig_params": use_orig_params, "segments": segments}
    arguments["sharding_strategy"] = ShardingStrategy.NO_SHARD  # others warn that there is one rank
    return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}), **arguments)


def test_frozen_beside_trained_parameters_are_told_of():
    numel = sum(param.numel() for param in Block(5).parameters())
    told = rf"1 of 4 units \(Block, ...\) have frozen parameters .* {numel} elements where {numel - 5} train"
    with pytest.warns(UserWarning, match=told + r".*segments=True") as warned:
        frozen_beside_trained(False, True)
    assert [warning.filename for warning in warned] == [__file__]
    with pytest.raises(ValueError, match=r"uniform `requires_grad`.*`scale` has False.*segments=True"):
        frozen_beside_trained(False, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for use_orig_params in (False, True):
            frozen_beside_trained(True, use_orig_params)


def test_ignored_states():
    simulate_ranks(ignoring, 2)


class Odd(nn.Module):
    """Parameters and a buffer without reset_parameters."""

    def __init__(self, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device=device))
        self.register_buffer("seen", torch.ones(2, device=device))

    def forward(self, x):
        return x * self.weight


def with_buffers(seed):
    """A module with buffers of many kinds, which no two seeds give alike."""
    module = nn.Linear(3, 3)
    torch.manual_seed(seed)
    for dtype in (torch.float32, torch.bool, torch.int64, torch.complex64, torch.bfloat16, torch.float32, torch.uint8):
        value = (20 * torch.randn(5, 3)).to(torch.int8 if dtype is torch.uint8 else dtype).to(dtype)
        for kind, buffer in {"": value, "turned": value.t().contiguous().t(), "one": value[2, 1].clone()}.items():
            module.register_buffer(f"{kind}{len(module._buffers)}", buffer)
    return module


def starting():
    rank = dist.get_rank()
    for uo in (False, True):  # ranks that start apart are made equal to the first
        module = make(seed=10 + rank)
        module.register_buffer("mean", torch.full((3,), float(rank)))
        model = wrap_blocks(module, sync_module_states=True, use_orig_params=uo)
        assert_same(model, make(seed=10))
        assert model.mean.tolist() == [0.0, 0.0, 0.0]
        for most in (1, 40, 2**28):  # bytes sent at a time
            module, first = with_buffers(rank), with_buffers(0)
            with mock.patch.object(materialize, "_BUCKET_BYTES", most):
                model = FSDP(module, sync_module_states=True, use_orig_params=uo)
            for name, value in first.named_buffers():
                found = model.module.get_buffer(name)
                assert torch.equal(found, value), (most, name)
                assert found.stride() == value.stride(), (most, name)

        called = []

        def fill(module, called=called):
            called.append(module)
            for name, param in list(module._parameters.items()):
                if param is not None:
                    module._parameters[name] = nn.Parameter(torch.full(param.shape, 0.25))

        with torch.device("meta"):
            meta = Model()
        modules = list(meta.modules())
        model = wrap_blocks(meta, param_init_fn=fill, use_orig_params=uo)
        assert sorted(map(id, called)) == sorted(map(id, modules))
        reference = make()
        for param in reference.parameters():
            param.data.fill_(0.25)
        assert_same(model, reference)
        train(model, module=reference)

        with torch.device("meta"):
            meta = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        torch.manual_seed(3)
        model = FSDP(meta, use_orig_params=uo)
        torch.manual_seed(3)
        reference = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        assert_same(model, reference)
        with pytest.raises(AttributeError, match="Odd"):
            FSDP(Odd(device="meta"))
        with pytest.raises(ValueError, match="meta device"):
            FSDP(Odd(device="meta"), param_init_fn=lambda module: None)
        with pytest.raises(ValueError, match="callable"):
            FSDP(Odd(), param_init_fn=3)
        model = wrap_blocks(make(), cpu_offload=CPUOffload(offload_params=True), device_id=torch.device("cpu"))
        train(model)


def test_how_it_starts():
    simulate_ranks(starting, 2)


def machines(strategy):
    """Without groups the ranks of a machine share parameters, and those across machines hold the same shard."""
    arguments = {"sharding_strategy": ShardingStrategy[strategy], "auto_wrap_policy": ModuleWrapPolicy({Block})}
    model = FSDP(make(), use_orig_params=True, **arguments)
    placement, me = model.placement, dist.get_rank()
    ranks = [dist.get_process_group_ranks(group) for group in (placement.param, placement.replicate) if group]
    assert ranks[0] == [me // 2 * 2, me // 2 * 2 + 1]
    assert ranks[1:] == ([] if strategy == "LAYER_ZERO" else [[me % 2, me % 2 + 2]])
    assert len(FSDP.fsdp_modules(model)) == 4
    again = FSDP.fsdp_modules(FSDP(make(), **arguments))
    assert {unit.process_group for unit in (*FSDP.fsdp_modules(model), *again)} == {model.process_group}
    reference = make()
    oracle = Averaged(reference, 4)
    loss_of(model, data(0)).backward()
    oracle.backward(lambda rank: [data(0, rank)])
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, dict(reference.named_parameters())[name].grad, rtol=1e-5, atol=1e-6, msg=name)
    with pytest.raises(RuntimeError, match="Communication hook is not supported for hybrid strategies"):
        again[0].register_comm_hook(None, print)
    with pytest.raises(ValueError, match="requires explicit specification of process group or device_mesh"):
        FSDP(make(), sharding_strategy=ShardingStrategy[strategy])  # units that are wrapped one by one


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "LAYER_ZERO"])
def test_machines_make_a_grid_of_ranks(strategy):
    simulate_ranks(machines, 4, strategy, environment={"LOCAL_WORLD_SIZE": "2"})


def grids(strategy, uo, by_mesh):
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = (rows[rank // 2], columns[rank % 2])
    mesh = init_device_mesh("cpu", (2, 2))
    note(f"{strategy} uo={uo} by_mesh={by_mesh}")
    arguments = {"device_mesh": mesh} if by_mesh else {"process_group": groups}
    module = make(seed=20 + rank)
    model = wrap_blocks(
        module,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=uo,
        sync_module_states=True,
        **arguments,
    )
    reference = make(seed=20)
    assert_same(model, reference)
    assert all(unit.world_size == 2 for unit in FSDP.fsdp_modules(model))
    oracle = Averaged(reference, 4)
    ours, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    for step in range(2):
        with model.no_sync():
            loss_of(model, data(50 + step)).backward()
        loss_of(model, data(step)).backward()
        oracle.backward(lambda r, step=step: [data(50 + step, r), data(step, r)])
        norm = model.clip_grad_norm_(0.5)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        for optim in (ours, plain):
            optim.step()
            optim.zero_grad()
    for (name, value), wanted in zip(full_params(model).items(), reference.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6, msg=name)


def refusals_of_grids():
    """Groups and meshes that a strategy cannot use."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = (rows[rank // 2], columns[rank % 2])
    mesh = init_device_mesh("cpu", (2, 2))
    with pytest.raises(ValueError, match="2-D"):
        FSDP(make(), device_mesh=mesh)
    for said in (None, "3"):
        with (
            mock.patch.dict(os.environ, {} if said is None else {"LOCAL_WORLD_SIZE": said}),
            pytest.raises(ValueError, match=r"shard group, replicate group.*LOCAL_WORLD_SIZE"),
        ):
            FSDP(make(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, auto_wrap_policy=always_wrap_policy)
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "many"}),
        pytest.raises(ValueError, match=r"expected LOCAL_WORLD_SIZE .* got 'many'"),
    ):
        FSDP(make(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, auto_wrap_policy=always_wrap_policy)
    with pytest.raises(ValueError, match="LAYER_ZERO: the zero1 group must hold the zero3 group"):
        FSDP(make(), sharding_strategy=ShardingStrategy.LAYER_ZERO, process_group=groups)
    with pytest.raises(ValueError, match="Placement: the zero1 group must hold the zero3 group"):
        FSDP(make(), placement=Placement(param=groups[0], grad=groups[1], optim=groups[1]))
    with pytest.raises(ValueError, match="both"):
        FSDP(make(), device_mesh=mesh, process_group=groups[0])
    with pytest.raises(ValueError, match="rank"):
        FSDP(make(), process_group=rows[1 - rank // 2])
    model = FSDP(make(), placement=Placement(groups[0], groups[0], groups[0], groups[1]))
    assert model.world_size == 2
    with pytest.raises(ValueError, match="one group"):
        Placement(param=groups[0], grad=groups[0], optim=groups[1])


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("strategy", "uo", "by_mesh"),
    list(itertools.product(("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"), (False, True), (False, True))),
)
def test_grids_of_ranks(strategy, uo, by_mesh):
    simulate_ranks(grids, 4, strategy, uo, by_mesh)


def test_what_a_grid_refuses():
    simulate_ranks(refusals_of_grids, 4)


def thin_grids():
    """A grid with one row or one column still averages over all ranks."""
    for shape, strategy, uo in itertools.product(
        ((1, 2), (2, 1)), ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"), (False, True)
    ):
        mesh = init_device_mesh("cpu", shape)
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo, device_mesh=mesh)
        train(model)


def test_thin_grids_average_over_all_ranks():
    simulate_ranks(thin_grids, 2)


def copies():
    for uo, strategy in itertools.product((False, True), ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")):
        note(f"uo={uo} {strategy}")
        model = wrap_blocks(make(), use_orig_params=uo, sharding_strategy=ShardingStrategy[strategy])
        reference = train(model, steps=1)
        copied = copy.deepcopy(model)
        assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
        again = copy.deepcopy(reference)
        train(model, base=5, module=reference)
        assert_same(copied, again)
        train(copied, base=9, module=again)
        assert_same(model, reference)

        # queries of a child change nothing, and a used root may be wrapped
        child = FSDP(make().blocks[0], use_orig_params=uo)
        assert child.check_is_root()
        child(torch.ones(2, 5)).sum().backward()
        child.zero_grad()
        parts = make()
        parts.blocks[0] = child
        parts.blocks[0].check_is_root()
        outer = FSDP(parts, use_orig_params=uo)
        assert not child.check_is_root()
        train(outer)

        # a dtype set before, and after, the first forward
        model = wrap_blocks(make(), use_orig_params=uo, sharding_strategy=ShardingStrategy[strategy])
        wide = make().double()
        for step in range(2):
            model = model.double()
            x = data(step).double()
            loss_of(model, x).backward()
            losses = [loss_of(wide, data(step, r).double()) for r in range(2)]
            grads = [torch.autograd.grad(loss, list(wide.parameters())) for loss in losses]
            for param, a, b in zip(wide.parameters(), *grads, strict=True):
                param.grad = a / 2 + b / 2
            assert_same_grads(model, wide)
            model.zero_grad()
            with model.no_sync():
                loss_of(model, x).backward()
            if strategy == "NO_SHARD":
                model.float().double()
            else:
                with pytest.raises(RuntimeError, match="changing device or dtype: gradients of the unit of Model come"):
                    model.float()
                model.double()  # which it is
            model.zero_grad()
            if step == 0:
                model, wide = model.float(), wide.float().double()
                loss_of(model, data(7)).backward()
                model.zero_grad()

        # a parameter whose data, or which itself, was replaced
        if uo:
            reference = make(seed=4)
            model = wrap_blocks(make(), use_orig_params=True, sharding_strategy=ShardingStrategy[strategy])
            loss_of(model, data(0))
            with torch.no_grad():
                loss_of(model, data(0))
            for unit in FSDP.fsdp_modules(model):
                for flat_param in unit._unit.flat_params:
                    for original in flat_param.originals:
                        new = dict(reference.named_parameters())
                        name = next(n for n, p in model.named_parameters() if p is original.param).replace(
                            "_fsdp_wrapped_module.", ""
                        )
                        value = new[name].detach().clone()
                        if name.endswith("bias"):
                            place = original.names[0]
                            setattr(place.module, place.name, nn.Parameter(value))
                        else:
                            original.param.data = value
            loss_of(model, data(0)).backward()
            assert_same(model, reference)
    model = FSDP(nn.Linear(3, 3), use_orig_params=True)
    model.module.weight.data = torch.ones(7, 7)
    with pytest.raises(ValueError, match="shape"):
        model(torch.ones(1, 3))


def test_copies_moves_and_replacements():
    simulate_ranks(copies, 2)


class Pair(nn.Module):
    """A head that is tied to its embedding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.body(self.table(x)))


def ties():
    """A parameter of two units is refused before anything is wrapped, naming both, whichever comes first."""
    for uo, classes in itertools.product((False, True), ({nn.Embedding, nn.Linear}, {nn.Linear}, {nn.Embedding})):
        note(f"uo={uo} {classes}")
        module = Pair()
        before = [module.table, module.body, module.head, module.head.weight.clone()]
        with pytest.raises(
            ValueError, match=r"`head\.weight` .* is shared with `table\.weight` of .*: each would train"
        ):
            FSDP(module, auto_wrap_policy=ModuleWrapPolicy(classes), use_orig_params=uo)
        assert [module.table, module.body, module.head] == before[:3]
        assert torch.equal(module.head.weight, before[3])
        assert module.head.weight is module.table.weight
        assert len(units(FSDP(module, use_orig_params=uo))) == 1
        for first, second in (("table", "head"), ("head", "table")):
            module = Pair()
            setattr(module, first, FSDP(getattr(module, first), use_orig_params=uo))
            kinds = {"table": "Embedding", "head": "Linear"}
            message = rf"`weight` of a {kinds[second]} .* is shared with `weight` of the unit of {kinds[first]}"
            with pytest.raises(ValueError, match=message):
                FSDP(getattr(module, second), use_orig_params=uo)
            with pytest.raises(ValueError, match=message):
                FSDP(module, use_orig_params=uo)
        # ignored, or of a unit that is no more, it is nobody's
        module = Pair()
        FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), ignored_states=[module.table.weight])
        module = Pair()
        FSDP(module, use_orig_params=uo)
        below = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
        below[1][0].weight = below[0].weight
        with pytest.raises(ValueError, match=r"`1\.0\.weight` .* is shared with `0\.weight`"):
            FSDP(below, auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.Sequential}), use_orig_params=uo)


def test_a_parameter_of_two_units():
    simulate_ranks(ties, 2)


def batch_norm():
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    for policy in (ModuleWrapPolicy({nn.Linear}), always_wrap_policy):
        layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        with first_rank_warns("BatchNorm"):
            model = FSDP(layers, auto_wrap_policy=policy, mixed_precision=low)
        seen = []
        norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d))
        norm.register_forward_hook(
            lambda m, args, out, seen=seen: seen.append((args[0].dtype, m.weight.dtype, m.running_mean.dtype))
        )
        assert model(torch.randn(4, 3)).dtype == torch.bfloat16
        assert seen == [(torch.float32,) * 3]


def test_batch_norm_stays_in_full_precision():
    simulate_ranks(batch_norm, 2)


def a_build_for_an_absent_device():
    """torch built for CUDA, on a machine without: it names the device unless it is asked to look."""

    def named(check_available=False):
        return None if check_available else torch.device("cuda")

    with mock.patch("torch.accelerator.current_accelerator", named):
        with pytest.raises(ValueError, match="device_id=0 names an accelerator, there is none"):
            FSDP(nn.Linear(2, 2), device_id=0)
        for init in (None, defer_init):
            model = FSDP(nn.Linear(2, 2, device="meta"), param_init_fn=init)
            assert {param.device.type for param in model.parameters()} == {"cpu"}


def test_an_accelerator_that_torch_was_built_for_is_not_there():
    simulate_ranks(a_build_for_an_absent_device, 1)
