"""``elastic.resize`` moves what optimizers keep, and gradients, as a checkpoint does that is saved and loaded.

Promises:
- fused, foreach, stateless, several and 8-bit optimizers, a scheduler, states of whole parameters, and gradients:
  `test_optimizers_move`
- gradients of no_sync are refused by name, and stay; others move: `test_gradients_of_no_sync_are_refused`
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from checkpoints import Odd
from fsdp_models import Blockwise, loss_of
from layer_zero_ranks import group_of
from simulated_ranks import simulate_ranks
from test_resize import built, everything, same

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint, elastic
from flatparam.fsdp.errors import StateError

pytestmark = pytest.mark.multiprocess


def several(params):
    first, *others = params
    return {"first": torch.optim.SGD([first], lr=1e-5, momentum=0.9), "others": torch.optim.AdamW(others, lr=0.001)}


OPTIMIZERS = {
    "fused": lambda params: {"": torch.optim.AdamW(params, lr=0.001, fused=True)},
    "foreach": lambda params: {"": torch.optim.AdamW(params, lr=0.001, foreach=True, amsgrad=True)},
    "without state": lambda params: {"": torch.optim.SGD(params, lr=1e-5)},
    "several": lambda params: several(list(params)),
    "8-bit": lambda params: {"": Blockwise(params, 7, lr=1e-5)},
}
SIZES = (3, 1, 3, 2, 2, 3)


def made(name, size, seed=0):
    """A model on the first ranks with a parameter that no unit manages, its optimizers, and their schedulers."""
    torch.manual_seed(seed)
    module = Odd()
    alone = [module.last.weight, module.turned]
    whole = torch.Tensor.numel if name == "8-bit" else None  # each parameter on one rank
    model = FSDP(module, process_group=group_of(range(size)), use_orig_params=True, ignored_states=alone, atomic=whole)
    optimizers = OPTIMIZERS[name](model.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.75) for one in optimizers.values()]
    return model, optimizers, schedulers, alone


def train(model, optimizers, schedulers, alone, size, step):
    """A step, and a backward after it."""
    losses = []
    for after in (False, True):
        torch.manual_seed(100 * step + 10 * after + dist.get_rank())
        loss = loss_of(model, torch.randn(4, 3))
        loss.backward()
        for param in alone:
            dist.all_reduce(param.grad, group=group_of(range(size)))
        losses.append(loss.item())
        for each in () if after else optimizers.values():
            each.step()
            each.zero_grad()
        for each in () if after else schedulers:
            each.step()
    return losses


def state_of(model, optimizers):
    found = {}
    for label, one in optimizers.items():
        found |= {f"{label} {key}": value for key, value in everything(model, one).items()}
        found |= {f"{label} lr {i}": torch.tensor(group["lr"]) for i, group in enumerate(one.param_groups)}
    grads = {name: param.grad for name, param in model.named_parameters()}
    return found | {f"grad of {name}": grad.clone() for name, grad in grads.items() if grad is not None}


def clear(optimizers):
    for one in optimizers.values():
        one.zero_grad()


def optimizers_move(folder, name):
    rank = dist.get_rank()
    for size in range(1, 4):
        group_of(range(size))
    mine = model, optimizers, schedulers, _ = made(name, 3)
    given = optimizers if name == "several" else optimizers[""]
    for at, (before, after) in enumerate(itertools.pairwise(SIZES)):
        path = folder / f"{name.replace(' ', '-')}-{at}"
        if rank < before:
            train(*mine, before, 10 * at)
            checkpoint.save(path, model, given, process_group=group_of(range(before)))
        told = [each.state_dict() for each in schedulers]
        found = elastic.resize(model, given, range(after), extra=told)
        dist.barrier()
        if rank < after:
            if rank >= before:
                for each, state in zip(schedulers, found.extra, strict=True):
                    each.load_state_dict(state)
            theirs = made(name, after, seed=1)
            checkpoint.load(
                path,
                theirs[0],
                theirs[1] if given is optimizers else theirs[1][""],
                process_group=group_of(range(after)),
            )
            for each, state in zip(theirs[2], found.extra, strict=True):
                each.load_state_dict(state)
            assert any(param.grad is not None for param in model.parameters())
            same(state_of(model, optimizers), state_of(*theirs[:2]))
            for at_rate in (one.param_groups[0] for one in optimizers.values()):
                assert at_rate["lr"] == pytest.approx(at_rate["initial_lr"] * 0.75 ** (2 * at + 1))
            clear(optimizers)
            clear(theirs[1])
            assert train(*mine, after, 10 * at + 5) == train(*theirs, after, 10 * at + 5)
            same(state_of(model, optimizers), state_of(*theirs[:2]))
            clear(optimizers)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_move(tmp_path, name):
    simulate_ranks(optimizers_move, 3, tmp_path, name)


def unreduced(strategy):
    model = built(strategy, True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    torch.manual_seed(dist.get_rank())
    with model.no_sync():
        loss_of(model, torch.randn(4, 3)).backward()
    before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
    why = "come from" if strategy == "FULL_SHARD" else "were added up in"  # NO_SHARD lets an optimizer step them
    with pytest.raises(StateError, match=rf"elastic.resize: gradients of the unit of \w+ {why} no_sync\(\)"):
        elastic.resize(model, optimizer, [0])
    for param, grad in zip(model.parameters(), before, strict=True):
        assert (param.grad is None) == (grad is None)
        assert grad is None or torch.equal(param.grad, grad)
    loss_of(model, torch.randn(4, 3)).backward()
    before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
    elastic.resize(model, optimizer, [0])
    for param, grad in zip(model.parameters(), before, strict=True) if dist.get_rank() == 0 else ():
        assert param.grad is not None
        assert strategy == "FULL_SHARD" or torch.equal(param.grad, grad)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_gradients_of_no_sync_are_refused(strategy):
    simulate_ranks(unreduced, 2, strategy)
