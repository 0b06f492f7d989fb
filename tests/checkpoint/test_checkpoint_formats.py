"""Files in the safetensors format: newer dtypes, tied names, empty tensors. The oracle is safetensors itself.

Promises:
- newer dtypes, packed ones too, tied names and empty tensors are written and read as safetensors does; boxes may have
  any metadata
"""

import json
import warnings

import pytest
import torch
from gloo import fake_world
from safetensors.torch import load_file, load_model, save_file
from torch import nn

from flatparam import FileError, checkpoint, load_safetensors
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.checkpoint import CheckpointError, cli

NEWER = [
    getattr(torch, name)
    for name in ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2")
    if hasattr(torch, name)
]


class Quantized(nn.Module):
    """Scales or packed weights in a buffer, as modules of MX formats have them."""

    def __init__(self, dtype, filled=True):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        raw = torch.arange(100, 106, dtype=torch.uint8) if filled else torch.zeros(6, dtype=torch.uint8)
        self.register_buffer("scale", raw.reshape(2, 3).view(dtype))


def raw(tensor):
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("dtype", NEWER, ids=str)
def test_newer_dtypes_are_written_and_read_as_safetensors_does(tmp_path, dtype):
    model = Quantized(dtype)
    save_file(model.state_dict(), tmp_path / "theirs.safetensors")
    extra = {"scale": model.scale.clone()}
    checkpoint.save(tmp_path / "ours", model, extra=extra)
    checkpoint.export(tmp_path / "ours", tmp_path / "exported.safetensors")
    theirs, exported = load_file(tmp_path / "theirs.safetensors"), load_file(tmp_path / "exported.safetensors")
    assert exported["scale"].dtype == dtype
    assert torch.equal(raw(exported["scale"]), raw(theirs["scale"]))
    for path, load in (
        ("ours", checkpoint.load),
        ("theirs.safetensors", checkpoint.load),
        ("exported.safetensors", checkpoint.load),
        ("theirs.safetensors", lambda path, other: load_safetensors(other, path)),
    ):
        other = Quantized(dtype, filled=False)
        found = load(tmp_path / path, other)
        assert torch.equal(raw(other.scale), raw(model.scale)), path
        assert torch.equal(other.layer.weight, model.layer.weight), path
        if path == "ours":
            assert torch.equal(raw(found.extra["scale"]), raw(model.scale))


@pytest.mark.parametrize("load", [checkpoint.load, lambda path, model: load_safetensors(model, path)])
def test_dtypes_of_one_byte_become_others(tmp_path, load):
    weight = torch.arange(-3.0, 3.0).view(2, 3)
    save_file({"weight": weight.to(torch.float8_e4m3fn)}, tmp_path / "low.safetensors")
    save_file({"weight": weight + 0.03}, tmp_path / "high.safetensors")
    model, low = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False).to(torch.float8_e4m3fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is rounded
        load(tmp_path / "low.safetensors", model)
    assert torch.equal(model.weight, weight)
    with warnings.catch_warnings(record=True) as told:
        load(tmp_path / "high.safetensors", low)
    assert torch.equal(raw(low.weight), raw((weight + 0.03).to(torch.float8_e4m3fn)))
    assert ["rounded" in str(one.message) for one in told] == [True] * (load is checkpoint.load)


@pytest.mark.skipif(torch.float4_e2m1fn_x2 not in NEWER, reason="this torch has no packed dtype")
def test_packed_numbers_are_not_converted(tmp_path):
    checkpoint.save(tmp_path / "packed", Quantized(torch.float4_e2m1fn_x2))
    other = Quantized(torch.float8_e8m0fnu)
    before = raw(other.scale).clone()
    with pytest.raises(CheckpointError, match="`scale` has dtype F4"):
        checkpoint.load(tmp_path / "packed", other)
    assert torch.equal(raw(other.scale), before)


class Tied(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(4, 6, bias=False)
        self.embed = nn.Embedding(6, 4)
        self.head.weight = self.embed.weight


def test_tied_names_are_exported_as_safetensors_saves_a_model(tmp_path, capsys):
    model = Tied()
    checkpoint.save(tmp_path / "ours", model)
    checkpoint.export(tmp_path / "ours", tmp_path / "one.safetensors")
    checkpoint.export(tmp_path / "ours", tmp_path / "all.safetensors", tied="all")
    assert set(load_file(tmp_path / "one.safetensors")) == {"embed.weight"}
    assert set(load_file(tmp_path / "all.safetensors")) == {"embed.weight", "head.weight"}
    for load in (
        lambda other: load_model(other, tmp_path / "one.safetensors"),
        lambda other: checkpoint.load(tmp_path / "one.safetensors", other),
        lambda other: load_safetensors(other, tmp_path / "one.safetensors"),
        lambda other: other.load_state_dict(load_file(tmp_path / "all.safetensors")),
    ):
        other = Tied(seed=1)
        load(other)
        assert torch.equal(other.head.weight, model.head.weight)
        assert other.head.weight is other.embed.weight
    with pytest.raises(CheckpointError, match=r"expected tied= to be one of 'one', 'all', got 'some'"):
        checkpoint.export(tmp_path / "ours", tmp_path / "one.safetensors", tied="some")
    told = []
    for tied in ("one", "all"):
        cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "again.safetensors"), "--quiet", "--tied", tied])
        told.append(capsys.readouterr().out.splitlines()[1:])
    how = "Load it by safetensors.torch.load_model(), or export with --tied all"
    assert told == [[f"tied, in it once: head.weight as embed.weight. {how}"], []]


class WithEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 4))
        self.register_buffer("z", torch.zeros(0, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("first", ["z", "w"])
def test_an_empty_tensor_may_begin_where_another_one_does(tmp_path, first):
    values = {"w": torch.arange(8.0).reshape(2, 4), "z": torch.zeros(0, 4, dtype=torch.bfloat16)}
    order = [first, *(name for name in values if name != first)]
    save_file({name: values[name] for name in order}, tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    model = WithEmpty()
    checkpoint.load(tmp_path, model)
    assert torch.equal(model.w, values["w"])


BAD_VALUES = (None, 5, "x", {}, [], [None], [-1, 0], [0.5, 0], [2**70, 0], [[0], 0], [0, 0, 0], True, "\ud800", 1e400)


def boxes_told(told):
    header = {
        "__metadata__": {"DCP_SHARDING_INFO": told},
        "w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(32)


def test_what_boxes_tell_of_themselves_may_be_anything(tmp_path):
    """A folder of torch's boxes: an error of ours, and the model as it was; or what the boxes are."""
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    deep = "[" * 100_000 + "]" * 100_000
    told = [json.dumps(value) for value in BAD_VALUES] + [deep, "{", "{}", f'{{"w": {deep}}}']
    told += [json.dumps({"w": value}) for value in BAD_VALUES]
    told += [json.dumps({"w": {"saved_offsets": value}}) for value in BAD_VALUES]
    for one in told:
        path.write_bytes(boxes_told(one))
        model = WithEmpty()
        with pytest.raises((CheckpointError, FileError)):
            checkpoint.load(tmp_path, model, strict=False)
        assert not model.w.any(), one
    path.write_bytes(boxes_told(json.dumps({"w": {"saved_offsets": [0, 0]}})))
    checkpoint.load(tmp_path, WithEmpty(), strict=False)
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").write_bytes(
        boxes_told(json.dumps({"w": {"saved_offsets": [0]}})).replace(b"[2, 4]", b"[8]   ")
    )
    with pytest.raises(CheckpointError, match="boxes of `w` have different numbers of dimensions"):
        checkpoint.load(tmp_path, WithEmpty(), strict=False)


def test_an_odd_row_of_packed_numbers_is_refused(tmp_path):
    header = b'{"x":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}'
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with pytest.raises((CheckpointError, FileError), match="odd number of F4"):
        checkpoint.load(path, nn.Linear(2, 2))


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.nothing = nn.Linear(6, 6), nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return self.layer(x) + self.nothing.sum()


def test_a_block_of_an_empty_parameter_may_be_empty():
    with fake_world(2):
        FSDP(Empty(), atomic=torch.Tensor.numel)(torch.ones(2, 6)).sum().backward()
        with pytest.raises(ValueError, match=r"at least 1 element for parameter `layer\.weight`, got 0"):
            FSDP(Empty(), atomic=lambda param: 0)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.layer = nn.EmbeddingBag(7, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.bag(x))


@pytest.mark.parametrize("uo", [False, True])
def test_modules_that_format_their_attributes_are_printed(uo):
    with fake_world(2):
        model = FSDP(Bag(), use_orig_params=uo)
        for _ in range(2):
            assert "EmbeddingBag(7, 6" in repr(model)
            assert "EmbeddingBag(7, 6" in repr(nn.Sequential(model))
            model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
