"""The transfers, the kept data and the gradients of a step of the LAYER_ZERO strategies: collectives, copies, sums.

Promises:
- which group, how often, how many bytes, which dtype: over all ranks once a step, whatever the micro-batches and
  evaluations: `test_what_a_step_moves_and_keeps` (`collectives`)
- layout; secondary shards have the cast masters of all ranks; the tensors with memory after each phase, as planned:
  `test_what_a_step_moves_and_keeps` (`layout`, `buffers`)
- `sync_params` gathers changed masters, only between passes: `test_units_between_passes` (`explicit_sync`)
- of offloaded gradients two are on the device, nested three, one of them ahead of time: `test_units_between_passes`
  (`offloaded_memory`)
"""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import assert_same, counts_of, data, full_params, have_memory, loss_of, make
from gloo import note, run_ranks
from layer_zero_ranks import MODES, counted, layer_zero, micro_batches
from torch import nn

from benchmarks.c_testing import _C_testing
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision

pytestmark = pytest.mark.multiprocess

BF16 = torch.bfloat16
LOW = MixedPrecision(param_dtype=BF16)


def batches(step, count, rank=None):
    return [data(100 * step + k, rank) for k in range(count)]


def sizes(model):
    """Padded elements of each unit, the root first."""
    return [unit._unit.flat_params[0].layout.padded_numel for unit in FSDP.fsdp_modules(model)]


def pieces_of(model):
    """The copies and kept gradients of all units, and who is full."""
    steps = [unit._unit.core for unit in FSDP.fsdp_modules(model)]
    return (
        [_C_testing.secondary_shards(step)[0] for step in steps],
        [step.accumulated()[0] for step in steps],
        [all(have_memory(step)) for step in steps],
    )


def expected_bytes(mode, numels, count, world, inner):
    """The collectives of one step of ``count`` micro-batches, as ``{(kind, group): bytes of the wholes}``.

    Parameters are gathered in bf16, gradients reduced in fp32. A rank receives (ranks - 1) / ranks of each. The root,
    the first of ``numels``, is kept from forward to backward.
    """
    total, root = sum(numels), numels[0]
    inner_gathers = 2 * (total * (2 * count - 1) - root * count)  # the first forward gathers over the other group
    if mode == "LAYER_ZERO":
        return {("gather", "wide"): 2 * total, ("gather", "inner"): inner_gathers, ("reduce", "wide"): 4 * total}
    return {
        ("gather", "outer"): 2 * total // inner,
        ("gather", "inner"): inner_gathers + 2 * total,
        ("reduce", "inner"): 4 * total * count,
        ("reduce", "outer"): 4 * total // inner,
    }


def collectives(mode, uo):
    """Which group, how often and how many bytes: once a step over the wide group, whatever the micro-batches."""
    for count in (1, 2, 3):
        note(f"{mode} {count} {uo}")
        model = layer_zero(2, mode, mixed_precision=LOW, use_orig_params=uo)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, data(0)).backward()
        optim.step()
        optim.zero_grad()
        numels = sizes(model)
        with counted(2) as log:
            for k in range(count):
                del log[:]
                micro_batches(model, batches(0, 1)) if k == count - 1 else hold_back(model)
                kinds = [entry[:2] for entry in log]
                over = "wide" if mode == "LAYER_ZERO" else "outer"
                assert kinds.count(("gather", over)) == (len(numels) if k == 0 else 0)
                assert kinds.count(("reduce", over)) == (len(numels) if k == count - 1 else 0)
                from_copies = 2 if k > 0 or mode == "LAYER_ZERO_NESTED" else 1
                assert kinds.count(("gather", "inner")) == from_copies * len(numels) - 1  # the root stays
            del log[:]
            optim.step()
            optim.zero_grad()
            micro_batches(model, batches(0, count))
        found = {}
        for kind, group, size, dtype in log:
            assert dtype == (torch.float32 if kind == "reduce" else BF16)
            found[kind, group] = found.get((kind, group), 0) + size
        assert found == expected_bytes(mode, numels, count, 4, 2), (mode, count)
        # evaluation, before and between, gathers over the wide group once
        optim.step()
        before = counts_of(model).refreshes
        for _ in range(3):
            with torch.no_grad():
                model(data(0))
            hold_back(model)
        assert counts_of(model).refreshes - before == len(numels)


def hold_back(model):
    with model.no_sync():
        loss_of(model, data(0)).backward()


def buffers(mode, uo):
    """What has memory after each phase, and what it holds."""
    world, rank = dist.get_world_size(), dist.get_rank()
    note(f"{mode} {uo}")
    model = layer_zero(2, mode, mixed_precision=LOW, use_orig_params=uo)
    numels = sizes(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)

    def state(model=model, numels=numels):
        copies, kept, full = pieces_of(model)
        assert all(copy is None or copy.numel() * 2 == n for copy, n in zip(copies, numels, strict=True))
        return [copy is not None for copy in copies], [part is not None for part in kept], full

    none, all_ = [False] * 4, [True] * 4
    assert state() == (none, none, none)
    for step in range(2):
        output = loss_of(model, data(step))
        root = mode == "LAYER_ZERO_NESTED"  # there the copy comes first
        assert state() == ([root, True, True, True], none, [True, False, False, False])
        values = {name: value.to(BF16) for name, value in full_params(model).items()}
        with model.no_sync():
            output.backward()
            assert state() == (all_, all_, none)
        plan = model.memory_plan()
        assert [unit.copy for unit in plan.units] == [copy.nbytes for copy in pieces_of(model)[0]]
        assert [unit.kept for unit in plan.units] == [kept.nbytes for kept in pieces_of(model)[1]]
        assert plan.no_sync == sum(unit.kept for unit in plan.units)
        for unit, copy, kept in zip(FSDP.fsdp_modules(model), *pieces_of(model)[:2], strict=True):
            flat_param = unit._unit.flat_params[0]
            part = flat_param.layout.padded_numel // 2
            place = (rank % 2) * part
            whole = torch.zeros(flat_param.layout.padded_numel, dtype=BF16)
            mask = torch.zeros(flat_param.layout.padded_numel, dtype=torch.bool)
            path = next(path for path, inner in model.named_modules() if inner is unit)
            prefix = path.replace("_fsdp_wrapped_module", "").strip(".").replace("..", ".")
            for original, view, held in zip(
                flat_param.originals, flat_param.unsharded(whole), flat_param.unsharded(mask), strict=True
            ):
                view.copy_(values[f"{prefix}.{original.fqn}" if prefix else original.fqn])
                held.fill_(True)
            mine = slice(place, place + part)
            assert torch.equal(copy[mask[mine]], whole[mine][mask[mine]])
            assert kept.dtype == torch.float32
            assert kept.numel() == (flat_param.layout.padded_numel if mode == "LAYER_ZERO" else part)
            assert not kept[~(mask if mode == "LAYER_ZERO" else mask[mine])].any()
        loss_of(model, data(step)).backward()
        assert state() == (none, none, none)
        for flat_param in (unit._unit.flat_params[0] for unit in FSDP.fsdp_modules(model)):
            assert all(param.grad is None or param.grad.dtype == torch.float32 for param in model.parameters())
            assert flat_param.layout.padded_numel % world == 0
        optim.step()
        optim.zero_grad()


class Three(nn.Module):
    """The example of docs/layerzero.md."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.b = nn.Parameter(torch.arange(3.0) + 10)
        self.c = nn.Parameter(torch.arange(2.0) + 20)

    def forward(self, x):
        return (self.a.sum() + self.b.sum() * self.c.prod()) * x.sum()


PIECES = {  # rank: {parameter: (offset in the shard, elements, first of the parameter)}
    "LAYER_ZERO": {
        0: {"a": (0, 5, 0)},
        1: {"a": (0, 1, 5), "b": (3, 2, 0)},
        2: {"b": (0, 1, 2)},
        3: {"c": (1, 2, 0)},
    },
    "LAYER_ZERO_NESTED": {
        0: {"a": (0, 5, 0)},
        2: {"a": (0, 1, 5), "b": (3, 2, 0)},
        1: {"b": (0, 1, 2)},
        3: {"c": (1, 2, 0)},
    },
}


def layout(mode, _uo):
    model = layer_zero(2, mode, Three(), FSDP, mixed_precision=LOW, use_orig_params=True)
    found = {rank: {} for rank in range(4)}
    for piece in model.shard_map():
        found[piece.rank][piece.fqn] = (piece.flat_start, piece.numel, piece.start)
    assert found == PIECES[mode]
    own = {name: param for name, param in model.named_parameters() if param.numel()}
    assert {name.rsplit(".", 1)[-1]: param.numel() for name, param in own.items()} == {
        name: numel for name, (_, numel, _) in PIECES[mode][dist.get_rank()].items()
    }
    flat_param = model._unit.flat_params[0]
    assert flat_param.layout.offsets == (0, 8, 16)
    assert (flat_param.layout.padded_numel, flat_param.layout.shard_numel) == (20, 5)
    assert_same(model, Three())
    with torch.no_grad():
        model(torch.ones(1))
    [copy] = _C_testing.secondary_shards(model._unit.core)
    first = 10 * (dist.get_rank() % 2)
    whole = torch.full((20,), -1.0)
    for offset, param in zip(flat_param.layout.offsets, Three().parameters(), strict=True):
        whole[offset : offset + param.numel()] = param.detach().flatten()
    mine = whole[first : first + 10]
    assert torch.equal(copy[mine >= 0].float(), mine[mine >= 0])


def explicit_sync():
    for mode in MODES:
        model = layer_zero(2, mode)
        model.sync_params()
        assert counts_of(model).refreshes == 4
        model.sync_params()
        with torch.no_grad():
            model(data(0))
        assert counts_of(model).refreshes == 4
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.sync_params()
        assert counts_of(model).refreshes == 8
        with pytest.raises(RuntimeError, match="root"):
            model.blocks[0].sync_params()

        outer = layer_zero(2, mode, nn.Sequential(nn.Linear(3, 3)), FSDP)
        outer.module[0].register_forward_hook(lambda *_, outer=outer: outer.sync_params())
        with pytest.raises(RuntimeError, match=r"sync_params: .* to be in states IDLE, it is in FORWARD_BACKWARD"):
            outer(data(0))
        with FSDP.summon_full_params(model), pytest.raises(RuntimeError, match="it is in SUMMON_FULL_PARAMS"):
            model.sync_params()


class Sampled(nn.Linear):
    """Calls ``sample`` when its backward has begun and its weight's gradient is not there yet."""

    sample = None

    def forward(self, x):
        x = super().forward(x)
        x.register_hook(lambda grad: self.sample())
        return torch.tanh(x)


class Layers(nn.Module):
    """Layers of one size, and smaller ones of the root."""

    def __init__(self, layers):
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.blocks = nn.ModuleList([Sampled(8, 8) for _ in range(layers)])
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def offloaded_memory():
    """Two accumulators are on the device, nested three: the one that is added to is there in time, the next is too."""
    for (mode, most), uo in itertools.product(((MODES[0], 2), (MODES[1], 3)), (False, True)):
        model = layer_zero(2, mode, make(cls=Layers, layers=7), use_orig_params=uo, offload_grads=True)
        units = [unit._unit.core for unit in FSDP.fsdp_modules(model)]
        largest = max(unit.kept for unit in model.memory_plan().units)
        assert model.memory_plan().no_sync == 3 * largest  # with an accelerator one is still on its way out
        seen = {}

        def sample(i, units=units, seen=seen):
            seen[i] = [_C_testing.accumulated_bytes(step)[0] for step in units]

        for i, block in enumerate(model.blocks):
            block.module.sample = functools.partial(sample, i)
        hold_back(model)
        assert all(not any(held) for held in seen.values())  # nothing to add to yet
        for synced in (False, True):
            note(f"{mode} {uo} {synced}")
            loss = loss_of(model, data(1))
            with contextlib.nullcontext() if synced else model.no_sync():
                loss.backward()
            assert list(seen) == list(range(6, -1, -1))
            for i, held in seen.items():
                assert sum(held) <= most * largest, (i, held)
                assert {i + 1, i} <= {at for at, size in enumerate(held) if size > 0}, (
                    i,
                    held,
                )  # the root is the first
                assert sum(size > 0 for size in held) <= most, (i, held)
            assert all(_C_testing.accumulated_bytes(step)[0] == 0 for step in units)
        model.zero_grad()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("check", [layout, collectives, buffers], ids=lambda check: check.__name__)
@pytest.mark.parametrize(("mode", "uo"), [(mode, uo) for mode in MODES for uo in (False, True)])
def test_what_a_step_moves_and_keeps(check, mode, uo):
    run_ranks(check, 4, mode, uo)


@pytest.mark.parametrize("check", [explicit_sync, offloaded_memory], ids=lambda check: check.__name__)
def test_units_between_passes(check):
    run_ranks(check, 4)
