"""The parameters of a wrapped model by name, and what its optimizer steps in their place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from torch import Tensor

from ..names import clean_tensor_name
from ..segment import Here, Segment
from ..unit import Unit, units_of


@dataclass(eq=False)
class Param:
    """One parameter of the unwrapped model.

    ``names``: all that it has there; ``stepped``: what an optimizer has in its place: itself or the flat one;
    ``segment``, ``number``: which original of which flat parameter it is; None: no unit manages it; ``here``: what this
    rank's shard holds of it; ``begin``: the first of its elements there.
    """

    names: list[str]
    stepped: Tensor
    shape: tuple[int, ...]
    segment: Segment | None = None
    number: int = 0
    here: Here | None = None
    begin: int = 0

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        """How many of its elements are here."""
        return math.prod(self.shape) if self.here is None else max(0, self.here.numel)

    def piece_of(self, shard: Tensor) -> Tensor:
        """What a tensor like the shard has of it, in the shape that an optimizer sees."""
        assert self.here is not None
        assert self.segment is not None
        piece = self.here.of(shard)
        return piece.view(1) if self.segment.is_sharded and not piece.dim() else piece


@dataclass(eq=False)
class Stepped:
    """What an optimizer steps: one original parameter, all of a flat one, or a parameter that no unit manages."""

    tensor: Tensor
    params: list[Param]
    place: tuple[int, int] | None = None  # (which segment, which original; -1: all of them)

    @property
    def segment(self) -> Segment | None:
        return self.params[0].segment

    @property
    def is_sharded(self) -> bool:
        return self.segment is not None and self.segment.is_sharded

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a tensor that is like what this rank steps."""
        here = self.params[0].here
        if here is None or self.is_flat:
            return tuple(self.tensor.shape)
        return here.shape if here.shape or not self.is_sharded else (1,)

    @property
    def is_flat(self) -> bool:
        return self.place is not None and self.place[1] < 0


@dataclass(eq=False)
class Table:
    """The parameters of ``model`` in the order of its units, then those that no unit manages."""

    model: nn.Module
    units: list[Unit] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    params: list[Param] = field(default_factory=list)
    by_name: dict[str, Param] = field(default_factory=dict)
    _stepped: dict[int, Stepped] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paths: dict[Unit, list[str]] = {}
        modules = list(self.model.named_modules(remove_duplicate=False))
        for path, inner in modules:
            for unit in units_of([inner]):
                paths.setdefault(unit, []).append(path)
        for unit, places in paths.items():
            self._add_unit(unit, places)
        others: dict[int, Param] = {}
        for path, inner in modules:
            for name, tensor in inner._parameters.items():
                if tensor is None or id(tensor) in self._stepped:
                    continue
                key = clean_tensor_name(_join(path, name))
                if id(tensor) in others:
                    others[id(tensor)].names.append(key)
                else:
                    others[id(tensor)] = Param([key], tensor, tuple(tensor.shape))
        for param in others.values():
            self.params.append(param)
            self._stepped[id(param.stepped)] = Stepped(param.stepped, [param])
        self.by_name = {name: param for param in self.params for name in param.names}

    def _add_unit(self, unit: Unit, paths: list[str]) -> None:
        unit.look_over()
        self.units.append(unit)
        for segment in unit.segments:
            place = len(self.segments)
            self.segments.append(segment)
            params = []
            for number, (here, piece) in enumerate(zip(segment.here(), segment.pieces, strict=True)):
                original = here.original
                names = [clean_tensor_name(_join(path, name.fqn)) for path in paths for name in original.names]
                stepped = original.param if segment.use_orig_params else segment.flat
                params.append(Param(names, stepped, tuple(original.shape), segment, number, here))
                params[-1].begin = piece.intra_param_start_idx or 0
            self.params += params
            if segment.use_orig_params:
                for param in params:
                    self._stepped[id(param.stepped)] = Stepped(param.stepped, [param], (place, param.number))
            else:
                self._stepped[id(segment.flat)] = Stepped(segment.flat, params, (place, -1))

    def all_stepped(self) -> list[Stepped]:
        """What an optimizer of all parameters steps, in the order of the table."""
        return list(self._stepped.values())

    def keys(self, groups: list[list[Stepped]], named: bool) -> dict[Stepped, Any]:
        """What an optimizer's state has for keys: numbers, or with ``named`` names as the model has them now."""
        stepped = [one for group in groups for one in group]
        if not named:
            return {one: number for number, one in enumerate(stepped)}
        names = {id(param): name for name, param in self.model.named_parameters()}
        return {one: names[id(one.tensor)] for one in stepped}

    def stepped(self, tensor: Tensor) -> Stepped:
        """Raises: ValueError for a tensor that is no parameter of the model."""
        found = self._stepped.get(id(tensor))
        if found is None:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(tensor.shape)} that {type(self.model).__name__} has not"
            )
        return found

    def groups(self, given: Any) -> list[list[Stepped]]:
        """What is stepped, by group of ``given``: an optimizer, or what one was made from; None: all parameters."""
        if hasattr(given, "param_groups"):
            groups = [group["params"] for group in given.param_groups]
        else:
            groups = [list(group) for group in _groups(self.model.parameters() if given is None else given)]
        return [[self.stepped(tensor) for tensor in group] for group in groups]


def _groups(given: Iterable[Any]) -> Iterator[Iterable[Tensor]]:
    listed = list(given)
    if listed and isinstance(listed[0], dict):
        yield from ([group["params"]] if isinstance(group["params"], Tensor) else group["params"] for group in listed)
    else:
        yield listed


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def settings_of(model: nn.Module) -> Any:
    """The ``StateDictSettings`` of the first unit in ``model``. Raises: ValueError if there is none."""
    for inner in model.modules():
        if "_unit" in vars(inner) and "_settings" in vars(inner):
            return vars(inner)["_settings"]
    raise ValueError(f"{type(model).__name__} holds no FullyShardedDataParallel")
