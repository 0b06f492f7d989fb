"""What is no plain dense tensor takes a path of torch operations: subclasses, fake and meta tensors, functional and
vmap wrappers, sparse gradients, active modes. Oracle: torch's handle under the same conditions.
"""

import collections
import threading

import pytest
import torch
from gloo import fake_world
from one_handle import (
    MODE_IDS,
    MODES,
    TORCHS,
    assert_same,
    assert_same_outcome,
    make_handle,
    ready_for_forward,
    reshard,
    under_both,
)
from recording import describe, digest
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import flatparam

every_mode = pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
replicated = pytest.mark.parametrize("mode", MODES[:2], ids=MODE_IDS[:2])


def small():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3, bias=False))


NAMES = [name for name, _ in small().named_parameters()]


def attribute(module, name):
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


class Marked(nn.Parameter):
    """A user's own class of parameters, with an attribute."""


class Labelled(torch.Tensor):
    """A tensor subclass without a __torch_function__ of its own."""


class Counted(torch.Tensor):
    """A tensor subclass that sees each function applied to it."""

    calls = collections.Counter()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls[getattr(func, "__name__", str(func))] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def with_parameters(make):
    module = small()
    for name, parameter in list(module.named_parameters()):
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, make(parameter))
    return module


SUBCLASSES = {
    "parameter subclass": lambda p: Marked(p.detach()),
    "tensor subclass": lambda p: nn.Parameter(p.detach().as_subclass(Labelled)),
    "with __torch_function__": lambda p: nn.Parameter(p.detach().as_subclass(Counted)),
    "with __torch_dispatch__": lambda p: nn.Parameter(TwoTensor(p.detach(), p.detach() * 2)),
    "attributes on the parameter": lambda p: setattr(p, "mark", "kept") or p,
}


def picture(tensor):
    if isinstance(tensor, TwoTensor):
        return "two", picture(tensor.a), picture(tensor.b), tuple(tensor.shape), tensor.requires_grad
    return (*describe(tensor), getattr(tensor, "mark", "no mark")) if tensor is not None else None


@every_mode
@pytest.mark.parametrize("name", SUBCLASSES)
def test_subclasses(name, mode):
    def scenario(kind):
        module = with_parameters(SUBCLASSES[name])
        handle = ready_for_forward(kind, module, mode)
        seen = [picture(attribute(module, n)) for n in NAMES]
        output = module(torch.ones(2, 3))
        output.sum().backward()
        gradient = picture(handle.flat_param.grad)
        handle.flat_param.grad = None
        reshard(handle, HandleTrainingState.FORWARD)
        after = [picture(p) for p in handle.flat_param._params] if mode[1] else []
        return seen, picture(output), gradient, type(handle.flat_param).__name__, after

    assert_same_outcome(scenario)


@every_mode
def test_a_subclass_among_plain_parameters(mode):
    def scenario(kind):
        module = small()
        module[2].weight = Marked(module[2].weight.detach())
        handle = ready_for_forward(kind, module, mode)
        seen = [picture(attribute(module, n)) for n in NAMES]
        module(torch.ones(2, 3)).sum().backward()
        gradient = picture(handle.flat_param.grad)
        handle.flat_param.grad = None
        reshard(handle, HandleTrainingState.FORWARD)
        return seen, gradient, [picture(p) for p in module.parameters()]

    assert_same(scenario)


@every_mode
def test_fake_tensors(mode):
    def scenario(kind):
        with FakeTensorMode():
            module = small()
            handle = ready_for_forward(kind, module, mode)
            seen = [describe(attribute(module, n)) for n in NAMES]
            output = module(torch.ones(2, 3))
            output.sum().backward()
            gradient = handle.flat_param.grad
            assert isinstance(output, FakeTensor)
            assert isinstance(gradient, FakeTensor)
            described = describe(gradient)
            handle.flat_param.grad = None
            reshard(handle, HandleTrainingState.FORWARD)
            after = [describe(p) for p in module.parameters()]
        return seen, describe(output), described, after

    assert_same_outcome(scenario)


@every_mode
def test_a_real_module_in_a_fake_mode_that_allows_it(mode):
    def scenario(kind):
        module = small()
        with FakeTensorMode(allow_non_fake_inputs=True):
            handle = ready_for_forward(kind, module, mode)
            output = module(torch.ones(2, 3))
            output.sum().backward()
            return [describe(attribute(module, n)) for n in NAMES], describe(output), describe(handle.flat_param.grad)

    assert_same_outcome(scenario)


@every_mode
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_meta_parameters(device, mode):
    """A handle over meta parameters is built and sharded; it is not run."""

    def scenario(kind):
        with torch.device("meta"):
            module = small()
        handle = make_handle(kind, module, mode, device=device)
        seen = [describe(attribute(module, n)) for n in NAMES]
        handle.shard()
        return seen, describe(handle.flat_param), handle.shard_metadata(), [describe(p) for p in module.parameters()]

    assert_same_outcome(scenario)


def test_meta_parameters_are_not_run():
    def scenario(kind):
        with torch.device("meta"):
            module = small()
        ready_for_forward(kind, module, ("FULL_SHARD", True))

    assert assert_same_outcome(scenario)[0] == "error"


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


class SeenOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Doubling(TorchDispatchMode):
    """Changes what an operation gives: whoever goes around it computes other values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if "cat.default" in str(func) else result


@every_mode
@pytest.mark.parametrize("active", [SeenFunctions, SeenOperations], ids=["functions", "operations"])
def test_under_an_active_mode(active, mode):
    """The same results, and the mode sees that views are made of the flat parameter, and the gradient of the views."""

    def scenario(kind):
        module = small()
        with active() as watcher:
            handle = ready_for_forward(kind, module, mode)
            before = sum(watcher.seen.values())
            handle._use_unsharded_views(as_params=False)
            in_views = sum(watcher.seen.values()) - before
            output = module(torch.ones(2, 3))
            output.sum().backward()
            seen = [describe(attribute(module, n)) for n in NAMES]
            gradient = describe(handle.flat_param.grad)
            handle.flat_param.grad = None
            reshard(handle, HandleTrainingState.FORWARD)
        return seen, describe(output), gradient, in_views > len(NAMES), [describe(p) for p in module.parameters()]

    assert assert_same(scenario)[3] is True


def test_a_mode_that_changes_results_is_not_gone_around():
    def scenario(kind):
        module = small()
        with Doubling():
            handle = make_handle(kind, module, ("NO_SHARD", True))
        return digest(handle.flat_param)

    assert_same(scenario)


class Sparse(torch.autograd.Function):
    """Gives its weight a sparse gradient."""

    @staticmethod
    def forward(ctx, weight):
        return weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        return (torch.eye(5, 3) * gradient).to_sparse()


def embedding():
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2))


SPARSE = {
    "embedding": (embedding, lambda m: m(torch.tensor([1, 4, 4])).pow(2).sum()),
    "function": (small, lambda m: Sparse.apply(m[0].weight) + m[2].weight.pow(2).sum()),
    "with a dense one": (small, lambda m: Sparse.apply(m[0].weight) + m[0].weight.pow(2).sum()),
    "sparse alone": (small, lambda m: Sparse.apply(m[0].weight)),
}


@every_mode
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients(name, mode):
    """torch refuses most of them; where it does we may give what the unsharded module has, made dense."""
    make, loss = SPARSE[name]

    def scenario(kind):
        module = make()
        handle = ready_for_forward(kind, module, mode)
        loss(module).backward()
        return [digest(view) for view in handle._get_unflat_views(handle.flat_param.grad)]

    plain = make()
    loss(plain).backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in plain.parameters()]
    torchs, ours = under_both(scenario)
    if torchs[0] == "ok":
        assert ours == torchs
    elif ours[0] == "error":
        assert isinstance(ours[1], type(torchs[1]))
    else:
        assert ours[1] == [digest(gradient) for gradient in expected]


@every_mode
def test_vmap_over_the_input(mode):
    def scenario(kind):
        module = small()
        handle = ready_for_forward(kind, module, mode)
        outputs = torch.func.vmap(module)(torch.linspace(-1, 1, 12).view(4, 3))
        outputs.pow(2).sum().backward()
        return describe(outputs), describe(handle.flat_param.grad)

    assert_same(scenario)


@every_mode
def test_views_made_inside_vmap(mode):
    def scenario(kind):
        module = small()
        handle = ready_for_forward(kind, module, mode)

        def one(x):
            handle._use_unsharded_views(as_params=False)
            return module(x)

        return describe(torch.func.vmap(one)(torch.linspace(-1, 1, 12).view(4, 3)))

    assert_same(scenario)


@every_mode
def test_views_of_a_tensor_that_vmap_batches(mode):
    def scenario(kind):
        module = small()
        handle = ready_for_forward(kind, module, mode)
        rows = torch.arange(2.0 * handle.flat_param.numel()).view(2, -1)
        return [describe(v) for v in torch.func.vmap(lambda t: tuple(handle._get_unflat_views(t)))(rows)]

    assert_same(scenario)


@every_mode
def test_functional_gradients_through_the_views(mode):
    def scenario(kind):
        module = small()
        handle = ready_for_forward(kind, module, mode)
        x = torch.linspace(-1, 1, 6).view(2, 3)
        of_input = torch.func.grad(lambda x: module(x).pow(2).sum())(x)
        flat = handle.flat_param.detach()
        of_flat = torch.func.grad(lambda t: sum(v.pow(2).sum() for v in handle._get_unflat_views(t)))(flat)
        _, tangent = torch.func.jvp(lambda t: tuple(handle._get_unflat_views(t)), (flat,), (flat * 2,))
        jacobian = torch.func.jacrev(lambda t: torch.cat([v.reshape(-1) for v in handle._get_unflat_views(t)]))(flat)
        return describe(of_input), describe(of_flat), [describe(t) for t in tangent], describe(jacobian)

    assert_same(scenario)


@every_mode
def test_functional_call(mode):
    def scenario(kind):
        module = small()
        handle = ready_for_forward(kind, module, mode)
        values = {name: torch.full_like(attribute(module, name), 0.5).detach() for name in NAMES}
        replaced = torch.func.functional_call(module, values, (torch.ones(2, 3),))
        output = module(torch.ones(2, 3))
        output.sum().backward()
        return describe(replaced), describe(output), describe(handle.flat_param.grad)

    assert_same_outcome(scenario)


@every_mode
def test_functionalized(mode):
    def scenario(kind):
        module = small()
        handle = ready_for_forward(kind, module, mode)
        flat = handle.flat_param.detach()

        def function(t):
            views = list(handle._get_unflat_views(t))
            return views[0] * 2, views[1].sum()

        return [describe(v) for v in torch.func.functionalize(function)(flat)]

    assert_same(scenario)


@every_mode
def test_a_hook_gives_an_expanded_or_a_strided_gradient(mode):
    def scenario(kind):
        module = small()
        handle = ready_for_forward(kind, module, mode)
        module[0].weight.register_hook(lambda g: torch.tensor(2.0).expand_as(g))
        module[2].weight.register_hook(lambda g: torch.arange(60.0).view(6, 10)[::2, ::2].as_strided((3, 5), (20, 2)))
        functional.gelu(module(torch.ones(2, 3))).sum().backward()
        return describe(handle.flat_param.grad)

    assert_same(scenario)


@every_mode
@pytest.mark.parametrize("wrong", ["shape", "dtype", "type"])
def test_a_hook_gives_a_wrong_gradient(wrong, mode):
    def scenario(kind):
        module = small()
        handle = ready_for_forward(kind, module, mode)
        result = {"shape": torch.ones(4), "dtype": torch.ones(5, 3, dtype=torch.float64), "type": "a gradient"}[wrong]
        module[0].weight.register_hook(lambda g: result)
        module(torch.ones(2, 3)).sum().backward()
        return describe(handle.flat_param.grad)

    assert_same_outcome(scenario)


@pytest.mark.parametrize("kind", [TORCHS, flatparam.FlatParamHandle], ids=["torch", "flatparam"])
def test_the_subclass_with_a_torch_function_is_asked(kind):
    """It is not gone around: making the views of such a flat parameter reaches its __torch_function__."""
    with fake_world():
        module = with_parameters(SUBCLASSES["with __torch_function__"])
        Counted.calls.clear()
        make_handle(kind, module, ("NO_SHARD", True))
        assert sum(Counted.calls.values()) > 0


@every_mode
def test_a_module_with_its_own_setattr(mode):
    """nn.Module subclasses may override how attributes are set and deleted: that is respected, in the same order."""

    class Watched(nn.Linear):
        def __setattr__(self, name, value):
            self.__dict__.setdefault("log", []).append(("set", name, type(value).__name__))
            super().__setattr__(name, value)

        def __delattr__(self, name):
            self.__dict__.setdefault("log", []).append(("delete", name))
            super().__delattr__(name)

    def scenario(kind):
        torch.manual_seed(5)
        module = nn.Sequential(Watched(3, 5), nn.Linear(5, 3))
        handle = ready_for_forward(kind, module, mode)
        reshard(handle, HandleTrainingState.FORWARD)
        return module[0].log

    assert len(assert_same(scenario)) > 4


@every_mode
def test_a_module_with_its_own_getattr_and_a_property(mode):
    class Odd(nn.Linear):
        def __getattr__(self, name):
            if name == "missing":
                return 7
            return super().__getattr__(name)

    class Proxied(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("_real", nn.Parameter(torch.randn(3)))

        @property
        def weight(self):
            return self._real

    def scenario(kind):
        torch.manual_seed(5)
        module = nn.Sequential(Odd(3, 5), Proxied())
        handle = ready_for_forward(kind, module, mode)
        seen = [describe(module[0].weight), describe(module[1].weight), module[0].missing]
        (module[0].weight.sum() + module[1].weight.sum()).backward()
        return seen, describe(handle.flat_param.grad)

    assert_same(scenario)


@every_mode
def test_a_global_registration_hook_is_called(mode):
    def scenario(kind):
        registered = []
        hook = nn.modules.module.register_module_parameter_registration_hook(
            lambda module, name, parameter: registered.append((type(module).__name__, name))
        )
        try:
            module = small()
            handle = ready_for_forward(kind, module, mode)
            reshard(handle, HandleTrainingState.FORWARD)
        finally:
            hook.remove()
        return registered

    assert_same(scenario)


@every_mode
@pytest.mark.parametrize("switch", ["FSDP_USE_UNSAFE_SETATTR", "FSDP_SKIP_WRITEBACK_CHECK"])
def test_environment_switches(switch, mode, monkeypatch):
    monkeypatch.setenv(switch, "1")

    def scenario(kind):
        module = small()
        handle = ready_for_forward(kind, module, mode)
        module(torch.ones(2, 3)).sum().backward()
        seen = [describe(attribute(module, n)) for n in NAMES], describe(handle.flat_param.grad)
        handle.flat_param.grad = None
        reshard(handle, HandleTrainingState.FORWARD)
        return seen, [describe(p) for p in module.parameters()], sorted(vars(module[0])), list(module[0]._parameters)

    assert_same(scenario)


def test_dispatch_keys_of_plain_kernels_are_no_mode():
    """libtorch may leave "Dense" included in a thread; the loops in C are still what torch would do."""
    found = []

    def run():
        for key, plain in (("Dense", True), ("CPU", True), ("AutogradCPU", False), ("Functionalize", False)):
            torch._C._dispatch_tls_set_dispatch_key_included(key, True)
            found.append((key, flatparam._C.is_plain(torch.zeros(2)) == plain))
            torch._C._dispatch_tls_set_dispatch_key_included(key, False)
        found.append(("none", flatparam._C.is_plain(torch.zeros(2))))

    thread = threading.Thread(target=run)  # the keys are the thread's
    thread.start()
    thread.join()
    assert found == [("Dense", True), ("CPU", True), ("AutogradCPU", True), ("Functionalize", True), ("none", True)]
