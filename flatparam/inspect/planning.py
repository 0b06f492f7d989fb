"""The units of a module, and the plan of their memory, by the functions with which the runtime wraps it.

``inspect`` and ``advise`` use it. Modules are on the meta device. No process group is needed.
"""

import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.parameter import is_lazy

from .._C import ShardError
from ..common.parsing import suggestion
from ..fsdp.api import ShardingStrategy
from ..fsdp.names import join
from ..fsdp.sharding.parameters import (
    Options,
    ParamInfo,
    by_flat_param,
    check_layout_arguments,
    check_tensors,
    choose_blocks,
    find_originals,
    layout_of,
)
from ..fsdp.sharding.placement import TABLE, Placement, Row, is_grid
from ..fsdp.unit.memory_plan import Flat, MemoryPlan, plan_tree, plan_unit
from ..fsdp.wrapper.materialize import own_modules
from ..fsdp.wrapper.wrap import check_not_tied, targets_of


class BadInput(ValueError):
    """An option or the model of the user is wrong. The message is one line."""


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _meant(where: str, error: BaseException) -> str:
    """Return a suggestion for the part of the module path ``where`` that ``error`` has not found."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{where}.".startswith(f"{missing}."):
        return ""  # a module that the user's module imports
    package, _, _ = missing.rpartition(".")
    folders = vars(sys.modules[package]).get("__path__", []) if package else None
    prefix = f"{package}." if package else ""
    return suggestion(missing, (found.name for found in pkgutil.iter_modules(folders, prefix)))


def _module_in(file: str, path: str) -> str:
    """Return a suggestion to import ``file`` by its module's name, from here or from its folder."""
    relative = Path(os.path.relpath(file)).with_suffix("")
    if relative.parts[0] == os.pardir:
        return f"; did you mean {relative.name}:{path}, with {os.path.dirname(file)} in PYTHONPATH?"
    return f"; did you mean {'.'.join(relative.parts)}:{path}?"


def load(spec: str) -> nn.Module:
    """Call ``package.module:factory`` under the meta device. Raises: BadInput."""
    where, colon, path = spec.partition(":")
    if not (where and colon and path):
        raise BadInput(f"expected package.module:factory, got {spec!r}")
    if where.endswith(".py"):
        raise BadInput(f"expected package.module:factory, got the path {where}{_module_in(where, path)}")
    try:
        factory: object = importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise BadInput(f"cannot import {where}: {one_line(error)}{_meant(where, error)}") from error
    for name in path.split("."):
        try:
            factory = getattr(factory, name)
        except AttributeError as error:
            raise BadInput(f"{where} has no `{path}`{suggestion(name, dir(factory))}") from error
    if isinstance(factory, nn.Module) or not callable(factory):
        raise BadInput(f"expected {spec} to be a function that makes a module, it is a {type(factory).__name__}")
    try:
        with torch.device("meta"):
            module = factory()
    except (Exception, SystemExit) as error:
        raise BadInput(f"{spec}() raised {one_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise BadInput(f"expected {spec}() to return an nn.Module, it returned a {type(module).__name__}")
    for path, inner in module.named_modules():
        for name, param in inner._parameters.items():
            if is_lazy(param):
                what = f"parameter `{join(path, name)}` of a {type(inner).__name__}"
                raise BadInput(f"{what} has no shape yet: let the factory run a forward")
    _leave_data(module)
    return module


def _leave_data(module: nn.Module) -> None:
    """Replace parameters that the factory made on another device by meta ones. Shared parameters stay shared."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for inner in module.modules():
        for name, param in inner._parameters.items():
            if type(param) is nn.Parameter and not param.is_meta:
                if param not in found:
                    found[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
                inner._parameters[name] = found[param]


MOST_RANKS = 2**31 - 1  # a rank is an int of C
SUPPORTED = {strategy.name: strategy for strategy in TABLE}
OPTIMIZERS: dict[str, Callable[[torch.dtype], int]] = {
    "adam": lambda dtype: 2 * dtype.itemsize,
    "sgd": lambda dtype: dtype.itemsize,
    "none": lambda dtype: 0,
}


@dataclass(frozen=True)
class Settings:
    """The arguments with which the model is to be wrapped.

    - ``shard_size``: the number of ranks that share a parameter; for hybrids and LAYER_ZERO alone.
    - ``wrap``: names of the classes whose modules become units; or ``min_params``: for torch's policy by size.
    - ``param_dtype``, ``reduce_dtype``: those of MixedPrecision.
    Raises: BadInput if they contradict each other.
    """

    world_size: int = 8
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    shard_size: int | None = None
    wrap: tuple[str, ...] = ()
    min_params: int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    optimizer: str = "adam"
    use_orig_params: bool = False
    segments: bool = False
    shard_alignment: int | None = None
    atomic_rows: bool = False
    prefetch: bool = True
    min_unit_bytes: int = 0

    def __post_init__(self) -> None:
        for name, least in (("world_size", 1), ("min_unit_bytes", 0), ("min_params", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadInput(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if self.world_size > MOST_RANKS:
            raise BadInput(f"--world-size must be at most {MOST_RANKS}, got {self.world_size}")
        if is_grid(self.strategy):
            if self.shard_size is None:
                raise BadInput(f"{self.strategy.name} needs --shard-size: how many ranks share a parameter")
            if self.shard_size < 1 or self.world_size % self.shard_size:
                raise BadInput(
                    f"--shard-size must divide the world size, got {self.shard_size} for {self.world_size} ranks"
                )
        elif self.shard_size is not None:
            raise BadInput(
                "--shard-size is for HYBRID_SHARD and _HYBRID_SHARD_ZERO2, LAYER_ZERO and LAYER_ZERO_NESTED, not "
                f"{self.strategy.name}"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of ranks of each group of the table of strategies."""
        inner = self.shard_size or 1
        return {"wide": self.world_size, "inner": inner, "outer": self.world_size // inner}

    @property
    def row(self) -> Row:
        """The row of the strategy in the table, over groups of these sizes."""
        return TABLE[self.strategy].over(self.sizes)

    @property
    def copy_shards(self) -> int:
        """The number of ranks that share a secondary shard; 0: there is none."""
        return (self.shard_size or 1) if self.row.param not in (None, self.row.optim) else 0

    @property
    def shards(self) -> int:
        """The number of ranks over which a parameter is sharded."""
        return 1 if self.row.optim is None else self.sizes[self.row.optim]


@dataclass(frozen=True)
class Unit:
    """A unit: its path in the module (empty: the root), its class, and its flat parameters with their original ones."""

    path: str
    kind: str
    segments: tuple[tuple[Flat, tuple[ParamInfo, ...]], ...]

    @property
    def name(self) -> str:
        return self.path or "(root)"

    @property
    def flats(self) -> list[Flat]:
        return [flat for flat, _ in self.segments]

    @property
    def parameters(self) -> int:
        return sum(len(originals) for _, originals in self.segments)

    @property
    def numel(self) -> int:
        """The elements of the parameters, without padding."""
        return sum(sum(flat.layout.numels) for flat in self.flats)

    @property
    def padding(self) -> int:
        """The elements of padding in all shards together, between parameters and at the end."""
        return sum(flat.layout.padded_numel for flat in self.flats) - self.numel

    @property
    def shard_numel(self) -> int:
        return sum(flat.layout.shard_numel for flat in self.flats)


def units_of(module: nn.Module, settings: Settings) -> list[Unit]:
    """Return the units that wrapping ``module`` would make, the outermost first. Raises: BadInput."""
    precisions = _precisions(module, settings)
    try:
        check_not_tied(module, precisions, set(), set())
    except ValueError as error:
        raise BadInput(str(error)) from error
    units = []
    for path, inner in module.named_modules():
        if inner in precisions:
            originals = find_originals(own_modules(inner, precisions.__contains__, set()), inner, set())
            units.append(_unit(path, inner, originals, precisions[inner], settings))
    return units


def dtypes_of(units: Iterable[Unit]) -> tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]:
    """Return the dtypes of the compute, and those of the reductions of gradients, each sorted by name; not integers."""
    flats = [flat for unit in units for flat in unit.flats if flat.dtype.is_floating_point or flat.dtype.is_complex]
    compute = {flat.compute_dtype or flat.dtype for flat in flats}
    reduce = {flat.reduce_dtype or flat.compute_dtype or flat.dtype for flat in flats if flat.is_trained}
    return tuple(sorted(compute, key=str)), tuple(sorted(reduce, key=str))


def names_of(dtypes: Iterable[torch.dtype]) -> str:
    """Return the names of ``dtypes`` without ``torch.``; "none" if there is none."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) or "none"


def plan_of(units: list[Unit], settings: Settings) -> MemoryPlan:
    """Return the bytes that each rank will hold."""
    row, state_bytes = settings.row, OPTIMIZERS[settings.optimizer]
    plans = [
        plan_unit(unit.name, unit.flats, row, state_bytes, copy_shards=settings.copy_shards, nested=row.nested)
        for unit in units
    ]
    return plan_tree(plans, settings.prefetch, min_unit_bytes=settings.min_unit_bytes)


def plans_by_strategy(module: nn.Module, settings: Settings) -> dict[str, MemoryPlan]:
    """Return strategy -> plan, for each strategy. Those that need ``shard_size`` are left out if it is None."""
    found = {}
    for name, strategy in SUPPORTED.items():
        size = settings.shard_size if is_grid(strategy) else None
        if size is not None or not is_grid(strategy):
            other = replace(settings, strategy=strategy, shard_size=size)
            found[name] = plan_of(units_of(module, other), other)
    return found


def _precisions(module: nn.Module, settings: Settings) -> dict[nn.Module, MixedPrecision]:
    """Return the modules that become units, with the precision of each."""
    precision = MixedPrecision(settings.param_dtype, settings.reduce_dtype)
    policy = _policy(module, settings)
    if policy is None:
        return {module: precision}
    found = dict.fromkeys(targets_of(module, policy, set(), set(), {}), precision)
    if settings.param_dtype is not None:  # as the wrapper does: these compute in full precision
        ignored = tuple(precision._module_classes_to_ignore or ())
        found.update((m, MixedPrecision()) for m in module.modules() if isinstance(m, ignored))
    return {**found, module: precision}


def _policy(module: nn.Module, settings: Settings) -> Any:
    if settings.wrap and settings.min_params is not None:
        raise BadInput("--wrap and --min-params are two policies: give one")
    if settings.min_params is not None:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=settings.min_params)
    if not settings.wrap:
        return None
    classes = {type(inner) for inner in module.modules()}
    chosen = set()
    for name in settings.wrap:
        named = {cls for cls in classes if name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")}
        if not named:
            there = ", ".join(sorted({cls.__name__ for cls in classes}))
            meant = suggestion(name, (cls.__name__ for cls in classes))
            raise BadInput(f"no module of class {name} in it; there are {there}{meant}")
        chosen |= named
    return ModuleWrapPolicy(chosen)


def _unit(
    path: str, module: nn.Module, originals: list[ParamInfo], precision: MixedPrecision, settings: Settings
) -> Unit:
    options = Options(
        Placement(full_precision=settings.row.full_precision),
        precision,
        settings.use_orig_params,
        settings.segments,
        settings.shard_alignment,
        "row" if settings.atomic_rows else None,
    )
    unit = path or "(root)"
    try:
        check_layout_arguments(options.shard_alignment, options.atomic)
        check_tensors([_with_data(original) for original in originals], options)
        choose_blocks(originals, options.atomic)
        segments = tuple(_segment(group, options, settings) for group in by_flat_param(originals, options))
    except (ValueError, ShardError) as error:
        raise BadInput(f"unit {unit} cannot be made: {' '.join(str(error).split())}") from error
    return Unit(path, type(module).__name__, segments)


def _with_data(original: ParamInfo) -> ParamInfo:
    """Return ``original`` with an empty parameter on the host: the wrapper would refuse one on the meta device."""
    param = original.param
    if type(param) is not nn.Parameter or param.layout != torch.strided:
        return original
    return replace(original, param=nn.Parameter(torch.empty(0, dtype=param.dtype), param.requires_grad))


def _segment(originals: list[ParamInfo], options: Options, settings: Settings) -> tuple[Flat, tuple[ParamInfo, ...]]:
    layout, dtypes = layout_of(originals, settings.shards, options)
    trained = any(original.param.requires_grad for original in originals)
    dtype = originals[0].param.dtype
    reduce_dtype = dtypes.reduce or (dtype if settings.row.full_precision else None)
    return Flat(layout, dtype, dtypes.compute, reduce_dtype, trained), tuple(originals)
