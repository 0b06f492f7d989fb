"""``flatparam.reset_state()`` leaves blocks whose end has not run. The oracle is the same training without them."""

import contextlib
import gc
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import handle_of, note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import flatparam

pytestmark = pytest.mark.multiprocess
CPU = torch.device("cpu")


def start(strategy, uo, offload=False):
    settings = {"sharding_strategy": ShardingStrategy[strategy], "cpu_offload": CPUOffload(offload)}
    model = wrap_blocks(make(), FSDP, use_orig_params=uo, device_id=CPU, **settings)
    loss_of(model, data(0)).backward()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def go_on(model, optimizer):
    found = []
    for step in range(3):
        with model.no_sync():
            loss_of(model, data(2 * step + 1)).backward()
        loss = loss_of(model, data(2 * step + 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    with FSDP.summon_full_params(model):
        return [*found, *(param.detach().clone() for param in model.parameters())]


def summoned(model, uo, **settings):
    block = FSDP.summon_full_params(model, **settings)
    block.__enter__()
    shows_all = dist.get_rank() == 0 or not settings.get("rank0_only")
    if shows_all and model.sharding_strategy is not ShardingStrategy.NO_SHARD:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
    return block


def raising_forward(model, uo):
    def fail(*_):
        raise KeyError("hook")

    hook = model.module.last.register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(data(3))
    hook.remove()


def no_sync(model, uo):
    block = model.no_sync()
    block.__enter__()
    return block


def half_a_state_dict(model, uo):
    def fail(*_):
        raise KeyError("hook")

    hooks = [block.register_state_dict_post_hook(fail) for block in model.module.blocks]
    with pytest.raises(KeyError):
        model.state_dict()
    for hook in hooks:
        hook.remove()


LOST = {
    "no_sync": no_sync,
    "summon": summoned,
    "with_grads": lambda model, uo: summoned(model, uo, with_grads=uo),
    "rank0_only": lambda model, uo: summoned(model, uo, writeback=False, rank0_only=True),
    "on_the_cpu": lambda model, uo: summoned(model, uo, writeback=False, rank0_only=True, offload_to_cpu=True),
    "forward": raising_forward,
    "state_dict": half_a_state_dict,
    "nothing": lambda model, uo: None,
}


def lost_ends(strategy, uo, offload):
    warnings.simplefilter("ignore")
    with handle_of("flatparam"):
        expected = go_on(*start(strategy, uo, offload))
        for name, lose in LOST.items():
            if name == "on_the_cpu" and strategy == "NO_SHARD":
                continue
            note(f"{name} {strategy} uo={uo} offload={offload}")
            model, optimizer = start(strategy, uo, offload)
            before = [param.grad for param in model.parameters()]
            kept = lose(model, uo)
            flatparam.reset_state(model)
            flatparam.reset_state(model)
            after = [param.grad for param in model.parameters()]
            assert [grad is None for grad in before] == [grad is None for grad in after]
            found = go_on(model, optimizer)
            for number, (one, other) in enumerate(zip(expected, found, strict=True)):
                assert torch.equal(one, other), (name, number)
            if name in ("summon", "with_grads") and strategy != "NO_SHARD":
                said = r"reset_state\(\) has ended it|Expects tensor to be unsharded"
                with pytest.raises((RuntimeError, AssertionError), match=said):
                    kept.__exit__(None, None, None)
                again = [param.detach().clone() for param in model.parameters()]
                del kept
                gc.collect()
                assert all(torch.equal(*both) for both in zip(again, model.parameters(), strict=True))
                dist.barrier()


def a_forward_inside_of_a_summon(uo):
    """torch's handle writes a piece of its shard into the shard at the end, silently."""
    warnings.simplefilter("ignore")
    with handle_of("flatparam"):
        model, optimizer = start("FULL_SHARD", uo)
        expected = go_on(*start("FULL_SHARD", uo))
        block = FSDP.summon_full_params(model)
        block.__enter__()
        with contextlib.suppress(AssertionError):
            model(data(3))
        said = "a forward inside of it has resharded them|Expects tensor to be unsharded"
        with pytest.raises((RuntimeError, AssertionError), match=said):
            block.__exit__(None, None, None)
        flatparam.reset_state(model)
        assert all(torch.equal(*both) for both in zip(expected, go_on(model, optimizer), strict=True))


@pytest.mark.parametrize("uo", [True, False])
def test_a_forward_inside_of_a_summon_writes_nothing_wrong_back(uo):
    simulate_ranks(a_forward_inside_of_a_summon, 2, uo)


WAYS = list(itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (True, False)))


@pytest.mark.parametrize(("strategy", "uo"), WAYS)
def test_blocks_whose_end_is_lost_can_be_left(strategy, uo):
    simulate_ranks(lost_ends, 2, strategy, uo, False)


def test_blocks_of_offloaded_parameters_can_be_left():
    simulate_ranks(lost_ends, 2, "FULL_SHARD", True, True)


def test_what_has_no_handle_of_ours_is_refused():
    with pytest.raises(TypeError, match="expected a model of torch's FullyShardedDataParallel"):
        flatparam.reset_state(nn.Linear(2, 2))
