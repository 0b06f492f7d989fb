"""Copying and pickling of wrapped models: ``copy.deepcopy``, ``pickle``, ``torch.save``.

A copy has the state of a model between two steps, before the runtime initialised it: the shard, the original parameters
as pieces of it, no gradients (``copy.deepcopy`` of an unsharded module copies none either), and no state of a step.
Only the shard is copied, and nothing is communicated. A pickle has one rank's shards, and that rank must load it.
"""

import copy
import copyreg
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..common import optimizers, pickling
from ..common.patches import flat_params_live
from ..common.pickling import PickledState, as_parameter, as_view, new_flat_parameter, new_parameter, pickled_state
from ..common.tensors import free, refuse_freed, same_storage
from ..common.torch_private import (
    FlatParameter,
    HandleTrainingState,
    TorchsFSDP,
    TrainingState,
    _ExecOrderData,
    _FreeEventQueue,
    leave_out_of_graphs,
)
from .base import Handle, installed
from .flatten import unit_of
from .views import take_over_attributes
from .writeback import as_piece, changed_params

_WRAPPER = "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel"
_TEST = "tests/dropin/test_copying.py"

# Attributes that lazy initialization and later steps set on a wrapper, a handle and a flat parameter: a copy does not
# take them. It takes all others (tests/support/copies.py lists them), also those that users have set.
_STEP_OF_WRAPPER = (
    *("_all_fsdp_states", "_all_handles", "_needs_buffer_dtype_restore_check", "_post_backward_callback_queued"),
    *("_default_stream", "_unshard_stream", "_post_backward_stream", "_pre_unshard_stream", "_all_reduce_stream"),
)
_STEP_OF_HANDLE = (
    *("_handle_index", "steps", "_pre_forward_order_index", "_post_forward_index", "_prefetched"),
    *("_needs_pre_forward_unshard", "_needs_pre_backward_unshard", "_unsharded_flat_param_for_skipped_views"),
    *("_state", "_is_of_backward", "_backward_made_graph", "_has_optim_in_backward", "_ran_pre_backward_hook"),
    *("_kept_hook", "_accumulators", "_runtimes_hook", "_left_versions", "_left_values", "_steps_seen"),
    *("_is_compared", "_is_reduction_compared", "_model", "_native", "_freed_message", "_shard_seen"),
    *("_offloaded_grad", "_put_aside"),
    "_versions_left_by_backward",
)
_STEP_OF_FLAT_PARAM = (
    *("_local_shard", "_full_param_padded", "_full_prec_full_param_padded", "_padded_unsharded_size", "_mp_shard"),
    *("_cpu_grad", "_saved_grad_shard", "_post_backward_hook_state", "_post_backward_hook_handle"),
    *("_modules", "_tensors", "_is_grad_none_mask"),  # restore_handle() makes new ones
)
_ATTRIBUTES = "attributes of flat_param"  # the key in a handle's state

_owners: "weakref.WeakValueDictionary[int, Handle]" = weakref.WeakValueDictionary()  # id of a flat parameter -> handle


def note_owner(handle: Handle) -> None:
    """Register ``handle`` as the owner of ``handle.flat_param``: pickles of the flat parameter then ask it."""
    _owners[id(handle.flat_param)] = handle
    flat_params_live.hold(handle)
    optimizers.note_change()


def _handles_of(params: Iterable[Tensor]) -> list[Handle]:
    """Return the handles of ``params`` whose models the runtime has initialised."""
    ids = set(map(id, params))
    found = []
    for handle in [owner for owner in list(_owners.values()) if owner._handle_index is not None]:
        flat_param = handle.flat_param
        originals = getattr(flat_param, "_params", None) or ()
        if not ids.isdisjoint(map(id, (flat_param, *originals))):
            found.append(handle)
    return found


optimizers.finders["handles"] = _handles_of


def deepcopy_handle(handle: Handle, memo: dict[int, Any]) -> Any:
    """Implement ``copy.deepcopy(handle)``. It copies the handle's modules too, unless ``memo`` has them."""
    check_idle(handle)
    _copy_tensors(handle, memo)
    memo[id(handle)] = result = _new(type(handle))
    restore_handle(result, _copied(_state_of_handle(handle), memo))
    return result


def reduce_handle(handle: Handle, protocol: Any) -> tuple[Any, ...]:
    """Implement ``pickle`` for a handle."""
    return _new, (type(handle),), _pickled(_state_of_handle(handle), [handle])


def restore_handle(handle: Handle, state: dict[str, Any]) -> None:
    """Set the ``state`` of a new ``handle``, and put the original parameters into its modules, which are complete."""
    leave_out_of_graphs()
    flat_param = state["flat_param"]
    vars(handle).update({name: value for name, value in state.items() if name != _ATTRIBUTES})
    note_owner(handle)
    vars(flat_param).clear()  # an optimizer's pickle may have set attributes
    for name, value in state[_ATTRIBUTES].items():
        setattr(flat_param, name, value)
    flat_param._modules = {info.module for info in handle._all_infos}
    count = len(flat_param._param_infos)
    flat_param._tensors = None if flat_param._params is None else [None] * count
    flat_param._is_grad_none_mask = None if flat_param._params is None else [False] * count
    handle._unit = unit_of(flat_param, handle._layout) if state["_unit"] else None
    _show_parameters(handle)


def check_idle(handle: Handle) -> None:
    """Raises: RuntimeError if ``handle`` is in a forward, a backward or summon_full_params()."""
    state = handle._training_state
    if state == HandleTrainingState.SUMMON_FULL_PARAMS:
        raise RuntimeError(
            f"{handle._names()} cannot be copied or pickled inside summon_full_params(): do it before or after. "
            "Inside, copy the parameters, or a module that has no wrapped ones"
        )
    if state != HandleTrainingState.IDLE:
        raise RuntimeError(
            f"{handle._names()} cannot be copied or pickled in {state.name}: do it outside of forward and backward; "
            "where an exception ended one of them, after the next forward"
        )


def _state_of_handle(handle: Handle) -> dict[str, Any]:
    flat_param = handle.flat_param
    state = {name: value for name, value in vars(handle).items() if name not in _STEP_OF_HANDLE}
    attributes = {name: value for name, value in vars(flat_param).items() if name not in _STEP_OF_FLAT_PARAM}
    if flat_param._params is not None:
        attributes["_params"] = _current_params(handle)
    if "_post_backward_called" in attributes:
        attributes["_post_backward_called"] = False
    return state | {"_unit": handle._unit is not None, _ATTRIBUTES: attributes}


def _is_ever_sharded(handle: Handle) -> bool:
    return hasattr(handle.flat_param, "_shard_param_infos")


def _changed_params(handle: Handle) -> Iterator[tuple[int, nn.Parameter]]:
    """Yield ``(index, parameter)`` for original parameters that the user has replaced, or whose data he has replaced.

    The next forward would write them back into the shard.
    """
    if not handle._use_orig_params or handle._skip_writeback_check or handle._skipped_use_sharded_views:
        return
    flat_param = handle.flat_param
    if not _is_ever_sharded(handle):
        return
    changed_params(handle, flat_param)  # gives parameters that lie elsewhere in the storage a copy
    for i, (info, piece) in enumerate(zip(flat_param._param_infos, flat_param._shard_param_infos, strict=True)):
        current = getattr(info.module, info.param_name, None)
        replaced = current is not flat_param._params[i]
        if piece.in_shard and isinstance(current, nn.Parameter) and (replaced or not same_storage(current, flat_param)):
            yield i, current


def _current_params(handle: Handle) -> list[nn.Parameter]:
    params = list(handle.flat_param._params)
    for i, param in _changed_params(handle):
        params[i] = param
    return params


@torch.no_grad()
@torch.inference_mode(False)
def _current_shard(handle: Handle, copied: bool) -> Tensor:
    """Return the shard with the user's replaced parameters. A copy, if ``copied`` or if a parameter was replaced."""
    flat_param = handle.flat_param
    unsharded = handle.uses_sharded_strategy and not handle.is_sharded(flat_param)
    shard: Tensor = flat_param._local_shard if unsharded and hasattr(flat_param, "_local_shard") else flat_param.data
    changed = list(_changed_params(handle))
    refuse_freed(shard, handle._about("the shard"))
    if not copied and not changed:
        return shard.detach()
    result = shard.clone()
    for i, param in changed:
        piece = flat_param._shard_param_infos[i]
        size = torch.Size([piece.numel_in_shard])
        handle._writeback_tensor(as_piece(handle, param, i), result, i, size, piece.offset_in_shard, True)
    return result


def _stand_ins(handle: Handle) -> Iterator[Tensor]:
    """Yield the views that the modules have in the places of original parameters."""
    for info in handle._all_infos:
        for values in (vars(info.module), info.module._parameters):
            value = values.get(info.param_name)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                yield value


def _orig_params(handle: Handle) -> list[nn.Parameter]:
    flat_param = handle.flat_param
    if flat_param._params is None:
        return []
    params = [*_current_params(handle), *flat_param._shared_params]
    return [param for param in params if type(param) is nn.Parameter]


def _copy_tensors(handle: Handle, memo: dict[int, Any]) -> None:
    """Put copies of the unit's tensors into ``memo``, so that deepcopy of a module does not copy them as they are."""
    flat_param = handle.flat_param
    copied = memo.get(id(flat_param))  # the copy of an optimizer that was copied first
    if copied is None:
        memo[id(flat_param)] = new_flat_parameter(_current_shard(handle, copied=True), flat_param.requires_grad)
    elif not isinstance(copied, FlatParameter):
        copied._is_flat_param = True
        copied.data = _current_shard(handle, copied=True)
    for param in _orig_params(handle):
        if id(param) not in memo:
            memo[id(param)] = new_parameter(param.dtype, param.requires_grad)
    for tensor in _stand_ins(handle):
        memo.setdefault(id(tensor), torch.empty(0))


@torch.inference_mode(False)
def _show_parameters(handle: Handle) -> None:
    """Put the original parameters, or freed views, into the modules, as between steps."""
    flat_param = handle.flat_param
    if not _is_ever_sharded(handle):
        take_over_attributes(handle)
    elif handle._use_orig_params:
        handle._use_sharded_views()
    elif not handle.uses_sharded_strategy:
        handle._use_unsharded_views(as_params=False)
    else:
        shard = flat_param.data
        size = flat_param._unpadded_unsharded_size
        flat_param.data = unsharded = torch.empty(size, dtype=shard.dtype, device=shard.device)
        handle._use_unsharded_views(as_params=False)
        flat_param.data = shard
        free(unsharded, handle._freed_reason)


def _handles_in(module: nn.Module) -> list[Handle]:
    units = TorchsFSDP.fsdp_modules(module)
    return [unit._handle for unit in units if isinstance(unit._handle, Handle)]


def _is_ours(wrapper: Any) -> bool:
    """Whether the handle of ``wrapper`` is flatparam's; without a handle, whether all handles inside are."""
    units = TorchsFSDP.fsdp_modules(wrapper) if wrapper._handle is None else [wrapper]
    return all(unit._handle is None or isinstance(unit._handle, Handle) for unit in units)


def _state_of_wrapper(wrapper: Any) -> dict[str, Any]:
    if wrapper.training_state != TrainingState.IDLE:
        handle = wrapper._handle
        unit = f"the wrapped {type(wrapper.module).__name__}" if handle is None else handle._names()
        raise RuntimeError(
            f"{unit} cannot be copied or pickled in {wrapper.training_state.name}: do it outside of forward, backward "
            "and summon_full_params(); where an exception ended one of them, after the next forward"
        )
    order = wrapper._exec_order_data
    limits = order._backward_prefetch_limit, order._forward_prefetch_limit
    return {name: value for name, value in wrapper.__getstate__().items() if name not in _STEP_OF_WRAPPER} | {
        "_exec_order_data": _ExecOrderData(wrapper._debug_level, *limits),
        "_free_event_queue": _FreeEventQueue(),
        "_is_root": None,  # to be initialised
        "_sync_gradients": True,  # the copy is in no no_sync() block
        "_unshard_event": None,
        "_zero_scalar": None,
    }


@installed.add(f"{_WRAPPER}.__deepcopy__", _TEST, TorchsFSDP)
def _deepcopy_wrapper(self: Any, memo: dict[int, Any]) -> Any:
    """Implement ``copy.deepcopy(wrapper)``. Wrappers without our handles behave as before."""
    memo[id(self)] = result = _new(type(self))
    if not _is_ours(self):
        result.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return result
    state = _state_of_wrapper(self)
    for handle in _handles_in(self):
        if id(handle) not in memo:
            check_idle(handle)
            _copy_tensors(handle, memo)
    result.__setstate__(_copied(state, memo))
    return result


@installed.add(f"{_WRAPPER}.__reduce_ex__", _TEST, TorchsFSDP)
def _reduce_wrapper(self: Any, protocol: Any) -> Any:
    """Implement ``pickle`` for a wrapper. Wrappers without our handles behave as before."""
    if not _is_ours(self):
        return object.__reduce_ex__(self, protocol)
    return _new, (type(self),), _pickled(_state_of_wrapper(self), _handles_in(self))


@installed.add(f"{_WRAPPER}.__copy__", _TEST, TorchsFSDP)
def _copy_wrapper(self: Any) -> Any:
    """Implement ``copy.copy(wrapper)``: the copy shares all values, as a shallow copy of a module does."""
    result = _new(type(self))
    result.__setstate__(self.__getstate__())
    return result


@installed.around("torch.nn:Parameter.__reduce_ex__", test=_TEST)
def _reducing_also_flat(reduce: Any, self: Any, protocol: Any) -> Any:
    """Pickle a flat parameter alone, as in an optimizer: in torch's form, without attributes of a step."""
    handle = _owners.get(id(self))
    if handle is None or handle.flat_param is not self:
        return reduce(self, protocol)
    rebuild, (data, *settings, state) = reduce(self, protocol)
    if handle._training_state != HandleTrainingState.SUMMON_FULL_PARAMS:
        data = _current_shard(handle, copied=False)
    state = {name: value for name, value in state.items() if name not in _STEP_OF_FLAT_PARAM}
    freed = [(tensor, as_view) for tensor in _stand_ins(handle)]
    return rebuild, (data, *settings, pickled_state(state, freed, handle._fully_sharded_module.modules()))


_new: Any = getattr(copyreg, "__newobj__")  # noqa: B009  (pickle writes a call of it as one opcode)


def _copied(state: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """Return a deep copy of ``state``. Process groups and device meshes are shared."""
    for value in state.values():
        if isinstance(value, dist.ProcessGroup | DeviceMesh):
            memo[id(value)] = value
    in_force = pickling.Pickling()  # nested groups and meshes are copied in their pickled form
    try:
        return {name: copy.deepcopy(value, memo) for name, value in state.items()}
    finally:
        in_force.end()


def _pickled(state: dict[str, Any], handles: Iterable[Handle]) -> PickledState:
    """Return ``state`` for a pickle. While it lives, the tensors of ``handles`` are pickled in their own form."""
    forms: list[tuple[Tensor, Any]] = []
    modules: list[nn.Module] = []
    for handle in handles:
        check_idle(handle)
        forms.append((handle.flat_param, functools.partial(_form_of_flat_parameter, handle)))
        forms += [(param, functools.partial(as_parameter, param)) for param in _orig_params(handle)]
        forms += [(tensor, as_view) for tensor in _stand_ins(handle)]
        modules += handle._fully_sharded_module.modules()
    return pickled_state(state, forms, modules)


def _form_of_flat_parameter(handle: Handle) -> Any:
    return pickling.as_flat_parameter(_current_shard(handle, copied=False), handle.flat_param.requires_grad)
