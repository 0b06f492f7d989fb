"""The wrapper's ``state_dict`` and ``load_state_dict``: full, sharded by rows, or local.

torch's own recursion over modules saves and loads; this gathers a unit before it and cuts or drops its entries after
it. Entries are made in `entries.py`, rows in `rows.py`. A load copies the shards first (`snapshot.py`), loads, and then
compares with the other ranks (`loading.py`): after a failure on any rank all ranks restore the copies.
"""

import contextlib
import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from ... import _C
from ...common.warned import one_of_each, warn_user
from ..desync.checked_collectives import settle, still_troubled, telling
from ..errors import StateError
from ..names import FSDP_PREFIX, clean_tensor_name, without_units
from ..sharding.parameters import ParamInfo
from ..sharding.unit_description import digest_of
from ..unit.base import Wrapper, wrappers_in
from ..unit.local_params import LocalParam, UnitParam, local_params_of
from ..unit.summon import Summoned, in_turn, summon
from ..unit.unit import Unit, units_of
from .entries import is_own, own_params, put_flat, put_units_in, rename_last, take_flat, take_own, units_below
from .loading import Values, agree_on_loading, kind_of
from .rows import agree_on_rows, check_rows, cut_rows, has_rows, is_rows, is_whole, whole_values
from .snapshot import Before
from .table import Table
from .values import copy_of, dtype_of, same, shape_of

# (id of the wrapper, prefix) -> its entries. An inner unit is saved before the outer one is gathered, so that only one
# unit has memory at a time; torch's recursion then finds the entries here.
_ready: dict[tuple[int, str], OrderedDict[str, Any]] = {}

_of_thread = threading.local()


def ungathered() -> _C.Block:
    """Return a block in which wrappers save and load as ``nn.Module`` does, under the names of the unwrapped model.

    No collective call in it. It holds for this thread alone; blocks may be nested.
    """
    before = is_ungathered()
    return _C.Block(lambda: setattr(_of_thread, "on", True), lambda: setattr(_of_thread, "on", before))


def is_ungathered() -> bool:
    return getattr(_of_thread, "on", False)


def state_dict(wrapper: Wrapper, *args: Any, **kwargs: Any) -> Any:
    """Parameters and buffers under the names of the unwrapped model, in the form that ``state_dict_type`` says.

    A collective call, except for LOCAL_STATE_DICT. Units are gathered one after the other: the peak memory is the
    result and one unit.

    - FULL: every parameter whole, in the dtype of its shard.
    - SHARDED: this rank's rows of every parameter, as a DTensor if the unit was made with a device mesh, else as a
      ShardedTensor.
    - LOCAL: each flat parameter as a ShardedTensor that shares the shard's memory.

    Parameters that no unit shards, and buffers, are whole in all three forms.
    Raises: ValueError for FULL, if ranks were wrapped with different values and have loaded none since.
    """
    kwargs.update(zip(("destination", "prefix", "keep_vars"), args, strict=False))
    prefix, destination = kwargs.get("prefix", ""), kwargs.get("destination")
    if is_ungathered():
        return _ungathered_state(wrapper, prefix, destination, kwargs)
    gathers = wrapper._settings.state_dict_type is not StateDictType.LOCAL_STATE_DICT
    units = units_of(wrapper.modules() if gathers else ())
    with one_of_each(wrapper._placement.compared), telling(lambda: units):
        return _gathered_state(wrapper, prefix, destination, kwargs)


def _gathered_state(wrapper: Wrapper, prefix: str, destination: Any, kwargs: dict[str, Any]) -> Any:
    ready: Any = _ready.pop((id(wrapper), prefix), None)
    if ready is not None and destination is not None:
        destination.update(ready)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(ready._metadata)
        return destination
    unit = wrapper._unit
    already = unit.summoned is not None
    if not already:
        wrapper._check_idle_here("state_dict")
    kind = _kind(unit, wrapper._settings.state_dict_type)
    # Not for the other forms: their tensors may be the targets of a load, which ends the mismatch
    if wrapper._settings.state_dict_type is StateDictType.FULL_STATE_DICT and not already:
        unit.check_not_mismatched("state_dict")
    to_cpu, keep_vars = wrapper._settings.state_dict_config.offload_to_cpu, kwargs.get("keep_vars", False)
    gathers = not already and kind is not StateDictType.LOCAL_STATE_DICT
    if destination is None:
        destination = kwargs["destination"] = _empty()
    below: list[tuple[int, str]] = []
    try:
        for path, inner in units_below(wrapper, prefix) if gathers else ():
            given = _empty()
            inner.state_dict(destination=given, prefix=path, keep_vars=keep_vars)
            below.append((id(inner), path))
            _ready[below[-1]] = given
        count = len(destination)
        with _renamed(destination, prefix):
            _add_own(wrapper, kwargs, prefix + FSDP_PREFIX, kind, gathers)
    finally:
        for key in below:
            _ready.pop(key, None)
    _convert(wrapper, destination, prefix, count if to_cpu and kind is not StateDictType.LOCAL_STATE_DICT else None)
    return destination


@contextlib.contextmanager
def _renamed(destination: Any, prefix: str) -> Iterator[None]:
    """After the block, give the entries that it has added, and their metadata, the names of the unwrapped model."""
    mappings = [destination, getattr(destination, "_metadata", {})]
    counts = list(map(len, mappings))
    yield
    for mapping, count in zip(mappings, counts, strict=True):
        rename_last(mapping, count, prefix + FSDP_PREFIX, prefix)


def _add_own(wrapper: Wrapper, kwargs: dict[str, Any], prefix: str, kind: StateDictType, gathers: bool) -> None:
    """Add this unit's entries to ``kwargs["destination"]``, from its gathered parameters if ``gathers``."""
    unit, destination, config = wrapper._unit, kwargs["destination"], wrapper._settings.state_dict_config
    to_cpu = config.offload_to_cpu
    drops = getattr(config, "rank0_only", False) and wrapper._placement.rank != 0

    def take(key: str, value: Tensor) -> Any:
        return cut_rows(params[key], value, to_cpu=to_cpu) if params else copy_of(value, to_cpu)

    is_cut, whole = kind is StateDictType.SHARDED_STATE_DICT, kind is StateDictType.FULL_STATE_DICT
    params = {key: param for param in own_params(unit, prefix) for key in param.names} if is_cut else {}
    on_host = whole and to_cpu and unit.options.device is not None  # the shards lie on the host
    with summon(lambda: [unit] if gathers else [], writeback=False, offload_to_cpu=on_host):
        super(Wrapper, wrapper).state_dict(**kwargs)
        if kind is StateDictType.LOCAL_STATE_DICT:
            settle(unit.flat_params)
            put_flat(unit, destination, prefix, to_cpu)
        else:
            take_own(unit, destination, prefix, kwargs.get("keep_vars", False), None if drops else take)


def _convert(wrapper: Wrapper, destination: dict[str, Any], prefix: str, on_host_from: int | None) -> None:
    """Move entries from the ``on_host_from``-th on to the host, and give buffers the dtype of the unwrapped model.

    These entries are buffers, and parameters that no unit shards.
    """
    if on_host_from is not None:
        for key in itertools.islice(reversed(destination), len(destination) - on_host_from):
            value = destination[key]
            if isinstance(value, Tensor) and not is_rows(value) and value.device.type not in ("cpu", "meta"):
                destination[key] = value.to("cpu")
    for name, dtype in wrapper._buffer_dtypes.items():  # these buffers are kept in a lower precision
        value = destination.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype != dtype:
            destination[prefix + name] = value.to(dtype)


def _ungathered_state(wrapper: Wrapper, prefix: str, destination: Any, kwargs: dict[str, Any]) -> Any:
    """Return the entries that ``nn.Module`` makes from the current tensors, under the unwrapped model's names."""
    found = _empty() if destination is None else destination
    with _renamed(found, prefix):
        super(Wrapper, wrapper).state_dict(**{**kwargs, "destination": found})
    return found


def load_state_dict(wrapper: Wrapper, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
    """Load a state dict in any of the three forms. All ranks load all of it, or none loads anything.

    A collective call. A full state dict must be the same on every rank. A sharded or local one must have been saved
    over the same ranks. Names in messages are those of the unwrapped model. Peak memory: until the load has ended,
    a second copy of this rank's shards, and of the parameters and buffers that no unit manages.
    Raises: RuntimeError on every rank, if keys, shapes or kinds of dtype do not fit on one of them, or if whole
    values differ between ranks. The model then has its values from before.
    """
    if is_ungathered():
        return super(Wrapper, wrapper).load_state_dict(state_dict, strict=strict, assign=assign)
    wrapper._check_idle("load_state_dict")
    units = list(units_of(wrapper.modules()))
    is_sharded = wrapper._settings.state_dict_type is StateDictType.SHARDED_STATE_DICT
    if is_sharded or any(is_rows(value) for value in state_dict.values()):  # before anything is gathered
        by_name = Table(wrapper).by_name
        named = ((key, by_name.get(clean_tensor_name(key))) for key in state_dict)
        agree_on_rows("load_state_dict", units, _checked_rows(named, state_dict))
    before, error, result = Before(wrapper, units), None, None
    values: Values = {}
    try:
        try:
            result = super(Wrapper, wrapper).load_state_dict(state_dict, strict=strict, assign=assign)
            values = {name: value for each in wrappers_in(wrapper) for name, value in each._written.items()}
            values |= _checked_values(wrapper, state_dict, {unit for unit, _ in values.values()})
        except BaseException:
            _end_loadings(wrapper, keeps=False)
            raise
        _end_loadings(wrapper, keeps=True)
    except Exception as caught:
        error = RuntimeError(str(caught).replace(FSDP_PREFIX, "")) if type(caught) is RuntimeError else caught
    except BaseException:
        before.restore()
        raise
    try:
        parts = [flat_param for unit in units for flat_param in unit.flat_params]
        with still_troubled(parts, error):  # other ranks perhaps come to the gather of a further unit
            agree_on_loading("load_state_dict", units, error, values)
    except RuntimeError as told:
        before.restore()
        raise (told if error is None else error) from None
    finally:
        error = None  # its traceback holds this frame, and with it the copies in `before`
    return result


def _end_loadings(wrapper: Wrapper, keeps: bool) -> None:
    steps = [functools.partial(end_loading, each, keeps) for each in wrapper.fsdp_modules(wrapper)]
    with _C.Block(lambda: None, functools.partial(in_turn, steps[::-1])):
        pass


def end_loading(wrapper: Wrapper, keeps: bool = True) -> None:
    """End the gather of this unit's load, if there is one. ``keeps``: write the loaded values into the shard."""
    if not keeps:
        wrapper._watched, wrapper._written = None, {}
    if wrapper._loading is not None:
        wrapper._loading.leave(keeps)
        wrapper._loading = None


def in_form(wrapper: Wrapper, /, form: StateDictType, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call ``method`` of ``wrapper``, ``state_dict`` or ``load_state_dict``, in ``form``."""
    with wrapper.state_dict_type(wrapper, form):
        return getattr(wrapper, method)(*args, **kwargs)


def _kind(unit: Unit, kind: StateDictType) -> StateDictType:
    """Return ``kind``, or FULL with a warning for a unit with a flat parameter that is not sharded."""
    sharded = all(flat_param.is_sharded for flat_param in unit.flat_params)
    if sharded or kind is StateDictType.FULL_STATE_DICT:
        return kind
    warn_user(f"{unit.name} is not sharded: its state dict is whole, as with FULL_STATE_DICT, and not {kind}")
    return StateDictType.FULL_STATE_DICT


def _empty() -> OrderedDict[str, Any]:
    found: Any = OrderedDict()
    found._metadata = OrderedDict()
    return found  # type: ignore[no-any-return]


def before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Hook that torch calls before it loads a unit: gather the unit, and make its entries fit the modules' tensors.

    Local form needs no gather. Rows are gathered into whole tensors. ``after_load`` ends the gather; after an exception
    ``load_state_dict`` of the outermost wrapper does.
    """
    assert isinstance(module, Wrapper)
    put_units_in(state_dict, prefix)
    if is_ungathered():
        return
    unit, kind = module._unit, module._settings.state_dict_type
    end_loading(module, keeps=False)  # left by a load that an exception of an outer module ended
    if unit.summoned is not None:
        return
    if kind is StateDictType.LOCAL_STATE_DICT and all(flat_param.is_sharded for flat_param in unit.flat_params):
        take_flat(unit, state_dict, prefix + FSDP_PREFIX)
        module._missing = _missing_flat(unit, state_dict, prefix + FSDP_PREFIX)
        if unit.options.use_orig_params:
            unit.core.put(False)
        return
    prefix += FSDP_PREFIX
    params = own_params(unit, prefix)
    given = [(key, param) for param in params for key in param.names if key in state_dict]
    own = [key for key, param in given if is_own(state_dict[key], param)]
    for key in own:  # loading the parameter into itself is no change
        del state_dict[key]
    rows = [(key, param) for key, param in given if is_rows(state_dict.get(key))]
    if rows or kind is StateDictType.SHARDED_STATE_DICT:
        # load_state_dict has compared it, but a hook of an outer module may have changed entries on one rank alone
        agree_on_rows("load_state_dict", [unit], _checked_rows(rows, state_dict))
    _make_whole(state_dict, rows)
    on_host = unit.options.device is not None  # the shards lie on the host
    loading = module._loading = Summoned(unit=unit, writeback=True, offload_to_cpu=on_host, loads=True)
    loading.missing = unit.without(lambda fqn: prefix + fqn in state_dict)
    loading.enter()
    module._watched = _Watched(unit, params, own, state_dict)


def after_load(module: nn.Module, incompatible: Any) -> None:
    """Hook that torch calls after it has loaded a unit: write the shard, and name keys as the unwrapped model does."""
    assert isinstance(module, Wrapper)
    watched, module._watched = module._watched, None
    if watched is not None and module._loading is not None:
        module._loading.missing, module._written = watched.outcome()
        own = set(map(without_units, watched.own))  # a unit inside has renamed the keys that were missing before it
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if without_units(key) not in own]
    if not is_ungathered():
        if module._loading is None and module._unit.summoned is None:
            module._unit.filled(module._missing)
            module._unit.loaded(module._missing)
        end_loading(module)
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [without_units(key) for key in keys]


class _Watched:
    """Finds out which parameters of a unit a load has written to.

    Keys do not tell: hooks of modules may rename entries. So it compares the tensors' version counters between two
    moments: when the modules show whole parameters, and when the load has ended. torch counts no write by ``.data``, so
    a parameter that equals its entry in ``state`` counts as written too. ``own``: the keys of entries that were the
    parameters themselves.
    """

    def __init__(self, unit: Unit, params: list[UnitParam], own: list[str], state: Mapping[str, Any]):
        self.unit, self.own, self._params = unit, own, params
        self._given = {key: state[key] for param in self._params for key in param.names if key in state}
        self._before = [_versions(param) for param in params]

    def outcome(self) -> tuple[list[ParamInfo], Values]:
        """Return the parameters that the load did not write, and digests of the values of the others by FQN."""
        missing: list[ParamInfo] = []
        written: Values = {}
        for one, before in zip(self._params, self._before, strict=True):
            original, now = one.original, _versions(one)
            pairs = zip(now, before, strict=True)
            changed = [new[0] for new, old in pairs if new[0] is not old[0] or new[1] != old[1]]
            param = changed[0] if changed else now[0][0]
            given = [self._given[key] for key in one.names if key in self._given]
            if not changed and not any(_has(param, value) for value in given):
                missing.append(original)
                if not given:
                    continue
            value = original.plain(param.detach())
            written[clean_tensor_name(one.name)] = (self.unit, f"{value.dtype} {digest_of(value.cpu().contiguous())}")
        return missing, written


def _has(param: Tensor, value: Any) -> bool:
    """Whether ``param`` equals ``value``, an entry of a state dict, after a conversion to ``param``'s dtype."""
    if not isinstance(value, Tensor) or value.is_meta or param.is_meta:
        return False
    if not type(value.detach()) is type(param.detach()) is Tensor:  # a DTensor is compared with no plain tensor
        return False
    return same(value.detach().to(param.device, param.dtype), param.detach())


def _versions(param: UnitParam) -> list[tuple[Tensor, int]]:
    """Return the tensor at each place of ``param`` in the modules, with its version."""
    shown: list[Any] = [place.module._parameters[place.name] for place in param.original.names]
    return [(tensor, tensor._version) for tensor in shown]


def _missing_flat(unit: Unit, state: Mapping[str, Any], prefix: str) -> list[ParamInfo]:
    """Return the parameters without an entry in ``state``, a local state dict after ``take_flat``."""
    if unit.options.use_orig_params:
        return unit.without(lambda fqn: prefix + fqn in state)
    named = zip(unit.flat_names(), unit.flat_params, strict=True)
    return [original for name, flat_param in named if prefix + name not in state for original in flat_param.originals]


def _make_whole(state: dict[str, Any], rows: list[tuple[str, UnitParam]]) -> None:
    """Replace ``rows`` in ``state`` with whole tensors. A collective call, if ``rows`` is not empty."""
    keys: dict[UnitParam, list[str]] = {}
    for key, param in rows:
        if not is_whole(param, state[key]):
            keys.setdefault(param, []).append(key)
    for param, whole in whole_values({param: state[first] for param, (first, *_) in keys.items()}):
        state.update(dict.fromkeys(keys[param], param.original.formed(whole)))


def _checked_rows(
    named: Iterable[tuple[str, LocalParam | None]], state: Mapping[str, Any]
) -> Iterator[tuple[str, LocalParam, Any]]:
    """Yield the arguments of ``agree_on_rows`` for each key in ``named`` whose entry is in rows."""
    for key, param in named:
        if isinstance(param, UnitParam) and is_rows(state[key]):
            yield clean_tensor_name(param.name), param, _checked(key.replace(FSDP_PREFIX, ""), param, state[key])


def _checked(key: str, param: UnitParam, value: Any) -> Any:
    """Return the form of ``value`` that ranks compare: ``value``, in rows, or a digest if this rank has all rows.

    Raises: StateError naming ``key``, if shape or rows do not fit the parameter.
    """
    original, shape = param.original, param.original.full_shape
    if shape_of(value) != shape:
        raise StateError(f"size mismatch for `{key}`: {shape_of(value)}, the model's is {shape}")
    if is_whole(param, value):
        return f"{value.dtype} {digest_of(original.plain(value).cpu().contiguous())}"
    if has_rows(shape, param):
        check_rows(key, param, value)
    elif not isinstance(value, DTensor):
        raise StateError(f"`{key}` is a ShardedTensor, and the model's is not sharded")
    return value


def _checked_values(module: nn.Module, state: Mapping[str, Any], compared: set[Unit | None]) -> Values:
    """Return digests of the whole values in ``state``, which must be the same on all ranks that share a unit.

    Left out are units in ``compared``, whose digests the caller has already, and values that are the module's own
    parameters, of which ranks have different slices. This rank's values are checked; the caller compares over ranks.

    Raises: RuntimeError naming the key, if the module's tensor has another kind of dtype (floating, complex, integer:
    see ``kind_of``), or an integer dtype that cannot hold a value.
    """
    params = {name: one for one in local_params_of(module) for name in one.names}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    dtypes = {clean_tensor_name(name): tensor.dtype for name, tensor in named}
    dtypes |= {name: one.owner.dtype for name, one in params.items()}
    found: dict[UnitParam, set[str]] = {}  # ranks may use different FQNs of a tied parameter
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        name, in_rows = clean_tensor_name(key), is_rows(value)
        has, dtype = dtype_of(value), dtypes.get(name)
        if dtype is not None and has != dtype:
            if kind_of(has) != kind_of(dtype):
                raise RuntimeError(f"`{key}` has dtype {has}, which cannot be loaded into {dtype}: convert it first")
            if kind_of(dtype) == "integer" and not in_rows and not torch.equal(value.to(dtype).to(has), value):
                raise RuntimeError(f"`{key}` of {has} has values that {dtype} cannot hold")
        one = params.get(name)
        if isinstance(one, UnitParam) and one.unit not in compared and not in_rows and not is_own(value, one):
            digest = digest_of(value.detach().cpu().contiguous())
            found.setdefault(one, set()).add(f"{has} {tuple(value.shape)} {digest}")
    return {one.name: (one.unit, " ".join(sorted(digests))) for one, digests in found.items()}
