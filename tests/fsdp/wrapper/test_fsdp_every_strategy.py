"""Corners of the runtime: uneven worlds, arguments that contradict, hooks that compress, offload, dtypes sent.

Promises:
- a full state dict right after wrapping is the module's: every strategy, with and without `use_orig_params`, 2, 3 and
  4 ranks: `test_any_number_of_ranks`
- constant gradients average exactly at 2, 3 and 4 ranks; the two divisors of 1 to 64 ranks:
  `test_any_number_of_ranks`, `test_what_a_gradient_is_divided_by`
- dtypes sent; gradients, optimizer and state dict in fp32; equal to a module that casts by hand:
  `test_corners_of_each_strategy`, `test_fsdp_seen_by_users.py::test_mixed_precision`,
  `test_equality.py::test_two_ranks_train_bit_for_bit_as_one_and_as_torch`
- where torch 2.13 goes wrong: clipping by inf remembers another step's maximum on a rank without gradients:
  `test_corners`
- where torch 2.13 goes wrong: offload without an accelerator; `deepcopy`; a part called outside of its unit:
  `test_corners_of_each_strategy`, `test_fsdp_construction.py::test_copies_moves_and_replacements`,
  `test_fsdp_seen_by_users.py::test_wrong_calls`
"""

import contextlib
import itertools
import math

import pytest
import replacing
import torch
import torch.distributed as dist
from fsdp_models import (
    SETTINGS,
    Averaged,
    assert_same,
    assert_same_grads,
    data,
    every_setting,
    full_grads,
    loss_of,
    make,
    wrap_blocks,
)
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy

from flatparam import CPUOffload, MixedPrecision, ShardedGradScaler, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.sharding.placement import averaging_factors


def test_what_a_gradient_is_divided_by():
    for ranks in range(1, 65):
        before, after = averaging_factors(ranks)
        assert before * after == ranks
        assert before == default_hooks.DefaultState._get_gradient_predivide_factor(ranks)
    known = {1: (1, 1), 2: (2, 1), 3: (2, 1.5), 4: (2, 2), 6: (4, 1.5), 8: (4, 2), 12: (4, 3), 16: (4, 4), 64: (8, 8)}
    assert {ranks: averaging_factors(ranks) for ranks in known} == known


class Constant(nn.Module):
    """Its gradient is the input, for every element."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * (self.weight.sum() + self.bias.sum())


def beginnings():
    """At any number of ranks: whole after wrapping, and constant gradients average exactly."""
    ranks = dist.get_world_size()
    for strategy, uo in SETTINGS:
        arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
        wanted, found = make().state_dict(), wrap_blocks(make(), **arguments).state_dict()
        assert list(found) == list(wanted)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        model = FSDP(Constant(), **arguments)
        for values in ([7.0] * ranks, [float(3 * rank) for rank in range(ranks)]):
            model(torch.tensor(values[dist.get_rank()])).backward()
            for grad in full_grads(model).values():
                assert (grad == sum(values) / ranks).all(), (strategy, uo, grad)
            model.zero_grad()


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks(ranks):
    simulate_ranks(beginnings, ranks)


def contradictions():
    """Refused on every rank, saying what was wrong, before anything is communicated."""
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    hybrid = ShardingStrategy.HYBRID_SHARD
    halves = nn.Module()
    halves.count = nn.Parameter(torch.ones(2, dtype=torch.uint8).view(torch.uint4), requires_grad=False)
    refused = [
        (ValueError, "shard group, replicate group", {"sharding_strategy": hybrid}),
        (ValueError, "shard group, replicate group", {"sharding_strategy": hybrid, "process_group": dist.group.WORLD}),
        (ValueError, "2-D device_mesh.*got 1-D", {"sharding_strategy": hybrid, "device_mesh": line}),
        (ValueError, "1-D device_mesh, got 2-D", {"device_mesh": grid}),
        (ValueError, "both", {"device_mesh": line, "process_group": dist.group.WORLD}),
        (TypeError, "one process group", {"process_group": (dist.group.WORLD, dist.group.WORLD)}),
        (TypeError, "backward_prefetch", {"backward_prefetch": "PRE"}),
    ]
    for error, message, arguments in refused:
        with pytest.raises(error, match=message):
            FSDP(make(), **arguments)
    with pytest.raises(ValueError, match=r"`count`.*uint4"):
        FSDP(halves)
    with pytest.raises(ValueError, match=r"False/True or a kwarg dict"):
        FSDP(make(), auto_wrap_policy=CustomPolicy(lambda module: "yes"))
    for name, values in (("use_orig_params", (True, False)), ("limit_all_gathers", (True, False))):
        module = make()
        module.blocks[0] = FSDP(module.blocks[0], **{name: values[0]})
        model = FSDP(module, **{name: values[1]})
        with pytest.raises(ValueError, match=name):
            loss_of(model, data(0))
    on_grid = wrap_blocks(make(), sharding_strategy=hybrid, device_mesh=init_device_mesh("cpu", (1, 2)))
    loss_of(on_grid, data(0)).backward()
    model = wrap_blocks(make())
    for error in (ValueError, NotImplementedError):  # of both of torch's versions
        with pytest.raises(error, match="writeback"), FSDP.summon_full_params(model, rank0_only=True):
            pass
    with FSDP.summon_full_params(model), pytest.raises(ValueError, match="IDLE"):
        model.apply(lambda module: None)
    inside = []
    model.blocks[1].module.register_forward_pre_hook(lambda *args: inside.append(refusal_of_summon(model)))
    loss_of(model, data(0)).backward()
    assert inside == ["IDLE"]
    assert_same(model, make())


def refusal_of_summon(model):
    with pytest.raises(ValueError, match="IDLE"), FSDP.summon_full_params(model):
        pass
    return "IDLE"


@pytest.mark.multiprocess
def test_arguments_that_contradict():
    simulate_ranks(contradictions, 2)


@contextlib.contextmanager
def dtypes_on_the_wire():
    """(what, dtype) of each collective, seen by replacing torch.distributed's functions."""
    names = (
        "all_gather_single",
        "all_gather_into_tensor",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "all_reduce",
    )
    seen = set()

    def logging(name, original):
        def call(tensor, *args, **kwargs):
            seen.add((name.partition("_")[0], tensor.dtype))
            return original(tensor, *args, **kwargs)

        return call

    with replacing.collectives(names, logging):
        yield seen


def wire(strategy, uo):
    bf16, fp32 = torch.bfloat16, torch.float32
    for param, reduce in itertools.product((None, bf16), (None, bf16, fp32)):
        model = wrap_blocks(
            make(),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=uo,
            mixed_precision=MixedPrecision(param_dtype=param, reduce_dtype=reduce),
        )
        with dtypes_on_the_wire() as seen:
            loss_of(model, data(0)).backward()
        reduced = reduce or param or fp32
        wanted = {("all", reduced)} if strategy == "NO_SHARD" else {("all", param or fp32), ("reduce", reduced)}
        if strategy == "ZERO_1":
            wanted.add(("all", torch.int32))  # whether the shards have changed
        assert seen == wanted, (strategy, uo, param, reduce, seen)
        assert all(param.dtype == fp32 for param in model.parameters())


def ignored_is_local():
    """What is ignored is nobody's shard and in no collective."""
    for uo in (False, True):
        module = make()
        inner = module.blocks[1].inner
        model = wrap_blocks(module, use_orig_params=uo, ignored_states=[inner])
        sizes = {piece.fqn: math.prod(piece.shape) for piece in model.shard_map()}
        assert not any("blocks.1.inner" in name for name in sizes)
        assert sum(sizes.values()) == sum(p.numel() for p in make().parameters()) - sum(
            p.numel() for p in inner.parameters()
        )


def own_shards():
    """Of what ranks write differently in a summon, each keeps its own shard."""
    rank = dist.get_rank()
    for strategy, uo in SETTINGS[:4]:
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        with FSDP.summon_full_params(model):
            for param in model.parameters():
                param.data.fill_(10.0 + rank)
        full = {name: value.flatten() for name, value in model.state_dict().items()}
        for piece in model.shard_map():
            assert (full[piece.fqn][piece.start :][: piece.numel] == 10.0 + piece.rank).all()


def clipping_corners():
    """Units that are not sharded beside units that are; inf again and again with a rank that holds nothing."""
    for norm in (2.0, math.inf):
        module, model = make(), make()
        kinds = ("NO_SHARD", "FULL_SHARD", "ZERO_1")
        for i, kind in enumerate(kinds):
            model.blocks[i] = FSDP(model.blocks[i], sharding_strategy=ShardingStrategy[kind], use_orig_params=True)
        model = FSDP(model, use_orig_params=True)
        loss_of(model, data(0)).backward()
        Averaged(module, 2).backward(lambda rank: [data(0, rank)])
        ours, plain = model.clip_grad_norm_(0.1, norm), nn.utils.clip_grad_norm_(module.parameters(), 0.1, norm)
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=0)
    tiny = FSDP(nn.Linear(1, 1, bias=False), use_orig_params=True)  # rank 1 has padding only
    for size in (8.0, 2.0, 4.0, 1.0):
        tiny.zero_grad()
        tiny(torch.full((1, 1), size)).sum().backward()
        assert tiny.clip_grad_norm_(100.0, math.inf).item() == size


def compressed(state, grad, output=None):
    """What torch's hooks for the same do, which need an accelerator: cast, average, cast back."""
    low = grad.to(state) / dist.get_world_size()
    if output is None:
        dist.all_reduce(low)
        grad.copy_(low)
    else:
        part = torch.empty(output.shape, dtype=state)
        dist.reduce_scatter_tensor(part, low)
        output.copy_(part)


def compressing():
    for uo, dtype, strategy in itertools.product(
        (False, True), (torch.float16, torch.bfloat16), ("FULL_SHARD", "NO_SHARD")
    ):
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        model.register_comm_hook(dtype, compressed)
        module = make()
        oracle = Averaged(module, 2)
        for step in range(2):
            with dtypes_on_the_wire() as seen:
                loss_of(model, data(step)).backward()
            assert ("all" if strategy == "NO_SHARD" else "reduce", dtype) in seen
            oracle.backward(lambda rank, step=step: [data(step, rank)])
        for (name, grad), param in zip(full_grads(model).items(), module.parameters(), strict=True):
            assert grad.dtype == torch.float32
            torch.testing.assert_close(grad, param.grad, rtol=2e-2, atol=2e-2, msg=name)


def offloaded(strategy, uo):
    """CPUOffload where there is nothing but the CPU: accumulation of any kind adds up."""
    for synced in (True, False):
        model = wrap_blocks(
            make(),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=uo,
            cpu_offload=CPUOffload(offload_params=True),
        )
        module = make()
        oracle = Averaged(module, 2)
        if synced:
            loss_of(model, data(0)).backward()
            loss_of(model, data(1)).backward()
            oracle.backward(lambda rank: [data(0, rank)])
            oracle.backward(lambda rank: [data(1, rank)])
        else:
            with model.no_sync():
                loss_of(model, data(0)).backward()
            loss_of(model, data(1)).backward()
            oracle.backward(lambda rank: [data(0, rank), data(1, rank)])
        assert_same_grads(model, module, f"{strategy} uo={uo} synced={synced}")


def nan_gradients(strategy, uo):
    """NaN on one rank: every rank skips, and the scale halves."""
    model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=8.0)
    x = data(0) * (float("nan") if dist.get_rank() == 1 else 1.0)
    scaler.scale(loss_of(model, x)).backward()
    scaler.step(optim)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert_same(model, make())


PARTS = (ignored_is_local, own_shards, clipping_corners, compressing)


@pytest.mark.multiprocess
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_corners(part):
    simulate_ranks(part, 2)


@pytest.mark.multiprocess
@pytest.mark.sweep(5)
@every_setting
@pytest.mark.parametrize("part", [wire, offloaded, nan_gradients], ids=lambda part: part.__name__)
def test_corners_of_each_strategy(part, strategy, uo):
    simulate_ranks(part, 2, strategy, uo)
