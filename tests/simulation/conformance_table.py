"""The table of conformance: how gloo and TCPStore behave. ``rows`` compares a way to run programs with it."""

from functools import partial

from tests.simulation import conformance, conformance_facts, conformance_failures, conformance_store
from tests.simulation.conformance_words import (
    CANNOT_CONNECT,
    DIED,
    ENDS,
    LOST,
    NO_STORE,
    NOT_RECEIVED,
    REST,
    STORE_CLOSED,
    STORE_LOST,
    Either,
    Row,
)

CALLS = ("check", "set", "get", "add", "wait", "compare_set", "multi_get", "multi_set", "append", "delete_key")

# A rank whose store has died: the calls at that moment, the first ones after it, and later ones
WITHOUT_STORE = {
    (
        "wait when it dies",
        "check first",
        "get first",
        "add first",
        "wait first",
        "compare_set first",
        "multi_get first",
        "delete_key first",
    ): STORE_CLOSED,
    (
        "check then",
        "set then",
        "get then",
        "add then",
        "wait then",
        "compare_set then",
        "multi_get then",
        "multi_set then",
        "append then",
        "delete_key then",
    ): STORE_LOST,
    ("set first", "multi_set first", "append first"): "None",
}

ROWS = (
    *conformance_failures.ROWS,
    *conformance_facts.ROWS,
    Row(
        "store values",
        2,
        conformance_store.store_values,
        (
            {
                "get": "b'1'",
                "get of a missing key": "raises, at time-out: DistStoreError: wait timeout after #ms, keys: /#//conformance #/missing",  # noqa: E501
                (
                    "multi_get of a missing key",
                    "wait for a missing key",
                ): "raises, at time-out: DistStoreError: wait timeout after #ms, keys: /#//conformance #/a, /#//conformance #/missing",  # noqa: E501
                "wait for 0.1 s for a missing key": "raises, at once: DistStoreError: wait timeout after #ms, keys: /#//conformance #/missing, /#//conformance #/b",  # noqa: E501
                "wait": "(None, None)",
                "check": "(True, False, False, True)",
                "set again": "(None, b'2')",
                "add": "(2, -3, b'-3', 6, b'6')",
                "compare_set of a missing key with something": "(b'x', False)",
                ("compare_set of a missing key with nothing", "compare_set with another value"): "(b'y', b'y')",
                ("compare_set with its value", "compare_set with nothing"): "(b'w', b'w')",
                "compare_set that changes nothing": "(b'w', b'-')",
                "multi_set": "(None, [b'5', b'4'])",
                "append": "(None, None, b'xyz')",
                "delete_key": "(True, False, False)",
                "has_extended_api": "True",
                "empty value": "(None, b'', True, b'h', b'h')",
                "empty key": "(None, b'x', True)",
                "bytes": "(None, b'\\x00\\xff')",
                "large value": "(None, 4194304)",
                "key below the prefix": "b'6'",
                "prefix of a prefix": "(None, b'3')",
                "timeout": "(1.5, 1.5)",
                "clone": "('PrefixStore', b'6')",
                "queue": "(None, None, 2, b'1')",
                "queue_pop": "(b'2', 0)",
                "queue_pop of nothing without a wait": "raises, at once: QueueEmptyError: queue is empty",
                "queue_pop of nothing": "raises, at time-out: DistStoreError: wait timeout after #ms, keys: /#//conformance #/q",  # noqa: E501
            },
            {},
        ),
    ),
    Row(
        "store broken",
        2,
        conformance_store.store_broken,
        ({("add to a text", "then"): STORE_CLOSED, "another connection": "b'x y'"}, {}),
    ),
    Row(
        "store shared",
        2,
        conformance_store.store_shared,
        (
            {
                "another connection": "False",
                "wait": "raises, at time-out: DistStoreError: wait timeout after #ms, keys: /#//conformance #/never",
                "the same connection": "False in time",
                "get of a key that comes": "b'x'",
            },
            {},
        ),
    ),
    Row(
        "store gone, 2 ranks",
        2,
        partial(conformance_store.store_gone, *CALLS),
        (
            DIED,
            {
                **WITHOUT_STORE,
                "collective": LOST,
                "new_group": NO_STORE,
                "clone": CANNOT_CONNECT,
            },
        ),
    ),
    Row(
        "store gone, 3 ranks",
        3,
        partial(conformance_store.store_gone, *CALLS),
        (
            DIED,
            {
                **WITHOUT_STORE,
                "others": ENDS,
                "collective": NOT_RECEIVED,
                "new_group": NO_STORE,
                "clone": CANNOT_CONNECT,
            },
            {
                **WITHOUT_STORE,
                "others": ENDS,
                "collective": LOST,
                "new_group": NO_STORE,
                "clone": CANNOT_CONNECT,
            },
        ),
    ),
)


def rows(run, processes=False):
    """Run each row's program by ``run(world_size, program)``, which returns a list of the ranks' facts.

    Yields pairs of a row and a list of texts: the facts that differ from the table. A rank that has died or is stopped
    is reported as ``(DIED,)`` and ``(STOPPED,)``. ``processes``: also the rows that need real processes.
    """
    for row in ROWS:
        if processes or not row.processes:
            yield row, differences(row, run(row.world_size, row.program))


def differences(row, found):
    """Return a line for each fact of ``found`` that is not as ``row`` has it."""
    lines = []
    for rank, (expected, facts) in enumerate(zip(row.ranks, found, strict=True)):
        if not (isinstance(expected, dict) and isinstance(facts, dict)):
            lines += [] if expected == facts else [f"rank {rank}: expected {expected}, found {facts}"]
            continue
        wanted = by_name(row, expected)
        for name in wanted.keys() | facts.keys():
            if not _fits(wanted.get(name), facts.get(name)):
                lines.append(f"rank {rank}, {name}: expected {wanted.get(name)}, found {facts.get(name)}")
    return lines


def by_name(row, expected):
    """Return the facts of ``expected`` with one name each."""
    named = {}
    for names, facts in expected.items():
        if names == REST:
            collectives = [name for name in row.program.args if name in conformance.COLLECTIVES or " | " in str(name)]
            named |= dict.fromkeys(collectives, facts)
    for names, facts in expected.items():
        if names != REST:
            named |= dict.fromkeys([names] if isinstance(names, str) else names, facts)
    return named


def _fits(expected, found):
    if isinstance(expected, Either):
        return found in expected
    if isinstance(expected, tuple):
        return isinstance(found, tuple) and len(found) == len(expected) and all(map(_fits, expected, found))
    return expected == found
