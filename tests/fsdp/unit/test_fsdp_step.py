"""The order of a step: collectives, memory, shared modules, checkpoints, outputs, hooks.

Promises:
- the order of collectives, for each strategy and prefetch, the same in every step; forward prefetch delays no
  reduction: `test_the_order_of_collectives`
- which units are full after each phase; none after backward; a deleted model's memory is freed at once:
  `test_who_is_full_when`
- a unit that is called twice is reduced once; skipped units, unused outputs, frozen units, units that are frozen
  later: `test_units_used_unevenly`
- activation checkpointing inside, around and in parts, reentrant and not, without a second gather in backward:
  `test_activation_checkpointing`
- outputs of any nesting and class, with no tensor too; a backward from hidden ones to freed parameters names the
  class: `test_outputs_of_any_kind`
- `no_sync` reduces nothing and gathers as always: `test_the_order_of_collectives`
- communication hooks see the padded gradient and do the averaging; hooks that compress: `test_communication_hooks`,
  `test_fsdp_every_strategy.py::test_corners`
- the scaler: inf or NaN on one rank and all skip, the scale halves and grows: `test_the_gradient_scaler`,
  `test_fsdp_every_strategy.py::test_corners_of_each_strategy`
- where torch 2.13 goes wrong: an output inside a private class: a message about storage: `test_outputs_of_any_kind`
- where torch 2.13 goes wrong: forward prefetch delays reductions by a unit: `test_the_order_of_collectives`
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import unittest
import weakref
from collections import namedtuple

import pytest
import replacing
import torch
import torch.distributed as dist
from fsdp_models import (
    SETTINGS,
    Averaged,
    Block,
    assert_same,
    assert_same_grads,
    counts_of,
    data,
    every_setting,
    full_grads,
    full_params,
    have_memory,
    loss_of,
    make,
    wrap_blocks,
)
from gloo import note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from flatparam import BackwardPrefetch, MixedPrecision, ShardedGradScaler, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.multiprocess

NAMES = {
    "all_gather_single": "AG",
    "all_gather_into_tensor": "AG",
    "reduce_scatter_single": "RS",
    "reduce_scatter_tensor": "RS",
    "all_reduce": "AR",
}


@contextlib.contextmanager
def logged(model):
    """Collectives, as users count them: by replacing torch.distributed's functions; with the unit each is of."""
    log = []
    sizes = {}
    for unit in FSDP.fsdp_modules(model):
        for flat_param in unit._unit.flat_params:
            layout = flat_param.layout
            name = "r" if unit.check_is_root() else str(list(model.module.blocks).index(unit))
            sizes.setdefault(layout.padded_numel, []).append(name)

    def logging(name, original):
        def call(*args, **kwargs):
            tensor = args[1] if NAMES[name] == "RS" else args[0]
            if tensor.dtype == torch.int32:  # which units are out of date
                return original(*args, **kwargs)
            log.append(NAMES[name] + "/".join(sizes.get(tensor.numel(), ["?"])))
            return original(*args, **kwargs)

        return call

    with replacing.collectives(NAMES, logging):
        yield log


class Wide(nn.Module):
    """Blocks of different widths, so that the sizes of collectives tell the units apart."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4 + i), nn.Tanh(), nn.Linear(4 + i, 4)) for i in range(3)]
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


ORDERS = {
    ("FULL_SHARD", "PRE"): "AGr AG0 AG1 AG2 | AG2 AG1 RS2 AG0 RS1 RS0 RSr",
    ("FULL_SHARD", "POST"): "AGr AG0 AG1 AG2 | AG2 AG1 RS2 AG0 RS1 RS0 RSr",
    ("FULL_SHARD", None): "AGr AG0 AG1 AG2 | AG2 RS2 AG1 RS1 AG0 RS0 RSr",
    ("SHARD_GRAD_OP", "PRE"): "AGr AG0 AG1 AG2 | RS2 RS1 RS0 RSr",
    ("ZERO_1", "PRE"): "AGr AG0 AG1 AG2 | RS2 RS1 RS0 RSr",
    ("NO_SHARD", "PRE"): "| AR2 AR1 AR0 ARr",
}


def collectives(strategy, prefetch, uo):
    order = ORDERS[strategy, prefetch]
    prefetches = {"PRE": BackwardPrefetch.BACKWARD_PRE, "POST": BackwardPrefetch.BACKWARD_POST, None: None}
    for ahead in (False, True):
        what = f"{strategy} {prefetch} uo={uo} forward_prefetch={ahead}"
        note(what)
        model = wrap_blocks(
            make(cls=Wide),
            sharding_strategy=ShardingStrategy[strategy],
            backward_prefetch=prefetches[prefetch],
            forward_prefetch=ahead,
            use_orig_params=uo,
        )
        optim = torch.optim.SGD(model.parameters(), lr=0.0)
        with logged(model) as log:
            for _ in range(2):
                optim.step()  # or what ZERO_1 has is good still
                log.clear()
                output = model(data(0)).sum()
                log.append("|")
                output.backward()
                assert " ".join(log) == order, what
            # no_sync reduces nothing and gathers as always
            optim.step()
            log.clear()
            with model.no_sync():
                output = model(data(0)).sum()
                log.append("|")
                output.backward()
            forward, backward = order.split("|")
            gathers = [word for word in backward.split() if word.startswith("AG")]
            assert log == [*forward.split(), "|", *gathers], what
            log.clear()
            model(data(0))
            assert log == ([] if strategy in ("SHARD_GRAD_OP", "ZERO_1") else forward.split()), what
            log.clear()
            with torch.no_grad():
                model(data(0))
            assert log == ([] if strategy == "ZERO_1" else forward.split()), what


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("uo", "strategy", "prefetch"), [(uo, *key) for uo in (False, True) for key in ORDERS])
def test_the_order_of_collectives(strategy, prefetch, uo):
    simulate_ranks(collectives, 2, strategy, prefetch, uo)


def full(model):
    return [all(have_memory(unit._unit.core)) for unit in FSDP.fsdp_modules(model)]


def record(model, seen, *_args):
    seen.append(full(model()))


def memory():
    """Which units are full after each phase."""
    for strategy, uo in itertools.product(("FULL_SHARD", "SHARD_GRAD_OP"), (False, True)):
        note(f"{strategy} uo={uo}")
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        assert full(model) == [False] * 4
        seen = []
        note_full = functools.partial(record, weakref.ref(model), seen)
        for block in model.blocks:
            block.module.register_forward_hook(note_full)
        output = loss_of(model, data(0))
        stays = strategy == "SHARD_GRAD_OP"
        assert seen[2] == [True, stays, stays, True]
        assert full(model) == [True, stays, stays, stays]
        output.backward()
        assert full(model) == [False] * 4
        with torch.no_grad():
            loss_of(model, data(0))
        assert full(model) == [False] * 4
        unused = loss_of(model, data(0))
        del unused
        loss_of(model, data(0)).backward()
        with model.no_sync():
            loss_of(model, data(0)).backward()
        assert full(model) == [stays] * 4
        # a deleted model's memory goes at once, without the collector
        gc.collect()
        gc.disable()
        try:
            shards = [weakref.ref(unit.params[0]) for unit in FSDP.fsdp_modules(model)]
            output = loss_of(model, data(0))
            del model, output, block
            assert [shard() for shard in shards] == [None] * 4
        finally:
            gc.enable()


def test_who_is_full_when():
    simulate_ranks(memory, 2)


class Twice(nn.Module):
    """A block called twice, one that is skipped, one whose output is not used, and a frozen one."""

    def __init__(self, width=5):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])
        self.last = nn.Linear(width, 1)
        self.blocks[3].requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        x = self.blocks[0](x)
        x = self.blocks[3](x)
        x = self.blocks[0](x)
        self.blocks[1](x)
        return self.last(x)


def uneven(strategy, uo):
    for prefetch in BackwardPrefetch:
        note(f"{strategy} uo={uo} {prefetch}")
        module = make(cls=Twice)
        model = wrap_blocks(
            make(cls=Twice),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=uo,
            backward_prefetch=prefetch,
        )
        oracle = Averaged(module, 2)
        for step in range(2):
            with logged(model) as log:
                loss_of(model, data(step)).backward()
            assert sum(entry.startswith(("RS", "AR")) for entry in log) == 2
            oracle_backward(oracle, step)
            assert_same_grads(model, module, f"{strategy} uo={uo}")
            for param in model.blocks[2].parameters():
                assert param.grad is None
            if uo:
                for param in model.blocks[3].parameters():
                    assert param.grad is None
            model.zero_grad()
            module.zero_grad()
        if uo:  # frozen later
            for part in (module, model):
                for param in part.blocks[0].parameters():
                    param.requires_grad_(False)
            loss_of(model, data(5)).backward()
            oracle_backward(oracle, 5)
            assert_same_grads(model, module)
            assert all(param.grad is None for param in model.blocks[0].parameters())


def oracle_backward(oracle, step):
    """Of a module of which not every parameter is used or trained."""
    trained = [param for param in oracle.module.parameters() if param.requires_grad]
    totals = None
    for rank in range(2):
        grads = torch.autograd.grad(loss_of(oracle.module, data(step, rank)), trained, allow_unused=True)
        grads = [None if grad is None else grad / 2 for grad in grads]
        totals = grads if totals is None else [a if b is None else a + b for a, b in zip(totals, grads, strict=True)]
    for param, grad in zip(trained, totals, strict=True):
        param.grad = grad


@pytest.mark.sweep(3)
@every_setting
def test_units_used_unevenly(strategy, uo):
    simulate_ranks(uneven, 2, strategy, uo)


class Checkpointed(nn.Module):
    """Blocks that are recomputed in backward."""

    def __init__(self, how, reentrant):
        super().__init__()
        self.how, self.reentrant = how, reentrant
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([Block(5) for _ in range(3)])
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if self.how == "around":
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return self.last(x)


class Recomputing(Block):
    """A block that recomputes both of its halves in backward."""

    reentrant = False

    def forward(self, x):
        y = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return x + checkpoint(lambda z: self.scale * self.outer(torch.tanh(z)), y, use_reentrant=self.reentrant)


def recomputation(strategy, uo):
    for how, reentrant in itertools.product(("around", "inside", "wrapper", "parts"), (False, True)):
        what = f"{strategy} uo={uo} {how} reentrant={reentrant}"
        note(what)
        torch.manual_seed(0)
        module = Checkpointed(None, reentrant)
        torch.manual_seed(0)
        model = Checkpointed(how, reentrant)
        impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
        for i, block in enumerate(model.blocks):
            if how == "inside":
                block = checkpoint_wrapper(block, checkpoint_impl=impl)
            if how == "parts":
                block.__class__ = type("Parts", (Recomputing,), {"reentrant": reentrant})
            unit = FSDP(block, **arguments)
            model.blocks[i] = checkpoint_wrapper(unit, checkpoint_impl=impl) if how == "wrapper" else unit
        model = FSDP(model, **arguments)
        gathers = 0
        for step in range(2):
            model.zero_grad()
            module.zero_grad()
            loss_of(model, data(step)).backward()
            gathers, before = counts_of(model).gathers, gathers
            Averaged(module, 2).backward(lambda rank, step=step: [data(step, rank)])
            if how == "parts":  # torch adds the gradients of the parts in another order than of the whole
                for (_, grad), param in zip(full_grads(model).items(), module.parameters(), strict=True):
                    torch.testing.assert_close(grad, param.grad, rtol=1e-6, atol=1e-7)
            else:
                assert_same_grads(model, module, what)
        if strategy == "FULL_SHARD":
            assert gathers - before == 1 + 2 * 3, what  # no second gather for the recomputation in backward
        assert not any(all(have_memory(unit._unit.core)) for unit in FSDP.fsdp_modules(model)) or strategy in (
            "NO_SHARD",
            "ZERO_1",
        )


@pytest.mark.sweep(3)
@every_setting
def test_activation_checkpointing(strategy, uo):
    simulate_ranks(recomputation, 2, strategy, uo)


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    note: str = ""


class Private:
    def __init__(self, value):
        self.value = [{"deep": value}]


class Hidden:
    """Gives its tensor only to who asks."""

    def __init__(self, value):
        self.get = lambda: value


OUTPUTS = {
    "tuple": (lambda x: (x, 3, None), lambda out: out[0]),
    "list": (lambda x: [[x]], lambda out: out[0][0]),
    "dict": (lambda x: {"a": {"b": x}}, lambda out: out["a"]["b"]),
    "namedtuple": (lambda x: Pair(x, x.detach()), lambda out: out.left),
    "dataclass": (lambda x: Record(x, "text"), lambda out: out.value),
    "private": (Private, lambda out: out.value[0]["deep"]),
}


class Boxed(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.box = box

    def forward(self, x):
        return self.box(self.inner(x["x"][0]))


def chain(length):
    """Objects in objects, more than Python's stack has room for."""
    end = Private(None)
    for _ in range(length):
        end.value = Private(end.value)
    return end


NO_TENSORS = (
    lambda x: object(),
    lambda x: None,
    lambda x: unittest.TestCase(),
    lambda x: (object(), 3),
    lambda x: chain(9999),
)


def opaque_outputs(uo):
    """What holds no tensor that is found is returned as it is; who comes to freed parameters from it is told."""
    x = {"x": [data(0, rank=0)]}
    for box in NO_TENSORS:
        model = FSDP(nn.Sequential(FSDP(Boxed(box), use_orig_params=uo)), use_orig_params=uo)
        for _ in range(2):
            model(x)
    boxed = Boxed(Hidden)
    boxed.inner = nn.LayerNorm(3)
    hidden = FSDP(nn.Sequential(FSDP(boxed, use_orig_params=uo)), use_orig_params=uo)
    output = hidden({"x": [data(0, rank=0).requires_grad_()]})  # so its gradient needs the weight
    with pytest.raises(
        RuntimeError, match=r"(?s)of the unit of Boxed at `0` was used while.* returned a Hidden in which no"
    ):
        output.get().sum().backward()
    free = FSDP(Boxed(lambda x: Hidden(x.detach())), use_orig_params=uo)
    assert free(x).get().shape == (4, 3)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO_1", "NO_SHARD"):  # nothing that was freed is needed
        torch.manual_seed(0)
        module = Boxed(Hidden)
        model = FSDP(copy.deepcopy(module), use_orig_params=uo, sharding_strategy=ShardingStrategy[strategy])
        for each in (module, model):
            each(x).get().sum().backward()
        assert_same_grads(model, module, f"{strategy} uo={uo}")


def outputs(uo):
    for box, unbox in OUTPUTS.values():
        torch.manual_seed(0)
        module = Boxed(box)
        torch.manual_seed(0)
        inner = FSDP(Boxed(box), use_orig_params=uo)
        outer = FSDP(nn.Sequential(inner), use_orig_params=uo)
        for model in (module, outer):
            unbox(model({"x": [data(0, rank=0)]})).sum().backward()
        assert_same_grads(inner, module)
    opaque_outputs(uo)
    low = FSDP(Boxed(lambda x: x), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    assert low({"x": [data(0)]}).dtype == torch.bfloat16


@pytest.mark.sweep(1)
@pytest.mark.parametrize("uo", [False, True])
def test_outputs_of_any_kind(uo):
    simulate_ranks(outputs, 2, uo)


def hooks():
    for uo in (False, True):
        calls = []

        def total(state, grad, output=None, calls=calls):
            state.append(grad.numel())
            if output is None:
                dist.all_reduce(grad)
            else:
                dist.reduce_scatter_tensor(output, grad)
                assert output.numel() * 2 == grad.numel()

        module = make()
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            calls = []
            model = wrap_blocks(make(), use_orig_params=uo, sharding_strategy=ShardingStrategy[strategy])
            model.register_comm_hook(calls, total)
            loss_of(model, data(0)).backward()
            module.zero_grad()
            Averaged(module, 2).backward(lambda rank: [data(0, rank)])
            for param in module.parameters():
                param.grad.mul_(2.0)  # the hook's sum, not the mean
            assert_same_grads(model, module)
            assert len(calls) == 4
        with pytest.raises(AssertionError, match="already registered"):
            model.register_comm_hook(calls, total)
        with pytest.raises(ValueError, match="callable"):
            wrap_blocks(make()).register_comm_hook(None, 3)
        other = wrap_blocks(make())
        with pytest.raises(RuntimeError, match="root"):
            other.blocks[0].register_comm_hook(None, total)


def test_communication_hooks():
    simulate_ranks(hooks, 2)


def scaling():
    rank = dist.get_rank()
    for strategy, uo in SETTINGS:
        note(f"{strategy} uo={uo}")
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        module = make()
        optim, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, module))
        scaler = ShardedGradScaler(device="cpu", init_scale=8.0, growth_interval=2)
        for step in range(4):
            x = data(step)
            if step == 1:
                x = x * (float("inf") if rank == 1 else 1.0)  # only one rank overflows: all of them skip
            scaler.scale(loss_of(model, x)).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            if step != 1:
                Averaged(module, 2).backward(lambda r, step=step: [data(step, r)])
                plain.step()
                plain.zero_grad()
        assert scaler.get_scale() == 8.0  # halved once, doubled after two good steps
        for (name, value), wanted in zip(full_params(model).items(), module.parameters(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-7, msg=name)


def test_the_gradient_scaler():
    simulate_ranks(scaling, 2)


def frozen_in_backward():
    """Frozen parameters are not all whole at once in backward, whether units are frozen or hold adapters."""
    for uo, adapters in itertools.product((False, True), (False, True)):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False)) for _ in range(6)]
        for layer in layers:
            layer[0].requires_grad_(False)
            layer[1].requires_grad_(adapters)
        units = [FSDP(layer, use_orig_params=uo, segments=True) for layer in layers]
        model = FSDP(nn.Sequential(nn.Linear(3, 3), *units), use_orig_params=uo)
        most = []

        def look(grad, units=units, most=most):
            most.append(sum(any(have_memory(unit._unit.core)) for unit in units))

        def watch(module, args, output, look=look):
            output.register_hook(look)

        for unit in units:
            unit.register_forward_hook(watch)
        for step in range(2):
            model(data(step)).sum().backward()
            assert len(most) == 6 * (step + 1)
            assert max(most) <= 3, most
            assert not any(any(have_memory(unit._unit.core)) for unit in units)
        if adapters:  # no input requires grad: freed when backward ends
            units[0](data(0)).sum().backward()
            assert not any(have_memory(units[0]._unit.core))


def test_frozen_parameters_are_freed_in_backward():
    simulate_ranks(frozen_in_backward, 2)


def frozen_beside_trained():
    """Low-rank adapters: one unit holds frozen and trained parameters, in segments."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(6, 6)
            self.base.requires_grad_(False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
            self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

        def forward(self, x):
            return (self.base(x) + self.up(self.down(x))) * self.scale.float()

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), Adapted(), Adapted())

    for strategy, uo in SETTINGS:
        arguments = {"use_orig_params": uo, "segments": True, "sharding_strategy": ShardingStrategy[strategy]}
        note(str(arguments))
        module, model = build(), build()
        for i in (1, 2):
            model[i] = FSDP(model[i], **arguments)
        model = FSDP(model, **arguments)
        assert_same(model, module)
        optims = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1) for m in (model, module)]
        for step in range(2):
            loss_of(model, data(step)).backward()
            oracle_backward(Averaged(module, 2), step)
            assert_same_grads(model, module)
            for part in FSDP.fsdp_modules(model)[1:]:
                segments = part._unit.flat_params
                assert len(segments) == 3
                trained = sum(s.layout.shard_numel for s in segments if s.flat.requires_grad)
                held = sum(param.grad.numel() for param in part.parameters() if param.grad is not None)
                assert held <= trained < sum(s.layout.shard_numel for s in segments)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        assert_same(model, module)


def test_frozen_beside_trained_parameters():
    simulate_ranks(frozen_beside_trained, 2)
