"""The logger ``flatparam`` tells units, strategy and the order of collectives at level DEBUG, and is silent otherwise.

Promises:
- the logger ``flatparam`` at DEBUG has a line for each unit, and one for each collective until its order is known; a
  later step does not call it, nor does any step at another level format a line
"""

import logging
import re

import pytest
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import run_ranks

pytestmark = pytest.mark.multiprocess
BLOCKS = 2


class Kept(logging.Handler):
    """Keeps the lines."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def train(level, steps):
    """Return the lines of each step, the construction's first, and how often each step has called the logger."""
    logger, handler, calls = logging.getLogger("flatparam"), Kept(), []
    for name in ("debug", "isEnabledFor"):
        method = getattr(logger, name)
        setattr(logger, name, lambda *args, method=method: (calls.append(args), method(*args))[1])
    if level is not None:
        logger.setLevel(level)
    logger.addHandler(handler)
    model = wrap_blocks(make(blocks=BLOCKS))
    lines, called = [handler.lines], []
    for step in range(steps):
        handler.lines, before = [], len(calls)
        loss_of(model, data(step)).backward()
        lines.append(handler.lines)
        called.append(len(calls) - before)
    return lines, called


def test_units_and_collectives_are_told_in_their_order():
    (lines, called), other = run_ranks(train, 2, logging.DEBUG, 4)
    construction, first, second, *later = lines
    assert len(construction) >= 2  # a third unit is built as the two before
    assert all("builds a unit" in line for line in construction)
    units, collectives = first[: BLOCKS + 1], first[BLOCKS + 1 :]
    root, *blocks = [
        re.match(r"(the unit of \w+(?: at `blocks\.\d`)?): FULL_SHARD over 2 ranks; ", line)[1] for line in units
    ]
    expected = [f"gathers {unit}" for unit in (root, *blocks)]
    expected += [f"gathers {blocks[1]}", f"gathers {blocks[0]}"]
    expected += [f"reduces the gradients of {unit}" for unit in (*blocks[::-1], root)]
    told = [re.match(r"collective \d+ of group \w+: rank 0 (.*), in step 1$", line)[1] for line in collectives]
    assert sorted(told) == sorted(expected)
    assert told[: BLOCKS + 1] == expected[: BLOCKS + 1]
    assert told[-1] == expected[-1]
    assert len(second) <= 1  # whether the next step is as the last one
    assert later == [[], []]
    assert called[2:] == [0, 0]
    assert len(other[0][1]) == len(first)


def test_by_default_nothing_is_told():
    for lines, called in run_ranks(train, 2, None, 3):
        assert lines == [[]] * 4
        assert called[-1] == 0
