"""The memory of full parameters in the runtime: a use while it is freed raises, and a borrower keeps it.

Promises:
- the error for an operation on a sharded parameter names the parameter, the reason and the remedy, for 44 operations on
  models of 9 kinds, and on a weight that is kept longer than its model; no process crashes:
  `test_operations_on_sharded_parameters_name_them_and_what_to_do`
- borrowed memory of full weights (NumPy, DLPack in each of its ways, shared memory, a file that other processes map, a
  storage) keeps its values, and training has the same bits; the memory is freed with the borrower; in the drop-in too:
  `test_who_takes_the_memory_of_full_weights_keeps_their_values_and_changes_nothing`, `test_dropin_memory.py`
- while a storage is borrowed, errors of the module's own tensors still name the unit:
  `test_tensors_of_a_storage_that_somebody_holds_are_named_while_sharded`
- shards, parameters, gradients, optimizer states and buffers whose storage was freed or resized are refused by name,
  and their memory is not touched: (`freed_or_resized`, `without_memory`), `test_fsdp_resized.py`
- forwards inside `summon_full_params`: `test_forwards_inside_summon_full_params`
"""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from consumers import BY_ADDRESS, Taking, values
from fsdp_models import (
    STRATEGIES,
    Averaged,
    assert_same,
    assert_same_grads,
    data,
    have_memory,
    loss_of,
    make,
    wrap_blocks,
)
from gloo import fake_world, note, printed_by, run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

WIDTH = 300  # its blocks are so large that the allocator unmaps what is freed


@pytest.mark.multiprocess
def test_operations_on_sharded_parameters_name_them_and_what_to_do():
    """44 operations each, from the constructor on, of NumPy, pickle and users of addresses too: none of them dies."""
    results = printed_by("freed_operations.py")
    assert len(results) == 11
    assert len(results["wrapped"]) >= 40
    said = re.compile(r"RuntimeError: flatparam: a parameter of the unit of .*`[0-9.]*weight`.*summon_full_params")
    texts = {(model, what): text for model, tried in results.items() for what, text in tried.items()}
    assert not {key: text for key, text in texts.items() if not said.match(text)}


def memory_kept(strategy, orig, ways):
    """Train and evaluate beside an unsharded module while the memory of all weights is taken and kept."""
    note(f"{strategy} {orig} {len(ways)}")
    pair = {"process_group": (dist.group.WORLD, dist.group.WORLD)} if strategy == "LAYER_ZERO" else {}
    plain = make(width=WIDTH, blocks=2)
    oracle, model = Averaged(plain, 2), make(width=WIDTH, blocks=2)
    taking = Taking(model, ways)
    model = wrap_blocks(model, sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig, **pair)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in (plain, model)]
    for step in range(3):
        oracle.backward(lambda rank: [data(step, rank), data(step + 7, rank)])  # noqa: B023
        with model.no_sync():
            loss_of(model, data(step)).backward()
        taking.check()
        loss_of(model, data(step + 7)).backward()
        taking.check()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert torch.equal(model(data(step)), plain(data(step)))
            assert torch.equal(model(data(step)), plain(data(step)))
        if strategy != "NO_SHARD":  # whose memory is what is trained, as unsharded
            taking.check()
        else:
            taking.taken.clear()
            taking.values.clear()
    assert_same(model, plain, strategy)
    taking.on = False
    taking.taken.clear()
    with torch.no_grad():
        model(data(0))
    full = [any(have_memory(unit._unit.core)) for unit in FSDP.fsdp_modules(model)]
    assert not any(full) or strategy in ("NO_SHARD", "ZERO_1"), full  # it went with those who took it


WAYS = (
    (True, (*BY_ADDRESS, "storage")),
    (False, (*BY_ADDRESS, "storage")),
    (True, ("shared",)),
    (True, ("in a file",)),
)


@pytest.mark.multiprocess
@pytest.mark.sweep(3)
@pytest.mark.parametrize(("strategy", "how"), list(itertools.product((*STRATEGIES, "LAYER_ZERO"), WAYS)))
def test_who_takes_the_memory_of_full_weights_keeps_their_values_and_changes_nothing(strategy, how):
    run_ranks(memory_kept, 2, strategy, *how)


ONE = torch.ones(2, 4)


def small(strategy, orig):
    return FSDP(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=orig,
    )


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_storages_that_were_freed_or_resized_outside_are_named(strategy, orig):
    said = r"the unit of Sequential: the storage of its parameters has {} bytes of \d\d+: it was freed or resized"
    with fake_world(2):
        for left in (0, 8):
            for before in (True, False):
                model = small(strategy, orig)
                if not before:
                    model(ONE).sum().backward()
                model._unit.flat_params[0].flat.untyped_storage().resize_(left)
                with pytest.raises(ValueError, match=said.format(left)):
                    model(ONE)
                if strategy != "NO_SHARD":
                    with pytest.raises(ValueError, match=r"`0\.weight` was freed or resized"):
                        model.state_dict()
        model = small(strategy, orig)
        with torch.no_grad():
            model(ONE)
        storage = model._unit.core.views()[0][0].untyped_storage()
        if strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            with pytest.raises(RuntimeError, match=r"while it is sharded.*`0\.weight`"):
                storage.resize_(4)
            model(ONE)
        else:
            storage.resize_(4)
            with pytest.raises(ValueError, match=said.format(4)):
                model(ONE)


def test_tensors_of_a_storage_that_somebody_holds_are_named_while_sharded():
    """The storage keeps the values; what the module has does not read them, and is as of now after the next gather."""
    with fake_world(2):
        for orig in (True, False):
            model = small("FULL_SHARD", orig)
            weights, held = [], []
            model.module[0].register_forward_hook(lambda m, args, output: weights.append(m.weight))  # noqa: B023
            model(ONE).sum().backward()
            model.module[0].register_forward_hook(lambda m, args, output: held.append(m.weight.untyped_storage()))  # noqa: B023
            with torch.no_grad():
                model(ONE)
            before = values(held[0])
            for weight in (weights[-1], weights[-1].t(), weights[-1].detach()):
                with pytest.raises(RuntimeError, match=r"while it is sharded.*`0\.weight`"):
                    weight.sum()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
                model(ONE)
            assert (values(held[0]) == before).all()
            assert (values(held[1]) != before).any()
            model(ONE).sum().backward()
            del held[:], weights[:]


def test_parameters_and_gradients_without_memory_are_refused():
    with fake_world(2):
        freed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        freed[1].weight.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"`1\.weight` has no memory for its shape \(4, 4\)"):
            FSDP(freed)

        model = small("FULL_SHARD", True)
        replaced = torch.zeros(4, 4)
        next(model.parameters()).data = replaced
        replaced.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"new data of parameter `0\.weight` was freed or resized"):
            model(ONE)

        for strided in (False, True):
            model = small("FULL_SHARD", False)
            gradient = torch.ones(4, 4).t() if strided else torch.ones(4, 4)
            model.module[0].register_forward_hook(
                lambda module, args, output, g=gradient: module.weight.register_hook(lambda grad: g) and None
            )
            gradient.untyped_storage().resize_(0)
            with pytest.raises(ValueError, match="a tensor with memory for its 16 elements"):
                model(ONE).sum().backward()


def forwards_in_summon(strategy, orig, low):
    """Forwards inside summon_full_params() see what was written there; a backward through one is refused by name."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16) if low else None
    plain = make()
    plain.register_buffer("offset", torch.tensor(1.001))
    model = make()
    model.register_buffer("offset", torch.tensor(1.001))
    model = wrap_blocks(
        model, sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig, mixed_precision=precision
    )
    x = data(0)
    with torch.no_grad():
        model(x)
        with FSDP.summon_full_params(model):
            assert torch.equal(model(x), plain(x))
            assert model.module.offset.dtype == (torch.bfloat16 if low else torch.float32)
            for module in (model.module, plain):
                module.first.weight.mul_(2.0)
            assert torch.equal(model(x), plain(x))
            assert torch.equal(model.blocks[0](x.new_ones(2, 5)), plain.blocks[0](x.new_ones(2, 5)))
        with FSDP.summon_full_params(model, recurse=False, writeback=False):
            assert torch.equal(model(x), plain(x))  # the blocks are gathered, in full precision too
            model.module.last.weight.zero_()
            assert not model(x).any()
            if strategy == "NO_SHARD":  # which has no other memory
                plain.last.weight.zero_()
    assert_same(model, plain, strategy)
    with torch.no_grad():
        outside = model(x)
    for recurse in (True, False):
        with FSDP.summon_full_params(model, recurse=recurse):
            inside = model(x)
            with pytest.raises(RuntimeError, match=r"the unit of Model.*backward.*inside summon_full_params"):
                inside.sum().backward()
        inside = None
        with torch.no_grad():
            assert torch.equal(model(x), outside)
    with torch.no_grad(), FSDP.summon_full_params(model.blocks[1]):  # amid others in their own precision
        torch.testing.assert_close(model(x), outside, rtol=0.02, atol=0.02)
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        if torch.distributed.get_rank() == 0 or strategy == "NO_SHARD":
            with torch.no_grad():
                assert torch.equal(model(x), plain(x))
        else:
            with pytest.raises(RuntimeError, match=r"the unit of Model.*rank0_only=True.*shards only"):
                model(x)
    if not low:
        oracle = Averaged(plain, 2)
        oracle.backward(lambda rank: [data(1, rank)])
        loss_of(model, data(1)).backward()
        assert_same_grads(model, plain, strategy)


@pytest.mark.multiprocess
@pytest.mark.sweep(3)
@pytest.mark.parametrize(("strategy", "orig", "low"), list(itertools.product(STRATEGIES, (True, False), (False, True))))
def test_forwards_inside_summon_full_params(strategy, orig, low):
    run_ranks(forwards_in_summon, 2, strategy, orig, low)
