"""torch's AdamW, Adam and SGD, whose steps take parameters that lie side by side in memory as one.

Names, arguments, groups and states are those of torch's classes. ``fused=True`` is the default here, unless
``foreach``, ``differentiable`` or the parameters' dtypes exclude it. A step calls torch's fused kernel once for each
run: parameters of one group and one number of steps that lie side by side in memory, as do their gradients and states.
So its bits are those of torch's fused step over flat tensors, the runs. Parameters that torch's fused kernel would step
wrongly are stepped as torch does by default (``_C.runs`` finds them: csrc/tensor/fp_runs.h). Start to read at
``_Fused._init_group``, which torch's ``step`` calls for each group.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from . import _C
from .common.optimizers import is_half_on_host
from .common.torch_private import TracingContext, _get_fused_kernels_supported_devices

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_ALL_MOMENTS = (*_MOMENTS, "max_exp_avg_sq")
_BUFFER = "momentum_buffer"


def _runs(
    optimizer: "_Fused", group: dict[str, Any], keys: tuple[str, ...], make_states: Callable[[], object]
) -> tuple[list[Any], ...] | None:
    """Return lists of tensors for a step of ``group``, one tensor a run (``_C.runs``); None: torch has to step it.

    ``make_states()`` is called if one of the states ``keys`` is missing.
    """
    # Dynamo calls _init_group itself, as it traces a step; torch 2.11 does not say then that it compiles
    is_traced = torch.compiler.is_compiling() or TracingContext.try_get() is not None
    if not group["fused"] or group["differentiable"] or group.get("capturable") or is_traced:
        return None
    joins = id(group) not in optimizer._with_twice
    arguments = list(group["params"]), optimizer.state, keys, keys[:1] == ("step",), joins
    found = _C.runs(*arguments, True)
    if found is False:
        make_states()
        found = _C.runs(*arguments, True)
    if isinstance(found, list):
        for chain in found:
            _pack(optimizer.state, chain, keys)
        found = _C.runs(*arguments, False)
    if not isinstance(found, tuple):
        return None
    _check_shapes(optimizer, group, found[-1], ("gradient", *keys))
    return found


def _check_shapes(optimizer: "_Fused", group: dict[str, Any], params: Sequence[Tensor], keys: Sequence[str]) -> None:
    """Raises: ValueError, before any group is stepped: torch loads states of any shape, and crashes later."""
    for param, key in itertools.product(params, keys):
        tensor = param.grad if key == "gradient" else optimizer.state.get(param, {}).get(key)
        if key != "step" and tensor is not None and tensor.shape != param.shape:
            place = [one is param for one in group["params"]].index(True)
            name = group["param_names"][place] if "param_names" in group else f"parameter {place} of its group"
            raise ValueError(
                f"{type(optimizer).__name__}: expected {key} of {name} to have its shape {tuple(param.shape)}, got "
                f"{tuple(tensor.shape)}: load the state of the same model, and replace no data by that of another shape"
            )


def _pack(state: dict[Tensor, dict[str, Any]], params: Sequence[Tensor], keys: Sequence[str]) -> None:
    """Move the states of ``params`` into one tensor for each of ``keys``, key by key, so that old ones are freed."""
    for key in keys:
        values = [state[param][key] for param in params]
        sizes, shapes = [value.numel() for value in values], [value.shape for value in values]
        pieces = torch.cat([value.flatten() for value in values]).split(sizes)
        del values
        for param, piece, shape in zip(params, pieces, shapes, strict=True):
            state[param][key] = piece.view(shape)


class _Fused(torch.optim.Optimizer):
    """A base before a class of torch's. It makes ``fused=True`` the default."""

    _with_twice: frozenset[int] = frozenset()  # ids of the groups that have a parameter twice
    _plan: Callable[[dict[str, Any]], tuple[Any, ...] | None]  # for ``_step_runs``; empty: no step; None: torch's step
    _step_runs: Callable[..., None]
    _planned: dict[int, Any] = {}  # id of a group that this step has yet to take -> its ``_plan``

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and set its ``fused`` if it is None."""
        super().add_param_group(param_group)
        self._choose_fused(self.param_groups[-1:])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set ``fused`` where it is None, as in states of torch's own optimizers."""
        super().__setstate__(state)
        self._with_twice = frozenset()
        self._choose_fused(self.param_groups)

    def _choose_fused(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            # torch adds 2 to the step of such a parameter before it steps it, and in a run to the steps of others, too
            if len({*map(id, group["params"])}) < len(group["params"]):
                self._with_twice |= {id(group)}
            if group["fused"] is None:
                excluded = group["foreach"] or group["differentiable"] or any(map(self._is_unfit, group["params"]))
                group["fused"] = not excluded
        # Only torch's fused kernels take a gradient scaler's settings.
        self._step_supports_amp_scaling = all(group["fused"] for group in self.param_groups)

    def _is_unfit(self, param: Tensor) -> bool:
        """Return whether torch's fused kernel cannot step ``param``."""
        return param.is_complex() or param.device.type not in _get_fused_kernels_supported_devices()

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """Step the runs here, and leave torch's step nothing: it would count and keep the states of the runs.

        With the first group all groups are planned: if one is refused, none has been stepped.
        """
        if group is self.param_groups[0] or id(group) not in self._planned:
            self._planned = {id(one): self._plan(one) for one in self.param_groups}
        plan = self._planned.pop(id(group))
        if plan is None:
            return self._init_default(group, *lists)
        if plan:
            self._step_runs(group, *plan)
        return False

    def _init_default(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        default: Any = super()
        return bool(default._init_group(group, *lists))

    def _step_apart(self, group: dict[str, Any], params: list[Any]) -> None:
        """Step ``params`` as torch does by default. With a gradient scaler, unscale or skip as fused kernels do."""
        if not params or getattr(self, "found_inf", None):
            return
        scale: Any = getattr(self, "grad_scale", None)
        for param in params if scale is not None else ():
            param.grad.div_(scale)
        self._step_default(group | {"params": params})

    def _step_default(self, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Adam(_Fused, torch.optim.Adam):
    """torch.optim.Adam, whose step takes pieces that lie side by side as one."""

    def _plan(self, group: dict[str, Any]) -> tuple[Any, ...] | None:
        keys = _ALL_MOMENTS if group["amsgrad"] else _MOMENTS
        return _runs(self, group, keys, lambda: self._init_default(group, *([] for _ in range(6))))

    def _step_runs(self, group: dict[str, Any], params: Any, grads: Any, steps: Any, *rest: Any) -> None:
        averages, squares, *most, others, apart = rest
        scaling = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        try:
            self._call(group, params, grads, averages, squares, *(most or [[]]), steps, fused=True, **scaling)
        finally:  # also if torch raises, before or after it has increased the steps
            for step, other in zip(steps, others, strict=True):
                if other is not None:
                    other.copy_(step)
        self._step_apart(group, apart)

    def _step_default(self, group: dict[str, Any]) -> None:
        lists: list[list[Any]] = [[] for _ in range(6)]
        self._call(group, *lists, has_complex=self._init_default(group, *lists))

    def _call(self, group: dict[str, Any], *tensors: list[Any], **more: Any) -> None:
        names = ("amsgrad", "lr", "weight_decay", "eps", "maximize", "decoupled_weight_decay")
        settings: dict[str, Any] = {name: group[name] for name in names}
        call: Any = adam
        call(*tensors, beta1=group["betas"][0], beta2=group["betas"][1], **settings, **more)


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW, whose step takes pieces that lie side by side as one."""


class SGD(_Fused, torch.optim.SGD):
    """torch.optim.SGD, whose step takes pieces that lie side by side as one."""

    def _is_unfit(self, param: Tensor) -> bool:
        return super()._is_unfit(param) or is_half_on_host(param)

    def _plan(self, group: dict[str, Any]) -> tuple[Any, ...] | None:
        has_momentum = group["momentum"] != 0
        known = (self.state.get(param, {}).get(_BUFFER) for param in group["params"])
        is_first = has_momentum and all(buffer is None for buffer in known)
        if is_first and getattr(self, "found_inf", None):
            return ()  # the skipped step would leave uninitialized memory as momentum
        if getattr(self, "_need_device_dtype_check_for_fused", True):
            self._init_default(group, [], [], [])
        found: Any = _runs(self, group, (_BUFFER,) if has_momentum and not is_first else (), lambda: None)
        return found and (is_first, *found)

    def _step_runs(self, group: dict[str, Any], is_first: bool, params: Any, grads: Any, *rest: Any) -> None:
        *buffers, counts, apart = rest
        momentum: list[Any] = buffers[0] if buffers else [None] * len(params) if group["momentum"] != 0 else []
        scaling = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        self._call(group, params, grads, momentum, fused=True, **scaling)
        if is_first:
            others = set(apart)
            stepped = iter([param for param in group["params"] if param.grad is not None and param not in others])
            for buffer, count in zip(momentum, counts, strict=True):
                pieces = [next(stepped) for _ in range(count)]
                views = [buffer] if count == 1 else buffer.split([param.numel() for param in pieces])
                for param, view in zip(pieces, views, strict=True):
                    self.state[param][_BUFFER] = view.view(param.shape)
        self._step_apart(group, apart)

    def _step_default(self, group: dict[str, Any]) -> None:
        lists: list[list[Any]] = [[] for _ in range(3)]
        params, _, momentum = lists
        self._init_default(group, *lists)
        self._call(group, *lists)
        for param, buffer in zip(params, momentum, strict=False):
            self.state[param][_BUFFER] = buffer

    def _call(self, group: dict[str, Any], *tensors: list[Any], **more: Any) -> None:
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
        call: Any = sgd
        call(*tensors, **{name: group[name] for name in names}, **more)
