"""Names of modules and parameters: remove the parts that wrappers add, join them, print them.

All rooms of ``fsdp`` use it. It knows no unit: it recognizes wrappers by the parts of names that they add.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..common.torch_private import _p_assert

FLAT_PARAM = "_flat_param"
FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"
FSDP_PREFIX = FSDP_WRAPPED_MODULE + "."
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


def clean_tensor_name(name: str) -> str:
    """Return the FQN of ``name`` in the unwrapped model."""
    return name.replace(FSDP_PREFIX, "").replace(_CHECKPOINT_PREFIX, "")


def without_wrappers(path: str) -> str:
    """Return a module's path as in state dicts: without the parts that units and checkpoint wrappers add."""
    return clean_tensor_name(path + ".").rstrip(".")


def bare_names(module: nn.Module) -> Callable[[str], str]:
    """Return a function that maps the name of a parameter, buffer or module in ``module`` to its bare name.

    Bare names are without the parts of units, checkpoint wrappers, torch.compile (``_orig_mod``) and DDP (``module``).
    Source of the behaviour: the names of ``torch.distributed.checkpoint.state_dict``.
    """
    inside: set[str] = set()  # paths whose last part is left out of bare names
    for path, inner in module.named_modules(remove_duplicate=False):
        clean = without_wrappers(path)
        if isinstance(inner, DistributedDataParallel):
            inside.add(join(clean, "module"))
        elif type(inner).__name__ == "OptimizedModule":  # the import of this class takes seconds
            inside.add(join(clean, "_orig_mod"))

    def bare(name: str) -> str:
        name = without_wrappers(name)
        if not inside:
            return name
        parts, path = [], ""
        for part in name.split("."):
            path = join(path, part)
            if path not in inside:
                parts.append(part)
        return ".".join(parts)

    return bare


def without_units(name: str) -> str:
    """Return ``name`` without the parts that units add; the parts of checkpoint wrappers stay."""
    return name.replace(FSDP_PREFIX, "")


def join(path: str, name: str) -> str:
    """Return the name of attribute ``name`` of the module at ``path``; an empty ``path`` is the root."""
    return f"{path}.{name}" if path else name


def printable(text: str) -> str:
    """Return ``text`` with lone surrogates, which UTF-8 cannot encode, escaped as ``\\udc80`` and the like."""
    return text.encode(errors="backslashreplace").decode()


def p_assert(cond: Any, s: str, raise_assertion_error: bool = True) -> None:
    """torch 1.12's ``p_assert``: unless ``cond``, print ``s`` and the stack and raise AssertionError, also with -O."""
    _p_assert(cond, s, raise_assertion_error)


def listed(names: list[str], most: int = 8) -> list[str]:
    """Return the first ``most`` names for a message, then the number of the others, such as "3 more"."""
    return [*names[:most], f"{len(names) - most} more"] if len(names) > most else names
