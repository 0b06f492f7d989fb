"""The report: checks, which hold or not, and tables."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from .config import UNIFORM_LOSS, Config
from .experiment import Results, Run
from .messages import FLATPARAM, TORCH, UNSHARDED

CLOSE = 0.05  # nats, where sums in another order keep sharded from equalling unsharded training bit for bit


@dataclass(frozen=True)
class Check:
    """One statement and whether it held."""

    holds: bool
    text: str


def largest_difference(a: list[list[float]], b: list[list[float]]) -> float:
    """The largest absolute difference of two loss curves; infinite where one is not finite or they differ in length."""
    if [len(row) for row in a] != [len(row) for row in b]:
        return math.inf
    pairs = [(x, y) for row, other in zip(a, b, strict=True) for x, y in zip(row, other, strict=True)]
    return max((abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf for x, y in pairs), default=math.inf)


def checks(config: Config, results: Results) -> list[Check]:
    """Return the checks of all claims of the demo."""
    runs, ours = results.runs, results.runs[FLATPARAM]
    to_torch = largest_difference(ours.losses, runs[TORCH].losses)
    to_unsharded = largest_difference(ours.losses, runs[UNSHARDED].losses)
    again = largest_difference(ours.losses[results.resumed_step :], results.resumed_losses)
    reloaded = largest_difference(ours.extra_losses, results.reloaded_losses)
    first, last = ours.validation[0][1], ours.validation[-1][1]
    limit = 0.0 if config.exact else CLOSE
    must = "must be 0" if config.exact else f"losses at most {CLOSE}: sums in another order"
    torch_limit = 0.0 if config.as_torch else CLOSE
    torch_must = (
        "must be 0" if config.as_torch else f"losses at most {CLOSE}: torch's {config.torch_strategy} adds otherwise"
    )
    threads = {fact.threads for fact in results.facts}
    found = [
        Check(len(threads) == 1, f"threads in every process: {', '.join(map(str, sorted(threads)))}"),
        Check(
            to_torch <= torch_limit
            and (not config.as_torch or results.to_torch.weights == results.to_torch.optimizer == 0),
            f"flatparam to torch FSDP1, max |difference|: losses {to_torch:g}, final parameters "
            f"{results.to_torch.weights:g}, optimizer state {results.to_torch.optimizer:g} ({torch_must})",
        ),
        Check(
            to_unsharded <= limit and (not config.exact or results.to_unsharded.weights == 0),
            f"flatparam to unsharded, max |difference|: losses {to_unsharded:g}, final parameters "
            f"{results.to_unsharded.weights:g} ({must})",
        ),
        Check(
            again == results.to_uninterrupted.weights == results.to_uninterrupted.optimizer == 0,
            f"flatparam killed, and resumed at step {results.resumed_step} of {config.steps}, to uninterrupted, "
            f"max |difference|: losses {again:g}, final parameters {results.to_uninterrupted.weights:g}, "
            f"optimizer state {results.to_uninterrupted.optimizer:g} (must be 0, bit for bit)",
        ),
        Check(
            reloaded <= limit and results.reloaded_step == config.steps,
            f"{results.checkpoint} in a plain model, {len(results.reloaded_losses)} more steps: max |difference| of "
            f"losses {reloaded:g} ({must})",
        ),
        Check(
            last < first,
            f"validation loss falls: {first:.3f} to {last:.3f} nats a byte (uniform: {UNIFORM_LOSS:.2f})",
        ),
    ]
    if config.loss_to_reach is not None:
        found.append(Check(last < config.loss_to_reach, f"validation loss is below {config.loss_to_reach} nats a byte"))
    return found


def printable(text: str) -> str:
    """Replace each character of ``text`` that could disturb a terminal by a dot."""
    return "".join(char if char.isprintable() else "·" for char in text)


def table(rows: list[list[str]]) -> str:
    """Rows of cells in aligned columns: the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("   ".join(cells).rstrip())
    return "\n".join(lines)


def runs_table(results: Results) -> str:
    """One row a run: losses, step time and host cost."""
    rows = [["run", "train loss", "validation", "step (ms)", "host: pass (ms)", "x of bare"]]
    for name, run in results.runs.items():
        host = ["-", "-"] if name == UNSHARDED else host_cells(run)
        step = f"{1e3 * statistics.median(run.step_seconds):.1f}"
        rows.append([name, f"{run.mean_losses[-1]:.4f}", f"{run.validation[-1][1]:.4f}", step, *host])
    return table(rows)


def host_cells(run: Run) -> list[str]:
    """Return the time of a wrapped pass, and its ratio to the bare module's: medians, taken in turn."""
    return [f"{1e3 * statistics.median(wrapped for _, wrapped in run.host):.2f}", f"{run.host_ratio:.2f}"]


def memory_table(config: Config, results: Results) -> str:
    """One row a process: bytes of tensors, and on GPUs the peak. A CPU's resident memory is mostly imports."""
    peak = ["peak allocated on the GPU"] if config.device == "cuda" else []
    rows = [["bytes in each process", "parameters", "gradients", "optimizer state", *peak]]
    for name, run in results.runs.items():
        for rank, memory in enumerate(run.memory):
            numbers = [memory.parameters, memory.gradients, memory.optimizer]
            if memory.peak is not None:
                numbers.append(memory.peak)
            label = name if name == UNSHARDED else f"{name} rank {rank}"
            rows.append([label, *(f"{number:,}" for number in numbers)])
    return table(rows)


def block_ratio(runs: dict[str, Run]) -> str:
    """Step time of flatparam over torch FSDP1 in pairs of blocks, without the first pair (warm-up)."""
    pairs = list(zip(runs[FLATPARAM].block_seconds, runs[TORCH].block_seconds, strict=True))
    ratios = [ours / theirs for ours, theirs in pairs[1:] or pairs]
    low, middle, high = statistics.quantiles(ratios * 2, n=4)  # twice: quantiles() refuses a single one
    return f"{middle:.3f} (median of {len(ratios)} pairs of blocks; middle half {low:.3f} to {high:.3f})"


def report(config: Config, results: Results, found: list[Check]) -> str:
    """The text at the end of a demo."""
    runs = results.runs
    weights = results.facts[0].weights
    micro = f"{config.micro_batches} micro-batches x " if config.micro_batches > 1 else ""
    devices = " and ".join(sorted({fact.device for fact in results.facts}))
    same = config.strategy == config.torch_strategy
    strategy = config.strategy + ("" if same else f" (torch FSDP1, which has none: {config.torch_strategy})")
    return "\n".join(
        [
            f"GPT of {weights:,} parameters ({config.depth} blocks of width {config.width}); {config.steps} steps of "
            f"{config.ranks} x {micro}{config.batch} x {config.context} bytes; seed {config.seed}",
            *(f"{run}: {' and '.join(sorted(names))}" for run, names in results.engines.items()),
            f"{config.backend} ranks: {config.ranks}, on {devices}; {strategy}, {config.precision}, clipping "
            f"{config.clip or 'off'}; threads in every process: {config.threads}; torch {results.facts[0].torch}",
            "",
            runs_table(results),
            f"step: median, blocks of {config.block} steps in turns; flatparam / torch FSDP1 = {block_ratio(runs)}",
            "host: forward and backward of 8 bytes over a fake process group, and of the bare module in turn",
            "",
            memory_table(config, results),
            "",
            *(f"[{'ok' if check.holds else 'FAILED'}] {check.text}" for check in found),
            "",
            "sample of the reloaded model:",
            *(f"  | {printable(line)}" for line in results.sample.split("\n")),
        ]
    )
