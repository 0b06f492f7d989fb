"""Files made to mislead, saves that meet, ranks that fail or differ: refused by name, and nothing is changed."""

import json
import os
import pickle
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint, load_safetensors
from flatparam.checkpoint import CheckpointError, saving
from flatparam.checkpoint.files import Part, write_file
from flatparam.checkpoint.index import NAME, read_sealed, write_sealed

pytestmark = pytest.mark.multiprocess


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.ones(2)), 5

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


class NotKept(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(2, 2)


class Two(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        if tied:
            self.b.weight = self.a.weight


def refused(path, module, pattern, **options):
    before = [param.detach().clone() for param in module.parameters()]
    with pytest.raises(CheckpointError, match=pattern):
        checkpoint.load(path, module, **options)
    assert all(map(torch.equal, before, module.parameters()))


def test_boxes_that_overlap(tmp_path):
    for i, row in enumerate((0, 0, 2)):
        part = Part("weight", (3, 2), (row, 0), torch.ones(1, 2))
        write_file(tmp_path, f"{i}.safetensors", [part], lambda count: None)
    refused(tmp_path, nn.Linear(2, 3, bias=False), "`weight` of shape .* has elements twice in the files")


@pytest.mark.parametrize(
    ("place", "value"), [(1, [2, -2]), (2, [1, 0]), (3, [2, 2**62]), (4, 10**6), (5, []), (3, [True, 2]), (0, 7)]
)
def test_a_forged_index(tmp_path, place, value):
    checkpoint.save(tmp_path / "one", nn.Linear(2, 2, bias=False))
    body = read_sealed(tmp_path / "one" / NAME)
    next(iter(body["files"].values()))["tensors"]["weight"][place] = value
    write_sealed(tmp_path / "one" / NAME, body)
    refused(tmp_path / "one", nn.Linear(2, 2, bias=False), re.escape(NAME))


def test_a_file_outside_the_folder(tmp_path):
    checkpoint.save(tmp_path / "one", nn.Linear(2, 2, bias=False))
    body = read_sealed(tmp_path / "one" / NAME)
    [(name, told)] = body["files"].items()
    os.rename(tmp_path / "one" / name, tmp_path / "x.safetensors")
    for outside in ("model/../../x.safetensors", str(tmp_path / "x.safetensors")):
        write_sealed(tmp_path / "one" / NAME, {**body, "files": {outside: told}})
        refused(tmp_path / "one", nn.Linear(2, 2, bias=False), "no name of a file")


@pytest.mark.parametrize("which", ["model", NAME])
def test_a_pipe_in_place_of_a_file(tmp_path, which):
    checkpoint.save(tmp_path / "one", nn.Linear(2, 2))
    path = tmp_path / "one" / which
    path = next(path.iterdir()) if path.is_dir() else path
    path.unlink()
    os.mkfifo(path)
    thread = threading.Thread(target=refused, args=(tmp_path / "one", nn.Linear(2, 2), "expected a file"), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_state_of_modules_is_as_strict_as_parameters(tmp_path):
    checkpoint.save(tmp_path / "kept", Kept())
    checkpoint.save(tmp_path / "not", NotKept())
    refused(tmp_path / "kept", NotKept(), "no module for `_extra_state`")
    refused(tmp_path / "not", Kept(), "missing in the checkpoint: `_extra_state`")
    model = NotKept()
    checkpoint.load(tmp_path / "kept", model, strict=False)
    assert model.weight.tolist() == [1, 1]


def test_tied_names_with_different_values(tmp_path):
    checkpoint.save(tmp_path / "one", Two(False))
    refused(tmp_path / "one", Two(True), "`a.weight` and `b.weight` are one parameter")
    checkpoint.save(tmp_path / "two", Two(True))
    checkpoint.load(tmp_path / "two", Two(True))


def test_an_exported_model_whose_names_begin_with_model(tmp_path):
    model, again = Inner(), Inner()
    checkpoint.save(tmp_path / "one", model)
    checkpoint.export(tmp_path / "one", tmp_path / "one.safetensors")
    checkpoint.load(tmp_path / "one.safetensors", again)
    assert torch.equal(model.model.weight, again.model.weight)


def test_what_is_not_finite(tmp_path):
    model = nn.Module()
    model.wave = nn.Parameter(torch.tensor([1j]))
    model.wide = nn.Parameter(torch.tensor([1e300], dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpoint.save(tmp_path / "good", model)
    checkpoint.load(tmp_path / "good", model, check_finite=True)
    optimizer.state[model.wide]["scale"] = torch.tensor(float("nan"))
    checkpoint.save(tmp_path / "state", model, optimizer)
    checkpoint.load(tmp_path / "state", model, optimizer)
    assert optimizer.state[model.wide]["scale"].isnan()
    with pytest.raises(CheckpointError, match=r"state\.wide\.scale` has values that are not finite"):
        checkpoint.load(tmp_path / "state", model, optimizer, check_finite=True)
    with torch.no_grad():
        model.wave.copy_(torch.tensor([complex(0, float("nan"))]))
    checkpoint.save(tmp_path / "bad", model)
    with pytest.raises(CheckpointError, match="`wave` has values that are not finite"):
        checkpoint.verify(tmp_path / "bad", check_finite=True)


def test_what_appears_at_the_path_during_a_save_stays(tmp_path):
    one = saving._Saving(tmp_path / "one", nn.Linear(2, 2), None, None, None, False, False, False)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="is there already"):
        one.write()
    assert os.listdir(tmp_path) == ["one"]
    assert (tmp_path / "one" / "mine").exists()


def test_two_saves_at_once_to_one_path(tmp_path):
    one = saving._Saving(tmp_path / "one", nn.Linear(2, 2), None, None, None, False, False, False)
    with pytest.raises(CheckpointError, match="another save to it goes on"):
        checkpoint.save(tmp_path / "one", nn.Linear(2, 2))
    one.write()
    checkpoint.save(tmp_path / "one", nn.Linear(2, 2), overwrite=True)
    assert os.listdir(tmp_path) == ["one"]


def test_through_a_link(tmp_path):
    checkpoint.save(tmp_path / "one", nn.Linear(2, 2))
    os.symlink("one", tmp_path / "last")
    checkpoint.save(tmp_path / "last", nn.Linear(2, 2), extra=2, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["last", "one"]
    assert checkpoint.read_extra(tmp_path / "one") == 2


def test_new_parents_are_on_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    checkpoint.save(tmp_path / "a" / "b" / "one", nn.Linear(2, 2))
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)


def test_a_file_that_no_export_can_write_is_refused_before_it_reads(tmp_path):
    checkpoint.save(tmp_path / "one", nn.Linear(2, 2))
    script = tmp_path / "train.py"
    script.write_text("mine")
    for file, why in (
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "no" / "x.safetensors", "there is no such folder"),
        (script, r"expected a name that ends in \.safetensors, got train\.py"),
        (tmp_path / "model.bin", r"expected a name that ends in \.safetensors, got model\.bin"),
    ):
        with pytest.raises(CheckpointError, match=why):
            checkpoint.export(tmp_path / "one", file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "train.py"]
    assert script.read_text() == "mine"


def test_where_nothing_can_be_written_one_process_raises_as_several_do(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint.save: .*file"):
        checkpoint.save(tmp_path / "file" / "one", nn.Linear(2, 2))


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"another": "thing"})])
def test_metadata_of_others_behind_a_pickle(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    refused(tmp_path, nn.Linear(2, 2), r"\.metadata: is not what torch writes: \w+: ", trusted=True)


def test_an_export_that_fails_leaves_nothing(tmp_path):
    checkpoint.save(tmp_path / "one", nn.Linear(2, 2))
    file = next((tmp_path / "one" / "model").iterdir())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.export(tmp_path / "one", tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == ["one"]


def two_groups_of_the_same_ranks(folder):
    other = dist.new_group([0, 1])
    module = FSDP(nn.Linear(4, 4))
    checkpoint.save(folder / "one", module)
    finish = saving._Saving._finish
    saving._Saving._finish = lambda self, seals: (time.sleep(1), finish(self, seals))[1]
    checkpoint.save(folder / "two", module, process_group=other)
    assert (folder / "two" / NAME).exists()


def a_group_without_the_first_rank(folder):
    group = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    if dist.get_rank() == 1:
        module = nn.BatchNorm1d(3)
        checkpoint.save(folder / "one", module, process_group=group)
        checkpoint.load(folder / "one", module, process_group=group)


def a_copy_fails(folder):
    module = FSDP(nn.Linear(4, 4))
    on_host = saving._on_host
    if dist.get_rank() == 1:

        def fail(part):
            raise MemoryError("no host memory")

        saving._on_host = fail
    with pytest.raises(CheckpointError, match="MemoryError: no host memory"):
        checkpoint.async_save(folder / "one", module).wait()
    saving._on_host = on_host
    assert checkpoint.async_save(folder / "one", module).wait().bytes > 80


def a_folder_is_gone(folder):
    module = FSDP(nn.Linear(4, 4))
    os.chdir(folder)
    if dist.get_rank() == 1:
        (folder / "gone").mkdir()
        os.chdir(folder / "gone")
        (folder / "gone").rmdir()
    with pytest.raises(CheckpointError):
        checkpoint.save("one", module)
    with pytest.raises(CheckpointError):
        checkpoint.load("one", module)
    os.chdir(folder)
    checkpoint.save("one", module)


def other_files_on_each_rank(folder):
    module = FSDP(nn.Linear(4, 4, bias=False))
    with pytest.raises(CheckpointError, match="rank 1 has another checkpoint"):
        checkpoint.load(folder / f"{dist.get_rank()}.safetensors", module)


def numbers_that_differ(folder):
    module = FSDP(nn.Linear(4, 4, bias=False), use_orig_params=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    [param] = module.parameters()
    for key, value in (("step", torch.tensor(float(dist.get_rank()))), ("count", dist.get_rank())):
        optimizer.state[param] = {key: value}
        with pytest.raises(CheckpointError, match=f"`{key}` of `weight` differs on rank 0 and rank 1"):
            checkpoint.save(folder / "one", module, optimizer)


@pytest.mark.parametrize(
    "fn",
    [
        two_groups_of_the_same_ranks,
        a_group_without_the_first_rank,
        a_copy_fails,
        a_folder_is_gone,
        numbers_that_differ,
    ],
)
def test_ranks(tmp_path, fn):
    run_ranks(fn, 2, tmp_path, timeout=60)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Module()

    def tie(self, weight):
        self.b.register_parameter("weight", weight)
        return self


def tied_afterwards(folder):
    """What has another name since its unit was made is saved under both, and not as a parameter of its own."""
    model, plain = Tied(), Tied()
    model.a = FSDP(model.a, use_orig_params=True)
    model.tie(next(model.a.parameters()))
    checkpoint.save(folder / "one", model, torch.optim.Adam(model.parameters()))
    checkpoint.load(folder / "one", plain.tie(plain.a.weight))
    with FSDP.summon_full_params(model.a):
        assert torch.equal(plain.b.weight, model.a.module.weight)


def test_a_parameter_that_was_tied_after_wrapping(tmp_path):
    run_ranks(tied_afterwards, 2, tmp_path)


def of_torch(folder):
    """Its shards are no parameters: rank 0's would be taken for all."""
    checkpoint.save(folder / "plain", nn.Linear(5, 5))
    for use_orig_params in (False, True):
        model = torch.distributed.fsdp.FullyShardedDataParallel(
            nn.Linear(5, 5), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        with pytest.raises(CheckpointError, match=r"save: `.*` is wrapped by torch's FullyShardedDataParallel"):
            checkpoint.save(folder / "one", nn.Sequential(model), torch.optim.Adam(model.parameters()))
        with pytest.raises(CheckpointError, match=r"load: `.*` is wrapped by torch's FullyShardedDataParallel"):
            checkpoint.load(folder / "plain", model)
    assert not (folder / "one").exists()


def test_torchs_wrapper_is_refused(tmp_path):
    run_ranks(of_torch, 2, tmp_path)


def test_ranks_with_other_files(tmp_path):
    for rank in range(2):
        module = nn.Linear(4, 4, bias=False)
        nn.init.constant_(module.weight, rank)
        checkpoint.save(tmp_path / f"of{rank}", module)
        checkpoint.export(tmp_path / f"of{rank}", tmp_path / f"{rank}.safetensors")
    run_ranks(other_files_on_each_rank, 2, tmp_path)


def test_a_group_for_each_parameter_takes_linear_time(tmp_path):
    def seconds(count):
        module = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(count)])
        optimizer = torch.optim.SGD([{"params": [param]} for param in module], lr=1.0)
        checkpoint.save(tmp_path / str(count), module, optimizer)
        taken = []
        for _ in range(3):  # the machine may be busy
            begin = time.process_time()
            checkpoint.load(tmp_path / str(count), module, optimizer, check_finite=True)
            taken.append(time.process_time() - begin)
        return min(taken)

    seconds(10)
    few, many = seconds(500), seconds(2000)
    assert many < 10 * few, json.dumps([few, many])


@pytest.mark.parametrize(
    ("model", "came"),
    [(None, "got None"), (nn.Linear, "got the class Linear"), ({"weight": torch.ones(1)}, "got a dict")],
)
def test_what_is_no_model(tmp_path, model, came):
    """Each function that takes a model raises a TypeError that names the expected type and the type of its argument."""
    checkpoint.save(tmp_path / "one", nn.Linear(2, 2))
    files = tmp_path / "one.safetensors"
    checkpoint.export(tmp_path / "one", files)
    for what, call in (
        ("checkpoint.save", lambda: checkpoint.save(tmp_path / "two", model)),
        ("checkpoint.save", lambda: checkpoint.async_save(tmp_path / "two", model)),
        ("checkpoint.load", lambda: checkpoint.load(tmp_path / "one", model)),
        ("load_safetensors", lambda: load_safetensors(model, files)),
    ):
        with pytest.raises(TypeError, match=rf"^{what}: expected the model to be a torch.nn.Module, {came}") as raised:
            call()
        assert what == "load_safetensors" or isinstance(raised.value, CheckpointError)
    assert not (tmp_path / "two").exists()


def over_other_groups(folder):
    """Each rank has the whole model, and the save is over both; or the model is over both, and the save over one."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = FSDP(nn.Linear(4, 4, bias=False), process_group=alone, use_orig_params=True)
    said = r"`weight` of shape \(4, 4\) was written with 32 elements, more than it has: .* pass process_group="
    with pytest.raises(CheckpointError, match=said):
        checkpoint.save(folder / "one", model)
    checkpoint.save(folder / f"of {dist.get_rank()}", model, process_group=alone)
    shared = FSDP(nn.Linear(4, 4, bias=False), use_orig_params=True)
    said = r"`weight` of shape \(4, 4\) was written with 8 elements: not all ranks have it, .* pass process_group="
    with pytest.raises(CheckpointError, match=said):
        checkpoint.save(folder / f"part {dist.get_rank()}", shared, process_group=alone)


def test_a_model_over_other_groups_than_the_save(tmp_path):
    simulate_ranks(over_other_groups, 2, tmp_path)
