"""Steps with more than one backward after the forwards, on unsharded and on wrapped modules; run by the ranks.

All values are small integers, so that sums over the ranks and bfloat16 are exact.
"""

import contextlib
import functools
import itertools

import torch
import torch.distributed as dist
from gloo import handle_of
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.utils.checkpoint import checkpoint

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
MORE = (
    {"units": "one"},
    {"units": "many"},
    {"units": "one", "bf16": True},
    {"units": "many", "bf16": True},
    {"units": "many", "offload": True},
    {"units": "many", "frozen": True},
    {"units": "many", "replaced": True},
    {"units": "many", "reentrant": False},
    {"units": "many", "reentrant": True},
    {"units": "one", "bf16": True, "reentrant": False},
)


class TwoHeads(nn.Module):
    """A body and two heads, whose weights are -1, 0 and 1."""

    reentrant = None

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))

    def body(self, x):
        return self.second(self.first(x).relu()).relu()

    def forward(self, x):
        y = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.left(y), self.right(y)


def one_after_another(call, batches, no_sync):
    left, right = call(batches[0])
    left.sum().backward(retain_graph=True)
    right.sum().backward()


def the_other_head_first(call, batches, no_sync):
    """A unit has its first backward in the second one."""
    left, right = call(batches[0])
    right.sum().backward(retain_graph=True)
    left.sum().backward()


def head_by_head(call, batches, no_sync):
    x = batches[0].detach()
    lefts, rights = zip(*(call(x.roll(i, 1)) for i in range(7)), strict=True)
    for left in lefts:
        left.sum().backward(retain_graph=True)
    for right in rights:
        right.sum().backward()


def many_forwards(call, batches, no_sync):
    x = batches[0].detach()
    loss = sum((call(x.roll(i, 1))[i % 2] * (i % 5 == 0)).sum() for i in range(70))
    loss.backward()


def the_same_again(call, batches, no_sync):
    loss = sum(output.sum() for output in call(batches[0]))
    for kept in (True, True, False):
        loss.backward(retain_graph=kept)


def first_forward_first(call, batches, no_sync):
    for loss in [sum(output.sum() for output in call(batch)) for batch in batches]:
        loss.backward()


def last_forward_first(call, batches, no_sync):
    for loss in reversed([sum(output.sum() for output in call(batch)) for batch in batches]):
        loss.backward()


def without_communication_first(call, batches, no_sync):
    losses = [sum(output.sum() for output in call(batch)) for batch in batches]
    with no_sync():
        losses[0].backward()
    losses[1].backward()


def without_communication_last(call, batches, no_sync):
    """And another forward, whose backward reduces what the second one has left."""
    losses = [sum(output.sum() for output in call(batch)) for batch in batches]
    losses[0].backward()
    with no_sync():
        losses[1].backward()
    sum(output.sum() for output in call(batches[0])).backward()


def with_a_forward_between(call, batches, no_sync):
    """The last backward is of two forwards, of which one had a backward before."""
    first = sum(output.sum() for output in call(batches[0]))
    first.backward(retain_graph=True)
    second = sum(output.sum() for output in call(batches[1]))
    (first + second).backward()


STEPS = {
    step.__name__: step
    for step in (
        one_after_another,
        the_other_head_first,
        head_by_head,
        many_forwards,
        the_same_again,
        first_forward_first,
        last_forward_first,
        without_communication_first,
        without_communication_last,
        with_a_forward_between,
    )
}


def batches_of(rank):
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randint(-1, 2, (3, 4), generator=generator).float().requires_grad_() for _ in range(2)]


def wrapped(strategy, orig, units, bf16=False, offload=False, frozen=False, replaced=False, reentrant=None):
    settings = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": orig,
        "device_id": torch.device("cpu"),
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16) if bf16 else None,
        "cpu_offload": CPUOffload(offload),
    }
    model = TwoHeads()
    model.reentrant = reentrant
    if frozen:
        model.second.requires_grad_(False)
    if units == "many":
        model.first, model.second, model.left = (
            FullyShardedDataParallel(module, **settings) for module in (model.first, model.second, model.left)
        )
    model = FullyShardedDataParallel(model, **settings)
    if replaced:  # by one that does the same: the handle does its steps one by one then
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            handle = unit._handle
            handle._use_unsharded_views = functools.partial(type(handle)._use_unsharded_views, handle)
    return model


def expected(step, frozen, reentrant, rounds):
    """The unsharded module after SGD with the mean of the ranks' gradients."""
    model = TwoHeads()
    model.reentrant = reentrant
    if frozen:
        model.second.requires_grad_(False)
    for rank in range(dist.get_world_size()):
        for _ in range(rounds):
            step(model, batches_of(rank), contextlib.nullcontext)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return [parameter.detach() for parameter in model.parameters()]


def wrong(strategy, orig, more, name, zeroed):
    """Return what differs from the unsharded module after two rounds, between which gradients are zeroed or not."""
    step, model = STEPS[name], wrapped(strategy, orig, **more)
    for number in range(2):
        step(model, batches_of(dist.get_rank()), model.no_sync)
        if zeroed and number == 0:
            model.zero_grad()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    right = expected(step, more.get("frozen", False), more.get("reentrant"), 1 if zeroed else 2)
    with FullyShardedDataParallel.summon_full_params(model):
        pairs = zip(right, model.named_parameters(), strict=True)
        return [of for value, (of, param) in pairs if not torch.equal(value, param)]


def cases_of_all():
    """Return all (strategy, orig, more settings, name of the step, whether gradients are zeroed between two rounds).

    Without what torch's runtime cannot do: it frees a frozen unit before an earlier forward comes to it.
    """
    cases = itertools.product(STRATEGIES, (True, False), MORE, STEPS, (True, False))
    cases = [case for case in cases if not ("frozen" in case[2] and case[3] == "with_a_forward_between")]
    long = (head_by_head.__name__, many_forwards.__name__)
    return [case for case in cases if case[3] not in long or case[2] == {**case[2], "units": "one", "bf16": True}]


def all_wrong(cases):
    """Return [(case, what differs)]."""
    with handle_of("flatparam"):
        return [(case, wrong(*case)) for case in cases]


def backward_after_others_step(strategy, orig):
    """Return whether a backward is right that comes after an optimizer of other units has stepped."""
    with handle_of("flatparam"):
        model, other = wrapped(strategy, orig, "many"), wrapped(strategy, orig, "one")
        sum(output.sum() for output in other(batches_of(0)[0])).backward()
        left, right = model(batches_of(dist.get_rank())[0])
        left.sum().backward(retain_graph=True)
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        right.sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        with FullyShardedDataParallel.summon_full_params(model):
            pairs = zip(expected(one_after_another, False, None, 1), model.parameters(), strict=True)
            return all(torch.equal(a, b) for a, b in pairs)


def backward_after_a_step(strategy, orig):
    """Return what a backward after the optimizer's step says, and whether the next step is right."""
    with handle_of("flatparam"):
        model = wrapped(strategy, orig, "many")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        batch = batches_of(dist.get_rank())[0]
        loss = sum(output.sum() for output in model(batch))
        loss.backward(retain_graph=True)
        optimizer.step()
        said = "nothing"
        try:
            loss.backward()
        except RuntimeError as error:
            said = str(error)
        del loss
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.zero_grad()
        the_same_again(model, batches_of(dist.get_rank()), model.no_sync)
        optimizer.step()
        with FullyShardedDataParallel.summon_full_params(model):
            pairs = zip(expected(the_same_again, False, None, 1), model.parameters(), strict=True)
            return said, all(torch.equal(a, b) for a, b in pairs)
