"""Loading safetensors files into shards. The oracle: the safetensors library's own files, and the unsharded module.

Promises:
- a checkpoint's bytes go straight into shards, each rank reads its own; bad files and other files change nothing on
  any rank
"""

import gc
import itertools
import json
import math
import os
import struct
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Block, Model, assert_same, data, full_params, loss_of, make, wrap_blocks
from gloo import fake_world, note, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import flatparam
from flatparam import FileError, ShardingStrategy, defer_init, load_safetensors
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.states.safetensors_files import Files


def on_meta(cls=Model, **arguments):
    with torch.device("meta"):
        return cls(**arguments)


def save(module, path, dtype=None, more=(), less=()):
    """Write a module's state as the library does; tied tensors once, under their first name."""
    seen, state = set(), {}
    for name, value in module.state_dict().items():
        if value.data_ptr() not in seen and name not in less:
            seen.add(value.data_ptr())
            cast = dtype is not None and value.is_floating_point()
            state[name] = value.contiguous().to(dtype) if cast else value.contiguous()
    state.update(more)
    save_file(state, path)


class Tied(nn.Module):
    """Tied weights, channels_last and transposed ones, buffers that are kept and not, a 0-dim parameter."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.image = nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(6, 11)
        self.head.weight = self.table.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("counts", torch.arange(4))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("passing", torch.ones(2), persistent=False)


def loading(folder, strategy, uo, meta):
    """Every strategy, layout, dtype and way of wrapping: values equal the file's; bad files change nothing."""
    rank, folder = dist.get_rank(), Path(folder)
    note(f"{strategy} uo={uo} meta={meta}")
    shared = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
    for atomic in (None, "row", torch.Tensor.numel) if strategy == "FULL_SHARD" else (None,):
        init = {"param_init_fn": defer_init} if meta else {}
        module = on_meta() if meta else make(seed=1)
        model = wrap_blocks(module, atomic=atomic, **init, **shared)
        if meta:
            assert all(value.isnan().all() for value in full_params(model).values())
        result = load_safetensors(model, folder / "model.safetensors")
        assert result == ([], [])
        assert_same(model, make(seed=7))
        loss_of(model, data(0)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.load_state_dict(make(seed=3).state_dict())
        load_safetensors(model, folder / "model.safetensors")
        with torch.no_grad():
            loss_of(model, data(0))  # SHARD_GRAD_OP's views are not taken for parameters
        load_safetensors(model, folder)
        assert torch.equal(loss_of(model, data(0)), loss_of(make(seed=7), data(0)))

    torch.manual_seed(4)
    wanted, model = Tied(), FSDP(Tied(), **shared)
    load_safetensors(model, folder / "tied.safetensors")
    assert_same(model, wanted)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in wanted.state_dict().items())
    assert model.module.table.weight is model.module.head.weight

    model = wrap_blocks(make(), **shared)  # another dtype in the file, and several files
    load_safetensors(model, folder / "bf16.safetensors")
    half = make(seed=7)
    for param in half.parameters():
        param.data = param.data.bfloat16().float()
    assert_same(model, half)
    for files in (folder / "several", [folder / "several" / f"{i}.safetensors" for i in range(3)]):
        model = wrap_blocks(on_meta(), param_init_fn=defer_init, **shared)
        load_safetensors(model, files)
        assert_same(model, make(seed=7))

    if meta:
        return
    fresh = wrap_blocks(on_meta(), param_init_fn=defer_init, **shared)
    for target, before in ((model, make(seed=7)), (fresh, None)):
        for file, message in (
            ("missing", r'Missing.*"blocks.1.scale"; Unexpected.*"blocks.1.scales"'),
            ("shape", r"`last.weight` has shape \(1, 6\), the model's has \(1, 5\)"),
            ("kind", r"`first.bias` has dtype I64, which cannot be loaded into torch.float32"),
            ("cut", r"cut.safetensors: expected \d+ bytes, it has \d+"),
            ("nowhere", "FileNotFoundError"),
        ):
            with pytest.raises(RuntimeError, match=rf"nothing was loaded: rank 0: .*{message}"):
                load_safetensors(target, folder / f"{file}.safetensors")
        mine = "model" if rank == 0 else "bf16"
        with pytest.raises(RuntimeError, match="rank 1: its values are not those of rank 0: their headers"):
            load_safetensors(target, folder / f"{mine}.safetensors")
        mine = "model" if rank == 0 else "cut"
        with pytest.raises(RuntimeError, match="rank 1: FileError"):
            load_safetensors(target, folder / f"{mine}.safetensors")
        with FSDP.summon_full_params(target), pytest.raises(RuntimeError, match="IDLE"):
            load_safetensors(target, folder / "model.safetensors")
        if before is None:
            assert all(value.isnan().all() for value in full_params(target).values())
        else:
            assert_same(target, before)
    result = load_safetensors(fresh, folder / "missing.safetensors", strict=False)
    assert result == (["blocks.1.scale"], ["blocks.1.scales"])
    assert [name for name, value in full_params(fresh).items() if value.isnan().any()] == ["blocks.1.scale"]
    load_safetensors(fresh, folder / "model.safetensors")
    assert_same(fresh, make(seed=7))


class Rotary(nn.Module):
    """A buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("angles", torch.ones(4), persistent=False)
        self.register_buffer("mean", torch.ones(4))


def meta(folder):
    """What is no parameter, ties, and several names of a module."""
    with pytest.raises(ValueError, match="`angles` of Rotary"):
        FSDP(on_meta(Rotary), param_init_fn=defer_init)

    def init(module):
        module.angles = torch.full((4,), 2.0)
        defer_init(module)

    model = FSDP(on_meta(Rotary), param_init_fn=init, sync_module_states=True)
    assert model.mean.isnan().all()
    save_file(
        {"weight": torch.full((4,), 3.0), "mean": torch.full((4,), 5.0)}, f"{folder}/{dist.get_rank()}.safetensors"
    )
    load_safetensors(model, f"{folder}/{dist.get_rank()}.safetensors")
    assert full_params(model)["weight"].tolist() == [3.0] * 4
    assert (model.mean.tolist(), model.angles.tolist()) == ([5.0] * 4, [2.0] * 4)

    tied = on_meta(Tied)
    tied.passing = torch.ones(2)
    model = FSDP(tied, param_init_fn=defer_init, use_orig_params=True)
    assert tied.table.weight is tied.head.weight
    load_safetensors(model, f"{folder}/tied.safetensors")
    torch.manual_seed(4)
    assert_same(model, Tied())

    twice = make(seed=1)  # one unit under two names; the file has one of them, both, or both with other values
    twice.again = twice.blocks[1]
    model = FSDP(twice, auto_wrap_policy=ModuleWrapPolicy({Block}))
    load_safetensors(model, f"{folder}/model.safetensors")
    plain = make(seed=7)
    same = {f"again.{name}": value.clone() for name, value in plain.blocks[1].state_dict().items()}
    if dist.get_rank() == 0:
        save(plain, f"{folder}/both.safetensors", more=same)
        save(plain, f"{folder}/apart.safetensors", more={**same, "again.scale": torch.zeros(5)})
    dist.barrier()
    load_safetensors(model, f"{folder}/both.safetensors")
    with pytest.raises(RuntimeError, match=r"`blocks.1.scale` and `again.scale` are one parameter"):
        load_safetensors(model, f"{folder}/apart.safetensors")

    ignored = make(seed=1)
    model = wrap_blocks(ignored, ignored_states=[ignored.last])
    load_safetensors(nn.Sequential(model), f"{folder}/inner.safetensors")
    assert_same(model, make(seed=7))


@pytest.fixture
def files(tmp_path):
    """The folder of a module's files, good and bad ones."""
    module = make(seed=7)
    save(module, tmp_path / "model.safetensors")
    save(module, tmp_path / "bf16.safetensors", torch.bfloat16)
    torch.manual_seed(4)
    save(Tied(), tmp_path / "tied.safetensors")
    scale = {"blocks.1.scales": module.blocks[1].scale.detach()}
    save(module, tmp_path / "missing.safetensors", less=["blocks.1.scale"], more=scale)
    save(module, tmp_path / "shape.safetensors", more={"last.weight": torch.ones(1, 6)})
    save(module, tmp_path / "kind.safetensors", more={"first.bias": torch.ones(5, dtype=torch.int64)})
    save(nn.Sequential(module), tmp_path / "inner.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-1])
    (tmp_path / "several").mkdir()
    names = list(module.state_dict())
    for i in range(3):
        state = {name: module.state_dict()[name] for name in names[i::3]}
        save_file(state, tmp_path / "several" / f"{i}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{i % 3}.safetensors" for i, name in enumerate(names)}}
    (tmp_path / "several" / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(tmp_path)


@pytest.mark.multiprocess
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("uo", "meta", "strategy"),
    list(itertools.product((False, True), (False, True), ("FULL_SHARD", "ZERO_1", "NO_SHARD"))),
)
def test_values_are_those_of_the_files(files, strategy, uo, meta):
    run_ranks(loading, 2, files, strategy, uo, meta)


@pytest.mark.multiprocess
def test_ties_buffers_and_several_names_in_files(files):
    run_ranks(meta, 2, files)


def in_a_grid(folder):
    """Whichever rank of a grid fails, all four are told, though no group has all of them; blocks stay whole."""
    mesh = init_device_mesh("cpu", (2, 2))
    shared = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD, "param_init_fn": defer_init}
    model = wrap_blocks(on_meta(), use_orig_params=True, atomic=torch.Tensor.numel, **shared)
    for failing in range(4):
        for name, message in (("absent", "FileNotFoundError"), ("bf16", "their headers differ")):
            mine = name if dist.get_rank() == failing else "model"
            with pytest.raises(RuntimeError, match=rf"nothing was loaded: rank \d: .*{message}"):
                load_safetensors(model, f"{folder}/{mine}.safetensors")
    assert all(value.isnan().all() for value in full_params(model).values())
    load_safetensors(model, f"{folder}/model.safetensors")
    assert_same(model, make(seed=7))


@pytest.mark.multiprocess
def test_all_ranks_of_a_grid_load_or_none(tmp_path):
    save(make(seed=7), tmp_path / "model.safetensors")
    save(make(seed=7), tmp_path / "bf16.safetensors", torch.bfloat16)
    run_ranks(in_a_grid, 4, str(tmp_path))


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_read():
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(8)))


def big(folder, dtype):
    """What a rank reads, and its memory while it does so: shards of 32 MiB, whole weights of 64 MiB."""
    model = FSDP(on_meta(Wide), param_init_fn=defer_init)
    [shard] = model.params
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before, base = bytes_read(), resident()
    load_safetensors(model, f"{folder}/model.safetensors")
    read = bytes_read() - before
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    stored = shard.numel() * getattr(torch, dtype).itemsize
    assert stored <= read <= stored + 2**16, (read, stored)
    assert peak - base <= 16 * 2**20, ((peak - base) / 2**20, stored)
    return shard.sum().item()


@pytest.mark.multiprocess
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_reads_its_own_bytes_into_its_shard(tmp_path, dtype):
    torch.manual_seed(2)
    module = Wide().to(getattr(torch, dtype))
    save(module, tmp_path / "model.safetensors")
    sums = run_ranks(big, 2, str(tmp_path), dtype)
    halves = torch.cat([param.detach().float().flatten() for param in module.parameters()]).chunk(2)
    assert sums == pytest.approx([half.sum().item() for half in halves], abs=0.5)


def file_of(header, payload=b"\0" * 12, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + payload


GOOD = {"weight": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}


def changed(**told):
    return {"weight": {**GOOD["weight"], **told}}


HOSTILE = {
    "empty": (b"", "a header of 0 bytes in a file of 0"),
    "seven bytes": (b"\0" * 7, "a file of 7"),
    "a header past the end": (file_of(GOOD, length=10**9), "a header of 1000000000 bytes"),
    "a length of 64 bits": (file_of(GOOD, length=2**64 - 1), "a header of 18446744073709551615 bytes"),
    "no JSON": (file_of(b"{'weight'"), "expected JSON"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "expected JSON"),
    "deep": (file_of(b"[" * 200000), "expected JSON"),
    "a list": (file_of(b"[]"), "expected a JSON object, got list"),
    "twice": (file_of(b'{"weight": 1, "weight": 2}'), "`weight` is in it twice"),
    "no entry": (file_of({"weight": 3}), "`weight` has 3 where"),
    "no shape": (file_of({"weight": {"dtype": "F32", "data_offsets": [0, 12]}}), "`weight` has"),
    "a negative size": (file_of(changed(shape=[-3])), "`weight` has"),
    "a fractional size": (file_of(changed(shape=[3.0])), "`weight` has"),
    "a size that is true": (file_of(changed(shape=[3, True])), "`weight` has"),
    "three offsets": (file_of(changed(data_offsets=[0, 6, 12])), "`weight` has"),
    "a dtype that is no name": (file_of(changed(dtype=7)), "`weight` has"),
    "fewer bytes than its shape": (file_of(changed(shape=[4])), "should have 16 bytes"),
    "an overflowing shape": (file_of(changed(shape=[2**62, 2**62])), "should have"),
    "a hole": (file_of(changed(data_offsets=[4, 16]), b"\0" * 16), "`weight` should begin at byte 0"),
    "an overlap": (
        file_of({**GOOD, "more": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}),
        "`more` should begin at byte 12",
    ),
    "data after the end": (file_of(GOOD, b"\0" * 13), "expected .* bytes, it has"),
    "a shorter file": (file_of(GOOD, b"\0" * 11), "expected .* bytes, it has"),
    "an unknown dtype": (file_of(changed(dtype="F6_E2M3")), "`weight` has dtype F6_E2M3, which cannot be loaded"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_files_that_are_not_what_they_say(kind, tmp_path):
    content, message = HOSTILE[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    module = nn.Linear(3, 1, bias=False)
    module.weight = nn.Parameter(torch.full((3,), 9.0))
    with pytest.raises(RuntimeError, match=rf"nothing was loaded: rank 0: .*model\.safetensors: .*{message}"):
        load_safetensors(module, path)
    assert module.weight.tolist() == [9.0] * 3
    path.write_bytes(file_of({**GOOD, "__metadata__": {"format": "pt"}}))
    load_safetensors(module, tmp_path)  # a module without units, and no process group
    assert module.weight.tolist() == [0.0] * 3


VALID = file_of(
    {"__metadata__": {"a": "b"}, **GOOD, "n": {"dtype": "I64", "shape": [2], "data_offsets": [12, 28]}}, bytes(28)
)


@settings(deadline=None, max_examples=400)
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(VALID) - 29), st.integers(0, 3), st.binary(max_size=4) | st.sampled_from([b"9" * 5000])
        ),
        min_size=1,
        max_size=4,
    ),
    cut=st.integers(0, 40),
)
def test_mutated_files_are_read_right_or_refused(tmp_path_factory, edits, cut):
    content = bytearray(VALID)
    for at, removed, added in edits:
        content[at : at + removed] = added
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(bytes(content[: len(content) - cut] if cut < 20 else content))
    try:
        files = Files(path)
    except FileError:
        return
    for entry in files.entries.values():  # what is accepted lies in the file
        assert entry.dtype is None or entry.begin + math.prod(entry.shape) * entry.dtype.itemsize <= path.stat().st_size
    files.close()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"weight": "../a.safetensors"}}, "expected files of the same folder, got '../a.safetensors'"),
        ({"weight_map": {"weight": "/a.safetensors"}}, "same folder"),
        ({"weight_map": {"weight": ""}}, "same folder"),
        ({"weight_map": {"weight": 3}}, "expected `weight_map` to map names to files"),
        ({}, "expected `weight_map`"),
        ({"weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}}, "the index says that `bias` is in it"),
        ({"weight_map": {"weight": "absent.safetensors"}}, "FileNotFoundError"),
        ({"weight_map": {"weight": "folder"}}, "expected a file"),
    ],
)
def test_an_index_that_is_not_what_it_says(index, message, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(file_of(GOOD))
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RuntimeError, match=message):
        load_safetensors(nn.Linear(3, 1), tmp_path)


def test_names_in_several_files_and_folders_without_any(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(file_of(GOOD))
    with pytest.raises(RuntimeError, match=r"b\.safetensors: `weight` is in .*a\.safetensors, too"):
        load_safetensors(nn.Linear(3, 1), [tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    with pytest.raises(RuntimeError, match=r"has neither model\.safetensors\.index\.json nor model\.safetensors"):
        load_safetensors(nn.Linear(3, 1), tmp_path)


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_of(GOOD))
    files = Files(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
    with pytest.raises(FileError, match=r"a\.safetensors: ended at byte"):
        files.entries["weight"].read(0, torch.empty(3))
    files.close()


def test_what_a_deferred_model_takes_before_it_is_loaded():
    with fake_world(8):
        model = FSDP(on_meta(Wide), param_init_fn=defer_init, use_orig_params=True, atomic="row")
        assert sum(param.untyped_storage().nbytes() for param in model.params) == 8 * 1024 * 2048 * 4 // 8
        assert flatparam.defer_init is defer_init
        pieces = [weakref.ref(param) for param in model.parameters()]
        del model
        gc.collect()
        assert [piece() for piece in pieces] == [None] * 8


def test_hostile_headers_are_refused_at_once(tmp_path):
    twice = ",".join(f'"n{i % 40000}":1' for i in range(40001))
    many = json.dumps({"x": {"dtype": "F32", "shape": [2**62] * 4000, "data_offsets": [0, 12]}})
    for header, message in (("{" + twice + "}", "n0` is in it twice"), (many, "where dtype, shape")):
        (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0" * 12)
        with pytest.raises(FileError, match=message) as caught:
            Files(tmp_path / "x.safetensors")
        assert len(str(caught.value)) < 1000
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(FileError, match="expected a file"):
        Files(tmp_path / "pipe.json")


def test_files_in_another_order_are_the_same_files(tmp_path):
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        save_file({path.stem: torch.zeros(2)}, path)
    found = [Files(paths), Files(paths[::-1]), Files(paths[:1])]
    assert found[0].digest == found[1].digest != found[2].digest
    for files in found:
        files.close()
