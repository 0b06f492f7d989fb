"""d. Real training: the demo's language model in 2 gloo processes, every contestant in turn, four steps at a time."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from benchmarks import main, training
from benchmarks.contestants import DDP, FSDP1, FSDP1_FLAT, FSDP2, OURS, OURS_FLAT, REPLICATED, RUNTIME, ZERO_1
from benchmarks.measuring import turned
from benchmarks.rows import Row, Table, Target
from benchmarks.worlds import Ranks
from examples.demo.config import Config

NAMES = (OURS, OURS_FLAT, RUNTIME, REPLICATED, ZERO_1, FSDP1, FSDP1_FLAT, FSDP2, DDP)
BLOCK = 4  # steps of one contestant before the next has its turn
NOISE = 0.03  # by which two runs of the same differ
FASTER, CLOSE = 1.1, 0.95  # the runtime over the best FSDP, its unsharded strategies over DDP
LAUNCHES = 3  # of which the peak is the median


@contextmanager
def launched(module: str, names: Sequence[str], config: Config) -> Iterator[dict[str, Ranks]]:
    """The ranks of each of ``names``, until the context ends; ``module`` makes what they train."""
    with ExitStack() as stack:
        started = {}
        for name in names:
            started[name] = stack.enter_context(Ranks(config.ranks, training.serve, module, name, config))
            started[name].answers()
        yield started


class Trained(NamedTuple):
    """Of each contestant: the losses of both ranks in each block; of each but the first block, which warms up, the
    ``seconds`` of a step, and on processors those of its thread (``host``), in the slower rank, and of all threads of
    all ranks (``work``).
    """

    losses: dict[str, list[list[float]]]
    seconds: dict[str, list[float]]
    host: dict[str, list[float]]
    work: dict[str, list[float]]


def train_in_turn(pairs: dict[str, Ranks], turns: int) -> Trained:
    """``BLOCK`` steps of each in every turn."""
    names = tuple(pairs)
    seconds, host, work = ({name: list[float]() for name in names} for _ in range(3))
    found = Trained({name: [] for name in names}, seconds, host, work)
    for turn in range(turns):
        for name in turned(names, turn):
            answers = pairs[name].ask("train", turn * BLOCK, BLOCK)
            found.losses[name].append([loss for losses, *_ in answers for loss in losses])
            if turn > 0:
                _, taken, worked, all_worked = zip(*answers, strict=True)
                found.seconds[name].append(max(taken) / BLOCK)
                found.host[name].append(max(worked) / BLOCK)
                found.work[name].append(sum(all_worked) / BLOCK)
    return found


def measure(quick: bool) -> Table:
    """Tokens a second, memory, losses, and the share of collectives."""
    config = Config()
    tokens = config.ranks * config.batch * config.context
    table = Table(
        "d",
        "training the demo's model on 2 gloo processes",
        f"{config.depth} blocks of width {config.width}, {tokens} tokens a step, AdamW, one thread a process; "
        "ratios to FSDP1 orig\npeak: of a rank's resident memory over that before the model was made",
    )
    with launched("benchmarks.demo_model", NAMES, config) as pairs:
        trained = train_in_turn(pairs, 4 if quick else 26)
        peaks = {name: [max(pair.ask("peak"))] for name, pair in pairs.items()}
        shares = {name: max(pair.ask("in_collectives", 1000, BLOCK)) for name, pair in pairs.items()}
    for launch in range(1, 1 if quick else LAUNCHES):
        for name in NAMES:
            with launched("benchmarks.demo_model", [name], config) as pairs:
                pairs[name].ask("train", launch * 2 * BLOCK, 2 * BLOCK)
                peaks[name].append(max(pairs[name].ask("peak")))
    rates = {name: [tokens / taken for taken in values] for name, values in trained.seconds.items()}
    table.rows += [_rates(rates), _peaks(peaks), _losses(trained.losses), _shares(shares)]
    return table


def _rates(rates: dict[str, list[float]]) -> Row:
    row = Row.of("tokens a second", "", "", FSDP1, rates)
    best = max(row.values[name] for name in (FSDP1, FSDP1_FLAT, FSDP2))
    bounds = {
        (1 - NOISE) * best: (OURS, OURS_FLAT),
        FASTER * max(row.values[FSDP1], row.values[FSDP2]): (RUNTIME,),
        CLOSE * row.values[DDP]: (REPLICATED, ZERO_1),
    }
    row.judge(
        [Target(name, bound / row.values[FSDP1], at_least=True) for bound, names in bounds.items() for name in names]
    )
    row.target = (
        f"handles >= the best FSDP's, {NOISE:.0%} aside; runtime >= {FASTER} x FSDP1 orig and FSDP2; its NO_SHARD and "
        f"ZERO_1 >= {CLOSE} x DDP"
    )
    return row


def _peaks(peaks: dict[str, list[float]]) -> Row:
    row = Row.of("peak of the larger rank", "", "MiB", FSDP1, peaks)
    least = min(row.values[name] for name in (FSDP1, FSDP1_FLAT, FSDP2))
    row.target = f"<= the least of the FSDPs, {NOISE:.0%} aside"
    row.met = all(row.values[name] <= (1 + NOISE) * least for name in (OURS, OURS_FLAT, RUNTIME))
    return row


def _losses(losses: dict[str, list[list[float]]]) -> Row:
    last = {name: blocks[-1][-1] for name, blocks in losses.items()}
    row = Row("loss of the last step", "", "", "", last, {}, digits=17)
    row.target = "no digit differs in any step"
    row.met = all(losses[name] == losses[FSDP1] for name in NAMES)
    return row


def _shares(shares: dict[str, float]) -> Row:
    return Row("share of a step in collectives", "", "", "", shares, {})


if __name__ == "__main__":
    main.run_one(measure)
