"""Parameters that cannot be sharded are refused: with torch's type of error where torch refuses too, and a message that
names the parameter, what was expected and what came. Nothing is half done: the module is left as it was."""

import pytest
import torch
from gloo import fake_world, note, run_ranks
from one_handle import (
    MODE_IDS,
    MODES,
    TORCHS,
    assert_same_outcome,
    make_handle,
    outcome,
    ready_for_forward,
    reshard,
    unshard,
)
from recording import describe, digest
from torch import nn
from torch.distributed.fsdp._common_utils import HandleTrainingState

import flatparam

OURS = flatparam.FlatParamHandle
every_mode = pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)


def model(**replaced):
    """Two layers; ``second_weight=...`` exchanges the parameter ``second.weight``."""
    torch.manual_seed(2)
    module = nn.Module()
    module.first = nn.Linear(3, 4)
    module.second = nn.Linear(4, 2)
    for name, value in replaced.items():
        path, leaf = name.split("_")
        setattr(module.get_submodule(path), leaf, value)
    return module


def parameter(tensor):
    return nn.Parameter(tensor, requires_grad=False)


def quantized():
    return torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.qint8)


# name: (the module, what its message must hold besides the FQN)
REFUSED = {
    "int64": (lambda: model(second_weight=parameter(torch.ones(2, 4, dtype=torch.int64))), ["int64"]),
    "bool alone": (lambda: only(parameter(torch.ones(3, dtype=torch.bool))), ["bool"]),
    "int64 first": (lambda: model(first_weight=parameter(torch.ones(2, dtype=torch.int64))), ["int64"]),
    "fp64 among fp32": (lambda: model(second_weight=nn.Parameter(torch.ones(2, 4).double())), ["float64", "float32"]),
    "bf16 among fp32": (lambda: model(second_bias=nn.Parameter(torch.ones(2).bfloat16())), ["bfloat16", "float32"]),
    "meta among cpu": (lambda: model(second_weight=nn.Parameter(torch.ones(2, 4, device="meta"))), ["meta", "cpu"]),
    "quantized": (lambda: model(second_weight=parameter(quantized())), ["qint8"]),
    "quantized alone": (lambda: only(parameter(quantized())), ["qint8"]),
}
SPARSE = {
    "coo": (lambda: model(second_weight=nn.Parameter(torch.eye(4).to_sparse())), ["sparse"]),
    "csr": (lambda: model(second_weight=nn.Parameter(torch.eye(4).to_sparse_csr())), ["sparse"]),
    "coo alone": (lambda: only(nn.Parameter(torch.eye(4).to_sparse())), ["sparse"]),
}


def only(value):
    module = nn.Module()
    module.second = nn.Module()
    module.second.weight = value
    return module


def message_of(module, mode=("FULL_SHARD", True), parameters=None):
    """Return the refusal, after looking that the module is as it was before."""
    before = [(name, id(p)) for name, p in module.named_parameters()]
    with fake_world():
        state, error = outcome(make_handle, OURS, module, mode, parameters)
    assert state == "error", f"expected a refusal, got {error}"
    assert [(name, id(p)) for name, p in module.named_parameters()] == before
    return error


@every_mode
@pytest.mark.parametrize("name", REFUSED | SPARSE)
def test_the_message_says_what_was_expected_and_what_came(name, mode):
    make, expected = (REFUSED | SPARSE)[name]
    error = message_of(make(), mode)
    assert isinstance(error, ValueError)
    bad = "first.weight" if name == "int64 first" else "second.bias" if name.startswith("bf16") else "second.weight"
    for word in [bad, *expected]:
        assert word in str(error), f"expected {word!r} in {str(error)!r}"


@every_mode
@pytest.mark.parametrize("name", REFUSED)
def test_torch_refuses_with_the_same_type(name, mode):
    with fake_world():
        state, error = outcome(make_handle, TORCHS, REFUSED[name][0](), mode)
    assert state == "error"
    assert type(error) is type(message_of(REFUSED[name][0](), mode))


@every_mode
def test_no_parameters(mode):
    error = message_of(model(), mode, parameters=[])
    assert isinstance(error, ValueError)
    assert "FlatParamHandle" in str(error)
    with fake_world():
        state, torchs = outcome(make_handle, TORCHS, model(), mode, [])
    assert (state, type(torchs)) == ("error", ValueError)


@every_mode
def test_no_parameter_is_in_the_module(mode):
    error = message_of(model(), mode, parameters=[nn.Parameter(torch.ones(7, 5))])
    assert isinstance(error, ValueError)
    assert "(7, 5)" in str(error) or "[7, 5]" in str(error)
    with fake_world():
        state, torchs = outcome(make_handle, TORCHS, model(), mode, [nn.Parameter(torch.ones(7, 5))])
    assert (state, type(torchs)) == ("error", ValueError)


@every_mode
def test_one_of_the_parameters_is_not_in_the_module(mode):
    """torch leaves it out without a word: it would never be trained."""
    module = model()
    error = message_of(module, mode, parameters=[*module.parameters(), nn.Parameter(torch.ones(7, 5))])
    assert isinstance(error, ValueError)
    assert "7, 5" in str(error)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_requires_grad_must_be_uniform_without_original_parameters(strategy):
    module = model()
    module.second.bias.requires_grad_(False)
    error = message_of(module, (strategy, False))
    assert isinstance(error, ValueError)
    for word in ("second.bias", "requires_grad", "use_orig_params"):
        assert word in str(error)
    with fake_world():
        make_handle(OURS, module, (strategy, True))  # allowed with them


def test_a_flat_parameter_is_not_flattened_again():
    with fake_world():
        handle = make_handle(OURS, model())
        outer = nn.Module()
        outer.flat = handle.flat_param
        for kind in (TORCHS, OURS):
            state, error = outcome(make_handle, kind, outer)
            assert (state, type(error)) == ("error", ValueError)
        assert "flat" in str(error)


class Group:
    """Looks like a process group of a size and a rank that no real one has."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


@every_mode
@pytest.mark.parametrize(("rank", "size"), [(0, 0), (0, -1), (3, 3), (-1, 2)])
def test_a_world_size_or_rank_that_cannot_be(rank, size, mode):
    module = model()
    arguments = (torch.device("cpu"), flatparam.HandleShardingStrategy[mode[0]], False, None, None, False)

    def built_and_sharded():
        handle = OURS(list(module.parameters()), module, *arguments, Group(rank, size), mode[1])
        handle.shard()

    state, error = outcome(built_and_sharded)
    assert state == "error"
    assert isinstance(error, ValueError)
    assert str(size if size <= 0 else rank) in str(error)


@every_mode
def test_sizes_that_overflow(mode):
    """Nine parameters of 2**60 elements: their sum is beyond 64 bits. Meta tensors need no memory for that."""
    module = nn.Module()
    for name in "abcdefghi":
        module.register_parameter(name, nn.Parameter(torch.empty(2**30, 2**30, device="meta")))
    error = message_of(module, mode)
    assert isinstance(error, (ValueError, RuntimeError))


def test_a_negative_alignment():
    with fake_world():
        for kind in (TORCHS, OURS):
            handle = make_handle(kind, model())
            for call in (
                lambda handle=handle: handle.flatten_tensors([torch.ones(2)], -1),
                lambda handle=handle: handle.flatten_tensors_into_flat_param([torch.ones(2)], -1, True),
                lambda handle=handle: handle.flatten_tensors([], 0),
            ):
                state, error = outcome(call)
                assert (state, type(error)) == ("error", ValueError)


# what a user may do with a view of the unsharded flat parameter that was kept too long
ACCESSES = {
    "fill": lambda kept: kept.detach().fill_(1),
    "clone": lambda kept: kept.clone(),
    "add": lambda kept: kept + 1,
    "multiply": lambda kept: torch.ones(3, 2) @ kept,
    "sum": lambda kept: kept.sum(),
    "numpy": lambda kept: kept.detach().numpy().sum(),
    "tolist": lambda kept: kept.tolist(),
    "copy from": lambda kept: torch.empty(2, 4).copy_(kept),
    "print": lambda kept: repr(kept),
}
FURTHER_VIEWS = {
    "index": lambda kept: kept[0, 0].item(),
    "transpose": lambda kept: kept.t().sum(),
    "flatten": lambda kept: kept.view(-1).sum(),
    "slice": lambda kept: kept[1:].clone(),
}


def use_of_a_freed_view(name, orig):
    """Run in a process of its own, which may crash; return what came of it."""
    module = model()
    handle = ready_for_forward(OURS, module, ("FULL_SHARD", orig))
    kept = module.second.weight
    reshard(handle, HandleTrainingState.FORWARD)
    note(name)
    state, error = outcome((ACCESSES | FURTHER_VIEWS)[name], kept)
    return state, isinstance(error, RuntimeError), str(error)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ACCESSES)
@pytest.mark.parametrize("orig", [True, False])
def test_access_to_freed_memory(orig, name):
    """torch crashes the interpreter here. The error says which parameter, why, and how to see it."""
    [(state, is_runtime_error, message)] = run_ranks(use_of_a_freed_view, 1, name, orig)
    assert state == "error"
    assert is_runtime_error
    for word in ("second.weight", "freed", "summon_full_params"):
        assert word in message


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", FURTHER_VIEWS)
@pytest.mark.parametrize("orig", [True, False])
def test_a_view_of_freed_memory(orig, name):
    """To view freed memory once more is an error too; torch itself may find it first, and word it."""
    [(state, is_runtime_error, _)] = run_ranks(use_of_a_freed_view, 1, name, orig)
    assert state == "error"
    assert is_runtime_error


@pytest.mark.parametrize("orig", [True, False])
def test_the_handle_works_on_after_freed_memory_was_touched(orig):
    with fake_world():
        module = model()
        handle = ready_for_forward(OURS, module, ("FULL_SHARD", orig))
        kept, before = module.second.weight, digest(module.second.weight)
        reshard(handle, HandleTrainingState.FORWARD)
        with pytest.raises(RuntimeError, match="freed"):
            kept.sum()
        unshard(handle, HandleTrainingState.FORWARD)
        assert digest(kept) == digest(module.second.weight) == before
        module.second.weight.sum().backward()
        assert handle.flat_param.grad.sum() == module.second.weight.numel()


@every_mode
def test_unsharding_meta_parameters(mode):
    """A handle over meta parameters is legal, as a step of a deferred initialisation; running it is not."""
    with fake_world():
        errors = []
        for kind in (TORCHS, OURS):
            with torch.device("meta"):
                module = model()
            state, error = outcome(ready_for_forward, kind, module, mode)
            assert state == "error"
            errors.append(error)
        assert isinstance(errors[1], type(errors[0]))
        assert "meta" in str(errors[1])


WRONG_TYPES = {
    "params": lambda a: {**a, "params": 3},
    "params of strings": lambda a: {**a, "params": ["first.weight"]},
    "module": lambda a: {**a, "fully_sharded_module": "model"},
    "device": lambda a: {**a, "device": 1.5},
    "strategy": lambda a: {**a, "sharding_strategy": "FULL_SHARD"},
    "param dtype": lambda a: {**a, "mp_param_dtype": "bf16"},
    "group": lambda a: {**a, "process_group": None},
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_wrong_type_given_to_the_constructor(name):
    """It raises, where torch does, the like; and never leaves the module without its parameters."""

    def scenario(kind):
        module = model()
        arguments = {
            "params": list(module.parameters()),
            "fully_sharded_module": module,
            "device": torch.device("cpu"),
            "sharding_strategy": flatparam.HandleShardingStrategy.FULL_SHARD,
            "offload_params": False,
            "mp_param_dtype": None,
            "mp_reduce_dtype": None,
            "keep_low_precision_grads": False,
            "process_group": torch.distributed.group.WORLD,
            "use_orig_params": True,
        }
        handle = kind(**WRONG_TYPES[name](arguments))
        return describe(handle.flat_param)

    assert_same_outcome(scenario)
