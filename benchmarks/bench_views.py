"""a. What one parameter costs in each step of a handle's life, torch's handle and ours."""

from collections.abc import Callable

import torch

from benchmarks import handles, main
from benchmarks.handles import OURS, TORCH
from benchmarks.measuring import in_turn
from benchmarks.models import Unit
from benchmarks.rows import Row, Table, Target
from benchmarks.worlds import fake_world

SIZES = (10, 100, 400, 4000)
PROMISED = {  # at most this share of torch's safe path, from 400 parameters on
    "unsharded views, forward": 25,
    "unsharded views, backward": 25,
    "unsharded views, summoned": 25,
    "sharded views, after forward": 50,
    "sharded views, after backward": 50,
    "writeback check": 15,
    "grad views, sharded": 5,
    "grad views, unsharded": 5,
    "construction": 2,
    "flatten": 2,
    "shard_metadata()": 3,
}
PROMISED_FLAT = {**PROMISED, "unsharded views, summoned": 5}  # torch makes these parameters, one by one
OF_THE_SHARD = {
    "sharded views, after forward",
    "sharded views, after backward",
    "writeback check",
    "grad views, sharded",
}


def measure(quick: bool) -> Table:
    """All steps for all sizes, in both modes."""
    torch.set_num_threads(1)
    table = Table(
        "a",
        "host cost of a handle's steps, microseconds a parameter",
        "one handle driven by hand, parameters of 32 elements; ratios to torch's safe path, median (least-most).\n"
        "W=1: all parameters lie in this rank's shard, W=8: an eighth of them",
    )
    for n in SIZES[: 3 if quick else None]:
        with fake_world(8):
            table.rows += _rows(n, True, 8, quick) + _rows(n, False, 8, quick)
        if n >= 400:
            with fake_world(1):
                table.rows += [row for row in _rows(n, True, 1, quick) if row.what in OF_THE_SHARD]
    return table


def _rows(n: int, orig: bool, world: int, quick: bool) -> list[Row]:
    rounds = max(3, min(40, 12000 // n) // (4 if quick else 1))
    repeats = 3 if quick else 5
    driven = {kind: handles.Driven(kind, Unit(n), orig).sample for kind in handles.KINDS}
    taken = in_turn(driven, repeats, rounds)
    if world == 8:
        made = {kind: handles.Constructed(kind, _module_of(n), orig).sample for kind in handles.KINDS}
        taken.update(in_turn(made, repeats, max(2, rounds // 6)))
    size = f"{n} parameters, {'orig' if orig else 'flat'}, W={world}"
    return [
        Row.of(what, size, "us", TORCH, medians, 1e6 / n, _targets(what, n, orig), parameters=n, orig=orig, world=world)
        for what, medians in taken.items()
    ]


def _module_of(n: int) -> Callable[[], Unit]:
    return lambda: Unit(n)


def _targets(what: str, n: int, orig: bool) -> list[Target]:
    promised = PROMISED if orig else PROMISED_FLAT
    if n < 400 or what not in promised:
        return []
    return [Target(OURS, 1 / promised[what], text=f"<= 1/{promised[what]}")]


if __name__ == "__main__":
    main.run_one(measure)
