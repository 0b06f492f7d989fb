"""``backward(inputs=...)`` and ``torch.autograd.grad`` with parameters: these are trained, and nothing else.

Oracle: the same call of the unsharded module, whose gradients are averaged over the ranks.

Promises:
- `backward(inputs=...)` with parameters trains these alone; `torch.autograd.grad` names them
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from fsdp_models import STRATEGIES, assert_same, assert_same_grads, data, loss_of, make, wrap_blocks
from gloo import fake_world, note
from layer_zero_ranks import layer_zero
from simulated_ranks import simulate_ranks

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

CHOICES = {
    "all": lambda name: True,
    "a unit": lambda name: name.startswith("blocks.1."),
    "the root": lambda name: not name.startswith("blocks."),
    "biases": lambda name: name.endswith("bias"),
    "one": lambda name: name == "blocks.0.scale",
}


def named(model):
    return {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}


def chosen(model, choice):
    """Of the unsharded module, or of a model with ``use_orig_params``."""
    return [param for name, param in named(model).items() if CHOICES[choice](name)]


def flat(model, choice):
    """Of a model with flat parameters, those of whole units."""
    return list((model if choice == "all" else model.blocks[1]).parameters())


def averaged(module, choice, *numbers):
    """Add to ``.grad`` the mean over ranks, as two ranks take it."""
    params = chosen(module, choice)
    for rank in range(dist.get_world_size()):
        for param in params:
            param.before, param.grad = param.grad, None
        sum(loss_of(module, data(number, rank)) for number in numbers).backward(inputs=params)
        for param in params:
            ours = param.grad / dist.get_world_size()
            param.grad = ours if param.before is None else param.before + ours


def training(strategy, orig):
    for choice in CHOICES if orig else ("all", "a unit"):
        note(f"{strategy} {orig} {choice}")
        module = make()
        if strategy.startswith("LAYER"):
            model = layer_zero(2, strategy, use_orig_params=orig)
        else:
            model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig)
        optims = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (module, model)]
        flags = [param.requires_grad for param in model.parameters()]
        for step in range(4):
            now = "all" if step == 2 else choice
            averaged(module, now, step)
            loss_of(model, data(step)).backward(inputs=chosen(model, now) if orig else flat(model, now))
            assert flags == [param.requires_grad for param in model.parameters()]
            assert_same_grads(model, module, f"{choice} {step}")
            for optim in optims:
                optim.step()
                optim.zero_grad(set_to_none=step % 2 == 0)
            assert_same(model, module, f"{choice} {step}")


@pytest.mark.multiprocess
@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "LAYER_ZERO", "LAYER_ZERO_NESTED"])
def test_what_is_given_is_trained_and_nothing_else(strategy, orig):
    simulate_ranks(training, 2, strategy, orig)


def accumulating():
    """In ``no_sync`` too, and in a graph that is kept, with an input of the model beside parameters."""
    module, model = make(), wrap_blocks(make(), use_orig_params=True)
    averaged(module, "a unit", 0, 1)
    with model.no_sync():
        loss_of(model, data(0)).backward(inputs=chosen(model, "a unit"))
    x = data(1).requires_grad_()
    loss = loss_of(model, x)
    loss.backward(inputs=[x, *chosen(model, "a unit")], retain_graph=True)
    assert_same_grads(model, module)
    averaged(module, "the root", 1)
    before = x.grad.clone()
    loss.backward(inputs=chosen(model, "the root"))
    assert_same_grads(model, module)
    assert torch.equal(x.grad, before)


@pytest.mark.multiprocess
def test_micro_batches_and_kept_graphs():
    simulate_ranks(accumulating, 2)


def penalty(params):
    return sum(param.pow(2).sum() for param in params)


@pytest.mark.parametrize("orig", [True, False])
def test_torchs_grad_gives_what_is_there_or_names_the_parameter(orig):
    with fake_world(2):
        model = wrap_blocks(make(), use_orig_params=orig)
        params = list(model.parameters())
        for allow_unused in (False, True):
            with pytest.raises(RuntimeError, match=r"gradient of `\w+` of the unit of Block at `blocks\.1`, which is"):
                torch.autograd.grad(
                    loss_of(model, data(0)), list(model.blocks[1].parameters()), allow_unused=allow_unused
                )
        with pytest.raises(RuntimeError, match="call backward"):
            torch.autograd.grad(loss_of(model, data(0)) + penalty(params), params, allow_unused=True)
        for param, grad in zip(params, torch.autograd.grad(penalty(params), params), strict=True):
            assert torch.equal(grad, 2 * param)
        last = params[-1]
        assert torch.autograd.grad(penalty(params[:1]), [params[0], last], allow_unused=True)[1] is None
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(penalty(params[:1]), [params[0], last])
        x = data(1).requires_grad_()
        assert torch.autograd.grad(loss_of(model, x), [x])[0].any()
        loss_of(model, data(2)).backward()
        assert params[0].grad is not None


def test_what_is_not_given_stays_as_it_was_after_an_exception():
    with fake_world(2):
        model = wrap_blocks(make(), use_orig_params=True)
        weight, bias = model.blocks[1].module.inner.weight, model.blocks[1].module.inner.bias
        bias.requires_grad_(False)

        def refuse(grad):
            raise KeyError("no")

        x = data(0).requires_grad_()
        handle = weight.register_hook(refuse)
        with pytest.raises(KeyError):
            loss_of(model, x).backward(inputs=[weight])
        handle.remove()
        flags = {name: param.requires_grad for name, param in named(model).items()}
        assert [name for name, flag in flags.items() if not flag] == ["blocks.1.inner.bias"]
        loss_of(model, x).backward(inputs=[weight])
        with FSDP.summon_full_params(model, with_grads=True):
            assert [name for name, param in named(model).items() if param.grad is not None] == ["blocks.1.inner.weight"]


def edges(params):
    return [torch.autograd.graph.get_gradient_edge(param) for param in params]


def by_edges():
    """The same by the edges of gradients; and after torch has exchanged, and put back, what runs backwards."""
    module, model = make(), wrap_blocks(make(), use_orig_params=True)
    averaged(module, "a unit", 0)
    loss_of(model, data(0)).backward(inputs=edges(chosen(model, "a unit")))
    assert_same_grads(model, module)
    exchange = getattr(torch.compiler, "_patch_engine_backward", contextlib.nullcontext)
    with exchange():
        pass
    averaged(module, "one", 1)
    loss_of(model, data(1)).backward(inputs=chosen(model, "one"))
    assert_same_grads(model, module)
    with pytest.raises(RuntimeError, match="call backward"):
        torch.autograd.grad(loss_of(model, data(2)), edges(chosen(model, "one")), allow_unused=True)


@pytest.mark.multiprocess
def test_edges_and_what_torch_puts_back():
    simulate_ranks(by_edges, 2)
