"""A save is complete or invisible; a checkpoint that is damaged or does not fit is refused by name, nothing changes.

Promises:
- ranks killed in a save leave the one before; truncated, flipped and foreign files are named; no pickle runs; errors
  of one rank are raised by all
"""

import json
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from checkpoints import adam, differing, full_state, train, wrapped
from fsdp_models import Model, make
from gloo import ends_of_ranks, meet_again, note, run_ranks
from torch import nn

from flatparam import checkpoint
from flatparam.checkpoint import CheckpointError
from flatparam.checkpoint.values import decode, encode

pytestmark = pytest.mark.multiprocess


def plain(seed=0):
    """One process, no group."""
    model = make(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def values_of(model, optimizer):
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for i, state in optimizer.state_dict()["state"].items():
        found |= {f"{i} {key}": value.clone() for key, value in state.items()}
    return found


def refused(path, pattern, **options):
    """Fail unless loading says that, and changes nothing."""
    model, optimizer = plain(3)
    before = values_of(model, optimizer)
    with pytest.raises(CheckpointError, match=pattern):
        checkpoint.load(path, model, optimizer, **options)
    assert not differing(values_of(model, optimizer), before)


@pytest.fixture
def saved(tmp_path):
    model, optimizer = plain()
    checkpoint.save(tmp_path / "one", model, optimizer)
    return tmp_path / "one"


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and "ranks" not in path.parts)


def test_without_processes(saved):
    model, optimizer = plain(3)
    checkpoint.load(saved, model, optimizer)
    assert not differing(values_of(model, optimizer), values_of(*plain()))


def test_each_file_truncated_missing_foreign_or_flipped_is_named(saved):
    generator = random.Random(0)
    for path in files_of(saved):
        content = path.read_bytes()
        places = {0, 9, len(content) - 2, *(generator.randrange(len(content)) for _ in range(20))}
        flipped = [content[:i] + bytes([content[i] ^ 1 << generator.randrange(8)]) + content[i + 1 :] for i in places]
        for changed in (content[: len(content) // 2], b"", content + b"x", b"\x80" * len(content), *flipped):
            path.write_bytes(changed)
            refused(saved, re.escape(str(path)))
        path.unlink()
        refused(saved, re.escape(str(path)) if path.suffix == ".safetensors" else "is no checkpoint")
        path.write_bytes(content)
    checkpoint.load(saved, *plain(3))


def test_what_is_no_checkpoint_is_said_so(saved, tmp_path):
    refused(tmp_path / "nowhere", "nowhere: there is no such file or folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty")
    (tmp_path / "future").mkdir()
    head, body = (saved / "checkpoint.json").read_bytes().split(b"\n")[:2]
    later = json.dumps({**json.loads(head), "version": 2}).encode()
    (tmp_path / "future" / "checkpoint.json").write_bytes(later + b"\n" + body + b"\n")
    refused(tmp_path / "future", "is of version 2, this flatparam reads 1")


def many():
    return nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(2, 2) for _ in range(6))), "last": nn.Linear(2, 2)})


def test_many_names_that_do_not_fit_are_counted(tmp_path):
    """And a prefix that they have in one place only is named, with a module that fits: it loads."""
    model = many()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoint.save(tmp_path / "many", model)
    checkpoint.save(tmp_path / "within", nn.ModuleDict({"model": model}))
    counted = (
        r"14 names, `layers\.0\.weight` and 11 more that begin with `layers\.`, `last\.weight` and 1 more that begin"
    )
    with pytest.raises(CheckpointError, match=f"missing in the checkpoint: `a`; not in the model: {counted}"):
        checkpoint.load(tmp_path / "many", nn.ParameterDict({"a": torch.ones(1)}))
    other = many()
    way_on = re.escape('begin with `model.`, those of the model do not: load into `nn.ModuleDict({"model": model})`')
    with pytest.raises(CheckpointError, match=f"The names in the files {way_on}$"):
        checkpoint.load(tmp_path / "within", other)
    checkpoint.load(tmp_path / "within", nn.ModuleDict({"model": other}))
    assert all(torch.equal(value, values[name]) for name, value in other.state_dict().items())
    outer = nn.ModuleDict({"model": many()})
    way_on = re.escape('begin with `model.`, those in the files do not: load into `model.get_submodule("model")`')
    with pytest.raises(CheckpointError, match=f"The names of the model {way_on}$"):
        checkpoint.load(tmp_path / "many", outer)
    checkpoint.load(tmp_path / "many", outer.get_submodule("model"))
    assert all(torch.equal(value, values[name]) for name, value in outer["model"].state_dict().items())


def test_names_shapes_and_dtypes_that_do_not_fit(saved, tmp_path):
    class Other(Model):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(2, 2)

    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: `more\.weight`, `more\.bias`"):
        checkpoint.load(saved, Other())
    found = checkpoint.load(saved, Other(), strict=False)
    assert (found.missing, found.unexpected) == (["more.weight", "more.bias"], [])
    with pytest.raises(CheckpointError, match=r"not in the model: `blocks\.2"):
        checkpoint.load(saved, Model(blocks=2))
    with pytest.raises(CheckpointError, match=r"pass strict=False to load the names that both have"):
        checkpoint.load(saved, Model(blocks=2))
    with pytest.raises(CheckpointError, match=r"`first.weight` has shape \(5, 3\), the model's has \(6, 3\)"):
        checkpoint.load(saved, Model(width=6))
    whole = nn.Linear(2, 2)
    whole.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int32), requires_grad=False)
    checkpoint.save(tmp_path / "whole", whole)
    with pytest.raises(CheckpointError, match=r"`weight` has dtype I32, which cannot be loaded into torch.float32"):
        checkpoint.load(tmp_path / "whole", nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "two", model)
    with pytest.raises(CheckpointError, match="has no optimizer state: load it without an optimizer"):
        checkpoint.load(tmp_path / "two", model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_values_that_are_not_finite(tmp_path):
    model, optimizer = plain()
    with torch.no_grad():
        model.last.weight[0, 3] = torch.nan
    checkpoint.save(tmp_path / "one", model, optimizer)
    refused(tmp_path / "one", "`last.weight` has values that are not finite", check_finite=True)
    checkpoint.load(tmp_path / "one", *plain(3))


class Surprise:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_no_pickle_is_executed(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in files_of(saved):
        content = path.read_bytes()
        path.write_bytes(pickle.dumps(Surprise()))
        refused(saved, re.escape(str(path)))
        path.write_bytes(content)
    torch_ones = tmp_path / "torch"
    torch_ones.mkdir()
    (torch_ones / ".metadata").write_bytes(pickle.dumps(Surprise()))
    refused(torch_ones, "trusted=True")
    assert not (tmp_path / "executed").exists()


def test_extra_values_come_back_and_others_are_refused(tmp_path):
    model = nn.Linear(2, 2)
    extra = {
        "rng": torch.get_rng_state(),
        "nested": [1, -2.5, float("inf"), True, None, "text", (1, (2, 3)), {"$tuple": [1], 3: "three"}],
        "big": 2**70,
        "dtype": torch.bfloat16,
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "schedule": torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters()), [2, 5]).state_dict(),
        "tensors": [torch.tensor(3, dtype=torch.int64), torch.zeros(0, 3), torch.tensor([True, False])],
        "bf16": torch.randn(4, 5).to(torch.bfloat16).t(),
    }
    checkpoint.save(tmp_path / "one", model, extra=extra)
    found = checkpoint.load(tmp_path / "one", model).extra
    assert torch.equal(found.pop("rng"), extra.pop("rng"))
    assert torch.equal(found.pop("bf16"), extra.pop("bf16"))
    for a, b in zip(found.pop("tensors"), extra.pop("tensors"), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert found == extra
    assert type(found["schedule"]["milestones"]) is type(extra["schedule"]["milestones"])
    with pytest.raises(CheckpointError, match=r"`extra\.a\[1\]\.b` is a builtins\.set"):
        checkpoint.save(tmp_path / "two", model, extra={"a": [1, {"b": {1}}]})
    assert os.listdir(tmp_path) == ["one"]


def test_values_round_trip():
    for value in (float("-inf"), -(2**60), (), {(1, "a"): None}, {"a.b": {"$int": 1}}):
        assert decode(json.loads(json.dumps(encode(value, "x", {}))), {}) == value
    assert decode(encode(float("nan"), "x", {}), {}) != 0.0
    for wrong in ({"$tensor": "none"}, {"$what": 1}, {"$dict": 3}, {"$int": "x"}):
        with pytest.raises(CheckpointError):
            decode(wrong, {})


def test_what_is_there_is_replaced_only_if_asked_and_if_it_is_a_checkpoint(saved, tmp_path):
    model, optimizer = plain(7)
    with pytest.raises(CheckpointError, match="is there already; pass overwrite=True"):
        checkpoint.save(saved, model, optimizer)
    checkpoint.save(saved, model, optimizer, overwrite=True)
    again = plain(3)
    checkpoint.load(saved, *again)
    assert not differing(values_of(*again), values_of(model, optimizer))
    assert os.listdir(tmp_path) == ["one"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match="is no checkpoint, so it is not overwritten"):
        checkpoint.save(tmp_path / "mine", model, overwrite=True)


# Several ranks


def fails_on_one_rank(folder):
    """Each kind of failure of rank 1 alone is raised by both, and nothing is left or changed."""
    model = wrapped("FULL_SHARD")
    optimizer = adam(model)
    train(model, optimizer, 0, 1)
    rank = dist.get_rank()
    with pytest.raises(CheckpointError, match=r"`extra` is a builtins.object" if rank else "rank 1: `extra` is a"):
        checkpoint.save(folder / "a", model, optimizer, object() if rank else None)
    assert not list(folder.iterdir())
    dist.barrier()
    with pytest.raises(CheckpointError, match="rank 1 saves to"):
        checkpoint.save(folder / f"b{rank}", model, optimizer)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank 1 saves no optimizer|rank 0"):
        checkpoint.save(folder / "b", model, None if rank else optimizer)
    dist.barrier()
    assert not list(folder.iterdir())
    checkpoint.save(folder / "c", model, optimizer)
    if rank == 0:
        shutil.copytree(folder / "c", folder / "other0")
        checkpoint.read_extra(folder / "c")
        index = (folder / "c" / "checkpoint.json").read_bytes()
    before = full_state(model, optimizer)
    train(model, optimizer, 1, 1)
    changed = full_state(model, optimizer)
    if rank == 1:
        shutil.copytree(folder / "c", folder / "d1")
    checkpoint.save(folder / "e", model, optimizer)
    with pytest.raises(CheckpointError, match="rank 1 has another checkpoint than rank 0"):
        checkpoint.load(folder / ("e" if rank else "c"), model, optimizer)
    assert not differing(full_state(model, optimizer), changed)
    dist.barrier()
    if rank == 0:
        damaged = folder / "c" / "model" / "shard-00002-model-00001.safetensors"
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-4] + b"\1\2\3\4")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"shard-00002-model-00001\.safetensors: is damaged"):
        checkpoint.load(folder / "c", model, optimizer)
    assert not differing(full_state(model, optimizer), changed)
    dist.barrier()
    if rank == 0:
        damaged.write_bytes(content)
        assert (folder / "c" / "checkpoint.json").read_bytes() == index
    dist.barrier()
    checkpoint.load(folder / "c", model, optimizer)
    assert not differing(full_state(model, optimizer), before)


def test_what_fails_on_one_rank_is_raised_by_all(tmp_path):
    run_ranks(fails_on_one_rank, 2, tmp_path)


def killed(folder, port, i, rank, delay, overwrite):
    """Save once; save again, and have ``rank`` killed ``delay`` seconds after the second save has begun."""
    meet_again(dist.PrefixStore(str(i), dist.TCPStore("127.0.0.1", port, is_master=False)))
    model = wrapped("FULL_SHARD")
    optimizer = adam(model)
    train(model, optimizer, 0, 1)
    name = "last" if overwrite else "next"
    if not (folder / "last").exists():
        checkpoint.save(folder / "last", model, optimizer, 1)
    dist.barrier()
    train(model, optimizer, 1, 1)
    if dist.get_rank() == rank:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begin = time.monotonic()
    error = None
    try:
        while error is None and time.monotonic() - begin < 20:
            checkpoint.save(folder / name, model, optimizer, 2, overwrite=True)
            note("saved again")
    except Exception as caught:
        error = caught
    time.sleep(1 if dist.get_rank() == rank else 0)
    os._exit(7)


def check_killed(folder, times, seed):
    generator = random.Random(seed)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for i in range(times):
        overwrite = i % 2 == 0
        rank, delay = generator.randrange(2), generator.uniform(0, 0.15)
        ends = ends_of_ranks(killed, 2, folder, store.port, i, rank, delay, overwrite)
        assert ends[rank][0] == -signal.SIGKILL, (ends, rank, delay)
        assert ends[1 - rank][0] == 7, (ends, rank, delay)
        for path in pathlib.Path(folder).iterdir():
            if not path.name.startswith("."):
                extra = run_loaded(path)
                assert extra in ((1, 2) if path.name == "last" else (2,))


def run_loaded(path):
    from checkpoints import Odd

    model = Odd()
    return checkpoint.load(path, model, torch.optim.AdamW(model.parameters())).extra


def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(tmp_path):
    check_killed(tmp_path, 3, 1)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_ranks_killed_at_fifty_points_of_a_save_leave_the_checkpoint_before(tmp_path):
    check_killed(tmp_path, 50, 2)
