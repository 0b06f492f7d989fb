"""The runtime's statements before training: the map of shards, the plan of memory, and that the ranks agree.

Promises:
- `print` shows the plan of memory, the map of shards and each unit's strategy, ranks and sizes: tables with their
  numbers, equal units in one line, names before the first forward: (`print`)
- ranks that build different models raise at once; if one rank cannot build its unit, all raise, on a grid too:
  `test_ranks_that_build_different_models`, `test_an_error_of_one_rank_is_told_to_all`,
  `test_an_error_of_one_rank_of_a_grid_is_told_to_all`
"""

import ctypes
import dataclasses
import multiprocessing
import time

import pytest
import torch
import torch.distributed as dist
from fsdp_models import make, wrap_blocks
from gloo import fake_world, note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import BackwardPrefetch, MixedPrecision, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP

M_MMAP_THRESHOLD, M_PERTURB = -3, -6  # of glibc's mallopt
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Scale(nn.Module):
    """Not ``even``: a quarter of the shards is padding, where they cut no parameter."""

    def __init__(self, even):
        super().__init__()
        small = 2**20 if even else 2**19
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.ones(n)) for n in (2**20, 2**20, small, small))

    def forward(self, x):
        return x * (self.a * self.b).sum() * (self.c * self.d).sum()


def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def peak(strategy, low, prefetch, even, kind, small=""):
    """The bytes that this process takes for two steps, and those planned.

    ``kind``: of a backward added to an earlier one, one alone, or micro-batches in no_sync. ``small``: two or three
    units are gathered as one.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 65536)
    if small:  # units wait for their values in memory that nobody has written to: it counts
        libc.mallopt(M_PERTURB, 85)
    torch.set_num_threads(1)
    strategy, _, reduction = strategy.partition(" ")
    with fake_world(4):
        settings = {
            "sharding_strategy": ShardingStrategy[strategy],
            "mixed_precision": MIXED if low == "low" else None,
            "backward_prefetch": BackwardPrefetch.BACKWARD_PRE if prefetch == "prefetch" else None,
            "atomic": torch.Tensor.numel if even == "whole" else None,
            "min_unit_bytes": 2**25 if small else 0,
            "reduction": reduction or None,
            "device_mesh": init_device_mesh("cpu", (2, 2)) if "HYBRID" in strategy or "LAYER" in strategy else None,
        }
        tiny = FSDP(nn.Sequential(*(FSDP(nn.Linear(1, 1), **settings) for _ in range(2))), **settings)
        tiny(torch.ones(1, 1)).sum().backward()
        before = status("VmRSS")
        model = FSDP(nn.Sequential(*(FSDP(Scale(even == "even"), **settings) for _ in range(6))), **settings)
        plan = model.memory_plan(optimizer_bytes=0)
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        train_twice(model, kind)
        planned = {"added": plan.peak, "alone": plan.peak_alone, "kept": plan.peak_no_sync}
        return status("VmHWM") - before, planned[kind]


def train_twice(model, kind):
    for _ in range(2):
        for _ in range(2 if kind == "kept" else 0):
            with model.no_sync():
                model(torch.ones(1)).backward()
        model(torch.ones(1)).backward()
        if kind != "added":
            model.zero_grad()


@pytest.mark.sweep(3)
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "settings",
    [
        ("FULL_SHARD", "same", "prefetch", "even", "added"),
        ("FULL_SHARD", "low", "none", "whole", "added"),
        ("SHARD_GRAD_OP", "same", "prefetch", "even", "added"),
        ("ZERO_1", "low", "prefetch", "even", "added"),
        ("NO_SHARD", "same", "prefetch", "even", "added"),
        ("HYBRID_SHARD", "same", "prefetch", "even", "added"),
        *(("_HYBRID_SHARD_ZERO2", "same", "prefetch", "even", kind) for kind in ("added", "alone", "kept")),
        *((strategy, "same", "prefetch", "even", "alone") for strategy in ("FULL_SHARD", "NO_SHARD", "HYBRID_SHARD")),
        ("HYBRID_SHARD", "low", "prefetch", "even", "alone"),
        ("SHARD_GRAD_OP", "low", "none", "even", "alone"),
        ("FULL_SHARD", "same", "prefetch", "even", "kept"),
        ("FULL_SHARD", "low", "none", "even", "kept"),
        ("SHARD_GRAD_OP", "low", "prefetch", "even", "kept"),
        ("NO_SHARD", "same", "prefetch", "even", "kept"),
        *(
            ("FULL_SHARD ordered", *how, "even", kind)
            for how in (("same", "prefetch"), ("low", "none"))
            for kind in ("added", "alone")
        ),
        ("ZERO_1 ordered", "low", "prefetch", "even", "alone"),
        ("SHARD_GRAD_OP ordered", "same", "none", "whole", "added"),
        ("LAYER_ZERO", "low", "prefetch", "even", "kept"),
        ("LAYER_ZERO_NESTED", "low", "prefetch", "even", "kept"),
        *(("FULL_SHARD", "same", "prefetch", "even", kind, "small") for kind in ("added", "alone", "kept")),
        ("FULL_SHARD", "low", "none", "even", "alone", "small"),
        ("SHARD_GRAD_OP", "same", "prefetch", "even", "alone", "small"),
    ],
    ids="-".join,
)
def test_the_plan_is_what_a_process_takes(settings):
    """A process of its own, of the fork server that gloo.py has had import torch."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        measured, planned = pool.apply(peak, settings)
    assert measured == pytest.approx(planned, rel=0.05), (measured / 2**20, planned / 2**20)


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_the_map_says_where_every_element_is(world, uo):
    whole = {name: param.detach().clone() for name, param in make().named_parameters()}
    found = {name: torch.full_like(value, torch.nan) for name, value in whole.items()}
    for rank in range(world):
        with fake_world(world, rank):
            model = wrap_blocks(make(), use_orig_params=uo)
            pieces = model.shard_map()
            flats = {}
            for path, unit in model.named_modules():
                if isinstance(unit, FSDP):
                    for flat_param in unit._unit.flat_params:
                        for original in flat_param.originals:
                            prefix = path.replace("_fsdp_wrapped_module", "").strip(".").replace("..", ".")
                            flats[f"{prefix}.{original.fqn}".strip(".")] = flat_param.flat.detach()
            for piece in pieces:
                if piece.rank != rank:
                    continue
                values = flats[piece.fqn][piece.flat_start : piece.flat_start + piece.numel]
                found[piece.fqn].view(-1)[piece.start : piece.start + piece.numel] = values
                assert piece.shape == tuple(whole[piece.fqn].shape)
                assert piece.trained
                assert sum(torch.Size(box.sizes).numel() for box in piece.boxes) == piece.numel
    for name, value in whole.items():
        assert torch.equal(found[name], value), name


def other_builds():
    """One rank has another layer, dtype, setting: every rank says which, at construction."""
    rank = dist.get_rank()

    def wider():
        return nn.Linear(3, 3 + rank)

    def renamed():
        module = nn.Module()
        setattr(module, f"weight{rank}", nn.Parameter(torch.ones(3)))
        return module

    def frozen():
        return nn.Linear(3, 3).requires_grad_(rank == 0)

    builds = [
        (wider, {}, r"weight.*\(3, 3\).*weight.*\(4, 3\)"),
        (renamed, {}, r"weight0.*weight1"),
        (frozen, {"use_orig_params": True}, r"requires_grad=True.*requires_grad=False"),
        (lambda: nn.Linear(3, 3).to(torch.float64 if rank else torch.float32), {}, "float32.*float64"),
        (lambda: nn.Linear(3, 3), {"use_orig_params": rank == 1}, "use_orig_params=False.*use_orig_params=True"),
        (lambda: nn.Linear(3, 3), {"sharding_strategy": list(ShardingStrategy)[rank]}, "reshard_after_forward"),
        (
            lambda: nn.Linear(3, 3),
            {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16 if rank else None)},
            "reduce_dtype=None.*reduce_dtype=torch.bfloat16",
        ),
    ]
    for build, arguments, message in builds:
        with pytest.raises(ValueError, match=message):
            FSDP(build(), **arguments)
    torch.manual_seed(0)
    model = FSDP(nn.Linear(3, 3))
    model(torch.ones(1, 3)).sum().backward()


@pytest.mark.multiprocess
def test_ranks_that_build_different_models():
    simulate_ranks(other_builds, 2)


def raises(*ignored, **too):
    raise KeyError("not on this rank")


class Raises(nn.Linear):
    """On the meta device, and rank 1 cannot fill it."""

    def reset_parameters(self):
        if not self.weight.is_meta and dist.get_rank() == 1:
            raises()


def on_meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 3), Raises(3, 3))


# What rank 1 alone passes; its error and what it says
WRONG = [
    ({"mixed_precision": "bf16"}, TypeError, "expected mixed_precision to be torch's MixedPrecision or None, as in .*"),
    ({"cpu_offload": True}, TypeError, "expected cpu_offload to be torch's CPUOffload or None, as in .* got True"),
    ({"use_orig_params": "no"}, TypeError, "expected use_orig_params to be True or False, got 'no'"),
    ({"segments": None}, TypeError, "expected segments to be True or False, got None"),
    ({"sharding_strategy": "FULL"}, TypeError, "expected a ShardingStrategy, got 'FULL'"),
    ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, ValueError, "HYBRID_SHARD must know"),
    ({"backward_prefetch": "pre"}, TypeError, "backward_prefetch"),
    ({"auto_wrap_policy": 3}, TypeError, "auto_wrap_policy"),
    ({"auto_wrap_policy": raises}, KeyError, "not on this rank"),
    ({"ignored_modules": [], "ignored_states": []}, ValueError, "both ignored_modules and ignored_states"),
    ({"param_init_fn": 3}, ValueError, "3 to be callable"),
    ({"device_id": 0}, ValueError, "device_id=0 names an accelerator"),
    ({"atomic": raises}, KeyError, "not on this rank"),
    ({"offload_grads": True}, ValueError, "FULL_SHARD does not offload gradients"),
    ({"module": 3}, TypeError, "expected module to be torch's Module, got 3"),
]


def one_rank_is_wrong(case):
    """The others are told which rank it is and why, at once, and the group can be used afterwards."""
    rank = dist.get_rank()
    wrong, kind, message = WRONG[case]
    for policy in (None, ModuleWrapPolicy({nn.Linear})):
        arguments = {"module": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "auto_wrap_policy": policy}
        note(f"{wrong} {policy}")
        begin = time.monotonic()
        if rank == 1:
            with pytest.raises(kind, match=message):
                FSDP(**{**arguments, **wrong})
        else:
            with pytest.raises(ValueError, match=rf"rank 1 could not build its unit: \w+: .*{message}"):
                FSDP(**arguments)
        assert time.monotonic() - begin < 10.0
    model = FSDP(nn.Linear(3, 3), sync_module_states=True)
    model(torch.ones(1, 3)).sum().backward()


def one_rank_cannot_fill():
    """A module on the meta device that one rank cannot fill."""
    rank = dist.get_rank()
    with pytest.raises(KeyError if rank == 1 else ValueError, match="not on this rank"):
        FSDP(on_meta(), auto_wrap_policy=ModuleWrapPolicy({Raises}))
    with pytest.raises(KeyError if rank == 1 else ValueError, match="not on this rank"):
        FSDP(on_meta(), sync_module_states=True)
    model = FSDP(nn.Linear(3, 3), sync_module_states=True)
    model(torch.ones(1, 3)).sum().backward()


@pytest.mark.multiprocess
@pytest.mark.sweep(5)
@pytest.mark.parametrize("case", range(len(WRONG)), ids=["-".join(wrong) for wrong, *_ in WRONG])
def test_an_error_of_one_rank_is_told_to_all(case):
    simulate_ranks(one_rank_is_wrong, 2, case)


@pytest.mark.multiprocess
def test_a_module_that_one_rank_cannot_fill_is_told_to_all():
    simulate_ranks(one_rank_cannot_fill, 2)


def one_of_a_grid_is_wrong():
    """Ranks of another row and column than the one that is wrong are told too."""
    rank = dist.get_rank()
    settings = {"device_mesh": init_device_mesh("cpu", (2, 2)), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    with pytest.raises(TypeError if rank == 3 else ValueError, match="expected mixed_precision to be"):
        FSDP(nn.Linear(3, 3), mixed_precision=3 if rank == 3 else None, **settings)
    with pytest.raises(ValueError, match=r"rank 2 has .*weight.*\(3, 3\).*rank 3 has .*weight.*\(4, 3\)"):
        FSDP(nn.Linear(3, 3 + (rank == 3)), **settings)
    model = FSDP(nn.Linear(3, 3), sync_module_states=True, **settings)
    model(torch.ones(1, 3)).sum().backward()


@pytest.mark.multiprocess
def test_an_error_of_one_rank_of_a_grid_is_told_to_all():
    simulate_ranks(one_of_a_grid_is_wrong, 4)


def nobody_comes():
    """Who waits to tell of an error says it at least here."""
    if dist.get_rank() == 1:
        with (
            pytest.warns(UserWarning, match="waiting to tell .* rank 1 could not build its unit: TypeError"),
            pytest.raises(TypeError, match="expected mixed_precision"),
        ):
            FSDP(nn.Linear(3, 3), mixed_precision=3)
    else:
        time.sleep(6.0)
        with pytest.raises(ValueError, match="rank 1 could not build its unit"):
            FSDP(nn.Linear(3, 3))


@pytest.mark.multiprocess
def test_an_error_that_waits_to_be_told_is_seen():
    simulate_ranks(nobody_comes, 2)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)  # sizes that need no padding

    def forward(self, x):
        return x + self.b(self.a(x)).sum()


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Pair() for _ in range(3)), nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


SIZES = {"(root)": 8 * 4 + 4, "blocks.{0..2}": 8 * 8 + 8 + 8 * 4}


def pairs(**settings):
    return FSDP(Pairs(), auto_wrap_policy=ModuleWrapPolicy({Pair}), **settings)


def rows_of(printed):
    return [line.split() for line in str(printed).splitlines()]


def named(rows, name):
    (row,) = [row for row in rows if row[:1] == [name]]
    return row


@pytest.mark.parametrize("uo", [False, True])
def test_what_print_shows_of_the_plan(uo):
    with fake_world(2):
        model = pairs(use_orig_params=uo)
        before = str(model.memory_plan())
        rows = rows_of(before)
        for name, count in (("(root)", 1), ("blocks.{0..2}", 3)):
            shard, full = f"{SIZES[name] // 2 * 4} B".split(), f"{SIZES[name] * 4} B".split()
            adam = f"{SIZES[name] // 2 * 8} B".split()
            row = named(rows, name)
            assert row[:12] == [name, str(count), *shard, *shard, *adam, *full, *full]
        total = (SIZES["(root)"] + 3 * SIZES["blocks.{0..2}"]) // 2 * 4
        assert named(rows, "total")[:4] == ["total", "4", str(total), "B"]
        assert len([row for row in rows if row[:1] and row[0].startswith("blocks")]) == 1
        every = rows_of(model.memory_plan().table(every=True))
        assert [named(every, f"blocks.{i}")[1:4] for i in range(3)] == [["1", *named(rows, "blocks.{0..2}")[2:4]]] * 3
        model(torch.ones(1, 8)).sum().backward()
        assert str(model.memory_plan()) == before
        inner = model.module.blocks[1].memory_plan()
        assert [unit.name for unit in inner.units] == ["(root)"]


def test_what_print_shows_of_memory_of_the_host():
    with fake_world(2):
        plan = pairs().memory_plan()
    assert "host memory" not in str(plan)
    assert str(dataclasses.replace(plan, host=3 * 2**20)).endswith("\nhost memory: 3.00 MiB")


def test_what_print_shows_of_the_map():
    with fake_world(2):
        model = pairs(use_orig_params=True, atomic="row")
        pieces = model.shard_map()
        rows = rows_of(pieces)
        state = Pairs().state_dict()
        for name, shape in (("a.weight", "[8, 8]"), ("a.bias", "[8]"), ("b.weight", "[4, 8]")):
            here = [piece for piece in pieces if piece.fqn == f"blocks.0.{name}"]
            ranks = sorted({piece.rank for piece in here})
            row = named(rows, f"blocks.{{0..2}}.{name}")
            assert row[1:] == [
                *("3", "float32", *shape.split(), "yes"),
                *(["0..1"] if len(ranks) == 2 else [str(ranks[0])]),
                *" to ".join(f"{n}" for n in sorted({piece.numel for piece in here})).split(),
            ]
            assert sum(piece.numel for piece in here) == state[f"blocks.0.{name}"].numel()
        on_ranks = rows[rows.index(["ranks", "parameters", "on", "each", "elements", "on", "each"]) + 2 :]
        held = {}
        for ranks, _, numel in on_ranks:
            first, _, last = ranks.partition("..")
            held.update(dict.fromkeys(range(int(first), int(last or first) + 1), int(numel)))
        assert held == {rank: sum(p.numel for p in pieces if p.rank == rank) for rank in range(2)}
        assert sum(held.values()) == sum(value.numel() for value in state.values())
        every = rows_of(pieces.table(every=True))
        assert len(every) == 2 + len(pieces)
        assert {row[0] for row in every[2:]} == state.keys()
        assert pieces == list(pieces)


@pytest.mark.parametrize(
    ("strategy", "over"),
    [
        ("FULL_SHARD", "over 4 ranks;"),
        ("NO_SHARD", "over 1 rank, 4 replicas;"),
        ("HYBRID_SHARD", "over 2 ranks, 2 replicas;"),
        ("LAYER_ZERO", "over 4 ranks, gathered over 2;"),
    ],
)
@pytest.mark.parametrize("uo", [False, True])
def test_what_print_shows_of_a_model(strategy, over, uo):
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2)) if strategy in ("HYBRID_SHARD", "LAYER_ZERO") else None
        model = pairs(sharding_strategy=ShardingStrategy[strategy], device_mesh=mesh, use_orig_params=uo)
        lines = [line.strip() for line in repr(model).splitlines()]
        shards = model.placement.shards
        told = [line for line in lines if line.startswith(f"{strategy} {over}")]
        wanted = [(2, SIZES["(root)"]), (3, SIZES["blocks.{0..2}"])]
        assert len(told) == 2, lines
        for line, (params, numel) in zip(told, wanted, strict=True):
            shard = numel // shards
            assert f"{params} parameters of {numel} elements, in a shard {shard} of float32, {shard * 4} B" in line
        assert "(0-2): 3 x FullyShardedDataParallel(" in lines


def test_what_print_shows_of_units_without_parameters_and_not_wrapped_to_the_end():
    with fake_world(2):
        assert "FULL_SHARD over 2 ranks; no parameters of its own" in repr(FSDP(nn.Sequential(FSDP(nn.Linear(2, 2)))))
        unfinished = FSDP.__new__(FSDP)
        nn.Module.__init__(unfinished)
        assert repr(unfinished) == "FullyShardedDataParallel()"
