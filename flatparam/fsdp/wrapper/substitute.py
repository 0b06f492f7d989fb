"""Put flatparam's FullyShardedDataParallel in the place of torch's class, and take it away again.

After ``install()`` every import path of torch's class gives flatparam's, also in modules that imported it before.
torch's own runtime keeps its class, so models that it has wrapped train on. ``flatparam.install(runtime=True)`` calls
this file.
"""

import re
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch.distributed.fsdp as torch_package
import torch.distributed.fsdp.fully_sharded_data_parallel as torch_file
from torch import nn

from ...common.patches import Lifetime, names_of
from ...common.torch_private import TorchsFSDP, torch_traversal
from ...common.warned import is_first_rank
from .fully_sharded import FullyShardedDataParallel

NAME = "FullyShardedDataParallel"
# Modules that keep torch's class: torch's runtime, ours, and the module that dcp_helpers.py lets work with both
_KEEP = ("torch.distributed.fsdp.", "flatparam.", "torch.distributed.checkpoint.state_dict")

# Tested releases, as in docs/integrations.md; `make integrations` installs the last of each
TESTED = {
    "accelerate": ("1.15",),
    "transformers": ("5.23", "5.24"),
    "lightning": ("2.6",),
    "peft": ("0.20", "0.21"),
    "trl": ("1.16",),
}
_EMPTY_ADAPTERS = (
    "PEFT {version} saves empty adapters (adapter_model.safetensors without a tensor) of a model whose blocks are "
    "units, on torch's class too, as the names of modules have those of units in them. Load the full state dict into "
    "the model made anew and save_pretrained() that (docs/integrations.md), or use PEFT 0.20"
)
# Trainer -> (first release, what it does worse, although it was tested)
BREAKS = {"peft": ((0, 21), _EMPTY_ADAPTERS)}

_originals: dict[str, ModuleType] = {}  # name of a module in sys.modules that is a _Both now -> torch's module
installed = Lifetime("from `install(runtime=True)` to `uninstall()`")
_warned: set[str] = set()  # names of trainers
_TEST = "tests/fsdp/wrapper/test_fsdp_substitute.py"


class _Both(ModuleType):
    """A module with the names of torch's module ``original``, except for ``ours``.

    Setting or deleting a name does the same in ``original``, because torch's functions read their names there.
    """

    def __init__(self, original: ModuleType, **ours: Any):
        super().__init__(original.__name__)
        vars(self).update(vars(original), **ours)
        _originals[self.__name__] = original

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        setattr(_originals[self.__name__], name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        delattr(_originals[self.__name__], name)


def _get_fsdp_handles(module: nn.Module) -> list[Any]:
    """torch's function of this name, for our units. torch's own modules keep torch's function."""
    handles = [state._handle for state in FullyShardedDataParallel.fsdp_modules(module)]
    return [handle for handle in handles if handle is not None]


@installed.change("torch.distributed.fsdp:FullyShardedDataParallel", test=_TEST)
def _bind() -> Iterator[None]:
    """Let all names of torch's class mean flatparam's.

    At the end the names of modules of torch that were imported since mean torch's class again too. Other modules that
    imported the class since then keep flatparam's, as do imports from flatparam itself.
    """
    bound = [place for place in names_of(TorchsFSDP) if not place[0].__name__.startswith(_KEEP)]
    for module, attribute in bound:
        setattr(module, attribute, FullyShardedDataParallel)
    _set(_Both(torch_file, **{NAME: FullyShardedDataParallel}))
    states = FullyShardedDataParallel.fsdp_modules
    _set(_Both(torch_traversal, _get_fsdp_states=states, _get_fsdp_handles=_get_fsdp_handles))
    FullyShardedDataParallel.is_in_place_of_torchs = True
    yield
    FullyShardedDataParallel.is_in_place_of_torchs = False
    _set(torch_file)
    _set(torch_traversal)
    since = [place for place in names_of(FullyShardedDataParallel) if place[0].__name__.split(".")[0] == "torch"]
    for module, attribute in (*bound, *since):
        if getattr(module, attribute, None) is FullyShardedDataParallel:
            setattr(module, attribute, TorchsFSDP)


def _warn_of_version(name: str) -> None:
    version = str(getattr(sys.modules[name], "__version__", "of no version"))
    tested = TESTED[name]
    if not f"{version}.".startswith(tuple(f"{release}." for release in tested)):
        warnings.warn(
            f"flatparam's FullyShardedDataParallel is in the place of torch's for {name} {version}. It was tested with "
            f"{name} {' and '.join(tested)}: compare a short run with flatparam.install(), which keeps torch's class",
            stacklevel=2,
        )
    since, what = BREAKS.get(name, ((), ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if what and (numbers is None or tuple(map(int, numbers.groups())) >= since):
        warnings.warn(what.format(version=version), stacklevel=2)


def _watch(name: str) -> None:
    @installed.change(name, test=_TEST)
    def warn() -> Iterator[None]:
        """Warn once of a trainer of another version than was tested, now or when it is imported."""
        if name not in _warned and is_first_rank():
            _warned.add(name)
            _warn_of_version(name)
        yield


for _name in TESTED:
    _watch(_name)


def is_installed() -> bool:
    """Whether ``torch.distributed.fsdp.FullyShardedDataParallel`` is flatparam's class now."""
    return getattr(torch_package, NAME) is FullyShardedDataParallel


def _set(module: ModuleType) -> None:
    """Let all ways of import give ``module``: ``sys.modules`` and the attribute of torch's package."""
    sys.modules[module.__name__] = module
    setattr(torch_package, module.__name__.split(".")[-1], module)
