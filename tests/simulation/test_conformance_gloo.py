"""The table of conformance is how gloo and TCPStore behave, in this torch: when ranks fail, and when they do not.

Promises:
- gloo on real processes gives each row of the table to which the simulated backend is compared: `test_gloo_behaves_so`
- a fact that is not in the table is told: `test_a_difference_is_told`
"""

from concurrent.futures import ThreadPoolExecutor

from tests.simulation.conformance_table import ROWS, by_name, differences, rows
from tests.simulation.pool import Pools

WORLDS = {2: 7, 3: 3, 4: 1}  # they wait for time-outs most of the time, so that many run at once


def test_gloo_behaves_so():
    """A row that differs runs once more, alone: on a busy machine ranks come late."""
    pools = Pools(WORLDS)
    calls = [(row.world_size, row.program) for row in sorted(ROWS, key=lambda row: -row.world_size)]
    try:
        with ThreadPoolExecutor(sum(WORLDS.values())) as threads:
            running = {call: threads.submit(pools.run, *call) for call in calls}
            found = rows(lambda *call: running[call].result(), processes=True)
            again = [row for row, told in found if told]
        told = {row.id: differences(row, pools.run(row.world_size, row.program)) for row in again}
    finally:
        pools.end()
    assert not {name: lines for name, lines in told.items() if lines}


def test_a_difference_is_told():
    """Each row with another fact on the first rank that returns facts."""
    for row in ROWS:
        rank, expected = next((i, facts) for i, facts in enumerate(row.ranks) if isinstance(facts, dict))
        facts = [dict(by_name(row, of)) if isinstance(of, dict) else of for of in row.ranks]
        for name in facts[rank]:
            other = list(facts)
            other[rank] = {**facts[rank], name: "another fact"}
            told = differences(row, other)
            assert any(line.startswith(f"rank {rank}, {name}:") for line in told), (row.id, name, expected)
        other = list(facts)
        other[rank] = {}
        assert differences(row, other)
