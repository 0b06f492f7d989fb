"""Full parameters outside of forward and backward, in separate memory and in the dtype of the shards.

``Summoned`` owns the gathered tensors of one unit from ``enter`` to ``leave``. ``summon`` is the block over several
units: the wrapper's ``summon_full_params`` and ``apply`` use it; loading a state dict uses ``Summoned``. The checks
before an optimizer's step are here because they depend on the summoned units. This file knows no tree of units.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ... import _C
from ...common import optimizers
from ...common.tensors import is_at
from ..desync import checked_collectives
from ..errors import StateError
from ..names import FLAT_PARAM
from ..sharding.flat_param import FlatParam
from ..sharding.parameters import ParamInfo, check_not_rounded, same_bytes
from .registry import Owner, all_units, units_live
from .unit import Unit

_active: "list[Summoned]" = []  # of this process, between enter() and leave()


def refuse_unreduced(units: Iterable[Owner], what: str) -> None:
    """Refuse the call ``what`` while a unit has an accumulated gradient. A gradient that was cleared does not count.

    Raises: StateError naming the unit.
    """
    for unit in units:
        if unit.core.note_user_edits(True):
            raise StateError(
                f"{what}: gradients of {unit.name} come from no_sync() and are not reduced over the ranks yet, so each "
                "rank has its own, and those of synced backwards before are put aside: run the last micro-batch "
                "outside of no_sync() first, or clear the gradients"
            )


@units_live.register(register_optimizer_step_pre_hook, "tests/fsdp/wrapper/test_fsdp_copies.py")
def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse an optimizer step that the end of ``summon_full_params`` would undo.

    Raises: StateError naming the parameter and its unit.
    """
    for state in _active:
        unit = state.unit
        if state.writeback and state.with_grads and unit.options.use_orig_params:
            continue  # whole parameters with whole gradients, written back
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"] if param.grad is not None}
        for flat_param, param in unit.parameters():
            if id(param) in stepped:
                fqn = next((o.fqn for o in flat_param.originals if o.param is param), "the flat parameter")
                raise StateError(
                    f"optimizer.step() inside summon_full_params(): `{fqn}` of {unit.name} is whole there, and its "
                    "optimizer steps the shard, so the step would be lost: step outside of it (or, with "
                    "use_orig_params=True, summon with_grads=True and writeback=True for an optimizer without state)"
                )


@units_live.register(register_optimizer_step_pre_hook, "tests/fsdp/unit/test_fsdp_accumulation.py")
def _check_before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Refuse steps with gradients that are not reduced yet; with a closure, after it.

    A closure may run the last micro-batch. Returns: None, or the arguments of ``step()`` with a checked closure.
    """
    return optimizers.check_before_step(check_reduced, optimizer, args, kwargs)


def check_reduced(optimizer: torch.optim.Optimizer) -> None:
    """Check, before ``optimizer`` steps, that its gradients are reduced.

    An accumulated gradient that needs no reduction may be wider than its parameter. It is cast to the dtype of the
    parameter, as optimizers expect. Raises: ValueError naming a parameter with an accumulated gradient that has to be
    reduced first.
    """
    if _C.not_steppable() == 0:
        return
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"] if param.grad is not None}
    for unit in all_units():
        kept = {_address(tensor) for tensor in unit.core.accumulated() if tensor is not None}
        for flat_param, param in unit.parameters() if kept else ():
            grad = param.grad
            if id(param) not in stepped or grad is None or _address(grad) not in kept:
                continue
            if not unit.core.unreduced:
                _C.set_grad(param, grad.to(param.dtype))
            else:
                names = [original.fqn for original in flat_param.originals if original.param is param]
                raise ValueError(
                    f"{type(optimizer).__name__}.step(): the gradient of {names[0] if names else FLAT_PARAM} of "
                    f"{unit.name} comes from no_sync() and is not reduced over the ranks yet: run the last micro-batch "
                    "outside of no_sync(), or clear the gradients"
                )


@dataclass(eq=False)
class _Full:
    """The full tensors of one flat parameter, on a rank that shows them."""

    flat_param: FlatParam
    whole: Tensor  # the gathered parameters [padded_numel]
    grad: Tensor | None  # the gathered gradients, likewise
    has_grad: list[bool]  # of each original parameter
    held: list[Tensor | None]  # the gradients to put back in leave()
    shard: Tensor | None = None  # the data of the flat parameter, which shows the whole now


@dataclass(eq=False, repr=False, kw_only=True)
class Summoned:
    """The full parameters of one unit, from ``enter`` to ``leave``.

    - ``writeback``: each rank copies its part of the user's writes into its shard.
    - ``rank0_only``: only rank 0 of the group that shares the unit shows full parameters.
    - ``offload_to_cpu``: show copies in host memory. Units with DTensors ignore it: these stay on their mesh.
    - ``with_grads``: show full gradients too. A gradient that the user clears, sets or replaces stays so.
    - ``loads``: a state dict is loaded: replaced Parameter objects are not adopted.

    ``enter`` and ``leave`` run in the thread of the program. An exception in ``enter`` leaves the unit as before.
    """

    unit: Unit
    writeback: bool
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False
    loads: bool = False

    def __post_init__(self) -> None:
        unit = self.unit
        self.shown = not self.rank0_only or unit.options.placement.rank == 0
        self.offload_to_cpu &= not any(flat_param.has_forms for flat_param in unit.flat_params)
        self._fulls: list[_Full] = []  # one a flat parameter; none on a rank that shows nothing
        self.missing: list[ParamInfo] = []  # parameters without a value in the state dict that is loaded
        self._made: dict[str, nn.Parameter] = {}  # FQN -> a Parameter made here, which modules show for the original
        # The user's writes that are not in the gathered tensors yet: (target there, new values); and other Parameter
        # objects, with the indices of the flat parameter and of the original in it. None: not looked for
        self._written: tuple[list[tuple[Tensor, Tensor]], list[tuple[int, int, ParamInfo, nn.Parameter]]] | None = None
        self.misfit: ValueError | None = None  # the error about a write to this unit that does not fit
        self.is_refused = False  # a write to one of the units that are summoned together does not fit: keep none
        self.had_views = unit.core.shows_views
        self._is_whole = False  # enter() has ended: the values may be written back

    @torch.inference_mode(False)  # the parameters outlive the user's inference_mode block
    @torch.no_grad()
    def enter(self) -> None:
        """Gather the unit, and let its modules show full parameters. A collective call.

        After an exception modules show the same as before.
        """
        unit = self.unit
        unit.sync_user_writes()
        for flat_param in unit.flat_params:
            whole = self._whole(flat_param, flat_param.flat.detach())
            grad, has = self._gather_gradient(flat_param) if self.with_grads else (None, [])
            if self.shown:
                if self.offload_to_cpu:
                    whole, grad = whole.cpu(), None if grad is None else grad.cpu()
                self._fulls.append(_Full(flat_param, whole, grad, has, [param.grad for param in flat_param.stepped]))
            del whole, grad
        try:
            unit.summoned = self
            _active.append(self)
            if self.shown:
                self._show_all()
            self._is_whole = True
        except BaseException:
            self.leave()
            raise

    def _show_all(self) -> None:
        """Let modules show the full parameters and gradients."""
        unit = self.unit
        for full in self._fulls:
            flat_param = full.flat_param
            if flat_param.is_sharded and full.whole.device == flat_param.flat.device and not self.loads:
                full.shard = flat_param.flat.data
                flat_param.flat.data = full.whole.narrow(0, 0, flat_param.layout.numel)
        unit.unregister_flat()
        unit.core.put(False)
        for full in self._fulls:
            flat_param, originals = full.flat_param, full.flat_param.originals
            for original, value in zip(originals, flat_param.unsharded(full.whole), strict=True):
                self._show(original, value, flat_param.trains(original))
            if full.grad is not None:
                for original, value, has in zip(originals, flat_param.unsharded(full.grad), full.has_grad, strict=True):
                    if has:
                        _set_grad(original, value)

    @property
    def wholes(self) -> list[Tensor]:
        """The gathered parameters, one tensor ``[padded_numel]`` a flat parameter."""
        return [full.whole for full in self._fulls]

    def _keeps(self, flat_param: FlatParam) -> bool:
        """Whether the user's writes stay: with ``writeback``, and if users write to the trained memory itself.

        They do without sharding and offload.
        """
        return self.writeback or not (flat_param.is_sharded or self.unit.options.offload_params)

    def _whole(self, flat_param: FlatParam, shard: Tensor) -> Tensor:
        """Gather ``shard``, ``[padded_numel]``. Without sharding it is the shard itself, if the writes to it stay."""
        whole = flat_param.gather(shard)
        return whole if flat_param.is_sharded or self._keeps(flat_param) else whole.clone()

    def _show(self, original: ParamInfo, value: Tensor, trained: bool) -> None:
        """Let modules show ``value``: as data of the original parameter, or as a new Parameter if that cannot be."""
        if self.unit.options.use_orig_params and original.form is None and original.kept is None:
            if self.with_grads:
                original.param.grad = None
            original.param.data = value
            return
        param = original.parameter(value.data, trained)  # .data: a version counter apart from the whole's
        self._made[original.fqn] = param
        for place in original.names:
            vars(place.module).pop(place.name, None)
            place.module.register_parameter(place.name, param)

    def _gather_gradient(self, flat_param: FlatParam) -> tuple[Tensor | None, list[bool]]:
        """Gather the gradient. Return it, and for each original whether some rank has a gradient for it.

        A parameter without a gradient on a rank counts as zeros there. Returns ``(None, [])`` if no rank has any. A
        collective call: ranks first agree on gradients and their dtypes, so that all of them gather or none does.
        """
        self.unit.refuse_freed_gradients()
        grads = [param.grad for param in flat_param.stepped]
        has = [grad is not None for grad in grads]
        dtypes = {grad.dtype for grad in grads if grad is not None}
        if flat_param.is_sharded:
            told = [*has, *(dtype in dtypes for dtype in _DTYPES)]
            some = torch.tensor(told, dtype=torch.float32, device=flat_param.device)
            checked_collectives.all_reduce(some, dist.ReduceOp.SUM, flat_param, _C.EVENT_SHOWS_GRADIENTS)
            told = (some > 0).tolist()
            has, dtypes = told[: len(has)], set(itertools.compress(_DTYPES, told[len(has) :]))
        if not any(has):
            return None, []
        if not self.unit.options.use_orig_params:
            has = has * len(flat_param.originals)
        return self._whole(flat_param, _gradient_of(self.unit, flat_param, _widest(dtypes))), has

    def find_ties(self, seen: "dict[nn.Parameter, tuple[Summoned, ParamInfo]]") -> None:
        """Note the error if modules show one parameter in place of two originals.

        ``seen``: the shown parameters of the units before, to which this call adds.
        """
        if not self._made:
            return
        for original in self.unit.originals:
            shown = _shown(original)
            state, other = seen.setdefault(shown, (self, original))
            if other is not original:
                names = [f"`{other.fqn}` of {state.unit.name}", f"`{original.fqn}` of {self.unit.name}"]
                one, two = names if shown is self._made.get(original.fqn) else reversed(names)
                self.misfit = state.misfit = ValueError(
                    f"parameter {one} was replaced by {two}: tie parameters before wrapping, in one unit; to exchange "
                    "values, set their .data"
                )

    @torch.inference_mode(False)
    @torch.no_grad()
    def leave(self, keeps: bool = True) -> None:
        """Write back if ``keeps``, then let the modules show the same as before ``enter``. Local.

        If an exception such as Ctrl-C ends it halfway, call it again: it does not write again, but restores the rest.
        Raises: ValueError naming a parameter whose replacement does not fit. No write to the units that are summoned
        together is kept then; but where nothing is sharded, writes in place are in the parameters themselves.
        """
        if self.unit.summoned is not self:
            return
        misfit = None
        if self._is_whole:
            self._is_whole = False
            misfit = self._write_back() if keeps else None
        self._restore()
        if misfit is not None:
            raise misfit

    def _write_back(self) -> ValueError | None:
        """Copy the user's writes into the shards, and note the gradients to put back. Return the error of a misfit."""
        unit = self.unit
        if self.writeback:
            unit.loaded(self.missing)  # on all ranks alike, also on those that show nothing
        if not self.shown:
            return None
        writes, replaced = self._written or self.note_written()
        if self.misfit is not None or self.is_refused:
            return self.misfit
        for k, i, original, other in replaced:
            unit.adopt(k, i, original, other)
        for place, value in writes:
            place.copy_(value)
        self._restore_flat()
        for full in self._fulls:
            flat_param = full.flat_param
            if self._keeps(flat_param):
                shard, mine = flat_param.flat.detach(), flat_param.own(full.whole).to(flat_param.flat.device)
                changed = not same_bytes(shard, mine)
                if changed:  # a copy without a change would bump the version, and fail a pending backward
                    shard.copy_(mine)
                elif any(made._version for made in self._made_of(flat_param)):  # the shard's own memory was written to
                    torch.autograd.graph.increment_version(shard)
                placement = unit.options.placement
                if changed or placement.param is placement.optim:  # else the consensus tells which are stale
                    unit.filled(self.missing)
        for k, full in enumerate(self._fulls) if self.with_grads else ():
            full.held = self._gradients_of(k, full)
        return None

    def _made_of(self, flat_param: FlatParam) -> list[nn.Parameter]:
        """Return the Parameters that modules show in memory of the shard. Their versions are not those of the shard."""
        if flat_param.is_sharded:
            return []
        return [self._made[one.fqn] for one in flat_param.originals if one.fqn in self._made]

    def _restore_flat(self) -> None:
        for full in self._fulls:
            if full.shard is not None:
                full.flat_param.flat.data = full.shard

    def _restore(self) -> None:
        """Let modules and gradients be as before ``enter``. May be called again after an exception in it."""
        unit = self.unit
        self._restore_flat()
        if self.shown:
            unit.core.alias_params()
            for module, name in unit.places if not unit.options.use_orig_params else ():
                module._parameters.pop(name, None)
            for full in self._fulls if self.with_grads else ():
                for param, grad in zip(full.flat_param.stepped, full.held, strict=True):
                    _C.set_grad(param, grad)
            unit.register_flat()
            unit.core.put(self.had_views or not unit.options.use_orig_params)
        if self in _active:
            _active.remove(self)
        unit.summoned = None

    @torch.no_grad()
    def note_written(self) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[int, int, ParamInfo, nn.Parameter]]]:
        """Find the user's writes outside of the gathered tensors, and check them. A misfit is noted in ``misfit``.

        The caller does this for all units before it writes to any.
        """
        writes, replaced = self._written = [], []
        memory = {_address(whole) for state in (self, *_active) for whole in state.wholes}
        try:
            for k, full in enumerate(self._fulls):
                flat_param, whole = full.flat_param, full.whole
                if not self._keeps(flat_param):
                    continue
                if not flat_param.has_forms and not flat_param.keeps_class:
                    uses = self.unit.options.use_orig_params  # lie_in(None) compares the original parameters
                    made = None if uses else [self._made[original.fqn] for original in flat_param.originals]
                    if self.unit.core.lie_in(k, made, whole, True):
                        continue
                for i, place in enumerate(flat_param.unsharded(whole)):
                    original = flat_param.originals[i]
                    other = None if self.loads else self.unit.standing_for(original, self._made.get(original.fqn))
                    if other is not None:
                        replaced.append((k, i, original, other))
                    now = original.plain(_shown(original))
                    if is_at(now, place):
                        continue
                    if not _C.is_plain_tensor(now) or now.shape != place.shape:
                        raise ValueError(
                            f"{self.unit.name}: expected the new data of parameter `{original.fqn}` to have its shape "
                            f"{tuple(place.shape)}, got {tuple(now.shape)}; it is as before"
                        )
                    value = check_not_rounded(self.unit.name, original, now.detach(), place.dtype).to(place.device)
                    writes.append((place, value.clone() if _address(value) in memory else value))
        except ValueError as error:
            self.misfit = self.misfit or error
        return self._written

    def _gradients_of(self, k: int, full: _Full) -> list[Tensor | None]:
        """The gradients that ``leave`` puts back: this rank's pieces of the shown gradients, or ``held``.

        ``k``: the index of the flat parameter. A shown gradient that still lies in the gathered tensor needs no copy.
        """
        flat_param, whole = full.flat_param, full.grad
        shown = [(original, _shown(original).grad) for original in flat_param.originals]
        grads = [None if grad is None else original.plain(grad) for original, grad in shown]
        if not self._keeps(flat_param) or (whole is None and all(grad is None for grad in grads)):
            return full.held
        if whole is None:
            dtype = _widest(grad.dtype for grad in grads if grad is not None)
            whole = torch.zeros(flat_param.layout.padded_numel, dtype=dtype, device=flat_param.device)
        if not self.unit.core.lie_in(k, grads, whole, False):
            places = list(flat_param.unsharded(whole))
            values = [
                grad.clone() if grad is not None and _lies_elsewhere_in(whole, grad, place) else grad
                for grad, place in zip(grads, places, strict=True)
            ]
            for grad, place in zip(values, places, strict=True):
                if grad is None:
                    place.zero_()
                elif grad.data_ptr() != place.data_ptr() or grad.device != place.device:
                    place.copy_(grad)
        shard = flat_param.own(whole).to(flat_param.flat.device, copy=flat_param.is_sharded)
        if not self.unit.options.use_orig_params:
            return [None if all(grad is None for grad in grads) else shard]
        return [
            None if grad is None or here.numel < 0 else here.of(shard)
            for here, grad in zip(flat_param.shard_slices(), grads, strict=True)
        ]


def _lies_elsewhere_in(whole: Tensor, value: Tensor, place: Tensor) -> bool:
    """Whether ``value`` lies in ``whole``, but not at ``place``: it may be the gradient of another parameter."""
    lies_in = _address(value) == _address(whole)
    return lies_in and (value.data_ptr() != place.data_ptr() or value.stride() != place.stride())


def _address(tensor: Tensor) -> int:
    """The address of the storage of ``tensor``."""
    return tensor.untyped_storage().data_ptr()


def _set_grad(original: ParamInfo, grad: Tensor) -> None:
    if original.form is None:
        _C.set_grad(_shown(original), grad)
    else:
        _shown(original).grad = original.formed(grad)


def _shown(original: ParamInfo) -> nn.Parameter:
    """The parameter that the first module of ``original`` has under its name, else ``original`` itself."""
    place = original.names[0]
    value = place.module._parameters.get(place.name)
    return original.param if value is None else value


_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The smallest dtype that holds the values of all ``dtypes``."""
    return functools.reduce(torch.promote_types, dtypes)


def _gradient_of(unit: Unit, flat_param: FlatParam, dtype: torch.dtype) -> Tensor:
    """The gradient of the shard, ``[shard_numel]``, from the flat parameter or the originals; zeros without one."""
    if not unit.options.use_orig_params and flat_param.flat.grad is not None:
        return flat_param.flat.grad.to(dtype)
    shard = torch.zeros(flat_param.layout.shard_numel, dtype=dtype, device=flat_param.flat.device)
    for here in flat_param.shard_slices() if unit.options.use_orig_params else ():
        grad = here.original.param.grad
        if grad is not None and here.numel >= 0:
            here.of(shard).copy_(grad)
    return shard


def summon(units: Callable[[], Iterable[Unit]], **flags: Any) -> _C.Block:
    """A block with full parameters of ``units()``. ``flags``: the arguments of ``Summoned``.

    ``units()`` is called when the block begins. What it raises, the block raises. Beginning is a collective call.
    """
    states: list[Summoned] = []
    are_all_there = False

    def begin() -> None:
        nonlocal are_all_there
        found = list(units())
        # The all-gather of a sharded parameter waits by itself
        flat_params = (flat_param for unit in found for flat_param in unit.flat_params)
        checked_collectives.settle(flat_param for flat_param in flat_params if not flat_param.is_sharded)
        with checked_collectives.telling(lambda: found):
            for unit in found:
                states.append(Summoned(unit=unit, **flags))
                states[-1].enter()
        are_all_there = True

    def end() -> None:
        """Leave all units, the last first. After Ctrl-C in it, call it again: it leaves the remaining units.

        Raises: the last error of a ``leave``, after all of them have run.
        """
        nonlocal are_all_there
        steps: list[Callable[[], None]] = [state.leave for state in reversed(states)]
        if are_all_there:
            are_all_there = False
            steps.insert(0, functools.partial(_note_written, states))
        in_turn(steps)

    return _C.Block(begin, end)


def in_turn(steps: Iterable[Callable[[], None]]) -> None:
    """Call each of ``steps``, also after one has raised.

    Raises: the last Exception; but the first that is no Exception, such as Ctrl-C's, takes precedence.
    """
    failed: BaseException | None = None
    try:
        for step in steps:
            try:
                step()
            except BaseException as error:
                if failed is None or isinstance(failed, Exception):
                    failed = error
        if failed is not None:
            raise failed
    finally:
        failed = None  # break the cycle: its traceback refers to this frame


def _note_written(entered: list[Summoned]) -> None:
    """Check the writes to all units, before one shard is written: so an error leaves all of them consistent."""
    seen: dict[nn.Parameter, tuple[Summoned, ParamInfo]] = {}
    for state in entered:
        state.find_ties(seen)
    for state in entered:
        state.note_written()
    if any(state.misfit is not None for state in entered):
        for state in entered:
            state.is_refused = True
