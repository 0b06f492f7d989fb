"""The wrapper's full parameters: summoned, saved in state dicts and loaded from them."""

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FullStateDictConfig, StateDictSettings, StateDictType
from torch.distributed.fsdp.api import FullOptimStateDictConfig
from typing_extensions import Self

from .errors import StateError, WritebackError
from .loading import Values, agree_on_loading, check_kinds, managed_places, values_of
from .names import FSDP_PREFIX, without_units
from .originals import Original
from .segment import Segment
from .summon import Summoned, refuse_unreduced, summon
from .unit import Unit, units_of
from .wrapper import Wrapper


class FullStates(Wrapper):
    """The part of the wrapper that shows, saves and loads full parameters."""

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Within the block the parameters of the units under ``module`` are whole, in full precision.

        A collective call. ``writeback``: each rank keeps its own shard of what was written. ``rank0_only``: rank 0 of
        the group that shares a unit sees them, the others their shards. ``with_grads``: ``.grad`` too.
        Raises: ValueError in a forward, a backward or another summon, for ``writeback`` with ``rank0_only``, and for
        ``with_grads`` with gradients of ``no_sync`` that are not reduced yet.
        """
        if writeback and rank0_only:
            raise WritebackError(
                "writeback=True with rank0_only=True would leave the ranks with different parameters: pass one of them"
            )
        wrappers = [inner for inner in module.modules() if isinstance(inner, Wrapper)] if recurse else [module]
        units = []
        for wrapper in wrappers:
            if isinstance(wrapper, Wrapper):
                wrapper._check_idle("summon_full_params")
                units.append(wrapper._unit)
        if with_grads:
            refuse_unreduced(units, "summon_full_params(with_grads=True)")
        if offload_to_cpu and not rank0_only:
            warnings.warn(
                "summon_full_params(offload_to_cpu=True) without rank0_only=True holds every parameter once a rank in "
                "the memory of each host",
                stacklevel=3,
            )
        with summon(
            units, writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads
        ):
            yield

    def _summon_full_params(
        self, recurse: bool = True, writeback: bool = True, rank0_only: bool = False, offload_to_cpu: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """``summon_full_params`` of this unit, and with ``recurse`` those below it."""
        return self.summon_full_params(self, recurse, writeback, rank0_only, offload_to_cpu)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` on every module, while the parameters of its unit are whole; what it writes is kept."""
        self._check_idle("apply")
        with summon([self._unit], writeback=True):
            super().apply(fn)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; while this unit is summoned, with the names of the unwrapped model."""
        self._forget_interrupted()
        for name, param in super().named_parameters(*args, **kwargs):
            yield (without_units(name) if self._unit.summoned is not None else name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of any module; while this unit is summoned, with the names of the unwrapped model."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (without_units(name) if self._unit.summoned is not None else name), buffer

    # State dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Every parameter whole, in its own precision, under the names of the unwrapped model. A collective call."""
        already = self._unit.summoned is not None
        if not already:
            self._check_idle_here("state_dict")
        config = self._settings.state_dict_config
        rank0_only, to_cpu = getattr(config, "rank0_only", False), config.offload_to_cpu
        names = ("destination", "prefix", "keep_vars")
        kwargs.update(zip(names, args, strict=False))
        prefix = kwargs.get("prefix", "")
        units = [] if already else [self._unit]
        on_host = to_cpu and self._unit.options.device is not None  # where the parameters are
        with summon(units, writeback=False, offload_to_cpu=on_host):
            result = super().state_dict(**kwargs)
            _own_entries(
                self._unit,
                result,
                prefix + FSDP_PREFIX,
                keep_vars=kwargs.get("keep_vars", False),
                to_cpu=to_cpu,
                drop=rank0_only and self._placement.rank != 0,
            )
        _strip_prefix(result, prefix)
        _restore_buffers(result, self._buffer_dtypes, prefix)
        return result

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a full state dict, which every rank has; all ranks load all of it, or none anything. A collective call.

        Names in messages are those of the unwrapped model. Until it is done this takes the bytes of this rank's shards,
        and of what no unit manages, once more.
        Raises: RuntimeError on every rank for keys, shapes or kinds of dtype that do not fit on one of them, and for
        values that differ between ranks.
        """
        self._check_idle("load_state_dict")
        units = list(units_of(self.modules()))
        before, error, result = Before(self, units), None, None
        values: Values = {}
        try:
            try:
                result = super().load_state_dict(state_dict, strict=strict, assign=assign)
                check_kinds(self, state_dict)
                values = values_of(self, state_dict)
            finally:
                for wrapper in self.fsdp_modules(self):
                    wrapper._end_loading()
        except Exception as caught:
            error = RuntimeError(str(caught).replace(FSDP_PREFIX, "")) if type(caught) is RuntimeError else caught
        try:
            said = None if error is None else f"{type(error).__name__}: {error}"
            agree_on_loading("load_state_dict", units, said, values)
        except RuntimeError as told:
            before.restore()
            raise (told if error is None else error) from None
        return result

    def _end_loading(self) -> None:
        if self._loading is not None:
            loading, self._loading = self._loading, None
            loading.leave()

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> StateDictSettings:
        """Choose what ``state_dict`` of the units under ``module`` gives; returns the settings before.

        Raises: ValueError for another kind than FULL_STATE_DICT, which is not supported yet.
        """
        if state_dict_type is not StateDictType.FULL_STATE_DICT:
            raise ValueError(f"{state_dict_type} is not supported yet: only FULL_STATE_DICT is")
        config = state_dict_config if state_dict_config is not None else FullStateDictConfig()
        optim_config = optim_state_dict_config if optim_state_dict_config is not None else FullOptimStateDictConfig()
        if not isinstance(config, FullStateDictConfig):
            raise StateError(f"{state_dict_type} takes a FullStateDictConfig, got {type(config).__name__}")
        wrappers = Wrapper.fsdp_modules(module)
        previous = [wrapper._settings for wrapper in wrappers]
        for wrapper in wrappers:
            wrapper._settings = StateDictSettings(state_dict_type, config, optim_config)
        if not previous:
            return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
        return previous[0]

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of the units under ``module``."""
        wrappers = Wrapper.fsdp_modules(module)
        if not wrappers:
            raise ValueError(f"{type(module).__name__} holds no FullyShardedDataParallel")
        return wrappers[0]._settings

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Generator[None, None, None]:
        """``set_state_dict_type`` for the block; the settings before are restored, also after an exception."""
        wrappers = Wrapper.fsdp_modules(module)
        before = [wrapper._settings for wrapper in wrappers]
        configs = (state_dict_config, optim_state_dict_config)
        FullStates.set_state_dict_type(module, state_dict_type, *configs)
        try:
            yield
        finally:
            for wrapper, settings in zip(wrappers, before, strict=True):
                wrapper._settings = settings


def _before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    assert isinstance(module, FullStates)
    _insert_prefix(state_dict, prefix)
    if module._unit.summoned is None:
        on_host = module._unit.options.device is not None  # as the shards are
        loading = Summoned(module._unit, writeback=True, offload_to_cpu=on_host, loads=True)
        loading.enter()
        module._loading = loading


def _after_load(module: nn.Module, incompatible: Any) -> None:
    assert isinstance(module, FullStates)
    module._end_loading()
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [without_units(key) for key in keys]


class Before:
    """The values that ``module`` has now: this rank's shards, and what ``units``, those in it, do not manage."""

    def __init__(self, module: nn.Module, units: list[Unit]):
        self._units = [(unit, unit.apart) for unit in units]
        self._shards: list[tuple[Segment, Tensor]] = []
        self._templates: list[tuple[Original, nn.Parameter | None]] = []
        self._others: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        for unit in units:
            unit.look_over()
            for segment in unit.segments:
                self._shards.append((segment, segment.flat.detach().clone()))
                self._templates += [(original, original.template) for original in segment.originals]
        managed = managed_places(units)
        for inner in module.modules():
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


def _strip_prefix(destination: dict[str, Any], prefix: str) -> None:
    """Rename the entries below a unit at ``prefix`` in place, the module metadata too; the order stays."""
    inner = prefix + FSDP_PREFIX
    for mapping in (destination, getattr(destination, "_metadata", None)):
        if mapping is None:
            continue
        for key in list(mapping):
            if key.startswith(inner) or key + "." == inner:
                mapping[prefix + key[len(inner) :] if key.startswith(inner) else prefix[:-1]] = mapping.pop(key)


def _own_entries(
    unit: Unit, destination: dict[str, Any], prefix: str, *, keep_vars: bool, to_cpu: bool, drop: bool
) -> None:
    """Make the entries of ``unit``'s parameters tensors of their own, or drop them (on ranks that were not to get any).

    ``prefix``: of the wrapped module in ``destination``.
    """
    for segment in unit.segments:
        for original in segment.originals:
            for place in original.names:
                key = prefix + _path(unit.module, place.module, place.name)
                value = destination.get(key)
                if value is None:
                    continue
                if drop:
                    del destination[key]
                    continue
                copy = value.detach().cpu() if to_cpu else value.detach().clone()
                copy = copy.clone() if copy.data_ptr() == value.data_ptr() else copy
                destination[key] = nn.Parameter(copy, requires_grad=value.requires_grad) if keep_vars else copy


def _path(root: nn.Module, owner: nn.Module, name: str) -> str:
    """The name of ``owner``'s parameter below ``root``, with wrappers' names as they are."""
    for path, module in root.named_modules(remove_duplicate=False):
        if module is owner:
            return f"{path}.{name}" if path else name
    raise AssertionError(f"{name} is not below {type(root).__name__}")


def _restore_buffers(destination: dict[str, Any], dtypes: dict[str, torch.dtype], prefix: str) -> None:
    """Buffers that are kept in a lower precision go into the state dict in their own."""
    for name, dtype in dtypes.items():
        value = destination.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype != dtype:
            destination[prefix + name] = value.to(dtype)


def _insert_prefix(state_dict: dict[str, Any], prefix: str) -> None:
    """Rename the entries of a state dict of the unwrapped model in place, for the unit at ``prefix``."""
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(prefix + FSDP_PREFIX):
            state_dict[prefix + FSDP_PREFIX + key[len(prefix) :]] = state_dict.pop(key)
