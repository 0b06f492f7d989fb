"""A model that is parallelised over a mesh of 2 by 2 ranks, what users see of it, and the module beside it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flatparam import FullyShardedDataParallel as FSDP

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Layer(nn.Module):
    """Two layers that are cut between the ranks of a pair; a norm, and a bias under two names, that are not."""

    def __init__(self, width=6):
        super().__init__()
        self.up = nn.Linear(width, 10)
        self.down = nn.Linear(10, width)
        self.norm = nn.LayerNorm(width)
        self.norm.again = self.norm.bias

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x)))) + self.norm.again


class Net(nn.Module):
    """Layers, and parameters of the root that no plan parallelises."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layers(x))


def net(mesh=None, dtype=torch.float32):
    torch.manual_seed(3)
    made = Net().to(dtype)
    for layer in made.layers if mesh is not None else ():
        parallelize_module(layer, mesh["tensor"], PLAN)
    return made


def new_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def wrap(cls, module, mesh, **arguments):
    strategy = arguments.pop("strategy", None)
    if strategy is not None:
        arguments["sharding_strategy"] = TorchStrategy[strategy]
    policy = ModuleWrapPolicy({Layer})
    return cls(module, device_mesh=mesh["data"], device_id=torch.device("cpu"), auto_wrap_policy=policy, **arguments)


def batch(number, rank, dtype=torch.float32):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + rank)).to(dtype)


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def said(value):
    """What a value is, and its elements here."""
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        return [
            "DTensor",
            str(value.placements),
            mesh.mesh_dim_names,
            tuple(value.shape),
            local(value).detach().clone(),
        ]
    return [tuple(value.shape), value.detach().clone()] if isinstance(value, torch.Tensor) else [value]


def same(ours, theirs, where=""):
    """Fail unless two records are equal, tensors bit for bit."""
    assert type(ours) is type(theirs), (where, ours, theirs)
    if isinstance(ours, dict):
        assert sorted(ours) == sorted(theirs), (where, sorted(ours), sorted(theirs))
        for key in ours:
            same(ours[key], theirs[key], f"{where} {key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), (where, ours, theirs)
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            same(one, other, f"{where}[{i}]")
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, (where, ours, theirs)
        assert torch.equal(ours, theirs), (where, ours, theirs)
    else:
        assert ours == theirs, (where, ours, theirs)


def shown(model):
    return {name: [said(param), said(param.grad)] for name, param in model.named_parameters()}


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


class Mean:
    """The oracle: the module on one rank, whose gradients are the mean over what the rows of the mesh see."""

    def __init__(self, rows, frozen):
        self.module, self.rows = net(dtype=torch.float64), rows
        self.params = dict(self.module.named_parameters(remove_duplicate=False))
        for name in frozen:
            self.params[name].requires_grad_(False)

    def backward(self, number):
        losses = [self.module(batch(number, row, torch.float64)).square().sum() for row in range(self.rows)]
        (sum(losses) / self.rows).backward()
        return losses

    def check(self, model, what, gradients=False):
        """Fail unless ``model`` has its parameters, or gradients, but for the order of additions."""
        with FSDP.summon_full_params(model, writeback=False, with_grads=gradients):
            for name, param in model.named_parameters(remove_duplicate=False):
                expected = self.params[clean(name)]
                if gradients:
                    assert (param.grad is None) == (expected.grad is None), (what, name)
                    param, expected = param.grad, expected.grad
                whole = param.full_tensor() if isinstance(param, DTensor) else param
                if expected is not None:
                    torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-10, msg=f"{what} {name}")


class Cut(nn.Module):
    """A DTensor and a plain parameter; nothing in it is a local function, so it can be pickled."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(4)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(6, 6), mesh, [Shard(0)]))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        whole = DTensor.from_local(x, self.weight.device_mesh, [Replicate()], run_check=False)
        return (whole @ self.weight.t()).redistribute(placements=[Replicate()]).to_local() * self.scale


def passed(model, number=20):
    """The loss and the gradients of a pass."""
    loss = model(batch(number, dist.get_rank() // 2)).square().sum()
    loss.backward()
    return [said(loss), shown(model)]
