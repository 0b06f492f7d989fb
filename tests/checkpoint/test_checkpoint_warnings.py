"""Saves and loads that would go wrong in silence warn, or do not go wrong."""

import datetime
import time
import warnings

import forked_scripts
import pytest
import torch
import torch.distributed as dist
from gloo import fake_world, run_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint
from flatparam.checkpoint import CheckpointError, saving

pytestmark = pytest.mark.multiprocess


def failing(folder):
    """Rank 1 cannot write, and nobody waits; rank 0 alone does."""
    module, write = FSDP(nn.Linear(4, 4)), saving.write_file

    def fail(*arguments):
        raise OSError("no room")

    for waits in (False, True):
        if dist.get_rank() == 1:
            saving.write_file = fail
        pending = checkpoint.async_save(folder / "one", module)
        pending._thread.join()
        saving.write_file = write
        if waits and dist.get_rank() == 0:
            with pytest.raises(CheckpointError, match="no room"):
                pending.wait()
        with pytest.raises(CheckpointError, match=r"the save to .*one in the background has failed: .*no room"):
            checkpoint.save(folder / "two", module)
        checkpoint.save(folder / f"three {waits}", module)
    assert not (folder / "one").exists()
    assert not (folder / "two").exists()


def test_a_failed_save_that_nobody_has_waited_for(tmp_path):
    run_ranks(failing, 2, tmp_path)


PROGRAM = """
import sys
import torch
from flatparam import checkpoint
from flatparam.checkpoint import saving

def fail(*arguments):
    raise OSError("no room")

saving.write_file = fail
pending = checkpoint.async_save(sys.argv[1], torch.nn.Linear(2, 2))
try:
    if sys.argv[2] == "True":
        pending.wait()
except checkpoint.CheckpointError as error:
    print(error)
"""


def test_at_the_end_of_the_program(tmp_path):
    programs = [(PROGRAM, [str(tmp_path / "one"), str(waits)]) for waits in (False, True)]
    for waits, end in zip((False, True), forked_scripts.run(programs, tmp_path), strict=True):
        assert end.status == 0, end.err
        told = end.err.count(f"the save to {tmp_path / 'one'} in the background has failed")
        assert told == (not waits), (waits, end.err)
        assert ("no room" in end.out) == waits, waits


def slow(folder):
    """Longer than the store waits; and the store is as it was afterwards."""
    module, write = FSDP(nn.Linear(4, 4)), saving.write_file
    checkpoint.save(folder / "zero", module)
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for number in range(3):
        checkpoint.save(folder / f"zero {number}", module)
        checkpoint.load(folder / f"zero {number}", module)
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    assert len(set(counts)) == 1, counts
    store.set_timeout(datetime.timedelta(seconds=2))
    if dist.get_rank() == 1:
        saving.write_file = lambda *arguments: (time.sleep(3), write(*arguments))[1]
    checkpoint.save(folder / "one", module)
    saving.write_file = write
    checkpoint.load(folder / "one", module)


def test_a_save_that_takes_longer_than_the_stores_time_out(tmp_path):
    run_ranks(slow, 2, tmp_path)


def test_rounding_is_told_once(tmp_path):
    wide, narrow = nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()
    before = narrow.weight.detach().float()
    checkpoint.save(tmp_path / "wide", wide)
    checkpoint.save(tmp_path / "narrow", narrow)
    with pytest.warns(UserWarning, match=r"2 tensors were rounded .* `weight` is torch.float32 there") as told:
        checkpoint.load(tmp_path / "wide", narrow)
    assert len(told) == 1
    assert torch.equal(narrow.weight, wide.weight.bfloat16())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(tmp_path / "narrow", wide)
    assert torch.equal(before, wide.weight)


def test_a_learning_rate_stays_on_its_device(tmp_path):
    module = nn.Linear(3, 3)
    checkpoint.save(tmp_path / "one", module, torch.optim.SGD(module.parameters(), lr=torch.tensor(0.25)))
    optimizer = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.5))
    checkpoint.load(tmp_path / "one", module, optimizer)
    assert optimizer.param_groups[0]["lr"].item() == 0.25
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5, device="meta")  # as an accelerator
    checkpoint.load(tmp_path / "one", module, optimizer)
    assert optimizer.param_groups[0]["lr"].is_meta


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.later, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x, all_of_it):
        x = self.used(x)
        return self.frozen(self.later(x) if all_of_it else x)


@pytest.mark.parametrize("kind", ["plain", "flat", "orig"])
def test_a_parameter_without_state_beside_others_that_have_some_is_named(tmp_path, kind):
    """As the state dicts of the wrapper do; not of a whole state, of frozen ones, and of a state that begins anew."""

    def made():
        model = Parts()
        if kind != "plain":
            orig = kind == "orig"
            model.later = FSDP(model.later, use_orig_params=orig)
            model.frozen = FSDP(model.frozen, use_orig_params=orig)
            model = FSDP(model, use_orig_params=orig)
        return model, torch.optim.Adam(model.parameters())

    with fake_world():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one rank shards nothing
            model, optimizer = made()
        for all_of_it in (False, True):
            model(torch.ones(2, 2), all_of_it).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.save(tmp_path / str(all_of_it), model, optimizer)
        checkpoint.save(tmp_path / "new", model, torch.optim.Adam(model.parameters()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint.load(tmp_path / "True", model, optimizer)
            checkpoint.load(tmp_path / "new", model, optimizer)
            checkpoint.load(tmp_path / "False", model, torch.optim.SGD(model.parameters(), lr=0.1), convert={})
        message = "has nothing for `later.weight`, `later.bias`, and has `used.weight` of the same parameter group"
        with pytest.warns(UserWarning, match=message) as told:
            checkpoint.load(tmp_path / "False", model, optimizer)
        assert [one.filename for one in told] == [__file__]


@pytest.mark.parametrize("uo", [False, True, None])
def test_a_parameter_without_elements_has_no_state_and_no_warning(tmp_path, uo):
    """``uo``: of the wrapper; None: without one."""
    with fake_world(1), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        module = nn.Linear(3, 2)
        module.none = nn.Parameter(torch.zeros(0, 4))
        model = module if uo is None else FSDP(module, use_orig_params=uo)
        optimizer = torch.optim.AdamW(model.parameters())
        (model(torch.ones(2, 3)).sum() + module.none.sum()).backward()
        optimizer.step()
        checkpoint.save(tmp_path / "one", model, optimizer)
        checkpoint.load(tmp_path / "one", model, optimizer)
        if uo is not None:
            state = FSDP.full_optim_state_dict(model, optimizer)
            state["state"].pop("none", None)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
