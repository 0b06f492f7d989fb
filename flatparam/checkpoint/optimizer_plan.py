"""Match a checkpoint with the optimizers here: plan every read and value of a load into them, and check it.

`loading.py` calls this on each rank. Small values are read here. Reads into states are planned, and carried out at
commit: nothing is written into the optimizers. No collective calls.
"""

import functools
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..fsdp.errors import StateError
from ..fsdp.sharding.parameters import in_order
from ..fsdp.sharding.pytrees import find_tensors
from ..fsdp.states.optimizer_classes import lacks_state, why_not
from ..fsdp.states.optimizer_mapping import shared_state, told_of_missing
from ..fsdp.states.table import SteppedParam
from ..fsdp.states.values import Like, same
from ..fsdp.unit.local_params import LocalParam
from .boxes import Read, reads_of
from .errors import CheckpointError
from .files import Chunk
from .gradients import Sums
from .model_plan import check_fits
from .optimizers import GRADIENT, Group, Named
from .pieces import InHandle
from .reading import OfRank, Source
from .values import decode

Convert = Mapping[str, str] | None  # key in the saved state -> key in the state here

_WAY_OUT = (
    "make an optimizer of the saved class; or pass checkpoint.load(..., convert={}), which keeps the settings of the "
    "new optimizer and starts its state anew; or convert={saved key: new key}, such as {'exp_avg': 'momentum_buffer'}, "
    "which loads these keys and drops the others; or load the model without the optimizer"
)


class OptimizerPlan:
    """The plan of a load into the optimizers of ``named``, empty until ``plan`` is called.

    ``reads``: into existing or new tensors. ``state``: (stepped tensor, its new state). ``gradients``: (stepped tensor,
    its new ``.grad`` or None). ``settings``: of each group. ``without_state``: warnings of parameters that begin
    without state. ``sums``: the accumulated gradients.
    """

    sums: Sums

    def __init__(self, named: Named, told: Mapping[str, Any], source: Source, own: Mapping[str, list[Chunk]]):
        """``told``: the index's ``optimizer``. ``own``: boxes of states that this rank saved alone."""
        self._named, self._told, self._source = named, told, source
        self._states: Mapping[str, Mapping[str, Any]] = told["states"]
        self._saved = {name: i for i, (_, names) in enumerate(told["groups"] or ()) for name in names}
        self._labels = told.get("optimizers", [""] * len(told["groups"] or ()))  # of the saved groups
        self._chunks_of = ChainMap(dict(own), dict(source.optimizer))
        self.reads: list[Read] = []
        self.state: list[tuple[Tensor, dict[str, Any]]] = []
        self.gradients: list[tuple[Tensor, Tensor | None]] = []
        self.settings: list[dict[str, Any]] = []
        self.without_state: list[str] = []

    def plan(self, strict: bool, convert: Convert) -> None:
        """Plan the states, gradients and settings.

        ``strict``: the optimizers here must step every parameter with a saved state, and no other. ``convert``: as in
        ``load``.
        Raises: CheckpointError for parameters, states, shapes and classes that do not fit.
        """
        groups = self._named.groups
        if self._told["groups"] is not None:
            self._check_labels(strict)
        converts = [self._is_converted(group, convert) for group in groups]
        for group, converted in zip(groups, converts, strict=True):
            takes = self._told["groups"] is not None and not converted
            self.settings.append(self._settings_of(group, strict) if takes else {})
        if strict:
            self._check_wanted()
        has = {name for name, state in self._states.items() if state.keys() - {GRADIENT}}
        for group, converted, settings in zip(groups, converts, self.settings, strict=True):
            for one in group.stepped:
                if one.here:
                    state = self._state_of(one, {**group.group, **settings}, convert if converted else None)
                    self.state.append((one.tensor, state))
            steps = [one for one in group.stepped if one.tensor.requires_grad and not converted]
            why = told_of_missing((one, any(param.name in has for param in one.params)) for one in steps)
            self.without_state += [] if why is None else [why]
        for one in self._named.all_stepped():
            if not any(isinstance(param, InHandle) for param in one.params):
                params = one.params if one.is_flat else one.here
                having = [param for param in params if GRADIENT in self._states.get(param.name, {})]
                grad = self._like_param(one, having, GRADIENT, None) if having else None  # the others' part is zero
                self.gradients.append((one.tensor, grad))

    def commit(self) -> None:
        """Set states, settings and gradients, after the reads."""
        for param, values in self.state:
            self._named.set_state(param, values)
        for group, settings in zip(self._named.groups, self.settings, strict=True):
            group.group.update(settings)
        self.sums.put()
        for param, grad in self.gradients:
            _C.set_grad(param, grad)
        self.sums.show()

    def _state_of(self, one: SteppedParam, settings: Mapping[str, Any], convert: Convert) -> dict[str, Any]:
        described: dict[str, dict[str, Any]] = {}  # of the parameters that have a state
        params = self._params_of(one)
        keys = dict.fromkeys(key for param in params for key in self._states.get(param.name, {}) if key != GRADIENT)
        for key in keys if convert is None else (key for key in keys if key in convert):
            for param, value in self._entries(one, params, key):
                described.setdefault(param.name, {})[key] = value
        try:
            shared = shared_state(params, described)
        except StateError as error:
            raise CheckpointError(f"the checkpoint does not fit: {error}") from error
        state, before = {}, self._named.state_of(one.tensor)
        for key, value in (shared or {}).items():
            mine = key if convert is None else convert[key]
            if isinstance(value, Like):
                having = [param for param in params if param.name in described]  # the others' part is zero
                is_whole = all(param in having for param in one.here)
                state[mine] = self._like_param(one, having, key, before.get(mine) if is_whole else None)
            else:
                state[mine] = _placed(settings, one.tensor, mine, value, before.get(mine))
        return state

    def _params_of(self, one: SteppedParam) -> list[LocalParam]:
        """Return the parameters that say which states ``one`` has: of a flat parameter all, so that ranks agree.

        Those here, where states were saved for each rank's piece.
        """
        kinds = [kind for param in one.params for kind in self._states.get(param.name, {}).values()]
        return one.params if one.is_flat and not any(isinstance(kind, dict) for kind in kinds) else one.here

    def _entries(self, one: SteppedParam, params: list[LocalParam], key: str) -> list[tuple[LocalParam, Any]]:
        """Return for each of ``params`` that has ``key`` a ``Like``, or the value.

        A scalar state of a scalar parameter was saved as "box". In one flat parameter with others it is one value for
        all. Raises: CheckpointError if the files have no such value, or it does not fit the layout here.
        """
        kinds = {param: self._states[param.name][key] for param in params if key in self._states.get(param.name, {})}
        first, first_kind = next(iter(kinds.items()))
        if any(isinstance(kind, dict) for kind in kinds.values()):
            if any(one.layout not in kind["pieces"] for kind in kinds.values() if isinstance(kind, dict)):
                raise CheckpointError(
                    f"the optimizer's `{key}` of `{first.name}` was saved for each rank's piece of it, and no piece "
                    "was as here: load with the ranks, strategy and units of the save, or without the optimizer"
                )
            entry = first_kind["pieces"][one.layout] if isinstance(first_kind, dict) else first_kind
            value = self._value(first, key, entry)
            return [(param, value) for param in kinds]
        are_boxes = all(kind == "box" for kind in kinds.values())
        found: list[tuple[LocalParam, Any]] = []
        for param, kind in kinds.items():
            is_box = kind == "box" and (bool(param.shape) or are_boxes)
            like_param = Like(param.shape, self._dtype_of(one, param, key)) if is_box else None
            found.append((param, like_param or self._value(param, key, kind)))
        value = found[0][1]
        dims = None if isinstance(value, Like) else next((one for one in find_tensors(value) if one.dim()), None)
        fits = (isinstance(first_kind, list) and len(first_kind) == 3) or one.lies_whole(first)
        if dims is not None and not fits:
            raise CheckpointError(
                f"the optimizer's `{key}` of `{first.name}` has shape {tuple(dims.shape)}, which has no element for "
                "each of the parameter: it fits where the parameter lies whole on a rank, as with NO_SHARD"
            )
        return found

    def _value(self, param: LocalParam, key: str, kind: Any) -> Any:
        if isinstance(kind, list):
            return decode(kind[0], OfRank(self._source, kind[1]))
        return self._source.whole(_name(param, key), self._chunks(param, key, self._source.optimizer))

    def _chunks(self, param: LocalParam, key: str, chunks_of: Mapping[str, list[Chunk]]) -> list[Chunk]:
        if not chunks_of.get(_name(param, key)):
            raise CheckpointError(f"the checkpoint's files have no `{_name(param, key)}`")
        return chunks_of[_name(param, key)]

    def _dtype_of(self, one: SteppedParam, param: LocalParam, key: str) -> torch.dtype:
        """Return the dtype of a state here: the file's; or the parameter's, if the state had the parameter's there."""
        chunk, model = self._chunks(param, key, self._chunks_of)[0], self._source.model
        saved = next((model[name] for name in param.names if name in model), None)
        return one.tensor.dtype if saved is not None and saved[0].dtype == chunk.dtype else chunk.torch_dtype(key)

    def _like_param(self, one: SteppedParam, here: list[LocalParam], key: str, before: Any) -> Tensor:
        """Plan the reads of a state like the parameter; return its tensor: ``before`` if it fits, else a new one."""
        param, dtype = one.tensor, self._dtype_of(one, here[0], key)
        fits = isinstance(before, Tensor) and before.shape == param.shape and before.dtype == dtype
        new = functools.partial(torch.empty_like, param, dtype=dtype, memory_format=torch.preserve_format)
        state = before if fits else new()
        flat = in_order(state.detach(), param.stride())
        if flat.untyped_storage().data_ptr() != state.untyped_storage().data_ptr():  # other strides: flat is a copy
            state = new()
            flat = in_order(state.detach(), param.stride())
        end = 0
        for begin, numel in [*((held.offset, held.numel) for held in here if held.numel), (flat.numel(), 0)]:
            if state is not before and end < begin:
                flat[end:begin].zero_()  # padding, or a parameter without this state: nothing is read there
            end = begin + numel
        for held in here:
            name, chunks = _name(held, key), self._chunks(held, key, self._chunks_of)
            check_fits(name, chunks, held.shape, dtype)
            self.reads += reads_of(name, chunks, held.dense, held.start, flat.narrow(0, held.offset, held.numel))
        return state

    def _is_converted(self, group: Group, convert: Convert) -> bool:
        """Whether the saved state of ``group`` is of another class and is converted.

        Raises: CheckpointError naming both classes, if they differ and ``convert`` is None; naming a key, if the class
        here needs it and ``convert`` does not give it, or gives it twice.
        """
        if convert is not None and not all(isinstance(key, str) for pair in convert.items() for key in pair):
            raise CheckpointError(f"expected convert= to have str for keys and values, got {convert!r}")
        names = [one.name for one in group.params]
        numbers = dict.fromkeys(self._saved[name] for name in names if name in self._saved)
        kinds = (self._told.get("classes", {}).get(self._labels[number]) for number in numbers)
        before, here = next((kind for kind in kinds if kind is not None), None), self._named.classes[group.label]
        keys = {name: [key for key in self._told["states"].get(name, {}) if key != GRADIENT] for name in names}
        why: str | None = None
        if before is None:
            why = why_not(group.optimizer, [self._told["groups"][number][0] for number in numbers], keys)
        elif before != here:
            why = f"it was saved of {before}"
        if why is not None and convert is None:
            raise CheckpointError(
                f"the optimizer of group {group.number}, of `{names[0]}` and more, is {here}, and the saved state is "
                f"of another class: {why}. Expected the same class: {_WAY_OUT}"
            )
        if convert is None or before == here:
            return False
        taken = {name: [convert[key] for key in own if key in convert] for name, own in keys.items()}
        for name, own in taken.items():
            if len(set(own)) != len(own):
                raise CheckpointError(f"convert={dict(convert)!r} gives two states of `{name}` one name: {own}")
        lacking = lacks_state(group.optimizer, taken)
        if lacking is not None:
            raise CheckpointError(f"convert={dict(convert)!r}: {lacking}")
        return True

    def _check_wanted(self) -> None:
        """Raises: CheckpointError for a saved state of a parameter that no optimizer here steps."""
        wanted = {param.name for group in self._named.groups for param in group.params}
        for name, state in self._states.items():
            if name not in wanted and state.keys() - {GRADIENT}:
                raise CheckpointError(
                    f"the checkpoint has optimizer states of `{name}`, which no group of the optimizer has here: pass "
                    "all of them, of the model's parameters, or strict=False"
                )

    def _check_labels(self, strict: bool) -> None:
        """Raises: CheckpointError if a parameter has changed its optimizer, or a saved one has no parameter here."""
        saved, labels = self._saved, self._labels
        absent = dict.fromkeys(labels) if strict and len(set(labels)) > 1 else {}
        for group in self._named.groups:
            for name in (param.name for param in group.params if param.name in saved):
                before = labels[saved[name]]
                absent.pop(before, None)
                if before != group.label and group.label in labels:
                    raise CheckpointError(
                        f"parameter `{name}` was saved in the optimizer `{before}`, and is in `{group.label}` here"
                    )
        for label in absent:
            names = [name for name, number in saved.items() if labels[number] == label]
            if names:
                raise CheckpointError(
                    f"the checkpoint has an optimizer `{label}`, of `{names[0]}` and more, and none of the given ones "
                    "has these parameters: pass all of them, or strict=False"
                )

    def _settings_of(self, group: Group, strict: bool) -> dict[str, Any]:
        """Return the saved settings for ``group``, on the devices of those here. Empty: none of it was saved.

        Raises: CheckpointError if a parameter was in no group, and ``strict``, or its groups had different settings.
        """
        wanted = {param.name for param in group.params}
        absent = wanted - self._saved.keys()
        if absent and strict:
            raise CheckpointError(
                f"the checkpoint's optimizer has no parameter `{min(absent)}`, which group {group.number} has: make "
                "the optimizer as it was saved, or pass strict=False, which loads the states that both have"
            )
        wanted -= absent
        numbers, of_first = sorted({self._saved[name] for name in wanted}), OfRank(self._source, 0)
        saved = (self._told["groups"][number][0].items() for number in numbers)
        found, *others = [{key: decode(value, of_first) for key, value in items} for items in saved] or [{}]
        if not all(same(found, other) for other in others):
            raise CheckpointError(
                f"the optimizer's group {group.number}, of `{group.params[0].name}` and more, has parameters of "
                "several saved groups, with different settings"
            )
        for key, value in found.items():
            before = group.group.get(key)
            if isinstance(value, Tensor) and isinstance(before, Tensor):
                found[key] = value.to(before.device)
        return found


def _name(held: LocalParam, key: str) -> str:
    return f"state.{held.name}.{key}"


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
