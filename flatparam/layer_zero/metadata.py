"""Named tuples that describe the elements in a rank's shard, with the reference's fields."""

from typing import NamedTuple

import torch


class ShardParamInfo(NamedTuple):
    """The elements of one original parameter in this rank's zero1 shard, and the parameter's place.

    All fields but the first are numbers of elements; each end is inclusive. The first five are torch's
    ``_ShardParamInfo``. The last two are the range of the whole parameter in the unsharded flat parameter; they are set
    even if the shard has none of it.
    """

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None
    flat_param_start_idx: int | None = None
    flat_param_end_idx: int | None = None


class FlatParamShardMetadata(NamedTuple):
    """The parameters with elements in a rank's shard, one entry each. It has torch's names, and two fields less.

    ``param_offsets``: the first and the last element (inclusive) of the parameter in the shard.
    """

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]
