"""The parts of the demo by themselves: text, model, a step, memory, checkpoints, checks, options."""

import dataclasses
import itertools
import math
import pickle
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flatparam.__main__
from examples.demo import (
    checkpoint,
    cli,
    config,
    data,
    experiment,
    memory,
    messages,
    model,
    plot,
    report,
    train,
    worker,
)

TINY = dataclasses.replace(cli.QUICK, context=16)


# -- the parts


def test_training_and_validation_text_do_not_overlap():
    text = data.load_text()
    assert 300_000 < len(text) < 1_000_000
    corpus = data.Corpus(TINY, text)
    row = TINY.context + 1
    assert len(corpus.training) + len(corpus.validation) + 2 * (row - 1) == len(text)  # all windows but those astride
    assert (
        bytes(corpus.training[0].tolist() + corpus.training[-1].tolist())
        == text[:row] + text[: -(len(text) // 10)][-row:]
    )
    assert bytes(corpus.validation[0].tolist()) == text[-(len(text) // 10) :][:row]
    assert bytes(corpus.validation[-1].tolist()) == text[-row:]


def test_batches_follow_from_seed_step_and_rank():
    corpus, again = (data.Corpus(TINY, data.load_text()) for _ in range(2))
    other_seed = data.Corpus(dataclasses.replace(TINY, seed=1), data.load_text())
    batch = corpus.training_batch(3, 1)
    assert batch.shape == (TINY.batch, TINY.context + 1)
    assert torch.equal(batch, again.training_batch(3, 1))
    for different in (corpus.training_batch(4, 1), corpus.training_batch(3, 0), other_seed.training_batch(3, 1)):
        assert not torch.equal(batch, different)


def test_validation_rows_are_spread_over_the_whole_part_and_shared_out():
    text = bytes(torch.randint(256, (20_000,), generator=torch.Generator().manual_seed(0)).tolist())
    corpus = data.Corpus(TINY, text)
    shares = [corpus.validation_batches(rank) for rank in range(TINY.ranks)]
    assert [len(share) for share in shares] == [TINY.validation_batches] * TINY.ranks
    starts = [text.index(bytes(row.tolist())) for share in shares for rows in share for row in rows]
    assert len(set(starts)) == TINY.ranks * TINY.validation_batches * TINY.batch
    assert min(starts) == 18_000
    assert max(starts) == 20_000 - (TINY.context + 1)


def test_a_text_too_short_for_the_context_is_refused():
    with pytest.raises(ValueError, match="expected at least 17 bytes of validation text, got 10"):
        data.Corpus(TINY, b"x" * 100)


def test_the_default_model_is_as_large_as_promised():
    weights = sum(parameter.numel() for parameter in model.GPT(cli.DEFAULTS).parameters())
    assert 1_000_000 < weights < 3_000_000


def test_a_byte_changes_no_logits_before_it():
    gpt = model.GPT(TINY)
    tokens = torch.arange(TINY.context)[None]
    changed = tokens.clone()
    changed[0, 9] = 200
    before, after = gpt(tokens), gpt(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9], after[0, 9])


class Devices(TorchDispatchMode):
    """Notes where the operands of each operation are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen = getattr(self, "seen", set()) | {a.device.type for a in tree_leaves(args) if isinstance(a, Tensor)}
        return func(*args, **(kwargs or {}))


def test_the_model_computes_on_the_device_of_its_parameters():
    gpt, rows = model.GPT(config.Config()).to("meta"), torch.zeros(2, 9, dtype=torch.int64, device="meta")
    with Devices() as devices:
        model.loss_of(gpt, rows)
    assert devices.seen == {"meta"}


def test_an_untrained_model_knows_nothing():
    rows = data.Corpus(TINY, data.load_text()).training_batch(0, 0)
    assert model.loss_of(model.GPT(TINY), rows).item() == pytest.approx(config.UNIFORM_LOSS, abs=0.1)


def test_generated_text_goes_on_from_the_prompt_and_follows_from_the_seed():
    gpt = model.GPT(TINY)
    texts = [model.generate(gpt, b"The ", 40, seed) for seed in (0, 0, 1)]
    assert texts[0].startswith("The ")
    assert len(texts[0]) > 4
    assert texts[0] == texts[1] != texts[2]


def test_learning_rate_warms_up_then_falls_to_a_tenth():
    settings = dataclasses.replace(TINY, steps=100, learning_rate=1.0)
    rates = [settings.learning_rate_at(step) for step in range(120)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert all(a > b for a, b in itertools.pairwise(rates[10:101]))
    assert rates[55] == pytest.approx(0.55)  # half way down
    assert rates[100:] == pytest.approx([0.1] * 20)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 1e-2)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_unsharded_run_averages_the_gradients_of_the_shares(ranks, precision, tolerance):
    settings = dataclasses.replace(TINY, ranks=ranks, precision=precision)
    trainer = train.Unsharded(settings, data.Corpus(settings, data.load_text()))
    oracle = model.GPT(settings)
    rows = torch.cat([trainer.corpus.training_batch(0, share) for share in range(ranks)])
    loss = model.loss_of(oracle, rows)
    loss.backward()
    losses = trainer.step(0)
    assert len(losses) == ranks
    assert sum(losses) / ranks == pytest.approx(loss.item(), rel=max(tolerance, 1e-5))
    for parameter, expected in zip(trainer.model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=tolerance, atol=tolerance)


def test_clipping_bounds_the_norm_of_the_gradient():
    settings = dataclasses.replace(TINY, clip=1e-3)
    trainer = train.Unsharded(settings, data.Corpus(settings, data.load_text()))
    trainer.step(0)
    norms = torch.stack([parameter.grad.norm() for parameter in trainer.model.parameters()])
    assert norms.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_bytes_count_each_storage_once_and_whole():
    flat = torch.zeros(100)
    assert memory.tensor_bytes([flat[:10], flat[20:30], None, torch.zeros(3, dtype=torch.bfloat16)]) == 400 + 6


@pytest.mark.parametrize(("device", "synchronized"), [("cpu", []), ("cuda", [1, 2, 3])])
def test_a_gpu_is_waited_for_after_each_step(device, synchronized, monkeypatch):
    steps, seen = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append(len(steps)))
    made = worker.Worker.__new__(worker.Worker)
    made._config = dataclasses.replace(TINY, device=device)
    made._trainer = SimpleNamespace(step=lambda step: steps.append(step) or [0.0])
    made.train(4, 3)
    assert (steps, seen) == ([4, 5, 6], synchronized)


# -- checkpoints


def test_a_write_that_fails_keeps_the_old_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.write_atomically({"step": 1}, path)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        checkpoint.write_atomically({"step": 2, "model": lambda: None}, path)
    assert checkpoint.read(path) == {"step": 1}


def test_a_checkpoint_of_a_plain_model_goes_back_into_one(tmp_path):
    corpus = data.Corpus(TINY, data.load_text())
    first, second = (train.Unsharded(dataclasses.replace(TINY, seed=seed), corpus) for seed in (0, 1))
    first.step(0)
    checkpoint.save(tmp_path / "checkpoint", first.model, first.optimizer, 1)
    assert checkpoint.restore(tmp_path / "checkpoint", second.model, second.optimizer) == 1
    assert second.step(1) == first.step(1)
    states = [checkpoint.full_state(trainer.model, trainer.optimizer) for trainer in (first, second)]
    assert checkpoint.difference(states[0]["model"], states[1]["model"]) == 0
    assert checkpoint.difference(states[0]["optimizer"]["state"], states[1]["optimizer"]["state"]) == 0


def test_states_that_differ_are_told_apart():
    a = {"w": {"x": torch.zeros(3), "y": torch.ones(2)}}
    assert checkpoint.difference(a, {"w": {"x": torch.zeros(3), "y": torch.ones(2)}}) == 0.0
    assert checkpoint.difference(a, {"w": {"x": torch.tensor([0, 0, -0.25]), "y": torch.ones(2)}}) == 0.25
    assert checkpoint.difference(a, {"w": {"x": torch.full((3,), math.nan), "y": torch.ones(2)}}) == math.inf
    assert checkpoint.difference(a, {"w": {"x": torch.tensor([0.0, 0.0, -0.0]), "y": torch.ones(2)}}) > 0.0
    with pytest.raises(ValueError, match=r"got \['y'\] in one only"):
        checkpoint.difference(a, {"w": {"x": torch.zeros(3)}})


# -- the report


def results(**changes: object) -> experiment.Results:
    """What a faultless run of three steps would give, with ``changes``."""
    runs = {
        name: experiment.Run(
            losses=[[5.0, 5.5], [4.0, 4.5], [3.0, 3.5]],
            extra_losses=[[2.0, 2.5]],
            block_seconds=[0.1],
            step_seconds=[0.1, 0.1, 0.1],
            validation=[(0, 5.5), (3, 2.0)],
            memory=[messages.Memory(4, 4, 8, None)],
            host=[] if name == messages.UNSHARDED else [(0.001, 0.002)],
        )
        for name in messages.RUNS
    }
    made = experiment.Results(
        facts=[messages.Facts("2", 1, 1, name, "an engine", "cpu") for name in messages.RUNS],
        runs=runs,
        checkpoint=Path("checkpoint"),
        to_torch=messages.Difference(0.0, 0.0),
        to_unsharded=messages.Difference(0.0, 0.0),
        resumed_step=1,
        resumed_losses=[[4.0, 4.5], [3.0, 3.5]],
        to_uninterrupted=messages.Difference(0.0, 0.0),
        reloaded_step=3,
        reloaded_losses=[[2.0, 2.5]],
        sample="text",
    )
    return dataclasses.replace(made, **changes)


THREE_STEPS = config.Config(steps=3, target_steps=3)


def test_a_faultless_run_passes_every_check():
    assert [check.text for check in report.checks(THREE_STEPS, results()) if not check.holds] == []


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({"to_torch": messages.Difference(1e-9, 0.0)}, "to torch FSDP1"),
        ({"to_torch": messages.Difference(0.0, 1e-9)}, "to torch FSDP1"),
        ({"to_unsharded": messages.Difference(1e-9, 0.0)}, "to unsharded"),
        ({"resumed_losses": [[4.0, 4.5], [3.0, 3.6]]}, "to uninterrupted"),
        ({"resumed_losses": []}, "to uninterrupted"),
        ({"resumed_step": 2}, "to uninterrupted"),
        ({"to_uninterrupted": messages.Difference(math.ulp(0.0), 0.0)}, "to uninterrupted"),
        ({"to_uninterrupted": messages.Difference(0.0, math.ulp(0.0))}, "to uninterrupted"),
        ({"reloaded_losses": [[2.0, 2.6]]}, "in a plain model"),
        ({"reloaded_losses": []}, "in a plain model"),
        ({"reloaded_step": 2}, "in a plain model"),
        ({"facts": [messages.Facts("2", threads, 1, messages.TORCH, "", "cpu") for threads in (1, 2)]}, "threads"),
    ],
)
def test_a_fault_fails_its_check_and_no_other(change, failing):
    failed = [check.text for check in report.checks(THREE_STEPS, results(**change)) if not check.holds]
    assert len(failed) == 1
    assert failing in failed[0]


@pytest.mark.parametrize("loss", [3.500001, math.nan])
def test_one_different_loss_of_flatparam_fails_both_comparisons(loss):
    found = results()
    found.runs[messages.FLATPARAM].losses[0] = [5.0, loss]  # of a step before the one that it is resumed at
    failed = [check.text for check in report.checks(THREE_STEPS, found) if not check.holds]
    assert [text.split(",")[0] for text in failed] == ["flatparam to torch FSDP1", "flatparam to unsharded"]


def test_a_loss_that_does_not_fall_fails():
    found = results()
    found.runs[messages.FLATPARAM].validation = [(0, 5.5), (3, 5.6)]
    failed = [check.text for check in report.checks(THREE_STEPS, found) if not check.holds]
    assert [text.split(" nats")[0] for text in failed] == [
        "validation loss falls: 5.500 to 5.600",
        "validation loss is below 2.4",
    ]


def test_tables_are_aligned():
    assert (
        report.table([["a", "long head", "b"], ["first", "1", "22"]])
        == "a       long head    b\nfirst           1   22"
    )


def test_a_sample_cannot_disturb_the_terminal():
    text = report.report(THREE_STEPS, results(sample="a\x1b[2Jb\n\tc"), [])
    assert text.endswith("  | a·[2Jb\n  | ·c")


@pytest.mark.parametrize(
    ("device", "name", "peaks"),
    [("cpu", "cpu", 0), ("cuda", "NVIDIA H100", 1)],
)
def test_the_device_is_named_and_the_peak_of_a_gpu(device, name, peaks, tmp_path, monkeypatch):
    settings = dataclasses.replace(THREE_STEPS, device=device)
    found = results(facts=[messages.Facts("2", 1, 1, run, "an engine", name) for run in messages.RUNS])
    for run in found.runs.values():
        run.memory = [messages.Memory(4, 4, 8, (1 << 20) if device == "cuda" else None)]
        run.losses = [[3 + math.sin(step * step)] for step in range(450)]  # as long and as rough as a real curve
    text = report.report(settings, found, [])
    assert f"ranks: 2, on {name}; full-shard, fp32" in text
    assert text.count("peak") == text.count("peak allocated on the GPU") == peaks
    assert text.count("1,048,576") == 3 * peaks
    titles = []
    monkeypatch.setattr(Axes, "set", lambda self, title, **_: titles.append(title))
    plot.draw(settings, found, tmp_path / "demo.png")
    assert "host time (x of bare)" in titles
    assert not [title for title in titles if "peak" in title]
    picture = (tmp_path / "demo.png").read_bytes()
    assert struct.unpack(">II", picture[16:24]) == (800, 600)  # width and height in a PNG's head
    assert len(picture) < 80_000


def test_a_wrapped_pass_that_is_faster_than_the_bare_one_has_no_negative_cost():
    found = results()
    found.runs[messages.FLATPARAM].host = [(0.00201, 0.002)]
    text = report.report(THREE_STEPS, found, [])
    assert re.search(r"^flatparam +3\.2500 +2\.0000 +100\.0 +2\.00 +1\.00$", text, re.M), text
    assert not re.search(r"-\d", text)


# -- the command line


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    options = (
        "ranks steps width depth context batch micro-batches runtime strategy precision "
        "orig-params clip lr seed threads out quick kill"
    )
    for option in options.split():
        assert f"--{option}" in printed
    assert "full-shard" in printed
    assert "450" in printed
    assert not any(f"default: {value}" in " ".join(printed.split()) for value in (None, False))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--ranks 0", "--ranks must be at least 1, got 0"),
        ("--steps -5", "--steps must be at least 1, got -5"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--width 100", "--width must be a multiple of 32 (one head), got 100"),
        ("--context 100000", "--context must be at most 4096, got 100000"),
        ("--lr nan", "--lr must be a positive number, got nan"),
        ("--clip 0", "--clip must be a positive number, got 0.0"),
        ("--seed -1", "--seed must be from 0 to 2**32 - 1, got -1"),
        ("--threads 0", "--threads must be at least 1, got 0"),
        ("--runtime fast", "argument --runtime: invalid choice: 'fast'"),
        ("--strategy zero", "argument --strategy: invalid choice: 'zero'"),
        ("--micro-batches 0", "--micro-batches must be at least 1, got 0"),
        ("--strategy layer-zero --ranks 3", "--ranks must be even"),
        ("--strategy zero-1 --runtime dropin", "is not one of torch's: it needs --runtime flatparam"),
        ("--precision fp8", "argument --precision: invalid choice: 'fp8'"),
        ("--strategy hybrid-shard --ranks 3", "--ranks must be even"),
        ("--device cuda --ranks 1000", "--device cuda takes a GPU for each of 1000 ranks, there are "),
        ("--kill --ranks 1", "--kill leaves a rank fewer: --ranks must be at least 2, got 1"),
        ("--kill --runtime dropin", "--kill needs --device cpu, --runtime flatparam and --strategy full-shard"),
        ("--kill --quick", "argument --quick: not allowed with argument --kill"),
        ("--out /dev/null/x", "Not a directory"),
        ("--colour red", "unrecognized arguments: --colour red"),
    ],
)
def test_a_bad_option_is_refused_in_one_line_before_a_process_starts(arguments, says, capsys, monkeypatch):
    monkeypatch.setattr(cli, "demo", lambda config: pytest.fail("it starts"))
    try:
        status = cli.main(arguments.split())
    except SystemExit as stopped:
        status = stopped.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("examples.demo: ")
    assert says in captured.err


@pytest.mark.parametrize(("arguments", "says"), [([], "got nothing"), (["dmeo"], "got 'dmeo'")])
def test_an_unknown_command_is_refused_in_one_line(arguments, says, capsys):
    status = flatparam.__main__.main(arguments)
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert says in printed.err
    assert "inspect" in printed.err


def test_quick_changes_defaults_but_not_what_is_given():
    settings = cli.parse(["--quick", "--steps", "7", "--out", "x"])
    assert settings == dataclasses.replace(cli.QUICK, steps=7, out=Path("x"))
    assert cli.parse([]) == cli.DEFAULTS


@pytest.mark.parametrize(
    ("gpus", "arguments", "ranks"),
    [(1, [], 1), (8, [], 2), (4, ["--ranks=4"], 4), (8, ["--ranks", "4"], 4)],
)
def test_there_are_no_more_ranks_than_gpus(gpus, arguments, ranks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert cli.parse(["--device", "cuda", *arguments]).ranks == ranks


@pytest.mark.parametrize(("gpus", "arguments", "ranks"), [(0, [], 2), (1, ["--ranks=4"], 4)])
def test_more_ranks_than_gpus_are_refused(gpus, arguments, ranks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(config.BadSetting, match=f"a GPU for each of {ranks} ranks, there are {gpus}"):
        cli.parse(["--device", "cuda", *arguments])
