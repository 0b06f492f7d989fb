"""``python -m flatparam advise``: bytes as counted on real ranks, memory as of real models, times by hand."""

import contextlib
import json
import random
from types import SimpleNamespace

import inspected
import pytest
import replacing
import torch
import torch.distributed as dist
from fsdp_models import Block, data, loss_of
from gloo import fake_world, note
from layer_zero_ranks import NAMES
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy
from flatparam.__main__ import main
from flatparam.advise.candidates import inner_sizes
from flatparam.advise.cli import parser
from flatparam.advise.report import front
from flatparam.advise.timing import Load, seconds_of

GRIDS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "LAYER_ZERO", "LAYER_ZERO_NESTED")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO_1", "NO_SHARD", *GRIDS)
KINDS = {"gather": "all_gather", "reduce": "reduce_scatter", "all_reduce": "all_reduce"}


def advise(capsys, tmp_path, *arguments, status=0):
    """What the command printed, and what it wrote as JSON."""
    path = tmp_path / "advice.json"
    assert main(["advise", *arguments, "--json", str(path)]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out, json.loads(path.read_text())


def wrapped(factory, strategy, inner, classes=(Block,), **settings):
    """The model of ``factory`` as the advice says it, on the ranks that there are."""
    shape = (dist.get_world_size() // inner, inner) if inner is not None else None
    return FSDP(
        factory(),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
        device_mesh=None if shape is None else init_device_mesh("cpu", shape),
        auto_wrap_policy=ModuleWrapPolicy(set(classes)) if classes else None,
        **settings,
    )


# Bytes


def counted_steps(cases):
    """For each case the bytes that this rank sends on rings in a step, by kind of collective and ranks of the group."""
    found = []
    for factory, strategy, inner, dtype, count, reduce_each, segments in cases:
        note(f"{factory} {strategy} {inner} {dtype} {count} {reduce_each}")
        precision = None if dtype is None else MixedPrecision(dtype, torch.float32)
        make = getattr(inspected, factory)
        model = wrapped(make, strategy, inner, mixed_precision=precision, segments=segments)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sent = {}

        def counting(name, original, sent=sent):
            def call(output, source=None, group=None, **kwargs):
                whole, n = source if NAMES[name] == "reduce" else output, dist.get_world_size(group)
                if whole.dtype != torch.int32:  # else an agreement
                    times = 2 if NAMES[name] == "all_reduce" else 1
                    key = KINDS[NAMES[name]], tuple(dist.get_process_group_ranks(group))
                    sent[key] = sent.get(key, 0) + times * whole.nbytes * (n - 1) / n
                arguments = (output,) if source is None else (output, source)
                return original(*arguments, group=group, **kwargs)

            return call

        with replacing.collectives(NAMES, counting):
            for _ in range(2):  # the first step gathers what has no copy yet
                sent.clear()
                for k in range(count):
                    with contextlib.nullcontext() if reduce_each or k == count - 1 else model.no_sync():
                        loss_of(model, data(k)).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(sent)
    return found


def group_ranks(name, world, inner, rank):
    if name == "wide":
        return tuple(range(world))
    return (
        tuple(range(rank % inner, world, inner))
        if name == "outer"
        else tuple(range(rank // inner * inner, rank // inner * inner + inner))
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("factory", "world", "dtype"),
    [("model", 4, None), ("model", 4, torch.bfloat16), ("model", 2, None), ("model", 3, None), ("uneven", 4, None)],
)
def test_bytes_are_those_that_real_ranks_send(capsys, tmp_path, factory, world, dtype):
    arguments = [f"inspected:{factory}", "--world-size", str(world), "--gpu-memory", "1GB", "--wrap", "Block"]
    arguments += ["--micro-batches", "1,3", *([] if dtype is None else ["--param-dtype", "bf16"])]
    segments = factory == "uneven"  # some are frozen
    _, found = advise(capsys, tmp_path, *arguments, *(["--segments"] if segments else []))
    advice = [one for one in found["fitting"] if one["together"] == 1]
    assert {one["strategy"] for one in advice} == set(STRATEGIES if world == 4 else STRATEGIES[:4])
    cases = [
        (factory, one["strategy"], one["inner"], dtype, one["micro_batches"], one["reduce_each"], segments)
        for one in advice
    ]
    assert len(cases) == (8 if world == 4 else 4) * 3
    for rank, counted in enumerate(simulate_ranks(counted_steps, world, cases)):
        for one, case, sent in zip(advice, cases, counted, strict=True):
            expected = {
                (entry["kind"], group_ranks(entry["group"], world, one["inner"], rank)): entry["bytes"]
                for entry in one["sent"]["collectives"]
            }
            assert sent == pytest.approx(expected, abs=0.5), (rank, case)
            assert expected  # something was sent
            total = one["sent"]["intra"] + one["sent"]["inter"]
            assert total == pytest.approx(sum(sent.values()), abs=1.5)


# Elements of the small model's units. Each parameter begins at a multiple of 4 of them: 16 + 8 + 5 and 8 + 56 + 12 + 55
UNITS = [29, 131, 131, 131]
PADDED = [32, 132, 132, 132]  # for 4 ranks; 30 and 132 for 2 ranks
ALL, ROOT, PAIRS = sum(PADDED), PADDED[0], 30 + 3 * 132
BYTES = {  # (strategy, micro-batches, reduced in each): {(kind, group): bytes}, in fp32; a(n) = (n - 1) / n
    ("FULL_SHARD", 1, False): {
        ("all_gather", "wide"): 3 * (2 * ALL - ROOT),
        ("reduce_scatter", "wide"): 3 * ALL,
    },
    ("FULL_SHARD", 5, False): {
        ("all_gather", "wide"): 5 * 3 * (2 * ALL - ROOT),
        ("reduce_scatter", "wide"): 3 * ALL,
    },
    ("SHARD_GRAD_OP", 5, False): {("all_gather", "wide"): 3 * ALL, ("reduce_scatter", "wide"): 3 * ALL},
    ("SHARD_GRAD_OP", 5, True): {("all_gather", "wide"): 15 * ALL, ("reduce_scatter", "wide"): 15 * ALL},
    ("NO_SHARD", 5, False): {("all_reduce", "wide"): 2 * 3 * sum(UNITS)},
    ("HYBRID_SHARD", 1, False): {
        ("all_gather", "inner"): 2 * (2 * PAIRS - 30),
        ("reduce_scatter", "inner"): 2 * PAIRS,
        ("all_reduce", "outer"): 2 * 2 * PAIRS // 2,
    },
    ("LAYER_ZERO_NESTED", 5, False): {
        ("all_gather", "outer"): 2 * ALL // 2,
        ("all_gather", "inner"): 5 * 2 * (2 * ALL - ROOT),
        ("reduce_scatter", "inner"): 5 * 2 * ALL,
        ("reduce_scatter", "outer"): 2 * ALL // 2,
    },
}


def test_bytes_are_those_of_arithmetic(capsys, tmp_path):
    arguments = ["inspected:model", "--world-size", "4", "--gpu-memory", "1GB", "--wrap", "Block"]
    _, found = advise(capsys, tmp_path, *arguments, "--micro-batches", "1,5", "--node-size", "2")
    by_case = {(o["strategy"], o["micro_batches"], o["reduce_each"]): o["sent"] for o in found["fitting"]}
    for case, expected in BYTES.items():
        sent = by_case[case]
        assert {(e["kind"], e["group"]): e["bytes"] for e in sent["collectives"]} == expected, case
        # two ranks in a node: what all four send goes half to the other node, and inner groups stay in one
        links = {"wide": 0.5, "inner": 0.0, "outer": 1.0}
        assert sent["inter"] == sum(links[group] * size for (_, group), size in expected.items()), case
        assert sent["intra"] + sent["inter"] == sum(expected.values())


# Memory


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_that_of_real_models(capsys, tmp_path, strategy):
    arguments = ["inspected:eight", "--world-size", "8", "--node-size", "4", "--gpu-memory", "1GB"]
    tokens = ["--tokens", "64", "--activations", "100B", "--micro-batches", "1,4"]
    _, found = advise(capsys, tmp_path, *arguments, *tokens, "--strategies", strategy)
    boundaries = {(tuple(one["wrap"]), one["together"]) for one in found["fitting"]}
    assert boundaries == {((), 1), (("Block",), 1), (("Block",), 2), (("Block",), 4)}
    assert {one["inner"] for one in found["fitting"]} == ({2, 4} if strategy in GRIDS else {None})
    plans = {}
    with fake_world(8):
        for one in found["fitting"]:
            key = one["inner"], tuple(one["wrap"]), one["together"]
            if key not in plans:
                plans[key] = of_a_real_model(strategy, one)
            plan, units = plans[key]
            memory, count = one["memory"], one["micro_batches"]
            assert one["units"] == units
            assert memory["between_steps"] == plan.between_steps
            peak = plan.peak_alone if count == 1 else plan.peak if one["reduce_each"] else plan.peak_no_sync
            assert memory["peak"] == peak
            assert memory["activations"] == 100 * 64 // count
            assert memory["total"] == memory["peak"] + memory["activations"]
            for redundancy, kept in memory["kept_by_elastic"].items():
                assert kept == plan.kept_by_elastic(8, redundancy)


def of_a_real_model(strategy, one):
    def make():
        made, k = inspected.eight(), one["together"]
        if k > 1:
            made.blocks = nn.Sequential(*(nn.Sequential(*made.blocks[i : i + k]) for i in range(0, 8, k)))
            made.blocks = nn.ModuleList(made.blocks)
        return made

    classes = () if not one["wrap"] else (Block,) if one["together"] == 1 else (nn.Sequential,)
    model = wrapped(make, strategy, one["inner"], classes)
    return model.memory_plan(), len(FSDP.fsdp_modules(model))


# Time


def test_a_step_without_sharding_takes_the_time_of_arithmetic(capsys, tmp_path):
    arguments = ["inspected:model", "--world-size", "6", "--node-size", "3", "--gpu-memory", "1GB"]
    machine = ["--flops", "1M", "--tokens", "50", "--intra", "1kB/s", "--inter", "8kbit/s"]
    latencies = ["--intra-latency", "1ms", "--inter-latency", "0.01s"]
    tried = ["--strategies", "NO_SHARD", "--micro-batches", "1,2"]
    _, found = advise(capsys, tmp_path, *arguments, *machine, *latencies, *tried)
    numel = 25 + 3 * 126
    compute = 6 * numel * 50 / 1e6
    size = 2 * 5 / 6 * 4 * (16 + 8 + 3 * (8 + 56 + 12 + 56) + 5)  # of an all-reduce over 6 ranks, with the gaps
    reduction = 2 * (4 * 1e-3 + 1 * 0.01) + max(2 / 3 * size / 1000, 1 / 3 * size / 1000)  # two nodes: one hop between
    whole = [one for one in found["fitting"] if one["units"] == 1]
    assert {(o["micro_batches"], o["reduce_each"]) for o in whole} == {(1, False), (2, False), (2, True)}
    for one in whole:
        assert one["seconds"]["compute"] == pytest.approx(compute)
        times = 2 if one["reduce_each"] else 1
        assert one["seconds"]["step"] == pytest.approx(compute + times * reduction)


def test_a_fast_network_leaves_compute_and_a_slow_one_leaves_collectives(capsys, tmp_path):
    arguments = ["inspected:model", "--world-size", "4", "--gpu-memory", "1GB", "--wrap", "Block"]
    tried = ["--strategies", "FULL_SHARD", "--micro-batches", "1", "--intra-latency", "1e-9us"]
    _, fast = advise(capsys, tmp_path, *arguments, *tried, "--flops", "1k", "--intra", "1PB/s")
    _, slow = advise(capsys, tmp_path, *arguments, *tried, "--flops", "1P", "--intra", "1kB/s")
    [fast] = [one for one in fast["fitting"] if one["together"] == 1]
    [slow] = [one for one in slow["fitting"] if one["together"] == 1]
    assert fast["seconds"]["step"] == pytest.approx(6 * 403 * 8192 / 1e3)
    assert slow["seconds"]["step"] == pytest.approx((3 * (2 * ALL - ROOT) + 3 * ALL) / 1e3)


ROOT_LOAD = Load(forward=1, backward=2, gather=3, gather_again=0, reduction=4)
OVERLAPS = [
    # gathered by 3, computes 3 to 4 and 4 to 6, reduced by 10
    ([ROOT_LOAD], 10),
    # the root is gathered by 3, the unit by 8; it computes to 18, the root to 19 and, backward, to 21; meanwhile the
    # unit is gathered (19 to 24); it computes to 44, is reduced by 50, and the root by 54
    ([ROOT_LOAD, Load(10, 20, 5, 5, 6)], 54),
    # gathers by 3, 8, 13 (asked for at 8); compute 8 to 9 and 13 to 14, the root to 15 and to 17; the last is gathered
    # again from 15 to 20, computes to 21; the first is asked for at 20, gathered by 25, computes to 26, while the last
    # is reduced from 25 to 31; the first by 37, the root by 41
    ([ROOT_LOAD, Load(1, 1, 5, 5, 6), Load(1, 1, 5, 5, 6)], 41),
    # nothing is gathered: compute of 3 to 4, 4 to 5, 5 to 6, 6 to 8, then 9 and 10; reduced by 15, 21 and 25
    ([ROOT_LOAD, Load(1, 1, 0, 0, 6), Load(1, 1, 0, 0, 6)], 25),
]


@pytest.mark.parametrize(("loads", "seconds"), OVERLAPS)
def test_collectives_overlap_with_compute_as_by_hand(loads, seconds):
    assert seconds_of(loads) == seconds


# What is printed


def test_the_best_come_first_and_what_does_not_fit_is_named(capsys, tmp_path):
    arguments = ["inspected:eight", "--world-size", "8", "--node-size", "4", "--param-dtype", "bf16"]
    _, everything = advise(capsys, tmp_path, *arguments, "--gpu-memory", "1GB")
    assert everything["too_large"] == []
    memory = sorted(one["memory"]["total"] for one in everything["fitting"])
    limit = memory[len(memory) // 3]
    printed, found = advise(capsys, tmp_path, *arguments, "--gpu-memory", f"{limit}B")
    assert all(one["memory"]["total"] <= limit for one in found["fitting"])
    assert all(one["memory"]["total"] > limit for one in found["too_large"])
    assert len(found["fitting"]) + len(found["too_large"]) == len(memory)
    times = [one["seconds"]["step"] for one in found["fitting"]]
    as_fast = [one for one in found["fitting"] if one["seconds"]["step"] <= 1.01 * min(times)]
    assert found["fitting"][: len(as_fast)] == as_fast  # and of these the smallest first
    assert [one["memory"]["total"] for one in as_fast] == sorted(one["memory"]["total"] for one in as_fast)
    assert times[len(as_fast) :] == sorted(times[len(as_fast) :])
    rows = printed.splitlines()[4:]
    strategies = list(dict.fromkeys(one["strategy"] for one in found["fitting"]))
    assert [row.split()[0] for row in rows[: len(strategies)]] == strategies
    best = found["fitting"][0]
    assert f"best: FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.{best['strategy']}" in printed
    assert f"{len(times)} of {len(memory)} tried fit, of each strategy the best is shown" in printed
    out = printed[printed.index("do not fit in") :]
    assert all(name in out for name in STRATEGIES if name not in strategies)
    assert "activations are not counted: give --activations" in printed
    legend = printed[printed.index("units: ") : printed.index("best: ")]
    words = ("units", "inner", "micro-batches", "reduced", "memory", "sent", "compute")
    assert all(f"{word}: " in legend for word in words)
    longer, _ = advise(capsys, tmp_path, *arguments, "--gpu-memory", f"{limit}B", "--all")
    assert len(longer.splitlines()) == len(printed.splitlines()) + len(times) - len(strategies)


def test_a_call_that_is_printed_is_the_best(capsys, tmp_path):
    printed, _ = advise(
        capsys,
        tmp_path,
        *("inspected:eight", "--world-size", "8", "--node-size", "4", "--gpu-memory", "1GB", "--wrap", "Block"),
        *("--strategies", "HYBRID_SHARD", "--inner", "2", "--param-dtype", "bf16", "--micro-batches", "1"),
        *("--flops", "1P", "--intra-latency", "1s", "--inter-latency", "1s"),  # few units are best
    )
    assert "segments" not in printed
    [line] = [line for line in printed.splitlines() if line.startswith("best: ")]
    call, _, how = line.removeprefix("best: ").rpartition(", each ")
    assert how == "4 Block in one nn.Sequential"
    with fake_world(8):
        model = inspected.eight()
        model.blocks = nn.ModuleList([nn.Sequential(*model.blocks[:4]), nn.Sequential(*model.blocks[4:])])
        names = {"model": model, "torch": torch, "nn": nn, "ModuleWrapPolicy": ModuleWrapPolicy}
        names |= {"FullyShardedDataParallel": FSDP, "ShardingStrategy": ShardingStrategy}
        names |= {"MixedPrecision": MixedPrecision}
        names["init_device_mesh"] = lambda device, shape: init_device_mesh("cpu", shape)
        made = eval(call, names)
        assert len(FSDP.fsdp_modules(made)) == 3
        assert made._placement.replicas == 4


def test_a_call_of_segments_says_so(capsys, tmp_path):
    arguments = ["inspected:mixed", "--world-size", "1", "--gpu-memory", "1GB", "--wrap", "Model", "--segments"]
    printed, _ = advise(capsys, tmp_path, *arguments)
    [line] = [line for line in printed.splitlines() if line.startswith("best: ")]
    with fake_world(1):
        names = {"model": inspected.mixed(), "FullyShardedDataParallel": FSDP, "ShardingStrategy": ShardingStrategy}
        names |= {"ModuleWrapPolicy": ModuleWrapPolicy, "Model": inspected.Model}
        assert len(eval(line.removeprefix("best: "), names)._unit.flat_params) == 2


MICRO = ["--world-size", "8", "--node-size", "4", "--gpu-memory", "1GB", "--wrap", "Block", "--tokens", "64"]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "LAYER_ZERO"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_best_line_gives_all_that_the_plan_needs(capsys, tmp_path, strategy, dtype):
    """The printed call makes a model with the plan's bytes and dtypes; the line below has its micro-batches."""
    options = ["--strategies", strategy, "--micro-batches", "4", *([] if dtype is None else ["--param-dtype", "bf16"])]
    printed, found = advise(capsys, tmp_path, "inspected:model", *MICRO, *options)
    lines = printed.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("best: "))
    best = found["fitting"][0]
    names = {"torch": torch, "FullyShardedDataParallel": FSDP, "ShardingStrategy": ShardingStrategy, "Block": Block}
    names |= {"MixedPrecision": MixedPrecision, "ModuleWrapPolicy": ModuleWrapPolicy, "model": inspected.model()}
    names["init_device_mesh"] = lambda device, shape: init_device_mesh("cpu", shape)
    with fake_world(8):
        made = eval(lines[at].removeprefix("best: "), names)
        plan = made.memory_plan()
        [flat] = made._unit.flat_params
        reduced = flat.reduce_dtype or flat.compute_dtype or flat.flat.dtype
        if dtype is not None:
            assert made.mixed_precision.reduce_dtype == reduced  # given, not left to a default
    assert best["memory"]["peak"] == (plan.peak if best["reduce_each"] else plan.peak_no_sync)
    synced = "each reduced" if best["reduce_each"] else "all but the last in model.no_sync()"
    computed, reduced = (str(one or torch.float32).removeprefix("torch.") for one in (dtype, reduced))
    expected = f"4 micro-batches of 16 tokens a step, {synced}; compute in {computed}, reduction in {reduced}"
    assert lines[at + 1].strip() == f"{expected}; optimizer adam"
    assert reduced == "float32"  # as docs/quickstart.md recommends for bf16, too
    assert f"compute in {computed}, optimizer adam" in lines[0]
    assert ("--param-dtype bf16" in printed) == (dtype is None)


@pytest.mark.parametrize("options", [["--strategies", "HYBRID_SHARD", "--inner", "2", "--param-dtype", "bf16"], []])
@pytest.mark.parametrize("wrap", ["Block", "fsdp_models.Block"])
def test_the_printed_program_runs_as_it_is(capsys, tmp_path, options, wrap):
    """With the imports that it names and no other names but the model's."""
    arguments = ["inspected:model", *MICRO, *options, "--wrap", wrap, "--micro-batches", "1"]
    printed, _ = advise(capsys, tmp_path, *arguments)
    best, _, imports = printed[printed.index("best: ") :].splitlines()[:3]
    with fake_world(8):
        names = {"model": inspected.model()}
        exec(imports.strip(), names)
        made = eval(best.removeprefix("best: ").replace('"cuda"', '"cpu"'), names)
        assert made._use_orig_params
        assert len(FSDP.fsdp_modules(made)) == 4


@pytest.mark.parametrize(("options", "rate"), [([], 25e12), (["--param-dtype", "bf16"], 400e12)])
def test_fp32_computes_more_slowly(capsys, tmp_path, options, rate):
    """Unless a rate is given."""
    _, found = advise(capsys, tmp_path, "inspected:model", *MICRO, *options)
    assert found["assumed"]["flops"] == rate
    assert found["fitting"][0]["seconds"]["compute"] == pytest.approx(6 * 403 * 64 / rate)
    _, found = advise(capsys, tmp_path, "inspected:model", *MICRO, *options, "--flops", "1T")
    assert found["assumed"]["flops"] == 1e12


def test_the_dtype_of_the_reduction_is_that_of_the_option(capsys, tmp_path):
    options = ["--param-dtype", "bf16", "--reduce-dtype", "bf16", "--strategies", "FULL_SHARD"]
    printed, _ = advise(capsys, tmp_path, "inspected:model", *MICRO, *options)
    assert "MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)" in printed
    printed, _ = advise(capsys, tmp_path, "inspected:model", *MICRO, *options[:2], *options[4:])
    assert "MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)" in printed
    printed, _ = advise(capsys, tmp_path, "inspected:model", *MICRO, *options[2:])
    assert "MixedPrecision(reduce_dtype=torch.bfloat16)" in printed


def test_what_is_left_out_says_how_to_get_it(capsys, tmp_path):
    printed, _ = advise(capsys, tmp_path, "inspected:model", *MICRO)
    assert (
        "give --activations, bytes that flatparam.advise.activations.bytes_per_token(block, x, tokens=n) measures"
        in printed
    )


def test_a_plan_of_one_micro_batch_says_so(capsys, tmp_path):
    printed, _ = advise(capsys, tmp_path, "inspected:model", *MICRO, "--micro-batches", "1")
    assert "\n      1 micro-batch of 64 tokens a step; compute in float32" in printed


def test_nothing_fits_says_by_how_much(capsys, tmp_path):
    arguments = ["inspected:model", "--world-size", "2", "--wrap", "Block", "--optimizer", "none"]
    _, found = advise(capsys, tmp_path, *arguments, "--gpu-memory", "1GB")
    least = min(one["memory"]["total"] for one in found["fitting"])
    assert least < 8000
    printed, found = advise(capsys, tmp_path, *arguments, "--gpu-memory", f"{least - 100}B", status=1)
    assert f"takes {least / 1024:.2f} KiB, 100 B too much: take more ranks" in printed
    assert "nothing fits in" in printed
    assert "the plan is in fp32, the dtype of the parameters: --param-dtype bf16" in printed
    assert found["fitting"] == []
    assert found["too_large"][0]["memory"]["total"] == least
    advise(capsys, tmp_path, *arguments, "--gpu-memory", f"{least}B")  # to the byte


def test_sizes_and_nodes(capsys, tmp_path):
    arguments = ["inspected:model", "--world-size", "16", "--gpu-memory", "1.5GiB"]
    _, found = advise(capsys, tmp_path, *arguments, "--intra", "80Gbit/s", "--inter-latency", "10us", "--flops", "2e3T")
    assert found["gpu_memory"] == 1.5 * 2**30
    assumed = found["assumed"]
    assert assumed["bytes_per_second"] == {"intra": 1e10, "inter": 5e10}
    assert assumed["latency"]["inter"] == pytest.approx(1e-5)
    assert (assumed["flops"], assumed["node_size"], assumed["tokens"]) == (2e15, 8, 8192)
    assert {one["inner"] for one in found["fitting"]} == {None, 2, 4, 8}
    _, found = advise(capsys, tmp_path, *arguments, "--inner", "4")
    assert {one["inner"] for one in found["fitting"]} == {None, 4}
    _, found = advise(capsys, tmp_path, "inspected:model", "--world-size", "1", "--gpu-memory", "1GB")
    assert all(one["sent"]["collectives"] == [] for one in found["fitting"])
    _, found = advise(capsys, tmp_path, *arguments, "--tokens", "3")
    assert {one["micro_batches"] for one in found["fitting"]} == {1, 2}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4400KB", 4_400_000),
        ("80gb", 80 * 10**9),
        ("80GIB", 80 * 2**30),
        ("3 Mib", 3 * 2**20),
        ("7b", 7),
        ("1tB", 10**12),
    ],
)
def test_sizes_have_any_case(text, size):
    options = parser().parse_args(["a:b", "--world-size", "2", "--gpu-memory", text, "--activations", text])
    assert (options.gpu_memory, options.activations) == (size, size)


def test_prefixes_of_rates_have_any_case_and_bits_stay_bits(capsys):
    given = ["a:b", "--world-size", "2", "--gpu-memory", "1GB"]
    options = parser().parse_args([*given, "--intra", "8Kbit/s", "--inter", "3gB/s", "--flops", "4t"])
    assert (options.intra, options.inter, options.flops) == (1000, 3e9, 4e12)
    for text in ("10Ms", "3ks"):  # a prefix of a time would be a letter of the unit: ms are milliseconds
        with pytest.raises(SystemExit):
            parser().parse_args([*given, "--intra-latency", text])
    with pytest.raises(SystemExit):
        parser().parse_args([*given, "--intra", "400Gb/s"])  # bits or bytes?
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("node", [1, 3, 4, 12, 60])
def test_inner_groups_are_divisors_that_fill_parts_of_a_node_or_nodes(node):
    assert inner_sizes(60, node) == [
        size for size in range(2, 60) if 60 % size == 0 and (node % size == 0 or size % node == 0)
    ]
    assert inner_sizes(2**31 - 1, 1) == []


ERRORS = [
    (["nowhere.at_all:model"], "cannot import nowhere.at_all: ModuleNotFoundError"),
    (["here.py:model"], "expected package.module:factory, got the path here.py; did you mean here:model?"),
    (["inspected:absent"], "inspected has no `absent`"),
    (
        ["inspected:model", "--world-size", "12"],
        "--world-size must be a multiple of --node-size, got 12 ranks in nodes of",
    ),
    (["inspected:model", "--wrap", "Layer"], "no module of class Layer in it; there are Block, Linear, Model"),
    (["inspected:model", "--inner", "3"], "--inner must divide 8 ranks, and divide or be nodes of 8: [2, 4], got 3"),
    (
        ["inspected:model", "--tokens", "3", "--micro-batches", "1,2,4,8,16"],
        "--tokens 3 are fewer than 16 micro-batches",
    ),
    (["inspected:halves"], "unit (root) cannot be made: Cannot flatten parameter `table` (shape (3,), torch.uint4"),
    (["inspected:halves"], "view it as torch.uint8, or leave it out of the model that the factory makes"),
    (["inspected:mixed", "--wrap", "Model"], "; pass --segments, or wrap them in separate units"),
    (["inspected:lazy"], "parameter `1.weight` of a LazyLinear has no shape yet: let the factory run a forward"),
    (
        ["inspected:model", "--node-size", "1", "--world-size", str(10**22), "--strategies", "FULL_SHARD"],
        f"--world-size must be at most 2147483647, got {10**22}",
    ),
    (
        ["inspected:model", "--strategies", "LAYER_ZERO", "--world-size", "2"],
        "no inner group is possible among 2 ranks",
    ),
    (["inspected:model", "--picture", "no/such/folder/advice.png"], "No such file or directory"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), ERRORS, ids=lambda value: None if isinstance(value, str) else value[-1]
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    assert main(["advise", "--gpu-memory", "1GB", "--world-size", "8", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("flatparam advise: ")
    assert message in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: --world-size, --gpu-memory"),
        (["--gpu-memory", "80"], "expected a positive number and a unit, as in 80GB, got '80'"),
        (["--gpu-memory", "lots"], "expected a positive number and a unit, as in 80GB, got 'lots'"),
        (["--activations", "4456448"], "a positive number and a unit, as in 4MB or 4456448B, got '4456448'"),
        (["--gpu-memory", "-1GB"], "--gpu-memory: expected "),
        (["--gpu-memory", "0GB"], "got '0GB'"),
        (["--gpu-memory", "1e400GB"], "got '1e400GB'"),
        (["--intra", "450GB"], "as in 50GB/s or 400Gbit/s, got '450GB'"),
        (["--inter-latency", "10"], "as in 10us, got '10'"),
        (["--flops", "fast"], "as in 400T, got 'fast'"),
        (["--world-size", "two"], "expected a positive integer, got 'two'"),
        (["--world-size", "0"], "expected a positive integer, got '0'"),
        (["--world-size", "2,4"], "expected a positive integer, got '2,4'"),
        (["--micro-batches", "1,x"], "expected positive integers such as 1,2,4, got '1,x'"),
        (["--strategies", "FULL_SHARD,ZERO_4"], "no strategy 'ZERO_4'; there are FULL_SHARD, SHARD_GRAD_OP"),
    ],
)
def test_bad_options_are_one_line_and_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["advise", "inspected:model", *arguments])
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert message in line


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["advise", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    names = ("world-size", "gpu-memory", "intra", "inter", "tokens", "flops", "activations", "node-size", "picture")
    assert all(f"--{name}" in text for name in names)
    assert not any(value in text for value in ("None", "()"))
    assert main(["--help"]) == 0
    assert "advise" in capsys.readouterr().out


@pytest.mark.parametrize("memory", ["1GB", "1kB"])  # all fit, none fits
def test_it_draws(capsys, tmp_path, memory):
    path = tmp_path / "advice.png"
    arguments = ["inspected:eight", "--world-size", "8", "--gpu-memory", memory, "--picture", str(path)]
    assert main(["advise", *arguments]) == (1 if memory == "1kB" else 0)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("memory", ["1GB", "20kB", "1kB"])
def test_labels_of_the_picture_do_not_overlap(capsys, tmp_path, monkeypatch, memory):
    texts = inspected.drawn_texts(monkeypatch)
    arguments = ["inspected:eight", "--world-size", "8", "--node-size", "4", "--gpu-memory", memory]
    main(["advise", *arguments, "--picture", str(tmp_path / "advice.png")])
    assert {"Pareto front: no other is smaller and faster", "waiting for collectives"} <= {text for text, _ in texts}
    assert inspected.overlapping(texts) == []


def test_the_front_has_every_plan_that_no_other_beats():
    numbers = random.Random(3)
    found = [SimpleNamespace(memory=numbers.randint(1, 30), seconds=numbers.randint(1, 30)) for _ in range(60)]
    pairs = {(one.memory, one.seconds) for one in found}
    best = {(m, s) for m, s in pairs if not any(a <= m and b <= s and (a, b) != (m, s) for a, b in pairs)}
    assert [(one.memory, one.seconds) for one in front(found)] == sorted(best)
    assert 2 < len(best) < len(pairs)


def test_without_matplotlib_it_says_what_to_install(capsys, monkeypatch, tmp_path):
    inspected.without_matplotlib(monkeypatch, "flatparam.advise.picture")
    arguments = ["advise", "inspected:model", "--world-size", "2", "--gpu-memory", "1GB"]
    assert main([*arguments, "--picture", str(tmp_path / "advice.png")]) == 2
    assert capsys.readouterr().err == "flatparam advise: --picture needs matplotlib: pip install 'matplotlib>=3.7'\n"
    assert main(arguments) == 0
