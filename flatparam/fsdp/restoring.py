"""All or nothing: what loading a state dict may change, to be put back if it fails on any rank."""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .originals import Original
from .segment import Segment
from .unit import Unit


class Before:
    """The values that ``module`` has now: this rank's shards, and what ``units``, those in it, do not manage."""

    def __init__(self, module: nn.Module, units: list[Unit]):
        self._units = [(unit, unit.apart) for unit in units]
        self._shards: list[tuple[Segment, Tensor]] = []
        self._templates: list[tuple[Original, nn.Parameter | None]] = []
        self._others: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        managed: set[tuple[int, str]] = set()
        for unit in units:
            unit.look_over()
            managed.update((id(unit.module), name) for name in unit.flat_names())
            for segment in unit.segments:
                self._shards.append((segment, segment.flat.detach().clone()))
                for original in segment.originals:
                    self._templates.append((original, original.template))
                    managed.update((id(place.module), place.name) for place in original.names)
        for inner in module.modules():
            for mapping in (inner._parameters, inner._buffers):
                for name, tensor in mapping.items():
                    if tensor is not None and (id(inner), name) not in managed:
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
