"""The enums and settings that users import, and the types of arguments.

ShardingStrategy and TrainingState_ are ours; the other enums and settings are torch's.
"""

from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp import ShardingStrategy as TorchsShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from ..common.parsing import suggestion
from ..common.torch_private import HandleTrainingState, TrainingState, _Policy

__all__ = ["HandleTrainingState", "ShardedGradScaler", "ShardingStrategy", "TrainingState", "TrainingState_"]
__all__ += ["BackwardPrefetch", "CPUOffload", "MixedPrecision", "StateDictConfig", "StateDictSettings", "StateDictType"]
__all__ += ["FullStateDictConfig", "LocalStateDictConfig", "OptimStateDictConfig", "ShardedStateDictConfig"]
__all__ += ["FullOptimStateDictConfig", "LocalOptimStateDictConfig", "OptimStateKeyType", "ShardedOptimStateDictConfig"]


class EqualByName(Enum):
    """An enum whose members equal those with their names of any enum with its class's name: torch's, a reference's."""

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Enum) and type(other).__name__ == type(self).__name__ and other._name_ == self._name_
        )

    def __hash__(self) -> int:
        return hash(self._name_)


# Words of DeepSpeed, torch's fully_shard, Lightning and others for a strategy, without "_" -> the name here
_ELSEWHERE = {
    **dict.fromkeys(("ZERO3", "STAGE3", "ZEROSTAGE3", "FSDP", "FULL"), "FULL_SHARD"),
    **dict.fromkeys(("ZERO2", "STAGE2", "ZEROSTAGE2"), "SHARD_GRAD_OP"),
    **dict.fromkeys(("ZERO1", "STAGE1", "ZEROSTAGE1"), "ZERO_1"),
    **dict.fromkeys(("ZERO0", "DDP", "NONE", "REPLICATE"), "NO_SHARD"),
    **dict.fromkeys(("HYBRID", "HSDP"), "HYBRID_SHARD"),
    "HYBRIDSHARDZERO2": "_HYBRID_SHARD_ZERO2",
}


class ShardingStrategy(EqualByName):
    """How a unit is sharded over ranks. Each member is a row of the table in ``placement.py``.

    - ``FULL_SHARD``: parameters, gradients and optimizer state over all ranks; a unit is gathered for its forward and
      again for its backward.
    - ``SHARD_GRAD_OP``: the same, but units stay gathered from forward to backward.
    - ``NO_SHARD``: each rank has the whole model, and gradients are all-reduced, as in DDP.
    - ``HYBRID_SHARD``: FULL_SHARD in an inner group of ranks, say those of a machine; the groups are replicas.
    - ``_HYBRID_SHARD_ZERO2``: SHARD_GRAD_OP in an inner group; the groups are replicas.
    - ``ZERO_1``: gradients and optimizer state over all ranks; each rank has the whole parameters.
    - ``LAYER_ZERO``: parameters in an inner group, gradients and optimizer state over all ranks (docs/layerzero.md).
    - ``LAYER_ZERO_NESTED``: the same, and gradients of micro-batches are sharded in the inner group until the last one.

    A member equals the member of torch's enum with the same name, and either is accepted as an argument. torch has no
    ``ZERO_1``, ``LAYER_ZERO`` and ``LAYER_ZERO_NESTED``.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()
    ZERO_1 = auto()
    LAYER_ZERO = auto()
    LAYER_ZERO_NESTED = auto()

    @classmethod
    def of(cls, value: Any) -> "ShardingStrategy":
        """Return the member for ``value``: a member of this enum or of torch's, or a name; None is FULL_SHARD.

        Raises: TypeError for anything else.
        """
        if value is None:
            return cls.FULL_SHARD
        if isinstance(value, Enum) and type(value).__name__ == "ShardingStrategy" and value.name in cls.__members__:
            return cls[value.name]
        if isinstance(value, str) and value in cls.__members__:
            return cls[value]
        names = [name for name in cls.__members__ if not name.startswith("_")]
        meant = ""
        if isinstance(value, str):
            word = value.rpartition(".")[2].upper().replace("-", "_").replace(" ", "_")
            word = _ELSEWHERE.get(word.replace("_", ""), word)
            meant = suggestion(word, cls.__members__).replace("mean ", f"mean {cls.__name__}.")
        raise TypeError(f"expected a ShardingStrategy, got {value!r}: pass one of {', '.join(names)}{meant}")


Strategy: TypeAlias = ShardingStrategy | TorchsShardingStrategy | str
# One group; for hybrid strategies (inner, outer); for LayerZero (inner, all ranks) or (inner, all ranks, outer)
ProcessGroups: TypeAlias = dist.ProcessGroup | tuple[dist.ProcessGroup, ...]
# One of torch's policies; a callable(module, recurse, nonwrapped_numel); classes of modules
WrapPolicy: TypeAlias = _Policy | Callable[..., bool] | Collection[type[nn.Module]]


class TrainingState_(Enum):
    """The states of torch 1.12. Each equals the state in today's enum that replaced it."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()
    SUMMON_FULL_PARAMS = auto()

    @property
    def today(self) -> TrainingState:
        """The state in today's enum that replaced this one."""
        return TrainingState.__members__.get(self.name, TrainingState.FORWARD_BACKWARD)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, TrainingState) and other is self.today)

    def __hash__(self) -> int:
        return hash(self.today)
