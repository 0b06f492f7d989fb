"""Copying and pickling of wrapped models: ``copy.deepcopy``, ``pickle``, ``torch.save``.

A copy is what its original is between two steps, before the runtime initialised it: the shard, the original parameters
as pieces of that, no gradients (an unsharded module's copies have none either), nothing of a step in progress. Only the
shard is copied, and nothing is communicated. A pickle holds one rank's shards; it is loaded by that rank.
"""

import copy
import copyreg
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..common import optimizers, pickling
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
from .flatten import unit_of
from .views import Views

# What lazy initialization and the steps after it put on a wrapper, a handle and a flat parameter: copies make it anew.
# They keep all else, which tests/support/copies.py lists, and what users have put there.
_STEP_OF_WRAPPER = (
    *("_all_fsdp_states", "_all_handles", "_needs_buffer_dtype_restore_check", "_post_backward_callback_queued"),
    *("_default_stream", "_unshard_stream", "_post_backward_stream", "_pre_unshard_stream", "_all_reduce_stream"),
)
_STEP_OF_HANDLE = (
    *("_handle_index", "steps", "_pre_forward_order_index", "_post_forward_index", "_prefetched"),
    *("_needs_pre_forward_unshard", "_needs_pre_backward_unshard", "_unsharded_flat_param_for_skipped_views"),
    *("_state", "_is_of_backward", "_backward_made_graph", "_has_optim_in_backward", "_ran_pre_backward_hook"),
    *("_kept_hook", "_accumulators", "_runtimes_hook", "_left_versions", "_left_values", "_steps_seen"),
    *("_is_compared", "_native", "_chunks", "_freed_message", "_shard_seen", "_offloaded_grad", "_put_aside"),
    "_versions_left_by_backward",
)
_STEP_OF_FLAT_PARAM = (
    *("_local_shard", "_full_param_padded", "_full_prec_full_param_padded", "_padded_unsharded_size", "_mp_shard"),
    *("_cpu_grad", "_saved_grad_shard", "_post_backward_hook_state", "_post_backward_hook_handle"),
    *("_modules", "_tensors", "_is_grad_none_mask"),  # made anew
)
_ATTRIBUTES = "attributes of flat_param"  # the key in a handle's state

_owners: "weakref.WeakValueDictionary[int, Any]" = (
    weakref.WeakValueDictionary()
)  # handles by their flat parameters' ids
_reduce_parameter: Any = nn.Parameter.__reduce_ex__


def note_owner(handle: Any) -> None:
    """Let ``handle.flat_param`` be pickled as a part of this handle from now on."""
    _owners[id(handle.flat_param)] = handle
    optimizers.note_change()


def _handles_of(params: Iterable[Tensor]) -> list[Any]:
    """Those of models that have begun to train."""
    ids = set(map(id, params))
    found = []
    for handle in [owner for owner in list(_owners.values()) if owner._handle_index is not None]:
        flat_param = handle.flat_param
        originals = getattr(flat_param, "_params", None) or ()
        if not ids.isdisjoint(map(id, (flat_param, *originals))):
            found.append(handle)
    return found


optimizers.find_handles(_handles_of)


def deepcopy_handle(handle: Any, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy(handle)``: with its modules, as far as ``memo`` does not have their copies yet."""
    check_idle(handle)
    _copy_tensors(handle, memo)
    memo[id(handle)] = result = _new(type(handle))
    restore_handle(result, _copied(_state_of_handle(handle), memo))
    return result


def reduce_handle(handle: Any, protocol: Any) -> tuple[Any, ...]:
    """What ``pickle`` writes of a handle."""
    return _new, (type(handle),), _pickled(_state_of_handle(handle), [handle])


def restore_handle(handle: Any, state: dict[str, Any]) -> None:
    """Give a new ``handle`` its ``state``, with modules complete, and let those have its original parameters."""
    leave_out_of_graphs()
    flat_param = state["flat_param"]
    handle._padded_to = state["_aligned_numel"]  # what a pickle of 0.1.0 means
    vars(handle).update({name: value for name, value in state.items() if name != _ATTRIBUTES})
    note_owner(handle)
    vars(flat_param).clear()  # of what an optimizer's pickle may have brought
    for name, value in state[_ATTRIBUTES].items():
        setattr(flat_param, name, value)
    flat_param._modules = {info.module for info in handle._all_infos}
    count = len(flat_param._param_infos)
    flat_param._tensors = None if flat_param._params is None else [None] * count
    flat_param._is_grad_none_mask = None if flat_param._params is None else [False] * count
    handle._unit = unit_of(flat_param, handle._layout) if state["_unit"] else None
    _show_parameters(handle)


def check_idle(handle: Any) -> None:
    """Raises: RuntimeError in forward, in backward and in summon_full_params()."""
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


def _state_of_handle(handle: Any) -> dict[str, Any]:
    flat_param = handle.flat_param
    state = {name: value for name, value in vars(handle).items() if name not in _STEP_OF_HANDLE}
    attributes = {name: value for name, value in vars(flat_param).items() if name not in _STEP_OF_FLAT_PARAM}
    if flat_param._params is not None:
        attributes["_params"] = _current_params(handle)
    if "_post_backward_called" in attributes:
        attributes["_post_backward_called"] = False
    return state | {
        "_unit": handle._unit is not None,
        _ATTRIBUTES: attributes,
    }


def _is_ever_sharded(handle: Any) -> bool:
    return hasattr(handle.flat_param, "_shard_param_infos")


def _changed_params(handle: Any) -> Iterator[tuple[int, nn.Parameter]]:
    """The original parameters that the user replaced, or gave other data, since the last step, with their indices.

    The next forward would write them back.
    """
    if not handle._use_orig_params or handle._skip_writeback_check or handle._skipped_use_sharded_views:
        return
    flat_param = handle.flat_param
    if not _is_ever_sharded(handle):
        return
    handle._changed(flat_param)  # what lies elsewhere in the flat parameter has data of its own then
    for i, (info, piece) in enumerate(zip(flat_param._param_infos, flat_param._shard_param_infos, strict=True)):
        current = getattr(info.module, info.param_name, None)
        replaced = current is not flat_param._params[i]
        if piece.in_shard and isinstance(current, nn.Parameter) and (replaced or not same_storage(current, flat_param)):
            yield i, current


def _current_params(handle: Any) -> list[nn.Parameter]:
    params = list(handle.flat_param._params)
    for i, param in _changed_params(handle):
        params[i] = param
    return params


@torch.no_grad()
@torch.inference_mode(False)
def _current_shard(handle: Any, copied: bool) -> Tensor:
    """The shard with what the user changed since the last step. A copy if asked for, or if anything was changed."""
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
        handle._writeback_tensor(handle._as_piece(param, i), result, i, size, piece.offset_in_shard, True)
    return result


def _stand_ins(handle: Any) -> Iterator[Tensor]:
    """The tensors that stand in the original parameters' places without being them."""
    for info in handle._all_infos:
        for values in (vars(info.module), info.module._parameters):
            value = values.get(info.param_name)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                yield value


def _orig_params(handle: Any) -> list[nn.Parameter]:
    flat_param = handle.flat_param
    if flat_param._params is None:
        return []
    params = [*_current_params(handle), *flat_param._shared_params]
    return [param for param in params if type(param) is nn.Parameter]


def _copy_tensors(handle: Any, memo: dict[int, Any]) -> None:
    """Put into ``memo`` the copies of the unit's tensors, so that none is copied with its module."""
    flat_param = handle.flat_param
    copied = memo.get(id(flat_param))  # an optimizer that was copied first has a copy already
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
def _show_parameters(handle: Any) -> None:
    """Let the modules have the original parameters, or freed views in their place, as they are between steps."""
    flat_param = handle.flat_param
    if not _is_ever_sharded(handle):
        handle._take_over_attributes()
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


def _handles_in(module: nn.Module) -> list[Any]:
    units = TorchsFSDP.fsdp_modules(module)
    return [unit._handle for unit in units if isinstance(unit._handle, Views)]


def _is_ours(wrapper: Any) -> bool:
    """Whether its handle is flatparam's; for a wrapper that has no parameters of its own: none in it is another's."""
    if wrapper._handle is not None:
        return isinstance(wrapper._handle, Views)
    units = TorchsFSDP.fsdp_modules(wrapper)
    return all(unit._handle is None or isinstance(unit._handle, Views) for unit in units)


def _state_of_wrapper(wrapper: Any) -> dict[str, Any]:
    if wrapper.training_state != TrainingState.IDLE:
        handle = wrapper._handle
        unit = f"the wrapped {type(wrapper.module).__name__}" if handle is None else handle._names()
        raise RuntimeError(
            f"{unit} cannot be copied or pickled in "
            f"{wrapper.training_state.name}: do it outside of forward, backward and summon_full_params(); where an "
            "exception ended one of them, after the next forward"
        )
    order = wrapper._exec_order_data
    limits = order._backward_prefetch_limit, order._forward_prefetch_limit
    return {name: value for name, value in wrapper.__getstate__().items() if name not in _STEP_OF_WRAPPER} | {
        "_exec_order_data": _ExecOrderData(wrapper._debug_level, *limits),
        "_free_event_queue": _FreeEventQueue(),
        "_is_root": None,  # not initialised
        "_sync_gradients": True,  # no_sync() ends for the original only
        "_unshard_event": None,
        "_zero_scalar": None,
    }


def _deepcopy_wrapper(self: Any, memo: dict[int, Any]) -> Any:
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


def _reduce_wrapper(self: Any, protocol: Any) -> Any:
    if not _is_ours(self):
        return object.__reduce_ex__(self, protocol)
    return _new, (type(self),), _pickled(_state_of_wrapper(self), _handles_in(self))


def _copy_wrapper(self: Any) -> Any:
    """``copy.copy(wrapper)``: it shares everything, as a shallow copy of a module does."""
    result = _new(type(self))
    result.__setstate__(self.__getstate__())
    return result


@functools.wraps(_reduce_parameter)
def reduce_also_flat(self: Any, protocol: Any) -> Any:
    """A flat parameter by itself, as in an optimizer, has torch's form, without what is made anew in a step."""
    handle = _owners.get(id(self))
    if handle is None or handle.flat_param is not self:
        return _reduce_parameter(self, protocol)
    rebuild, (data, *settings, state) = _reduce_parameter(self, protocol)
    if handle._training_state != HandleTrainingState.SUMMON_FULL_PARAMS:
        data = _current_shard(handle, copied=False)
    state = {name: value for name, value in state.items() if name not in _STEP_OF_FLAT_PARAM}
    freed = [(tensor, as_view) for tensor in _stand_ins(handle)]
    return rebuild, (data, *settings, pickled_state(state, freed, handle._fully_sharded_module.modules()))


# Of torch's wrapper, while flatparam is installed: others than with our handles are treated as before
WRAPPER_METHODS = {"__copy__": _copy_wrapper, "__deepcopy__": _deepcopy_wrapper, "__reduce_ex__": _reduce_wrapper}


_new: Any = getattr(copyreg, "__newobj__")  # noqa: B009  (pickle writes a call of it as one opcode)


def _copied(state: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """A deep copy of ``state``; what communicates is shared."""
    for value in state.values():
        if isinstance(value, dist.ProcessGroup | DeviceMesh):
            memo[id(value)] = value
    in_force = pickling.Pickling()  # groups and devices further down are copied as they are pickled
    try:
        return {name: copy.deepcopy(value, memo) for name, value in state.items()}
    finally:
        in_force.end()


def _pickled(state: dict[str, Any], handles: Iterable[Any]) -> PickledState:
    """``state``; as long as it is referred to, the tensors of ``handles`` have their pickled form."""
    forms: list[tuple[Tensor, Any]] = []
    modules: list[nn.Module] = []
    for handle in handles:
        check_idle(handle)
        forms.append((handle.flat_param, functools.partial(_form_of_flat_parameter, handle)))
        forms += [(param, functools.partial(as_parameter, param)) for param in _orig_params(handle)]
        forms += [(tensor, as_view) for tensor in _stand_ins(handle)]
        modules += handle._fully_sharded_module.modules()
    return pickled_state(state, forms, modules)


def _form_of_flat_parameter(handle: Any) -> Any:
    return pickling.as_flat_parameter(_current_shard(handle, copied=False), handle.flat_param.requires_grad)
