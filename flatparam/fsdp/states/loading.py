"""Rules for all loads: which dtype may be loaded into which, and how ranks agree that all load the same, or nothing.

State dicts, optimizer states, safetensors files and checkpoints use these. Nothing here writes a value.
"""

import hashlib
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..desync.checked_collectives import check_exchanges, gather_objects
from ..desync.events import SetupCollective
from ..names import clean_tensor_name, join, printable
from ..unit.local_params import unit_paths
from ..unit.unit import Unit
from .safetensors_files import DTYPES, PACKED

Values = dict[str, tuple[Unit | None, str]]  # FQN -> (its unit, or None; a digest of the value to be loaded)


def note_filled(module: nn.Module, names: Container[str], name_of: Callable[[str], str] = clean_tensor_name) -> None:
    """After a load: note in the units of ``module`` that the parameters in ``names`` have values, equal on all ranks.

    ``name_of``: maps a name in ``module`` to the name that ``names`` uses.
    """
    for unit, paths in unit_paths(module).items():

        def is_loaded(fqn: str, paths: list[str] = paths) -> bool:
            return any(name_of(join(path, fqn)) in names for path in paths)

        others = unit.without(is_loaded)
        unit.filled(others)
        unit.loaded(others)


def kind_of(dtype: torch.dtype) -> str:
    """Return the kind of ``dtype``: floating, complex or integer (bool too). No load converts between kinds."""
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def may_become(source: torch.dtype | None, dtype: torch.dtype) -> bool:
    """Whether values of dtype ``source`` in a file may be loaded into ``dtype``. ``source`` None: unknown to torch.

    Packed numbers and integers need the same dtype: torch cannot convert the first, and the second could overflow.
    """
    if source == dtype or source is None or DTYPES[PACKED] in (source, dtype):
        return source == dtype
    return kind_of(source) == kind_of(dtype) != "integer"


def agree_on_loading(what: str, units: list[Unit], error: Exception | None, values: Values) -> None:
    """Let all ranks that share a unit agree that ``what`` may go on. A collective call over the units' groups.

    ``error``: of a rank that cannot load, or None. ``values``: digests of the values that it would load; each group
    compares the values of its units, and those without a unit. A rank that has failed, or fails to agree, is reported
    over all its groups, so that no rank loads alone.
    Raises: RuntimeError on all these ranks, naming the first rank that failed or differs, and the parameter.
    """
    me = dist.get_rank() if dist.is_initialized() else 0
    failed = (me, f"{type(error).__name__}: {error}", None) if error is not None else None
    error = None  # its traceback holds the caller's frame
    groups: dict[int, tuple[Any, set[Unit]]] = {}
    for unit in units:
        for group in unit.options.placement.compared:
            groups.setdefault(id(group), (group, set()))[1].add(unit)
        for flat_param in unit.flat_params:  # an unpickled unit has not done so, as one rank alone may load a pickle
            check_exchanges(unit.options.placement.compared, flat_param.device)
    # Twice: a failure that a rank hears of in a later group reaches the earlier groups too
    for group, sharing in [*groups.values(), *groups.values()]:
        here = {name: value for name, (unit, value) in values.items() if unit is None or unit in sharing}
        digest = hashlib.sha256(repr(sorted(here.items())).encode()).hexdigest()
        everyone = gather_objects(SetupCollective.LOADS, failed or (me, None, digest), group)
        failed = next((other for other in everyone if other[1] is not None), None)
        if failed is None and len({other[2] for other in everyone}) > 1:
            ranks = [other[0] for other in everyone]
            failed = _first_difference(ranks, gather_objects(SetupCollective.LOADS, here, group))
    if failed is not None:
        raise RuntimeError(printable(f"{what}: nothing was loaded: rank {failed[0]}: {failed[1]}"))


def _first_difference(ranks: list[int], everyone: list[dict[str, str]]) -> tuple[int, str, None]:
    first = everyone[0]
    for rank, other in zip(ranks, everyone, strict=True):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                said = f"`{name}` differs" if name != "the header" else "their headers differ"
                return rank, f"its values are not those of rank {ranks[0]}: {said}", None
    raise AssertionError("the ranks load the same, but have other digests of it")
