"""Choose the form of state dicts for all units under a module: from now on, or in a block. Nothing is saved here."""

import contextlib
from typing import Any

from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import StateDictSettings, StateDictType

from ... import _C
from ..either import or_torchs
from ..errors import StateError
from ..unit.base import Wrapper

_CONFIGS = {
    StateDictType.FULL_STATE_DICT: (fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (fsdp.LocalStateDictConfig, fsdp.LocalOptimStateDictConfig),
}


def first_settings() -> StateDictSettings:
    """Return the settings of a new unit: FULL_STATE_DICT."""
    return StateDictSettings(StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig(), fsdp.FullOptimStateDictConfig())


@or_torchs
def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> StateDictSettings:
    """Set the form that ``state_dict`` and ``optim_state_dict`` have for all units under ``module``.

    Returns: the previous settings.
    Raises: StateError for a config of another form, if the units have different settings, and for LOCAL_STATE_DICT
    if a unit was made with a device mesh. No unit is changed then.
    """
    if state_dict_type not in _CONFIGS:
        raise StateError(f"expected state_dict_type to be a StateDictType, got {state_dict_type!r}")
    given = (state_dict_config, optim_state_dict_config)
    configs: list[Any] = []
    for what, config, expected in zip(("state", "optim_state"), given, _CONFIGS[state_dict_type], strict=True):
        if config is not None and type(config) is not expected:
            raise StateError(
                f"Expected {what}_dict_config of type {expected.__name__} for {state_dict_type}, got "
                f"{type(config).__name__}"
            )
        configs.append(expected() if config is None else config)
    wrappers = Wrapper.fsdp_modules(module)
    before: StateDictSettings | None = _common(wrappers, whole=False)
    for each in wrappers:
        if state_dict_type is StateDictType.LOCAL_STATE_DICT and each.placement.mesh is not None:
            raise StateError(
                f"DeviceMesh is not compatible with LOCAL_STATE_DICT: {each._unit.name} was made with one, set "
                "SHARDED_STATE_DICT for DTensors"
            )
    has_mesh = any(each.placement.mesh is not None for each in wrappers)
    for config in configs if has_mesh and state_dict_type is StateDictType.SHARDED_STATE_DICT else ():
        config._use_dtensor = True
    for each in wrappers:
        each._settings = StateDictSettings(state_dict_type, *configs)
    return first_settings() if before is None else before


@or_torchs
def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """The settings of the units under ``module``. Raises: StateError if they differ, ValueError without a unit."""
    found: StateDictSettings | None = _common(Wrapper.fsdp_modules(module), whole=True)
    if found is None:
        raise ValueError(f"{type(module).__name__} holds no FullyShardedDataParallel")
    return found


@or_torchs
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> contextlib.AbstractContextManager[None]:
    """Call ``set_state_dict_type`` for a block. At its end, also on an exception, restore the previous settings."""
    before: list[tuple[Any, StateDictSettings]] = []

    def begin() -> None:
        before.extend((each, each._settings) for each in Wrapper.fsdp_modules(module))
        set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)

    def end() -> None:
        for each, settings in before:
            each._settings = settings

    return _C.Block(begin, end)


def _common(wrappers: list[Any], *, whole: bool) -> Any:
    """Return the settings that all ``wrappers`` share; None: there are no wrappers.

    ``whole``: configs must be equal, else only the forms. Raises: StateError if settings differ.
    """
    first: Any = wrappers[0]._settings if wrappers else None
    for wrapper in wrappers:
        settings = wrapper._settings
        if not (settings == first if whole else settings.state_dict_type is first.state_dict_type):
            raise StateError(
                f"All FSDP modules must have the same state dict settings: got {settings} for {wrapper._unit.name}, "
                f"and {first} for {wrappers[0]._unit.name}"
            )
    return first
