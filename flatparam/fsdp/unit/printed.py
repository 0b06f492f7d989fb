"""Text for ``print``: one line about a unit, and short text for tensors without memory.

``Wrapper`` and ``shard_map.py`` call this file.
"""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...common.tables import human, many
from ...common.tensors import has_memory
from .unit import Unit


class ShowingFreed(TorchFunctionMode):
    """Within the block, ``repr`` of a freed tensor is its shape and dtype.

    ``extra_repr`` of some modules formats tensors, and reading freed ones would fail.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__repr__ and args[0].numel() and not args[0].is_meta and not has_memory(args[0]):
            return f"<sharded: {tuple(args[0].shape)} of {of_dtype(args[0].dtype)}>"
        return func(*args, **(kwargs or {}))


def of_dtype(dtype: object) -> str:
    """The name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def of_unit(strategy: str, unit: Unit) -> str:
    """One line with the strategy, ranks and sizes of a unit. Equal units have equal lines, so ``print`` merges them."""
    placement = unit.options.placement
    over = f"{placement.shards} rank{'s' if placement.shards > 1 else ''}"
    if placement.has_secondary_shard:
        over += f", gathered over {placement.param_shards}"
    if placement.replicas > 1:
        over += f", {placement.replicas} replicas"
    if not unit.flat_params:
        return f"{strategy} over {over}; no parameters of its own"
    layouts = [flat_param.layout for flat_param in unit.flat_params]
    params = sum(len(layout.numels) for layout in layouts)
    shard = sum(one.layout.shard_numel * one.flat.dtype.itemsize for one in unit.flat_params)
    dtypes = ", ".join(dict.fromkeys(of_dtype(one.flat.dtype) for one in unit.flat_params))
    return (
        f"{strategy} over {over}; {many(params, 'parameter')} of "
        f"{sum(sum(layout.numels) for layout in layouts):,} elements, in a shard "
        f"{sum(layout.shard_numel for layout in layouts):,} of {dtypes}, {human(shard)}"
    )
