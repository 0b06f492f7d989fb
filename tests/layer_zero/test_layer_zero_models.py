"""LAYER_ZERO under models and programs of all kinds, its degenerate cases, its groups, and its full state dicts.

Promises:
- parameters unused on some ranks; units skipped, called twice, frozen; a tail returned unchanged:
  `test_models_and_programs_of_all_kinds` (`uneven`)
- forwards before backwards, two models at once, checkpoints in and around units:
  `test_models_and_programs_of_all_kinds` (`interleaved`)
- a step that raised on all ranks leaves nothing; units without parameters; dtypes that travel, double precision:
  `test_models_and_programs_of_all_kinds` (`exceptions`, `empty_units`, `precisions`)
- parameters are the same objects in one order; state dicts are whole; norms with ignored and shared parameters:
  `test_groups_norms_and_what_is_refused` (`objects`, `clipping`)
- inner groups of neighbours, strided, by mesh, by placement train alike; nested refreshes from its column alone:
  `test_groups_norms_and_what_is_refused` (`grids`, `refreshes`)
- wrong groups and settings are refused on all ranks before anything moves; ranks that skip a unit raise:
  `test_groups_norms_and_what_is_refused` (`refused`, `orders`)
- P = 1 is ZERO_1, P = W is FULL_SHARD and torch's, bit for bit and in collectives; W = 1 communicates nothing:
  `test_degenerate_groups_are_the_plain_strategies`, `test_one_inner_group_of_all_ranks_gives_torchs_bits`,
  `test_one_rank_communicates_nothing`
- full state dicts go from any groups to any: `test_full_state_dicts_go_from_any_groups_to_any`
"""

import contextlib
import copy
import functools
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Block, Model, counts_of, data, full_grads, full_params, have_memory, loss_of, make, wrap_blocks
from gloo import fake_world, note, run_ranks
from layer_zero_ranks import MODES, counted, group_of, layer_zero, micro_batches, pair, rows, run_of
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.c_testing import _C_testing
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, Placement, ShardingStrategy
from flatparam.fsdp import OrderError

pytestmark = pytest.mark.multiprocess

LOW = MixedPrecision(param_dtype=torch.bfloat16)


def in_turn(checks):
    for check in checks:
        note(check.__name__)
        check()
        dist.barrier()


def hold_back(model, x):
    with model.no_sync():
        loss_of(model, x).backward()


def close(model, grads, what=""):
    """Gradients as given, None as zeros."""
    for (name, found), wanted in zip(full_grads(model).items(), grads, strict=True):
        if wanted is None or not wanted.any():
            assert found is None or not found.any(), (what, name)
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=f"{what} {name}")


def mean_grads(module, losses):
    """The mean over ranks of the gradients of ``losses(rank)``, with None where no rank has any."""
    params = list(module.parameters())
    trained = [param for param in params if param.requires_grad]
    total = [None] * len(params)
    world = dist.get_world_size()
    for rank in range(world):
        grads = iter(torch.autograd.grad(losses(rank), trained, allow_unused=True))
        for i, param in enumerate(params):
            grad = next(grads) if param.requires_grad else None
            if grad is not None:
                total[i] = grad / world if total[i] is None else total[i] + grad / world
    return total


class Uneven(nn.Module):
    """A block called twice, one that may be skipped, one whose output is not used, a frozen one, and a tail that is a
    unit whose output the root returns unchanged."""

    def __init__(self, frozen):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.extra = nn.Parameter(torch.ones(5))
        self.blocks = nn.ModuleList([Block(5) for _ in range(4)])
        self.skip = False
        self.use_extra = True
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        if self.use_extra:
            x = x * self.extra
        x = self.blocks[0](x)
        if not self.skip:
            x = self.blocks[1](x)
        x = self.blocks[0](x)
        self.blocks[2](x)
        return self.blocks[3](x)


def uneven():
    """Unused parameters on some ranks, skipped and frozen units; the same collectives on every rank."""
    rank = dist.get_rank()
    frozen = [(), ("first", "blocks.0"), ("blocks.1",), ("blocks.3",), ("blocks.0.inner",)]
    for (mode, parts), uo in itertools.product(itertools.product(MODES, frozen), (False, True)):
        if uo != (not parts or parts[0] in ("first", "blocks.0.inner")):
            continue  # one flat parameter is all frozen or not at all
        what = f"{mode} frozen={parts} uo={uo}"
        note(what)
        module = make(cls=Uneven, frozen=parts)
        model = layer_zero(2, mode, make(cls=Uneven, frozen=parts), use_orig_params=uo)
        reductions = []
        for step, (skip, used_by) in enumerate([(False, range(4)), (True, (0, 2)), (False, ()), (False, (1,))]):
            model.module.skip = skip
            model.module.use_extra = rank in used_by
            before = counts_of(model).reductions
            hold_back(model, data(step))
            model.module.skip = module.skip = True
            loss_of(model, data(10 + step)).backward()

            def losses(rank, step=step, skip=skip, used_by=used_by, module=module):
                module.use_extra = rank in used_by
                module.skip = skip
                total = loss_of(module, data(step, rank))
                module.skip = True
                return total + loss_of(module, data(10 + step, rank))

            close(model, mean_grads(module, losses), what)
            reductions.append(counts_of(model).reductions - before)
            model.zero_grad()
        counts = [None] * 4
        dist.all_gather_object(counts, reductions)
        assert counts == [reductions] * 4


def total_loss(module, steps, rank):
    return sum(loss_of(module, data(step, rank)) for step in steps)


def interleaved():
    """Several forwards before their backwards; two models at once; checkpoints within units and around them."""
    for mode, uo in itertools.product(MODES, (False, True)):
        note(f"{mode} {uo}")
        module = make()
        pipelined, plain = (layer_zero(2, mode, use_orig_params=uo) for _ in range(2))
        losses = [loss_of(pipelined, data(i)) for i in range(2)]
        with pipelined.no_sync():
            losses[0].backward()
            losses.append(loss_of(pipelined, data(2)))
            losses[1].backward()
        losses[2].backward()
        micro_batches(plain, [data(i) for i in range(3)])
        for a, b in zip(full_grads(pipelined).values(), full_grads(plain).values(), strict=True):
            assert torch.equal(a, b)
        # synced in between: the masters have not changed, so what is gathered anew is the same
        pipelined.zero_grad()
        losses = [loss_of(pipelined, data(i)) for i in range(2)]
        losses[0].backward()
        losses.append(loss_of(pipelined, data(2)))
        losses[1].backward()
        losses[2].backward()
        close(pipelined, mean_grads(module, functools.partial(total_loss, module, range(3))))
        # two models, whose backwards come between each other's
        other = layer_zero(2, mode, make(seed=1), use_orig_params=uo)
        plain.zero_grad()
        outputs = [loss_of(other, data(0)), loss_of(plain, data(0)), loss_of(other, data(1)), loss_of(plain, data(1))]
        (outputs[0] + outputs[1]).backward()
        outputs[3].backward()
        outputs[2].backward()
        for model, bare in ((plain, module), (other, make(seed=1))):
            close(model, mean_grads(bare, functools.partial(total_loss, bare, (0, 1))))
        for around, impl in itertools.product((uo,), CheckpointImpl):
            model = make()
            for i, block in enumerate(model.blocks):
                wrapped = block if around else checkpoint_wrapper(block, checkpoint_impl=impl)
                unit = layer_zero(2, mode, wrapped, FSDP, use_orig_params=uo)
                model.blocks[i] = checkpoint_wrapper(unit, checkpoint_impl=impl) if around else unit
            model = layer_zero(2, mode, model, FSDP, use_orig_params=uo)
            before = None
            for step in range(2):
                model.zero_grad()
                hold_back(model, data(step))
                before = counts_of(model).gathers
                loss_of(model, data(10 + step)).backward()
                wanted = mean_grads(module, functools.partial(total_loss, module, (step, 10 + step)))
                close(model, wanted, f"around={around} {impl}")
            assert counts_of(model).gathers - before == 1 + 2 * 3


def empty_units():
    """Units that have no parameters, the last one and the root among them; the flat parameters keep no gradient."""
    for (mode, inner), uo in itertools.product((("LAYER_ZERO", 1), *((mode, 2) for mode in MODES)), (False, True)):
        module = make(cls=lambda: nn.Sequential(nn.Tanh(), nn.Linear(3, 5), nn.Tanh()))
        arguments = {"use_orig_params": uo, "offload_grads": uo and inner > 1}
        layers = [layer_zero(inner, mode, copy.deepcopy(layer), FSDP, **arguments) for layer in module]
        model = layer_zero(inner, mode, nn.Sequential(*layers), FSDP, **arguments)
        for _ in range(2):
            hold_back(model, data(0))
            loss_of(model, data(1)).backward()
            close(model, mean_grads(module, functools.partial(total_loss, module, (0, 1))), f"{mode} {inner} {uo}")
            model.zero_grad()
            assert all(part.flat.grad is None for unit in FSDP.fsdp_modules(model) for part in unit._unit.flat_params)


def precisions():
    """reduce_dtype is what travels, once a step; double precision stays."""
    for mode in MODES:
        bf16, double = torch.bfloat16, make().double()
        model = layer_zero(2, mode, mixed_precision=MixedPrecision(param_dtype=bf16, reduce_dtype=bf16))
        with counted(2) as log:
            micro_batches(model, [data(0), data(1)])
        assert {dtype for _, _, _, dtype in log} == {bf16}
        assert all(param.dtype == torch.float32 == param.grad.dtype for param in model.parameters())
        model = layer_zero(2, mode, make().double())
        optims = [torch.optim.Adam(m.parameters(), 0.01) for m in (model, double)]
        for step in range(2):
            micro_batches(model, [data(step).double(), data(9).double()])
            for rank in range(4):
                for x in (data(step, rank), data(9, rank)):
                    (loss_of(double, x.double()) / 4).backward()
            for optim in optims:
                optim.step()
                optim.zero_grad()
        for value, param in zip(full_params(model).values(), double.parameters(), strict=True):
            torch.testing.assert_close(value, param, rtol=1e-12, atol=1e-13)


class Failing(Model):
    fails = None

    def forward(self, x):
        if self.fails == "forward":
            self.blocks[0](self.first(x))
            raise ArithmeticError("forward")
        x = self.first(x)
        if self.fails == "backward":
            x.register_hook(self.fail)  # when some units are reduced
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def fail(self, grad):
        raise ArithmeticError("backward")


def exceptions():
    """A step that raised, on all ranks, then a good one, which is as if the first had not been."""
    for (mode, uo), moment in itertools.product(itertools.product(MODES, (False, True)), ("forward", "backward")):
        note(f"{mode} {uo} {moment}")
        failed, good = (layer_zero(2, mode, make(cls=Failing), use_orig_params=uo) for _ in range(2))
        for model in (failed, good):
            hold_back(model, data(0))
            model.zero_grad()
        failed.module.fails = moment
        with pytest.raises(ArithmeticError):
            loss_of(failed, data(0)).backward()
        failed.module.fails = None
        failed.zero_grad()
        for model in (failed, good):
            optim = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                micro_batches(model, [data(step), data(10 + step)])
                optim.step()
                optim.zero_grad()
        wanted = full_params(good)
        for name, value in full_params(failed).items():
            assert torch.equal(value, wanted[name]), (mode, uo, moment, name)
        # one rank alone does not see what the others have: all gather anew
        if dist.get_rank() == 1:
            run_of(failed).recover()
        before = counts_of(failed).refreshes
        with torch.no_grad():
            assert torch.equal(failed(data(0)), good(data(0)))
        assert counts_of(failed).refreshes - before == 4


def objects():
    """Parameters are the same objects in the same order whatever happens, and their pieces are in state dicts whole."""
    for mode in MODES:
        model = layer_zero(2, mode, use_orig_params=True)
        found = list(model.parameters())

        def check(model=model, found=found):
            assert all(a is b for a, b in zip(found, model.parameters(), strict=True))
            assert all(isinstance(param, nn.Parameter) and param.dim() <= 1 for param in model.parameters())

        optim = torch.optim.SGD(found, lr=0.1)
        for step in range(2):
            with torch.no_grad():
                model(data(0))
            check()
            hold_back(model, data(step))
            check()
            loss_of(model, data(step)).backward()
            check()
            optim.step()
            optim.zero_grad()
            wanted = dict(make().named_parameters())
            assert {name: value.shape for name, value in model.state_dict().items()} == {
                name: param.shape for name, param in wanted.items()
            }
            check()


def clipping():
    """The norm over all ranks, with ignored and shared parameters, and ranks that hold no piece."""
    for mode, uo, kind in itertools.product(MODES, (False, True), (2.0, float("inf"))):
        module, model = make(), make()
        for m in (module, model):
            m.blocks[1].scale = m.blocks[1].scale
            m.blocks[1].again = m.blocks[1].inner.bias
        ignored = [model.blocks[2].scale]
        for i, block in enumerate(model.blocks):
            model.blocks[i] = layer_zero(2, mode, block, FSDP, use_orig_params=uo, ignored_states=ignored)
        model = layer_zero(2, mode, model, FSDP, use_orig_params=uo, ignored_states=ignored)
        loss_of(model, data(0, rank=0)).backward()
        loss_of(module, data(0, rank=0)).backward()
        wanted = nn.utils.clip_grad_norm_(module.parameters(), 0.01, kind)
        torch.testing.assert_close(model.clip_grad_norm_(0.01, kind), wanted, rtol=1e-6, atol=1e-6)
        held = {id(param) for param in model.parameters()}
        assert id(ignored[0]) in held
        torch.testing.assert_close(ignored[0].grad, module.blocks[2].scale.grad, rtol=1e-5, atol=1e-8)


def column(inner):
    """This rank's outer group."""
    groups = [(ranks, group_of(ranks)) for ranks in zip(*rows(inner), strict=True)]
    return next(group for ranks, group in groups if dist.get_rank() in ranks)


def grids():
    """Inner groups of neighbours and of others, by groups, by meshes and by a placement, train alike."""
    found = {}
    for mode in MODES:
        grid = torch.arange(4).reshape(2, 2)
        ways = {
            "groups": {"process_group": pair(2)},
            "mesh": {"device_mesh": DeviceMesh("cpu", grid)},
            "triple": {"process_group": (*pair(2), column(2))},
        }
        if mode == "LAYER_ZERO":
            del ways["triple"]
        for name, arguments in ways.items():
            found[mode, name] = train(wrap_blocks(make(), sharding_strategy=ShardingStrategy[mode], **arguments))
        if mode == MODES[0]:  # the pair is looked at once
            told = pytest.warns(UserWarning, match=r"the ranks \[0, 2\] of the inner group do not follow each other")
            with told if dist.get_rank() == 0 else contextlib.nullcontext():  # the first rank warns for all
                layer_zero(2, mode, nn.Linear(1, 1), FSDP, strided=True)
        strided = layer_zero(2, mode, strided=True)
        found[mode, "strided"] = train(strided)
    inner, wide = pair(2)
    placement = Placement(inner, wide, wide, full_precision=True)
    found["placement"] = train(wrap_blocks(make(), placement=placement))
    first = found["placement"]
    for key, (losses, params) in found.items():
        torch.testing.assert_close(losses, first[0], rtol=1e-6, atol=1e-6, msg=str(key))
        for name, value in params.items():
            torch.testing.assert_close(value, first[1][name], rtol=1e-5, atol=1e-6, msg=f"{key} {name}")
    assert all(torch.equal(found["placement"][1][n], v) for n, v in found["LAYER_ZERO", "groups"][1].items())


def train(model, steps=3):
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        hold_back(model, data(10 + step))
        loss = loss_of(model, data(step))
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), full_params(model)


def refreshes():
    """Nested: after a step each rank gets its peers' shards, and nothing from the others; also when strided."""
    for strided in (False, True):
        model = layer_zero(2, "LAYER_ZERO_NESTED", strided=strided)
        with counted(2, strided) as log:
            model.sync_params()
            refreshed = [entry for entry in log if entry[1] == "outer"]
            shards = [unit._unit.flat_params[0].layout.shard_numel for unit in FSDP.fsdp_modules(model)]
            assert sorted(size for _, _, size, _ in refreshed) == sorted(2 * 4 * numel for numel in shards)
            assert not any(group == "wide" for _, group, _, _ in log)
        for unit in FSDP.fsdp_modules(model):
            [copy], [flat_param] = _C_testing.secondary_shards(unit._unit.core), unit._unit.flat_params
            whole = flat_param.gather(flat_param.flat.detach())
            inner = flat_param.placement.param_rank
            assert torch.equal(copy, whole[inner * copy.numel() : (inner + 1) * copy.numel()])


def degenerate(mode, inner, uo, low):
    """Inner groups of one rank and of all: ZERO_1 and FULL_SHARD bit for bit, and without further collectives."""
    same = {1: "ZERO_1", 2: "FULL_SHARD"}
    note(f"{mode} {inner} {uo} {low}")
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else None
    arguments = {"mixed_precision": precision, "use_orig_params": uo}
    model = layer_zero(inner, mode, **arguments)
    plain = wrap_blocks(make(), sharding_strategy=ShardingStrategy[same[inner]], **arguments)
    logs = []
    for m in (model, plain):
        with counted(inner) as log:
            train(m)
        logs.append(log)
    wanted = full_params(plain)
    assert all(torch.equal(value, wanted[name]) for name, value in full_params(model).items())
    assert logs[0] == logs[1]
    assert {group for _, group, _, _ in logs[0]} == {"wide"}
    for unit in FSDP.fsdp_modules(model):
        assert _C_testing.secondary_shards(unit._unit.core) == [None]
        assert all(have_memory(unit._unit.core)) == (inner == 1)


def degenerate_as_torch():
    """All ranks in one inner group, in fp32: what torch's own class gives, bit for bit."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Torchs

    device = torch.device("cpu")
    for uo in (False, True):
        torchs = wrap_blocks(make(), Torchs, use_orig_params=uo, device_id=device)
        ours = layer_zero(2, use_orig_params=uo)
        for model in (torchs, ours):
            optim = torch.optim.Adam(model.parameters(), lr=0.01)
            for step in range(5):
                micro_batches(model, [data(step), data(10 + step)])
                optim.step()
                optim.zero_grad()
        with Torchs.summon_full_params(torchs):
            wanted = [param.detach().clone() for param in torchs.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(full_params(ours).values(), wanted, strict=True))


def refused():
    """What is wrong with groups or settings is said by every rank, before anything moves."""
    rank, world = dist.get_rank(), dist.group.WORLD
    alone = [group_of([r]) for r in range(4)][rank]
    low, high = group_of([0, 1]), group_of([2, 3])
    mine = low if rank < 2 else high
    three, first_three = group_of([1, 2, 3]), group_of([0, 1, 2])
    trios = {0: first_three, 1: three, 2: three, 3: three}
    strategy = ShardingStrategy.LAYER_ZERO
    cases = [
        ((trios[rank], world), r"must be a multiple of .* 4 ranks \[0, 1, 2, 3\] and 3 ranks .* nearest .* is 2"),
        ((alone if rank == 3 else mine, world), r"of one size: rank 0 has \[0, 1\], rank 3 has \[3\]"),
        ((first_three, world), r"expected a process group that this rank 3 is in, got .*-100"),
        ((None if rank == 1 else mine, world), r"expected a process group that this rank 1 is in, got None"),
        ((mine, None if rank == 1 else world), r"expected a process group that this rank 1 is in, got None"),
        (
            (world, mine),
            r"must hold the zero3 group.* ranks \[2, 3\] are not in|must hold .* ranks \[0, 1\] are not in",
        ),
    ]
    for groups, message in cases:
        with counted(2) as log, pytest.raises(ValueError, match=message):
            FSDP(make(), groups, strategy)
        assert log == []
    overlapping = group_of((1, 3))
    with pytest.raises(ValueError, match=r"overlap: rank .* has \[\d, \d\], rank .* has \[\d, \d\]"):
        FSDP(make(), (overlapping if rank == 3 else mine, world), strategy)
    # not the same wide group: whoever counts on a rank that has named another one says so
    if rank < 2:
        with pytest.raises(
            ValueError, match=r"different zero1 groups: rank \d has \[0, 1, 2, 3\], rank 2 has \[2, 3\]"
        ):
            FSDP(make(), (mine, world), strategy)
    else:
        FSDP(make(), (mine, mine), strategy)
    dist.barrier()
    for arguments, error, message in (
        (
            {"process_group": None},
            ValueError,
            r"passed in as \(zero3 group, zero1 group\).* got process_group=None",
        ),
        ({"process_group": world}, ValueError, r"\(zero3 group, zero1 group"),
        ({"process_group": (mine, None)}, ValueError, "expected a process group"),
        ({"process_group": (trios[1] if rank else mine, world)}, ValueError, "zero3 group"),
        ({"device_mesh": DeviceMesh("cpu", range(4))}, ValueError, r"2-D device_mesh \(outer, inner\), got 1-D"),
        (
            {"process_group": (mine, world), "mixed_precision": MixedPrecision(keep_low_precision_grads=True)},
            ValueError,
            "keep_low_precision_grads",
        ),
    ):
        with pytest.raises(error, match=message):
            FSDP(make(), sharding_strategy=strategy, **arguments)
    with pytest.raises(ValueError, match=r"parameter `first.weight` .*bfloat16.*: build it in torch.float32"):
        FSDP(make().bfloat16(), (mine, world), strategy)
    different = make(width=4 if rank == 3 else 5)
    with pytest.raises(ValueError, match=r"rank 0 has parameter `.*, rank 3 has parameter"):
        FSDP(different, (mine, world), strategy)
    with pytest.raises(ValueError, match=r"divide|multiple"):
        Placement(trios[rank], world, world)
    with pytest.raises(ValueError, match="no replicas"):
        Placement(mine, world, world, mine)
    with pytest.raises(ValueError, match="outer is for"):
        Placement(world, world, world, outer=mine)
    model = layer_zero(2)
    with pytest.raises(RuntimeError, match="root"), model.blocks[0].no_sync():
        pass
    with FSDP.summon_full_params(model), pytest.raises(RuntimeError, match="IDLE, it is in SUMMON"), model.no_sync():
        pass
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    for third, message in (
        (mine, r"the outer group of rank 0 must have the ranks \[0, 2\].*got \[0, 1\]"),
        (columns[(rank + (rank == 3)) % 2], r"expected a process group that this rank 3 is in, got .*-100"),
        (mine if rank == 1 else columns[rank % 2], r"the outer group of rank 1 .* the ranks \[1, 3\].*got \[0, 1\]"),
        ("none" if rank == 1 else columns[rank % 2], r"expected a process group that this rank 1 is in, got 'none'"),
        (None if rank == 1 else columns[rank % 2], r"the outer group of rank 1 must have .* got None"),
    ):
        groups = (mine, world) if third is None else (mine, world, third)
        with counted(2) as log, pytest.raises(ValueError, match=message):
            FSDP(make(), groups, ShardingStrategy.LAYER_ZERO_NESTED)
        assert log == []
    nested = layer_zero(2, "LAYER_ZERO_NESTED")
    with pytest.raises(RuntimeError, match="not for a grid"):
        nested.register_comm_hook(None, print)


def orders():
    """A rank that skips a unit is named on all ranks, also those that share only the wide group with it."""
    for mode, when in itertools.product(MODES, ("forward", "no_sync")):
        note(f"{mode} {when}")
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], range(4))]
        mine = (groups[dist.get_rank() // 2], groups[2])
        if mode == "LAYER_ZERO_NESTED":
            columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
            mine = (*mine, columns[dist.get_rank() % 2])
        model = wrap_blocks(make(cls=Uneven, frozen=()), process_group=mine, sharding_strategy=ShardingStrategy[mode])
        loss_of(model, data(0)).backward()
        if when == "no_sync":
            hold_back(model, data(0))
            hold_back(model, data(0))
        model.module.skip = dist.get_rank() == 3
        begin = time.monotonic()
        with pytest.raises(OrderError, match=r"Forward order differs across ranks: rank . .*; rank . "):
            micro_batches(model, [data(1)] * 3)
        assert time.monotonic() - begin < 10.0


def saved(strategy, inner):
    """A full state dict after two steps."""
    model = build(strategy, inner)
    train(model, 2)
    return model.state_dict()


def build(strategy, inner, seed=0):
    if strategy == "FULL_SHARD":
        return wrap_blocks(make(seed), sharding_strategy=ShardingStrategy.FULL_SHARD)
    return layer_zero(inner, strategy, make(seed), use_orig_params=True)


def loaded(state, cases):
    for strategy, inner in cases:
        model = build(strategy, inner, seed=1)
        model.load_state_dict(state)
        for name, value in full_params(model).items():
            assert torch.equal(value, state[name]), (strategy, inner, name)
        with torch.no_grad():
            module = make()
            module.load_state_dict(state)
            torch.testing.assert_close(model(data(0)), module(data(0)), rtol=0, atol=0)


@pytest.mark.thorough
def test_models_and_programs_of_all_kinds():
    simulate_ranks(in_turn, 4, [exceptions, uneven, interleaved, empty_units, precisions])


@pytest.mark.thorough
def test_groups_norms_and_what_is_refused():
    simulate_ranks(in_turn, 4, [refused, objects, clipping, grids, refreshes, orders], timeout=90)


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("mode", "inner", "uo", "low"), list(itertools.product(MODES, (1, 2), (False, True), (False, True)))
)
def test_degenerate_groups_are_the_plain_strategies(mode, inner, uo, low):
    simulate_ranks(degenerate, 2, mode, inner, uo, low)


def test_one_inner_group_of_all_ranks_gives_torchs_bits():
    run_ranks(degenerate_as_torch, 2)


def test_one_rank_communicates_nothing():
    with fake_world(1):
        for mode in MODES:
            model = layer_zero(1, mode)
            train(model)
            assert counts_of(model).gathers == 0
            assert model.placement == Placement(reshard_after_forward=True, full_precision=True)


def test_an_outer_group_that_is_not_the_worlds_is_said():
    with fake_world(8):
        groups = dist.new_group([0, 1]), dist.new_group([0, 1, 2, 3])
        with pytest.raises(ValueError, match=r"is not the world.*the last of ranks \[0, 2\]"):
            FSDP(make(), groups, ShardingStrategy.LAYER_ZERO_NESTED)
        FSDP(make(), (*groups, dist.new_group([0, 2])), ShardingStrategy.LAYER_ZERO_NESTED)


def test_full_state_dicts_go_from_any_groups_to_any():
    [state, *_] = simulate_ranks(saved, 4, "LAYER_ZERO_NESTED", 2)
    [other, *_] = simulate_ranks(saved, 2, "LAYER_ZERO", 1)
    on_four = [*itertools.product(MODES, (1, 2, 4)), ("FULL_SHARD", 4)]
    simulate_ranks(loaded, 2, state, [("LAYER_ZERO_NESTED", 1), ("FULL_SHARD", 2)])
    simulate_ranks(loaded, 1, state, [("LAYER_ZERO", 1)])
    simulate_ranks(loaded, 4, other, on_four)
