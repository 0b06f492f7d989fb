"""Ranks whose flat parameters differ are told so by name, all of them, before the first gather and reduction.

torch's handle crashes in it where sizes differ, and trains a mixture where they do not.

Promises:
- ranks that build other units are told alike under the drop-in with NO_SHARD and between replicas of HYBRID_SHARD, and
  with every backend that has other ranks; forwards on one rank or replica alone stay possible
- ranks that build other units are told alike, in the drop-in too, which counts as no collective there
- with TORCH_DISTRIBUTED_DEBUG=DETAIL other units in use, or other frozen ones, get the errors of torch's handle:
  `test_torchs_own_check_of_the_order_speaks_in_detail`
"""

import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from gloo import fake_world, handle_of, note, run_ranks
from thread_ranks import forget_world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed import multi_threaded_pg

POLICY = ModuleWrapPolicy({nn.Linear})
BF16, FP16 = (MixedPrecision(param_dtype=dtype) for dtype in (torch.bfloat16, torch.float16))


def net(shape=(6, 4), dtype=torch.float32):
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(*shape), nn.Flatten()).to(dtype)


def renamed():
    class Renamed(nn.Linear):
        def __init__(self):
            super().__init__(6, 4)
            self.other = self._parameters.pop("weight")

    return nn.Sequential(nn.Linear(6, 6), Renamed())


def shorter():
    return nn.Sequential(nn.Linear(6, 6), nn.Flatten())


def frozen():
    module = net()
    module[1].requires_grad_(False)
    return module


DIFFERENCES = {  # the second rank's module, and its settings; what both are told, in rank order
    "shape": (lambda: net((4, 6)), {}, r"shape \(4, 6\).*shape \(6, 4\)"),
    "dtype": (lambda: net(dtype=torch.float64), {}, r"torch\.float32\), rank 1 has.*torch\.float64"),
    "name": (renamed, {}, r"`weight`.*rank 1 has parameter `bias`"),
    "frozen": (frozen, {}, r"requires_grad=True.*requires_grad=False"),
    "precision": (net, {"mixed_precision": BF16}, r"param_dtype=torch\.float32.*param_dtype=torch\.bfloat16"),
    "reductions": (
        net,
        {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)},
        r"reduce_dtype=torch\.float32.*reduce_dtype=torch\.bfloat16",
    ),
    "fewer": (shorter, {}, r"`weight` .*rank 1 has nothing"),
    "strategy": (net, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, r"FULL_SHARD.*SHARD_GRAD_OP"),
}


def wrapped(module, orig, **settings):
    settings = {"auto_wrap_policy": POLICY, "use_orig_params": orig, "device_id": torch.device("cpu"), **settings}
    return FullyShardedDataParallel(module, **settings)


NO_SHARD = {  # the forward of each must be possible before the reduction
    **{name: case for name, case in DIFFERENCES.items() if name not in ("shape", "name", "strategy")},
    "shape": (lambda: net((6, 5)), {}, r"shape \(4, 6\).*shape \(5, 6\)"),
}


def told(rank, orig):
    with handle_of("flatparam"):
        for difference, (make, settings, pattern) in DIFFERENCES.items():
            note(difference)
            torch.manual_seed(0)
            model = wrapped(make() if rank else net(), orig, **(settings if rank else {}))
            x = torch.ones(2, 6, dtype=torch.float64 if rank and difference == "dtype" else torch.float32)
            for _ in range(2):
                with pytest.raises(ValueError, match=rf"different units: rank 0 has .*{pattern}"):
                    model(x)
        grads = []
        for precision in (None, BF16, FP16):  # a model that is the same everywhere, after those
            torch.manual_seed(0)
            model = wrapped(net(), orig, mixed_precision=precision)
            model(torch.ones(2, 6)).sum().backward()
            grads.append([param.grad.float().norm().item() for param in model.parameters() if param.grad is not None])
    return [difference for difference in DIFFERENCES], len(grads)


def rank_told(orig):
    return told(dist.get_rank(), orig)


@pytest.mark.multiprocess
@pytest.mark.parametrize("orig", [True, False])
def test_ranks_that_differ_are_told_alike(orig):
    assert all(found == ([*DIFFERENCES], 3) for found in run_ranks(rank_told, 2, orig))


class TwoPaths(nn.Module):
    """Ranks above 0 run, and train, another unit of the same size."""

    def __init__(self):
        super().__init__()
        self.first, self.others = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.chosen = min(dist.get_rank(), 1)
        self.others[1 - self.chosen].requires_grad_(False)

    def forward(self, x):
        return self.others[self.chosen](self.first(x))


def in_detail(differs):
    """The error of a step in which ranks differ, with both handles."""
    errors = []
    for kind in ("torch", "flatparam"):
        with handle_of(kind):
            if differs == "order":
                model = wrapped(TwoPaths(), False)  # with original parameters torch's message is a KeyError
            else:
                model = wrapped(frozen() if dist.get_rank() else net(), True)
            with pytest.raises(RuntimeError) as told:  # the two are compared
                model(torch.ones(2, 6)).sum().backward()
            errors.append(str(told.value)[:40])
    return errors


@pytest.mark.multiprocess
@pytest.mark.parametrize("differs", ["order", "frozen"])
def test_torchs_own_check_of_the_order_speaks_in_detail(differs):
    for of_torch, ours in run_ranks(in_detail, 2, differs, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}):
        assert of_torch == ours != ""


def as_with_torch(orig, **settings):
    """Whether a model that is the same everywhere gets the gradients of torch's handle, after those that differed."""
    grads = []
    for kind in ("torch", "flatparam"):
        with handle_of(kind):
            torch.manual_seed(0)
            model = wrapped(net(), orig, **settings)
            model(torch.full((2, 6), 1.0 + dist.get_rank())).sum().backward()
            grads.append([param.grad.tolist() for param in model.parameters() if param.grad is not None])
    return grads[0] == grads[1] != []


def unsharded(orig):
    rank = dist.get_rank()
    with handle_of("flatparam"):
        for difference, (make, settings, pattern) in NO_SHARD.items():
            note(difference)
            torch.manual_seed(0)
            settings = {"sharding_strategy": ShardingStrategy.NO_SHARD, **(settings if rank else {})}
            model = wrapped(make() if rank else net(), orig, **settings)
            x = torch.ones(2, 6, dtype=torch.float64 if rank and difference == "dtype" else torch.float32)
            if rank:
                model(x)  # alone: nothing is communicated
                with model.no_sync():
                    model(x).sum().backward()
            for _ in range(2):
                loss = model(x).sum()
                with pytest.raises(ValueError, match=rf"different units: rank 0 has .*{pattern}"):
                    loss.backward()
    return as_with_torch(orig, sharding_strategy=ShardingStrategy.NO_SHARD)


@pytest.mark.multiprocess
@pytest.mark.parametrize("orig", [True, False])
def test_ranks_of_unsharded_units_that_differ_are_told_alike(orig):
    assert all(run_ranks(unsharded, 2, orig))


def hooked():
    """A user's hook may reduce over other ranks, or over none."""
    with handle_of("flatparam"):
        model = wrapped(net() if dist.get_rank() else shorter(), True, sharding_strategy=ShardingStrategy.NO_SHARD)
        model.register_comm_hook(None, lambda state, grad: None)
        model(torch.ones(2, 6)).sum().backward()
    return sum(param.grad is not None for param in model.parameters())


@pytest.mark.multiprocess
def test_reductions_by_a_users_hook_are_not_compared():
    assert run_ranks(hooked, 2) == [2, 4]


def of_replicas(odd):
    """Two replicas of two ranks; the ranks ``odd`` build another model."""
    rank = dist.get_rank()
    shards, replicas = ([dist.new_group(ranks) for ranks in groups] for groups in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    settings = {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "process_group": (shards[rank // 2], replicas[rank % 2]),
    }
    alone = [dist.new_group(ranks) for ranks in ((2, 3), (1, 3))]
    if rank == 3:  # a model that the other ranks do not build
        with handle_of("flatparam"):
            wrapped(net(), True, **{**settings, "process_group": tuple(alone)})
    differences = ("shape", "dtype", "precision", "reductions", "frozen", "fewer") if len(odd) == 2 else ("precision",)
    with handle_of("flatparam"):
        for difference in differences:
            make, others, pattern = NO_SHARD[difference]
            pattern = pattern.replace("rank 1", "rank [123]")
            note(difference)
            model = wrapped(make() if rank in odd else net(), True, **settings, **(others if rank in odd else {}))
            x = torch.ones(2, 6, dtype=torch.float64 if rank in odd and difference == "dtype" else torch.float32)
            if rank >= 2 and len(odd) != 1:
                with torch.no_grad():
                    model(x)  # one replica alone
            for _ in range(2):
                with pytest.raises(ValueError, match=rf"different units: rank [012] has .*{pattern}"):
                    model(x).sum().backward()
            dist.barrier()
    return len(odd) == 1 or as_with_torch(True, **settings)


@pytest.mark.multiprocess
@pytest.mark.parametrize("odd", [(2, 3), (3,)])
def test_replicas_that_differ_are_told_alike(odd):
    assert all(run_ranks(of_replicas, 4, odd))


def replicas_of_one():
    """torch's runtime never averages over them: whether their gradients differ, and how often this rank is told so."""
    mesh = init_device_mesh("cpu", (2, 1))
    settings = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    with handle_of("flatparam"), warnings.catch_warnings(record=True) as caught:
        torch.manual_seed(0)
        model = wrapped(net(), True, **settings)
        model(torch.full((2, 6), 1.0 + dist.get_rank())).sum().backward()
    grads = [None, None]
    dist.all_gather_object(grads, [param.grad.tolist() for param in model.parameters()])
    return grads[0] != grads[1], sum("which train apart" in str(each.message) for each in caught)


@pytest.mark.multiprocess
def test_replicas_that_torch_lets_train_apart_are_warned_of():
    assert run_ranks(replicas_of_one, 2) == [(True, 1), (True, 0)]


def rank_in_thread(rank, store):
    """Return the message that this thread's rank gets."""
    dist.init_process_group("threaded", store=store, rank=rank, world_size=2)
    try:
        model = wrapped(net(), True, **(DIFFERENCES["precision"][1] if rank else {}))
        with pytest.raises(ValueError, match="different units") as told:
            model(torch.ones(2, 6))
        return str(told.value)
    finally:
        forget_world()


def in_threads():
    """torch's "threaded" backend has neither a device's backend nor a wait that can be cut."""
    dist.destroy_process_group()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()
    try:
        with handle_of("flatparam"), ThreadPoolExecutor(2) as threads:
            messages = list(threads.map(rank_in_thread, range(2), [store] * 2, timeout=60))
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    with handle_of("flatparam"), fake_world(2):  # no other ranks
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            wrapped(net(), True, sharding_strategy=strategy)(torch.ones(2, 6)).sum().backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # run_ranks() ends it
    return messages


@pytest.mark.multiprocess
def test_ranks_of_other_backends_are_told_alike():
    messages = run_ranks(in_threads, 1)[0]
    assert messages[0] == messages[1]
    assert re.search(f"rank 0 has .*{DIFFERENCES['precision'][2]}", messages[0])


def counted():
    """The functions of torch.distributed that a step calls, as users and torch's tests count them."""
    calls = []
    with handle_of("flatparam"), pytest.MonkeyPatch.context() as patched:
        for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast", "gather"):
            original = getattr(dist, name)
            patched.setattr(
                dist, name, lambda *args, n=name, f=original, **kwargs: (calls.append(n), f(*args, **kwargs))[1]
            )
        model = wrapped(net(), True)
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
    return sorted(calls)


def dispatched():
    """How many collectives torch's mode sees in a step."""
    found = []
    for kind in ("torch", "flatparam"):
        with handle_of(kind):
            model = wrapped(net(), True)
            with CommDebugMode() as mode:
                model(torch.ones(2, 6)).sum().backward()
            found.append(mode.get_total_counts())
    return found


@pytest.mark.multiprocess
def test_a_mode_that_counts_collectives_sees_as_many_as_with_torch():
    for torchs, ours in run_ranks(dispatched, 2):
        assert ours == torchs > 0


def named_otherwise():
    """Ranks may ignore other numbers of modules before a layer, which has another name then."""
    results = []
    for kind in ("torch", "flatparam"):
        with handle_of(kind), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            idle = [nn.Flatten() for _ in range(dist.get_rank())]
            model = wrapped(nn.Sequential(nn.Linear(6, 6), *idle, nn.Linear(6, 4)), True, auto_wrap_policy=None)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for _ in range(3):
                loss = model(torch.ones(2, 6)).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            told = [each for each in caught if "other names for parameters" in str(each.message)]
            results.append((losses, len(told)))
    return results


@pytest.mark.multiprocess
def test_ranks_that_differ_in_names_alone_train_and_are_warned():
    for rank, ((expected, _), (losses, told)) in enumerate(run_ranks(named_otherwise, 2)):
        assert losses == expected
        assert told == (rank == 0)


def gathered_by_hand():
    with handle_of("flatparam"):
        handle = wrapped(net((4, 6) if dist.get_rank() else (6, 4)), True, auto_wrap_policy=None)._handle
        handle.init_flat_param_attributes()
        for _ in range(2):
            handle.pre_unshard()
            with pytest.raises(ValueError, match="different units"):
                handle.unshard()
            assert handle.needs_unshard()


@pytest.mark.multiprocess
def test_nothing_counts_as_gathered_where_ranks_differ():
    run_ranks(gathered_by_hand, 2)


@pytest.mark.multiprocess
def test_a_comparison_is_none_of_the_collectives_that_are_counted():
    for calls in run_ranks(counted, 2):
        assert calls == ["all_gather"] * len(calls)
        assert len(calls) == 8  # two units, in forward and backward of two steps
