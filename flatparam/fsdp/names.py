"""Names of modules and parameters, and the parts of them that wrappers add."""

from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from ..common.torch_private import _p_assert

FLAT_PARAM = "_flat_param"
FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"
FSDP_PREFIX = FSDP_WRAPPED_MODULE + "."
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


def clean_tensor_name(name: str) -> str:
    """``name`` as the unwrapped model has it."""
    return name.replace(FSDP_PREFIX, "").replace(_CHECKPOINT_PREFIX, "")


def without_wrappers(path: str) -> str:
    """A module's path without the parts that units and checkpoint wrappers add, and take away in state dicts."""
    return f"{path}.".replace(FSDP_PREFIX, "").replace(_CHECKPOINT_PREFIX, "").rstrip(".")


def bare_names(module: nn.Module) -> Callable[[str], str]:
    """Returns a function from a name in ``module``, of a parameter, buffer or module, to its name in the bare model.

    The bare model has no units, checkpoint wrappers, compiled modules (``_orig_mod``) and DDP (``module``). Source of
    the behaviour: the names of ``torch.distributed.checkpoint.state_dict``.
    """
    inside: set[str] = set()  # paths of modules that are not named
    for path, inner in module.named_modules(remove_duplicate=False):
        clean = _clean_path(path)
        if isinstance(inner, DistributedDataParallel):
            inside.add(join(clean, "module"))
        elif type(inner).__name__ == "OptimizedModule":  # to import its class takes seconds
            inside.add(join(clean, "_orig_mod"))

    def bare(name: str) -> str:
        name = _clean_path(name)
        if not inside:
            return name
        parts, path = [], ""
        for part in name.split("."):
            path = join(path, part)
            if path not in inside:
                parts.append(part)
        return ".".join(parts)

    return bare


def _clean_path(path: str) -> str:
    return clean_tensor_name(path + ".").rstrip(".")


def without_units(name: str) -> str:
    """``name`` without the parts that units add to it; those of checkpoint wrappers stay."""
    return name.replace(FSDP_PREFIX, "")


def join(path: str, name: str) -> str:
    """The name of what is called ``name`` in the module at ``path``."""
    return f"{path}.{name}" if path else name


def printable(text: str) -> str:
    """``text`` with what UTF-8 cannot encode, lone surrogates of a name, as ``\\udc80`` and the like."""
    return text.encode(errors="backslashreplace").decode()


def p_assert(cond: Any, s: str, raise_assertion_error: bool = True) -> None:
    """torch 1.12's: print ``s`` and the stack, and raise AssertionError, unless ``cond`` holds; also under ``-O``."""
    _p_assert(cond, s, raise_assertion_error)


def listed(names: list[str], most: int = 8) -> list[str]:
    """The first of ``names``, and how many more there are: for a message."""
    return [*names[:most], f"{len(names) - most} more"] if len(names) > most else names
