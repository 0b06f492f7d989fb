"""Autograd through the unsharded views is as with torch's handle: gradients, errors, hooks, versions, freed memory.

Oracle: torch's FlatParamHandle, driven by hand in the same way on the same values.
"""

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from gloo import fake_world
from one_handle import (
    MODE_IDS,
    MODES,
    TORCHS,
    assert_both_raise,
    assert_same,
    assert_same_outcome,
    make_handle,
    ready_for_forward,
    reshard,
    under_both,
    unshard,
)
from recording import describe, digest
from torch import nn
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.nn import functional

import flatparam

every_mode = pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
replicated = pytest.mark.parametrize("mode", MODES[:2], ids=MODE_IDS[:2])


class Weights(nn.Module):
    """Parameters in several memory formats, a shared one, and one of one element."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 5))
        self.b = nn.Parameter(torch.randn(7, 5).t())
        self.c = nn.Parameter(torch.randn(2, 3, 3, 3).to(memory_format=torch.channels_last))
        self.d = nn.Parameter(torch.randn(1))
        self.e = nn.Parameter(torch.randn(2, 1, 3))
        self.inner = nn.Module()
        self.inner.a_again = self.a

    def forward(self, x):
        x = functional.gelu(x @ self.a.abs()) @ self.b
        return x * self.d + self.inner.a_again.sum() + self.c.pow(2).mean() + (self.e * self.e).sum()


def weights():
    torch.manual_seed(3)
    return Weights()


def image(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 5, 5, generator=generator)


# Each gives gradients of another form to the views.
LOSSES = {
    "dense": lambda m: m(torch.ones(4, 3)).pow(2).sum(),
    "expanded": lambda m: m.a.sum() + m.b.sum() + m.c.sum() + m.d.sum() + m.e.sum(),
    "transposed": lambda m: (m.a.t() @ m.a @ m.b).pow(3).sum(),
    "channels_last": lambda m: functional.conv2d(image().to(memory_format=torch.channels_last), m.c).pow(2).sum(),
    "contiguous_of_channels_last": lambda m: (m.c.contiguous() * torch.arange(54.0).view(2, 3, 3, 3)).sum(),
    "sliced": lambda m: m.a[::2, 1::2].pow(2).sum() + m.b[-1].sum() + m.c[0, :, 1].sum(),
    "one_only": lambda m: m.c.sum(),
    "last_only": lambda m: (m.e * 3).sum(),
    "shared_only": lambda m: (m.inner.a_again**2).sum(),
    "used_many_times": lambda m: sum((m.a * i).sum() * m.d for i in range(5)).sum(),
    "infinite": lambda m: (m.a / 0).sum() + (m.d * float("inf")).sum(),
    "nan": lambda m: (m.b * float("nan")).sum(),
    "negative_zero": lambda m: (m.a * -0.0).sum() + (m.d * -0.0).sum(),
    "narrow_and_cat": lambda m: torch.cat([m.a.reshape(-1), m.b.reshape(-1), m.d]).narrow(0, 4, 20).pow(2).sum(),
    "double": lambda m: (m.a.double() @ m.b.double()).sum(),
    "bf16": lambda m: (m.a.bfloat16() @ m.b.bfloat16()).float().pow(2).sum(),
    "strided": lambda m: m.a.as_strided((2, 2), (3, 2)).pow(2).sum() + m.e.unfold(2, 2, 1).pow(2).sum(),
    "complex": lambda m: torch.view_as_real(torch.complex(m.a, m.a * 2) * (1 + 2j)).pow(2).sum(),
    "diagonal": lambda m: m.a.diagonal().pow(2).sum() + m.c.flip(0).cumsum(0).sum(),
}


@pytest.mark.sweep(8)
@every_mode
@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name, mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        seen = [describe(getattr(module, name)) for name in "abcde"]
        loss = LOSSES[name](module)
        loss.backward()
        return seen, describe(loss), describe(handle.flat_param.grad)

    assert assert_same(scenario)[2] != ("None",)


@every_mode
def test_no_gradient_at_all(mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()
        return describe(handle.flat_param.grad), module.a.requires_grad

    assert assert_same(scenario)[0] == ("None",)


@every_mode
def test_gradients_accumulate_over_backward_passes(mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        seen = []
        for name in ("dense", "one_only", "expanded"):
            LOSSES[name](module).backward()
            seen.append(describe(handle.flat_param.grad))
        return seen

    assert len(set(assert_same(scenario))) == 3


@every_mode
def test_backward_twice_with_retain_graph(mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        loss = LOSSES["dense"](module)
        loss.backward(retain_graph=True)
        once = describe(handle.flat_param.grad)
        loss.backward()
        return once, describe(handle.flat_param.grad)

    once, twice = assert_same(scenario)
    assert once != twice


@every_mode
def test_backward_twice_without_retain_graph(mode):
    def saved(kind):
        module = weights()
        ready_for_forward(kind, module, mode)
        loss = LOSSES["dense"](module)
        loss.backward()
        loss.backward()

    assert_both_raise(RuntimeError, "backward through the graph a second time", saved)

    def nothing_saved(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        loss = module.a.sum()
        loss.backward()
        loss.backward()
        return describe(handle.flat_param.grad)

    assert_same(nothing_saved)


@every_mode
@pytest.mark.parametrize("change", ["view", "another_view", "flat_param", "shared"])
def test_a_saved_weight_modified_in_place_is_noticed(change, mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        loss = (module.a * module.a).sum()
        with torch.no_grad():
            changed = {
                "view": module.a,
                "another_view": module.b,
                "flat_param": handle.flat_param,
                "shared": module.inner.a_again,
            }[change]
            changed.add_(1)
        loss.backward()

    assert_both_raise(RuntimeError, "inplace", scenario)


@every_mode
def test_a_weight_modified_before_it_is_saved(mode):
    """torch refuses to use such a view again; ours may also give what the unsharded module gives."""

    def modified(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        with torch.no_grad():
            module.a.mul_(2)
        loss = LOSSES["dense"](module)
        loss.backward()
        return digest(loss), digest(next(iter(handle._get_unflat_views(handle.flat_param.grad))))

    plain = weights()
    with torch.no_grad():
        plain.a.mul_(2)
    loss = LOSSES["dense"](plain)
    loss.backward()
    torchs, ours = under_both(modified)
    assert torchs[0] == "error"
    if ours[0] == "error":
        assert isinstance(ours[1], RuntimeError)
        assert "inplace" in str(ours[1])
    else:
        assert ours[1] == (digest(loss), digest(plain.a.grad))


@every_mode
@pytest.mark.parametrize("name", "abcde")
def test_in_place_on_a_view_in_grad_mode_is_refused(name, mode):
    def scenario(kind):
        module = weights()
        ready_for_forward(kind, module, mode)
        getattr(module, name).mul_(2)

    assert_both_raise(RuntimeError, "inplace", scenario)


@every_mode
def test_version_counters(mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        tensors = [handle.flat_param, module.a, module.b, module.inner.a_again]
        start = [t._version for t in tensors]
        seen = []
        with torch.no_grad():
            for changed in tensors:
                changed.add_(1)
                seen.append([t._version - s for t, s in zip(tensors, start, strict=True)])
        return seen

    assert assert_same(scenario)[-1] == [4, 4, 4, 4]


@every_mode
def test_hooks_on_views_and_on_the_flat_parameter(mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        calls = []
        module.a.register_hook(lambda g: calls.append(("a", describe(g))) or g * 3)
        removed = module.b.register_hook(lambda g: calls.append(("b", describe(g))))
        removed.remove()
        module.c.register_hook(lambda g: calls.append(("c", describe(g))))
        module.c.retain_grad()
        handle.flat_param.register_hook(lambda g: calls.append(("flat", describe(g))))
        handle.flat_param.register_post_accumulate_grad_hook(lambda p: calls.append(("after", describe(p.grad))))
        node = handle.flat_param.expand_as(handle.flat_param).grad_fn.next_functions[0][0]
        node.register_hook(lambda *args: calls.append(("accumulated",)))
        node.register_prehook(lambda grads: calls.append(("accumulates",)))
        LOSSES["dense"](module).backward()
        of_views = sorted(calls[:2])  # the views' hooks come first, in any order
        return of_views + calls[2:], describe(module.c.grad), describe(handle.flat_param.grad)

    calls = assert_same(scenario)[0]
    assert [call[0] for call in calls] == ["a", "c", "flat", "accumulates", "after", "accumulated"]


@every_mode
def test_a_hook_that_raises_leaves_the_views_usable(mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)

        def refuse(gradient):
            raise KeyError("from the hook")

        hook = module.c.register_hook(refuse)
        with pytest.raises(KeyError, match="from the hook"):
            LOSSES["dense"](module).backward()
        hook.remove()
        handle.flat_param.grad = None
        LOSSES["dense"](module).backward()
        return describe(handle.flat_param.grad)

    assert_same(scenario)


@every_mode
def test_all_views_lead_to_one_accumulate_grad(mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        wanted = handle.flat_param.expand_as(handle.flat_param).grad_fn.next_functions[0][0]
        found = []
        for name in "abcde":
            node = getattr(module, name).grad_fn
            while node.next_functions:
                node = node.next_functions[0][0]
            found.append(node is wanted)
        return found

    assert assert_same(scenario) == [True] * 5


@every_mode
@pytest.mark.parametrize("name", ["dense", "expanded", "one_only", "channels_last"])
def test_gradients_by_autograd_grad(name, mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        views = [module.a, module.b, module.c, module.d]
        of_views = torch.autograd.grad(LOSSES[name](module), views, allow_unused=True)
        of_flat = torch.autograd.grad(LOSSES[name](module), handle.flat_param)
        return [describe(g) for g in of_views], [describe(g) for g in of_flat], describe(handle.flat_param.grad)

    assert assert_same(scenario)[2] == ("None",)


@every_mode
def test_gradient_penalty_over_the_input(mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        x = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()
        (of_x,) = torch.autograd.grad(module(x).pow(2).sum(), x, create_graph=True)
        penalty = (of_x.norm() - 1).pow(2)
        (module(x).sum() + penalty).backward()
        return describe(penalty), describe(handle.flat_param.grad), describe(x.grad)

    assert_same(scenario)


@replicated
def test_gradients_of_gradients(mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        (of_flat,) = torch.autograd.grad(LOSSES["dense"](module), handle.flat_param, create_graph=True)
        first = describe(of_flat)
        of_flat.pow(2).sum().backward()
        return first, describe(handle.flat_param.grad)

    assert_same(scenario)


@replicated
def test_batched_gradients(mode):
    """is_grads_batched runs the backward of the views under vmap."""

    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        output = module(torch.ones(4, 3)).reshape(-1)
        (jacobian,) = torch.autograd.grad(
            output, handle.flat_param, torch.eye(output.numel()), is_grads_batched=True, retain_graph=True
        )
        rows = [torch.autograd.grad(o, handle.flat_param, retain_graph=True)[0] for o in output]
        torch.testing.assert_close(jacobian, torch.stack(rows))
        return describe(jacobian)

    assert_same(scenario)


@pytest.mark.parametrize("orig", [True, False])
def test_numerical_gradients_of_the_views(orig):
    """Oracle: finite differences, of the first and of the second order."""
    with fake_world():
        module = weights().double()
        handle = make_handle(flatparam.FlatParamHandle, module, ("NO_SHARD", orig))
        flat = handle.flat_param.detach().clone().requires_grad_()

        def views(tensor):
            return tuple(view.pow(2) for view in handle._get_unflat_views(tensor))

        assert torch.autograd.gradcheck(views, flat)
        assert torch.autograd.gradgradcheck(views, flat)


@every_mode
@pytest.mark.parametrize("check_nan", [True, False])
def test_anomaly_mode(check_nan, mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        LOSSES["dense"](module).backward()
        return describe(handle.flat_param.grad)

    def bad(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        (module.a.sum() * 0).sqrt().backward()
        return describe(handle.flat_param.grad)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly mode says that it is on, and where the bad gradient came from
        with torch.autograd.detect_anomaly(check_nan=check_nan):
            assert_same(scenario)
            assert assert_same_outcome(bad)[0] == ("error" if check_nan else "ok")


@every_mode
def test_what_a_graph_saved_is_released(mode):
    """Neither the views nor the values that a backward pass used stay alive after it."""
    with fake_world():
        module = weights()
        handle = ready_for_forward(flatparam.FlatParamHandle, module, mode)
        x = torch.ones(4, 3, requires_grad=True)
        hidden = x * 2
        output = module(hidden)
        saved = weakref.ref(hidden)
        del hidden
        assert saved() is not None
        output.sum().backward()
        gc.collect()
        assert saved() is None
        views = [weakref.ref(getattr(module, name)) for name in "abcde"]
        reshard(handle, HandleTrainingState.BACKWARD_POST)
        handle._training_state = HandleTrainingState.IDLE
        unshard(handle, HandleTrainingState.FORWARD)
        gc.collect()
        assert [view() for view in views if view() is not None and mode[1]] == []
        assert LOSSES["dense"](module).isfinite()


@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
def test_backward_uses_the_tensors_of_the_forward(strategy):
    """The pre-backward unshard puts the forward's own tensors back: reentrant checkpointing relies on it."""

    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, (strategy, True))
        in_forward = [getattr(module, name) for name in "abcde"]
        loss = LOSSES["dense"](module)
        reshard(handle, HandleTrainingState.FORWARD)
        after = [describe(getattr(module, name)) for name in "abcde"]
        unshard(handle, HandleTrainingState.BACKWARD_PRE)
        same = [getattr(module, name) is tensor for name, tensor in zip("abcde", in_forward, strict=True)]
        saved = [t is tensor for t, tensor in zip(handle.flat_param._tensors, in_forward, strict=True)]
        LOSSES["dense"](module).backward()  # what a recomputed forward does: the same graph, the same AccumulateGrad
        loss.backward()
        return after, same, saved, module.inner.a_again is module.a, describe(handle.flat_param.grad)

    assert assert_same(scenario)[1] == [True] * 5


@every_mode
def test_views_made_where_gradients_are_off(mode):
    """The wrapper may unshard in no_grad (a prefetch); the views still lead to the flat parameter."""

    def scenario(kind):
        module = weights()
        with torch.no_grad():
            handle = ready_for_forward(kind, module, mode)
        seen = [describe(getattr(module, name)) for name in "abcde"]
        LOSSES["dense"](module).backward()
        return seen, describe(handle.flat_param.grad)

    assert_same(scenario)


@every_mode
def test_a_step_after_a_forward_in_inference_mode(mode):
    def scenario(kind):
        module = weights()
        handle = make_handle(kind, module, mode)
        handle.shard()
        handle.init_flat_param_attributes()
        with torch.inference_mode():
            unshard(handle, HandleTrainingState.FORWARD)
            output = describe(module(torch.ones(4, 3)))
        reshard(handle, HandleTrainingState.FORWARD)
        unshard(handle, HandleTrainingState.FORWARD)
        seen = [describe(getattr(module, name)) for name in "abcde"]
        LOSSES["dense"](module).backward()
        return output, seen, describe(handle.flat_param.grad)

    assert_same(scenario)


@every_mode
def test_a_frozen_unit(mode):
    def scenario(kind):
        module = weights().requires_grad_(False)
        handle = ready_for_forward(kind, module, mode)
        x = torch.ones(4, 3, requires_grad=True)
        module(x).sum().backward()
        return [describe(getattr(module, name)) for name in "abcde"], describe(x.grad), describe(handle.flat_param.grad)

    assert assert_same(scenario)[2] == ("None",)


@every_mode
def test_autocast(mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(torch.ones(4, 3)).float().pow(2).sum() + module(torch.ones(4, 3)).float().sum()
        loss.backward()
        return describe(loss), describe(handle.flat_param.grad)

    assert_same(scenario)


@every_mode
def test_saved_tensors_hooks(mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(describe(t)) or t.clone(), lambda t: t):
            loss = LOSSES["dense"](module)
        loss.backward()
        return packed, describe(handle.flat_param.grad)

    assert assert_same(scenario)[0]


@every_mode
def test_deepcopy_of_a_view_is_refused(mode):
    def scenario(kind):
        module = weights()
        ready_for_forward(kind, module, mode)
        copy.deepcopy(module.a)

    assert_both_raise(RuntimeError, "deepcopy", scenario)


@every_mode
def test_backward_in_another_thread(mode):
    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        loss = LOSSES["dense"](module)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return describe(handle.flat_param.grad)

    assert assert_same(scenario) != ("None",)


@every_mode
def test_a_gradient_that_a_function_leaves_undefined(mode):
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b, c):
            return a.sum() + b.sum() + c.sum()

        @staticmethod
        def backward(ctx, gradient):
            return None, gradient.expand(5, 7), torch.ones(2, 3, 3, 3)

    def scenario(kind):
        module = weights()
        handle = ready_for_forward(kind, module, mode)
        Half.apply(module.a, module.b, module.c).backward()
        return describe(handle.flat_param.grad)

    assert_same(scenario)


@every_mode
def test_forward_mode_derivatives(mode):
    def scenario(kind):
        module = weights()
        ready_for_forward(kind, module, mode)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(module.a, torch.ones(3, 5))
            output = torch.autograd.forward_ad.unpack_dual((dual * dual).sum() * module.d)
            return describe(output.primal), describe(output.tangent)

    assert_same(scenario)


@pytest.mark.parametrize("kind", [TORCHS, flatparam.FlatParamHandle], ids=["torch", "flatparam"])
def test_the_comparison_sees_the_unsharded_module(kind):
    """The oracle of the oracle: the gradients are those of the module without any handle."""
    plain = weights()
    LOSSES["dense"](plain).backward()
    with fake_world():
        module = weights()
        handle = ready_for_forward(kind, module, ("FULL_SHARD", True))
        LOSSES["dense"](module).backward()
        views = dict(zip(handle.flat_param._fqns, handle._get_unflat_views(handle.flat_param.grad), strict=True))
        for name, parameter in plain.named_parameters():
            assert torch.equal(views[name], parameter.grad), name
