"""What a module has now, to have it again if a state dict cannot be loaded."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ..held import managed_places
from ..originals import Original
from ..segment import Segment
from ..unit import Unit


class Before:
    """The values that ``module`` has now: this rank's shards, and what ``units``, those in it, do not manage."""

    def __init__(self, module: nn.Module, units: list[Unit]):
        self._units = [(unit, unit.apart) for unit in units]
        self._shards: list[tuple[Segment, Tensor]] = []
        self._templates: list[tuple[Original, Tensor | None]] = []
        self._others: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        for unit in units:
            unit.look_over()
            for segment in unit.segments:
                self._shards.append((segment, segment.flat.detach().clone()))
                self._templates += [(original, original.template) for original in segment.originals]
        self._kept: list[tuple[nn.Module, Any]] = []  # beside tensors
        managed = managed_places(units)
        for inner in module.modules():
            kind = type(inner)
            if (
                kind.get_extra_state is not nn.Module.get_extra_state
                and kind.set_extra_state is not nn.Module.set_extra_state
            ):
                self._kept.append((inner, copy.deepcopy(inner.get_extra_state())))
            for mapping in (inner._parameters, inner._buffers):
                for name, tensor in mapping.items():
                    if tensor is not None and (inner, name) not in managed:
                        self._others.append((mapping, name, tensor, tensor.detach().clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Let the module have them again."""
        for segment, shard in self._shards:
            segment.flat.detach().copy_(shard)
        for unit, apart in self._units:
            unit.filled()
            unit.apart = apart
        for original, template in self._templates:
            original.template = template
        for mapping, name, tensor, value in self._others:
            tensor.detach().copy_(value)
            mapping[name] = tensor
        for inner, kept in self._kept:
            inner.set_extra_state(kept)
