"""Files with anything in them: right values, or an error of ours that names the file, from every reader of files.

Each case changes files of one kind at random, by its seed: bytes, values of JSON, objects of a pickle. What is
loaded all the same is compared with what readers of a few lines find there.

Promises:
- files, indexes and metadata with anything in them, by 2,500 mutations: right values, or an error that names the
  file, from every reader
"""

import copy
import dataclasses
import io
import json
import math
import pickle
import random
import re
import resource
import shutil
import warnings
import zlib
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import differing
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from flatparam import FileError, checkpoint, load_safetensors
from flatparam.checkpoint import CheckpointError, cli

MUTATIONS = 25  # of each case
MOST_MEMORY = 2**31
DEPTHS = (100, 140, 160, 400, 900, 3000)
FOREIGN = re.compile(r"\b(?!FileError|CheckpointError)\w*Error\b|StopIteration")  # the name of another exception

# Values of JSON


def as_json(value):
    """Its text, also where ``value`` is nested too deeply for Python's own."""
    text = json.dumps(value)
    for depth in DEPTHS:
        for name, begin, end in (("list", "[", "]"), ("dict", '{"a": ', "}")):
            text = text.replace(f'"nested {name} {depth}"', begin * depth + "0" + end * depth)
    return text


class Twice(dict):
    """With its first item once more, of another value."""

    def items(self):
        (key, _), *_ = super().items()
        return [*super().items(), (key, 7)]


def odd_values(generator):
    numbers = [
        -1,
        0,
        1,
        2,
        3,
        8,
        2**31,
        2**53 + 1,
        2**62,
        2**63,
        2**64,
        -(2**63),
        10**400,
        0.5,
        -0.0,
        1e300,
        math.nan,
        math.inf,
    ]
    texts = ["", "x", "\ud800", "a\udc80b", "\0", "F32", "F4", "U8", "box", "one", "../x", "x" * 300, "\u202e", "é"]
    others = [None, True, False, [], {}, [[]], [None], {"": 0}, {"$tensor": "x"}, {"$float": "nan"}, {"$int": "0x1"}]
    others += [{"$dict": [[[], 0]]}, {"$tuple": 3}, {"$dtype": "x"}, [0] * 70, [2**62] * 8, [1] * 5000]
    deep = [f"nested {kind} {depth}" for kind in ("list", "dict") for depth in DEPTHS]
    return generator.choice([numbers, numbers, texts, others, others, deep])


def nodes(value, path=()):
    """The path of each value in ``value``."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield from nodes(item, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def changed_json(value, generator):
    """Another one: one of its values is of another type, gone, renamed, there twice, or that of another place."""
    value = copy.deepcopy(value)
    paths = [path for path in nodes(value) if path]
    *parent, key = generator.choice(paths)
    inside = at(value, parent)
    how = generator.randrange(8)
    if how == 0:
        del inside[key]
    elif how == 1:
        inside[key] = copy.deepcopy(at(value, generator.choice(paths)))
    elif how == 2 and isinstance(inside, dict):
        inside[generator.choice(["", "x", "\ud800", "__metadata__", "a.b", "state.x"])] = inside.pop(key)
    elif how == 3 and isinstance(inside[key], dict) and inside[key]:
        inside[key] = Twice(inside[key])
    elif how == 4 and isinstance(inside, list):
        inside.insert(key, copy.deepcopy(at(value, generator.choice(paths))))
    elif how == 5 and type(inside[key]) is int:
        inside[key] += generator.choice([-8, -4, -1, 1, 4, 8, 2**32])
    else:
        inside[key] = generator.choice(odd_values(generator))
    return value


def changed_bytes(content, generator):
    """Others: flipped, cut, left out or repeated."""
    i, j = sorted(generator.randrange(len(content) + 1) for _ in range(2))
    j = min(j, i + generator.choice([1, 8, 100, 1000]))
    how = generator.randrange(6)
    if how <= 1 and i < len(content):
        return content[:i] + bytes([content[i] ^ 1 << generator.randrange(8)]) + content[i + 1 :]
    if how == 2:
        return content[:i]
    if how == 3:
        return content[:i] + content[j:]
    if how == 4:
        return content[:j] + content[i:j] * generator.choice([1, 1, 50]) + content[j:]
    return content[:i] + bytes(generator.randrange(256) for _ in range(j - i)) + content[j:]


def header_changed(content, generator):
    """A safetensors file with another header."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    metadata = header.get("__metadata__", {})
    if "DCP_SHARDING_INFO" in metadata and generator.random() < 0.5:
        places = changed_json(json.loads(metadata["DCP_SHARDING_INFO"]), generator)
        header["__metadata__"] = {**metadata, "DCP_SHARDING_INFO": as_json(places)}
    else:
        header = changed_json(header, generator)
    text = as_json(header).encode()
    return len(text).to_bytes(8, "little") + text + content[end:]


# What is saved


class Small(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.w, self.v = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("seen", torch.tensor([3, 4]))
        self.register_buffer("scale", torch.randn(3).to(torch.bfloat16))


def trained(seed=0):
    model = Small(seed)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def one_file(folder):
    save_file(dict(trained()[0].state_dict()), folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def several_files(folder):
    state = dict(trained()[0].state_dict())
    names = list(state)
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: state[name] for name in names if files[name] == file}, folder / file)
    told = {"metadata": {"total_size": 100}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(told))
    return folder


def ours(folder):
    model, optimizer = trained()
    extra = {"epoch": 3, "rng": torch.arange(4), "more": [(1, 2.5), {3: float("inf")}, torch.bfloat16]}
    checkpoint.save(folder / "ours", model, optimizer, extra=extra)
    return folder / "ours"


def boxes(folder):
    """In two files with halves of the tensors, as ranks of torch write them."""
    state = trained()[0].state_dict()
    for i in range(2):
        parts, told = {}, {}
        for name, value in state.items():
            half = value.shape[0] // 2
            parts[name] = value[half:].clone() if i else value[:half].clone()
            told[name] = {"saved_offsets": [i * half, *[0] * (value.dim() - 1)]}
        del parts["nothing" if i else "seen"], told["nothing" if i else "seen"]
        if i:
            parts["seen"], told["seen"] = state["seen"], {"saved_offsets": [0]}
        metadata = {"DCP_SHARDING_INFO": json.dumps(told), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(parts, folder / f"shard-{i + 1:05}-model-00001-of-00001.safetensors", metadata)
    return folder


def pickled(folder):
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / "made")
    return folder / "made"


# How each kind is changed, and what is in it then


def sealed(folder, change):
    """Change the index of one of ours, and have its checksum fit."""
    path = folder / "checkpoint.json"
    head, body = path.read_bytes().split(b"\n")[:2]
    text = as_json(change(json.loads(body))).encode()
    told = {**json.loads(head), "crc32": zlib.crc32(text)}
    path.write_bytes(json.dumps(told).encode() + b"\n" + text + b"\n")


def change_ours(folder, generator):
    if generator.random() < 0.8:
        sealed(folder, lambda body: changed_json(body, generator))
    else:
        path = generator.choice([path for path in folder.rglob("*") if path.is_file()])
        path.write_bytes(changed_bytes(path.read_bytes(), generator))


def change_files(path, generator):
    files = [path] if path.is_file() else sorted(path.iterdir())
    file = generator.choice(files)
    content = file.read_bytes()
    if generator.random() < 0.25:
        file.write_bytes(changed_bytes(content, generator))
    elif file.suffix == ".json":
        file.write_text(as_json(changed_json(json.loads(content), generator)))
    else:
        file.write_bytes(header_changed(content, generator))


def change_pickled(folder, generator):
    path = folder / ".metadata"
    if generator.random() < 0.2:
        data = generator.choice(sorted(folder.glob("*.distcp")))
        data.write_bytes(changed_bytes(data.read_bytes(), generator))
        return
    metadata = pickle.loads(path.read_bytes())
    told = metadata.state_dict_metadata
    name = generator.choice([name for name, one in told.items() if hasattr(one, "chunks")])
    index = generator.choice(list(metadata.storage_data))
    other = generator.choice(list(metadata.storage_data))
    info = metadata.storage_data[index]
    odd = generator.choice([*odd_values(generator), (), (0,), (-1, 0), (2**62, 4), torch.Size([4]), torch.float64])
    field = generator.choice(["relative_path", "offset", "length"])
    chunk, box = generator.choice(told[name].chunks), generator.choice(["offsets", "sizes"])
    how = generator.randrange(8)
    if how == 0:
        metadata.storage_data[index] = odd
    elif how == 1:
        metadata.storage_data[index] = dataclasses.replace(info, **{field: odd})
    elif how == 2:
        metadata.storage_data[index] = metadata.storage_data[other]
    elif how == 3:
        setattr(chunk, box, odd)
    elif how == 4:
        told[name].size = odd
    elif how == 5:
        told[name].properties.dtype = odd
    elif how == 6:
        setattr(metadata, generator.choice(["planner_data", "storage_data", "state_dict_metadata"]), odd)
    else:
        name = generator.choice(list(metadata.planner_data))
        metadata.planner_data[name] = odd
    path.write_bytes(pickle.dumps(metadata))


def bytes_in(path, begin, dtype, sizes):
    found = torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype, count=math.prod(sizes), offset=begin)
    return found.reshape(sizes)


DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "BF16": torch.bfloat16, "F16": torch.float16}


def assembled(found):
    """Whole tensors by name, of boxes ``(name, offsets, values)``."""
    whole = {}
    for name, offsets, values in found:
        ends = [at + size for at, size in zip(offsets, values.shape, strict=True)]
        whole.setdefault(name, []).append((offsets, ends, values))
    made = {}
    for name, parts in whole.items():
        shape = [max(ends) for ends in zip(*(ends for _, ends, _ in parts), strict=True)]
        made[name] = torch.zeros(shape, dtype=parts[0][2].dtype)
        for offsets, ends, values in parts:
            made[name][tuple(slice(a, b) for a, b in zip(offsets, ends, strict=True))] = values
    return made


def in_safetensors(path):
    """All that is in a file, in those of an index, or in those of a folder: boxes."""
    index = path / "model.safetensors.index.json"
    mapped = json.loads(index.read_bytes())["weight_map"] if index.exists() else None
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        if mapped is not None and file.name not in mapped.values():
            continue
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        metadata = header.pop("__metadata__", None)
        places = json.loads(metadata.get("DCP_SHARDING_INFO", "{}")) if isinstance(metadata, dict) else {}
        for name, told in header.items():
            offsets = places[name]["saved_offsets"] if places else [0] * len(told["shape"])
            taken = mapped is None or mapped.get(name) == file.name
            if taken and told["dtype"] in DTYPES and math.prod(told["shape"]):
                begin = end + told["data_offsets"][0]
                yield name, offsets, bytes_in(file, begin, DTYPES[told["dtype"]], told["shape"])


def in_ours(folder):
    body = json.loads((folder / "checkpoint.json").read_bytes().split(b"\n")[1])
    for file, told in body["files"].items():
        for name, (dtype, _, offsets, sizes, begin, _) in told["tensors"].items():
            end = begin + math.prod(sizes) * getattr(DTYPES.get(dtype), "itemsize", 0)
            if begin < end <= (folder / file).stat().st_size and not file.startswith("ranks"):
                yield name, offsets, bytes_in(folder / file, begin, DTYPES[dtype], sizes)


def in_pickled(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for name, told in metadata.state_dict_metadata.items():
        for chunk in getattr(told, "chunks", ()):
            with suppress(Exception):  # what is damaged may be wanted by nobody
                info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                content = (folder / info.relative_path).read_bytes()[info.offset :][: info.length]
                value = torch.load(io.BytesIO(content), weights_only=True)
                if value.numel() and len(chunk.offsets) == value.dim():
                    yield name.removeprefix("model.").replace("optim.", ""), chunk.offsets, value


KINDS = {
    "file": (one_file, change_files, in_safetensors),
    "files": (several_files, change_files, in_safetensors),
    "ours": (ours, change_ours, in_ours),
    "boxes": (boxes, change_files, in_safetensors),
    "pickled": (pickled, change_pickled, in_pickled),
}


# What readers do with it


@contextmanager
def little_memory():
    """Within, this process gets no more than that beside what it has."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def check_message(error, path, about):
    message = str(error)
    message.encode()
    assert str(path.parent) in message, (message, about)
    by_pickle = ".metadata: is not what torch writes" in message  # where anything may be, it is told
    assert by_pickle or not FOREIGN.search(message), (message, about)


def check_load(path, read, generator, about, of_optimizer=None):
    model, optimizer = trained(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    old = copy.deepcopy(optimizer.state_dict())
    options = {"strict": generator.random() < 0.5, "check_finite": generator.random() < 0.3, "trusted": True}
    given = optimizer if (generator.random() < 0.5 if of_optimizer is None else of_optimizer) else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # roundings
            checkpoint.load(path, model, given, **options)
    except (CheckpointError, FileError) as error:
        check_message(error, path, about)
        assert not differing(model.state_dict(), before)
        assert repr(optimizer.state_dict()) == repr(old)
        return False
    expected = assembled(read(path))
    for name, value in model.state_dict().items():
        wanted = expected.get(name, before[name]).to(value.dtype)
        assert torch.equal(wanted, value) or not value.numel(), (name, about)
    if given is not None:
        for name, param in ((name, param) for name, param in model.named_parameters() if param.numel()):
            for key, value in optimizer.state.get(param, {}).items():
                wanted = expected.get(f"state.{name}.{key}")
                if wanted is not None and isinstance(value, torch.Tensor):
                    assert torch.equal(wanted.to(value.dtype), value), (name, key, about)
    return True


def check_load_safetensors(path, read, generator, about):
    model = Small(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        load_safetensors(model, path, strict=generator.random() < 0.5)
    except RuntimeError as error:
        message = re.sub(r"^load_safetensors: nothing was loaded: rank 0: ", "", str(error))
        message = re.sub(r"^(ValueError|FileNotFoundError|OSError): ", "", message)
        if not re.match(r"RuntimeError: (Missing|Unexpected) key", message):  # other names are no fault of a file
            check_message(message, path, about)
        assert not differing(model.state_dict(), before)
        return
    expected = assembled(read(path))
    for name, value in model.state_dict().items():
        assert torch.equal(expected.get(name, before[name]).to(value.dtype), value) or not value.numel(), (name, about)


def check_command(path, arguments, capsys, about):
    status = cli.main([*arguments[:1], str(path), "--trusted", *arguments[1:]])
    shown = capsys.readouterr()
    assert status in (0, 1), about
    if status == 1:
        check_message(shown.err, path, about)
        assert len(shown.err.splitlines()) == 1, (shown.err, about)
    return status


@pytest.mark.sweep(15)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", KINDS)
def test_files_with_anything_in_them(tmp_path, capsys, kind, seed):
    make, change, read = KINDS[kind]
    (tmp_path / "good").mkdir()
    good = make(tmp_path / "good")
    assert check_load(good, read, random.Random(0), "unchanged", kind in ("ours", "pickled"))
    for i in range(MUTATIONS):
        generator = random.Random(f"{kind} {seed} {i}")
        about = f"{kind} {seed} {i}"
        (tmp_path / "bad").mkdir()
        bad = tmp_path / "bad" / good.name
        shutil.copytree(good, bad) if good.is_dir() else shutil.copy(good, bad)
        change(bad, generator)
        with little_memory():
            for arguments in (
                ["show"],
                ["show", "--all"],
                ["verify"],
                ["export", str(tmp_path / "bad" / "out.safetensors"), "--quiet"],
            ):
                check_command(bad, arguments, capsys, about)
            check_load(bad, read, generator, about)
            if kind in ("file", "files"):
                check_load_safetensors(bad, read, generator, about)
            if kind == "ours":
                check_extra(bad, about)
        shutil.rmtree(tmp_path / "bad")


def check_extra(path, about):
    try:
        checkpoint.read_extra(path)
    except (CheckpointError, FileError) as error:
        check_message(error, path, about)


def test_two_values_that_metadata_put_at_one_place_are_told_apart(tmp_path):
    """One has fewer bytes there than torch.save wrote: it is damaged, and the other is not."""
    path = pickled(tmp_path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    stored = {index.fqn: index for index in metadata.storage_data}
    info = metadata.storage_data[stored["model.v"]]
    metadata.storage_data[stored["model.w"]] = dataclasses.replace(info, length=info.length - 8)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    model = Small(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*cannot be read"):
        checkpoint.load(path, model, trusted=True)
    assert not differing(model.state_dict(), before)
    del model.w
    checkpoint.load(path, model, trusted=True, strict=False)
    assert torch.equal(model.v, trained()[0].v)
