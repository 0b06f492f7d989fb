"""The simulated store and backend behave as TCPStore and gloo: the table of conformance, on simulated ranks.

Promises:
- the simulation gives each row that gloo gives on real processes: `test_the_simulation_behaves_as_gloo`
"""

import os
import time
from functools import partial

import pytest

from tests.simulation.conformance_table import ROWS, differences
from tests.simulation.conformance_words import DIED
from tests.simulation.process import simulated


def program_of(rank, i):
    """Run a program of the table, then live on until each rank has its facts. A process that exits is killed."""
    import torch.distributed as dist

    from tests.simulation import ranks

    os._exit = partial(_exit, os._exit)
    facts = ROWS[i].program()
    _done.add(rank)
    while not all(other in _done or ranks.seams.fp_sim_has_ended(other) for other in range(dist.get_world_size())):
        time.sleep(0.1)
    return facts


def _exit(end, status):
    from tests.simulation import ranks

    rank = ranks.seams.fp_sim_rank()
    if rank < 0:
        end(status)
    ranks.kill(rank)


_done = set()  # ranks of the run, in the process of the run


# Facts that differ, by row. The simulation adds more than two ranks in their order, and gloo in another one: checkers
# compare a run with an unsharded model, bit for bit.
UNLIKE_GLOO = dict.fromkeys(("sums, 3 ranks", "sums, 4 ranks"), "all_reduce in order")


@pytest.mark.parametrize("i", [i for i, row in enumerate(ROWS) if not row.processes], ids=lambda i: ROWS[i].id)
def test_the_simulation_behaves_as_gloo(i):
    row = ROWS[i]
    run = simulated(program_of, row.world_size, i, i, host=0)
    assert run.reason == 0, run.stacks
    assert not run.errors, next(iter(run.errors.values()))[2]
    told = differences(row, [run.results.get(rank, DIED) for rank in range(row.world_size)])
    unlike = UNLIKE_GLOO.get(row.id)
    assert [line for line in told if unlike is None or unlike not in line] == []
    assert told or unlike is None
