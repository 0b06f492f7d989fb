"""Training on the runtime beside training unsharded and on torch's FSDP1, in every pair of settings.

``make equality`` prints the tables and writes them into docs/equality.md.
tests/packaging/test_equality.py runs the same.
"""

import argparse
import copy
import pathlib
import sys

import torch
from fsdp_models import Model, data, full_grads, full_params, loss_of, wrap_blocks
from gloo import note, run_ranks
from layer_zero_ranks import pair
from pairs import pairwise
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.utils.checkpoint import checkpoint

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.fsdp.sharding.placement import averaging_factors

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "equality.md"
STEPS = 3
FACTORS = {
    "strategy": (
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "ZERO_1",
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
        "LAYER_ZERO",
    ),
    "precision": ("fp32", "bf16", "bf16, reduced in fp32", "fp32, reduced in bf16"),
    "accumulation": ("none", "no_sync", "synced", "both"),
    "checkpointing": ("none", "inside", "around", "around, reentrant"),
    "prefetch": ("none", "pre", "post"),
    "forward prefetch": (False, True),
    "use_orig_params": (False, True),
    "optimizer": ("SGD", "Adam"),
}
PRECISIONS = {  # param_dtype, reduce_dtype
    "fp32": (None, None),
    "bf16": (torch.bfloat16, None),
    "bf16, reduced in fp32": (torch.bfloat16, torch.float32),
    "fp32, reduced in bf16": (None, torch.bfloat16),
}
PLANS = {"none": (True,), "no_sync": (False, True), "synced": (True, True), "both": (True, False, True)}
PREFETCHES = {"none": None, "pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST}
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
# What torch has of the same arithmetic at two ranks, where the strategy itself is not there or not right.
TORCHS = {"ZERO_1": "SHARD_GRAD_OP", "HYBRID_SHARD": "NO_SHARD"} | dict.fromkeys(
    ("_HYBRID_SHARD_ZERO2", "LAYER_ZERO"), "SHARD_GRAD_OP"
)
GRIDS = {"HYBRID_SHARD": (2, 1), "_HYBRID_SHARD_ZERO2": (1, 2)}  # replicas and shards of two ranks
# Of differences over the largest value, where sums are taken in another order: some roundings in the wire's dtype.
BOUNDS = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-6}


class Recomputed(nn.Module):
    """A block of the model that recomputes itself in backward, from the inside."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def wrapped(case, wrapper, **arguments):
    """The model with its blocks as units, checkpointed as ``case`` says."""
    low, reduced = PRECISIONS[case["precision"]]
    arguments |= {
        "mixed_precision": MixedPrecision(param_dtype=low, reduce_dtype=reduced) if low or reduced else None,
        "backward_prefetch": PREFETCHES[case["prefetch"]],
        "forward_prefetch": case["forward prefetch"],
        "use_orig_params": case["use_orig_params"],
    }
    torch.manual_seed(0)
    model = Model()
    how = case["checkpointing"]
    implementation = CheckpointImpl.REENTRANT if how.endswith("reentrant") else CheckpointImpl.NO_REENTRANT

    def unit(module, **arguments):
        made = wrapper(Recomputed(module) if how == "inside" and module is not model else module, **arguments)
        if how.startswith("around") and module is not model:
            return checkpoint_wrapper(made, checkpoint_impl=implementation)
        return made

    return wrap_blocks(model, unit, **arguments)


def ours(case, ranks):
    """The model on the runtime."""
    strategy = case["strategy"]
    if strategy == "LAYER_ZERO":
        return wrapped(case, FSDP, sharding_strategy=ShardingStrategy[strategy], process_group=pair(ranks // 2))
    if strategy in GRIDS:
        grid = GRIDS[strategy] if ranks == 2 else (2, 2)
        return wrapped(
            case, FSDP, sharding_strategy=ShardingStrategy[strategy], device_mesh=init_device_mesh("cpu", grid)
        )
    return wrapped(case, FSDP, sharding_strategy=ShardingStrategy[strategy])


def torchs(case):
    """The model on torch's FSDP1."""
    strategy = TorchStrategy[TORCHS.get(case["strategy"], case["strategy"])]
    return wrapped(case, TorchFSDP, sharding_strategy=strategy, device_id=torch.device("cpu"))


class Unsharded:
    """The oracle: a plain module, and by hand what sharding does to the gradients, in which dtype and order."""

    def __init__(self, case, ranks):
        torch.manual_seed(0)
        self.module = Model()
        self.ranks = ranks
        self.low = PRECISIONS[case["precision"]][0]
        self.wire = wire_of(case)

    def gradients(self, batch, rank):
        """In the dtype of computation."""
        x, module = data(batch, rank), self.module
        if self.low is not None:
            module, x = copy.deepcopy(module).to(self.low), x.to(self.low)
        return torch.autograd.grad(loss_of(module, x), list(module.parameters()))

    def backward(self, batches):
        """Add to ``.grad`` the mean over ranks of the sum of each rank's ``batches``, which are kept in fp32."""
        before, after = averaging_factors(self.ranks)
        totals = None
        for rank in range(self.ranks):
            kept = None
            for batch in batches:
                new = self.gradients(batch, rank)
                if len(batches) > 1:
                    new = [grad.float() for grad in new]
                kept = new if kept is None else [a + b for a, b in zip(kept, new, strict=True)]
            sent = [grad.to(self.wire) / before for grad in kept]
            totals = sent if totals is None else [a + b for a, b in zip(totals, sent, strict=True)]
        for param, grad in zip(self.module.parameters(), totals, strict=True):
            grad = (grad / after).float()
            param.grad = grad if param.grad is None else param.grad + grad


def train(case, model, oracle):
    """Three steps of both; returns the gradients of the first step by name, and the parameters in the end."""
    optimizers = [OPTIMIZERS[case["optimizer"]](part.parameters()) for part in (model, oracle.module)]
    for step in range(STEPS):
        pending = []
        for i, synced in enumerate(PLANS[case["accumulation"]]):
            pending.append(10 * step + i)
            if synced:
                loss_of(model, data(pending[-1])).backward()
                oracle.backward(pending)
                pending = []
            else:
                with model.no_sync():
                    loss_of(model, data(pending[-1])).backward()
        if step == 0:
            gradients = full_grads(model) if isinstance(model, FSDP) else None
            wanted = {name: param.grad for name, param in oracle.module.named_parameters()}
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return gradients, wanted


def plain(name):
    """A parameter's name in the module that was never wrapped."""
    for part in ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(part, "")
    return name.replace(".block.", ".")


def furthest(found, wanted):
    """The largest difference between values of the same names, over the largest of them."""
    found = {plain(name): value for name, value in found.items()}
    assert found.keys() == wanted.keys(), (list(found), list(wanted))
    largest = max(value.abs().max().item() for value in wanted.values())
    return max((found[name].float() - value.float()).abs().max().item() for name, value in wanted.items()) / largest


def wire_of(case):
    """The dtype in which gradients are added over ranks."""
    low, reduced = PRECISIONS[case["precision"]]
    return reduced or (None if case["strategy"] == "LAYER_ZERO" else low) or torch.float32


def torch_adds_alike(case):
    """Whether torch adds in the dtypes of ours: what no_sync has kept in that of computation, ranks in the wire's."""
    low, reduced = PRECISIONS[case["precision"]]
    kept = low is None or case["accumulation"] not in ("no_sync", "both")
    return kept and wire_of(case) == (reduced or low or torch.float32)


def torch_reduces_alike(case):
    """Whether torch reduces each gradient once: unsharded, it reduces what earlier backwards have left again."""
    return TORCHS.get(case["strategy"], case["strategy"]) != "NO_SHARD" or case["accumulation"] in ("none", "no_sync")


def measure(cases, ranks):
    """For each case the largest differences: (to the unsharded module, of parameters to torch's or None)."""
    found = []
    for case in cases:
        note(case)
        model, oracle = ours(case, ranks), Unsharded(case, ranks)
        gradients, wanted = train(case, model, oracle)
        params = full_params(model)
        to_plain = max(furthest(gradients, wanted), furthest(params, dict(oracle.module.named_parameters())))
        to_torch = None
        if ranks == 2 and torch_adds_alike(case):
            peer = torchs(case)
            train(case, peer, Unsharded(case, ranks))
            with TorchFSDP.summon_full_params(peer, writeback=False):
                theirs = {plain(name): param.detach().clone() for name, param in peer.named_parameters()}
            to_torch = furthest(params, theirs)
        found.append((to_plain, to_torch))
    return found


def cases_of_four():
    """The same pairs without Adam, which makes much of a last bit, and without what only torch's order is for."""
    fewer = {
        name: values for name, values in FACTORS.items() if name not in ("forward prefetch", "optimizer", "prefetch")
    }
    return [case | {"forward prefetch": False, "prefetch": "pre", "optimizer": "SGD"} for case in pairwise(fewer)]


def table(cases, results, columns):
    """The lines of a table in Markdown."""
    names = [name for name in FACTORS if len({case[name] for case in cases}) > 1]
    lines = ["| " + " | ".join([*names, *columns]) + " |", "|" + "---|" * (len(names) + len(columns))]
    for case, result in zip(cases, results, strict=True):
        cells = [{True: "yes", False: "no"}.get(case[name], case[name]) for name in names]
        cells += ["not compared" if value is None else f"{value:.1g}" for value in result[: len(columns)]]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", action="store_true", help=f"also write the tables into {DOCS.name}")
    arguments = parser.parse_args()
    tables = {}
    for ranks, cases in ((2, pairwise(FACTORS)), (4, cases_of_four())):
        results = run_ranks(measure, ranks, cases, ranks)
        worst = [
            [max(values) if None not in values else None for values in zip(*of_ranks, strict=True)]
            for of_ranks in zip(*results, strict=True)
        ]
        tables[ranks] = table(cases, worst, ("to unsharded", "to torch FSDP1")[: 2 if ranks == 2 else 1])
        print(f"{ranks} ranks, largest difference\n" + "\n".join(tables[ranks]) + "\n")
    if arguments.docs:
        text = DOCS.read_text()
        for ranks, lines in tables.items():
            head, _, rest = text.partition(f"<!-- {ranks} ranks -->\n")
            _, end, tail = rest.partition("<!-- end -->\n")
            text = head + f"<!-- {ranks} ranks -->\n" + "\n".join(lines) + "\n" + end + tail
        DOCS.write_text(text)


if __name__ == "__main__":
    sys.modules["equality"] = sys.modules["__main__"]
    main()
