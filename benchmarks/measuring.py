"""Timing in turn: every contestant once a round, so that whatever else the machine does hits all of them alike."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Sample = Callable[[], Mapping[str, float]]  # one measurement: seconds by what was measured


# Of the processor, not of the wall: who has to wait for other processes would look slow. All that is timed with it
# runs in one thread and waits for nothing.
clock = time.process_time


def seconds(call: Callable[[], Any]) -> float:
    """Processor time of one call."""
    start = clock()
    call()
    return clock() - start


def turned(names: tuple[str, ...], turn: int) -> tuple[str, ...]:
    """Who is first changes with each turn: nobody always runs behind the same neighbour."""
    first = turn % len(names)
    return names[first:] + names[:first]


def in_turn(
    contestants: Mapping[str, Sample], repeats: int, rounds: int, warm_up: int = 2
) -> dict[str, dict[str, list[float]]]:
    """Take ``rounds`` samples of each contestant in turn, ``repeats`` times over.

    Each takes two in a row and the second counts: in the first, caches and heap are as the contestant before left them,
    which costs the fast one more than the slow one.

    Returns {what: {contestant: medians}}, one median of a repeat's rounds each.
    """
    names = tuple(contestants)
    for _ in range(warm_up):
        for sample in contestants.values():
            sample()
    gc.collect()
    gc.freeze()  # one contestant's objects should not make the collector slower for the next
    medians: dict[str, dict[str, list[float]]] = {}
    try:
        for repeat in range(repeats):
            taken: dict[str, dict[str, list[float]]] = {}
            for turn in range(rounds):
                for name in turned(names, repeat + turn):
                    contestants[name]()
                    for what, value in contestants[name]().items():
                        taken.setdefault(what, {}).setdefault(name, []).append(value)
            for what, by_name in taken.items():
                for name, values in by_name.items():
                    medians.setdefault(what, {}).setdefault(name, []).append(statistics.median(values))
    finally:
        gc.unfreeze()
    return medians


def ratio(values: list[float], reference: list[float]) -> tuple[float, float, float]:
    """(median, least, most) of ``values`` over ``reference``, repeat by repeat."""
    each = [value / base for value, base in zip(values, reference, strict=True)]
    return statistics.median(each), min(each), max(each)
