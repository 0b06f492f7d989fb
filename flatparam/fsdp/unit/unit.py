"""One unit: its parameters flattened into shards, and the C core's step over them.

A unit has one segment for each (dtype, requires_grad) that it holds apart: a flat parameter with a layout of its own.
"""

import copy
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ... import _C
from ...common.tensors import is_at, lacks_memory, refuse_freed
from ..desync.unit_ids import enroll_copy
from ..errors import StateError
from ..names import FLAT_PARAM, listed
from ..sharding.deferred import is_blank
from ..sharding.flat_param import Here, Segment
from ..sharding.parameters import Name, Options, Original, by_segment, check_not_rounded, check_tensors, in_order
from ..sharding.torch_attributes import describe
from .registry import FREED, all_units, own, owner_of_param, replace_param
from .torch_calls import is_exchanged

_IN_BACKWARD = (
    " In backward this means that what the unit computed reached the loss by another way than its output, or "
    "that a gradient is differentiated again (create_graph=True), after the unit was freed."
)


_MADE_AGAIN = ("step", "places")  # by a copy


class Unit:
    """The parameters that one wrapper manages. Source of the layout: torch 2.13 ``FlatParamHandle``.

    Raises: ValueError naming the parameter that cannot be flattened with the others.
    """

    def __init__(self, module: nn.Module, originals: list[Original], options: Options, name: str):
        self.module = module
        self.options = options
        self.name = name
        check_tensors(originals, options)
        for original in originals:
            for place in original.names if original.form is not None or original.kept is not None else ():
                place.module._parameters[place.name] = original.param  # its own memory is free once it was copied
        self.segments = [Segment(group, options) for group in by_segment(originals, options)]
        if not options.use_orig_params:
            self._hide_originals()
        self.summoned: Any = None  # what summon.py keeps while the full parameters are there
        self.apart: dict[str, list[int]] = {}  # names that two ranks had other values for and were not loaded since
        self.make_step()

    def make_step(self) -> None:
        """Make the step of a unit that has not run yet."""
        name, options = self.name, self.options
        self.step = _C.Unit(
            name,
            tuple(segment.spec(options) for segment in self.segments),
            options.placement.reshard_after_forward,
            functools.partial(_take_back, weakref.ref(self)),
            self._freed_reason(),
        )
        self.step.point_params()
        self.step.make_views()
        for segment in self.segments:
            describe(segment)
        own(self)

    def _freed_reason(self) -> str:
        """What is said when freed parameters are used."""
        names = [f"`{original.fqn}`" for segment in self.segments for original in segment.originals]
        *others, last = listed(names) or ["none"]
        return (FREED + _IN_BACKWARD).format(
            unit=self.name, names=f"one of {', '.join(others)} and {last}" if others else last
        )

    def rename(self, name: str) -> None:
        """Be called ``name`` in messages."""
        self.name = self.step.name = name
        self.step.reason = self._freed_reason()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unit":
        copied = object.__new__(Unit)
        memo[id(self)] = copied
        shared = (*(segment.layout for segment in self.segments), *self.options.extensions)  # which never change
        memo.update((id(one), one) for one in shared)
        for key, value in vars(self).items():
            if key not in _MADE_AGAIN:
                setattr(copied, key, copy.deepcopy(value, memo))
        copied.come_alive()
        enroll_copy(copied, self)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: all but the step. The blocks were chosen, so what chose them need not be picklable."""
        atomic = None if callable(self.options.atomic) else self.options.atomic
        return {
            **{key: value for key, value in vars(self).items() if key not in _MADE_AGAIN},
            "options": dataclasses.replace(self.options, atomic=atomic),
        }

    def come_alive(self) -> None:
        """Make the step of a copy, whose modules are all there, and let them have their pieces or views."""
        for segment in self.segments:
            segment.pin()
            segment.clear_padding()  # a pickle of an older release has other values there
        self.make_step()

    def go_on(self) -> None:
        """Go on with shards that were given data of another dtype or device, between passes."""
        for segment in self.segments:
            segment.pin()
            if not is_at(segment.flat._local_shard, segment.flat):
                describe(segment)
        self.step.point_params()
        self.step.invalidate()
        self.step.make_views()

    def _hide_originals(self) -> None:
        """Take the original parameters from their modules and register the flat ones instead."""
        for segment in self.segments:
            for original in segment.originals:
                _warn_of_hooks(self.name, original)
                for place in original.names:
                    delattr(place.module, place.name)
        self.register_flat()

    @functools.cached_property
    def places(self) -> set[tuple[nn.Module, str]]:
        """Where modules have original parameters, and by which names."""
        names = (name for segment in self.segments for original in segment.originals for name in original.names)
        return {(name.module, name.name) for name in names}

    @property
    def is_in_forward(self) -> bool:
        """Whether its model is in a forward."""
        return self.step.root is not None and self.step.root.state == "FORWARD"

    def trained(self, part: int) -> dict[str, bool]:
        """Whether each parameter of a flat parameter requires grad, by FQN."""
        segment = self.segments[part]
        return {original.fqn: segment.trains(original) for original in segment.originals}

    def flat_names(self) -> list[str]:
        return [FLAT_PARAM if i == 0 else f"{FLAT_PARAM}_{i}" for i in range(len(self.segments))]

    def register_flat(self) -> None:
        if not self.options.use_orig_params:
            for name, segment in zip(self.flat_names(), self.segments, strict=True):
                self.module.register_parameter(name, segment.flat)

    def unregister_flat(self) -> None:
        if not self.options.use_orig_params:
            for name in self.flat_names():
                self.module._parameters.pop(name, None)

    def filled(self, but: Iterable[Original] = ()) -> None:
        """Note that the shards were written, and have values. ``but``: all but those of these parameters."""
        others = {id(original) for original in but}
        for segment in self.segments:
            segment.clear_padding()
            for original in segment.originals:
                if id(original) not in others:
                    original.template = None
        self.step.invalidate()

    def loaded(self, but: Iterable[Original] = ()) -> None:
        """Note that ranks have loaded the same. ``but``: all but these parameters."""
        left = {original.fqn for original in but}
        self.apart = {fqn: ranks for fqn, ranks in self.apart.items() if fqn in left}

    def why_apart(self) -> str | None:
        """Words for a parameter that ranks have other values for, if there is one."""
        for fqn, (rank, other) in self.apart.items():
            return (
                f"parameter `{fqn}` of {self.name} has other values on rank {rank} than on rank {other}: "
                "each rank keeps a shard of its own, so the whole would be a mixture. Build the model from one "
                "seed on all ranks, load one checkpoint after it was wrapped, or pass sync_module_states=True; "
                "check_values=False turns this comparison off"
            )
        return None

    def check_not_apart(self, what: str) -> None:
        """Raises: ValueError, naming the call ``what``, if ranks have other values than each other, from the start."""
        if self.apart:
            raise ValueError(f"{what}: {self.why_apart()}")

    def check_filled(self) -> None:
        """Raises: ValueError naming a parameter that has no values yet."""
        for segment in self.segments:
            for here in segment.here() if segment.is_deferred else ():
                if here.original.template is not None and here.numel > 0 and is_blank(here.of(segment.flat)):
                    raise ValueError(
                        f"parameter `{here.original.fqn}` of {self.name} has no values yet: no file or state dict has "
                        "brought any since defer_init; load or initialize it first"
                    )

    def without(self, has: Callable[[str], bool]) -> list[Original]:
        """Its parameters of which ``has`` says of no name that it is there."""
        originals = (original for segment in self.segments for original in segment.originals)
        return [original for original in originals if not any(map(has, original.fqns))]

    def check_registered(self) -> None:
        """Raises: StateError if its module has another tensor in place of a flat parameter."""
        for name, segment in zip(self.flat_names(), self.segments, strict=True):
            if self.module._parameters.get(name, segment.flat) is not segment.flat:
                _let_swap_back()
                how = " by functional_call()" if is_exchanged(self.module, name) else ""
                raise StateError(
                    f"{self.name}: its flat parameter `{name}` was exchanged{how}, and only the one it has is used: "
                    "set the data of that one, or call the module before it is wrapped"
                )

    def explain(self, error: BaseException) -> None:
        """Raises: RuntimeError from ``error``, which ended a forward, if that comes of a write in place."""
        if self.step.is_written and isinstance(error, RuntimeError) and "modified inplace" in str(error):
            raise RuntimeError(
                f"{self.name}: a parameter was changed in place in the middle of its forward; the change is "
                "dropped. Set the parameter's .data there, or change it between steps"
            ) from error

    def check_shards(self, error: BaseException) -> None:
        """Raises: ValueError from ``error`` if a flat parameter was given data of another shape: it comes from that."""
        for name, segment in zip(self.flat_names(), self.segments, strict=True):
            if segment.flat.shape != (segment.layout.shard_numel,):
                raise ValueError(
                    f"{self.name}: expected the data of its flat parameter `{name}` to have shape "
                    f"({segment.layout.shard_numel},), got {tuple(segment.flat.shape)}: a shard keeps its size"
                ) from error

    def look_over(self) -> None:
        """Take what users have written to parameters, or put in their place, into the shards: before these are read."""
        if self.summoned is None:
            for segment in self.segments:
                segment.refuse_freed(segment.flat)
            self.step.look_over()

    def refuse_freed_gradients(self) -> None:
        """Before gradients are read or written. Raises: ValueError naming one without memory."""
        for segment in self.segments:
            if not segment.use_orig_params:
                segment.refuse_freed(segment.flat.grad)
            for original in segment.originals if segment.use_orig_params else ():
                refuse_freed(original.param.grad, f"the gradient of `{original.fqn}`")

    @torch.no_grad()
    def take_back(self) -> None:
        """Copy the values of parameters that were replaced, or whose data were, into the shard.

        Another Parameter that stands in an original one's place is that from now on; with ``use_orig_params=False`` its
        place is the view's again.

        Raises: ValueError naming a parameter whose values do not fit, or in whose place is no Parameter, and StateError
        in ``functional_call``; the shards are as they were.
        """
        writes: list[tuple[Tensor, Tensor]] = []
        replaced: list[tuple[int, int, Original, nn.Parameter]] = []
        try:
            for k, (segment, views) in enumerate(zip(self.segments, self.step.views(), strict=True)):
                shard = segment.flat.detach()
                for i, (piece, here) in enumerate(zip(segment.pieces, segment.here(), strict=True)):
                    now = self.standing_for(here.original, None if views is None else views[i])
                    if now is not None and now is not here.original.param:
                        replaced.append((k, i, here.original, now))
                    elif not segment.use_orig_params:
                        continue
                    value = here.original.param.detach() if now is None else now.detach()
                    held = max(here.numel, 0)
                    target = shard.narrow(0, here.start, held)
                    if value.numel() + held and not is_at(value, here.of(shard)):
                        writes.append((target, self._fit(here, piece.intra_param_start_idx or 0, value, target)))
        except ValueError:
            self.step.point_params()
            raise
        for k, i, original, now in replaced:
            self.adopt(k, i, original, now)
        for target, value in writes:
            target.copy_(value)
            if value.device.type != "cpu":  # it may be of another stream, and goes now
                value.record_stream(torch.accelerator.current_stream(value.device))
        self.step.point_params()
        if replaced:
            self.step.put(self.step.shows_views)

    def standing_for(self, original: Original, view: Tensor | None) -> nn.Parameter | None:
        """What modules have in place of ``original`` or its ``view``, if it is neither; None: one of the two.

        Raises: ValueError naming the parameter if it cannot stand there.
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
                f"{what} was replaced, which is in a form of its own, {original.form}: write to it inside "
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
                f"{what} was replaced by `{owner[1]}` of {owner[0].name}: tie parameters before wrapping, in one unit; "
                "to exchange values, set their .data"
            )
        if not self.options.use_orig_params and now.requires_grad != original.param.requires_grad:
            raise ValueError(
                f"{what} was replaced by one that {'requires' if now.requires_grad else 'does not require'} grad; that "
                "is decided for all of a flat parameter: use use_orig_params=True, or replace it before wrapping"
            )
        return now

    def _fit(self, here: Here, start: int, value: Tensor, target: Tensor) -> Tensor:
        """``value``, of the whole or of the piece here, as what ``target`` is to be.

        ``start``: of the piece in the whole. Raises: ValueError for another shape, and where the dtype would round.
        """
        original = here.original
        if not _C.is_plain_tensor(value):
            raise ValueError(f"{self.name}: the new data of parameter `{original.fqn}` are not plain and dense")
        if lacks_memory(value):
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

    def adopt(self, k: int, i: int, original: Original, param: nn.Parameter) -> None:
        """Let ``param`` be the i-th original parameter of the k-th segment; the one before keeps its values."""
        if self.options.use_orig_params:
            old = original.param
            old.data = old.detach().clone()
            original.param = param
            self.step.adopt(k, i, param)
            flat: Any = self.segments[k].flat
            flat._params[i] = param
            replace_param(self, k, original.fqn, old, param)
            for place in original.names:
                place.module._parameters[place.name] = param
        else:
            for place in original.names:
                place.module._parameters.pop(place.name, None)
                vars(place.module)[place.name] = None  # the view comes there

    def parameters(self) -> Iterator[tuple[Segment, nn.Parameter]]:
        """What the optimizer steps: the original parameters, or the flat ones."""
        for segment in self.segments:
            if self.options.use_orig_params:
                for original in segment.originals:
                    yield segment, original.param
            else:
                yield segment, segment.flat


def _warn_of_hooks(name: str, original: Original) -> None:
    """Say that hooks of a parameter that becomes a part of a flat one will not be called."""
    if original.param._backward_hooks or getattr(original.param, "_post_accumulate_grad_hooks", None):
        warnings.warn(
            f"{name}: hooks of `{original.fqn}` are not called, as it becomes a part of a flat parameter: register "
            "them on that when it is wrapped, or pass use_orig_params=True",
            stacklevel=5,
        )


def _attribute(place: Name) -> Any:
    """What the class of a module makes of a parameter's name, which the module does not have; None if it fails."""
    try:
        return getattr(place.module, place.name, None)
    except Exception:
        return None


def _let_swap_back() -> None:
    """Have ``functional_call`` put the views back where it has put Parameters: it would register them, and cannot."""
    for unit in all_units():
        for segment in unit.segments if unit.summoned is None and not unit.options.use_orig_params else ():
            for place in (place for original in segment.originals for place in original.names):
                given = place.module._parameters.pop(place.name, None)
                if given is not None:
                    vars(place.module)[place.name] = given


def _take_back(unit: "weakref.ref[Unit]") -> None:
    """``take_back`` of a unit that the step must not keep alive."""
    alive = unit()
    if alive is not None and alive.summoned is None:
        alive.take_back()


def units_of(modules: Iterable[nn.Module]) -> Iterator[Unit]:
    """The units of wrappers among ``modules``."""
    for module in modules:
        unit = vars(module).get("_unit")
        if isinstance(unit, Unit):
            yield unit
