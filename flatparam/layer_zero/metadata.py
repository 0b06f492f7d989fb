"""What a rank's shard holds of parameters, in the reference's fields."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


class ShardParamInfo(NamedTuple):
    """What this rank's zero1 shard holds of one original parameter, and where the parameter lies.

    The first five fields are torch's ``_ShardParamInfo``. All are in elements; every end is inclusive. The last two
    are of the whole parameter in the unsharded flat parameter, and are set whether it is in the shard or not.
    """

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None
    flat_param_start_idx: int | None = None
    flat_param_end_idx: int | None = None


class FlatParamShardMetadata(NamedTuple):
    """What a rank's shard holds, one entry a parameter that it holds. The names are torch's; it has two fields less.

    ``param_offsets`` are the first and the last element, inclusive, of the parameter that the shard has.
    """

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


def with_places(
    infos: Iterable[tuple[Any, ...]], offsets: Iterable[tuple[int, int]], is_padding: Iterable[bool]
) -> tuple[ShardParamInfo, ...]:
    """torch's infos, one a parameter, with the ``[start, end]`` of each in ``offsets``, which tells of paddings too."""
    places = (place for place, padding in zip(offsets, is_padding, strict=True) if not padding)
    return tuple(ShardParamInfo._make((*info, *place)) for info, place in zip(infos, places, strict=True))
