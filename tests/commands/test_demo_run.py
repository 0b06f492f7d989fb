"""Whole small runs of the demo: their output and files, against a training loop written without the demo."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import forked_scripts
import pytest
import torch
import torch.nn.functional as F

import flatparam.checkpoint
from examples.demo import cli, data, model

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, "-m", "examples.demo"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked_scripts.completed([*DEMO, *arguments], cwd=ROOT, timeout=240)


@pytest.fixture
def one_thread():
    """As many threads as the demo's processes have: with more, sums are taken in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, run("--quick", "--out", str(out))


def test_a_run_reports_equality_and_writes_its_files(quick):
    out, done = quick
    assert done.returncode == 0, done.stdout + done.stderr
    assert "flatparam to torch FSDP1, max |difference|: losses 0, final parameters 0, optimizer state 0" in done.stdout
    assert "flatparam to unsharded, max |difference|: losses 0, final parameters 0 (must be 0)" in done.stdout
    assert (
        "flatparam killed, and resumed at step 6 of 12, to uninterrupted, max |difference|: losses 0, " in done.stdout
    )
    assert "5 more steps: max |difference| of losses 0" in done.stdout
    assert "threads in every process: 1" in done.stdout
    assert "torch FSDP1: torch's FullyShardedDataParallel on torch's FlatParamHandle\n" in done.stdout
    assert "flatparam: flatparam's FullyShardedDataParallel\n" in done.stdout
    assert "FAILED" not in done.stdout
    assert (out / "report.txt").read_text().strip() in done.stdout
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint", "demo.png", "report.txt"]


def test_sharding_halves_the_bytes_of_a_rank(quick):
    _, done = quick
    rows = {
        match[1].strip(): [int(number.replace(",", "")) for number in match[2].split()]
        for match in re.finditer(r"^(unsharded|[a-zA-Z 0-9]+ rank \d) +([\d,]+(?: +[\d,]+){2})$", done.stdout, re.M)
    }
    assert len(rows) == 5
    weights = sum(parameter.numel() for parameter in model.GPT(cli.QUICK).parameters())
    assert rows["unsharded"][:2] == [4 * weights, 4 * weights]
    for run_name in ("torch FSDP1", "flatparam"):
        ranks = [rows[f"{run_name} rank {rank}"] for rank in (0, 1)]
        assert 4 * weights <= ranks[0][0] + ranks[1][0] <= 4 * weights + 256  # padding at most
        assert all(rank[0] == rank[1] and rank[2] < rows["unsharded"][2] * 0.51 for rank in ranks)


def plain_steps(gpt, optimizer, corpus, steps):
    """The demo's training, written without it: one plain model, the mean of two half batches. Yields the losses."""
    settings = cli.QUICK
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        halves = []
        losses = []
        for rank in range(2):
            gpt.zero_grad()
            rows = corpus.training_batch(step, rank)
            loss = F.cross_entropy(gpt(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            (loss / 2).backward()
            losses.append(loss.item())
            halves.append([parameter.grad.clone() for parameter in gpt.parameters()])
        for parameter, a, b in zip(gpt.parameters(), *halves, strict=True):
            parameter.grad = a + b
        optimizer.step()
        yield losses


def new_adamw(gpt):
    return torch.optim.AdamW(gpt.parameters(), betas=(0.9, 0.95), weight_decay=0.1)


@pytest.mark.usefixtures("one_thread")
def test_the_checkpoint_is_that_of_a_plain_loop_which_goes_on_from_it(quick):
    out, _ = quick
    corpus = data.Corpus(cli.QUICK, data.load_text())
    oracle = model.GPT(cli.QUICK)
    optimizer = new_adamw(oracle)
    list(plain_steps(oracle, optimizer, corpus, range(cli.QUICK.steps)))
    loaded = model.GPT(dataclasses.replace(cli.QUICK, seed=99))
    reloaded = new_adamw(loaded)
    found = flatparam.checkpoint.load(out / "checkpoint", loaded, reloaded)
    assert found.extra == {"step": cli.QUICK.steps}
    assert found.world_size == cli.QUICK.ranks
    for name, value in oracle.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name

    more = range(cli.QUICK.steps, cli.QUICK.steps + 4)
    assert list(plain_steps(loaded, reloaded, corpus, more)) == list(plain_steps(oracle, optimizer, corpus, more))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        "--no-orig-params --precision bf16 --strategy hybrid-shard",
        "--strategy no-shard",
        "--strategy layer-zero --micro-batches 2",
        "--ranks 3 --strategy shard-grad-op --clip 1",
        "--runtime dropin --strategy hybrid-shard-zero2",
    ],
)
def test_other_settings_hold_their_checks_too(options, tmp_path):
    done = run("--quick", "--steps", "6", "--out", str(tmp_path), *options.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses 0, final parameters 0, optimizer state 0 (must be 0)" in done.stdout
    assert "flatparam killed, and resumed at step 0 of 6, to uninterrupted, max |difference|: losses 0" in done.stdout
    assert ("sums in another order" in done.stdout) == ("--clip" in options)
    dropin = "flatparam: torch's FullyShardedDataParallel on flatparam's FlatParamHandle\n"
    assert (dropin in done.stdout) == ("dropin" in options)


@pytest.mark.thorough
def test_an_exception_in_a_rank_ends_the_demo_in_one_clear_line(tmp_path):
    (tmp_path / "checkpoint").mkdir()  # which no checkpoint may replace
    done = run("--quick", "--steps", "2", "--out", str(tmp_path))
    assert done.returncode == 1
    assert re.search(r"flatparam rank \d failed: CheckpointError: .*is no checkpoint", done.stderr.splitlines()[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
