"""FlatLayout equals, field by field, what torch's own FlatParamHandle computes; its queries equal plain counting.

Oracle: torch's FlatParamHandle on a module with the same parameters, on a fake group; torch.chunk; lists of elements.
"""

import bisect
import itertools
import random
import re

import pytest
import torch
from gloo import fake_world
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy

from flatparam import _C, FullyShardedDataParallel, ShardError
from flatparam.common.layout import FlatLayout

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LISTS_EACH = 105  # times the 20 seeds: more than 2,000 random parameter lists


def torchs_handle(shapes, dtype, group, use_orig_params):
    """Return torch's handle over parameters of these shapes; sharded."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])
    handle = FlatParamHandle(
        list(module),
        module,
        torch.device("cpu"),
        HandleShardingStrategy.FULL_SHARD,
        offload_params=False,
        mp_param_dtype=None,
        mp_reduce_dtype=None,
        keep_low_precision_grads=False,
        process_group=group,
        use_orig_params=use_orig_params,
    )
    handle.unsharded_numel = handle.flat_param.numel()
    handle.shard()
    return handle


def random_numels(source):
    """Return sizes of 1 to 30 parameters: ones, odd sizes, big ones, few elements for many ranks."""
    kind = source.randrange(4)
    count = source.choice([1, 2, 3, 7, 30])
    if kind == 0:
        return [1] * count
    if kind == 1:
        return [source.randrange(1, 10) for _ in range(count)]
    if kind == 2:
        return [source.choice([1, 3, 16, 64, 65, 255, 1024]) for _ in range(count)]
    return [2 * source.randrange(300) + 1 for _ in range(count)]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("seed", range(20))
def test_random_lists_are_laid_out_as_torch_does(seed):
    source = random.Random(seed)
    for _ in range(LISTS_EACH):
        numels = random_numels(source)
        world_size = source.choice([1, 2, 3, 4, 5, 7, 8, 16, 31, 64])
        rank = source.randrange(world_size)
        dtype = source.choice(DTYPES)
        use_orig_params = source.random() < 0.5
        alignment = 16 // dtype.itemsize if use_orig_params else 0
        where = f"{numels} {dtype} world_size={world_size} rank={rank} use_orig_params={use_orig_params}"
        layout = FlatLayout(numels, world_size, itemsize=dtype.itemsize, alignment=alignment)
        with fake_world(world_size, rank) as group:
            handle = torchs_handle(numels, dtype, group, use_orig_params)
        flat_param = handle.flat_param
        assert layout.numels == tuple(flat_param._numels), where
        assert layout.numels_with_padding == tuple(flat_param._numels_with_padding), where
        assert layout.is_padding_mask == tuple(flat_param._is_padding_mask), where
        assert layout.numel == handle.unsharded_numel, where
        assert layout.shard_numel == flat_param.numel() == flat_param._sharded_size.numel(), where
        assert layout.shard(rank).padding == flat_param._shard_numel_padded, where
        assert layout.param_shards(rank) == tuple(flat_param._shard_param_infos), where
        starts = [
            start
            for (start, _), padding in zip(handle._get_flat_param_offsets(), flat_param._is_padding_mask, strict=True)
            if not padding
        ]
        assert layout.offsets == tuple(starts), where
        assert layout.padding == sum(
            itertools.compress(flat_param._numels_with_padding, flat_param._is_padding_mask)
        ), where


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_empty_parameters_are_laid_out_as_torch_does(use_orig_params):
    for numels, world_size in [([0, 5], 2), ([5, 0], 3), ([3, 0, 0, 4], 4), ([4, 0], 2), ([4, 0, 4], 2)]:
        layout = FlatLayout(numels, world_size, itemsize=4, alignment=4 if use_orig_params else 0)
        for rank in range(world_size):
            with fake_world(world_size, rank) as group:
                handle = torchs_handle(numels, torch.float32, group, use_orig_params)
            assert layout.param_shards(rank) == tuple(handle.flat_param._shard_param_infos), (numels, rank)
            assert layout.numels_with_padding == tuple(handle.flat_param._numels_with_padding)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(8, 8), (7, 2), (1, 3), (5, 1)])
def test_shards_aligned_to_a_byte_are_torchs(sizes, dtype, use_orig_params):
    for world_size, rank in ((1, 0), (2, 1), (3, 0), (4, 3)):
        with fake_world(world_size, rank) as group:
            module = nn.Linear(*sizes, dtype=dtype)
            handle = torchs_handle([param.shape for param in module.parameters()], dtype, group, use_orig_params)
            unit = FullyShardedDataParallel(module, use_orig_params=use_orig_params, shard_alignment=1)
            assert unit._flat_param._local_shard.numel() == handle.flat_param.numel()
            found, wanted = (one._shard_param_infos for one in (unit._flat_param, handle.flat_param))
            assert tuple(found) == tuple(wanted)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_0_dim_parameter_is_laid_out_as_shape_1(use_orig_params):
    alignment = 4 if use_orig_params else 0
    layout = FlatLayout.of_shapes([(), (2, 3), ()], 4, itemsize=4, alignment=alignment)
    for rank in range(4):
        with fake_world(4, rank) as group:
            handle = torchs_handle([1, (2, 3), 1], torch.float32, group, use_orig_params)
        assert layout.param_shards(rank) == tuple(handle.flat_param._shard_param_infos)
        assert layout.numels_with_padding == tuple(handle.flat_param._numels_with_padding)


@settings(deadline=None)
@given(numel=st.integers(1, 300), world_size=st.integers(1, 64))
def test_shards_are_torchs_chunks(numel, world_size):
    chunks = torch.arange(numel).chunk(world_size)
    layout = FlatLayout([numel], world_size)
    for rank in range(world_size):
        start, held, padding = layout.shard(rank)
        chunk = chunks[rank] if rank < len(chunks) else chunks[0][:0]
        assert torch.equal(torch.arange(start, start + held), chunk)
        assert held + padding == len(chunks[0]) == layout.shard_numel


@settings(deadline=None)
@given(numel=st.integers(1, 2**48), world_size=st.integers(1, 300))  # sizes that no test could allocate
def test_shards_tile_the_flat_parameter(numel, world_size):
    layout = FlatLayout([numel], world_size)
    shards = [layout.shard(rank) for rank in range(world_size)]
    assert shards[0].start == 0
    assert sum(shard.numel for shard in shards) == numel
    assert all(a.start + a.numel == b.start for a, b in itertools.pairwise(shards))
    assert layout.padded_numel == sum(shard.numel + shard.padding for shard in shards)


@settings(deadline=None)
@given(st.data())
def test_ranks_of_a_range_hold_its_elements(data):
    numel, world_size = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 40))
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    layout = FlatLayout([numel], world_size)
    held = [
        (piece.rank, piece.start + i, piece.offset_in_shard + i)
        for piece in layout.ranks_of(begin, end)
        for i in range(piece.numel)
    ]
    shard_numel = -(-numel // world_size)
    assert held == [(element // shard_numel, element, element % shard_numel) for element in range(begin, end)]
    assert all(piece.numel > 0 for piece in layout.ranks_of(begin, end))


@settings(deadline=None)
@given(
    numels=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    world_size=st.integers(1, 9),
    alignment=st.integers(0, 8),
    data=st.data(),
)
def test_parts_of_a_range_are_its_elements(numels, world_size, alignment, data):
    layout = FlatLayout(numels, world_size, alignment=alignment)
    owner = [None] * layout.padded_numel  # (parameter, element in it) of each element
    for index, (offset, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True)):
        owner[offset : offset + numel] = [(index, element) for element in range(numel)]
    begin = data.draw(st.integers(0, layout.padded_numel))
    end = data.draw(st.integers(begin, layout.padded_numel))
    params, parts = layout.params_in(begin, end), layout.parts(begin, end)
    found = [None] * (end - begin)
    for index, (offset, numel, start, last) in zip(params, parts, strict=True):
        found[offset : offset + numel] = [(index, element) for element in range(start, last + 1)]
    assert found == owner[begin:end]
    for index in range(len(numels)):
        ranks = [piece.rank for piece in layout.ranks_of_param(index)]
        assert ranks == [rank for rank in range(world_size) if layout.param_shards(rank)[index].in_shard]


def test_ten_thousand_parameters_over_4096_ranks_are_found_by_binary_search():
    numels = [1 + i % 997 for i in range(10_000)]
    layout = FlatLayout(numels, 4096, itemsize=4, alignment=4)
    ends = [start + numel for start, numel in zip(layout.offsets, numels, strict=True)]
    for rank in range(4096):
        begin, end = rank * layout.shard_numel, (rank + 1) * layout.shard_numel
        found = layout.params_in(begin, end)
        assert found == range(bisect.bisect_right(ends, begin), bisect.bisect_left(layout.offsets, end))


TOO_MANY_BYTES = "fewer than 2^63 bytes, paddings included, got"


@pytest.mark.parametrize(
    ("numels", "world_size", "itemsize", "alignment", "message"),
    [
        ([], 1, 1, 0, "at least one element, there are no sizes"),
        ([0, 0], 1, 1, 0, "at least one element, all sizes are 0"),
        ([1, -1], 1, 1, 0, "numels >= 0, numels[1] is -1"),
        ([1], 0, 1, 0, "world_size >= 1, got 0"),
        ([1], -1, 1, 0, "world_size >= 1, got -1"),
        ([1], 1, 0, 0, "itemsize >= 1, got 0"),
        ([1], 1, -4, 0, "itemsize >= 1, got -4"),
        ([1], 1, 1, -1, "alignment >= 0, got -1"),
        ([2**63 - 1], 2, 1, 0, TOO_MANY_BYTES),
        ([2**62, 2**62], 1, 1, 0, TOO_MANY_BYTES),
        ([2**61], 1, 4, 0, TOO_MANY_BYTES),
        ([2**60], 2**63 - 1, 1, 0, TOO_MANY_BYTES),
        ([1, 1], 1, 1, 2**62, TOO_MANY_BYTES),
        ([1] * 5, 2**62, 2, 0, TOO_MANY_BYTES),
    ],
)
def test_sizes_out_of_range_are_refused_by_name(numels, world_size, itemsize, alignment, message):
    with pytest.raises(ShardError, match=re.escape(f"expected {message}")):
        FlatLayout(numels, world_size, itemsize=itemsize, alignment=alignment)


def test_the_biggest_sizes_are_exact():
    layout = FlatLayout([2**62, 2**61], 3, itemsize=1, alignment=16)
    assert layout.numel == -(-(2**62 + 2**61) // 3) * 3
    assert layout.offsets == (0, 2**62)
    assert layout.padded_numel == layout.shard_numel * 3 == layout.numel
    assert layout.shard(2) == (2 * layout.shard_numel, layout.shard_numel, 0)


def test_ranks_and_ranges_out_of_range_are_refused():
    layout = FlatLayout([10], 4)
    for rank in (-1, 4, 2**40):
        with pytest.raises(ShardError):
            layout.shard(rank)
        with pytest.raises(ShardError, match="0 <= rank < 4"):
            layout.param_shards(rank)
    for begin, end in [(-1, 3), (3, 2), (0, 11)]:
        with pytest.raises(ShardError):
            layout.ranks_of(begin, end)
    for begin, end in [(-1, 3), (3, 2)]:
        with pytest.raises(ShardError):
            layout.params_in(begin, end)
    with pytest.raises(ShardError, match="at most 1048576 ranks"):
        FlatLayout([2**40], 2**40).ranks_of(0, 2**40)


def test_wrong_types_are_refused():
    for numels in (None, 5, [1.0], ["1"], [None]):
        with pytest.raises(TypeError):
            FlatLayout(numels, 1)
    with pytest.raises(TypeError):
        FlatLayout([1], 1.5)
    with pytest.raises(OverflowError):
        FlatLayout([2**63], 1)
    with pytest.raises(OverflowError):
        FlatLayout([1], 2**64)
    with pytest.raises(TypeError, match="from 4 to 5 arguments"):
        _C.Layout([1])
    with pytest.raises(TypeError, match="keyword"):
        _C.Layout([1], 1, 1, alignment=0)


def test_it_tells_what_it_is():
    layout = FlatLayout([3, 5], 2, itemsize=4, alignment=4)
    assert "2 parameters" in repr(layout)
    assert "numel=10" in repr(layout)
    assert (layout.world_size, layout.shard_bytes) == (2, 20)
    with pytest.raises(AttributeError):
        layout.numel = 3


@pytest.mark.parametrize("alignment", [0, 4])
def test_a_range_that_is_flattened_is_that_of_the_whole(alignment):
    tensors = [torch.arange(7.0), torch.arange(12.0).view(4, 3).t(), torch.empty(0), torch.arange(12.0)[::2]]
    layout = FlatLayout([tensor.numel() for tensor in tensors], 3, alignment=alignment)
    whole = layout.flatten(tensors, 42.0, 0, layout.padded_numel)
    for tensor, offset, numel in zip(tensors, layout.offsets, layout.numels, strict=True):
        dense = tensor.t() if tensor.dim() == 2 else tensor  # in the order of memory
        assert torch.equal(whole[offset : offset + numel], dense.reshape(-1))
    paddings = layout.numel - sum(layout.numels)
    assert (whole[: layout.numel] == 42).sum() == paddings
    assert not whole[layout.numel :].any()
    for begin in range(layout.padded_numel + 1):
        for end in range(begin, layout.padded_numel + 1):
            assert torch.equal(layout.flatten(tensors, 42.0, begin, end), whole[begin:end])
    with pytest.raises(ShardError, match="range"):
        layout.flatten(tensors, 42.0, 0, layout.padded_numel + 1)
    with pytest.raises(ValueError, match="tensor 1"):
        layout.flatten([tensors[0], *tensors[:3]], 42.0, 0, 1)
