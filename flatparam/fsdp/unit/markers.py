"""Marker properties that raise: they stop tools that do not know our class before these read a shard.

Each such tool looks for a property on every module. ``Wrapper`` derives from ``RefusingMarkers``. It also asks this
file to check ``save_pretrained`` of the module in it, and ``interop/patches.py`` to check those of libraries.
``interop/patches.py`` covers the functions of tools that look for no property.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ...common.torch_private import REGISTRY_KEY
from ..errors import StateError
from .registry import sharded_now

STATES = (
    "Save model.state_dict(), which is whole on every rank, with any tool, and optimizer.state_dict(), which is this "
    "rank's part, with torch.save() in a file for each rank"
)

known_to_torch: set[str] = set()  # modules of torch that know our class, since wrapper/dcp_helpers.py changed them


class RefusingMarkers:
    """The marker properties of other tools. Reading one raises."""

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _MARKS]  # getattr() of each name in dir() must work

    @property
    def _fqn_modifiers(self) -> NoReturn:
        """The marker of ``torch.distributed.checkpoint.state_dict``.

        Raises: StateError; AttributeError, as for any missing name, once that module knows our class.
        """
        if "torch.distributed.checkpoint.state_dict" in known_to_torch:
            raise AttributeError("_fqn_modifiers")
        raise StateError(
            "get_state_dict() and the like of torch.distributed.checkpoint.state_dict do not know "
            f"{_name(self)} of flatparam's FullyShardedDataParallel: they would take this rank's shards of optimizer "
            f"state for the whole. {STATES}"
        )

    def _refuse_composing(self) -> NoReturn:
        """The marker of torch's FSDP, its functions on whole trees, ``fully_shard`` and ``replicate``."""
        raise StateError(
            "torch's FullyShardedDataParallel, fully_shard and their functions (summon_full_params, state_dict_type, "
            f"optim_state_dict) do not know {_name(self)} of flatparam's FullyShardedDataParallel: they would shard "
            "its shards, or pass it by. Wrap the whole tree with one of them, and call the functions of that class"
        )


_MARKS = ("_fqn_modifiers", REGISTRY_KEY)
setattr(RefusingMarkers, REGISTRY_KEY, property(RefusingMarkers._refuse_composing))


def of_whole_values(save: Callable[..., Any], wrapper: Any = None) -> Callable[..., Any]:
    """Return ``save``, a method ``save_pretrained``, which now refuses to save pieces.

    Libraries give this name to a method that saves its module's ``state_dict()``, unless it gets another one. That of
    a module in a unit has pieces of parameters, and PEFT finds no name in it.
    ``wrapper``: what has the module of ``save``, a bound method; None: ``save`` takes the module.
    """

    @functools.wraps(save)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        module = args[0] if wrapper is None else wrapper
        given = any(isinstance(value, Mapping) for value in (*args, kwargs.get("state_dict")))
        for unit, _ in () if given else sharded_now(module.parameters()):
            raise StateError(
                f"save_pretrained(): the parameters of {unit.name} are this rank's pieces, which would be saved as "
                "if they were whole, or left out. Make the whole values on every rank: state = model.state_dict() of "
                "the wrapper. Then, on rank 0, call save_pretrained(folder, state_dict=state); for adapters of PEFT "
                "load them into the model made anew, and save that"
            )
        return save(*args, **kwargs)

    return save_pretrained


def _name(wrapper: Any) -> str:
    unit = vars(wrapper).get("_unit")
    return "a unit" if unit is None else unit.name
