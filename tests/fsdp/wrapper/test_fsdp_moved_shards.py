"""Shards that leave their device for a while, as verl moves them. The oracle is the same training without that.

Promises:
- shards and gradients are moved to the host and back by their handle, and their memory is free meanwhile
"""

import itertools

import pytest
import simulated
import torch
from fsdp_models import data, full_grads, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from pairs import pairwise
from torch.distributed.fsdp._runtime_utils import _lazy_init

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy

CPU = torch.device("cpu")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1")
LOW = MixedPrecision(param_dtype=torch.bfloat16)
FACTORS = {"strategy": STRATEGIES, "use_orig_params": (False, True), "precision": ("whole", "low")}
EVERY = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]


@pytest.fixture(scope="module")
def library():
    return str(simulated.build())


@torch.no_grad()
def put(model, device):
    """verl 0.9: verl/utils/fsdp_utils.py, offload_fsdp_model_to_cpu and load_fsdp_model_to_gpu."""
    _lazy_init(model, model)
    assert model._is_root
    for handle in model._all_handles:
        assert not handle._offload_params
        flat_param = handle.flat_param
        assert flat_param.data.data_ptr() == flat_param._local_shard.data_ptr()
        assert id(flat_param.data) != id(flat_param._local_shard)
        assert flat_param.data.size() == flat_param._local_shard.size()
        handle.flat_param_to(device, non_blocking=True)
        flat_param._local_shard = flat_param.data


def trained(model, device, away=None):
    """Losses, gradients and parameters of two steps of two micro-batches; between any two of them shards are moved."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []

    def there_and_back():
        if away is not None:
            away(model)

    for step in range(2):
        there_and_back()
        for k in range(2):
            loss = loss_of(model, data(2 * step + k).to(device))
            loss.backward()
            seen.append(loss.detach().cpu())
            del loss
            there_and_back()
        seen += [grad.cpu() for grad in full_grads(model).values() if grad is not None]
        optimizer.step()
        there_and_back()
    with torch.no_grad(), FSDP.summon_full_params(model, writeback=False):
        return seen + [param.detach().cpu().clone() for param in model.parameters()]


def moved_for_real(library, cases):
    device = simulated.use(library)
    sim, on_sim = torch.device("sim", 0), simulated.new_group()
    empty = device.memory()[0]

    def away(model):
        params = list(model.parameters())
        of_device = sum(t.nbytes for p in params for t in (p, p.grad) if t is not None)
        before = device.memory()[0]
        put(model, CPU)
        assert all(param.is_cpu and (param.grad is None or param.grad.is_cpu) for param in params)
        assert before - device.memory()[0] >= of_device
        put(model, sim)
        assert all(param.device == sim and (param.grad is None or param.grad.device == sim) for param in params)
        assert [id(param) for param in model.parameters()] == [id(param) for param in params]

    for case in cases:
        note(case)
        strategy, uo, precision = case.values()
        mixed = LOW if precision == "low" else None
        ways = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo, "mixed_precision": mixed}
        wanted = trained(wrap_blocks(make(), **ways), CPU)
        model = wrap_blocks(make(), process_group=on_sim, device_id=sim, **ways)
        found = trained(model, sim, away)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        put(model, CPU)
        for param in model.parameters():
            param.grad = None
        if strategy != "ZERO_1":  # which gathers from a copy that stays
            assert device.memory()[0] == empty
        put(model, sim)
        if strategy == "FULL_SHARD":
            loss = loss_of(model, data(0).to(sim))
            put(model, CPU)
            put(model, sim)
            with pytest.raises(RuntimeError, match=r"a parameter of the unit of Model was used while it is sharded"):
                loss.backward()
            del loss
            loss_of(model, data(0).to(sim)).backward()
            penalty = sum(param.square().sum() for param in model.parameters() if param.numel())
            with pytest.raises(RuntimeError, match=r"the unit of Model: a graph has saved `first.weight` or another"):
                model._handle.flat_param_to(CPU)
            del penalty
        del model, param


def run_on_the_host(library):
    """Where the group takes tensors of the host, the model runs there meanwhile, on what its shards lie beside."""
    simulated.use(library)
    sim, both = torch.device("sim", 0), simulated.new_group(on_host=True)
    model, expected = wrap_blocks(make(), process_group=both, device_id=sim), wrap_blocks(make())
    loss_of(model, data(0).to(sim)).backward()
    loss_of(expected, data(0)).backward()
    put(model, CPU)
    for wrapped in (model, expected):
        loss_of(wrapped, data(1)).backward()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(param.grad, other.grad)


@pytest.mark.multiprocess
def test_a_moved_model_runs_where_it_is(library):
    run_ranks(run_on_the_host, 2, library)


@pytest.mark.multiprocess
@pytest.mark.parametrize("cases", [pairwise(FACTORS), pytest.param(EVERY, marks=pytest.mark.thorough)], ids=len)
def test_shards_and_gradients_are_moved_and_come_back(library, cases):
    run_ranks(moved_for_real, 2, library, cases)
