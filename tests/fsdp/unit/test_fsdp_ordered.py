"""reduction="ordered": gradients whose bits do not depend on the number of ranks.

The oracle is a plain module that loops over the micro-batches of the global batch. All is compared bit for bit.

Promises:
- a global batch, cut into micro-batches that are dealt in turn to 1, 2, 3, 4 or 8 ranks, gives the gradients of the
  loop, and two steps of an optimizer its parameters, also where micro-batches use different parameters:
  `test_any_number_of_ranks_trains_as_one`; on real gloo ranks, where collectives go through Python, too:
  `test_gloo_ranks_exchange_parts`; on a device, with its shards on the host, too: `test_devices_train_as_one`
- gradients that are sent in bf16 are added in fp32, and differ from exact ones by less than the bound in
  docs/equality.md: `test_a_wire_of_bf16`, `test_the_bound_of_a_wire_of_bf16_is_reached`
- a batch begun on some ranks is finished on others with the same bits: `test_training_goes_on_with_other_ranks`
- hooks of `register_hook` get the gradient of each micro-batch, and their exceptions leave `.grad` as it was;
  `register_post_accumulate_grad_hook` calls once in a backward; gradients clipped by the norm of whole ones keep the
  bits: `test_hooks_get_each_micro_batch`, `test_an_exception_in_a_hook_adds_nothing`,
  `test_clipping_by_the_norm_of_whole_gradients`
- Ctrl-C ends a wait for an exchange, which goes on with the next step; a rank that dies before it is named:
  `test_an_interrupted_exchange_adds_nothing`, `test_a_rank_that_is_lost_is_named`
- the optimizer that docs/equality.md shows is one of those here; fused ones do not keep the bits where lengths differ:
  `test_the_page_shows_an_optimizer_that_keeps_the_promise`, `test_fused_steps_depend_on_the_length_of_pieces`
- what would break the order is refused by name, on all ranks: `test_what_has_no_order_is_refused`,
  `test_ranks_with_different_settings_are_told_of_the_setting`
"""

import functools
import itertools
import os
import pathlib
import re
import signal
import time

import pytest
import simulated
import torch
import torch.distributed as dist
from gloo import ends_of_ranks, fake_world, note, run_ranks, say, wait_until_said
from simulated_ranks import simulate_ranks
from test_fsdp_reductions import Sent
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flatparam import CPUOffload, MixedPrecision, ShardingStrategy, elastic, optim
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp import OrderError

MICRO_BATCHES, STEPS = 24, 2
BF16 = torch.bfloat16
RANKS = (1, 2, 3, 4, 8)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO_1")


class Net(nn.Module):
    """Odd sizes, which each number of ranks pads otherwise.

    Every third micro-batch uses ``sometimes``, with a gradient of -0.0 for one of its elements.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.head = nn.Linear(7, 3)
        self.shift, self.sometimes = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x, number):
        x = x + self.shift
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = (self.head(x) * self.frozen).square().mean()
        return x if number % 3 else x + (self.sometimes * x.new_tensor([-0.0, 1.0, 2.0, 3.0, 4.0])).sum()


def make(dtype=torch.float32):
    torch.manual_seed(0)
    return Net().to(dtype)


def loss_of(model, step, number):
    param = next(model.parameters())
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + number))
    return model(x.to(param.device, param.dtype), number) / MICRO_BATCHES


OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
}


def unsharded(kind, wire=None, dtype=torch.float32, change=lambda grad: grad, clip=None, steps=STEPS):
    """The gradients of the first batch and the parameters in the end, of a plain module that loops over micro-batches.

    ``wire``: each micro-batch's gradient is rounded to it. ``change``: changes it. ``clip``: the largest norm.
    """
    module = make(dtype)
    params = dict(module.named_parameters())
    trained = {name: param for name, param in params.items() if param.requires_grad}
    optimizer = OPTIMIZERS[kind](params.values())
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            grads = torch.autograd.grad(loss_of(module, step, number), list(trained.values()), allow_unused=True)
            for param, grad in zip(trained.values(), grads, strict=True):
                if grad is not None:
                    grad = change(grad.to(wire or dtype).to(dtype))
                    param.grad = grad.clone() if param.grad is None else param.grad + grad
        if clip is not None:
            nn.utils.clip_grad_norm_(trained.values(), clip)
        if step == 0:
            first = {name: param.grad.clone() for name, param in trained.items()}
        optimizer.step()
    return first, {name: param.detach() for name, param in params.items()}


def wrapped(strategy="FULL_SHARD", dtype=torch.float32, **settings):
    settings = {"reduction": "ordered", "use_orig_params": True, **settings}
    settings["segments"] = not settings["use_orig_params"]  # the frozen parameter needs a flat parameter of its own
    return FSDP(make(dtype), auto_wrap_policy={nn.Linear}, sharding_strategy=ShardingStrategy[strategy], **settings)


def whole(model, what):
    """``what`` of each parameter, by its name in the plain module."""
    on_host = next(model.parameters()).is_cpu  # .data of a parameter cannot change its device
    with FSDP.summon_full_params(model, writeback=False, with_grads=True, offload_to_cpu=on_host):
        found = {name.replace("_fsdp_wrapped_module.", ""): what(param) for name, param in model.named_parameters()}
        return {name: value.detach().cpu().clone() for name, value in found.items() if value is not None}


def trained(model, kind, clip=None, steps=STEPS):
    """The same as ``unsharded`` of a model on these ranks."""
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(dist.get_rank(), MICRO_BATCHES, dist.get_world_size()):
            loss_of(model, step, number).backward()
        if clip is not None:
            clip(model)
        if step == 0:
            first = whole(model, lambda param: param.grad)
            for param in model.parameters():  # what was received is not kept
                assert param.grad is None or param.grad.untyped_storage().nbytes() <= 4 * sum(
                    handle.flat.numel() for unit in FSDP.fsdp_modules(model) for handle in unit._unit.flat_params
                )
        optimizer.step()
    return first, whole(model, lambda param: param)


def assert_same(found, wanted):
    for some, expected in zip(found, wanted, strict=True):
        assert some.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(some[name], value), name
            assert torch.equal(some[name].signbit(), value.signbit()), name


def all_of_them():
    machines, rest = divmod(dist.get_world_size(), 4)
    mesh = None if rest else init_device_mesh("cpu", (2 * machines, 2))
    cases = itertools.product(STRATEGIES if rest else (*STRATEGIES, "LAYER_ZERO"), OPTIMIZERS, (True, False))
    small = {"AdamW": 0, "SGD": 2**20}  # with SGD the units are gathered as one
    return {
        (strategy, kind, originals): trained(
            wrapped(
                strategy,
                use_orig_params=originals,
                min_unit_bytes=small[kind],
                device_mesh=mesh if strategy == "LAYER_ZERO" else None,
            ),
            kind,
        )
        for strategy, kind, originals in cases
    }


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", RANKS)
def test_any_number_of_ranks_trains_as_one(ranks):
    wanted = {kind: unsharded(kind) for kind in OPTIMIZERS}
    for of_rank in simulate_ranks(all_of_them, ranks):
        for (_, kind, _), found in of_rank.items():
            assert_same(found, wanted[kind])


def test_the_page_shows_an_optimizer_that_keeps_the_promise():
    page = (pathlib.Path(__file__).parents[3] / "docs" / "equality.md").read_text().split("## Any number of ranks")[1]
    (shown,) = re.findall("^optimizer = (.*)$", page, flags=re.MULTILINE)
    optimizer, tested = eval(shown, {"torch": torch, "model": make()}), OPTIMIZERS["AdamW"](make().parameters())
    assert type(optimizer) is type(tested)
    assert optimizer.defaults == tested.defaults


@pytest.mark.parametrize("make_one", [functools.partial(torch.optim.AdamW, fused=True), optim.AdamW, torch.optim.AdamW])
def test_fused_steps_depend_on_the_length_of_pieces(make_one):
    """As the page says; without ``fused=True`` they do not."""
    values = torch.randn(2, 15 * 500, generator=torch.Generator().manual_seed(0))
    found = []
    for cut in (1, 15):
        params = [nn.Parameter(piece.clone()) for piece in values[0].split(15 * 500 // cut)]
        optimizer = make_one(params, lr=0.01)
        for _ in range(3):
            for param, grad in zip(params, values[1].split(15 * 500 // cut), strict=True):
                param.grad = grad.clone()
            optimizer.step()
        found.append(torch.cat([param.detach() for param in params]))
    assert torch.equal(*found) == (make_one is torch.optim.AdamW)


def on_gloo():
    model = wrapped()
    loss = loss_of(model, 0, dist.get_rank())
    with Sent() as sent:
        loss.backward()
    model.zero_grad()
    return trained(model, "AdamW"), {name for name, _ in sent.found}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "debug"), [(3, "OFF"), (2, "DETAIL")])  # of DETAIL collectives go through Python
def test_gloo_ranks_exchange_parts(ranks, debug):
    for found, sent in run_ranks(on_gloo, ranks, environment={"TORCH_DISTRIBUTED_DEBUG": debug}):
        assert_same(found, unsharded("AdamW"))
        assert "alltoall_base_" in sent
        assert not any("reduce" in name for name in sent), sent


def on_devices(library):
    simulated.use(library)
    group, device = simulated.new_group(), torch.device("sim", 0)
    found = []
    for settings in ({}, {"cpu_offload": CPUOffload(True)}, {"mixed_precision": MixedPrecision(reduce_dtype=BF16)}):
        note(settings)
        found.append(trained(wrapped(process_group=group, device_id=device, **settings), "SGD", steps=1))
    return found


@pytest.mark.multiprocess
def test_devices_train_as_one():
    for found in run_ranks(on_devices, 3, str(simulated.build())):
        for some, wire in zip(found, (None, None, BF16), strict=True):
            assert_same(some, unsharded("SGD", wire, steps=1))


def in_bf16():
    mixed = MixedPrecision(reduce_dtype=BF16)
    sent = [trained(wrapped(mixed_precision=mixed, use_orig_params=uo), "SGD") for uo in (True, False)]
    return sent, trained(wrapped(dtype=BF16), "SGD")


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_wire_of_bf16(ranks):
    wanted = unsharded("SGD", BF16)
    for sent, kept in simulate_ranks(in_bf16, ranks):
        for found in sent:
            assert_same(found, wanted)
        assert_same(kept, unsharded("SGD", dtype=BF16))  # parameters in bf16: .grad adds in bf16, as the loop's does
    module, exact, sizes = make(), {}, {}  # sums in fp64
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    for number in range(MICRO_BATCHES):
        grads = torch.autograd.grad(loss_of(module, 0, number), list(params.values()), allow_unused=True)
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                exact[name] = exact.get(name, 0.0) + grad.double()
                sizes[name] = sizes.get(name, 0.0) + grad.double().abs()
    errors = {name: (wanted[0][name] - value).abs() for name, value in exact.items()}
    for name, error in errors.items():
        assert (error <= (2.0**-8 + MICRO_BATCHES * 2.0**-24) * sizes[name]).all(), name
    assert max(error.max() for error in errors.values()) > 0


def farthest_from_bf16():
    model = FSDP(nn.Linear(1, 2, bias=False), reduction="ordered", mixed_precision=MixedPrecision(reduce_dtype=BF16))
    model(torch.full((1, 1), 1.0 + 2.0**-8)).sum().backward()
    return model._fsdp_wrapped_module._flat_param.grad


@pytest.mark.multiprocess
def test_the_bound_of_a_wire_of_bf16_is_reached():
    for grad in simulate_ranks(farthest_from_bf16, 2):
        error, size = 2 * (1.0 + 2.0**-8) - grad.item(), 2 * (1.0 + 2.0**-8)
        assert 2.0**-9 * size < error <= 2.0**-8 * size


def resized(sizes):
    """As ``trained``, with other ranks in each step, which also take the second half of its batch."""
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    rank, now = dist.get_rank(), dist.get_world_size()
    for step, after in enumerate(sizes):
        for numbers in (range(12), range(12, MICRO_BATCHES)):
            if rank < now:
                for number in numbers[rank::now]:
                    loss_of(model, step, number).backward()
            if numbers.start == 0:
                elastic.resize(model, optimizer, range(after))
                now = after
        if rank < now:
            optimizer.step()
            optimizer.zero_grad()
    return whole(model, lambda param: param) if rank < now else None


@pytest.mark.multiprocess
def test_training_goes_on_with_other_ranks():
    _, wanted = unsharded("AdamW")
    for found in simulate_ranks(resized, 4, (2, 3))[:3]:
        assert_same([found], [wanted])


def hooked():
    model, seen = wrapped(), []
    for param in (param for param in model.parameters() if param.requires_grad):
        param.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
        param.register_post_accumulate_grad_hook(seen.append)
    found = trained(model, "SGD")
    return found, len(seen)


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [1, 3])
def test_hooks_get_each_micro_batch(ranks):
    wanted = unsharded("SGD", change=lambda grad: grad.clamp(-0.001, 0.001))
    for found, calls in simulate_ranks(hooked, ranks):
        assert_same(found, wanted)
        backwards = STEPS * MICRO_BATCHES // ranks
        assert backwards <= calls <= backwards * len(wanted[0])
        assert calls % backwards == 0


def raising():
    model = wrapped()
    loss_of(model, 0, dist.get_rank()).backward()
    calls = []

    def hook(grad):
        calls.append(grad)
        if len(calls) == 2:
            raise ZeroDivisionError

    param = next(param for param in model.parameters() if param.grad is not None)
    registered, values = param.register_hook(hook), param.grad.clone()
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 1, dist.get_rank()).backward()
    assert torch.equal(param.grad, values)
    registered.remove()
    model.zero_grad()
    return trained(model, "SGD")


@pytest.mark.multiprocess
def test_an_exception_in_a_hook_adds_nothing():
    for found in simulate_ranks(raising, 2):
        assert_same(found, unsharded("SGD"))


def clip_whole(model):
    """As docs/equality.md says."""
    with FSDP.summon_full_params(model, with_grads=True):
        norm = nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)


def clipped():
    found = trained(wrapped(), "SGD", clip_whole)
    return found, trained(wrapped(), "SGD", lambda model: model.clip_grad_norm_(100.0))


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, 3])
def test_clipping_by_the_norm_of_whole_gradients(ranks):
    for found, below in simulate_ranks(clipped, ranks):
        assert_same(found, unsharded("SGD", clip=0.05))
        assert_same(below, unsharded("SGD"))  # a norm below the largest changes nothing


def interrupted():
    """Rank 0 is interrupted while it waits for an exchange, and all do the step once more."""
    model = FSDP(make(), reduction="ordered", use_orig_params=True)
    loss_of(model, 0, dist.get_rank()).backward()
    wanted = whole(model, lambda param: param.grad)
    model.zero_grad()
    loss = loss_of(model, 0, dist.get_rank())
    if dist.get_rank():
        wait_until_said("interrupted")
        loss.backward()
    else:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        assert time.monotonic() - begin < 5.0
        say("interrupted")
    model.zero_grad()
    loss_of(model, 0, dist.get_rank()).backward()
    assert_same([whole(model, lambda param: param.grad)], [wanted])


@pytest.mark.multiprocess
def test_an_interrupted_exchange_adds_nothing():
    run_ranks(interrupted, 3)


def lost():
    """Rank 2 dies before its first exchange."""
    model = wrapped()
    loss_of(model, 0, dist.get_rank()).backward()
    loss = loss_of(model, 0, dist.get_rank())
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
    except OrderError as error:
        note(error)
        os._exit(3)


@pytest.mark.multiprocess
def test_a_rank_that_is_lost_is_named():
    ends = ends_of_ranks(lost, 3, timeout=60.0)
    assert [code for code, _, _ in ends[:2]] == [3, 3], ends
    for _, _, said in ends[:2]:
        assert "the process of rank 2" in said, ends


def test_what_has_no_order_is_refused():
    with fake_world(2):
        for name in ("NO_SHARD", "HYBRID_SHARD"):
            groups = {} if name == "NO_SHARD" else {"device_mesh": init_device_mesh("cpu", (2, 1))}
            with pytest.raises(ValueError, match=f'reduction="ordered" adds .*{name} reduces'):
                wrapped(name, **groups)
        for other in ("average", True):
            with pytest.raises(ValueError, match='expected reduction to be "ordered" or None'):
                wrapped(reduction=other)
        mixed = nn.Sequential(FSDP(nn.Linear(3, 3)), nn.Linear(3, 3))
        mixed = FSDP(mixed, reduction="ordered")
        with pytest.raises(ValueError, match="one homogeneous value for _reduction in a tree"):
            mixed(torch.ones(1, 3))
        model = wrapped()
        with pytest.raises(ValueError, match=r'no_sync: .* has reduction="ordered"'), model.no_sync():
            pass
        with pytest.raises(RuntimeError, match=r'register_comm_hook: .* has reduction="ordered"'):
            model.register_comm_hook(None, print)
        loss_of(model, 0, 0).backward()


def differs():
    try:
        FSDP(nn.Linear(3, 3), reduction="ordered" if dist.get_rank() == 0 else None)
    except ValueError as error:
        return str(error)


@pytest.mark.multiprocess
def test_ranks_with_different_settings_are_told_of_the_setting():
    for message in simulate_ranks(differs, 2):
        assert "reduction=ordered" in message, message
        assert "reduction=None" in message, message
