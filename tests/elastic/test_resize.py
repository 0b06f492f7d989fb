"""``elastic.resize`` moves a model to other ranks, and equals a checkpoint that is saved before and loaded there.

Promises:
- all pairs of 1 to 4 ranks, strategies, parameters, optimizers, bit for bit: `test_resize_equals_save_and_load`,
  `test_strategies_over_two_groups`, `test_eight_ranks`
- the intersections of shards are sent, and no more; replicas take turns: `test_only_intersections_are_sent`
- after a refusal gradients, states and training are as without the call: `test_a_refusal_leaves_everything_as_it_was`,
  `test_a_joiner_that_differs_is_refused_by_all`, `test_groups_that_do_not_fit_are_refused_by_name`
- on a rank without shards an access to a parameter raises why: `test_no_access_crashes_a_rank_without_shards`
- a save on such a rank alone, as the others resize, is told to all:
  `test_another_call_on_a_rank_without_shards_is_told`
- the backward of a graph from before is refused, and training goes on: `test_an_old_graph_is_refused`
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from checkpoints import Odd
from fsdp_models import Model, loss_of
from gloo import note, run_ranks
from layer_zero_ranks import group_of
from simulated_ranks import simulate_ranks
from torch.distributed.device_mesh import init_device_mesh

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import Placement, checkpoint, elastic
from flatparam import ShardingStrategy as S
from flatparam.checkpoint import CheckpointError
from flatparam.fsdp.errors import StateError
from flatparam.fsdp.interop.patches import refuse_shards

pytestmark = pytest.mark.multiprocess

OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.001),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-5, momentum=0.9),
}
GRIDS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "LAYER_ZERO", "LAYER_ZERO_NESTED")
PATHS = ((4, 1, 1, 2, 1, 3, 1, 4, 2), (4, 2, 2, 3, 2, 4, 3, 3, 4, 4))  # together each pair of sizes


def groups_over(strategy, size):
    """This rank's groups over the first ``size`` ranks of the world, or over the others: inner groups are pairs."""
    world, me = dist.get_world_size(), dist.get_rank()
    found = None
    for ranks in (range(size), range(size, world)) if size < world else (range(size),):
        wide = group_of(ranks)
        rows = [(i, i + 1) for i in ranks[::2]] if strategy in GRIDS else []
        sides = [[(side, group_of(side)) for side in cut] for cut in (rows, zip(*rows, strict=True))]
        inner, outer = (next((group for side, group in cut if me in side), None) for cut in sides)
        if me in ranks:
            found = {"LAYER_ZERO": (inner, wide), "LAYER_ZERO_NESTED": (inner, wide, outer)}
            found = found.get(strategy, (inner, outer) if strategy in GRIDS else wide)
    return found


def built(strategy, uo, group=None, seed=0):
    """With original parameters: odd ones and buffers, rows that stay together, several flat parameters a unit."""
    torch.manual_seed(seed)
    module = Odd() if uo else Model()
    arguments = {"atomic": "row", "segments": True} if uo else {}
    arguments |= {"process_group": group, "sharding_strategy": S[strategy], "use_orig_params": uo}
    for i, block in enumerate(module.blocks):
        module.blocks[i] = FSDP(block, **arguments)
    return FSDP(module, **arguments)


def steps(model, optimizer, rank, first, count):
    losses = []
    for step in range(first, first + count):
        torch.manual_seed(100 * step + rank)
        loss = loss_of(model, torch.randn(4, 3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything(model, optimizer):
    """The shards and states of this rank, by place: equal if two models are on the same ranks."""
    found = {f"shard {i}": p.flat.detach().clone() for i, p in enumerate(parts_of(model))}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    for i, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{i} {key}"] = value.clone() if isinstance(value, torch.Tensor) else torch.tensor(value)
    return found


def parts_of(model):
    return [part for wrapper in FSDP.fsdp_modules(model) for part in wrapper._unit.flat_params]


def same(left, right):
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    for key, value in left.items():
        assert torch.isfinite(value).all(), key
        assert torch.equal(value, right[key]), key


def moves(folder, strategy, uo, name, sizes):
    rank = dist.get_rank()
    groups = {size: groups_over(strategy, size) for size in sorted(set(sizes))}
    model = built(strategy, uo, groups[dist.get_world_size()])
    optimizer = OPTIMIZERS[name](model.parameters())
    objects = [id(param) for param in model.parameters()]
    at = 0
    for before, after in itertools.pairwise(sizes):
        note(f"{before} to {after}")
        path = folder / f"{strategy}-{uo}-{name}-{at}"
        if rank < before:
            steps(model, optimizer, rank, at, 1)
            checkpoint.save(path, model, optimizer, process_group=group_of(range(before)))
        result = elastic.resize(model, optimizer, range(after), extra={"from": rank})
        assert [id(param) for param in model.parameters()] == objects
        dist.barrier()
        if rank >= after and strategy in GRIDS:
            built(strategy, uo, groups[after])  # all ranks of the world compare their grids equally often
        if rank < after:
            assert result.extra == {"from": rank % before}
            other = built(strategy, uo, groups[after], seed=1)
            theirs = OPTIMIZERS[name](other.parameters())
            checkpoint.load(path, other, theirs, process_group=group_of(range(after)))
            same(everything(model, optimizer), everything(other, theirs))
            assert steps(model, optimizer, rank, at + 1, 3) == steps(other, theirs, rank, at + 1, 3)
            same(everything(model, optimizer), everything(other, theirs))
        else:
            assert not optimizer.state
            with pytest.raises(StateError, match=r"holds no shards since elastic.resize"):
                model(torch.randn(4, 3))
        at += 4


@pytest.mark.sweep(8)
@pytest.mark.parametrize("path", PATHS, ids=["from one", "from two"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"])
def test_resize_equals_save_and_load(tmp_path, strategy, uo, name, path):
    simulate_ranks(moves, 4, tmp_path, strategy, uo, name, path)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", GRIDS)
def test_strategies_over_two_groups(tmp_path, strategy, uo):
    simulate_ranks(moves, 4, tmp_path, strategy, uo, "adam", (4, 2, 2, 4, 4))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD", "LAYER_ZERO_NESTED"])
def test_eight_ranks(tmp_path, strategy):
    simulate_ranks(
        moves, 8, tmp_path, strategy, True, "adam", (8, 6, 2, 4, 8) if strategy in GRIDS else (8, 5, 7, 3, 8)
    )


def on_processes():
    model = built("FULL_SHARD", True)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    steps(model, optimizer, dist.get_rank(), 0, 2)
    before = whole(model)
    elastic.resize(model, optimizer, [1])
    if dist.get_rank() == 1:
        same(whole(model), before)
        steps(model, optimizer, 1, 2, 1)
    elastic.resize(model, optimizer, [0, 1])
    assert not torch.equal(whole(model)["first.weight"], before["first.weight"])
    steps(model, optimizer, dist.get_rank(), 3, 1)


def whole(model):
    with FSDP.summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_resize_on_real_processes():
    run_ranks(on_processes, 2)


def sent_bytes(strategy):
    """fp32: the parameter and two states of Adam. A new rank gets what it has not had, from any rank that has it."""
    model = built(strategy, False, groups_over(strategy, 4))
    optimizer = OPTIMIZERS["adam"](model.parameters())
    steps(model, optimizer, dist.get_rank(), 0, 1)
    sizes = (4, 2, 4) if strategy in GRIDS else (4, 3, 1, 4, 2, 4)
    numels = [part.layout.numel_params for part in parts_of(model)]
    for before, after in itertools.pairwise(sizes):
        result = elastic.resize(model, optimizer, range(after))
        sent = [None] * 4
        dist.all_gather_object(sent, result.sent)
        if strategy in ("NO_SHARD", "HYBRID_SHARD"):
            joins = max(0, after - before) // (2 if strategy == "HYBRID_SHARD" else 1)  # replicas
            assert sum(sent) == 4 * 3 * sum(numels) * joins, (before, after)
            assert max(sent) <= 4 * 3 * sum(numels) * -(-joins // before), (before, after)
        else:
            change = sum(e // -(-n // before) != e // -(-n // after) for n in numels for e in range(n))
            assert sum(sent) == 4 * 3 * change, (before, after)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "ZERO_1", "HYBRID_SHARD", "LAYER_ZERO"])
def test_only_intersections_are_sent(strategy):
    simulate_ranks(sent_bytes, 4, strategy)


def refused():
    rank = dist.get_rank()
    model = built("FULL_SHARD", True)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    twin = built("FULL_SHARD", True)
    of_twin = OPTIMIZERS["adam"](twin.parameters())
    for one in ((model, optimizer), (twin, of_twin)):
        steps(*one, rank, 0, 2)
        loss_of(one[0], torch.ones(4, 3)).backward()
    grads = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
    other = OPTIMIZERS["sgd" if rank == 1 else "adam"](model.parameters())
    on_mesh = FSDP(Model(), device_mesh=init_device_mesh("cpu", (3,)))
    cases = [
        (model, optimizer, [1, 0], CheckpointError, r"expected ascending ranks from 0 to 2, got \[1, 0\]"),
        (model, optimizer, [0, 3], CheckpointError, "expected ascending ranks"),
        (model, optimizer, [0, 1] if rank else [0], CheckpointError, r"rank 1 resizes to the ranks \[0, 1\], rank 0"),
        (model, None if rank == 2 else optimizer, [0], CheckpointError, r"rank 2 gives the optimizers None, rank 0"),
        (torch.nn.Linear(2, 2), None, [0], (StateError, CheckpointError), "the model has no FullyShardedDataParallel"),
        (on_mesh, None, [0], StateError, "over a device mesh: save a checkpoint, build the model"),
    ]
    for one, its, ranks, kind, text in cases:
        with pytest.raises(kind, match=text):
            elastic.resize(one, its, ranks)
    if rank == 1:
        other.state.update({param: {"odd": torch.zeros(2, 2, 2)} for param in optimizer.state})
    with pytest.raises(CheckpointError, match="rank 1"):
        elastic.resize(model, other if rank == 1 else optimizer, [0, 1])
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert (param.grad is None) == (grad is None)
        assert grad is None or torch.equal(param.grad, grad)
    optimizer.step()
    of_twin.step()
    assert steps(model, optimizer, rank, 2, 2) == steps(twin, of_twin, rank, 2, 2)
    same(everything(model, optimizer), everything(twin, of_twin))


def test_a_refusal_leaves_everything_as_it_was():
    simulate_ranks(refused, 3)


def grids_refused():
    hybrid = built("HYBRID_SHARD", True, groups_over("HYBRID_SHARD", 4))
    optimizer = OPTIMIZERS["adam"](hybrid.parameters())
    steps(hybrid, optimizer, dist.get_rank(), 0, 1)
    before = everything(hybrid, optimizer)
    torch.manual_seed(0)
    world = dist.group.WORLD
    own = FSDP(Model(), placement=Placement(param=None, grad=world, optim=world))
    mixed = Model()
    mixed.first = FSDP(mixed.first, process_group=groups_over("HYBRID_SHARD", 4)[0])
    mixed = FSDP(mixed)
    cases = [
        (hybrid, optimizer, CheckpointError, "has inner groups of 2 ranks, and 3 ranks were given: expected 2, 4 of"),
        (own, None, StateError, "the unit of Model has a placement of its own: save a checkpoint"),
        (mixed, None, CheckpointError, r"rank 0 has units over the ranks .*, not each over all of \[0, 1, 2, 3\]"),
    ]
    for model, its, kind, text in cases:
        with pytest.raises(kind, match=text):
            elastic.resize(model, its, [0, 1, 2])
    same(everything(hybrid, optimizer), before)
    steps(hybrid, optimizer, dist.get_rank(), 1, 1)


def test_groups_that_do_not_fit_are_refused_by_name():
    simulate_ranks(grids_refused, 4)


def joiner_differs():
    """The rank that joins has an optimizer of another class: found when the units are bound already."""
    rank = dist.get_rank()
    model = built("FULL_SHARD", True)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    steps(model, optimizer, rank, 0, 2)
    elastic.resize(model, optimizer, [0, 1])
    before = everything(model, optimizer) if rank < 2 else {}
    wrong = OPTIMIZERS["sgd"](model.parameters()) if rank == 2 else optimizer
    with pytest.raises(CheckpointError, match=r"is torch.optim.SGD, and the saved state is of another class"):
        elastic.resize(model, wrong, [0, 1, 2])
    if rank < 2:
        same(everything(model, optimizer), before)
        steps(model, optimizer, rank, 2, 1)
    else:
        with pytest.raises(StateError, match="holds no shards"):
            model.state_dict()
    elastic.resize(model, optimizer, [0, 1, 2])
    steps(model, optimizer, rank, 3, 1)


def test_a_joiner_that_differs_is_refused_by_all():
    simulate_ranks(joiner_differs, 3)


ACCESSES = {
    "repr": repr,
    "clone": torch.clone,
    "sum": torch.sum,
    "numpy": lambda param: param.detach().numpy(),
    "list": torch.Tensor.tolist,
    "a view": lambda param: param.detach().flatten()[-1].item(),
    "fill": lambda param: param.data.fill_(1.0),
    "copy": lambda param: param.data.copy_(torch.ones_like(param)),
    "norm": lambda param: torch.nn.utils.get_total_norm([param]),
    "add": lambda param: torch.add(1.0, param),
    "pointer": torch.Tensor.data_ptr,
}


def accessed(uo):
    model = built("FULL_SHARD", uo)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    kept = list(model.parameters()) + [param.data for param in model.parameters()]
    elastic.resize(model, optimizer, [0, 1])
    if dist.get_rank() == 2:
        away = [*model.parameters(), *kept[: len(kept) // 2], *(part.flat for part in parts_of(model))]
        for param in away:
            for access in ACCESSES.values() if param.numel() else ():
                with pytest.raises(RuntimeError, match="holds no shards since"):
                    access(param)
        for view in kept[len(kept) // 2 :]:
            assert torch.isfinite(view.sum())  # of the user's own: the old shard
        with pytest.raises(StateError, match="holds no shards"):
            model(torch.randn(4, 3))
    refuse_shards({"other": torch.ones(2)})
    elastic.resize(model, optimizer, [0, 1, 2])
    for param in model.parameters():
        assert torch.isfinite(param.sum())
    steps(model, optimizer, dist.get_rank(), 0, 2)


@pytest.mark.parametrize("uo", [False, True])
def test_no_access_crashes_a_rank_without_shards(uo):
    simulate_ranks(accessed, 3, uo)


def saves_alone(folder):
    model = built("FULL_SHARD", True)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    elastic.resize(model, optimizer, [0, 1])
    if dist.get_rank() == 2:
        with pytest.raises(StateError, match="holds no shards"):
            checkpoint.save(folder, model, optimizer)
    else:
        with pytest.raises(CheckpointError, match=r"rank 0 calls elastic\.resize, rank 2 checkpoint\.save"):
            elastic.resize(model, optimizer, [0, 1, 2])
    elastic.resize(model, optimizer, [0, 1, 2])
    steps(model, optimizer, dist.get_rank(), 0, 2)


def test_another_call_on_a_rank_without_shards_is_told(tmp_path):
    simulate_ranks(saves_alone, 3, str(tmp_path / "saved"))


def old_graph(strategy, uo):
    pairs = []
    for _ in range(2):
        model = built(strategy, uo)
        pairs.append((model, OPTIMIZERS["adam"](model.parameters())))
        steps(*pairs[-1], dist.get_rank(), 0, 1)
    (model, optimizer), twin = pairs
    loss = loss_of(model, torch.ones(4, 3))
    loss_of(twin[0], torch.ones(4, 3))
    for pair in pairs:
        elastic.resize(*pair, [0, 1])
    with pytest.raises(RuntimeError, match="was deleted, or moved to other ranks"):
        loss.backward()
    assert steps(model, optimizer, dist.get_rank(), 1, 2) == steps(*twin, dist.get_rank(), 1, 2)
    same(everything(model, optimizer), everything(*twin))


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"])
def test_an_old_graph_is_refused(strategy, uo):
    simulate_ranks(old_graph, 2, strategy, uo)
