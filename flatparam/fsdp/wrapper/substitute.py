"""Putting flatparam's FullyShardedDataParallel in the place of torch's, and taking it away again.

Whoever imports torch's class by one of its paths then gets flatparam's, and so do modules that imported it before.
torch's own runtime goes on with its class: models that it has wrapped already train on, and are told apart.
"""

import functools
import re
import sys
import warnings
from types import ModuleType
from typing import Any

import torch.distributed.fsdp as torch_package
import torch.distributed.fsdp.fully_sharded_data_parallel as torch_file
import torch.nn as nn

from ...common.after_import import after_import, names_of
from ...common.torch_private import TorchsFSDP, torch_traversal
from .fully_sharded import FullyShardedDataParallel

NAME = "FullyShardedDataParallel"
# Modules that keep torch's class: its own runtime, ours, and the helpers that wrapper/dcp_helpers.py has taught both
_KEEP = ("torch.distributed.fsdp.", "flatparam.", "torch.distributed.checkpoint.state_dict")

# docs/integrations.md; the last of each is what `make integrations` installs
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
# What releases that were tested do worse, and from which on
BREAKS = {"peft": ((0, 21), _EMPTY_ADAPTERS)}

_originals: dict[str, ModuleType] = {}
_bound: list[tuple[ModuleType, str]] = []  # where torch's class was


class _Both(ModuleType):
    """A module of torch's, but for what is ``ours``. What is set in it is set in torch's, whose functions read it."""

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
    """As torch's function of this name, of our units: torch's own modules keep theirs."""
    handles = [state._handle for state in FullyShardedDataParallel.fsdp_modules(module)]
    return [handle for handle in handles if handle is not None]


def install() -> None:
    """``flatparam.install(runtime=True)``."""
    if is_installed():
        return
    _bound.extend(place for place in names_of(TorchsFSDP) if not place[0].__name__.startswith(_KEEP))
    for module, attribute in _bound:
        setattr(module, attribute, FullyShardedDataParallel)
    _set(_Both(torch_file, **{NAME: FullyShardedDataParallel}))
    states = FullyShardedDataParallel.fsdp_modules
    _set(_Both(torch_traversal, _get_fsdp_states=states, _get_fsdp_handles=_get_fsdp_handles))
    FullyShardedDataParallel.is_in_place_of_torchs = True
    for name in TESTED:
        _watch(name)


@functools.cache
def _watch(name: str) -> None:
    """Look at the version of a trainer once it is imported. It may have been."""
    after_import(name, _warn_of_version)


def _warn_of_version(trainer: ModuleType) -> None:
    name, version = trainer.__name__, str(getattr(trainer, "__version__", "of no version"))
    if not is_installed():
        return
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


def uninstall() -> None:
    """Let the names that ``install()`` changed mean torch's class again, and those in what was imported of torch since.

    Other modules that have imported the name since keep flatparam's class, as do those that imported it from flatparam.
    """
    FullyShardedDataParallel.is_in_place_of_torchs = False
    _set(torch_file)
    _set(torch_traversal)
    since = [place for place in names_of(FullyShardedDataParallel) if place[0].__name__.split(".")[0] == "torch"]
    for module, attribute in (*_bound, *since):
        if getattr(module, attribute, None) is FullyShardedDataParallel:
            setattr(module, attribute, TorchsFSDP)
    _bound.clear()


def is_installed() -> bool:
    """Whether torch's names mean flatparam's class."""
    return getattr(torch_package, NAME) is FullyShardedDataParallel


def _set(module: ModuleType) -> None:
    sys.modules[module.__name__] = module
    setattr(torch_package, module.__name__.split(".")[-1], module)
