"""Full parameters outside of forward and backward: gathered into memory of their own, in the shards' own precision."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from .unit import Original, Segment, Unit

_active: "list[Summoned]" = []  # what is summoned now, in this process


class StateError(RuntimeError, AssertionError, ValueError):
    """A call at a time or on a unit where it may not be made; of all the types that torch's versions raise."""


def refuse_unreduced(units: Iterable[Unit], what: str) -> None:
    """Refuse ``what`` for gradients of micro-batches that are not reduced yet. Those cleared since count as none.

    Raises: StateError naming a unit that has some.
    """
    for unit in units:
        if unit.step.settle():
            raise StateError(
                f"{what}: gradients of {unit.name} come from no_sync() and are not reduced over the ranks yet, so each "
                "rank has its own, and those of synced backwards before are put aside: run the last micro-batch "
                "outside of no_sync() first, or clear the gradients"
            )


def refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before any optimizer's step: refuse one whose result the end of ``summon_full_params`` would throw away.

    Raises: StateError naming the parameter and its unit.
    """
    for state in _active:
        unit = state.unit
        if state.writeback and state.with_grads and unit.options.use_orig_params:
            continue  # whole parameters with whole gradients, written back
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"] if param.grad is not None}
        for segment, param in unit.parameters():
            if id(param) in stepped:
                fqn = next((o.fqn for o in segment.originals if o.param is param), "the flat parameter")
                raise StateError(
                    f"optimizer.step() inside summon_full_params(): `{fqn}` of {unit.name} is whole there, and its "
                    "optimizer steps the shard, so the step would be lost: step outside of it (or, with "
                    "use_orig_params=True, summon with_grads=True and writeback=True for an optimizer without state)"
                )


class Summoned:
    """The full parameters of one unit, from ``enter`` to ``leave``.

    Args: ``writeback``: keep this rank's shard of what was written; ``rank0_only``: only rank 0 of the group that
    shares the unit sees them; ``offload_to_cpu``; ``with_grads``: ``.grad`` too.
    """

    def __init__(
        self,
        unit: Unit,
        *,
        writeback: bool,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ):
        self.unit = unit
        self.writeback = writeback
        self.shown = not rank0_only or unit.options.placement.rank == 0
        self.offload_to_cpu = offload_to_cpu
        self.with_grads = with_grads
        self.wholes: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self.had_views = unit.step.shows_views

    @torch.no_grad()
    def enter(self) -> None:
        """Gather, and let the modules have full parameters. A collective call."""
        unit = self.unit
        for segment in unit.segments:
            whole = segment.gather(segment.flat.detach())
            grad = self._gather_gradient(segment) if self.with_grads else None
            if self.shown:
                self.wholes.append(whole.cpu() if self.offload_to_cpu else whole)
                self.gradients.append(grad.cpu() if grad is not None and self.offload_to_cpu else grad)
            del whole, grad
        unit.summoned = self
        _active.append(self)
        if not self.shown:
            return
        unit.unregister_flat()
        unit.step.put(False)
        for segment, whole, grad in zip(unit.segments, self.wholes, self.gradients, strict=True):
            for original, value in zip(segment.originals, segment.unsharded(whole), strict=True):
                self._show(original, value)
            if grad is not None:
                for original, value in zip(segment.originals, segment.unsharded(grad), strict=True):
                    param = self._param(original)
                    if param.requires_grad:
                        param.grad = value

    def _param(self, original: Original) -> nn.Parameter:
        place = original.names[0]
        return getattr(place.module, place.name)

    def _show(self, original: Original, value: Tensor) -> None:
        if self.unit.options.use_orig_params:
            if self.with_grads:
                original.param.grad = None
            original.param.data = value
            return
        param = nn.Parameter(value, requires_grad=original.param.requires_grad)
        for place in original.names:
            vars(place.module).pop(place.name, None)
            place.module.register_parameter(place.name, param)

    def _gather_gradient(self, segment: Segment) -> Tensor | None:
        """The unsharded gradient; ranks without one count as zeros, None if no rank has any."""
        own = gradient_of(self.unit, segment)
        if segment.is_sharded:
            some = torch.tensor(float(own is not None), device=segment.device)
            dist.all_reduce(some, group=segment.placement.optim)
            if not some.item():
                return None
        elif own is None:
            return None
        shard = torch.zeros_like(segment.flat) if own is None else own
        return segment.gather(shard)

    @torch.no_grad()
    def leave(self) -> None:
        """Write back what was asked for, and let the modules have what they had before."""
        unit = self.unit
        unit.summoned = None
        _active.remove(self)
        if not self.shown:
            return
        values = [
            (segment, whole, [getattr(item.names[0].module, item.names[0].name) for item in segment.originals])
            for segment, whole in zip(unit.segments, self.wholes, strict=True)
        ]
        for i, (segment, whole, params) in enumerate(values):
            if self.writeback or not segment.is_sharded:
                for param, place in zip(params, segment.unsharded(whole), strict=True):
                    if param.data_ptr() != place.data_ptr() or param.device != place.device:
                        place.copy_(param)
                shard, mine = segment.flat.detach(), segment.own(whole).to(segment.flat.device)
                changed = not torch.equal(shard, mine)
                if changed:  # what was not written is no change to a graph that waits for backward
                    shard.copy_(mine)
                placement = unit.options.placement
                if changed or placement.param is placement.optim:  # else the ranks agree on what has changed
                    unit.filled()
            grad = self.gradients[i]
            if grad is not None and self.writeback:
                for param, place in zip(params, segment.unsharded(grad), strict=True):
                    if param.grad is not None and param.grad.data_ptr() != place.data_ptr():
                        place.copy_(param.grad)
        for segment in unit.segments:
            if unit.options.use_orig_params:
                with_grads = [original.param.grad for original in segment.originals]
                for original in segment.originals:
                    original.param.grad = None
                segment.point_at_pieces()
                if not self.with_grads:
                    for original, kept in zip(segment.originals, with_grads, strict=True):
                        set_gradient(original.param, kept)
            else:
                for original in segment.originals:
                    for name in original.names:
                        name.module._parameters.pop(name.name, None)
        if self.with_grads:
            self._put_gradients_back()
        unit.register_flat()
        unit.step.put(self.had_views or not unit.options.use_orig_params)

    def _put_gradients_back(self) -> None:
        for segment, grad in zip(self.unit.segments, self.gradients, strict=True):
            if grad is not None:
                shard = segment.own(grad).to(segment.flat.device, copy=segment.is_sharded)
                put_gradient(self.unit, segment, shard)


def gradient_of(unit: Unit, segment: Segment) -> Tensor | None:
    """The gradient of the shard, from wherever it is: ``[shard_numel]``, or None."""
    if not unit.options.use_orig_params:
        return segment.flat.grad
    have = [original.param.grad for original in segment.originals]
    if all(grad is None for grad in have):
        return None
    dtype = next(grad.dtype for grad in have if grad is not None)
    shard = torch.zeros(segment.layout.shard_numel, dtype=dtype, device=segment.flat.device)
    for grad, here in zip(have, segment.here(), strict=True):
        if grad is not None and here.numel >= 0:
            here.of(shard).copy_(grad)
    return shard


def put_gradient(unit: Unit, segment: Segment, shard: Tensor) -> None:
    """Let ``shard`` be the gradient of the segment's shard."""
    if not unit.options.use_orig_params:
        set_gradient(segment.flat, shard)
        return
    for here in segment.here():
        if here.numel >= 0 and here.original.param.requires_grad:
            set_gradient(here.original.param, here.of(shard))


def set_gradient(param: nn.Parameter, grad: Tensor | None) -> None:
    """``param.grad = grad``, also in another dtype or shape than torch allows."""
    from .. import _C

    _C.set_grad(param, grad)


@contextlib.contextmanager
def summon(units: Iterable[Unit], **flags: Any) -> Iterator[None]:
    """Full parameters of ``units`` within the block. A collective call."""
    entered: list[Summoned] = []
    try:
        for unit in units:
            state = Summoned(unit, **flags)
            state.enter()
            entered.append(state)
        yield
    finally:
        for state in reversed(entered):
            state.leave()
