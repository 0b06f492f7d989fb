"""A checkpoint keeps all of an optimizer, a module and a gradient, or refuses the values that it cannot keep."""

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo import run_ranks
from safetensors.torch import save_file
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint
from flatparam.checkpoint import CheckpointError


def two(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(dtype)


def stepped(module, make=torch.optim.Adam, **settings):
    optimizer = make(module.parameters(), **{"lr": 0.1, **settings})
    backward(module)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def backward(module):
    module(torch.ones(2, 3, dtype=next(module.parameters()).dtype)).pow(2).sum().backward()


def refused(path, module, optimizer, pattern):
    before = [dict(state) for state in optimizer.state.values()]
    with pytest.raises(CheckpointError, match=pattern):
        checkpoint.load(path, module, optimizer)
    assert [state.keys() for state in before] == [state.keys() for state in optimizer.state.values()]


@pytest.mark.parametrize("name", ["{number}", "module.{name}"])
def test_states_of_others_under_names_that_are_not_the_models(tmp_path, name):
    module = two()
    optimizer = stepped(module)
    tensors = {f"model.{n}": p.detach().clone() for n, p in module.named_parameters()}
    for number, (n, p) in enumerate(module.named_parameters()):
        tensors[f"optim.state.{name.format(number=number, name=n)}.exp_avg"] = optimizer.state[p]["exp_avg"].clone()
    save_file(tensors, tmp_path / "one.safetensors")
    refused(tmp_path / "one.safetensors", module, optimizer, "has optimizer states of `.*`, which no group")


@pytest.mark.parametrize("flat", [False, True])
def test_groups_in_torchs_own_files(tmp_path, flat):
    module = two()
    groups = [{"params": module[0].parameters(), "lr": torch.tensor(0.3)}, {"params": module[1].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=0.123, betas=(0.7, 0.8), capturable=False)
    backward(module)
    optimizer.step()
    if flat:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        weights, states = module.state_dict(), get_optimizer_state_dict(module, optimizer, options=options)
    else:
        weights, states = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=str(tmp_path / "one"), no_dist=True)
    again = two()
    other = torch.optim.Adam(
        [{"params": again[0].parameters(), "lr": torch.tensor(0.9)}, {"params": again[1].parameters()}]
    )
    checkpoint.load(tmp_path / "one", again, other, trusted=True)
    assert torch.equal(other.param_groups[0]["lr"], torch.tensor(0.3))
    assert [group["betas"] for group in other.param_groups] == [(0.7, 0.8)] * 2
    assert other.param_groups[1]["lr"] == 0.123
    for param, one in zip(again.parameters(), module.parameters(), strict=True):
        assert torch.equal(other.state[param]["exp_avg"], optimizer.state[one]["exp_avg"])


def test_gradients_of_parameters_that_no_optimizer_steps(tmp_path):
    module, again = two(), two()
    part = torch.optim.SGD(module[1].parameters(), lr=1.0)
    backward(module)
    checkpoint.save(tmp_path / "one", module, part)
    again[0].weight.grad = torch.full((3, 3), 7.0)
    checkpoint.load(tmp_path / "one", again, torch.optim.SGD(again[1].parameters(), lr=1.0))
    for one, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    module.zero_grad()
    checkpoint.save(tmp_path / "two", module, part)
    checkpoint.load(tmp_path / "two", again, torch.optim.SGD(again[1].parameters(), lr=1.0))
    assert all(param.grad is None for param in again.parameters())


def test_what_has_the_parameters_dtype_gets_that_of_the_parameter_it_is_loaded_into(tmp_path):
    module = two()
    optimizer = stepped(module)
    backward(module)
    checkpoint.save(tmp_path / "one", module, optimizer)
    low = two(torch.bfloat16)
    other = torch.optim.Adam(low.parameters())
    with pytest.warns(UserWarning, match="rounded"):
        checkpoint.load(tmp_path / "one", low, other)
    for param, one in zip(low.parameters(), module.parameters(), strict=True):
        assert torch.equal(param.grad, one.grad.bfloat16())
        assert torch.equal(other.state[param]["exp_avg"], optimizer.state[one]["exp_avg"].bfloat16())
    backward(low)
    other.step()


def test_conjugate_and_negative_views(tmp_path):
    module = nn.Module()
    z = torch.tensor([1 + 2j, 3 - 4j])
    module.register_buffer("z", z.clone())
    extra = {"conj": z.conj(), "imag": z.conj().imag}
    checkpoint.save(tmp_path / "one", module, extra=extra)
    found = checkpoint.read_extra(tmp_path / "one")
    assert all(torch.equal(found[key], extra[key].clone()) for key in extra)
    module.register_buffer("z", z.conj())
    with pytest.raises(CheckpointError, match="`z` is not dense, or a conjugate"):
        checkpoint.load(tmp_path / "one", module)


def test_states_that_no_optimizer_here_takes(tmp_path):
    module = two()
    checkpoint.save(tmp_path / "one", module, stepped(module))
    part = torch.optim.Adam(module[0].parameters())
    refused(tmp_path / "one", module, part, r"states of `1\.weight`, which no group")
    checkpoint.load(tmp_path / "one", module, part, strict=False)
    assert len(part.state) == 2


def test_keys_that_no_checkpoint_has(tmp_path):
    module = two()
    optimizer = stepped(module)
    for where, key, pattern in (
        (optimizer.state, "global", "keeps state under 'global'"),
        (optimizer.state[module[0].weight], 0, r"state of `0\.weight` has the key 0"),
        (optimizer.state[module[0].weight], ".grad", r"state of `0\.weight` has the key '\.grad'"),
    ):
        where[key] = {}
        with pytest.raises(CheckpointError, match=pattern):
            checkpoint.save(tmp_path / "one", module, optimizer)
        del where[key]
    with pytest.raises(CheckpointError, match="labels"):
        checkpoint.save(tmp_path / "one", module, {1: optimizer, "1": stepped(nn.Linear(3, 3))})
    assert not (tmp_path / "one").exists()


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.s = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.w * self.s


def numbers_as_tensors(folder, make):
    module, whole = Scalar(), FSDP(Scalar(), use_orig_params=False)
    optimizer = stepped(module, make)
    checkpoint.save(folder / "one", module, optimizer)
    other = make(whole.parameters(), lr=0.1)
    checkpoint.load(folder / "one", whole, other)
    assert len(other.state) == 1
    x = torch.ones(2, 3)
    for model, its in ((module, optimizer), (whole, other)):
        model(x).sum().backward()
        its.step()
    assert torch.equal(module(x), whole(x))


@pytest.mark.multiprocess
@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD])
def test_parameters_without_dimensions_and_numbers_as_tensors(tmp_path, make):
    simulate_ranks(numbers_as_tensors, 1, tmp_path, make)


def test_a_save_that_is_over_keeps_no_copies(tmp_path):
    module = nn.Linear(500, 500)
    pending = checkpoint.async_save(tmp_path / "one", module)
    pending.wait()
    assert not pending._saving.plan.parts


def test_more_files_than_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr("flatparam.checkpoint.reading.MOST_OPEN", 1)
    module = two()
    optimizer = stepped(module)
    checkpoint.save(tmp_path / "one", module, optimizer, extra=torch.ones(3))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, before[1]))
    try:
        checkpoint.verify(tmp_path / "one")
        checkpoint.load(tmp_path / "one", module, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_under_another_default_device(tmp_path):
    module = two()
    optimizer = stepped(module)
    with torch.device("meta"):
        checkpoint.async_save(tmp_path / "one", module, optimizer, extra=[module[0].bias.detach()]).wait()
        checkpoint.verify(tmp_path / "one", check_finite=True)
        checkpoint.load(tmp_path / "one", module, optimizer)
        assert checkpoint.read_extra(tmp_path / "one")[0].device.type == "cpu"


def test_names_of_parameters_in_groups_are_not_settings(tmp_path):
    module, lr = two(), 0.1
    named = list(module.named_parameters())
    optimizer = torch.optim.SGD([{"params": named[:2]}, {"params": named[2:]}], lr=lr)
    checkpoint.save(tmp_path / "two", module, optimizer)
    one = torch.optim.SGD(named, lr=1.0)
    checkpoint.load(tmp_path / "two", module, one)
    assert (one.param_groups[0]["lr"], one.param_groups[0]["param_names"]) == (lr, [name for name, _ in named])
    checkpoint.save(tmp_path / "one", module, one)
    checkpoint.load(tmp_path / "one", module, optimizer)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
    ]


def test_loading_in_inference_mode(tmp_path):
    module = two()
    optimizer = stepped(module)
    backward(module)
    checkpoint.save(tmp_path / "one", module, optimizer)
    again = two()
    other = torch.optim.Adam(again.parameters())
    with torch.inference_mode():
        checkpoint.load(tmp_path / "one", again, other)
    assert torch.equal(again[0].weight.grad, module[0].weight.grad)
    again.zero_grad()
    backward(again)
    other.step()


def test_modules_and_parameters_with_odd_names(tmp_path):
    module = nn.Module()
    module.optim, module.a = nn.Linear(2, 2), nn.Linear(2, 2)
    checkpoint.save(tmp_path / "one", module)
    checkpoint.export(tmp_path / "one", tmp_path / "one.safetensors")
    weight = module.optim.weight.detach().clone()
    nn.init.zeros_(module.optim.weight)
    checkpoint.load(tmp_path / "one.safetensors", module)
    assert torch.equal(module.optim.weight, weight)
    module.register_parameter("__metadata__", nn.Parameter(torch.ones(1)))
    with pytest.raises(CheckpointError, match="`__metadata__` is no name"):
        checkpoint.save(tmp_path / "two", module)
    assert not (tmp_path / "two").exists()


def test_values_in_lists_that_are_not_finite(tmp_path):
    module = two()
    optimizer = stepped(module)
    optimizer.state[module[0].weight]["list"] = [torch.tensor([1.0, float("nan")])]
    checkpoint.save(tmp_path / "one", module, optimizer, extra=torch.tensor(float("nan")))
    with pytest.raises(CheckpointError, match="not finite"):
        checkpoint.load(tmp_path / "one", module, optimizer, check_finite=True)
    assert checkpoint.load(tmp_path / "one", module, check_finite=True).extra.isnan()


def test_errors_are_a_checkpoints(tmp_path):
    module = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"`extra\.x` is a tensor of layout torch\.sparse_coo"):
        checkpoint.save(tmp_path / "one", module, extra={"x": torch.eye(3).to_sparse()})
    huge = 10**5000 + 1
    checkpoint.save(tmp_path / "one", module, extra=huge)
    assert checkpoint.read_extra(tmp_path / "one") == huge


class Experts(nn.Module):
    """Has a module whose parameters, and what it keeps, are each rank's own."""

    def __init__(self, size=3):
        super().__init__()
        self.shared, self.kept = nn.Linear(3, 3), dist.get_rank()
        torch.manual_seed(self.kept)
        self.expert = nn.Linear(3, size)

    def forward(self, x):
        return self.expert(self.shared(x)).sum()

    def get_extra_state(self):
        return {"kept": self.kept, "tensor": torch.full((2,), self.kept)}

    def set_extra_state(self, state):
        assert (state["tensor"] == state["kept"]).all()
        self.kept = state["kept"]


def what_each_rank_has_of_its_own(folder, size_of_second):
    """Parameters that no unit manages, their states, and the states of modules: each rank gets its own back."""
    rank = dist.get_rank()

    def make(seed):
        torch.manual_seed(seed)
        module = Experts(3 if rank == 0 else size_of_second)
        model = FSDP(module, ignored_modules=[module.expert], use_orig_params=True)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def losses(model, optimizer, steps):
        found = []
        for step in steps:
            optimizer.zero_grad()
            loss = model(torch.full((2, 3), float(step + rank)))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    model, optimizer = make(0)
    losses(model, optimizer, range(2))
    optimizer.zero_grad()
    checkpoint.save(folder / "one", model, optimizer)
    again, other = make(9)
    again.module.kept = 7
    checkpoint.load(folder / "one", again, other)
    assert again.module.kept == rank
    assert losses(model, optimizer, range(3, 6)) == losses(again, other, range(3, 6))


@pytest.mark.multiprocess
@pytest.mark.parametrize("size_of_second", [3, 4])
def test_what_each_rank_has_of_its_own(tmp_path, size_of_second):
    simulate_ranks(what_each_rank_has_of_its_own, 2, tmp_path, size_of_second)


def what_is_not_alike(folder):
    """Is refused on both ranks, by name."""
    rank = dist.get_rank()
    model = FSDP(nn.Linear(4, 4, bias=False), use_orig_params=True)
    [param] = model.parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    with pytest.raises(CheckpointError, match="an option of the optimizer's group `0` differs on rank 0 and rank 1"):
        checkpoint.save(folder / "one", model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    if rank == 1:
        optimizer.state[param]["k"] = 7
    with pytest.raises(CheckpointError, match="the optimizer has `k` of `weight` on rank 1, and not on rank 0"):
        checkpoint.save(folder / "one", model, optimizer)
    dist.barrier()
    assert not list(folder.iterdir())
    optimizer.state[param] = {"scale": torch.full((1,), 3.0)}
    checkpoint.save(folder / "one", model, optimizer)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    optimizer.state.clear()
    checkpoint.load(folder / "one", model, optimizer)
    assert optimizer.state[param]["scale"] == 3.0
    optimizer.state.clear()
    optimizer.load_state_dict(FSDP.shard_full_optim_state_dict(full, model, optim=optimizer))
    assert optimizer.state[param]["scale"] == 3.0
    if rank == 1:
        optimizer.state[param]["call"] = lambda: None
    with pytest.raises(ValueError, match="rank 1 has a value that cannot be sent to other ranks"):
        FSDP.full_optim_state_dict(model, optimizer)


@pytest.mark.multiprocess
def test_what_is_not_alike(tmp_path):
    simulate_ranks(what_is_not_alike, 2, tmp_path, timeout=60)


class Gone:
    """A standard error whose reader has ended."""

    def write(self, *text):
        raise BrokenPipeError

    flush = write


def one_rank_cannot(folder):
    """None waits for it."""
    rank = dist.get_rank()
    module = FSDP(nn.Linear(4, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", Gone())
        checkpoint.save(folder / "one", module, progress=True)
        checkpoint.load(folder / "one", module, progress=True)
    with pytest.raises(CheckpointError, match="rank 1: TypeError" if rank == 0 else "TypeError"):
        checkpoint.load(folder / "one" if rank == 0 else None, module)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("threading.Thread.start", no_thread)
        with pytest.raises(CheckpointError, match="can't start new thread"):
            checkpoint.async_save(folder / "two", module).wait()
    (folder / "real").mkdir(exist_ok=True)
    if rank == 0:
        (folder / "link").symlink_to(folder / "real")
    dist.barrier()
    pending = checkpoint.async_save(folder / "link" / "one", module)
    pending.wait()
    with pytest.raises(CheckpointError, match="is there already"):
        checkpoint.save(folder / "real" / "one", module)


def no_thread(self):
    raise RuntimeError("can't start new thread")


@pytest.mark.multiprocess
def test_one_rank_cannot(tmp_path):
    run_ranks(one_rank_cannot, 2, tmp_path, timeout=60)
