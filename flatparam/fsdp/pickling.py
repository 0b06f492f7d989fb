"""What a wrapped model is pickled as: its shards and its modules, the groups by their ranks, nothing of a step."""

import functools
from collections.abc import Iterable
from typing import Any

import torch.nn as nn
from torch import Tensor

from ..common.pickling import (
    PickledState,
    Pickling,
    Reduced,
    as_flat_parameter,
    as_parameter,
    as_view,
    make_hooks_picklable,
)
from .unit import Unit


def pickled(state: dict[str, Any], units: Iterable[Unit]) -> PickledState:
    """``state`` of a wrapper; as long as it is referred to, the tensors of ``units`` have their pickled forms."""
    forms: list[tuple[Tensor, Any]] = []
    for unit in units:
        for segment, views in zip(unit.segments, unit.step.views(), strict=True):
            forms.append((segment.flat, functools.partial(_as_shard, segment.flat)))
            for i, original in enumerate(segment.originals):
                forms.append((original.param, functools.partial(as_parameter, original.param)))
                if views is not None:
                    shown = functools.partial(_as_itself, original.param) if segment.use_orig_params else as_view
                    forms.append((views[i], shown))
        for module in unit.module.modules():
            make_hooks_picklable(module)
    made = PickledState(state)
    made.pickling = Pickling(forms)
    return made


def _as_shard(flat: nn.Parameter) -> Reduced:
    return as_flat_parameter(flat.detach(), flat.requires_grad)


def _itself(param: nn.Parameter) -> nn.Parameter:
    return param


def _as_itself(param: nn.Parameter) -> Reduced:
    """The form of a view that stands in a parameter's place: the parameter."""
    return _itself, (param,)
