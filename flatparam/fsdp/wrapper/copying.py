"""The wrapper copied, pickled, and moved to another device or dtype."""

import copy
import copyreg
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from typing_extensions import Self

from ...common import optimizers
from ...common.pickling import PickledState, Reduced, as_flat_parameter, as_parameter, as_view, pickled_state
from ...common.tensors import watch_exports
from ...common.torch_private import leave_out_of_graphs
from ..desync import liveness
from ..desync.checked_collectives import settle
from ..desync.unit_ids import assign_loaded
from ..interop import patches
from ..unit.additions import seal, sealed, watch_registrations
from ..unit.base import Wrapper
from ..unit.summon import check_before_step, refuse_step, refuse_unreduced
from ..unit.unit import Unit, units_of
from . import dcp_helpers
from .arguments import first_name

_CLOSED = "_closed"  # in a pickle: the modules that nothing may be added to


def watch_torch() -> None:
    """Know what torch and other tools do with a wrapper, which is about to be made or loaded, and with its parameters.

    Raises: OrderError without the store of the process group.
    """
    optimizers.ask_before(refuse_step)
    optimizers.ask_before(check_before_step)
    optimizers.watch()
    watch_exports()
    leave_out_of_graphs()
    patches.watch()
    dcp_helpers.watch()
    watch_registrations()
    liveness.enter()


def pickled(state: dict[str, Any], units: Iterable[Unit]) -> PickledState:
    """``state`` of a wrapper; as long as it is referred to, the tensors of ``units`` have their pickled forms."""
    units = list(units)
    settle(flat_param for unit in units for flat_param in unit.flat_params)
    forms: list[tuple[Tensor, Any]] = []
    modules: list[nn.Module] = []
    for unit in units:
        for flat_param, views in zip(unit.flat_params, unit.core.views(), strict=True):
            flat = flat_param.flat
            forms.append((flat, functools.partial(as_flat_parameter, flat.detach(), flat.requires_grad)))
            for i, original in enumerate(flat_param.originals):
                forms.append((original.param, functools.partial(as_parameter, original.param)))
                if views is not None:
                    shown = functools.partial(_as_itself, original.param) if flat_param.use_orig_params else as_view
                    forms.append((views[i], shown))
        modules += unit.module.modules()
    return pickled_state(state, forms, modules)


def _itself(param: nn.Parameter) -> nn.Parameter:
    return param


def _as_itself(param: nn.Parameter) -> Reduced:
    """The form of a view that stands in a parameter's place: the parameter."""
    return _itself, (param,)


class Copies(Wrapper):
    """The part of the wrapper that makes others of it, or changes where it is."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with shards of its own, over the same groups; it has not run yet."""
        self._check_idle("deepcopy")
        wrappers = self.fsdp_modules(self)
        settle(flat_param for wrapper in wrappers for flat_param in wrapper._unit.flat_params)
        had_views = [wrapper._unit.core.shows_views for wrapper in wrappers]
        for wrapper in wrappers:
            wrapper._unit.sync_user_writes()
            wrapper._unit.core.put(False)
            for views in wrapper._unit.core.views():
                memo.update((id(view), torch.empty(0)) for view in views or ())  # the copy makes its own
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        try:
            for key, value in vars(self).items():
                left_out = key in ("_outer", "_hooked")
                vars(copied)[key] = None if left_out else copy.deepcopy(value, memo)
        finally:
            for wrapper, views_before in zip(wrappers, had_views, strict=True):
                wrapper._unit.core.put(views_before or not wrapper._use_orig_params)
        copied._hooked = self._hooked
        own = [memo.get(id(module), module) for module in sealed(self._unit, self.modules())]
        seal(copied._unit, own, copied._ignored_params)
        copied._hold_those_below()
        return copied

    def __copy__(self) -> Self:
        """It shares everything, as a shallow copy of a module does."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """This rank's shards and the modules, between two steps, without gradients; loaded by the same rank."""
        self._check_idle("pickling")
        for unit in units_of(self.modules()):
            unit.sync_user_writes()
        state = {**vars(self), "_outer": None, _CLOSED: sealed(self._unit, self.modules())}
        return copyreg.__newobj__, (type(self),), pickled(state, units_of(self.modules()))  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        watch_torch()
        own = state.pop(_CLOSED)
        vars(self).update(state)
        self._unit.come_alive()
        seal(self._unit, own, self._ignored_params)
        assign_loaded(self._unit, self._placement.groups)
        self._hold_those_below()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._check_idle_here("changing device or dtype")
        for wrapper in self.fsdp_modules(self):
            wrapper._check_stays(fn)
        unit = self._unit
        unit.sync_user_writes()
        unit.refuse_freed_gradients()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._use_orig_params:
            for flat_param in unit.flat_params:
                flat_param.flat.data = fn(flat_param.flat.data)
        unit.go_on()
        self._move_inputs()
        return self

    def _check_stays(self, fn: Callable[[Tensor], Tensor]) -> None:
        for flat_param in self._unit.flat_params:
            probe = fn(flat_param.flat.new_empty(0))
            if probe.is_meta:
                raise ValueError(
                    f"{self._unit.name} would lose the values of {first_name(self._unit)} on the meta device: make "
                    "the module there, and wrap it with param_init_fn=defer_init"
                )
            dtype = probe.dtype
            if flat_param.is_sharded and (dtype, probe.device) != (flat_param.flat.dtype, flat_param.flat.device):
                refuse_unreduced([self._unit], "changing device or dtype")
            if self._placement.full_precision and dtype.itemsize < min(4, flat_param.flat.dtype.itemsize):
                raise ValueError(
                    f"{self._unit.name} keeps its parameters in full precision with {self._strategy.name}: {dtype} "
                    "would lose that. Use MixedPrecision(param_dtype=...)"
                )
