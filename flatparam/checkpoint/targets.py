"""Match a checkpoint with the optimizers here: plan every read and value of a load into them, and check it.

`loading.py` calls this on each rank. Small values are read here. Reads into states are planned, and carried out at
commit: nothing is written into the optimizers. No collective calls.
"""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from torch import Tensor

from ..fsdp.names import bare_names
from ..fsdp.sharding.pytrees import find_tensors
from ..fsdp.states.optimizer_loading import told_of_missing
from ..fsdp.states.values import same
from ..fsdp.unit.local_params import LocalParam
from .boxes import Read, reads_of
from .converting import Convert, converted_groups
from .errors import CheckpointError
from .files import Chunk
from .model_plan import check_fits
from .optimizers import GRADIENT, Named, in_owners_order, like
from .pieces import InHandle
from .reading import OfRank, Source
from .values import decode


@dataclass
class Targets:
    """The plan of a load into optimizers.

    ``reads``: into existing or new tensors. ``state``: (stepped tensor, its new state). ``gradients``: (stepped tensor,
    its new ``.grad`` or None). ``groups``: new settings of each group. ``without_state``: warnings of parameters that
    begin without state.
    """

    reads: list[Read] = field(default_factory=list)
    state: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)
    gradients: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    without_state: list[str] = field(default_factory=list)


def into_optimizer(
    named: Named,
    told: Mapping[str, Any],
    source: Source,
    strict: bool,
    own: Mapping[str, list[Chunk]],
    convert: Convert,
) -> Targets:
    """Plan the states, gradients and settings of the optimizers.

    ``told``: the index's ``optimizer``. ``strict``: an optimizer here must step every parameter with a saved state.
    ``own``: boxes of states that this rank saved alone. ``convert``: as in ``load``.
    Raises: CheckpointError for parameters, states, shapes and classes that do not fit.
    """
    found = Targets()
    chunks_of = ChainMap(dict(own), dict(source.optimizer))
    saved = {name: i for i, (_, names) in enumerate(told["groups"] or ()) for name in names}
    if told["groups"] is not None:
        _check_optimizers(named, told, saved, strict)
    converted = converted_groups(named, told, saved, convert)
    if told["groups"] is not None:
        for i, (_, held) in enumerate(named.groups):
            values = {} if converted[i] else _group(i, held, told["groups"], saved, OfRank(source, 0))
            for key, value in values.items():
                before = named.param_groups[i].get(key)
                if isinstance(value, Tensor) and isinstance(before, Tensor):
                    values[key] = value.to(before.device)
            found.groups.append(values)
    if strict:
        _check_wanted(named, told)
    loaded = {id(group): values for group, values in zip(named.param_groups, found.groups, strict=False)}
    renamed = {id(group): convert for group, does in zip(named.param_groups, converted, strict=True) if does}
    for param, held in named.params():
        here = [one for one in held if one.numel]
        before, group = named.state_of(param), named.group_of[id(param)]
        state: dict[str, Any] = {}
        names = renamed.get(id(group))
        for key in _keys(here, told["states"]):
            mine = key if names is None else names.get(key)
            if mine is None:
                continue
            kinds = _kinds_of(named, param, here, key, told["states"])
            if kinds[0] == "box":
                state[mine] = _like_param(found, param, here, key, before.get(mine), chunks_of, source.model)
            else:
                value = _one(named, param, here[: len(kinds)], key, kinds, source)
                state[mine] = _placed({**group, **loaded.get(id(group), {})}, param, mine, value, before.get(mine))
        if here:
            found.state.append((param, state))
    _note_missing(found, named, converted, told["states"])
    _plan_gradients(found, named, told["states"], chunks_of, source)
    return found


def _kinds_of(named: Named, param: Tensor, here: list[LocalParam], key: str, states: Mapping[str, Any]) -> list[Any]:
    """Return what the index has of ``key`` for each parameter in ``param``: "box" for all or none, or one in pieces."""
    kinds = _alike([states[one.name][key] for one in here], here)
    pieces = [kind["pieces"] for kind in kinds if isinstance(kind, dict)]
    if pieces:
        _check_layout(named, param, here[0], key, pieces)
        kinds = kinds[:1]
    if any((kind == "box") != (kinds[0] == "box") for kind in kinds):
        raise CheckpointError(
            f"the optimizer's `{key}` has an element for each of some parameters in the flat parameter of "
            f"`{here[0].name}`, and none for others"
        )
    return kinds


def _note_missing(found: Targets, named: Named, converted: Sequence[bool], states: Mapping[str, Any]) -> None:
    """Note parameters without a saved state beside others that have one."""
    for group, does in zip(named.param_groups, converted, strict=True):
        params = [(param, [one.name for one in named.held[id(param)]]) for param in group["params"] if not does]
        has = {name for name, state in states.items() if state.keys() - {GRADIENT}}
        why = told_of_missing(
            (names, not has.isdisjoint(names)) for param, names in params if names and param.requires_grad
        )
        found.without_state += [] if why is None else [why]


def _plan_gradients(
    found: Targets, named: Named, states: Mapping[str, Any], chunks_of: Mapping[str, list[Chunk]], source: Source
) -> None:
    for param, held in itertools.chain(named.params(), named.others()):
        if not any(isinstance(one, InHandle) for one in held):
            here = [one for one in held if one.numel]
            having = [one for one in here if GRADIENT in states.get(one.name, {})]  # the others' part is zero
            grad = None
            if having:
                grad = _like_param(found, param, having, GRADIENT, None, chunks_of, source.model)
            found.gradients.append((param, grad))


def _alike(kinds: list[Any], here: list[LocalParam]) -> list[Any]:
    """Return ``kinds`` with "one" for "box" of parameters without dimensions, unless all kinds are "box".

    A scalar state of a scalar parameter was saved as "box". In one flat parameter with others it is one value for all.
    """
    if all(kind == "box" for kind in kinds):
        return kinds
    return ["one" if kind == "box" and not one.shape else kind for one, kind in zip(here, kinds, strict=True)]


def _check_wanted(named: Named, told: Mapping[str, Any]) -> None:
    """Raises: CheckpointError for a saved state of a parameter that no optimizer here steps."""
    wanted = {one.name for _, held in named.params() for one in held}
    for name, state in told["states"].items():
        if name not in wanted and state.keys() - {GRADIENT}:
            raise CheckpointError(
                f"the checkpoint has optimizer states of `{name}`, which no group of the optimizer has here: pass all "
                "of them, of the model's parameters, or strict=False"
            )


def _check_optimizers(named: Named, told: Mapping[str, Any], saved: Mapping[str, int], strict: bool) -> None:
    """Raises: CheckpointError if a parameter has changed its optimizer, or a saved optimizer has no parameter here."""
    labels = told.get("optimizers", [""] * len(told["groups"]))
    absent = dict.fromkeys(labels) if strict and len(set(labels)) > 1 else {}
    for label, (_, held) in zip(named.labels, named.groups, strict=True):
        for name in (one.name for one in held if one.name in saved):
            before = labels[saved[name]]
            absent.pop(before, None)
            if before != label and label in labels:
                raise CheckpointError(
                    f"parameter `{name}` was saved in the optimizer `{before}`, and is in `{label}` here"
                )
    for label in absent:
        names = [name for name, number in saved.items() if labels[number] == label]
        if names:
            raise CheckpointError(
                f"the checkpoint has an optimizer `{label}`, of `{names[0]}` and more, and none of the given ones has "
                "these parameters: pass all of them, or strict=False"
            )


def _keys(here: list[LocalParam], states: Mapping[str, Any]) -> list[str]:
    """Return the keys of the saved states. Raises: CheckpointError if they differ in one flat parameter."""
    if not here:
        return []
    keys, *others = [[key for key in states.get(one.name, {}) if key != GRADIENT] for one in here]
    for one, other in zip(here[1:], others, strict=True):
        if set(other) != set(keys):
            raise CheckpointError(
                f"`{here[0].name}` has the optimizer states {keys} and `{one.name}` {other}: they are in one flat "
                "parameter, which has one state; wrap with use_orig_params=True"
            )
    return keys


def _like_param(
    found: Targets,
    param: Tensor,
    here: list[LocalParam],
    key: str,
    before: Any,
    chunks_of: Mapping[str, list[Chunk]],
    model: Mapping[str, list[Chunk]],
) -> Tensor:
    """Plan the reads of a state like the parameter; return its tensor: ``before`` if it fits, else a new one.

    Its dtype is that of the file; or the parameter's here, if the state had the parameter's dtype in the file.
    """
    chunks = [chunks_of.get(_name(one, key), []) for one in here]
    for one, its in zip(here, chunks, strict=True):
        if not its:
            raise CheckpointError(f"the checkpoint's files have no `{_name(one, key)}`")
    dtype = chunks[0][0].torch_dtype(_name(here[0], key))
    saved = next((model[name] for name in here[0].names if name in model), None)
    if saved is not None and saved[0].dtype == chunks[0][0].dtype:
        dtype = param.dtype
    fits = isinstance(before, Tensor) and before.shape == param.shape and before.dtype == dtype
    state = before if fits else like(param, dtype)
    flat = in_owners_order(state, param)
    if flat.untyped_storage().data_ptr() != state.untyped_storage().data_ptr():  # other strides: flat is a copy
        state = like(param, dtype)
        flat = in_owners_order(state, param)
    for one, its in zip(here, chunks, strict=True):
        check_fits(_name(one, key), its, one.shape, dtype)
        found.reads += reads_of(_name(one, key), its, one.dense, one.start, flat.narrow(0, one.offset, one.numel))
    return state


def _one(
    named: Named,
    param: Tensor,
    here: list[LocalParam],
    key: str,
    kinds: list[Any],
    source: Source,
) -> Any:
    """Read a value that all parameters in ``param`` share. Raises: CheckpointError if the saved values differ."""
    got = []
    for one, kind in zip(here, kinds, strict=True):
        if isinstance(kind, dict):
            kind = kind["pieces"][named.layout_of(param)]
        if kind != "one":
            got.append(decode(kind[0], OfRank(source, kind[1])))
        elif _name(one, key) not in source.optimizer:
            raise CheckpointError(f"the checkpoint's files have no `{_name(one, key)}`")
        else:
            got.append(source.whole(_name(one, key), source.optimizer[_name(one, key)]))
    first = got[0]
    for one, other in zip(here, got, strict=True):
        if not same(first, other):
            raise CheckpointError(
                f"the optimizer's `{key}` of `{here[0].name}` and `{one.name}` differ: they are in one flat parameter, "
                "which has one; wrap with use_orig_params=True"
            )
    other = next((tensor for tensor in find_tensors(first) if tensor.dim()), None)
    of_all_pieces = isinstance(kinds[0], list) and len(kinds[0]) == 3
    fits = isinstance(kinds[0], dict) or of_all_pieces or named.lies_whole(here[0])
    if other is not None and not fits:
        raise CheckpointError(
            f"the optimizer's `{key}` of `{here[0].name}` has shape {tuple(other.shape)}, which has no element for "
            "each of the parameter: it fits where the parameter lies whole on a rank, as with NO_SHARD"
        )
    return first


def _placed(group: Mapping[str, Any], param: Tensor, key: str, value: Any, before: Any) -> Any:
    """Return ``value`` on the device where an optimizer with the settings ``group`` keeps it.

    ``before``: the current value; a tensor goes to its device.
    Source: torch 2.13 ``Optimizer._process_value_according_to_param_policy``, for tensors in containers too.
    """
    if isinstance(value, dict):
        old = before if isinstance(before, dict) else {}
        return type(value)({name: _placed(group, param, name, one, old.get(name)) for name, one in value.items()})
    if isinstance(value, list | tuple):
        fits = isinstance(before, list | tuple) and len(before) == len(value)
        pairs = zip(value, before if fits else [None] * len(value), strict=True)
        return type(value)(_placed(group, param, "", one, was) for one, was in pairs)
    if not isinstance(value, Tensor):
        return value
    if key == "step" and any(group.get(flag) is True for flag in ("capturable", "fused")):
        return value.to(param.device)
    return value.to(before.device if isinstance(before, Tensor) else value.device if key == "step" else param.device)


def _check_layout(named: Named, param: Tensor, first: LocalParam, key: str, pieces: list[dict[str, Any]]) -> None:
    """Raises: CheckpointError for a value that was saved for each piece, if no saved piece has the layout here."""
    layout = named.layout_of(param)
    if any(layout not in one for one in pieces):
        raise CheckpointError(
            f"the optimizer's `{key}` of `{first.name}` was saved for each rank's piece of it, and no piece was as "
            "here: load with the ranks, strategy and units of the save, or without the optimizer"
        )


def _name(held: LocalParam, key: str) -> str:
    return f"state.{held.name}.{key}"


def _group(
    i: int, held: list[LocalParam], groups: list[Any], saved: Mapping[str, int], values: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the saved settings for group ``i``, which has the parameters ``held``.

    ``groups``: the saved ones. ``saved``: FQN -> number of its saved group. ``values``: tensors in encoded settings.
    Raises: CheckpointError if a parameter was in no group, or its groups had different settings.
    """
    if not held:
        return {}
    wanted = {one.name for one in held}
    absent = wanted - saved.keys()
    if absent:
        raise CheckpointError(f"the checkpoint's optimizer has no parameter `{min(absent)}`, which group {i} has")
    numbers = sorted({saved[name] for name in wanted})
    matching = [{key: decode(value, values) for key, value in groups[number][0].items()} for number in numbers]
    if not all(same(matching[0], other) for other in matching[1:]):
        raise CheckpointError(
            f"the optimizer's group {i}, of `{held[0].name}` and more, has parameters of several saved groups, with "
            "different settings"
        )
    return matching[0]


def values_of_modules(
    module: nn.Module, told: Mapping[str, Any], values: Mapping[str, Tensor], strict: bool
) -> list[tuple[Any, Any]]:
    """Return ``(module, argument)`` for each call of ``set_extra_state``.

    ``told``: name -> encoded value. Raises: CheckpointError, if ``strict``, for a value without a module, and for a
    module without a value.
    """
    found = []
    by_name, bare = {}, bare_names(module)
    for path, inner in module.named_modules():
        clean = bare(path)
        if type(inner).set_extra_state is not nn.Module.set_extra_state:
            by_name[f"{clean}._extra_state" if clean else "_extra_state"] = inner
    gives = {name for name, inner in by_name.items() if type(inner).get_extra_state is not nn.Module.get_extra_state}
    missing = [name for name in by_name if name in gives and name not in told]
    if strict and missing:
        raise CheckpointError(f"missing in the checkpoint: `{missing[0]}`")
    for name, value in told.items():
        if name not in by_name:
            if strict:
                raise CheckpointError(f"the model has no module for `{name}`")
            continue
        found.append((by_name[name], decode(value, values)))
    return found
