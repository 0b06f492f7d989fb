"""Copy, pickle and move the wrapper, and start what watches torch.

``watch_torch`` runs before any wrapper exists, made or loaded.
"""

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

_CLOSED = "_closed"  # key in a pickle: the sealed modules


def watch_torch(wrapper: Wrapper) -> None:
    """Install all hooks and replaced functions that wrappers need. Call it before ``wrapper`` is made or loaded.

    Raises: OrderError if the store of the process group cannot be reached.
    """
    liveness.watching_worlds.hold(wrapper)
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
    """The pickled form of ``state``, the attributes of a wrapper.

    As long as the result lives, picklers use other forms for the tensors of ``units``: a flat parameter is its shard,
    and with ``use_orig_params`` a view is the parameter in whose place it stands.
    """
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
    """The pickled form of a view in the place of ``param``: the parameter."""
    return _itself, (param,)


class Copies(Wrapper):
    """The part of the wrapper that copies, pickles and moves it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with separate shards over the same groups. Its units belong to no root yet."""
        self._check_idle("deepcopy")
        wrappers = self.fsdp_modules(self)
        settle(flat_param for wrapper in wrappers for flat_param in wrapper._unit.flat_params)
        had_views = [wrapper._unit.core.shows_views for wrapper in wrappers]
        for wrapper in wrappers:
            wrapper._unit.sync_user_writes()
            wrapper._unit.core.put(False)
            for views in wrapper._unit.core.views():
                memo.update((id(view), torch.empty(0)) for view in views or ())  # not copied: the copy makes new ones
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
        """A shallow copy: it shares the unit and all attributes, as with any module."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle this rank's shards and the modules, without gradients. Only between passes, for the same rank."""
        self._check_idle("pickling")
        for unit in units_of(self.modules()):
            unit.sync_user_writes()
        state = {**vars(self), "_outer": None, _CLOSED: sealed(self._unit, self.modules())}
        return copyreg.__newobj__, (type(self),), pickled(state, units_of(self.modules()))  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        watch_torch(self)
        own = state.pop(_CLOSED)
        vars(self).update(state)
        self._unit.come_alive()
        seal(self._unit, own, self._ignored_params)
        assign_loaded(self._unit, self._placement.groups)
        self._hold_those_below()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``to()``, ``cuda()`` and ``half()`` call: change the device or dtype of shards, gradients and buffers.

        All units are checked before the first one changes. Between passes.
        """
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
        """Raises: ValueError if ``fn`` would lose values, precision that the strategy needs, or unreduced gradients."""
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
