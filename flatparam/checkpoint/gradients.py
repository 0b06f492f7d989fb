"""Gradients between micro-batches: sums that each rank has of its own, and what was reduced beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..fsdp.sharding.flat_param import FlatParam
from ..fsdp.unit.local_params import LocalParam
from ..fsdp.unit.summon import refuse_unreduced
from ..fsdp.unit.unit import Unit
from .errors import CheckpointError
from .index import Index
from .reading import OfRank, Source

Kept = dict[str, tuple[int, Tensor, bool]]  # by parameter: its elements from where on; whether it is owed: see set_kept


def _place(held: LocalParam, flat_param: FlatParam) -> tuple[int, int, int]:
    """Of a parameter in what no_sync keeps here: where it begins there, its first element there, and how many.

    That is the whole unsharded gradient; nested: the part that this rank has of it over the ranks of ``param``.
    """
    placement, layout = flat_param.placement, flat_param.layout
    part = layout.padded_numel // (placement.param_shards if placement.outer is not None else 1)
    first = part * placement.param_rank if placement.outer is not None else 0
    offset, numel = layout.offsets[held.number], flat_param.originals[held.number].shape.numel()
    begin, end = max(first, offset), min(first + part, offset + numel)
    return (begin - first, begin - offset, end - begin) if begin < end else (0, 0, 0)


def taken(held: Iterable[LocalParam], units: list[Unit], what: str, saves: bool) -> _C.Block:
    """Gives ``Kept``, what no_sync has kept. Within, ``.grad`` is what was reduced, of backwards before.

    ``saves``: else it is refused. Raises: StateError, ValueError naming a unit.
    """

    def begin() -> Kept:
        if not saves:
            refuse_unreduced(units, what)
        found: Kept = {}
        for unit in units:
            unit.core.note_user_edits(False)
        for one in held if saves else ():
            if one.unit is not None and one.flat_param is not None:
                kept = one.unit.core.accumulated()[one.unit.flat_params.index(one.flat_param)]
                if kept is not None:
                    at, start, numel = _place(one, one.flat_param)
                    shown = one.owner.grad is not None and not one.owner.requires_grad
                    found[one.name] = (start, kept.narrow(0, at, numel), shown)
        for unit in units:
            hidden.append(unit)
            unit.core.show_accumulated(False)
        return found

    def end() -> None:
        for unit in hidden:
            unit.core.show_accumulated(True)

    hidden: list[Unit] = []
    return _C.Block(begin, end)


class Sums:
    """What units are to have kept. Raises: CheckpointError naming the unit for sums that do not fit the ranks here.

    ``told``: of this rank's parameters, the first element and how many there are, and whether it is owed; ``values``:
    those elements.
    """

    def __init__(self, held: Iterable[LocalParam], told: Mapping[str, Any], values: Mapping[str, Tensor]):
        self._found: dict[Unit, list[tuple[Tensor | None, list[bool]]]] = {}
        for one in held:
            start, numel, owed = told.get(one.name, (0, 0, False))
            if one.unit is None or one.flat_param is None:
                if one.name in told:
                    raise _misfit(one.name, "no unit has that here")
                continue
            at, first, here = _place(one, one.flat_param)
            if one.name in told and (start, numel) != (first, here):
                raise _misfit(
                    one.name,
                    f"the rank had {numel} elements of its sum from {start} on, and in {one.unit.name} it has {here} "
                    f"from {first} on",
                )
            parts = self._found.setdefault(one.unit, [(None, []) for _ in one.unit.flat_params])
            k = one.unit.flat_params.index(one.flat_param)
            kept, flags = parts[k]
            if one.name in told and kept is None:
                kept = _zeros(one.flat_param)
            if numel and kept is not None:
                kept.narrow(0, at, numel).copy_(values[f"kept.{one.name}"])
            if one.flat_param.use_orig_params or not flags:
                flags.append(False)
            flags[-1] = flags[-1] or bool(owed)
            parts[k] = kept, flags

    def put(self) -> None:
        """Let the units have them, instead of what they have kept, without showing it."""
        for unit, parts in self._found.items():
            unit.core.set_accumulated([kept for kept, _ in parts], [tuple(flags) for _, flags in parts])

    def show(self) -> None:
        """The units' ``.grad`` are what was reduced: show the sums, where there are some."""
        for unit in self._found:
            unit.core.show_accumulated(True)


def _zeros(flat_param: FlatParam) -> Tensor:
    """A new sum of what ``flat_param`` keeps."""
    placement, dtype = flat_param.placement, flat_param.flat.dtype
    low = dtype.itemsize < torch.float32.itemsize and dtype.is_floating_point
    numel = flat_param.layout.padded_numel // (placement.param_shards if placement.outer is not None else 1)
    return torch.zeros(numel, dtype=torch.float32 if low else dtype, device=flat_param.device)


def _misfit(name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint was saved between micro-batches, and the sum of gradients of `{name}` does not fit: {why}. "
        "Load it with the ranks, strategy and groups that saved it, and save after the optimizer's step; or load the "
        "model without the optimizer"
    )


def sums_of(held: Iterable[LocalParam], index: Index | None, source: Source, me: int, size: int) -> Sums:
    """What the checkpoint has of them for rank ``me`` of ``size``. Raises: CheckpointError."""
    ranks = [] if index is None else index.ranks
    name = next((name for rank in ranks for name in rank.get("kept", {})), None)
    if name is None:
        return Sums(held, {}, {})
    if len(ranks) != size:
        raise _misfit(name, f"each of {len(ranks)} ranks has its own, and here are {size}")
    return Sums(held, ranks[me].get("kept", {}), OfRank(source, me))
