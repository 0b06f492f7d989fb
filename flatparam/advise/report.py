"""The printed report of ``advise``, and its JSON."""

from typing import Any

import torch
from torch import nn

from ..common.redundancy import MOST
from ..common.tables import aligned, human
from ..inspect.planning import names_of
from .candidates import Candidate, Question

HEADINGS = (
    *("strategy", "units", "inner", "micro-batches", "reduced", "memory"),
    *("sent in node", "between nodes", "step", "compute"),
)


def seconds(value: float) -> str:
    """Return a time with three digits and its unit."""
    scaled, unit = (value, "s") if value >= 1 else (value * 1e3, "ms") if value >= 1e-3 else (value * 1e6, "us")
    return f"{scaled:.{max(0, 3 - len(str(int(scaled))))}f} {unit}"


def by_speed(found: list[Candidate]) -> list[Candidate]:
    """Sort candidates: first those within 1 % of the fastest, by memory; then the others, by time."""
    as_fast = 1.01 * min((one.seconds for one in found), default=0.0)
    return sorted(found, key=lambda one: (max(one.seconds, as_fast), one.memory, one.seconds))


def front(found: list[Candidate]) -> list[Candidate]:
    """Return the Pareto front: no other candidate is as small and faster, or as fast and smaller. Smallest first."""
    kept: list[Candidate] = []
    for one in sorted(found, key=lambda one: (one.memory, one.seconds)):
        if not kept or one.seconds < kept[-1].seconds:
            kept.append(one)
    return kept


def best_of_each(found: list[Candidate]) -> list[Candidate]:
    first: dict[str, Candidate] = {}
    for candidate in found:
        first.setdefault(candidate.strategy, candidate)
    return list(first.values())


def units_of(candidate: Candidate) -> str:
    """Return the number and the classes of units."""
    count = len(candidate.plan.units)
    return "whole model" if count == 1 else f"{count}: {candidate.boundary.name}"


def micro_batches(candidate: Candidate) -> str:
    return f"{candidate.micro_batches} micro-batch{'es' if candidate.micro_batches > 1 else ''}"


def table(found: list[Candidate]) -> str:
    rows: list[tuple[str, ...]] = [HEADINGS]
    for one in found:
        reduced = "" if one.micro_batches == 1 else "each" if one.reduce_each else "once"
        rows.append(
            (
                *(one.strategy, units_of(one), str(one.inner or ""), str(one.micro_batches), reduced),
                *(human(one.memory), human(round(one.intra)), human(round(one.inter))),
                *(seconds(one.seconds), f"{one.computing / one.seconds:.0%}" if one.seconds else ""),
            )
        )
    return aligned(rows, names=2, headings=1)


LEGEND = """\
units: number and class of the wrapped modules; inner: ranks that share a parameter; micro-batches: of a step;
reduced: after each micro-batch, or once in a step (no_sync); memory: peak of a rank; sent: by a rank in a step;
compute: the part of the step in which a rank computes"""


def title(model: str, numel: int, question: Question, dtypes: tuple[torch.dtype, ...]) -> str:
    """Return the first line: the model, the ranks and the options. ``dtypes``: those of its compute."""
    ranks = question.settings.world_size
    nodes = ranks // question.cluster.node
    return (
        f"{model}: {numel:,} elements, {ranks} rank{'s' if ranks > 1 else ''} in {nodes} "
        f"node{'s' if nodes > 1 else ''}, {human(question.gpu_memory)} each, compute in {names_of(dtypes)}, "
        f"optimizer {question.settings.optimizer}"
    )


def assumptions(question: Question) -> str:
    """Return the line with the assumptions behind the figures."""
    cluster = question.cluster
    counted = (
        "activations are not counted: give --activations, bytes that flatparam.advise.activations.bytes_per_token("
        "block, x, tokens=n) measures on one block, times the blocks; or about 34 x layers x width of a transformer"
        if question.activations is None
        else f"activations {question.activations:,} bytes a token"
    )
    return (
        f"assumed: {question.tokens:,} tokens a rank and step at {question.flops / 1e12:g}e12 operations/s; "
        f"{cluster.intra / 1e9:g} GB/s and {cluster.intra_latency * 1e6:g} us within a node, "
        f"{cluster.inter / 1e9:g} GB/s and {cluster.inter_latency * 1e6:g} us between; {counted}"
    )


def call(candidate: Candidate, question: Question) -> str:
    """Return the call of FullyShardedDataParallel for ``candidate``."""
    arguments = [f"sharding_strategy=ShardingStrategy.{candidate.strategy}", "use_orig_params=True"]
    if candidate.boundary.wrap:
        names = [name.rpartition(".")[2] for name in candidate.boundary.wrap]
        classes = ", ".join(names if candidate.boundary.together == 1 else ["nn.Sequential"])
        arguments.append(f"auto_wrap_policy=ModuleWrapPolicy({{{classes}}})")
    settings = question.settings
    given = {} if settings.param_dtype is None else {"param_dtype": settings.param_dtype}
    if (given or settings.reduce_dtype) and len(candidate.reduce_dtypes) == 1:  # else those of the parameters
        given["reduce_dtype"] = candidate.reduce_dtypes[0]
    if given:
        precision = ", ".join(f"{name}={dtype}" for name, dtype in given.items())
        arguments.append(f"mixed_precision=MixedPrecision({precision})")
    if settings.segments:
        arguments.append("segments=True")
    if candidate.inner is not None:
        shape = (settings.world_size // candidate.inner, candidate.inner)
        arguments.append(f'device_mesh=init_device_mesh("cuda", {shape})')
    text = f"FullyShardedDataParallel(model, {', '.join(arguments)})"
    if candidate.boundary.together > 1:
        text += f", each {candidate.boundary.together} {candidate.boundary.wrap[0]} in one nn.Sequential"
    return text


def imports(call: str, candidate: Candidate, module: nn.Module) -> str:
    """Return the imports that ``call`` needs, in one line."""
    ours = ("FullyShardedDataParallel", "MixedPrecision", "ModuleWrapPolicy", "ShardingStrategy")
    lines = [f"from flatparam import {', '.join(name for name in ours if name in call)}"]
    lines += ["import torch"] if "torch." in call else []
    lines += ["from torch import nn"] if "nn." in call else []
    lines += ["from torch.distributed.device_mesh import init_device_mesh"] if "init_device_mesh" in call else []
    classes = {type(inner).__name__: type(inner).__module__ for inner in module.modules()}
    names = [name.rpartition(".")[2] for name in candidate.boundary.wrap] if candidate.boundary.together == 1 else []
    return "; ".join([*lines, *(f"from {classes[name]} import {name}" for name in names)])


def how_to_step(candidate: Candidate, question: Question) -> str:
    """Return the micro-batches of a step, and the dtypes and the optimizer of ``candidate``."""
    tokens = f"{-(-question.tokens // candidate.micro_batches):,} tokens"
    if candidate.micro_batches == 1:
        batches = f"1 micro-batch of {tokens} a step"
    else:
        synced = "each reduced" if candidate.reduce_each else "all but the last in model.no_sync()"
        batches = f"{candidate.micro_batches} micro-batches of {tokens} a step, {synced}"
    dtypes = f"compute in {names_of(candidate.compute_dtypes)}, reduction in {names_of(candidate.reduce_dtypes)}"
    return f"{batches}; {dtypes}; optimizer {question.settings.optimizer}"


def with_elastic(candidate: Candidate, question: Question) -> str:
    """Return a line with the host memory that training with ``flatparam.elastic`` takes; one rank: nothing."""
    kept = {name: candidate.plan.kept_by_elastic(question.settings.world_size, name) for name in MOST}
    told = " or ".join(f'{human(size)} with redundancy="{name}"' for name, size in kept.items())
    return f"flatparam.elastic keeps in host memory of each rank: {told}" if any(kept.values()) else ""


def in_full_precision(candidate: Candidate, question: Question) -> str:
    """Return a line for the case that no ``--param-dtype`` was given and the model computes in fp32; else nothing."""
    if question.settings.param_dtype is not None or torch.float32 not in candidate.compute_dtypes:
        return ""
    return "the plan is in fp32, the dtype of the parameters: --param-dtype bf16 plans mixed precision"


def does_not_fit(found: list[Candidate], fitting: list[Candidate], question: Question) -> str:
    """Return a line with the least memory of each strategy without a fitting candidate; empty: each has one."""
    out = [one for one in best_of_each(found) if one.strategy not in {other.strategy for other in fitting}]
    least = ", ".join(f"{one.strategy} ({human(one.memory)} at least)" for one in out)
    return f"do not fit in {human(question.gpu_memory)}: {least}" if least else ""


def nothing_fits(found: list[Candidate], question: Question) -> str:
    """Return the line for the case that no candidate fits. ``found``: sorted by memory."""
    best = found[0]
    inner = f" in inner groups of {best.inner}" if best.inner is not None else ""
    return (
        f"nothing fits in {human(question.gpu_memory)}: the smallest, {best.strategy}{inner}, units "
        f"{best.boundary.name}, {micro_batches(best)}, takes "
        f"{human(best.memory)}, {human(best.memory - question.gpu_memory)} too much: take "
        "more ranks, or CPU offload, which is not counted here"
    )


def as_json(
    model: str, numel: int, question: Question, fitting: list[Candidate], too_large: list[Candidate]
) -> dict[str, Any]:
    """Return the report as plain types. Sizes are in bytes and times in seconds, of a rank in one step."""
    cluster, settings = question.cluster, question.settings
    return {
        "model": model,
        "numel": numel,
        "world_size": settings.world_size,
        "gpu_memory": question.gpu_memory,
        "param_dtype": None if settings.param_dtype is None else str(settings.param_dtype).removeprefix("torch."),
        "reduce_dtype": None if settings.reduce_dtype is None else str(settings.reduce_dtype).removeprefix("torch."),
        "optimizer": settings.optimizer,
        "assumed": {
            "tokens": question.tokens,
            "flops": question.flops,
            "activations": question.activations,
            "node_size": cluster.node,
            "bytes_per_second": {"intra": cluster.intra, "inter": cluster.inter},
            "latency": {"intra": cluster.intra_latency, "inter": cluster.inter_latency},
        },
        "fitting": [_entry(one, settings.world_size) for one in fitting],
        "too_large": [_entry(one, settings.world_size) for one in too_large],
    }


def _entry(one: Candidate, world_size: int) -> dict[str, Any]:
    return {
        "strategy": one.strategy,
        "inner": one.inner,
        "wrap": list(one.boundary.wrap),
        "together": one.boundary.together,
        "units": len(one.plan.units),
        "micro_batches": one.micro_batches,
        "reduce_each": one.reduce_each,
        "memory": {
            "total": one.memory,
            "between_steps": one.plan.between_steps,
            "peak": one.peak,
            "activations": one.activations,
            "kept_by_elastic": {name: one.plan.kept_by_elastic(world_size, name) for name in MOST},
        },
        "sent": {
            "intra": round(one.intra),
            "inter": round(one.inter),
            "collectives": [
                {"kind": kind, "group": group, "bytes": round(size)} for (kind, group), size in one.sent.items()
            ],
        },
        "seconds": {"step": one.seconds, "compute": one.computing},
    }
