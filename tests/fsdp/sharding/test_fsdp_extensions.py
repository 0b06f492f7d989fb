"""Parameters of a tensor subclass that an extension of torch's FSDP takes: as the same module of plain parameters.

Promises:
- parameters of a subclass that an extension takes train and save as plain ones
"""

import copy

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Averaged
from gloo import note, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType, _fsdp_extensions
from torch.distributed.fsdp._shard_utils import _all_gather_dtensor, _create_chunk_dtensor, _create_chunk_sharded_tensor

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

pytestmark = pytest.mark.multiprocess


class Marked(torch.Tensor):
    """A tensor that says which mark it has."""

    mark = None


def marked(tensor, mark):
    made = tensor.as_subclass(Marked)
    made.mark = mark
    return made


class Extension(_fsdp_extensions.FSDPExtensions):
    """Takes Marked tensors, and counts what it is asked."""

    def __init__(self):
        self.made = 0

    def pre_flatten_transform(self, tensor):
        if not isinstance(tensor, Marked):
            return tensor, None
        return tensor.detach().as_subclass(torch.Tensor), "first"

    def post_unflatten_transform(self, tensor, param_extension):
        self.made += 1
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: grad)  # as DTensorExtensions does
        return marked(tensor, param_extension)

    def chunk_tensor(self, tensor, rank, world_size, num_devices_per_node, pg, device=None):
        plain = tensor.as_subclass(torch.Tensor)
        return _create_chunk_sharded_tensor(plain, rank, world_size, num_devices_per_node, pg)

    def chunk_dtensor(self, tensor, rank, device_mesh):
        return _create_chunk_dtensor(tensor.as_subclass(torch.Tensor), rank, device_mesh)

    def pre_load_state_dict_transform(self, tensor):
        return tensor, tensor.local_shards()

    def all_gather_dtensor(self, tensor, parent_mesh):
        return _all_gather_dtensor(tensor, parent_mesh)


class Model(nn.Module):
    """One weight is Marked, under two names; each forward says what it sees."""

    def __init__(self, marks=True):
        super().__init__()
        torch.manual_seed(2)
        weight = torch.randn(5, 3)
        self.first = nn.Linear(3, 5)
        self.first.weight = nn.Parameter(weight.as_subclass(Marked) if marks else weight)
        self.tied = nn.Module()
        self.tied.weight = self.first.weight
        self.seen = []

    def forward(self, x):
        self.seen.append((type(self.first.weight), getattr(self.first.weight, "mark", None)))
        assert self.tied.weight is self.first.weight
        return (torch.tanh(self.first(x)) @ self.tied.weight).as_subclass(torch.Tensor)


def plain(tensor):
    return None if tensor is None else tensor.detach().as_subclass(torch.Tensor)


def batch(step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def check(model, module, gradients=False):
    with FSDP.summon_full_params(model, writeback=False, with_grads=gradients):
        for (name, found), expected in zip(model.named_parameters(), module.parameters(), strict=True):
            assert isinstance(found, Marked) == (name == "first.weight"), name
            assert torch.equal(plain(found), expected), name
            if gradients:
                assert torch.equal(plain(found.grad), expected.grad), name


def train(orig, strategy, with_mesh):
    note(f"{strategy} use_orig_params={orig} mesh={with_mesh}")
    extension = Extension()
    _fsdp_extensions._set_fsdp_extensions(extension)
    where = {"device_mesh": init_device_mesh("cpu", (2,))} if with_mesh else {}
    model = FSDP(Model(), use_orig_params=orig, sharding_strategy=ShardingStrategy[strategy], **where)
    oracle = Averaged(Model(marks=False), 2)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, oracle.module)]
    check(model, oracle.module)
    for step in range(3):
        before = extension.made
        loss = model(batch(step)).square().mean()
        assert extension.made == before + 1
        loss.backward()
        oracle.backward(lambda rank, step=step: [batch(step, rank)])
        assert torch.equal(loss, oracle.module(batch(step)).square().mean())
        check(model, oracle.module, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check(model, oracle.module)
    assert set(model.module.seen) == {(Marked, "first")}
    states(model, optimizers[0], oracle.module)
    check(copy.deepcopy(model), oracle.module)


def states(model, optimizer, module):
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            saved, of_optimizer = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
            assert sorted(saved) == sorted(expected)
            if kind is StateDictType.FULL_STATE_DICT:
                assert type(saved["first.weight"]) is Marked
                assert all(torch.equal(plain(saved[name]), value) for name, value in expected.items())
            before = copy.deepcopy(optimizer.state_dict())
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(3)
                for values in optimizer.state.values():
                    values["momentum_buffer"].zero_()
            model.load_state_dict(saved)
            check(model, module)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, of_optimizer))
            for key, values in before["state"].items():
                found = optimizer.state_dict()["state"][key]["momentum_buffer"]
                assert torch.equal(found, values["momentum_buffer"]), key


def train_each():
    for setting in (
        (True, "FULL_SHARD", False),
        (False, "FULL_SHARD", True),
        (True, "SHARD_GRAD_OP", True),
        (False, "ZERO_1", False),
        (True, "NO_SHARD", False),
    ):
        train(*setting)


def test_marked_parameters_train_and_save_as_plain_ones():
    run_ranks(train_each, 2)


def without():
    for given in (None, Other()):
        _fsdp_extensions._set_fsdp_extensions(given)
        with pytest.raises(ValueError, match=r"`first.weight`.*a Marked, a subclass"):
            FSDP(Model())


class Other(Extension):
    """Takes nothing."""

    def pre_flatten_transform(self, tensor):
        return tensor, None


def test_what_no_extension_takes_is_refused_by_name():
    run_ranks(without, 2)


def broken():
    """An extension that fails: the error is its own, and the model goes on when it does not any more."""
    extension = Extension()
    _fsdp_extensions._set_fsdp_extensions(extension)
    model = FSDP(Model())
    expected = model(batch(0)).square().sum()
    works = extension.post_unflatten_transform
    extension.post_unflatten_transform = fail
    with pytest.raises(KeyError, match="no such mark"):
        model(batch(0))
    extension.post_unflatten_transform = works
    assert torch.equal(model(batch(0)).square().sum(), expected)


def fail(tensor, param_extension):
    raise KeyError("no such mark")


def test_an_extension_that_fails_breaks_one_forward():
    run_ranks(broken, 2)
