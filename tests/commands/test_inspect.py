"""``python -m flatparam inspect`` predicts the effect of wrapping: against arithmetic, and against wrapped models."""

import json
import os
import sys

import forked_scripts
import inspected
import pytest
import torch
from fsdp_models import Block
from gloo import fake_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy
from flatparam.__main__ import main

ROOT, BLOCK = 3 * 5 + 5 + 5, 5 * 11 + 11 + 11 * 5 + 5  # elements of the small model's units: 25, and three times 126
NUMELS = [ROOT, BLOCK, BLOCK, BLOCK]


def inspect(capsys, tmp_path, *arguments):
    """What the command printed, and what it wrote as JSON."""
    path = tmp_path / "plan.json"
    assert main(["inspect", *arguments, "--json", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out, json.loads(path.read_text())


class Ledger:
    """Bytes that are allocated, by name, and the most that there were."""

    def __init__(self, **held):
        self.held, self.most = dict(held), sum(held.values())

    def take(self, name, size):
        self.held[name] = size
        self.most = max(self.most, sum(self.held.values()))

    def free(self, name):
        self.held.pop(name, None)


def most_of_a_step(strategy, ranks, prefetch):
    """Bytes at the fullest moment of an fp32 step with Adam, from what is allocated and freed one after the other."""
    shards = [-(-numel // ranks) for numel in NUMELS]
    full = [4 * ranks * shard for shard in shards]
    ledger = Ledger(shards=4 * sum(shards), adam=8 * sum(shards))
    if strategy == "ZERO_1":
        ledger.take("all full", sum(full))

    def gather(i):
        if strategy != "ZERO_1":
            ledger.take(f"full {i}", full[i])

    gather(0)
    for i in (1, 2, 3):
        gather(i)
        if prefetch and i < 3 and strategy == "FULL_SHARD":
            gather(i + 1)
        if strategy == "FULL_SHARD":
            ledger.free(f"full {i}")
    ledger.take("gradients of an earlier step", 4 * sum(shards))
    for i in (3, 2, 1, 0):
        gather(i)
        if prefetch and i > 1 and strategy == "FULL_SHARD":
            gather(i - 1)
        ledger.take("from autograd", 4 * NUMELS[i])
        ledger.free(f"full {i}")
        ledger.take(f"packed {i}", full[i])
        if strategy == "ZERO_1":
            ledger.free("from autograd")
        ledger.take(f"reduced {i}", 4 * shards[i])
        if strategy != "ZERO_1":
            ledger.free("from autograd")
        ledger.free(f"packed {i + 1}")
        ledger.free(f"reduced {i + 1}")
    return ledger.most


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "ZERO_1"])
def test_bytes_are_those_of_arithmetic(capsys, tmp_path, strategy, ranks, prefetch):
    arguments = ["inspected:model", "--wrap", "Block", "--world-size", str(ranks), "--strategy", strategy]
    printed, found = inspect(capsys, tmp_path, *arguments, *([] if prefetch else ["--no-prefetch"]))
    shards = [-(-numel // ranks) for numel in NUMELS]
    assert [unit["numel"] for unit in found["units"]] == NUMELS
    assert [unit["shard_numel"] for unit in found["units"]] == shards
    assert [unit["padding"] for unit in found["units"]] == [ranks * s - n for s, n in zip(shards, NUMELS, strict=True)]
    for unit, shard in zip(found["units"], shards, strict=True):
        sizes = {"shard": 4 * shard, "gradient": 4 * shard, "optimizer": 8 * shard, "unsharded": 4 * shard * ranks}
        assert {name: unit["bytes"][name] for name in sizes} == sizes
    always = 4 * ranks * sum(shards) if strategy == "ZERO_1" else 0
    assert found["bytes"]["between_steps"] == 12 * sum(shards) + always
    assert found["bytes"]["no_sync"] == 4 * ranks * sum(shards)
    assert found["bytes"]["peak"] == most_of_a_step(strategy, ranks, prefetch)
    assert f"{strategy} over {ranks} ranks, compute in float32, optimizer adam" in printed
    root, blocks, rule = printed.splitlines()[5:8]
    assert root.split()[:4] == ["(root)", "Model", "1", "3"]
    cells = ["blocks.{0..2}", "Block", "3", "4", "126", str(ranks * shards[1] - 126), str(shards[1])]
    assert blocks.split()[:7] == cells  # equal units, once
    assert set(rule) == {"-"}


def test_equal_units_are_printed_once(capsys, tmp_path):
    printed, found = inspect(capsys, tmp_path, "inspected:uneven", "--wrap", "Block", "--world-size", "2", "--segments")
    paths = [f"blocks.{i}" for i in range(10)]
    assert [unit["path"] for unit in found["units"]] == ["", *paths]  # all of them
    lines = printed.splitlines()[6:-5]
    equal = [f"blocks.{i}" for i in (0, 1, 2, 4, 5, 6, 8, 9)]
    runs = [line.split("Block") for line in lines]
    expected = [("blocks.{0..2,4..6,8..9}", 8), ("blocks.3", 1), ("blocks.7", 1)]
    assert [(name.strip(), int(rest.split()[0])) for name, rest in runs] == expected
    totals = printed.splitlines()[-4].split()
    assert totals[:4] == ["total", "11", "43", f"{sum(unit['numel'] for unit in found['units']):,}"]
    peak = max(moment["bytes"] for moment in found["moments"] if moment["unit"] in equal)
    assert lines[0].endswith(f"{peak / 1024:.1f} KiB")


@pytest.mark.parametrize(
    ("arguments", "told"), [([], True), (["--wrap", "Block"], False), (["--min-params", "9999999"], False)]
)
def test_a_model_of_one_unit_is_told_of_the_option(capsys, tmp_path, arguments, told):
    printed, _ = inspect(capsys, tmp_path, "inspected:model", *arguments)
    assert (
        printed.endswith(
            "\nthe model is one unit: --wrap CLASS makes a unit of each module of a class, say of the blocks\n"
        )
        is told
    )


def test_one_rank_and_no_shard_hold_everything_once(capsys, tmp_path):
    for arguments in (["--world-size", "1"], ["--world-size", "6", "--strategy", "NO_SHARD"]):
        _, found = inspect(capsys, tmp_path, "inspected:model", *arguments, "--optimizer", "sgd")
        [unit] = found["units"]
        assert unit["padding"] == 0
        assert unit["bytes"]["unsharded"] == 0  # the shard is used as it is
        assert found["bytes"]["between_steps"] == 8 * sum(NUMELS)
    _, found = inspect(capsys, tmp_path, "inspected:model", "--world-size", "1", "--param-dtype", "bf16")
    assert found["units"][0]["bytes"]["unsharded"] == 2 * sum(NUMELS)


CASES = {
    "flat": ("model", ["--flat"], {}),
    "original": ("model", ["--use-orig-params"], {"use_orig_params": True}),
    "bf16": (
        "with_norms",
        ["--param-dtype", "bf16", "--use-orig-params"],
        {"use_orig_params": True, "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    ),
    "frozen": ("frozen", ["--segments"], {"segments": True}),
    "frozen together": ("frozen", ["--use-orig-params"], {"use_orig_params": True}),
    "two dtypes": ("mixed", ["--segments"], {"segments": True}),
    "tied": ("tied_within", [], {}),
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:mixed precision is off")
def test_layouts_and_bytes_are_those_of_a_wrapped_model(capsys, tmp_path, case, ranks):
    factory, arguments, settings = CASES[case]
    _, found = inspect(
        capsys, tmp_path, f"inspected:{factory}", "--wrap", "Block", "--world-size", str(ranks), *arguments
    )
    for rank in {0, ranks - 1}:
        with fake_world(ranks, rank):
            wrapped = FSDP(getattr(inspected, factory)(), auto_wrap_policy=ModuleWrapPolicy({Block}), **settings)
            compare(found, wrapped, rank)


GRIDS = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "LAYER_ZERO", "LAYER_ZERO_NESTED"]


@pytest.mark.parametrize("strategy", [*GRIDS, "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"])
def test_every_strategy_shards_as_the_runtime(capsys, tmp_path, strategy):
    grid = ["--shard-size", "3"] if strategy in GRIDS else []
    _, found = inspect(
        capsys, tmp_path, "inspected:model", "--wrap", "Block", "--world-size", "6", "--strategy", strategy, *grid
    )
    assert found["shards"] * found["replicas"] == 6
    with fake_world(6):
        mesh = init_device_mesh("cpu", (2, 3)) if grid else None
        wrapped = FSDP(
            inspected.model(),
            sharding_strategy=ShardingStrategy[strategy],
            device_mesh=mesh,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
        )
        assert wrapped._placement.replicas == found["replicas"]
        compare(found, wrapped, 0)


def test_aligned_shards_and_whole_rows_are_those_of_the_runtime(capsys, tmp_path):
    arguments = [
        "--wrap",
        "Block",
        "--world-size",
        "3",
        "--shard-alignment",
        "64",
        "--atomic-rows",
        "--use-orig-params",
    ]
    printed, found = inspect(capsys, tmp_path, "inspected:model", *arguments)
    assert "shards aligned to 64 bytes, whole rows" in printed
    with fake_world(3):
        policy = ModuleWrapPolicy({Block})
        shared = {"shard_alignment": 64, "atomic": "row", "use_orig_params": True}
        wrapped = FSDP(inspected.model(), auto_wrap_policy=policy, **shared)
        assert [unit["padding"] * 4 for unit in found["units"]] == [u.padding for u in wrapped.memory_plan().units]
        for unit, wrapper in zip(found["units"], FSDP.fsdp_modules(wrapped), strict=True):
            assert unit["shard_numel"] == sum(param.numel() for param in wrapper.params)
            offsets = [one["offset"] for segment in unit["segments"] for one in segment["parameters"]]
            assert offsets == [offset for segment in wrapper._unit.flat_params for offset in segment.layout.offsets]


def test_small_units_are_counted_as_by_the_runtime(capsys, tmp_path):
    arguments = ["inspected:model", "--wrap", "Block", "--world-size", "3", "--use-orig-params"]
    alone = inspect(capsys, tmp_path, *arguments)[1]
    printed, found = inspect(capsys, tmp_path, *arguments, "--min-unit-bytes", "1000")
    assert "units under 1000 bytes as one" in printed
    with fake_world(3):
        policy = ModuleWrapPolicy({Block})
        wrapped = FSDP(inspected.model(), auto_wrap_policy=policy, use_orig_params=True, min_unit_bytes=1000)
        planned = [(moment.phase, moment.bytes) for moment in wrapped.memory_plan().moments]
    assert [(moment["phase"], moment["bytes"]) for moment in found["moments"]] == planned
    more = [one["bytes"] - other["bytes"] for one, other in zip(found["moments"], alone["moments"], strict=True)]
    # While the first block of two runs, the buffers of both are there; then the third block comes alone.
    buffers = 2 * (found["units"][1]["bytes"]["unsharded"] + found["units"][1]["bytes"]["shard"])
    assert more[:3] == [buffers, 0, 0]
    assert buffers >= 2 * 4 * (BLOCK + BLOCK // 3)


def test_units_by_size_are_those_of_the_runtime(capsys, tmp_path):
    _, found = inspect(capsys, tmp_path, "inspected:model", "--min-params", "60", "--world-size", "2")
    with fake_world(2):
        policy = lambda module, recurse, nonwrapped_numel: nonwrapped_numel >= 60  # noqa: E731
        compare(found, FSDP(inspected.model(), auto_wrap_policy=policy), 0)
    assert len(found["units"]) > 4


def compare(found, wrapped, rank):
    """Fail unless the plan has the units, layouts and bytes of ``wrapped``, a model in a fake world."""
    wrappers = {path: module for path, module in wrapped.named_modules() if isinstance(module, FSDP)}
    paths = [path.replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".") for path in wrappers]
    assert [unit["path"] for unit in found["units"]] == paths
    for unit, wrapper in zip(found["units"], wrappers.values(), strict=True):
        assert unit["class"] == type(wrapper.module).__name__
        flats = wrapper._unit.flat_params
        assert len(unit["segments"]) == len(flats)
        assert unit["shard_numel"] == sum(param.numel() for param in wrapper.params)
        assert unit["bytes"]["shard"] == sum(param.numel() * param.itemsize for param in wrapper.params)
        for planned, real in zip(unit["segments"], flats, strict=True):
            assert planned["dtype"] == str(real.flat.dtype).removeprefix("torch.")
            assert planned["trained"] == real.flat.requires_grad
            start, numel, padding = planned["shards"][rank].values()
            assert (start, numel) == (rank * real.flat.numel() if numel else planned["numel"], numel)
            assert numel + padding == real.flat.numel()
            assert len(planned["shards"]) == real.placement.shards
            names = [(original.fqn, tuple(original.shape)) for original in real.originals]
            assert [(one["name"], tuple(one["shape"])) for one in planned["parameters"]] == names
            assert [one["offset"] for one in planned["parameters"]] == list(real.layout.offsets)
    trained = [param for wrapper in wrappers.values() for param in wrapper.params if param.requires_grad]
    for param in trained:
        param.grad = torch.zeros_like(param)
    optimizer = torch.optim.Adam(trained)
    optimizer.step()
    states = [state for of_param in optimizer.state.values() for key, state in of_param.items() if key != "step"]
    assert sum(unit["bytes"]["optimizer"] for unit in found["units"]) == sum(s.numel() * s.itemsize for s in states)
    assert sum(unit["bytes"]["gradient"] for unit in found["units"]) == sum(p.numel() * p.itemsize for p in trained)


def test_weights_that_a_factory_loads_do_not_matter(capsys, tmp_path):
    _, found = inspect(capsys, tmp_path, "inspected:with_data", "--world-size", "2")
    assert found["units"][0]["numel"] == 2 * 12


ERRORS = [
    (["nowhere.at_all:model"], "cannot import nowhere.at_all: ModuleNotFoundError"),
    (["inspected"], "expected package.module:factory, got 'inspected'"),
    (["here.py:model"], "expected package.module:factory, got the path here.py; did you mean here:model?"),
    (["./models/here.py:a.b"], "got the path ./models/here.py; did you mean models.here:a.b?"),
    (["../models/here.py:a"], "did you mean here:a, with ../models in PYTHONPATH?"),
    (["inspected:absent"], "inspected has no `absent`"),
    (["inspected:number"], "expected inspected:number to be a function that makes a module, it is a int"),
    (["inspected:ready"], "expected inspected:ready to be a function that makes a module, it is a Linear"),
    (["inspected:raises"], "inspected:raises() raised RuntimeError: no config"),
    (["inspected:leaves"], "inspected:leaves() raised SystemExit: bye"),
    (["inspected:takes"], "inspected:takes() raised TypeError: takes() missing 1 required positional argument"),
    (["inspected:makes_a_dict"], "expected inspected:makes_a_dict() to return an nn.Module, it returned a dict"),
    (["inspected:model", "--wrap", "Block,Layer"], "no module of class Layer in it; there are Block, Linear, Model"),
    (["inspected:model", "--world-size", "0"], "--world-size must be at least 1, got 0"),
    (["inspected:model", "--world-size", str(10**22)], f"--world-size must be at most 2147483647, got {10**22}"),
    (["inspected:model", "--min-params", "0"], "--min-params must be at least 1, got 0"),
    (["inspected:model", "--min-unit-bytes", "-1"], "--min-unit-bytes must be at least 0, got -1"),
    (["inspected:model", "--strategy", "HYBRID_SHARD"], "HYBRID_SHARD needs --shard-size"),
    (
        ["inspected:model", "--strategy", "HYBRID_SHARD", "--shard-size", "3"],
        "--shard-size must divide the world size, got 3 for 8 ranks",
    ),
    (["inspected:model", "--shard-size", "2"], "--shard-size is for HYBRID_SHARD and _HYBRID_SHARD_ZERO2"),
    (["inspected:mixed"], "unit (root) cannot be made: Must flatten tensors with uniform dtype"),
    (["inspected:mixed"], "; pass --segments, or wrap them in separate units"),
    (["inspected:frozen", "--wrap", "Block"], "unit blocks.0 cannot be made: Must flatten tensors with uniform `req"),
    (["inspected:halves"], "unit (root) cannot be made: Cannot flatten parameter `table` (shape (3,), torch.uint4"),
    (["inspected:halves"], "view it as torch.uint8, or leave it out of the model that the factory makes"),
    (["inspected:empty"], "unit (root) cannot be made: "),
    (["inspected:lazy"], "parameter `1.weight` of a LazyLinear has no shape yet: let the factory run a forward"),
    (
        ["inspected:tied_below", "--wrap", "Block"],
        "parameter `blocks.0.scale` of the unit of Block at `blocks.0` is shared with `extra`",
    ),
    (
        ["inspected:tied_beside", "--wrap", "Block"],
        "parameter `blocks.2.inner.weight` of the unit of Block at `blocks.2` is shared with `blocks.0.inner.weight`",
    ),
    (
        ["inspected:model", "--shard-alignment", "24"],
        "expected --shard-alignment to be a power of two of bytes, got 24",
    ),
    (["inspected:model", "--json", "no/such/folder/plan.json"], "No such file or directory"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), ERRORS, ids=lambda value: None if isinstance(value, str) else value[0]
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    assert main(["inspect", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("flatparam inspect: ")
    assert message in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: package.module:factory"),
        (["a:b", "--world-size", "two"], "invalid int value: 'two'"),
        (["a:b", "--strategy", "ZERO_4"], "invalid choice: 'ZERO_4'"),
        (["a:b", "--wrap", "Block", "--min-params", "3"], "not allowed with argument"),
        (["a:b", "--flat", "--use-orig-params"], "not allowed with argument"),
    ],
)
def test_bad_options_are_one_line_and_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *arguments])
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert message in line


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{name}" in text for name in ("world-size", "strategy", "wrap", "param-dtype", "optimizer", "png"))
    assert not any(f"default: {value}" in " ".join(text.split()) for value in (None, False))
    assert main(["--help"]) == 0
    assert "inspect" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "LAYER_ZERO"])
def test_labels_of_the_picture_do_not_overlap(capsys, monkeypatch, tmp_path, strategy):
    texts = inspected.drawn_texts(monkeypatch)
    arguments = ["inspected:uneven", "--wrap", "Block", "--segments", "--strategy", strategy]
    arguments += ["--shard-size", "4"] if strategy == "LAYER_ZERO" else []
    assert main(["inspect", *arguments, "--png", str(tmp_path / "plan.png")]) == 0
    names = {text for text, _ in texts}
    assert {"(root)", "blocks.{0..2,4..6,8..9} (8 units)", "blocks.3", "blocks.7", "ZERO_1"} <= names
    legend = {"parameter 1, 3, 5, ...", "padding", "end of a shard", "optimizer state", "between steps"}
    assert legend <= names
    assert inspected.overlapping(texts) == []
    demo = ["examples.demo.model:default_model", "--wrap", "Block"]  # its numbers of elements are long
    assert main(["inspect", *demo, "--png", str(tmp_path / "plan.png")]) == 0
    assert inspected.overlapping(texts) == []


def test_without_matplotlib_it_says_what_to_install(capsys, monkeypatch, tmp_path):
    inspected.without_matplotlib(monkeypatch, "flatparam.inspect.picture")
    path = tmp_path / "plan.png"
    assert main(["inspect", "inspected:model", "--png", str(path)]) == 2
    assert capsys.readouterr().err == "flatparam inspect: --png needs matplotlib: pip install 'matplotlib>=3.7'\n"
    assert not path.exists()
    assert main(["inspect", "inspected:model"]) == 0


@pytest.mark.multiprocess
def test_the_command_draws_the_demo(tmp_path):
    picture, plan = tmp_path / "plan.png", tmp_path / "plan.json"
    arguments = ["examples.demo.model:default_model", "--wrap", "Block", "--strategy", "HYBRID_SHARD"]
    arguments += ["--world-size", "5000", "--shard-size", "1000", "--png", str(picture), "--json", str(plan)]
    command = [sys.executable, "-m", "flatparam", "inspect", *arguments]
    done = forked_scripts.completed(command, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert (done.returncode, done.stderr) == (0, "")
    assert "HYBRID_SHARD over 5000 ranks (1000 share a parameter)" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    width, depth, context = 128, 6, 64
    block = 12 * width * width + 13 * width
    root = 2 * 256 * width + context * width + 2 * width
    found = json.loads(plan.read_text())
    assert [unit["numel"] for unit in found["units"]] == [root] + depth * [block]
