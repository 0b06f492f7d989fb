"""Copy, pickle and move the wrapper. Nothing is communicated: a copy or pickle has this rank's shards."""

import copy
import copyreg
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...common.pickling import PickledState, Reduced, as_flat_parameter, as_parameter, as_view, pickled_state
from ...common.torch_private import leave_out_of_graphs
from ..desync import liveness
from ..desync.checked_collectives import settle
from ..desync.unit_ids import assign_loaded
from ..interop import backward_inputs  # noqa: F401  (it declares changes of torch)
from ..unit.additions import seal, sealed
from ..unit.base import W, Wrapper
from ..unit.registry import hold_changes
from ..unit.summon import refuse_unreduced
from ..unit.unit import Unit, units_of
from . import dcp_helpers  # noqa: F401  (it declares changes of torch)
from .arguments import first_name

_CLOSED = "_closed"  # key in a pickle: the sealed modules


def watch_torch(wrapper: Wrapper) -> None:
    """Make the changes of torch that wrappers need. Call it before ``wrapper`` is made or loaded.

    Raises: OrderError if the store of the process group cannot be reached.
    """
    liveness.watching_worlds.hold(wrapper)
    hold_changes(wrapper)
    leave_out_of_graphs()
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


def deepcopy_wrapper(wrapper: W, memo: dict[int, Any]) -> W:
    """A copy with separate shards over the same groups. Its units belong to no root yet."""
    wrapper._check_idle("deepcopy")
    wrappers = wrapper.fsdp_modules(wrapper)
    settle(flat_param for each in wrappers for flat_param in each._unit.flat_params)
    had_views = [each._unit.core.shows_views for each in wrappers]
    for each in wrappers:
        each._unit.sync_user_writes()
        each._unit.core.put(False)
        for views in each._unit.core.views():
            memo.update((id(view), torch.empty(0)) for view in views or ())  # not copied: the copy makes new ones
    copied = object.__new__(type(wrapper))
    memo[id(wrapper)] = copied
    try:
        for key, value in vars(wrapper).items():
            left_out = key in ("_outer", "_hooked")
            vars(copied)[key] = None if left_out else copy.deepcopy(value, memo)
    finally:
        for each, views_before in zip(wrappers, had_views, strict=True):
            each._unit.core.put(views_before or not each._use_orig_params)
    copied._hooked = wrapper._hooked
    own = [memo.get(id(module), module) for module in sealed(wrapper._unit, wrapper.modules())]
    seal(copied._unit, own, copied._ignored_params)
    copied._hold_those_below()
    return copied


def copy_wrapper(wrapper: W) -> W:
    """A shallow copy: it shares the unit and all attributes, as with any module."""
    copied = object.__new__(type(wrapper))
    vars(copied).update(vars(wrapper))
    return copied


def reduce_wrapper(wrapper: Wrapper, protocol: Any) -> Any:
    """Pickle this rank's shards and the modules, without gradients. Only between passes, for the same rank."""
    wrapper._check_idle("pickling")
    for unit in units_of(wrapper.modules()):
        unit.sync_user_writes()
    state = {**vars(wrapper), "_outer": None, _CLOSED: sealed(wrapper._unit, wrapper.modules())}
    return copyreg.__newobj__, (type(wrapper),), pickled(state, units_of(wrapper.modules()))  # type: ignore[attr-defined]


def set_state(wrapper: Wrapper, state: dict[str, Any]) -> None:
    watch_torch(wrapper)
    own = state.pop(_CLOSED)
    vars(wrapper).update(state)
    wrapper._unit.come_alive()
    seal(wrapper._unit, own, wrapper._ignored_params)
    assign_loaded(wrapper._unit, wrapper._placement.groups)
    wrapper._hold_those_below()


def apply_to_tensors(wrapper: W, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> W:
    """What ``to()``, ``cuda()`` and ``half()`` call: change the device or dtype of shards, gradients and buffers.

    All units are checked before the first one changes. Between passes.
    """
    wrapper._check_idle_here("changing device or dtype")
    for each in wrapper.fsdp_modules(wrapper):
        check_stays(each, fn)
    unit = wrapper._unit
    unit.sync_user_writes()
    unit.refuse_freed_gradients()
    super(Wrapper, wrapper)._apply(fn, recurse)  # type: ignore[no-untyped-call]
    if wrapper._use_orig_params:
        for flat_param in unit.flat_params:
            flat_param.flat.data = fn(flat_param.flat.data)
    unit.go_on()
    wrapper._move_inputs()
    return wrapper


def check_stays(wrapper: Wrapper, fn: Callable[[Tensor], Tensor]) -> None:
    """Raises: ValueError if ``fn`` would lose values, precision that the strategy needs, or unreduced gradients."""
    for flat_param in wrapper._unit.flat_params:
        probe = fn(flat_param.flat.new_empty(0))
        if probe.is_meta:
            raise ValueError(
                f"{wrapper._unit.name} would lose the values of {first_name(wrapper._unit)} on the meta device: make "
                "the module there, and wrap it with param_init_fn=defer_init"
            )
        dtype = probe.dtype
        if flat_param.is_sharded and (dtype, probe.device) != (flat_param.flat.dtype, flat_param.flat.device):
            refuse_unreduced([wrapper._unit], "changing device or dtype")
        if wrapper._placement.full_precision and dtype.itemsize < min(4, flat_param.flat.dtype.itemsize):
            raise ValueError(
                f"{wrapper._unit.name} keeps its parameters in full precision with {wrapper._strategy.name}: {dtype} "
                "would lose that. Use MixedPrecision(param_dtype=...)"
            )
