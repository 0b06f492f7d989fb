"""torch's AdamW, Adam and SGD, whose steps take pieces that lie side by side as one.

Names, arguments, groups and states are those of torch's classes with ``fused=True``, which is the default here. A step
calls torch's fused kernel once for each run: parameters of one group and one number of steps that lie side by side in
memory, as do their gradients and states. So its bits are those of torch's fused step over flat tensors, the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from . import _C

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_ALL_MOMENTS = (*_MOMENTS, "max_exp_avg_sq")
_BUFFER = "momentum_buffer"


def _runs(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], keys: tuple[str, ...], make_states: Callable[[], object]
) -> tuple[list[Any], ...] | None:
    """Return the tensors of a step of ``group``, with one for each run (``_C.runs``); None: torch has to step it.

    ``make_states()`` is called if one of the states ``keys`` is missing.
    """
    if not group["fused"] or group["differentiable"] or group.get("capturable") or torch.compiler.is_compiling():
        return None
    found_inf = getattr(optimizer, "found_inf", None)
    advance = 1.0 if found_inf is None else 1.0 - float(found_inf)
    arguments = group["params"], optimizer.state, keys, keys[:1] == ("step",), advance
    found = _C.runs(*arguments, True)
    if found is False:
        make_states()
        found = _C.runs(*arguments, True)
    if isinstance(found, list):
        for params in found:
            _pack(optimizer.state, params, keys)
        found = _C.runs(*arguments, False)
    return found if isinstance(found, tuple) else None


def _pack(state: dict[Tensor, dict[str, Any]], params: Sequence[Tensor], keys: Sequence[str]) -> None:
    """Move the states of ``params`` into one tensor for each of ``keys``."""
    packed: list[dict[str, Any]] = [{} for _ in params]
    for key in keys:
        values = [state[param][key] for param in params]
        pieces = torch.cat([value.flatten() for value in values]).split([value.numel() for value in values])
        for mine, value, piece in zip(packed, values, pieces, strict=True):
            mine[key] = piece.view(value.shape)
    for param, mine in zip(params, packed, strict=True):
        state[param] = mine | {key: value for key, value in state[param].items() if key not in mine}


class _Fused(torch.optim.Optimizer):
    """Before a class of torch's among the bases: ``fused=True`` is the default."""

    def __init__(self, *args: Any, fused: bool = True, **settings: Any):
        init: Any = super().__init__
        init(*args, fused=fused, **settings)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the default in groups that come from an optimizer which left ``fused`` open, too."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["fused"] = True if group["fused"] is None else group["fused"]


class Adam(_Fused, torch.optim.Adam):
    """torch.optim.Adam, whose step takes pieces that lie side by side as one."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill ``lists`` with the tensors that torch's step gives to its kernel."""
        init_group: Any = super()._init_group
        keys = _ALL_MOMENTS if group["amsgrad"] else _MOMENTS
        found = _runs(self, group, keys, lambda: init_group(group, *([] for _ in lists)))
        if found is None:
            return bool(init_group(group, *lists))
        params, grads, averages, squares, most, steps = lists
        for given, some in zip((params, grads, steps, averages, squares, most), found[:-1], strict=False):
            given += some
        return False


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW, whose step takes pieces that lie side by side as one."""


class SGD(_Fused, torch.optim.SGD):
    """torch.optim.SGD, whose step takes pieces that lie side by side as one."""

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """Step runs here: torch's step would keep their momentum as states of the runs. It finds nothing to do."""
        init_group: Any = super()._init_group
        has_momentum = group["momentum"] != 0
        is_first = has_momentum and not any(_BUFFER in self.state.get(param, {}) for param in group["params"])
        if is_first and getattr(self, "found_inf", None):
            return False  # the skipped step would leave uninitialized memory as momentum
        if getattr(self, "_need_device_dtype_check_for_fused", True):
            init_group(group, [], [], [])
        keys = (_BUFFER,) if has_momentum and not is_first else ()
        found = _runs(self, group, keys, lambda: None)
        if found is None:
            return self._init_apart(group, *lists) if keys and group["fused"] else bool(init_group(group, *lists))
        params, grads, *buffers, counts = found
        momentum: list[Any] = buffers[0] if buffers else [None] * len(params) if has_momentum else []
        self._step_fused(group, params, grads, momentum)
        if is_first:
            stepped = iter([param for param in group["params"] if param.grad is not None])
            for buffer, count in zip(momentum, counts, strict=True):
                pieces = [next(stepped) for _ in range(count)]
                views = [buffer] if count == 1 else buffer.split([param.numel() for param in pieces])
                for param, view in zip(pieces, views, strict=True):
                    self.state[param][_BUFFER] = view.view(param.shape)
        return False

    def _init_apart(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """Step parameters without momentum here, apart: torch's kernel takes it of all or of none."""
        init_group: Any = super()._init_group
        is_new = {param: self.state.get(param, {}).get(_BUFFER) is None for param in group["params"]}
        new = [param for param in group["params"] if param.grad is not None and is_new[param]]
        if not new or torch.compiler.is_compiling():
            return bool(init_group(group, *lists))
        if getattr(self, "found_inf", None):
            return False
        for param in new:
            self.state.pop(param, None)
        apart: list[list[Any]] = [[] for _ in lists]
        self._init_group(group | {"params": new}, *apart)
        params, grads, momentum = apart
        self._step_fused(group, params, grads, momentum)
        for param, buffer in zip(params, momentum, strict=True):
            self.state[param][_BUFFER] = buffer
        return self._init_group(group | {"params": [param for param in is_new if not is_new[param]]}, *lists)

    def _step_fused(self, group: dict[str, Any], params: list[Any], grads: list[Any], momentum: list[Any]) -> None:
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "fused")
        settings: dict[str, Any] = {name: group[name] for name in names}
        settings |= {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        sgd(params, grads, momentum, **settings)
