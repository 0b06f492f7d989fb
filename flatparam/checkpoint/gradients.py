"""Save and load the accumulated gradients of ``no_sync``: sums of micro-batches that are not reduced yet.

Each rank has a sum over other data. So each rank saves its sum, and only the same number of ranks with the same
layout can load it. ``.grad`` may show the accumulated gradient while a deferred reduced gradient lies beside it: a save
takes both.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from .. import _C
from ..fsdp.sharding.flat_param import FlatParam
from ..fsdp.unit.local_params import LocalParam, UnitParam
from ..fsdp.unit.summon import refuse_unreduced
from ..fsdp.unit.unit import Unit
from .errors import CheckpointError
from .index import Index
from .reading import OfRank, Source

# FQN -> (first element of the parameter, elements, whether it is the frozen share)
Kept = dict[str, tuple[int, Tensor, bool]]


def _place(held: UnitParam) -> tuple[int, int, int]:
    """Return where a parameter lies in this rank's accumulated gradient of its flat parameter.

    The accumulated gradient is the unsharded gradient; with nested strategies, this rank's part over ``param_shards``.
    Returns: ``(offset in it, first element of the parameter that is there, number of elements)``; zeros if none is.
    """
    placement, layout = held.flat_param.placement, held.flat_param.layout
    part = _numel(held.flat_param)
    first = part * placement.param_rank if placement.outer is not None else 0
    offset, numel = layout.offsets[held.number], held.original.shape.numel()
    begin, end = max(first, offset), min(first + part, offset + numel)
    return (begin - first, begin - offset, end - begin) if begin < end else (0, 0, 0)


def taken(held: Iterable[LocalParam], units: list[Unit], what: str, saves: bool) -> _C.Block:
    """Return a block that gives ``Kept``, the accumulated gradients: views of the units' memory.

    In the block ``.grad`` shows the reduced gradients. At its end, also after an exception, ``.grad`` is as before.
    ``saves``: False: ``Kept`` is empty, and accumulated gradients are refused. The block's begin raises: StateError,
    ValueError naming a unit.
    """

    def begin() -> Kept:
        if not saves:
            refuse_unreduced(units, what)
        found: Kept = {}
        sums: dict[FlatParam | None, Tensor | None] = {}
        for unit in units:
            unit.core.note_user_edits(False)
            sums |= zip(unit.flat_params, unit.core.accumulated(), strict=True)
        for one in held if saves else ():
            kept = sums.get(one.flat_param)
            if isinstance(one, UnitParam) and kept is not None:
                at, start, numel = _place(one)
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
    """The accumulated gradients that a load gives to the units of rank ``me`` of ``size``.

    The constructor reads them and changes no unit. Raises: CheckpointError naming the parameter, if they do not fit the
    layout here.
    """

    def __init__(self, held: Iterable[LocalParam], index: Index | None, source: Source, me: int, size: int):
        ranks = [] if index is None else index.ranks
        name = next((name for rank in ranks for name in rank.get("kept", {})), None)
        if name is not None and len(ranks) != size:
            raise _misfit(name, f"each of {len(ranks)} ranks has its own, and here are {size}")
        told, values = {} if name is None else ranks[me].get("kept", {}), OfRank(source, me)
        self._sums: dict[FlatParam, Tensor] = {}
        self._frozen: dict[FlatParam, list[bool]] = {}  # one for each tensor that an optimizer steps
        self._units: dict[Unit, None] = {}  # in order
        for one in held:
            start, numel, is_frozen = told.get(one.name, (0, 0, False))
            if not isinstance(one, UnitParam):
                if one.name in told:
                    raise _misfit(one.name, "no unit has that here")
                continue
            self._units[one.unit] = None
            flags = self._frozen.setdefault(one.flat_param, [])
            if one.flat_param.use_orig_params or not flags:
                flags.append(False)
            flags[-1] = flags[-1] or bool(is_frozen)
            at, first, here = _place(one)
            if one.name in told and (start, numel) != (first, here):
                raise _misfit(
                    one.name,
                    f"the rank had {numel} elements of its sum from {start} on, and in {one.unit.name} it has {here} "
                    f"from {first} on",
                )
            if one.name in told and one.flat_param not in self._sums:
                self._sums[one.flat_param] = _zeros(one.flat_param)
            if numel:
                self._sums[one.flat_param].narrow(0, at, numel).copy_(values[f"kept.{one.name}"])

    def put(self) -> None:
        """Replace the units' accumulated gradients. ``.grad`` does not show them yet."""
        for unit in self._units:
            frozen = [tuple(self._frozen[flat_param]) for flat_param in unit.flat_params]
            unit.core.set_accumulated([self._sums.get(flat_param) for flat_param in unit.flat_params], frozen)

    def show(self) -> None:
        """Let ``.grad`` show the accumulated gradients where there are some. It holds the reduced gradients before."""
        for unit in self._units:
            unit.core.show_accumulated(True)


def _zeros(flat_param: FlatParam) -> Tensor:
    """Return zeros of the size and dtype of ``flat_param``'s accumulated gradient; float32 for lower precisions."""
    dtype = flat_param.flat.dtype
    low = dtype.itemsize < torch.float32.itemsize and dtype.is_floating_point
    return torch.zeros(_numel(flat_param), dtype=torch.float32 if low else dtype, device=flat_param.device)


def _numel(flat_param: FlatParam) -> int:
    placement = flat_param.placement
    return flat_param.layout.padded_numel // (placement.param_shards if placement.outer is not None else 1)


def _misfit(name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint was saved between micro-batches, and the sum of gradients of `{name}` does not fit: {why}. "
        "Load it with the ranks, strategy and groups that saved it, and save after the optimizer's step; or load the "
        "model without the optimizer"
    )
