"""A checkpoint keeps the values that `model.load_state_dict(model.state_dict())` keeps; errors name the rest.

Promises:
- values that modules write into state dicts by overrides and hooks, names that hooks change, buffers of a new size:
  kept on any ranks as `load_state_dict(state_dict())` keeps them, or refused with their name
- weights that a load replaces, and scales that a weight's class has and no state dict, as in quantized layers:
  `test_quantized_layers_whose_scales_nobody_loads_and_whose_weights_are_replaced`
"""

import copy

import pytest
import torch
import torch.distributed as dist
from gloo import note
from safetensors.torch import load_file, save_file
from simulated_ranks import simulate_ranks
from torch import nn
from torch.ao.quantization import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import weight_norm

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy as S
from flatparam import checkpoint, load_safetensors
from flatparam.checkpoint import CheckpointError


class Metric(nn.Module):
    """In the manner of torchmetrics: sums are attributes, and `state_dict` itself is overridden."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def change(self, to):
        self.total = self.total + to

    def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
        found = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        found[prefix + "total"] = self.total.clone()
        return found

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.total = state_dict.pop(prefix + "total").clone()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def seen(self):
        return self.total.item()


class Ids(nn.Module):
    """By the documented place to override, with a value that is no tensor."""

    def __init__(self):
        super().__init__()
        self.ids, self.name = [], "none"

    def change(self, to):
        self.ids += [to] * int(to)
        self.name = f"after {to}"

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "ids"] = torch.tensor(self.ids)
        destination[prefix + "name"] = self.name

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.ids = state_dict.pop(prefix + "ids").tolist()
        self.name = state_dict.pop(prefix + "name")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def seen(self):
        return self.ids, self.name


class Counts(nn.Module):
    """In the manner of torchmetrics, too: states that are added, of which a flag says whether they persist."""

    def __init__(self):
        super().__init__()
        self.defaults, self.persist = {}, {}
        self.add_state("count", torch.tensor(0), persistent=True)
        self.add_state("batches", [], persistent=True)
        self.add_state("last", torch.tensor(0.0), persistent=False)
        self.register_buffer("limits", torch.linspace(0, 1, 3), persistent=False)

    def add_state(self, name, default, persistent):
        setattr(self, name, default)
        self.defaults[name], self.persist[name] = copy.deepcopy(default), persistent

    def change(self, to):
        self.count += int(to)
        self.batches.append(torch.full((2,), to))
        self.last = torch.tensor(to)

    def state_dict(self, destination=None, prefix="", keep_vars=False):
        found = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name in (name for name, does in self.persist.items() if does):
            found[prefix + name] = copy.deepcopy(getattr(self, name))
        return found

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name in self.defaults:
            if prefix + name in state_dict:
                setattr(self, name, state_dict.pop(prefix + name))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def seen(self):
        return self.count.item(), [batch.tolist() for batch in self.batches]


class Hooked(nn.Module):
    """By hooks, which keep the tensor of the file itself; with a weight of its own, under another name there."""

    def __init__(self):
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.ones(5, 3)), torch.zeros(2)
        self.register_state_dict_post_hook(self.give)
        self.register_load_state_dict_pre_hook(self.take)

    @staticmethod
    def give(self, destination, prefix, metadata):
        destination[prefix + "kept"] = self.kept
        destination[prefix + "kernel"] = destination.pop(prefix + "weight")

    @staticmethod
    def take(self, state_dict, prefix, *args):
        self.kept = state_dict.pop(prefix + "kept")
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")

    def change(self, to):
        self.kept = self.kept + to
        self.weight.data += to

    def forward(self, x):
        return x + self.weight.sum()

    def seen(self):
        return self.kept.tolist()


class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = 0

    def change(self, to):
        self.value = to

    def get_extra_state(self):
        return {"value": self.value}

    def set_extra_state(self, state):
        self.value = state["value"]

    def seen(self):
        return self.value


class Observed(nn.Module):
    """Buffers whose size is known when something was seen."""

    def __init__(self):
        super().__init__()
        self.all = nn.ModuleList([PerChannelMinMaxObserver(), MinMaxObserver(), HistogramObserver(bins=8)])

    def change(self, to):
        for one in self.all:
            one(torch.arange(12.0).view(4, 3) * to)

    def seen(self):
        return [{name: value.tolist() for name, value in one.state_dict().items()} for one in self.all]


KINDS = (Metric, Ids, Counts, Hooked, Extra, Observed)


def model(kinds=KINDS, seed=0):
    torch.manual_seed(seed)
    made = nn.ModuleDict({"net": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})
    made["old"] = weight_norm(nn.Linear(3, 3))
    for kind in kinds:
        made[kind.__name__.lower()] = kind()
    return made


class Model(nn.Module):
    """The same with a forward."""

    def __init__(self, seed=0):
        super().__init__()
        self.parts = model(seed=seed)

    def forward(self, x):
        parts = self.parts
        return parts["hooked"](parts["old"](parts["norm"](parts["net"](x))))


def changed(parts, to=3.0):
    for kind in KINDS:
        parts[kind.__name__.lower()].change(to)


def seen(parts):
    return [parts[kind.__name__.lower()].seen() for kind in KINDS]


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_kinds(tmp_path, asynchronous):
    one, oracle, other = Model(), Model(1), Model(2)
    changed(one.parts)
    oracle.load_state_dict(one.state_dict())
    if asynchronous:
        checkpoint.async_save(tmp_path / "one", one).wait()
    else:
        checkpoint.save(tmp_path / "one", one)
    checkpoint.load(tmp_path / "one", other)
    assert seen(other.parts) == seen(oracle.parts) == seen(one.parts)
    assert equal(other.state_dict(), oracle.state_dict())
    # the names of the files are those of the state dict
    checkpoint.export(tmp_path / "one", tmp_path / "one.safetensors")
    tensors = {name: value for name, value in one.state_dict().items() if isinstance(value, torch.Tensor)}
    assert equal(load_file(tmp_path / "one.safetensors"), tensors)


def of_ranks(folder):
    rank = dist.get_rank()

    def made(strategy, use_orig_params, seed):
        module = Model(seed)
        module.parts["hooked"] = FSDP(module.parts["hooked"], **kwargs(strategy, use_orig_params))
        module.parts["net"] = checkpoint_wrapper(module.parts["net"])
        return FSDP(module, **kwargs(strategy, use_orig_params))

    def kwargs(strategy, use_orig_params):
        return {"sharding_strategy": S[strategy], "use_orig_params": use_orig_params}

    def inside(wrapped):
        parts = dict(wrapped.module.parts.items())
        return {**parts, "hooked": parts["hooked"].module}

    def change(wrapped, to):
        for kind in KINDS:
            if kind is Hooked:
                inside(wrapped)["hooked"].kept += to
            else:
                inside(wrapped)[kind.__name__.lower()].change(to)

    for strategy, use_orig_params in (("FULL_SHARD", True), ("FULL_SHARD", False), ("NO_SHARD", True)):
        note(f"{strategy} {use_orig_params}")
        name = f"{strategy} {use_orig_params}"
        one = made(strategy, use_orig_params, 0)
        one(torch.ones(2, 3)).sum().backward()  # what a forward leaves in the modules
        one.zero_grad()
        change(one, 2.0 + rank)  # each rank has seen something else
        checkpoint.save(folder / name, one)
        state = one.state_dict()
        for other_strategy, other_orig in (("FULL_SHARD", False), ("FULL_SHARD", True), ("NO_SHARD", False)):
            other = made(other_strategy, other_orig, 5)
            other(torch.ones(2, 3))
            checkpoint.load(folder / name, other)
            assert seen(inside(other)) == seen(inside(one))
            assert equal(other.state_dict(), state)
            other(torch.ones(2, 3)).sum().backward()
    # at another number of ranks, rank 0's count
    alone = Model(7)
    dist.barrier()
    group = dist.new_group([0])
    dist.new_group([1])
    if rank == 0:
        checkpoint.load(folder / "FULL_SHARD True", alone, process_group=group)
        assert seen(alone.parts) == seen(inside(one))


@pytest.mark.multiprocess
def test_of_ranks(tmp_path):
    simulate_ranks(of_ranks, 2, tmp_path)


class Renames(nn.Module):
    """Knows what it was called, and how it was laid out, before."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        self.gain = nn.Parameter(torch.ones(2))
        self.register_load_state_dict_pre_hook(self.before)

    @staticmethod
    def before(self, state_dict, prefix, *args):
        if prefix + "scale" in state_dict:
            state_dict[prefix + "gain"] = state_dict.pop(prefix + "scale")
        if prefix + "qk" in state_dict:
            qk = state_dict.pop(prefix + "qk")
            state_dict[prefix + "q.weight"], state_dict[prefix + "k.weight"] = qk[:2], qk[2:]


def renamed(folder):
    torch.manual_seed(1)
    old = {
        "a.scale": torch.randn(2),
        "a.qk": torch.randn(4, 3),
        "b.weight": torch.randn(2, 2),
        "b.bias": torch.randn(2),
    }

    def made():
        return nn.ModuleDict({"a": Renames(), "b": nn.Linear(2, 2)})

    class Old(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Module(), nn.Linear(2, 2)
            self.a.scale, self.a.qk = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(4, 3))

    oracle = made()
    oracle.load_state_dict(old)
    first = Old()
    first.load_state_dict(old)
    checkpoint.save(folder / "ours", FSDP(first, use_orig_params=True))
    if dist.get_rank() == 0:
        save_file(old, folder / "theirs.safetensors")
    dist.barrier()
    for path in (folder / "ours", folder / "theirs.safetensors"):
        for use_orig_params in (True, False):
            plain, wrapped = made(), made()
            wrapped["a"] = FSDP(wrapped["a"], use_orig_params=use_orig_params)
            wrapped = FSDP(wrapped, use_orig_params=use_orig_params)
            for one in (plain, wrapped):
                checkpoint.load(path, one)
                assert equal(one.state_dict(), oracle.state_dict())
            again = FSDP(made(), use_orig_params=use_orig_params)
            assert not any(load_safetensors(again, folder / "theirs.safetensors"))
            assert equal(again.state_dict(), oracle.state_dict())
    del old["a.scale"]
    if dist.get_rank() == 0:
        save_file(old, folder / "less.safetensors")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: `a\.gain`"):
        checkpoint.load(folder / "less.safetensors", wrapped)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in the files: "a\.gain"'):
        load_safetensors(wrapped, folder / "less.safetensors")
    assert equal(wrapped.state_dict(), oracle.state_dict())


@pytest.mark.multiprocess
def test_names_that_a_load_hook_renames(tmp_path):
    simulate_ranks(renamed, 2, tmp_path)


OF_TENSORS = (Metric, Hooked, Observed)


def of_files(folder):
    """Modules that load by their own code take what `load_state_dict(load_file())` lets them take, or none does."""
    rank = dist.get_rank()
    one, oracle = model(OF_TENSORS), model(OF_TENSORS, 1)
    for kind in OF_TENSORS:
        one[kind.__name__.lower()].change(3.0)
    if rank == 0:
        save_file(one.state_dict(), folder / "one.safetensors")
        save_file({**one.state_dict(), "net.bias": torch.zeros(7)}, folder / "bad.safetensors")
        save_file({**one.state_dict(), "net.bias": torch.zeros(3)}, folder / "other.safetensors")
    dist.barrier()
    oracle.load_state_dict(load_file(folder / "one.safetensors"))
    for use_orig_params in (True, False):
        loaded = model(OF_TENSORS, 2)
        loaded["hooked"] = hooked = FSDP(loaded["hooked"], use_orig_params=use_orig_params)
        loaded = FSDP(loaded, use_orig_params=use_orig_params)
        before = {name: value.clone() for name, value in loaded.state_dict().items()}
        for file, message in (
            ("bad", r"bad\.safetensors: .*size mismatch for net\.bias"),
            ("other" if rank else "one", "differ"),
        ):
            with pytest.raises(RuntimeError, match=message):
                load_safetensors(loaded, folder / f"{file}.safetensors")
            assert equal(loaded.state_dict(), before)
        assert not any(load_safetensors(loaded, folder / "one.safetensors"))
        assert equal(loaded.state_dict(), oracle.state_dict())
        assert hooked.module.seen() == oracle["hooked"].seen() == one["hooked"].seen()
        assert loaded.module["metric"].seen() == 3.0


@pytest.mark.multiprocess
def test_modules_load_safetensors_by_their_own_code(tmp_path):
    simulate_ranks(of_files, 2, tmp_path)


class Versioned(nn.Module):
    """Writes into the metadata of a state dict, which it reads from one that it loads."""

    def __init__(self):
        super().__init__()
        self.layout, self.weight = None, nn.Parameter(torch.ones(2))
        self.register_state_dict_post_hook(lambda module, state, prefix, metadata: metadata.update(layout=(1, (2, 3))))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        self.layout = local_metadata.get("layout")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_metadata_of_modules_have_the_types_that_they_had(tmp_path):
    one, oracle, other = Versioned(), Versioned(), Versioned()
    checkpoint.save(tmp_path / "one", one)
    oracle.load_state_dict(one.state_dict())
    checkpoint.load(tmp_path / "one", other)
    assert other.layout == oracle.layout == (1, (2, 3))


def test_batch_norm_of_before_it_counted(tmp_path):
    one = model(())
    state = {name: value for name, value in one.state_dict().items() if "num_batches" not in name}
    save_file(state, tmp_path / "one.safetensors")
    other = model((), 1)
    other["norm"].num_batches_tracked += 5
    oracle = copy.deepcopy(other)
    oracle.load_state_dict(state)
    again = copy.deepcopy(other)
    checkpoint.load(tmp_path / "one.safetensors", other)
    assert equal(other.state_dict(), oracle.state_dict())
    load_safetensors(again, tmp_path / "one.safetensors")
    assert equal(again.state_dict(), oracle.state_dict())


class Doubles(nn.Module):
    """Gives something else than it has."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.ones(4, 3)), how

    def forward(self, x):
        return x @ self.weight.t()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.how == "computes":
            destination[prefix + "norm"] = self.weight.detach().norm()
        elif self.how == "changes":
            destination[prefix + "weight"] = torch.zeros(4, 3)
        elif self.how == "sparse":
            destination[prefix + "more"] = torch.eye(2).to_sparse()
        elif self.how == "object":
            destination[prefix + "more"] = object()
        elif self.how == "swaps":
            self.weight = nn.Parameter(self.weight.detach())
        else:  # is fine: the same under the same name
            destination[prefix + "weight"] = self.weight.detach().to("cpu").contiguous()


REFUSED = {
    "computes": r"computes with `0\.weight` \(norm\)",
    "changes": r"`0\.weight`: the model's state_dict\(\) has another value",
    "sparse": r"`0\.more`, which a module writes into its state dict, is a Tensor of torch\.float32",
    "object": r"`0\.more` is a builtins\.object",
    "swaps": r"`0\.weight`: Doubles replaces this parameter",
}


def refused(folder):
    for how, pattern in REFUSED.items():
        note(how)
        module = nn.Sequential(Doubles(how), nn.Linear(4, 2))
        wrapped = FSDP(module, use_orig_params=True)
        before = [(name, id(param)) for name, param in wrapped.named_parameters()]
        with pytest.raises(CheckpointError, match=pattern):
            checkpoint.save(folder / how, wrapped)
        assert not (folder / how).exists()
        assert [(name, id(param)) for name, param in wrapped.named_parameters()] == before
        wrapped(torch.ones(2, 3)).sum().backward()
    wrapped = FSDP(nn.Sequential(Doubles("fine"), nn.Linear(4, 2)), use_orig_params=True)
    checkpoint.save(folder / "fine", wrapped)
    checkpoint.load(folder / "fine", wrapped)


@pytest.mark.multiprocess
def test_what_cannot_be_kept_is_refused(tmp_path):
    simulate_ranks(refused, 2, tmp_path)


class Fails(Metric):
    """Raises after it has loaded."""

    fails = False

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        if self.fails:
            raise ValueError("it fails")


def undone(folder):
    def made():
        module = nn.ModuleDict({"net": nn.Linear(3, 3), "ids": Ids(), "seen": Observed(), "fails": Fails()})
        return FSDP(module, use_orig_params=True)

    one = made()
    for name in ("ids", "seen", "fails"):
        one.module[name].change(2.0)
    checkpoint.save(folder / "one", one)
    other = made()
    other.module["fails"].fails = dist.get_rank() == 1
    other.module["ids"].change(1.0)
    before = {name: copy.copy(value) for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match="rank 1.*it fails" if dist.get_rank() == 0 else "it fails"):
        checkpoint.load(folder / "one", other)
    assert equal(other.state_dict(), before)
    with pytest.raises((RuntimeError, ValueError), match="it fails"):  # of states it is the same
        other.load_state_dict(one.state_dict())
    assert equal(other.state_dict(), before)
    other.module["fails"].fails = False
    checkpoint.load(folder / "one", other)
    assert equal(other.state_dict(), one.state_dict())


@pytest.mark.multiprocess
def test_a_load_that_fails_on_one_rank_is_undone_on_all(tmp_path):
    simulate_ranks(undone, 2, tmp_path)


def test_quantized_layers(tmp_path):
    """Whose weights no file has, in a tuple of what a child module gives."""
    with pytest.raises(CheckpointError, match=r"`0\._packed_params\._packed_params.*torch\.qint8"):
        checkpoint.save(tmp_path / "one", nn.Sequential(torch.ao.nn.quantized.Linear(3, 3)))
    assert not list(tmp_path.iterdir())


def test_layers_that_learn_how_to_be_quantized(tmp_path):
    def made():
        module = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).train()
        module.qconfig = torch.ao.quantization.get_default_qat_qconfig()
        return torch.ao.quantization.prepare_qat(module)

    one, other = made(), made()
    one(torch.ones(2, 3))
    checkpoint.save(tmp_path / "one", one)
    checkpoint.load(tmp_path / "one", other)
    assert equal(one.state_dict(), other.state_dict())
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(one(x), other(x))


def test_what_no_module_takes(tmp_path):
    one = model((Metric, Ids))
    checkpoint.save(tmp_path / "one", one)
    other = nn.ModuleDict({"net": nn.Linear(3, 3)})
    with pytest.raises(CheckpointError, match=r"not in the model: .*`metric\.total`"):
        checkpoint.load(tmp_path / "one", other)
    found = checkpoint.load(tmp_path / "one", other, strict=False)
    assert "metric.total" in found.unexpected
    assert torch.equal(other["net"].weight, one["net"].weight)


class Scaled(nn.Module):
    """In the manner of bitsandbytes: the weight's class has a scale, which is written and read by nobody."""

    def __init__(self, seed):
        super().__init__()
        values = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        data = (values / values.abs().max() * 127).to(torch.int8)
        self.weight = torch.Tensor._make_subclass(type("Packed", (nn.Parameter,), {}), data, False)
        self.weight.scale = values.abs().max() / 127
        self.up = nn.Linear(6, 1)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.scale"] = self.weight.scale

    def forward(self, x):
        return self.up(x @ (self.weight.as_subclass(torch.Tensor).float() * self.weight.scale).t())


class Replacing(nn.Module):
    """In the manner of HQQ: it asks whether it has a weight, and makes a new one of what the file has."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, 4).mul(9).to(torch.int8), requires_grad=False)
        self.meta = {"scale": torch.rand(())}
        self.up = nn.Linear(4, 1)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        assert None not in [self.weight, self.meta]
        destination |= {prefix + "weight": self.weight, prefix + "scale": self.meta["scale"]}

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.weight = nn.Parameter(state_dict.pop(prefix + "weight"), requires_grad=False)
        self.weight.data = self.weight.data.to("cpu").contiguous()
        self.weight = nn.Parameter(self.weight, requires_grad=False)
        self.meta = {"scale": state_dict.pop(prefix + "scale")}

    def forward(self, x):
        return self.up(x @ (self.weight.float() * self.meta["scale"]).t())


def of_quantized_layers(folder):
    x = torch.ones(2, 4)
    for cls, uses in ((Scaled, False), (Scaled, True), (Replacing, False), (Replacing, True)):
        note(f"{cls.__name__} {uses}")
        model, other, again = (FSDP(cls(seed), use_orig_params=uses) for seed in (0, 1, 0))
        path = f"{folder}/{cls.__name__} {uses}"
        checkpoint.save(path, model)
        if cls is Scaled:
            with pytest.raises(CheckpointError, match=r"`weight.scale`, which .* is another in the checkpoint"):
                checkpoint.load(path, other)
            assert checkpoint.load(path, other, strict=False).unexpected == ["weight.scale"]
            with torch.no_grad():
                other(x)  # with the bytes of the one and the scale of the other
            other = again
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        checkpoint.load(path, other)
        assert torch.equal(model(x), other(x))


@pytest.mark.multiprocess
def test_quantized_layers_whose_scales_nobody_loads_and_whose_weights_are_replaced(tmp_path):
    simulate_ranks(of_quantized_layers, 2, str(tmp_path))
