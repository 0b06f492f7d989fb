"""Layouts in aligned shards that cut no block, against trying every place and length; and their pieces.

Promises:
- shards that cut no row, matrix or block, as short as that allows; training on them, by Muon and 8-bit optimizers
  too: `test_fsdp_atomic.py`
"""

import math
import warnings

import pytest
import torch
from fsdp_models import make, wrap_blocks
from gloo import fake_world
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardError
from flatparam.common.layout import FlatLayout


def places(numels, blocks, alignment, world_size, shard):
    """The first places in which no shard's end cuts a block, one parameter after the other; None if they do not fit."""
    at, found = 0, []
    for numel, block in zip(numels, blocks, strict=True):
        at = -(-at // alignment) * alignment
        while any((end - at) % block for end in range(shard, world_size * shard, shard) if at < end < at + numel):
            at += alignment
        found.append(at)
        at += numel
        if at > world_size * shard:
            return None
    return tuple(found)


@settings(deadline=None, max_examples=300)
@given(
    params=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12), st.integers(0, 1)), min_size=1, max_size=6),
    alignment=st.sampled_from([1, 2, 4, 8]),
    world_size=st.integers(1, 9),
)
def test_shards_are_the_shortest_that_cut_no_block(params, alignment, world_size):
    numels = [count * block + more for count, block, more in params]
    numels[0] += 1
    blocks = [block for _, block, _ in params]
    shard = alignment
    while places(numels, blocks, alignment, world_size, shard) is None:
        shard += alignment
    layout = FlatLayout(numels, world_size, itemsize=4, alignment=alignment, blocks=blocks)
    assert layout.shard_numel == shard
    assert layout.offsets == places(numels, blocks, alignment, world_size, shard)
    assert layout.numel == layout.padded_numel == shard * world_size
    assert layout.padding == layout.numel - sum(numels)
    for rank in range(world_size):
        assert layout.shard(rank) == (rank * shard, shard, 0)
        for numel, block, part in zip(numels, blocks, layout.param_shards(rank), strict=True):
            if part.in_shard:
                assert part.intra_param_start_idx % block == 0
                assert (part.intra_param_end_idx + 1) % block == 0 or part.intra_param_end_idx + 1 == numel


@settings(deadline=None, max_examples=50)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=12),
    world_size=st.integers(1, 64),
)
def test_what_whole_rows_cost_is_bounded(shapes, world_size):
    numels, rows = [a * b for a, b in shapes], [b for _, b in shapes]
    layout = FlatLayout(numels, world_size, blocks=rows)
    even, longest = -(-sum(numels) // world_size), max(rows)
    common = math.lcm(*rows)
    assert layout.shard_numel <= max(even, *numels) + longest
    assert layout.shard_numel <= -(-(even + longest) // common) * common


def test_blocks_that_cannot_be():
    for blocks, alignment, message in (
        ([0], 1, r"blocks >= 1, blocks\[0\] is 0"),
        ([-1], 1, r"blocks >= 1, blocks\[0\] is -1"),
        ([1], -1, "alignment >= 1, got -1"),
    ):
        with pytest.raises(ShardError, match=f"expected {message}"):
            FlatLayout([5], 2, alignment=alignment, blocks=blocks)
    with pytest.raises(ShardError, match="a block for each of 2 parameters, got 1"):
        FlatLayout([5, 5], 2, blocks=[1])
    with pytest.raises(TypeError):
        FlatLayout([5], 2, blocks=["1"])
    with pytest.raises(ShardError, match="fewer than"):
        FlatLayout([2**61], 8, blocks=[2**61])


def wrapped(world, rank, **arguments):
    with fake_world(world, rank):
        model = wrap_blocks(make(), **arguments)
        return model, model.shard_map(), model.memory_plan()


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_no_row_is_cut_and_every_piece_is_one_box(world, uo):
    whole = dict(make().named_parameters())
    found = {name: torch.full_like(value, torch.nan) for name, value in whole.items()}
    for rank in range(world):
        model, pieces, plan = wrapped(world, rank, use_orig_params=uo, atomic="row")
        flats = {}
        for unit in FSDP.fsdp_modules(model):
            for flat_param in unit._unit.flat_params:
                flats.update((original.param, flat_param.flat.detach()) for original in flat_param.originals)
        named = {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}
        for piece in pieces:
            row = math.prod(piece.shape[1:])
            assert piece.start % row == piece.numel % row == 0
            [box] = piece.boxes
            assert box.sizes[1:] == piece.shape[1:]
            if piece.rank == rank and uo:
                value = named[piece.fqn].detach()
                assert value.shape == (piece.numel // row, *piece.shape[1:])
                found[piece.fqn][box.offsets[0] : box.offsets[0] + box.sizes[0]] = value
        if uo:
            here = {piece.fqn for piece in pieces if piece.rank == rank}
            assert all(named[name].shape == (0, *whole[name].shape[1:]) for name in whole if name not in here)
        held = sum(piece.numel for piece in pieces) * 4
        stored = sum(unit.shard for unit in plan.units) * world
        assert sum(unit.padding for unit in plan.units) == stored - held
        assert sum(unit.shard for unit in plan.units) == sum(
            p.numel() * 4 for u in FSDP.fsdp_modules(model) for p in u.params
        )
    for name, value in whole.items():
        assert not uo or torch.equal(found[name], value), name


@pytest.mark.parametrize("uo", [False, True])
def test_shards_start_aligned_in_every_dtype(uo):
    low = MixedPrecision(param_dtype=torch.bfloat16)
    for alignment, precision, size in ((64, None, 4), (64, low, 2), (16, low, 2), (1, None, 4)):
        arguments = {"use_orig_params": uo, "shard_alignment": alignment, "mixed_precision": precision}
        model, pieces, _ = wrapped(3, 1, **arguments)
        for unit in FSDP.fsdp_modules(model):
            assert all(param.numel() * size % alignment == 0 for param in unit.params)
        assert all(piece.flat_start * size % alignment == 0 for piece in pieces)
    plain, _, _ = wrapped(3, 1, use_orig_params=uo)
    assert any(param.numel() * 2 % 16 for unit in FSDP.fsdp_modules(plain) for param in unit.params)


def test_a_transposed_weight_stays_whole_and_a_channels_last_one_is_cut_in_rows():
    with fake_world(2):
        turned = nn.Linear(4, 6, bias=False)
        turned.weight = nn.Parameter(torch.arange(24.0).view(4, 6).t())
        model = FSDP(turned, atomic="row", use_orig_params=True)
        assert [(piece.rank, piece.numel) for piece in model.shard_map()] == [(0, 24)]
        assert torch.equal(turned.weight, torch.arange(24.0).view(4, 6).t())
        images = nn.Conv2d(2, 6, 3, bias=False).to(memory_format=torch.channels_last)
        before = images.weight.detach().clone()
        model = FSDP(images, atomic="row", use_orig_params=True)
        assert [(piece.rank, piece.numel) for piece in model.shard_map()] == [(0, 72), (1, 36)]
        assert torch.equal(images.weight, before[:4])
        assert images.weight.is_contiguous(memory_format=torch.channels_last)
        new = torch.randn(6, 2, 3, 3)  # contiguous: not the order in which the shard has it
        images.weight.data = new
        model._unit.write_back()
        assert torch.equal(images.weight, new[:4])
        images.weight.data = new[2:]
        model._unit.write_back()
        assert torch.equal(images.weight, new[2:])


def test_arguments_that_cannot_be():
    with fake_world(8):
        for alignment, error in (
            (0, ValueError),
            (-16, ValueError),
            (24, ValueError),
            (16.0, TypeError),
            (True, TypeError),
        ):
            with pytest.raises(error, match="shard_alignment"):
                FSDP(nn.Linear(3, 3), shard_alignment=alignment)
        with pytest.raises(ValueError, match="atomic to be"):
            FSDP(nn.Linear(3, 3), atomic="column")
        with pytest.raises(ValueError, match=r"at least 1 element for parameter `weight`, got 0"):
            FSDP(nn.Linear(3, 3), atomic=lambda param: 0)
        with pytest.raises(TypeError, match=r"an int for parameter `weight`, got 1.5"):
            FSDP(nn.Linear(3, 3), atomic=lambda param: 1.5)
        with pytest.warns(UserWarning, match=r"unit of Linear: 88% of .* its 1048576 bytes take 8 shards of 1048576"):
            FSDP(nn.Linear(512, 512, bias=False), atomic=torch.Tensor.numel)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            FSDP(nn.Linear(512, 512, bias=False), atomic="row")
            FSDP(nn.Linear(8, 8, bias=False), atomic=torch.Tensor.numel)
