"""One unit: its flat parameters, its C object ``core``, and the user's writes to its parameters.

A unit has one flat parameter, or with ``segments=True`` one for each (dtype, requires_grad). ``core`` runs the step;
this file checks and copies values. The wrapper's constructor builds a unit; a copied or loaded one comes alive again.
"""

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import _C
from ...common.tensors import is_at, refuse_freed
from ...common.warned import warn_user
from ..desync.unit_ids import assign_copy
from ..errors import StateError
from ..names import FLAT_PARAM, listed
from ..sharding.deferred import is_blank
from ..sharding.flat_param import AWAY, FlatParam, ShardSlice
from ..sharding.parameters import Name, Options, ParamInfo, by_flat_param, check_not_rounded, check_tensors, in_order
from ..sharding.placement import Placement
from ..sharding.torch_attributes import describe
from .registry import FREED, all_units, own, owner_of_param, replace_param
from .torch_calls import is_exchanged

_IN_BACKWARD = (
    " In backward this means that what the unit computed reached the loss by another way than its output, or "
    "that a gradient is differentiated again (create_graph=True), after the unit was freed."
)


_MADE_AGAIN = ("core", "places")  # attributes that a copy or a loaded unit makes anew
_Write = tuple[FlatParam, int, Tensor]  # a flat parameter, a place in its shard, values


class Unit:
    """The parameters that one wrapper manages. Source of the layout: torch 2.13 ``FlatParamHandle``.

    Building it copies this rank's part of ``originals`` into the shard and frees their memory, one by one.
    Raises: ValueError naming a parameter that cannot be flattened with the others.
    """

    is_away = False  # whether this rank is none of those that hold the model; pickles of older versions lack it

    def __init__(self, module: nn.Module, originals: list[ParamInfo], options: Options, name: str):
        self.module = module
        self.options = options
        self.name = name
        check_tensors(originals, options)
        for original in originals:
            for place in original.names if original.form is not None or original.kept is not None else ():
                place.module._parameters[place.name] = original.param  # so that nothing else keeps its memory
        self.flat_params = [FlatParam(group, options) for group in by_flat_param(originals, options)]
        if not options.use_orig_params:
            self._hide_originals()
        self.summoned: Any = None  # the Summoned of this unit while it is summoned
        # FQN -> two ranks with different initial values. A load removes the loaded parameters
        self.mismatched: dict[str, list[int]] = {}
        self.make_core()

    def make_core(self) -> None:
        """Make ``core`` from the flat parameters, and register the unit. Only for a unit that has not run yet."""
        specs = tuple(flat_param.spec(self.options) for flat_param in self.flat_params)
        reshards = self.options.placement.reshard_after_forward
        write_back = functools.partial(_write_back, weakref.ref(self))
        self.core = _C.Unit(self.name, specs, reshards, write_back, self._freed_reason())
        self.core.alias_params()
        self.core.make_views()
        for flat_param in self.flat_params:
            describe(flat_param)
        own(self)

    def _freed_reason(self) -> str:
        """The error text for a use of freed parameters."""
        names = [f"`{original.fqn}`" for original in self.originals]
        *others, last = listed(names) or ["none"]
        some = f"one of {', '.join(others)} and {last}" if others else last
        return (FREED + _IN_BACKWARD).format(unit=self.name, names=some)

    def rename(self, name: str) -> None:
        """Set the name in messages."""
        self.name = self.core.name = name
        self.core.reason = self._freed_reason()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unit":
        copied = object.__new__(Unit)
        memo[id(self)] = copied
        shared = (*(flat_param.layout for flat_param in self.flat_params), *self.options.extensions)  # immutable
        memo.update((id(one), one) for one in shared)
        for key, value in vars(self).items():
            if key not in _MADE_AGAIN:
                setattr(copied, key, copy.deepcopy(value, memo))
        copied.come_alive()
        assign_copy(copied, self)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Leave out ``core``, and a callable ``atomic``: its blocks are chosen, and it may not be picklable."""
        atomic = None if callable(self.options.atomic) else self.options.atomic
        return {
            **{key: value for key, value in vars(self).items() if key not in _MADE_AGAIN},
            "options": dataclasses.replace(self.options, atomic=atomic),
        }

    def come_alive(self) -> None:
        """Make ``core`` for a copied or loaded unit, once all its modules exist: they get their pieces or views."""
        for flat_param in self.flat_params:
            flat_param.pin()
            flat_param.clear_padding()  # NaN, where an optimizer stepped a gradient that was not finite
        self.make_core()

    def go_on(self) -> None:
        """Go on after the shards got data of another dtype or device."""
        for flat_param in self.flat_params:
            flat_param.pin()
            if not is_at(flat_param.flat._local_shard, flat_param.flat):
                describe(flat_param)
        self.core.alias_params()
        self.core.invalidate()
        self.core.make_views()

    def bind(self, placement: Placement, holds: bool) -> Callable[[], None]:
        """Bind the flat parameters to the ranks of ``placement``, without values and gradients, with a new ``core``.

        Parameters stay the same objects. ``holds``: as in ``FlatParam.bind``. Between passes; the next forward joins a
        root. Return a function that binds the unit as before.
        """
        core, options, was_away = self.core, self.options, self.is_away
        shown = [(param, param.grad) for _, param in self.parameters()]
        steps: list[Callable[[], None]] = []

        def undo() -> None:
            self.core.put(False)
            for step in steps:
                step()
            self.core, self.options, self.is_away = core, options, was_away
            if not was_away:
                self.go_on()
            for param, grad in shown:
                _C.set_grad(param, grad)

        try:
            core.put(False)
            for param, _ in shown:
                _C.set_grad(param, None)
            for flat_param in self.flat_params:
                steps.append(flat_param.bind(placement, holds))
            self.options, self.is_away = dataclasses.replace(options, placement=placement), not holds
            self.make_core()
        except BaseException:
            undo()
            raise
        return undo

    def check_holds(self) -> None:
        """Raises: StateError if this rank has given up its shards."""
        if self.is_away:
            raise StateError(f"{self.name}: {AWAY}")

    def _hide_originals(self) -> None:
        """Take the original parameters from their modules and register the flat ones instead."""
        for original in self.originals:
            _warn_of_hooks(self.name, original)
            for place in original.names:
                delattr(place.module, place.name)
        self.register_flat()

    @functools.cached_property
    def places(self) -> set[tuple[nn.Module, str]]:
        """The places, (module, name), of the original parameters."""
        return {(name.module, name.name) for original in self.originals for name in original.names}

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of its model runs."""
        return self.core.root is not None and self.core.root.state == "FORWARD"

    def trained(self, part: int) -> dict[str, bool]:
        """FQN -> whether it requires grad, for the flat parameter with index ``part``."""
        flat_param = self.flat_params[part]
        return {original.fqn: flat_param.trains(original) for original in flat_param.originals}

    def flat_names(self) -> list[str]:
        return [FLAT_PARAM if i == 0 else f"{FLAT_PARAM}_{i}" for i in range(len(self.flat_params))]

    def register_flat(self) -> None:
        """With ``use_orig_params=False``: register the flat parameters in the module."""
        if not self.options.use_orig_params:
            for name, flat_param in zip(self.flat_names(), self.flat_params, strict=True):
                self.module.register_parameter(name, flat_param.flat)

    def unregister_flat(self) -> None:
        """With ``use_orig_params=False``: take the flat parameters out of the module. It keeps its other names."""
        if not self.options.use_orig_params:
            for name in self.flat_names():
                self.module._parameters.pop(name, None)

    def filled(self, but: Iterable[ParamInfo] = ()) -> None:
        """Note that values were written to the shards, except for the parameters ``but``.

        Clears padding, drops the templates of deferred parameters, and marks gathered data as out of date.
        """
        others = {id(original) for original in but}
        for flat_param in self.flat_params:
            flat_param.clear_padding()
        for original in self.originals:
            if id(original) not in others:
                original.template = None
        self.core.invalidate()

    def loaded(self, but: Iterable[ParamInfo] = ()) -> None:
        """Note that all ranks have loaded equal values: only parameters in ``but`` can still be mismatched."""
        left = {original.fqn for original in but}
        self.mismatched = {fqn: ranks for fqn, ranks in self.mismatched.items() if fqn in left}

    def why_mismatched(self) -> str | None:
        """The error text for the first mismatched parameter; None: there is none."""
        for fqn, (rank, other) in self.mismatched.items():
            return (
                f"parameter `{fqn}` of {self.name} has other values on rank {rank} than on rank {other}: "
                "each rank keeps a shard of its values, so the full parameter would be a mixture. Build the model from "
                "one seed on all ranks, load one checkpoint after it was wrapped, or pass sync_module_states=True; "
                "check_values=False turns this comparison off"
            )
        return None

    def check_not_mismatched(self, what: str) -> None:
        """Raises: ValueError, naming the call ``what`` and a mismatched parameter, if there is one."""
        if self.mismatched:
            raise ValueError(f"{what}: {self.why_mismatched()}")

    def check_filled(self) -> None:
        """Raises: ValueError naming a parameter that has no values yet; as ``check_holds``."""
        self.check_holds()
        for flat_param in self.flat_params:
            for here in flat_param.shard_slices() if flat_param.is_deferred else ():
                if here.original.template is not None and here.numel > 0 and is_blank(here.of(flat_param.flat)):
                    raise ValueError(
                        f"parameter `{here.original.fqn}` of {self.name} has no values yet: no file or state dict has "
                        "brought any since defer_init; load or initialize it first"
                    )

    def without(self, has: Callable[[str], bool]) -> list[ParamInfo]:
        """The parameters for which ``has(fqn)`` is False for every FQN."""
        return [original for original in self.originals if not any(map(has, original.fqns))]

    def check_registered(self) -> None:
        """Raises: StateError if the module has another tensor in place of a flat parameter.

        The forward calls this, because ``core`` gathers from the flat parameter and would ignore the other tensor.
        """
        for name, flat_param in zip(self.flat_names(), self.flat_params, strict=True):
            if self.module._parameters.get(name, flat_param.flat) is not flat_param.flat:
                _let_swap_back()
                how = " by functional_call()" if is_exchanged(self.module, name) else ""
                raise StateError(
                    f"{self.name}: its flat parameter `{name}` was exchanged{how}, and only the one it has is used: "
                    "set the data of that one, or call the module before it is wrapped"
                )

    def explain(self, error: BaseException) -> None:
        """Raises: RuntimeError from ``error``, which ended a forward, if a write to a parameter in place caused it."""
        if self.core.is_written and isinstance(error, RuntimeError) and "modified inplace" in str(error):
            raise RuntimeError(
                f"{self.name}: a parameter was changed in place in the middle of its forward; the change is "
                "dropped. Set the parameter's .data there, or change it between steps"
            ) from error

    def check_shards(self, error: BaseException) -> None:
        """Raises: ValueError from ``error``, which ended a forward, if a flat parameter has data of another shape."""
        for name, flat_param in zip(self.flat_names(), self.flat_params, strict=True):
            if flat_param.flat.shape != (flat_param.layout.shard_numel,):
                raise ValueError(
                    f"{self.name}: expected the data of its flat parameter `{name}` to have shape "
                    f"({flat_param.layout.shard_numel},), got {tuple(flat_param.flat.shape)}: a shard keeps its size"
                ) from error

    def sync_user_writes(self) -> None:
        """Take the user's writes to parameters, and replaced parameters, into the shards. Before shards are read.

        Does nothing while the unit is summoned. Raises: as ``write_back``, and ValueError for a shard whose storage was
        freed.
        """
        if self.summoned is None:
            self.check_holds()
            for flat_param in self.flat_params:
                flat_param.refuse_freed(flat_param.flat)
            self.core.sync_user_writes()

    def refuse_freed_gradients(self) -> None:
        """Raises: ValueError naming a gradient whose storage was freed. Before gradients are read or written."""
        for flat_param in self.flat_params:
            if not flat_param.use_orig_params:
                flat_param.refuse_freed(flat_param.flat.grad)
            for original in flat_param.originals if flat_param.use_orig_params else ():
                refuse_freed(original.param.grad, f"the gradient of `{original.fqn}`")

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the values of replaced parameters, and of parameters with other data, into the shard.

        With ``use_orig_params`` a replacement becomes the original parameter. Otherwise its values are taken, and the
        module has the view again. ``core`` calls this when it finds another object or address. All values are checked
        before the first is copied.

        Raises: ValueError naming a parameter whose values do not fit, or whose place has no Parameter; StateError
        within ``functional_call``. The shards are as before.
        """
        try:
            writes, replaced = self._find_writes()
        except ValueError:
            self.core.alias_params()
            raise
        for k, i, original, now in replaced:
            self.adopt(k, i, original, now)
        for flat_param in {id(flat_param): flat_param for flat_param, _, _ in writes}.values():
            if flat_param.leave_memory():
                describe(flat_param)
        for flat_param, start, value in writes:
            flat_param.flat.detach().narrow(0, start, value.numel()).copy_(value)
            if value.device.type != "cpu":  # value is freed here, and may belong to another stream
                value.record_stream(torch.accelerator.current_stream(value.device))
        self.core.alias_params()
        if replaced:
            self.core.put(self.core.shows_views)

    def _find_writes(self) -> tuple[list[_Write], list[tuple[int, int, ParamInfo, nn.Parameter]]]:
        """Return the writes, and of each replaced parameter what ``adopt`` takes. Raises: as ``write_back``."""
        writes: list[_Write] = []
        replaced: list[tuple[int, int, ParamInfo, nn.Parameter]] = []
        for k, (flat_param, views) in enumerate(zip(self.flat_params, self.core.views(), strict=True)):
            shard = flat_param.flat.detach()
            for i, (piece, here) in enumerate(zip(flat_param.pieces, flat_param.shard_slices(), strict=True)):
                now = self.standing_for(here.original, None if views is None else views[i])
                if now is not None and now is not here.original.param:
                    if now.grad is not None and (flat_param.is_sharded or not flat_param.use_orig_params):
                        raise StateError(
                            f"{self.name}: Cannot writeback: parameter `{here.original.fqn}` was replaced by a "
                            "Parameter that has a gradient; no rank would keep its part of it: set its `.grad` "
                            "to None before"
                        )
                    replaced.append((k, i, here.original, now))
                elif not flat_param.use_orig_params:
                    continue
                value = here.original.param.detach() if now is None else now.detach()
                held = max(here.numel, 0)
                if value.numel() + held and not is_at(value, here.of(shard)):
                    target = shard.narrow(0, here.start, held)
                    value = self._fit(here, piece.intra_param_start_idx or 0, value, target)
                    writes.append((flat_param, here.start, value))
        return writes, replaced

    def standing_for(self, original: ParamInfo, view: Tensor | None) -> nn.Parameter | None:
        """The Parameter that the user has put in the place of ``original``; None: modules have it, or its ``view``.

        Raises: ValueError naming the parameter if the replacement cannot be taken; StateError in ``functional_call``.
        """
        found: list[Any] = []
        for place in original.names:
            own = [vars(place.module).get(place.name), place.module._parameters.get(place.name)]
            have = [value for value in own if value is not None] or [_attribute(place)]
            found.append(next((value for value in have if value is not original.param and value is not view), original))
        if all(value is original for value in found):
            return None
        what = f"{self.name}: parameter `{original.fqn}`"
        if any(is_exchanged(place.module, place.name) for place in original.names):
            _let_swap_back()
            raise StateError(
                f"{what} is exchanged by functional_call(), for tensors that are not sharded: call it on the module "
                "before it is wrapped, or on a copy with the values of state_dict()"
            )
        now = found[0]
        if original.form is not None:
            raise ValueError(
                f"{what} was replaced, and it is stored as {original.form}: write to it inside "
                "summon_full_params(), or replace it before wrapping"
            )
        if not isinstance(now, nn.Parameter):
            raise ValueError(
                f"{what} was deleted, or replaced by something that is no nn.Parameter ({type(now).__name__}): do that "
                "before wrapping (ties, parametrizations, weight norm and pruning too)"
            )
        if any(value is not now for value in found):
            names = ", ".join(f"`{place.fqn}`" for place in original.names)
            raise ValueError(f"{what} is shared by {names}, and not all of them were replaced: replace all, or none")
        if not _C.is_plain_tensor(now):
            raise ValueError(f"{what} was replaced by a {type(now).__name__} that is not plain and dense")
        owner = owner_of_param(now)
        if owner is not None:
            raise ValueError(
                f"{what} was replaced by `{owner.name}` of {owner.unit.name}: tie parameters before wrapping, in one "
                "unit; to exchange values, set their .data"
            )
        if not self.options.use_orig_params and now.requires_grad != original.param.requires_grad:
            raise ValueError(
                f"{what} was replaced by one that {'requires' if now.requires_grad else 'does not require'} grad; that "
                "is decided for all of a flat parameter: use use_orig_params=True, or replace it before wrapping"
            )
        return now

    def _fit(self, here: ShardSlice, start: int, value: Tensor, target: Tensor) -> Tensor:
        """Convert ``value``, a whole parameter or this rank's piece, to the 1-D elements for ``target``.

        ``start``: the first element of the piece in the whole. Returns a copy if ``value`` lies in the shard.
        Raises: ValueError for another shape, for freed storage, and if the dtype of the shard would round.
        """
        original = here.original
        if not _C.is_plain_tensor(value):
            raise ValueError(f"{self.name}: the new data of parameter `{original.fqn}` are not plain and dense")
        if _C.lacks_memory(value):
            raise ValueError(
                f"{self.name}: the storage of the new data of parameter `{original.fqn}` was freed or resized: it has "
                "no values"
            )
        if value.shape == original.shape:
            value = in_order(value, original.stride).narrow(0, start, target.numel())
        elif value.shape == here.shape:
            value = in_order(value, here.stride)
        elif value.numel() != target.numel():
            raise StateError(
                f"{self.name}: Cannot writeback: expected the new data of parameter `{original.fqn}` to have its shape "
                f"{tuple(original.shape)} or that of its piece here, {here.shape}, got {tuple(value.shape)}; it is as "
                "before"
            )
        value = check_not_rounded(self.name, original, value.reshape(-1), target.dtype)
        return value.clone() if value.untyped_storage().data_ptr() == target.untyped_storage().data_ptr() else value

    def adopt(self, k: int, i: int, original: ParamInfo, param: nn.Parameter) -> None:
        """Make ``param`` the i-th original parameter of the k-th flat parameter. The old one keeps a copy of its data.

        With ``use_orig_params=False`` only remove ``param`` from the modules, so that the view can return.
        """
        if self.options.use_orig_params:
            old = original.param
            old.data = old.detach().clone()
            original.param = param
            self.core.adopt(k, i, param)
            flat: Any = self.flat_params[k].flat
            flat._params[i] = param
            replace_param(self, k, original.fqn, old, param)
            for place in original.names:
                place.module._parameters[place.name] = param
        else:
            for place in original.names:
                place.module._parameters.pop(place.name, None)
                vars(place.module)[place.name] = None  # put() sets the view here

    def parameters(self) -> Iterator[tuple[FlatParam, nn.Parameter]]:
        """Yield the parameters that an optimizer steps, each with its flat parameter."""
        for flat_param in self.flat_params:
            for param in flat_param.stepped:
                yield flat_param, param

    @property
    def originals(self) -> list[ParamInfo]:
        """The original parameters, in the order of the layouts."""
        return [original for flat_param in self.flat_params for original in flat_param.originals]


def _warn_of_hooks(name: str, original: ParamInfo) -> None:
    """Warn that hooks of an original parameter will not run with ``use_orig_params=False``."""
    if original.param._backward_hooks or getattr(original.param, "_post_accumulate_grad_hooks", None):
        warn_user(
            f"{name}: hooks of `{original.fqn}` are not called, as it becomes a part of a flat parameter: register "
            "them on that when it is wrapped, or pass use_orig_params=True"
        )


def _attribute(place: Name) -> Any:
    """The attribute that a module's class, such as a parametrization, has under a parameter's name; None on failure."""
    try:
        return getattr(place.module, place.name, None)
    except Exception:
        return None


def _let_swap_back() -> None:
    """Move Parameters that ``functional_call`` has put in place of views into ``__dict__``, before an error is raised.

    Else it would put a view back into ``_parameters``, which fails, and the module would keep the wrong tensor.
    """
    for unit in all_units():
        for flat_param in unit.flat_params if unit.summoned is None and not unit.options.use_orig_params else ():
            for place in (place for original in flat_param.originals for place in original.names):
                given = place.module._parameters.pop(place.name, None)
                if given is not None:
                    vars(place.module)[place.name] = given


def _write_back(unit: "weakref.ref[Unit]") -> None:
    """Call ``write_back``, unless the unit is gone or summoned. ``core`` holds no strong reference to the unit."""
    alive = unit()
    if alive is not None and alive.summoned is None:
        alive.write_back()


def units_of(modules: Iterable[nn.Module]) -> Iterator[Unit]:
    """Yield the units of the wrappers among ``modules``."""
    for module in modules:
        unit = vars(module).get("_unit")
        if isinstance(unit, Unit):
            yield unit
