"""Steps whose loss has gradients over the inputs in it, on unsharded and on wrapped modules; run by the ranks."""

import copy

import torch
import torch.distributed as dist
from dropin_behaviours import Setting, batch
from dropin_models import Mlp
from gloo import handle_of
from interrupting import equal
from recording import units
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

REFUSED = ("alone", "with output", "after others")
SHARDED = [("FULL_SHARD", True), ("FULL_SHARD", False), ("SHARD_GRAD_OP", True), ("SHARD_GRAD_OP", False)]


def square(output):
    return output.square().mean()


def penalty(call, x, order):
    """The loss of one step: of the output, of a penalty on the slope over ``x``, and of another forward."""
    outputs = []
    if order == "after others":
        outputs.append(call(batch(7), 0))
    output = call(x, 0)
    (slope,) = torch.autograd.grad(square(output), x, create_graph=True)
    if order == "before others":
        outputs.append(call(batch(7), 0))
    if order != "alone":
        outputs.append(output)
    return square(slope) + sum(square(output) for output in outputs)


def saliency(call, x, order):
    """A first backward that is for the inputs only, then the usual one of the same forward."""
    output = call(x, 0)
    (slope,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    return square(output) + slope.detach().sum()


def mean_gradients(plain):
    gradients = [parameter.grad.clone() for parameter in plain.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gradients


def steps_without_sharding(orig, loss_of, order):
    """Train with NO_SHARD, and without FSDP; return whether the parameters are the same after each step."""
    plain = Mlp()
    right = []
    with handle_of("flatparam"):
        model = Setting("flatparam", "NO_SHARD", orig).wrap(copy.deepcopy(plain))
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in (plain, model)]
        count = len(list(model.parameters()))
        for step in range(3):
            for module, optimizer in zip((plain, model), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(module, batch(step), order).backward()
            assert len(list(model.parameters())) == count
            for parameter, gradient in zip(plain.parameters(), mean_gradients(plain), strict=True):
                parameter.grad = gradient
            for optimizer in optimizers:
                optimizer.step()
            with FullyShardedDataParallel.summon_full_params(model):
                pairs = list(zip(plain.parameters(), model.parameters(), strict=True))
            # The gradients of two forwards add up in another order: first those of each
            same = torch.allclose if order.endswith("others") else torch.equal
            right.append(all(same(a, b) for a, b in pairs))
    return right


def refusals(strategy, orig, bf16):
    """Return what each second backward that needs freed parameters raises, and whether training is right after it."""
    precision = MixedPrecision(param_dtype=torch.bfloat16) if bf16 else None
    said, weights = [], []
    for kind in ("torch", "flatparam"):
        with handle_of(kind):
            torch.manual_seed(3)
            model = Setting(kind, strategy, orig).wrap(Mlp(), mixed_precision=precision)
            if kind == "flatparam":
                for order in REFUSED:
                    try:
                        penalty(model, batch(), order).backward()
                    except RuntimeError as error:
                        said.append(str(error))
                    else:
                        said.append("nothing")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            for step in range(2):
                optimizer.zero_grad()
                square(model(batch(step), step).float()).backward()
                optimizer.step()
            with FullyShardedDataParallel.summon_full_params(model):
                weights.append([parameter.detach().clone() for parameter in model.parameters()])
    return said, equal(*weights)


def harmless(kind, strategy, orig):
    """Return gradients where a graph of the backward is made, and gone through only after a forward has gathered."""
    model = Setting(kind, strategy, orig).wrap(Mlp())
    seen = []
    for step in range(2):
        x = batch(step)
        (slope,) = torch.autograd.grad(square(model(x, 0)), x, create_graph=True)
        seen.append(slope.detach())
        model.zero_grad()
        penalty(model, batch(step + 5), "before others").backward()
        seen += [unit._handle.flat_param.grad.clone() for unit in units(model)]
        square(model(x, 0)).backward()
        seen += [x.grad, *(unit._handle.flat_param.grad.clone() for unit in units(model))]
        seen += [value.clone() for value in model.state_dict().values()]
    return seen


class Sum(nn.Module):
    """Its forward's result has the slope of its inner unit's, but no graph of that unit's output."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x):
        return (self.inner(x).sigmoid() + x).sum()


def gradient_without_output(world):
    """A second backward in which the output has no part: refused where the ranks' gradients would differ."""
    group = None if world == 2 else [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with handle_of("flatparam"):
        torch.manual_seed(3)
        plain = Sum()
        model = Setting("flatparam", "NO_SHARD", False).wrap(copy.deepcopy(plain), blocks=None, process_group=group)
        for module in (plain, model):
            x = batch()
            (slope,) = torch.autograd.grad(module(x), x, create_graph=True)
            try:
                slope.square().sum().backward()
            except RuntimeError as error:
                return str(error)
        return equal(
            list(model._handle._get_unflat_views(model._handle.flat_param.grad)), [p.grad for p in plain.parameters()]
        )


def without_output_in_no_sync(strategy, orig):
    """A penalty in which the output has no part, in no_sync(), then a usual one: whether a step is as unsharded."""
    with handle_of("flatparam"):
        torch.manual_seed(3)
        plain = Sum()
        model = Setting("flatparam", strategy, orig).wrap(copy.deepcopy(plain), blocks=None)
        for module in (plain, model):
            with model.no_sync():
                x = batch()
                (slope,) = torch.autograd.grad(module(x), x, create_graph=True)
                slope.square().sum().backward()
            module(batch(1)).backward()
        for parameter, gradient in zip(plain.parameters(), mean_gradients(plain), strict=True):
            parameter.grad = gradient
        for module in (plain, model):
            torch.optim.SGD(module.parameters(), lr=0.05).step()
        with FullyShardedDataParallel.summon_full_params(model):
            return all(map(torch.allclose, plain.parameters(), model.parameters()))


def all_in_no_sync(cases):
    return [without_output_in_no_sync(*case) for case in cases]


def all_without_sharding(cases):
    torch.manual_seed(3)
    return [steps_without_sharding(*case) for case in cases]


def all_refusals(cases):
    return [refusals(*case) for case in cases]


def all_harmless(kind):
    results = []
    for strategy, orig in SHARDED:
        torch.manual_seed(3)
        results.append(harmless(kind, strategy, orig))
    return results


def without_output():
    return [gradient_without_output(world) for world in (1, 2)]
