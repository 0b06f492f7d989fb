"""A borrower of a full parameter's memory in the drop-in (NumPy, DLPack, shared memory) keeps the values.

torch's handle raises in the forward for NumPy, and lets DLPack's readers read freed memory. Oracle: copies taken at
once, and the unsharded module.
"""

import pytest
import torch
from consumers import BY_ADDRESS, Taking
from fsdp_models import Averaged, data, loss_of, make, wrap_blocks
from gloo import fake_world, handle_of, note, run_ranks
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
SETTINGS = ((True, BY_ADDRESS), (False, BY_ADDRESS), (True, ("shared",)), (True, ("in a file",)))


def memory_kept(settings):
    with handle_of("flatparam"):
        for strategy, orig, ways in settings:
            note(f"{strategy} {orig} {len(ways)}")
            plain = make(width=300, blocks=2)  # so large that the allocator unmaps what is freed
            oracle, model = Averaged(plain, 2), make(width=300, blocks=2)
            taking = Taking(model, ways)
            model = wrap_blocks(
                model,
                FullyShardedDataParallel,
                sharding_strategy=ShardingStrategy[strategy],
                use_orig_params=orig,
                device_id=torch.device("cpu"),
            )
            optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in (plain, model)]
            for step in range(3):
                oracle.backward(lambda rank: [data(step, rank)])  # noqa: B023
                loss_of(model, data(step)).backward()
                taking.check()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                if strategy == "NO_SHARD":  # whose memory is what is trained, as unsharded
                    taking.taken.clear()
                    taking.values.clear()
                with torch.no_grad():
                    assert torch.equal(model(data(step)), plain(data(step)))
                taking.check()
            taking.on = False
            with FullyShardedDataParallel.summon_full_params(model):
                for name, parameter in plain.named_parameters():
                    assert torch.equal(model.get_parameter(name), parameter), name
            taking.check()


@pytest.mark.multiprocess
def test_who_takes_the_memory_of_full_weights_keeps_their_values_and_changes_nothing():
    run_ranks(memory_kept, 2, [(strategy, orig, ways) for strategy in STRATEGIES for orig, ways in SETTINGS])


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("left", [0, 8])
def test_a_shard_that_was_freed_or_resized_is_named(orig, left):
    """Before a collective reads it. torch's handle crashes, or sends what lies behind it."""
    with fake_world(2), handle_of("flatparam"):
        model = FullyShardedDataParallel(torch.nn.Linear(4, 4), use_orig_params=orig, device_id=torch.device("cpu"))
        model(torch.ones(2, 4)).sum().backward()
        model._handle.flat_param.untyped_storage().resize_(left)
        with pytest.raises(
            ValueError, match=rf"room for {left // 4} elements of 10.*freed or resized.*Linear \(weight"
        ):
            model(torch.ones(2, 4))


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("left", [0, 8])
def test_a_shard_that_a_backward_frees_is_named_before_the_optimizer_writes_to_it(orig, left):
    """An optimizer of torch does so without a look: the interpreter crashes."""
    with fake_world(2), handle_of("flatparam"):
        model = FullyShardedDataParallel(torch.nn.Linear(4, 4), use_orig_params=orig, device_id=torch.device("cpu"))
        shard = model._handle.flat_param.untyped_storage()

        def free(*_):
            shard.resize_(left)

        model.module.register_full_backward_hook(free)
        with pytest.raises(ValueError, match="freed or resized outside of flatparam, and its values are lost"):
            model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("name", ["_mp_shard", "_full_param_padded"])
def test_memory_of_a_unit_that_has_other_strides_is_refused(name):
    """Room for its elements would be too little: who writes them writes to the memory of others."""
    with fake_world(2), handle_of("flatparam"):
        settings = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16), "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(torch.nn.Linear(64, 64), use_orig_params=True, **settings)
        model(torch.ones(2, 64)).sum().backward()
        tensor = getattr(model._handle.flat_param, name)
        tensor.data = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)[::2]
        tensor.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"expected a tensor whose elements lie in \d+ bytes, got strides"):
            model(torch.ones(2, 64))
