"""Our module has every name of torch's, of the same kind and with the same parameters.

The oracle is the installed torch. ``differences()`` shares no code with the check in ``flatparam.install()``, which is
tested here too; both on made-up modules with one fault each.
"""

import enum
import functools
import importlib
import inspect
import types
from typing import NamedTuple

import pytest
import torch
from gloo import fake_world
from one_handle import MODE_IDS, MODES, TORCHS, make_handle
from torch import nn
from torch.distributed.fsdp import _flat_param as torch_flat_param

import flatparam
import flatparam.dropin.flat_param as our_flat_param

install = importlib.import_module("flatparam.dropin.install")

OF_EVERY_CLASS = {"__module__", "__doc__", "__dict__", "__weakref__", "__static_attributes__", "__firstlineno__"}
OF_EVERY_CLASS |= {"__annotate_func__", "__annotations_cache__"}  # of Python 3.14


def differences(theirs, ours):
    """Return what is in the namespace ``theirs`` and missing or different in ``ours``, one line each.

    Compared are the kind of every name; of a class each attribute, private ones too, members of enums with values,
    fields of tuples with order and defaults; of a function its parameters: names, order, kinds and defaults.
    """
    found = []
    for name, value in theirs.items():
        if name.startswith("__") and name.endswith("__"):
            continue
        if ours.get(name) is value:
            continue
        if name not in ours:
            found.append(f"{name} is missing")
        elif isinstance(value, type):
            found += differences_of_classes(name, value, ours[name])
        else:
            found += differences_of_values(name, value, ours[name])
    return found


def differences_of_classes(name, theirs, ours):
    if not isinstance(ours, type):
        return [f"{name} is {kind_of(ours)}, not a class"]
    if issubclass(theirs, enum.Enum):
        same = members_of(theirs) == members_of(ours)
        return [] if same else [f"{name} has members {members_of(ours)}, not {members_of(theirs)}"]
    if issubclass(theirs, tuple):
        same = fields_of(theirs) == fields_of(ours)
        return [] if same else [f"{name} has fields {fields_of(ours)}, not {fields_of(theirs)}"]
    found = []
    for attribute in sorted({key for cls in theirs.__mro__[:-1] for key in vars(cls)} - OF_EVERY_CLASS):
        full = f"{name}.{attribute}"
        mine = inspect.getattr_static(ours, attribute, None)
        if mine is None:
            found.append(f"{full} is missing")
        else:
            found += differences_of_values(full, inspect.getattr_static(theirs, attribute), mine)
    return found


def differences_of_values(name, theirs, ours):
    if kind_of(theirs) != kind_of(ours):
        return [f"{name} is {kind_of(ours)}, not {kind_of(theirs)}"]
    if parameters_of(theirs) != parameters_of(ours):
        return [f"{name} has parameters {parameters_of(ours)}, not {parameters_of(theirs)}"]
    return []


def kind_of(value):
    for kind in (property, staticmethod, classmethod, types.FunctionType, type, types.ModuleType):
        if isinstance(value, kind):
            return kind.__name__
    return "a function of C" if callable(value) else "a value"


def parameters_of(value):
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if not isinstance(function, types.FunctionType):
        return None
    parameters = inspect.signature(function).parameters.values()
    # The object comes first, whatever the function calls it: no call of a method passes it by keyword
    return [(each.name.replace("handle", "self"), each.kind.name, each.default) for each in parameters]


def members_of(cls):
    return {member: each.value for member, each in getattr(cls, "__members__", {}).items()}


def fields_of(cls):
    return getattr(cls, "_fields", None), getattr(cls, "_field_defaults", None)


def test_our_module_has_every_name_of_torchs():
    assert torch_flat_param.FlatParamHandle is install.TORCH_HANDLE  # the comparison is not with itself
    assert differences(vars(torch_flat_param), vars(our_flat_param)) == []
    assert our_flat_param.FlatParamHandle is flatparam.FlatParamHandle is not install.TORCH_HANDLE
    assert our_flat_param.__all__ == torch_flat_param.__all__


def test_what_pickles_and_enums_compare_is_one_object():
    for name in ("HandleShardingStrategy", "FlatParamShardMetadata", "ParamInfo", "SharedParamInfo", "_ShardParamInfo"):
        assert getattr(our_flat_param, name) is getattr(torch_flat_param, name)
    assert our_flat_param.FlatParameter is torch_flat_param.FlatParameter is flatparam.FlatParameter


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_a_handle_has_every_attribute_of_torchs(mode):
    def attributes(kind):
        handle = make_handle(kind, nn.Linear(3, 5), mode)
        handle.shard()
        handle.init_flat_param_attributes()
        return set(dir(handle)), set(dir(handle.flat_param))

    with fake_world():
        theirs, ours = attributes(TORCHS), attributes(flatparam.FlatParamHandle)
    assert theirs[0] - ours[0] == set()
    assert theirs[1] - ours[1] == set()


# Made-up modules: each fault must be found, by this file's comparison and, where it would break training, by install()


class Strategy(enum.Enum):
    ONE = 1
    TWO = 2


class Metadata(NamedTuple):
    names: tuple
    numels: tuple = ()


class Handle:
    limit = 3

    def __init__(self, params, *, extension=None):
        self.params = params

    def unshard(self, forced=False):
        return forced

    def _private(self, tensor):
        return tensor

    @property
    def is_sharded(self):
        return True

    @staticmethod
    def shard_of(tensor, rank):
        return tensor, rank

    @classmethod
    def made(cls):
        return cls(())


def helper(tensor, /, *sizes, keep=None, **options):
    return tensor, sizes, keep, options


def made_up(**changes):
    names = {"FlatParamHandle": Handle, "Strategy": Strategy, "Metadata": Metadata, "helper": helper, "VALUE": 42}
    return {name: value for name, value in (names | changes).items() if value is not None}


def handle_with(**changes):
    """A copy of Handle with other attributes; None leaves one out."""
    body = {name: value for name, value in vars(Handle).items() if name not in OF_EVERY_CLASS}
    return type("FlatParamHandle", (), {name: value for name, value in (body | changes).items() if value is not None})


def test_equal_modules_have_no_differences():
    assert differences(made_up(), made_up()) == []
    assert differences(made_up(), made_up(FlatParamHandle=handle_with(extra=lambda self: None), more=1)) == []


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (made_up(helper=None), "helper is missing"),
        (made_up(VALUE=None), "VALUE is missing"),
        (made_up(Strategy=None), "Strategy is missing"),
        (made_up(VALUE=helper), "VALUE is function, not a value"),
        (made_up(Metadata=helper), "Metadata is function, not a class"),
        (made_up(helper=lambda tensor, /, *sizes, keep=None: None), "helper has parameters"),
        (made_up(helper=lambda tensor, *sizes, keep=None, **options: None), "helper has parameters"),
        (made_up(helper=lambda tensor, /, *sizes, keep=1, **options: None), "helper has parameters"),
        (made_up(helper=lambda data, /, *sizes, keep=None, **options: None), "helper has parameters"),
        (made_up(Strategy=enum.Enum("Strategy", "ONE")), "Strategy has members"),
        (made_up(Strategy=enum.Enum("Strategy", "TWO ONE")), "Strategy has members"),
        (made_up(Metadata=NamedTuple("Metadata", [("numels", tuple), ("names", tuple)])), "Metadata has fields"),
        (made_up(Metadata=NamedTuple("Metadata", [("names", tuple), ("numels", tuple)])), "Metadata has fields"),
        (made_up(FlatParamHandle=handle_with(_private=None)), "FlatParamHandle._private is missing"),
        (made_up(FlatParamHandle=handle_with(limit=None)), "FlatParamHandle.limit is missing"),
        (made_up(FlatParamHandle=handle_with(is_sharded=lambda self: 1)), "FlatParamHandle.is_sharded is function"),
        (made_up(FlatParamHandle=handle_with(shard_of=lambda tensor, rank: 1)), "FlatParamHandle.shard_of is function"),
        (made_up(FlatParamHandle=handle_with(made=lambda cls: 1)), "FlatParamHandle.made is function"),
        (made_up(FlatParamHandle=handle_with(unshard=lambda self: 1)), "FlatParamHandle.unshard has parameters"),
        (
            made_up(FlatParamHandle=handle_with(__init__=lambda self, params, extension=None: None)),
            "FlatParamHandle.__init__ has parameters",
        ),
    ],
)
def test_a_fault_is_named(ours, expected):
    [difference] = differences(made_up(), ours)
    assert difference.startswith(expected)


def copy_of_torchs_module(**changes):
    """A module with torch's names, some of them others; its handle is a copy of torch's, which may be changed."""
    module = types.ModuleType(torch_flat_param.__name__)
    body = {name: value for name, value in vars(install.TORCH_HANDLE).items() if name not in OF_EVERY_CLASS}
    vars(module).update(vars(torch_flat_param), FlatParamHandle=type("FlatParamHandle", (), body))
    vars(module).update(changes)
    return module


def function_of_torchs():
    return None


function_of_torchs.__module__ = torch_flat_param.__name__


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unshard_later", lambda self: None),
        ("_in_private", lambda self: None),
        ("is_late", property(lambda self: True)),
        ("LIMIT", 3),
    ],
)
def test_install_misses_a_name_of_the_handle(name, value):
    module = copy_of_torchs_module()
    setattr(module.FlatParamHandle, name, value)
    assert install.missing_names(module, our_flat_param) == [f"FlatParamHandle.{name}"]


def test_install_misses_a_parameter():
    module = copy_of_torchs_module()
    module.FlatParamHandle.unshard = lambda self, later=False: None
    module.FlatParamHandle._get_shard = staticmethod(lambda tensor, rank, world_size, dim=0: None)
    assert install.missing_names(module, our_flat_param) == [
        "FlatParamHandle._get_shard(dim)",
        "FlatParamHandle.unshard(later)",
    ]


def test_install_misses_a_function_and_a_class():
    planted_class = type("Planted", (), {"__module__": torch_flat_param.__name__})
    module = copy_of_torchs_module(_planted=function_of_torchs, Planted=planted_class, of_a_user=helper)
    assert install.missing_names(module, our_flat_param) == ["_planted", "Planted"]


def test_install_misses_members_and_fields():
    strategies = [*torch_flat_param.HandleShardingStrategy.__members__, "SOME_SHARD"]
    fields = [(name, tuple) for name in (*torch_flat_param.FlatParamShardMetadata._fields, "param_dtypes")]
    module = copy_of_torchs_module(
        HandleShardingStrategy=enum.Enum("HandleShardingStrategy", strategies),
        FlatParamShardMetadata=NamedTuple("FlatParamShardMetadata", fields),
    )
    assert install.missing_names(module, our_flat_param) == [
        "HandleShardingStrategy.SOME_SHARD",
        "FlatParamShardMetadata.param_dtypes",
    ]


def test_install_misses_nothing_of_the_installed_torch():
    assert install.missing_names(copy_of_torchs_module(), our_flat_param) == []
    assert install.replaced_methods(install.TORCH_HANDLE) == []


@pytest.fixture
def not_installed():
    assert not flatparam.is_installed()
    yield
    flatparam.uninstall()


def test_install_refuses_a_name_that_we_lack(not_installed, monkeypatch):
    of_torch = torch_flat_param._same_storage
    monkeypatch.setattr(install.TORCH_HANDLE, "reshard_partly", of_torch, raising=False)
    with pytest.raises(
        RuntimeError, match=r"not installed: torch .* that flatparam lacks: FlatParamHandle\.reshard_partly\."
    ):
        flatparam.install()
    assert not flatparam.is_installed()
    assert torch_flat_param.FlatParamHandle is install.TORCH_HANDLE


def test_install_refuses_methods_that_would_not_be_called(not_installed, monkeypatch):
    unshard = install.TORCH_HANDLE.unshard
    shard_of = install.TORCH_HANDLE._get_shard

    @functools.wraps(unshard)
    def counted(self):
        return unshard(self)

    monkeypatch.setattr(install.TORCH_HANDLE, "unshard", counted)
    monkeypatch.setattr(install.TORCH_HANDLE, "_get_shard", staticmethod(lambda *args: shard_of(*args)))
    with pytest.raises(
        RuntimeError, match=r"_get_shard, unshard of torch's FlatParamHandle was replaced or added"
    ) as refused:
        flatparam.install()
    assert "Call flatparam.install() before the code that does so" in str(refused.value)
    assert not flatparam.is_installed()


def test_install_takes_what_is_replaced_after_it(not_installed, monkeypatch):
    flatparam.install()
    calls = []
    unshard = torch_flat_param.FlatParamHandle.unshard
    monkeypatch.setattr(torch_flat_param.FlatParamHandle, "unshard", lambda self: (calls.append(self), unshard(self)))
    flatparam.install()
    with fake_world():
        handle = make_handle(torch_flat_param.FlatParamHandle, nn.Linear(2, 2), ("FULL_SHARD", True))
        handle.shard()
        handle.init_flat_param_attributes()
        handle.unshard()
    assert calls == [handle]
    assert torch.equal(handle.flat_param, handle.flat_param._full_param_padded[: handle.flat_param.numel()])
