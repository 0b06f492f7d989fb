"""What is tested on a GPU, as functions that a rank runs. Each takes the path of the simulated device's library.

The oracles: arithmetic on exact values, the same training on the CPU, torch's FSDP1, and what the device counts.
"""

import contextlib
import functools
import gc
import itertools
import shutil
import tempfile
from pathlib import Path

import accelerator
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy as Strategy1

from flatparam import _C, CPUOffload, MixedPrecision, ShardingStrategy, checkpoint, elastic
from flatparam import FullyShardedDataParallel as FSDP

CPU = torch.device("cpu")
WIDTH = 1024 if accelerator.ON_CUDA else 256  # weights are large beside activations of two rows
BLOCKS = 8 if accelerator.ON_CUDA else 4
NARROW = 64  # where many steps tell nothing of large ones
# weights are whole segments of torch's allocator, in bf16 too
SEGMENTS = 256 if not accelerator.ON_CUDA else 3072 if accelerator.STAND_IN else 4096
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
GRIDS = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.LAYER_ZERO)
PLAIN = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


class Deep(nn.Module):
    def __init__(self, width=WIDTH, blocks=BLOCKS, bias=True):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width, bias) for _ in range(blocks)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def made(**kwargs):
    torch.manual_seed(0)
    return Deep(**kwargs)


def wrapped(group, device, wrapper=FSDP, model=None, **arguments):
    arguments = {"process_group": group, "device_id": device, "use_orig_params": True, **arguments}
    model = made() if model is None else model
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrapper(block, **arguments)
    return wrapper(model, **arguments)


def batch(step, width=WIDTH):
    return torch.randn(2, width, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def losses_of(model, device, steps=5, width=WIDTH, count=1, watched=contextlib.nullcontext):
    """The losses of some steps, in which SGD takes the gradients: its arithmetic is the same everywhere.

    ``count``: of micro-batches in a step. From the third step on what is put to the device is in ``watched()``.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        inputs = [batch(count * step + k, width).to(device) for k in range(count)]
        with watched() if step > 1 else contextlib.nullcontext():
            for k, x in enumerate(inputs):
                with model.no_sync() if k < count - 1 else contextlib.nullcontext():
                    loss = model(x).square().mean()
                    (loss / count).backward()
                    losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses).cpu()


def steady(library):
    """From the third step on the host waits for nothing, and no memory is asked for; the plan is kept to.

    All that is not as it should be is told, with the figures: the next run on a GPU may be long in coming.
    """
    here = accelerator.use(library)
    group = here.new_group(on_host=True)  # where ranks of ZERO_1 tell each other which copies are old
    wrong = []
    shared = accelerator.shared(dist.get_world_size())  # gloo takes a second for what NCCL takes a millisecond
    width, steps = (SEGMENTS // 2, 6) if shared else (SEGMENTS, 50 if accelerator.ON_CUDA else 6)
    blocks, steps = (5, 5) if accelerator.STAND_IN else (BLOCKS, steps)  # one block of memory more or less is 4 %
    for strategy in (*PLAIN, ShardingStrategy.ZERO_1):
        for precision in (None, LOW):
            what = f"{strategy.name} in {precision.param_dtype if precision else torch.float32}"
            gc.collect()
            here.synchronize()
            here.empty_cache()  # what was reserved for the model before this one
            base = here.bytes()[0]
            model = made(width=width, blocks=blocks, bias=False)
            model = wrapped(group, here.device, model=model, sharding_strategy=strategy, mixed_precision=precision)
            # fused, it has no memory of its own to blame for what is reserved
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            for step in range(steps):
                x = batch(step, width).to(here.device)
                here.synchronize()
                if step == 2:
                    asked = here.allocations()
                with contextlib.nullcontext() if step < 2 else here.no_host_waits():
                    model(x).square().mean().backward()
                    here.reset_peak()
                    model(x).square().mean().backward()  # added to the gradients that there are, as the plan has it
                    peak = here.bytes()[1]
                    model.clip_grad_norm_(1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            asked, plan, reserved = here.allocations() - asked, model.memory_plan().peak, here.reserved_over_allocated()
            found = f"{what}: asked {asked} times, peak {peak - base} of {plan} planned, {reserved:.3f} reserved"
            print(found)
            if asked or abs(peak - base - plan) > 0.02 * plan or (reserved > 1.05 and not shared):
                wrong.append(found)
            del model, optimizer, x
    assert not wrong, wrong


def like_others(library):
    """The losses of the CPU within what its other order of sums gives, and of torch's FSDP1 bit for bit."""
    here = accelerator.use(library)
    group = here.new_group()
    for strategy in (*PLAIN, ShardingStrategy.ZERO_1):
        ways = {"sharding_strategy": strategy, "shard_alignment": 1}  # torch's layout, as sums depend on places
        found = losses_of(wrapped(group, here.device, **ways), here.device)
        on_cpu = losses_of(wrapped(dist.group.WORLD, CPU, sharding_strategy=strategy), CPU)
        torch.testing.assert_close(found, on_cpu, rtol=1e-4, atol=1e-6)
        if strategy is ShardingStrategy.ZERO_1:  # which FSDP1 has not
            both = wrapped(here.new_group(on_host=True), here.device, **ways)
            assert torch.equal(found, losses_of(both, here.device))
            continue
        where, others = (here.device, group) if accelerator.ON_CUDA else (CPU, dist.group.WORLD)
        model = wrapped(others, where, wrapper=FSDP1, sharding_strategy=Strategy1[strategy.name])
        assert torch.equal(found, losses_of(model, where)), strategy


def layered(library):
    """LAYER_ZERO over inner groups of two ranks gives the CPU's losses, and the same with gradients in host memory."""
    here = accelerator.use(library)
    wide = here.new_group(on_host=True), dist.group.WORLD
    pairs = [[rank, rank + 1] for rank in range(0, dist.get_world_size(), 2)]
    inner = [(here.new_group(pair), dist.new_group(pair)) for pair in pairs][dist.get_rank() // 2]
    there, on_cpu = zip(inner, wide, strict=True)
    modes = (ShardingStrategy.LAYER_ZERO, ShardingStrategy.LAYER_ZERO_NESTED)
    for strategy, precision in itertools.product(modes, (None, LOW)):
        settings = {"sharding_strategy": strategy, "mixed_precision": precision}
        wanted = losses_of(wrapped(on_cpu, CPU, **settings), CPU, steps=3, count=3)
        for offload in (False, True):
            model = wrapped(there, here.device, offload_grads=offload, **settings)
            watched = contextlib.nullcontext if offload else here.no_host_waits
            found = losses_of(model, here.device, steps=3, count=3, watched=watched)
            if not offload:
                on_device = found
            assert torch.equal(found, on_device), (strategy, precision)
            close = {"rtol": 1e-4, "atol": 1e-6} if precision is None else {"rtol": 2e-2, "atol": 1e-3}
            torch.testing.assert_close(found, wanted, **close)


def resized(library):
    """A model that ``elastic.resize`` moves trains as one that is saved, and loaded on these ranks; and as on the CPU.

    Through host memory where the world has collectives for it, else through the device's.
    """
    here = accelerator.use(library)
    size = dist.get_world_size()
    ways = [{"sharding_strategy": strategy} for strategy in (*PLAIN, ShardingStrategy.ZERO_1)]
    ways += [{"mixed_precision": LOW}, {"cpu_offload": CPUOffload(True)}, {"use_orig_params": False, "segments": True}]
    if size % 2 == 0:
        if not accelerator.ON_CUDA:  # the simulated device has moved the others between three ranks
            ways = ways[:1]
        ways += [{"sharding_strategy": strategy} for strategy in GRIDS]
    for on_host in (True, False):
        accelerator.new_world(here, on_host)
        folder = [tempfile.mkdtemp(prefix="flatparam-resized-") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        for number, way in enumerate(ways if on_host else ways[:1]):
            found = moved(here.device, Path(folder[0], str(number)), **way)
            if on_host and "mixed_precision" not in way:
                wanted = moved(CPU, None, **{key: value for key, value in way.items() if key != "cpu_offload"})
                close = {"rtol": 1e-4, "atol": 1e-6} if accelerator.ON_CUDA else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), **close, msg=str(way))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])


def moved(device, folder, **ways):
    """The losses of this rank in steps over all ranks, then over two, and over all again.

    ``folder``: of checkpoints, with which the same is trained beside it, to compare bit for bit; None: it is not.
    """
    rank, everyone = dist.get_rank(), dist.get_world_size()
    first = {ranks: dist.new_group(range(ranks)) for ranks in (2, everyone)}
    over = grids(ways["sharding_strategy"]) if ways.get("sharding_strategy") in GRIDS else first
    model, optimizer = adam_of(device, over[everyone], **ways)
    losses, held = steps_of(model, optimizer, device, 0), everyone
    for at, ranks in enumerate((2, everyone), 1):
        if folder is not None and rank < held:
            checkpoint.save(folder / str(at), model, optimizer, process_group=first[held])
        elastic.resize(model, optimizer, range(ranks))
        dist.barrier()
        held = ranks
        if folder is not None and (rank < ranks or over is not first):  # all ranks compare their grids equally often
            other, its = adam_of(device, over[ranks], **ways)
        if rank >= ranks:
            continue
        found = steps_of(model, optimizer, device, at)
        losses += found
        if folder is not None:
            checkpoint.load(folder / str(at), other, its, process_group=first[ranks])
            assert steps_of(other, its, device, at) == found, (ways, ranks)
            check_same_state(model, optimizer, other, its, (ways, ranks))
    return losses


def grids(strategy):
    """This rank's groups over pairs, and over a grid of all ranks, whose inner groups are pairs."""
    rank, everyone = dist.get_rank(), dist.get_world_size()
    cuts = [[(i, i + 1) for i in range(0, everyone, 2)], [range(i, everyone, 2) for i in (0, 1)]]
    cuts.append([(i,) for i in range(everyone)])
    made = [[(ranks, dist.new_group(ranks)) for ranks in cut] for cut in cuts]
    pair, column, alone = (next(group for ranks, group in cut if rank in ranks) for cut in made)
    if strategy is ShardingStrategy.LAYER_ZERO:
        return {2: (pair, pair), everyone: (pair, dist.group.WORLD)}
    return {2: (pair, alone), everyone: (pair, column)}


def adam_of(device, group, **ways):
    model = wrapped(group, device, model=made(width=NARROW, blocks=3), **ways)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def steps_of(model, optimizer, device, first, steps=3):
    """The losses, as numbers. Sums of two and of four ranks are the same in each order, those of three are not."""
    found = []
    for step in range(first * steps, (first + 1) * steps):
        loss = model(batch(step, NARROW).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def check_same_state(model, optimizer, other, its, what):
    for left, right in zip(FSDP.fsdp_modules(model), FSDP.fsdp_modules(other), strict=True):
        assert not left._unit.flat_params or (left._placement.host is None) == (right._placement.host is None), what
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert (left.device, left.is_pinned()) == (right.device, right.is_pinned()), what
        assert torch.equal(left.detach().cpu(), right.detach().cpu()), what
        mine, theirs = optimizer.state.get(left, {}), its.state.get(right, {})
        assert mine.keys() == theirs.keys(), what
        for key, value in mine.items():
            assert value.device == theirs[key].device, (what, key)
            assert torch.equal(value.cpu(), theirs[key].cpu()), (what, key)


def beside_each_other(library):
    """Two models that take turns, each on a stream of its own, train as each alone on the current one."""
    here = accelerator.use(library)
    group = here.new_group()
    alone = losses_of(wrapped(group, here.device), here.device)
    models = [wrapped(group, here.device) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    streams = [torch.Stream(here.device) for _ in models]
    losses = [[], []]
    for step in range(5):
        x = batch(step).to(here.device)
        here.synchronize()
        for k, (model, optimizer, stream) in enumerate(zip(models, optimizers, streams, strict=True)):
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                loss = model(x).square().mean()
                loss.backward()
                losses[k].append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
        here.synchronize()
    for found in losses:
        assert torch.equal(torch.stack(found).cpu(), alone)


def beside_a_capture(library):
    """Steps while another thread captures a graph: no step spoils it, or fails."""
    here = accelerator.use(library)
    group = here.new_group(on_host=True)
    for ways in ({}, {"sharding_strategy": ShardingStrategy.ZERO_1}, {"cpu_offload": CPUOffload(True)}):
        eager, model = (wrapped(group, here.device, model=made(width=NARROW), **ways) for _ in range(2))
        wanted = torch.cat([losses_of(eager, here.device, steps, NARROW) for steps in (3, 3)])
        found = [losses_of(model, here.device, 3, NARROW)]  # all memory is there now
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs = [batch(step, NARROW).to(here.device) for step in range(3)]
        here.synchronize()
        with here.captured_beside():
            for x in inputs:
                loss = model(x).square().mean()
                loss.backward()
                found.append(loss.detach())
                if "cpu_offload" not in ways:  # its norms are read by torch's copies that wait
                    model.clip_grad_norm_(1e9)
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(torch.hstack([each.cpu() for each in found]), wanted), ways


class Shown(nn.Module):
    """Gives its parameters away: their gradients are what a backward is given, and no kernel but ours runs."""

    def __init__(self, many):
        super().__init__()
        self.params = nn.ParameterList([torch.zeros(1 + i % 37, 1 + i % 5) for i in range(many)])

    def forward(self):
        return [param.view_as(param) for param in self.params]


def gradients(many, device):
    """Values that every dtype has; None for one of them; every other one is transposed."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for i in range(many):
        values = torch.randint(-128, 128, (1 + i % 5, 1 + i % 37), generator=generator).float().div(8).to(device)
        made.append(values.t() if i % 2 else values.t().contiguous())
    made[3] = None
    return made


def packed(library):
    """Packing, adding and casting of few to many gradients: exact values, with kernel arguments of all three kinds."""
    here = accelerator.use(library)
    group = here.new_group()
    for many in (7, 300, 1500 if accelerator.ON_CUDA else 400):
        for precision in (None, LOW, MixedPrecision(param_dtype=torch.bfloat16)):
            model = FSDP(
                Shown(many), process_group=group, device_id=here.device, use_orig_params=True, mixed_precision=precision
            )
            given = gradients(many, here.device)
            for micro_batches in (1, 2):
                for k in range(micro_batches):
                    with contextlib.nullcontext() if k == micro_batches - 1 else model.no_sync():
                        pairs = [(p, g.to(p.dtype)) for p, g in zip(model(), given, strict=True) if g is not None]
                        torch.autograd.backward(*zip(*pairs, strict=True))
                with FSDP.summon_full_params(model, with_grads=True, writeback=False):
                    for i, (param, grad) in enumerate(zip(model.module.params, given, strict=True)):
                        found = torch.zeros_like(param) if param.grad is None else param.grad
                        wanted = torch.zeros_like(param) if grad is None else grad * micro_batches
                        assert torch.equal(found.cpu(), wanted.cpu()), (many, precision, micro_batches, i)
                norm = model.clip_grad_norm_(1e9).cpu()
                exact = torch.cat([grad.flatten().double() for grad in given if grad is not None]).norm().cpu()
                torch.testing.assert_close(norm.double(), exact * micro_batches, rtol=1e-6, atol=0)
                model.zero_grad()


class One(nn.Module):
    """Gives its parameter away, in the dtype that it is gathered in."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(values.clone())

    def forward(self):
        return self.values.view_as(self.values)


def converted(library):
    """All values of 16 bits to fp32, and those of fp32 where rounding turns to 16 bits, as the CPU casts them."""
    here = accelerator.use(library)
    group = here.new_group()
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32).bitwise_left_shift(16)
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    wide = (upper[:, None] + lower).flatten().view(torch.float32)
    narrow = torch.arange(-(2**15), 2**15).to(torch.int16)
    for low in (torch.bfloat16, torch.float16):
        precision = MixedPrecision(param_dtype=low, reduce_dtype=torch.float32)
        arguments = {"process_group": group, "device_id": here.device, "mixed_precision": precision}
        model = FSDP(One(wide), **arguments, use_orig_params=True)
        check_same_values(model(), wide.to(low), f"fp32 to {low}")
        model = FSDP(One(torch.zeros(len(narrow))), **arguments, use_orig_params=True)
        model().backward(narrow.view(low).to(here.device))
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            check_same_values(model.module.values.grad, narrow.view(low).float(), f"{low} to fp32")


def check_same_values(found, wanted, what):
    """The same bits, but for those of NaNs."""
    found = found.detach().cpu()
    bits = torch.int16 if wanted.itemsize == 2 else torch.int32
    assert found.dtype == wanted.dtype, what
    assert torch.equal(found.isnan(), wanted.isnan()), what
    differ = (found.view(bits) != wanted.view(bits)) & ~wanted.isnan()
    assert not differ.any(), (what, found[differ][:5], wanted[differ][:5])


def offloaded(library):
    """Shards and gradients in host memory: the losses of those on the device."""
    here = accelerator.use(library)
    group = here.new_group()
    wanted = losses_of(wrapped(group, here.device), here.device)
    found = losses_of(wrapped(group, here.device, cpu_offload=CPUOffload(True)), here.device)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def replayed(library):
    """Forward and backward in a CUDA graph: 20 steps as without. In bf16 a rank by itself gathers too."""
    here = accelerator.use(library)
    group = here.new_group()
    for precision in (None, LOW):
        replay(here, *(wrapped(group, here.device, mixed_precision=precision) for _ in range(2)))


def replay(here, eager, model, warm=3, steps=20, width=WIDTH, before=lambda model, x: None):
    wanted = losses_of(eager, here.device, steps, width)
    x, loss = torch.zeros(2, width, device=here.device), torch.zeros((), device=here.device)

    def step():
        now = model(x).square().mean()
        now.backward()
        loss.copy_(now.detach())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    side = torch.Stream(here.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(warm):
            step()
            optimizer.step()
            optimizer.zero_grad()
    torch.accelerator.current_stream().wait_stream(side)
    optimizer.param_groups[0]["lr"] = 0.01
    before(model, x)
    optimizer.zero_grad()
    replay, found = here.captured(step), []
    for number in range(steps):
        x.copy_(batch(number, width))
        replay()
        found.append(loss.cpu())
        optimizer.step()
        if not accelerator.ON_CUDA:
            optimizer.zero_grad()  # a replay writes the gradient, a call adds to it
    assert torch.equal(torch.stack(found), wanted)


def broken_off(library):
    """Captures that fail have run nothing: the steps after them, and the next capture, are as if they had not been."""
    here = accelerator.use(library)
    group = here.new_group()
    for strategy, precision in zip(PLAIN, (None, LOW, LOW), strict=True):
        ways = {"sharding_strategy": strategy, "mixed_precision": precision}
        both = [wrapped(group, here.device, model=made(width=NARROW), **ways) for _ in range(2)]
        check_steps(here, *both, "never captured")
        for way in WAYS:
            break_off(here, *both, way)
        # what no_sync leaves gathered is good neither in the next capture nor after its own
        replay(here, *both, warm=0, steps=3, width=NARROW, before=gathered)
        here.captured(functools.partial(gathered, both[1], batch(0, NARROW).to(here.device)))
        check_steps(here, *both, "captured in no_sync")


def break_off(here, eager, model, way):
    x = batch(0, NARROW).to(here.device)
    model.zero_grad()
    base = bytes_left(here)
    for _ in range(2):  # the second one without a step in between
        here.broken_capture(way, model, x)
        model.zero_grad()
    check_steps(here, eager, model, way)
    assert bytes_left(here) - base < 4 * NARROW * NARROW, way  # no unit is left; torch's graphs have some
    here.broken_capture(way, model, x)
    model.zero_grad()
    replay(here, eager, model, warm=0, steps=3, width=NARROW)


def check_steps(here, eager, model, what):
    model.zero_grad()
    found, wanted = (losses_of(each, here.device, steps=3, width=NARROW) for each in (model, eager))
    assert torch.equal(found, wanted), what


def bytes_left(here):
    gc.collect()
    here.synchronize()
    here.drop_workspaces()
    return here.bytes()[0]


def gathered(model, x):
    """Which no_sync leaves some strategies."""
    with model.no_sync():
        model(x).square().mean().backward()


def raising(*ignored):
    raise ZeroDivisionError


def in_forward(model, x):
    hook = model.blocks[-3].module.register_forward_pre_hook(raising)
    try:
        model(x)
    finally:
        hook.remove()


def in_backward(model, x):
    hook = model.blocks[len(model.blocks) // 2 - 1].module.register_full_backward_hook(raising)
    try:
        model(x).square().mean().backward()
    finally:
        hook.remove()


def before_backward(model, x):
    raise ZeroDivisionError(model(x).square().mean().item())  # a device that captures has no value, and raises before


def after_backward(model, x):
    loss = model(x).square().mean()
    loss.backward()
    raise ZeroDivisionError(loss.item())


def in_no_sync(model, x):
    with model.no_sync():
        in_backward(model, x)


def after_no_sync(model, x):
    gathered(model, x)
    in_backward(model, x)


def kept(model, x):
    gathered(model, x)
    raise ZeroDivisionError


WAYS = (in_forward, in_backward, before_backward, after_backward, in_no_sync, after_no_sync, kept)


def one_communicator(library):
    """A communicator of one rank: in place, several in one call, and from registered memory."""
    here = accelerator.use(library)
    groups = [here.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()]
    memory, pool, why_not = here.registered(group, 4096)
    if why_not:
        print(why_not)
    memory.copy_(torch.arange(4096.0))
    dist.all_gather_into_tensor(memory, memory, group=group)
    dist.reduce_scatter_tensor(memory, memory, group=group)
    halves = memory.chunk(2)
    group._start_coalescing(here.device)
    for half in halves:
        dist.all_gather_into_tensor(half, half, group=group, async_op=True)
    group._end_coalescing(here.device).wait()
    assert torch.equal(memory.cpu(), torch.arange(4096.0))
    gathered, gather = torch.zeros_like(memory), _C.Gather(group, group.group_name, False)
    gather.begin(gathered, memory)
    gather.wait()
    assert torch.equal(gathered.cpu(), torch.arange(4096.0))
    if pool is not None:
        group._get_backend(here.device).deregister_mem_pool(pool)
    del memory, halves, half  # before the pool


BODIES = (
    steady,
    like_others,
    layered,
    resized,
    beside_each_other,
    beside_a_capture,
    packed,
    converted,
    offloaded,
    replayed,
    broken_off,
    one_communicator,
)
EVERY = [(body, ranks) for body in BODIES if body not in (layered, resized) for ranks in (1, 2)]
EVERY += [(like_others, 3), (layered, 4)]  # which divide by no power of two; inner groups that are not all
EVERY += [(resized, ranks) for ranks in (3, 4)]


def runs(body, ranks):
    """Inner groups are of two. What the host does between ranks that share a GPU cannot be captured."""
    if body is layered:
        return ranks > 2 and ranks % 2 == 0
    if body is resized:
        return ranks > 2
    return body not in (beside_a_capture, replayed, broken_off) or not accelerator.shared(ranks)


HERE = [(body, ranks) for body, ranks in EVERY if runs(body, ranks)]
LEFT_OUT = [f"{body.__name__} by NCCL on {ranks} GPUs" for body, ranks in EVERY if accelerator.shared(ranks)]
