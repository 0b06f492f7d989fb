"""Training that is saved, loaded and goes on equals training that was not interrupted, bit for bit.

Promises:
- resumed equals uninterrupted: dropout, scheduler, scaler, data position, batch norm of each rank; in the background:
  `test_resumed_equals_uninterrupted`
- LayerZero's handles; groups and frozen parameters; gradients that are not reduced are refused
"""

import pytest
import torch
import torch.distributed as dist
from checkpoints import STRATEGIES, adam, differing, full_state, train, wrapped
from fsdp_models import Model, data, loss_of, make
from gloo import note, run_ranks
from layer_zero_driver import drive, losses

from flatparam import checkpoint
from flatparam.fsdp.errors import StateError

pytestmark = pytest.mark.multiprocess


class Noisy(Model):
    """With dropout, and a statistic of its own on each rank."""

    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.3)
        self.norm = torch.nn.BatchNorm1d(1)

    def forward(self, x):
        return self.norm(self.drop(super().forward(x)))


def program(model, optimizer, schedule, scaler, position, steps):
    """``position`` is where in the data this rank is."""
    for _ in range(steps):
        loss = loss_of(model, data(position["step"]))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        position["step"] += 1 + dist.get_rank()


def made(strategy, seed):
    model = wrapped(strategy, cls=Noisy, seed=seed)
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
    return model, optimizer, schedule, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


def everything(model, optimizer, schedule, scaler):
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    rest = (schedule.state_dict(), scaler.state_dict(), optimizer.param_groups[0]["lr"], torch.get_rng_state().tolist())
    return full_state(model, optimizer) | {f"own {k}": b for k, b in buffers.items()}, rest


def resumed(folder, strategies, asynchronous):
    for strategy in strategies:
        note(strategy)
        position = {"step": 3 * dist.get_rank()}
        first = made(strategy, 0)
        torch.manual_seed(dist.get_rank())
        program(*first, position, 5)
        extra = {
            "position": dict(position),
            "rng": torch.get_rng_state(),
            "schedule": first[2].state_dict(),
            "scaler": first[3].state_dict(),
        }
        if asynchronous:
            pending = checkpoint.async_save(folder / strategy, *first[:2], extra)
        else:
            checkpoint.save(folder / strategy, *first[:2], extra)
        program(*first, position, 5)
        wanted, rest = everything(*first)
        if asynchronous:
            summary = pending.wait()
            assert pending.done
            assert summary.bytes > summary.own_bytes > 0

        second = made(strategy, 1)
        program(*second, {"step": 0}, 1)
        found = checkpoint.load(folder / strategy, *second[:2]).extra
        second[2].load_state_dict(found["schedule"])
        second[3].load_state_dict(found["scaler"])
        torch.set_rng_state(found["rng"])
        position = dict(found["position"])
        program(*second, position, 5)
        got, got_rest = everything(*second)
        assert not differing(got, wanted), (strategy, differing(got, wanted))
        assert got_rest == rest, strategy


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resumed_equals_uninterrupted(tmp_path, asynchronous):
    strategies = STRATEGIES if not asynchronous else ("FULL_SHARD", "LAYER_ZERO")
    run_ranks(resumed, 2, tmp_path, strategies, asynchronous)


def between_micro_batches(folder):
    """What the ranks have added up and not reduced is refused, not forgotten."""
    for strategy in ("LAYER_ZERO", "LAYER_ZERO_NESTED", "FULL_SHARD"):
        model = wrapped(strategy, cls=Model)
        with model.no_sync():
            loss_of(model, data(0)).backward()
        with pytest.raises(StateError, match=r"checkpoint\.save: gradients of .* are not reduced"):
            checkpoint.save(folder / strategy, model)
        model.zero_grad()
        checkpoint.save(folder / strategy, model)


def test_gradients_that_are_not_reduced_are_refused(tmp_path):
    run_ranks(between_micro_batches, 2, tmp_path)


def by_hand(folder):
    """LayerZero's own handles save and load, and their checkpoint fits the wrapper."""
    world = dist.get_world_size()
    module = make()
    driver = drive(module, min(2, world))
    optimizer = adam(module)
    for step in range(2):
        driver.backward(losses(module, step, 2))
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(folder / f"by hand {world}", module, optimizer)
    for step in range(2, 4):
        driver.backward(losses(module, step, 2))
        optimizer.step()
        optimizer.zero_grad()
    wanted = [param.detach().clone() for param in module.parameters()]
    again = make(5)
    other = drive(again, 1)
    other.backward(losses(again, 9, 1))
    second = adam(again)
    second.zero_grad()
    checkpoint.load(folder / f"by hand {world}", again, second)
    for step in range(2, 4):
        other.backward(losses(again, step, 2))
        second.step()
        second.zero_grad()
    for a, b in zip(again.parameters(), wanted, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-6, atol=1e-7)
    model = wrapped("FULL_SHARD", cls=Model, seed=4)
    third = adam(model)
    checkpoint.load(folder / f"by hand {world}", model, third)
    checkpoint.save(folder / "wrapped", model, third)
    plain = make(8)
    fourth = adam(plain)
    checkpoint.load(folder / "wrapped", plain, fourth)
    assert all(state["step"] == 2 for state in fourth.state.values())
    assert len(fourth.state) == len(list(plain.parameters()))
    for one in (module, again, plain):
        count_by_hooks(one)
    module.count += 7
    checkpoint.save(folder / f"hooked {world}", module)
    checkpoint.load(folder / f"hooked {world}", again)  # cut for another number of ranks
    checkpoint.save(folder / "again", again)
    checkpoint.load(folder / f"hooked {world}", plain)
    first = {name: param.clone() for name, param in plain.state_dict().items()}
    checkpoint.load(folder / "again", plain)
    assert not differing(plain.state_dict(), first)
    assert plain.count == again.count == 7


def count_by_hooks(module):
    """A tensor that is no buffer goes into state dicts and comes from them."""
    module.count = torch.zeros(())
    module.register_state_dict_post_hook(lambda self, state, prefix, _: state.update({prefix + "count": self.count}))
    module.register_load_state_dict_pre_hook(
        lambda self, state, prefix, *_: setattr(self, "count", state.pop(prefix + "count"))
    )


def test_handles_of_layer_zero(tmp_path):
    run_ranks(by_hand, 2, tmp_path)


def trained_alike(folder):
    """Two groups with settings of their own; frozen parameters; parameters without state."""
    model = wrapped("FULL_SHARD", cls=Model)
    params = list(model.parameters())
    params[0].requires_grad_(False)
    groups = [{"params": params[:3], "lr": 0.5, "betas": (0.1, 0.2)}, {"params": params[3:]}]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    train(model, optimizer, 0, 1)
    checkpoint.save(folder / "one", model, optimizer)
    other = wrapped("ZERO_1", cls=Model, seed=3, units=False)
    params = list(other.parameters())
    params[0].requires_grad_(False)
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    second = torch.optim.Adam(groups, lr=7.0)
    checkpoint.load(folder / "one", other, second)
    assert [(g["lr"], g["betas"]) for g in second.param_groups] == [(0.5, (0.1, 0.2)), (0.01, (0.9, 0.999))]
    assert not differing(full_state(other, second), full_state(model, optimizer))
    assert params[0] not in second.state
    train(model, optimizer, 1, 2)
    train(other, second, 1, 2)
    assert not differing(full_state(other, second), full_state(model, optimizer))


def test_groups_and_frozen_parameters(tmp_path):
    run_ranks(trained_alike, 2, tmp_path)
