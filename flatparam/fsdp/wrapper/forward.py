"""The wrapper's step: the forward, the first forward's setup of a tree of units, and calls between passes.

``_C.Unit`` gathers, reshards and reduces. This file prepares inputs, dtypes and buffers around it, joins the units of a
tree to one ``_C.Root``, and has ``no_sync``, ``reset_state``, ``refresh``, ``clip_grad_norm_`` and communication hooks.
It knows no state dicts. Forwards run in threads of the program; in backward, autograd may call ``_reduced`` and
``_refuse_backward`` in its own threads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed.fsdp import BackwardPrefetch
from torch.profiler import record_function

from ... import _C
from ...common.switches import environment_is_on
from ...common.torch_private import _StopRecomputationError
from ..desync import torch_collectives
from ..desync.checked_collectives import come_back, tell_trouble, trace_of, troubled
from ..desync.trace import GroupTrace
from ..desync.unit_ids import id_of
from ..errors import StateError
from ..names import FSDP_WRAPPED_MODULE, join, without_units, without_wrappers
from ..sharding.placement import is_grid
from ..sharding.pytrees import cast_floats, find_tensors, move_tensors
from ..states.model import end_loading
from ..unit.base import W, Wrapper
from ..unit.clip import by_group, clip
from ..unit.registry import flat_param_of
from ..unit.summon import Summoned, in_turn, refuse_unreduced
from ..unit.torch_calls import enter_forward, is_never_recomputed, leave_forwards
from ..unit.unit import Unit, units_of
from .materialize import put_buffer
from .stored import choose_dtype

_LOG = logging.getLogger("flatparam")
PREFETCH = {None: 0, BackwardPrefetch.BACKWARD_PRE: 1, BackwardPrefetch.BACKWARD_POST: 2}


def forward(wrapper: Wrapper, *args: Any, **kwargs: Any) -> Any:
    """Run the wrapped module with its unsharded parameters. The first forward joins the units of the tree.

    If an exception ends the outermost forward, all units are idle and sharded afterwards, and waiting ranks are
    told.
    """
    unit = wrapper._unit
    if unit.summoned is not None:
        return _forward_summoned(wrapper, unit.summoned, args, kwargs)
    if not wrapper._use_orig_params:
        unit.check_registered()
    step = unit.core
    if step.root is None:
        choose_dtype(wrapper.fsdp_modules(wrapper._outermost()), find_tensors((args, kwargs)))
        step = unit.core
        wrapper._lazy_init()
    if wrapper._full_in_eval:
        _choose_precision(wrapper)
    if not (records := torch.is_grad_enabled()):
        _refuse_untrained(wrapper)
    device = wrapper._moves_to
    if device is not None and not all(isinstance(arg, Tensor) and arg.device == device for arg in args):
        args = move_tensors(device, args, wrapper._unit.name)
    if device is not None and kwargs:
        kwargs = move_tensors(device, kwargs, wrapper._unit.name)
    if wrapper._casts_to is not None:
        args, kwargs = cast_floats(wrapper._casts_to, args), cast_floats(wrapper._casts_to, kwargs)
    if records and step.has_frozen:
        step.expect_inputs(find_tensors((args, kwargs)))
    if troubled:
        come_back()
    under_way = enter_forward(records)
    try:
        step.pre_forward()
        module: Any = wrapper._modules[FSDP_WRAPPED_MODULE]
        if profiler._is_profiler_enabled:
            with record_function(f"flatparam forward: {wrapper._unit.name}"):
                output = module(*args, **kwargs)
        else:
            output = module(*args, **kwargs)
        return step.post_forward(output)
    except BaseException as error:
        try:
            unit.explain(error)
        finally:
            step.abort_forward()
            _tell_trouble(wrapper, error)
            unit.check_shards(error)
        raise
    finally:
        under_way.pop()


def _tell_trouble(wrapper: Wrapper, error: BaseException) -> None:
    """Tell waiting ranks that ``error`` has ended the root's forward, or a forward that backward recomputes.

    An inner forward tells nothing: the user's module may catch the exception. Nor does a forward that needs no other
    rank: one rank alone may evaluate a model that is not sharded.
    """
    root: Any = wrapper._unit.core.root
    if root is not None and root.state != "FORWARD" and not isinstance(error, _StopRecomputationError):
        units = units_of(wrapper._outermost().modules())
        parts = [flat_param for unit in units for flat_param in unit.flat_params]
        tell_trouble([part for part in parts if part.is_sharded or torch.is_grad_enabled()], error)


def _refuse_untrained(wrapper: Wrapper) -> None:
    """Raises: StateError in a reentrant checkpoint that backward will not recompute, if this unit is trained."""
    if is_never_recomputed(wrapper.training) and any(
        flat_param.is_trained for unit in units_of(wrapper.modules()) for flat_param in unit.flat_params
    ):
        raise StateError(
            f"{wrapper._unit.name} runs in a reentrant checkpoint, which recomputes it in backward if an input "
            "requires grad, and none does: its parameters would get no gradient. Use "
            "checkpoint(..., use_reentrant=False), call requires_grad_() on an input, or freeze the parameters"
        )


def _forward_summoned(wrapper: Wrapper, summoned: Summoned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the wrapped module inside summon_full_params(), with the summoned parameters, in full precision.

    Raises: StateError on a rank without full parameters. A backward through the output raises StateError too.
    """
    unit = wrapper._unit
    if not summoned.shown:
        raise StateError(
            f"{unit.name}: forward inside summon_full_params(rank0_only=True) on a rank that has its shards only: "
            "call it on rank 0, or summon without rank0_only"
        )
    for whole in summoned.wholes[:1]:
        args, kwargs = move_tensors(whole.device, (args, kwargs), unit.name)
        if wrapper.mixed_precision.param_dtype is not None:
            args, kwargs = cast_floats(whole.dtype, (args, kwargs))
    with (
        _C.Block(lambda: _put_buffers(wrapper, True), lambda: _put_buffers(wrapper, wrapper._in_full)),
        _units_below_in_full(wrapper) as below,
    ):
        output = wrapper.module(*args, **kwargs)
    outer = wrapper._outer() if wrapper._outer is not None else None
    if outer is not None and not outer._in_full and unit.core.root is not None and unit.core.root.state == "FORWARD":
        dtype = wrapper.mixed_precision.param_dtype
        output = output if dtype is None else cast_floats(dtype, output)  # the outer unit computes in it
    units = [unit, *(each._unit for each in below)]
    if torch.is_grad_enabled() and any(flat_param.is_trained for unit in units for flat_param in unit.flat_params):
        for tensor in find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(_refuse_backward, unit.name))
    return output


def _units_below_in_full(wrapper: Wrapper) -> _C.Block:
    """A block in which units below that are not summoned compute in full precision too. It gives these units."""
    below = [
        each
        for each in wrapper.fsdp_modules(wrapper)
        if each._unit.summoned is None
        and each.mixed_precision.param_dtype is not None
        and not (each._full_in_eval and not each.module.training)
    ]
    if below and wrapper._unit.core.root is None:
        wrapper._lazy_init()
    before = [each._full_in_eval for each in below]

    def begin() -> list[Wrapper]:
        for each in below:
            each._full_in_eval = False
            _compute_in_full(each, True)
        return below

    def end() -> None:
        for each, full_in_eval in zip(below, before, strict=True):
            each._full_in_eval = full_in_eval
            _compute_in_full(each, False)

    return _C.Block(begin, end)


def lazy_init(wrapper: Wrapper) -> None:
    """Join all units of the tree to one ``_C.Root``, name them, and cast their buffers. Once per tree.

    The first forward calls it, or a call before that needs the root. It runs on all ranks alike.
    Raises: ValueError if the wrappers of the tree disagree, or a parameter is mismatched or has no values. The root
    joins last, so the next forward then tries again.
    """
    root = wrapper._outermost()
    through: Any = torch_collectives if root._hooked is None else root._hooked
    if any(root._fakes):
        through = torch_collectives.Faked(through, root._fakes)
    ahead = PREFETCH[root._backward_prefetch], root._forward_prefetch
    shared = _C.Root(*ahead, through, torch_collectives.WATCHED, find_tensors, root._min_unit_bytes, weakref.ref(root))
    wrappers = wrapper.fsdp_modules(root)
    for each in wrappers:
        for name in ("_use_orig_params", "_min_unit_bytes", "_reduction", "limit_all_gathers"):
            if getattr(each, name) != getattr(root, name):
                values = f"{root._unit.name} has {getattr(root, name)}, {each._unit.name} {getattr(each, name)}"
                raise ValueError(f"Expects one homogeneous value for {name} in a tree of units: {values}")
        if each._hooked is not root._hooked:
            raise ValueError(
                f"Expects one communication hook in a tree: {each._unit.name} and {root._unit.name} "
                "have others. Register it on the root, when the whole tree was wrapped"
            )
    if root._hooked is not None or any(root._fakes):
        shared.always_python()
    paths = {id(inner): path for path, inner in root.named_modules()}
    for each in reversed(wrappers):  # the root last, so that its next forward tries again if this fails
        path = without_wrappers(paths[id(each)])
        where = f" at `{path}`" if path else ""
        each._unit.rename(f"the unit of {type(each.module).__name__}{where}")
        if each._unit.mismatched:
            raise ValueError(each._unit.why_mismatched())
        each._unit.check_filled()
        step_in_backward(each._unit)
        each._unit.core.join(shared)
        if root._hooked is not None:
            each._unit.core.average_elsewhere()
        each._casts_to = None if each._in_full else _casts(each)
        has_any = any(True for _ in each.parameters())
        each._moves_to = each.compute_device if each is root and has_any else None
    _check_collectives(shared, [(each._unit, each.compute_device) for each in wrappers])
    _cast_buffers(root, wrappers)
    if _LOG.isEnabledFor(logging.DEBUG):
        for each in wrappers:
            _LOG.debug("%s: %s", each._unit.name, each.extra_repr())


@torch.inference_mode(False)
def _cast_buffers(wrapper: Wrapper, wrappers: list[Wrapper]) -> None:
    """Cast each buffer once, to the ``buffer_dtype`` of the innermost unit around it. Note its dtype before."""
    done: set[int] = set()
    for each in reversed(wrappers):
        dtype = each.mixed_precision.buffer_dtype
        own: dict[int, torch.dtype] = {}  # id of a buffer that this unit has cast -> its dtype before
        for key, module, name, buffer in _named_buffers(each.module):
            as_it_was = buffer.dtype
            if dtype not in (None, as_it_was) and buffer.is_floating_point() and id(buffer) not in done:
                buffer = put_buffer(module, name, buffer.to(dtype))
                own[id(buffer)] = as_it_was
            done.add(id(buffer))
            if id(buffer) in own:  # note it under each name
                each._buffer_dtypes.setdefault(key, own[id(buffer)])


def _casts(wrapper: Wrapper) -> torch.dtype | None:
    """The dtype that floating inputs are cast to; None: they are not cast.

    As torch 2.13 does: a unit with parameters of its own by one setting, and the root by the other, or by both.
    """
    precision = wrapper.mixed_precision
    casts = precision.cast_forward_inputs and bool(wrapper._unit.flat_params)
    casts |= precision.cast_root_forward_inputs and wrapper.check_is_root()
    return precision.param_dtype if casts else None


def _choose_precision(wrapper: Wrapper) -> None:
    """With FSDP_USE_FULL_PREC_IN_EVAL=1: use full precision in evaluation, and mixed precision in training."""
    module: Any = wrapper._modules[FSDP_WRAPPED_MODULE]
    in_full = not module.training
    if in_full != wrapper._in_full:
        _compute_in_full(wrapper, in_full)


def _compute_in_full(wrapper: Wrapper, in_full: bool) -> None:
    """Set the precision of parameters, reductions, inputs and buffers. Between passes."""
    wrapper._unit.core.compute_in_full(in_full)
    wrapper._in_full = in_full
    wrapper._casts_to = None if in_full else _casts(wrapper)
    _put_buffers(wrapper, in_full)


@torch.inference_mode(False)
def _put_buffers(wrapper: Wrapper, in_full: bool) -> None:
    """Cast the noted buffers to their dtype from before if ``in_full``, else to ``buffer_dtype``."""
    for key, inner, name, buffer in _named_buffers(wrapper.module) if wrapper._buffer_dtypes else ():
        if key in wrapper._buffer_dtypes:
            dtype = wrapper._buffer_dtypes[key] if in_full else wrapper.mixed_precision.buffer_dtype
            put_buffer(inner, name, buffer.to(dtype))


def no_sync(wrapper: Wrapper) -> contextlib.AbstractContextManager[None]:
    """Within the block gradients are accumulated unsharded, without reduction. For the root, between passes.

    The first backward after the block reduces the sum. It drops the sums of units that were removed from the model in
    between and did not run again. Raises: StateError in a pass, or for a unit that is no root;
    ValueError with ``reduction="ordered"``.
    """
    opened: list[tuple[_C.Root, list[object]]] = []

    def begin() -> None:
        wrapper._check_root("no_sync")
        for each in wrapper.fsdp_modules(wrapper):
            if each._unit.options.in_order:
                raise ValueError(
                    f'no_sync: {each._unit.name} has reduction="ordered", and in no_sync() each rank would add up its '
                    "own micro-batches first, in an order that depends on the number of ranks: call backward without it"
                )
        if wrapper._unit.core.root is None:
            wrapper._lazy_init()
        root: Any = wrapper._unit.core.root
        block: list[object] = []
        opened.append((root, block))
        root.begin_no_sync(block)

    def end() -> None:
        for root, block in opened:
            root.end_no_sync(block)

    return _C.Block(begin, end)


def reset_state(wrapper: Wrapper) -> None:
    """End all blocks and passes that were interrupted: ``no_sync``, ``summon_full_params``, a load, a pass.

    Use it if a signal or a debugger has kept the end of a block from running, so that calls say that a unit is not
    idle, or that gradients are not reduced. For the root. No communication: each rank may call it alone.

    - ``summon_full_params``: no write is copied into the shards.
    - A state dict that is half loaded: the shards stay as they are.
    - ``no_sync``: the accumulated gradients stay.
    - A backward that did not end: its gradients are dropped.

    Raises: StateError for a unit that is no root.
    """
    if wrapper._outermost() is not wrapper:
        raise StateError(f"`reset_state()` is for the root: this is {wrapper._unit.name}")
    steps: list[Callable[[], None]] = []
    for each in wrapper.fsdp_modules(wrapper):
        root: Any = each._unit.core.root
        if root is not None:
            steps += [root.end_all_no_sync, root.recover] if root.state != "IDLE" else [root.end_all_no_sync]
        steps.append(functools.partial(end_loading, each, False))
        if each._unit.summoned is not None:
            steps.append(functools.partial(each._unit.summoned.leave, False))
        steps.append(functools.partial(_compute_as_set, each))
    with _C.Block(lambda: None, functools.partial(in_turn, steps)):
        leave_forwards()


def _compute_as_set(wrapper: Wrapper) -> None:
    """Set the precision from the environment again, which an interrupted summoned forward may have changed."""
    wrapper._full_in_eval = environment_is_on("FSDP_USE_FULL_PREC_IN_EVAL")
    if wrapper._in_full and not (wrapper._full_in_eval and not wrapper.module.training):
        _compute_in_full(wrapper, False)


def sync_params(wrapper: Wrapper) -> None:
    """Gather stale secondary shards from the shards now, instead of in the next forward.

    For LAYER_ZERO and ZERO_1; nothing to do for other strategies. A collective call, for the root, between passes.
    Raises: StateError naming the state and the allowed states.
    """
    wrapper._check_root("sync_params")
    if wrapper._unit.core.root is None:
        wrapper._lazy_init()
    root: Any = wrapper._unit.core.root
    root.refresh()


def refresh(wrapper: Wrapper) -> None:
    """Treat all gathered data as out of date, and gather secondary shards anew.

    Call it after writes that torch does not count, such as ``param.data.copy_(average)``: for LAYER_ZERO and
    ZERO_1, and between micro-batches in ``no_sync`` for units that are not resharded after forward. Other units
    gather in every forward. A collective call, for the root, between passes.
    Raises: StateError naming the state and the allowed states.
    """
    wrapper._check_root("refresh")
    for unit in units_of(wrapper.modules()):
        unit.core.invalidate()
    wrapper.sync_params()


def train(wrapper: W, mode: bool = True) -> W:
    """As of any module. If an evaluation begins or ends, the next pass compares gathered data with the shards.

    Programs exchange weights by ``.data`` there (averaged weights), which torch does not count.
    """
    if "_unit" in vars(wrapper) and not (mode and wrapper.training):
        wrapper._unit.core.suspect = 1
    super(Wrapper, wrapper).train(mode)
    return wrapper


def register_comm_hook(wrapper: Wrapper, state: object, hook: Callable[..., Any]) -> None:
    """Let ``hook`` reduce and average the gradients of all units. For the root, once, before the first forward.

    ``hook(state, gradient, output)`` gets the padded unsharded gradient of a unit, and fills ``output``, the
    gradient of the shard. Without sharding ``hook(state, gradient)`` works in place.
    Raises: ValueError for a hook that cannot be called; StateError for a unit that is no root, after the first
    forward, for a second hook, and for strategies over a grid of ranks.
    """
    if not callable(hook):
        raise ValueError(f"expected hook to be callable, got {type(hook).__name__}")
    if not wrapper.check_is_root():
        outermost = wrapper._outermost()._unit.name
        why = StateError(f"this is {wrapper._unit.name} in {outermost}: all units of a tree have one hook")
        raise StateError("register_comm_hook can only be called on a root instance.") from why
    wrapper._check_idle("register_comm_hook")
    if any(each._hooked is not None for each in wrapper.fsdp_modules(wrapper)):
        raise StateError("A communication hook is already registered")
    if wrapper._unit.core.root is not None:
        raise StateError("register_comm_hook: before the first forward")
    for each in wrapper.fsdp_modules(wrapper):
        placement = each._placement
        if each._unit.options.in_order:
            raise StateError(f'register_comm_hook: {each._unit.name} has reduction="ordered": leave one of the two out')
        if is_grid(each._strategy) or (placement.shards > 1 and (placement.replicas > 1 or placement.outer)):
            raise StateError(
                "Communication hook is not supported for hybrid strategies: register_comm_hook is "
                f"not for a grid of ranks ({each.sharding_strategy.name})"
            )
    hooked = torch_collectives.Hooked(hook, state)
    for each in wrapper.fsdp_modules(wrapper):
        each._hooked = hooked


@torch.no_grad()
def clip_grad_norm_(wrapper: Wrapper, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most ``max_norm``. Return the norm before.

    A collective call, for the root, between backward and the optimizer's step. ``norm_type``: 2 is the Euclidean norm,
    infinity the largest element. The norm is computed in fp32, or in fp64 if a parameter is in fp64; every rank returns
    the same, in the widest real dtype of the gradients.
    Raises: ValueError for accumulated gradients that are not reduced yet, for a ``max_norm`` that is NaN or below 0,
    and for a ``norm_type`` that is not above 0. The gradients are as before then.
    """
    modules = list(wrapper.modules())
    wrapper._check_root("clip_grad_norm_", modules)
    units = list(units_of(modules))
    refuse_unreduced(units, "clip_grad_norm_")
    params: dict[int, Any] = {
        id(param): (flat_param, param) for unit in units for flat_param, param in unit.parameters()
    }
    for param in (param for module in modules for param in module._parameters.values()):
        if id(param) not in params and isinstance(param, nn.Parameter):  # else a view
            params[id(param)] = flat_param_of(param), param
    return clip(by_group(params.values()), float(max_norm), float(norm_type))


def _named_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (FQN, module that registers it, name there, buffer) for each name of each buffer below ``module``."""
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                yield without_units(join(path, name)), inner, name, buffer


def _refuse_backward(name: str, grad: Tensor) -> None:
    raise StateError(
        f"{name}: backward through a forward that was made inside summon_full_params(): parameters are whole there, so "
        "their gradients would be neither sharded nor reduced. Call it outside of summon_full_params(), or under "
        "torch.no_grad()"
    )


_OPTIMIZERS = "_in_backward_optimizers"  # torch's attribute of a parameter: its optimizers, for it alone


def step_in_backward(unit: Unit) -> None:
    """Let the optimizers in backward step as soon as a gradient of ``unit`` is reduced, and clear the gradient then.

    Raises: StateError with ``use_orig_params=False``: such optimizers hold original parameters.
    """
    if not any(hasattr(param, _OPTIMIZERS) for _, param in unit.parameters()):
        return
    if not unit.options.use_orig_params:
        raise StateError(f"{unit.name}: an optimizer in backward is only supported with use_orig_params=True")
    unit.core.reduced = functools.partial(_reduced, weakref.ref(unit))


def _reduced(unit: weakref.ref[Unit], part: int) -> None:
    """Step the optimizers in backward. ``core`` calls this when ``.grad`` has the reduced gradient."""
    alive = unit()
    for original in () if alive is None else alive.flat_params[part].originals:
        if original.param.grad is not None:  # this rank has a piece of it
            for optimizer in getattr(original.param, _OPTIMIZERS, ()):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)


def _check_collectives(root: _C.Root, units: Iterable[tuple[Unit, torch.device]]) -> None:
    """Let the collective traces follow the collectives of a tree. ``units``: each unit with its device."""
    found: dict[int, tuple[GroupTrace, _C.ModelTrace]] = {}
    outers: dict[GroupTrace, None] = {}
    for unit, device in units:
        outer = trace_of(unit.options.placement.outer, device)
        if outer is not None:
            outers[outer] = None
        for which, group in unit.options.placement.traced():
            trace = trace_of(group, device)
            number = None if group is None or trace is None else id_of(unit, group)
            if trace is not None and number is not None:
                _, follower = found.setdefault(id(trace), (trace, _C.ModelTrace(trace.core)))
                unit.core.follow(which, follower, number, trace.sliced)
    root.tell(tuple(follower for _, follower in found.values()))
    for outer in outers:  # other traces record its collectives, but only a watch over the group itself can abort them
        outer.watch()
    traces = [trace for trace, _ in found.values()] + list(outers)
    for trace in traces:
        trace.join(other for other in traces if other is not trace)
