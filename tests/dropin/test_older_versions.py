"""While flatparam is installed, pickles of torch up to 2.5 and imports for torch up to 2.1 still work.

The pickles are written here byte by byte as those versions wrote them: ``FlatParamShardMetadata`` had four fields
before torch 2.6, and its module was ``flat_param`` before torch 2.2.
"""

import copy
import importlib
import pickle
import zipfile

import pytest
import torch
from gloo import fake_world
from one_handle import TORCHS, make_handle
from torch import nn
from torch.distributed.fsdp import _flat_param
from torch.distributed.fsdp._flat_param import FlatParamShardMetadata, HandleShardingStrategy

import flatparam

OLD = "torch.distributed.fsdp.flat_param"
NEW = "torch.distributed.fsdp._flat_param"


# pickle's opcodes, protocol 2


def many(*items):
    return b"(" + b"".join(items) + b"t"  # a tuple


def text(string):
    return b"X" + len(string).to_bytes(4, "little") + string.encode()


def numbers(*values):
    return many(*(b"K%c" % value for value in values))


def size(*extents):
    return b"ctorch\nSize\n" + many(numbers(*extents)) + b"R"  # torch.Size((extents,))


# of the weight and the bias of nn.Linear(4, 3)
NAMES = many(text("weight"), text("bias"))
SHAPES = many(size(3, 4), size(3))
STRIDES = many(numbers(4, 1), numbers(1))
CONTIGUITIES = many(b"\x88", b"\x88")  # True, True
NUMELS = numbers(12, 3)
OFFSETS = many(numbers(0, 11), numbers(0, 2))
FIELDS_OF_2_5 = (NAMES, SHAPES, NUMELS, OFFSETS)
FIELDS_OF_2_6 = (NAMES, SHAPES, STRIDES, CONTIGUITIES, NUMELS, OFFSETS)
METADATA = FlatParamShardMetadata(
    param_names=("weight", "bias"),
    param_shapes=(torch.Size([3, 4]), torch.Size([3])),
    param_strides=((4, 1), (1,)),
    param_contiguities=(True, True),
    param_numels=(12, 3),
    param_offsets=((0, 11), (0, 2)),
)


def pickled(module, *fields):
    """The bytes of a metadata tuple in protocol 2: its class, its fields, NEWOBJ."""
    return b"\x80\x02c" + module.encode() + b"\nFlatParamShardMetadata\n" + many(*fields) + b"\x81."


@pytest.fixture
def installed():
    flatparam.install()
    yield
    flatparam.uninstall()


def test_the_bytes_are_what_torch_writes():
    assert pickle.loads(pickled(NEW, *FIELDS_OF_2_6)) == METADATA
    with fake_world():
        handle = make_handle(TORCHS, nn.Linear(4, 3))
        handle.shard()
        assert handle.shard_metadata() == METADATA


@pytest.mark.parametrize("fields", [FIELDS_OF_2_5, FIELDS_OF_2_6], ids=["4 fields", "6 fields"])
@pytest.mark.parametrize("module", [OLD, NEW])
def test_metadata_of_older_versions_unpickles(installed, module, fields):
    metadata = pickle.loads(pickled(module, *fields))
    assert type(metadata) is FlatParamShardMetadata
    assert metadata == METADATA
    with fake_world():
        handle = make_handle(flatparam.FlatParamHandle, nn.Linear(4, 3))
        handle.shard()
        assert metadata == handle.shard_metadata()


@pytest.mark.parametrize("module", [OLD, NEW])
def test_torch_load_reads_it(installed, tmp_path, module):
    """From a file of torch.save; with weights_only too, where the user calls the class safe under its old name."""
    torch.save("data.pkl is replaced below", tmp_path / "saved.pt")
    with zipfile.ZipFile(tmp_path / "saved.pt") as saved, zipfile.ZipFile(tmp_path / "old.pt", "w") as old:
        for entry in saved.namelist():
            is_data = entry.endswith("/data.pkl")
            old.writestr(entry, pickled(module, *FIELDS_OF_2_5) if is_data else saved.read(entry))
    assert torch.load(tmp_path / "old.pt", weights_only=False) == METADATA
    with torch.serialization.safe_globals([(FlatParamShardMetadata, f"{module}.FlatParamShardMetadata")]):
        assert torch.load(tmp_path / "old.pt", weights_only=True) == METADATA


def strides_in_pickle(*shape):
    """The strides that a pickle of torch 2.5 with one parameter of this shape gets."""
    fields = (many(text("w")), many(size(*shape)), numbers(0), many(numbers(0, 0)))
    [strides] = pickle.loads(pickled(OLD, *fields)).param_strides
    return strides


@pytest.mark.parametrize("shape", [(), (1,), (0,), (5,), (2, 3, 4), (3, 1, 2), (2, 0, 3), (0, 4)])
def test_strides_are_those_of_a_contiguous_tensor(installed, shape):
    assert strides_in_pickle(*shape) == torch.empty(shape).stride()


def test_metadata_of_this_version_is_as_before(installed):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(METADATA, protocol)) == METADATA
    assert copy.deepcopy(METADATA) == METADATA == FlatParamShardMetadata(*METADATA)
    assert METADATA._replace(param_names=("w", "b")).param_names == ("w", "b")
    for wrong in ((), ((),) * 3, ((),) * 5, ((),) * 7):
        with pytest.raises(TypeError, match="argument"):
            FlatParamShardMetadata(*wrong)


def test_four_fields_make_metadata_in_every_way_that_a_tuple_has(installed):
    old = {name: getattr(METADATA, name) for name in ("param_names", "param_shapes", "param_numels", "param_offsets")}
    for positional in range(5):
        named = dict(list(old.items())[positional:])
        assert FlatParamShardMetadata(*list(old.values())[:positional], **named) == METADATA
    assert FlatParamShardMetadata(**dict(reversed(old.items()))) == METADATA
    assert FlatParamShardMetadata._make(old.values()) == METADATA == FlatParamShardMetadata._make(iter(METADATA))
    assert type(FlatParamShardMetadata._make(old.values())) is FlatParamShardMetadata

    class Own(FlatParamShardMetadata):
        pass

    assert type(Own._make(old.values())) is Own
    with pytest.raises(TypeError, match="argument"):
        FlatParamShardMetadata(old["param_names"], old["param_shapes"], param_strides=(), param_offsets=())
    for wrong in (3, 5, 7):
        with pytest.raises(TypeError, match=f"Expected 6 arguments, got {wrong}"):
            FlatParamShardMetadata._make(range(wrong))


def test_a_strategy_under_the_old_path_unpickles(installed):
    strategy = pickle.loads(b"\x80\x02c" + OLD.encode() + b"\nHandleShardingStrategy\n" + numbers(2) + b"R.")
    assert strategy is HandleShardingStrategy.SHARD_GRAD_OP


def test_the_old_module_is_importable_and_is_the_new_one(installed):
    assert importlib.import_module(OLD) is _flat_param
    assert torch.distributed.fsdp.flat_param is _flat_param
    from torch.distributed.fsdp.flat_param import FlatParamHandle

    assert FlatParamHandle is flatparam.FlatParamHandle


def test_nothing_of_it_is_left_after_uninstall():
    flatparam.install()
    flatparam.uninstall()
    with pytest.raises(ModuleNotFoundError, match="flat_param"):
        importlib.import_module(OLD)
    assert not hasattr(torch.distributed.fsdp, "flat_param")
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        pickle.loads(pickled(NEW, *FIELDS_OF_2_5))
    with pytest.raises(TypeError, match="Expected 6 arguments, got 4"):
        FlatParamShardMetadata._make(range(4))
    assert pickle.loads(pickled(NEW, *FIELDS_OF_2_6)) == METADATA == FlatParamShardMetadata._make(METADATA)


def test_a_second_uninstall_changes_nothing():
    flatparam.uninstall()
    assert pickle.loads(pickled(NEW, *FIELDS_OF_2_6)) == METADATA
    assert not flatparam.is_installed()
