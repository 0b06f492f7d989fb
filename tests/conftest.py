"""What all tests share: failed assertions in the helper modules show their values, as in the tests themselves."""

import gc
import itertools
import os
import signal
import sys
from collections import defaultdict

import pytest

pytest.register_assert_rewrite("gloo", "one_handle", "random_modules", "recording")

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that have nothing to do do not spin

# Else each worker rewrites the assertions of all files anew, 7 s, and each process compiles the package
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

sys.modules["expecttest"] = None  # only the extra "upstream" installs it: a test that imports it would fail in CI

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in its background deaf to Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (  # first, the longest of them before the others, so that no worker ends long last
    *("test_simulated_faults.py", "test_build.py", "test_copying.py"),  # one that compiles the simulation: others wait
    *("test_copying_rules.py", "test_examples.py", "test_interruptions.py"),
    *("test_conformance_gloo.py", "test_core_c.py", "test_pages.py", "test_bad_calls.py", "test_ptx.py"),
    *("test_demo_run.py", "test_upstream_runner.py", "test_dropin_states.py", "test_dropin_training.py"),
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than there are processors: tests wait for each other's ranks, for timeouts and for files."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of a ``sweep(n)``, n that are spread over it stay as they are; the others become ``thorough``."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    sweeps = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") is not None and item.get_closest_marker("thorough") is None:
            sweeps[item.nodeid.partition("[")[0]].append(item)
    for cases in sweeps.values():
        [kept] = cases[0].get_closest_marker("sweep").args
        stay = spread(cases, min(kept, len(cases)))
        for case in cases:
            if case not in stay:
                case.add_marker("thorough")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Let a test start ranks only if it has the mark: one without it would do so under the sanitizers, too."""
    if "gloo" in sys.modules:
        sys.modules["gloo"].may_start = item.get_closest_marker("multiprocess") is not None


def spread(cases, kept):
    """Choose some, at equal distances: each the next one with the most pairs of values that none before it has."""
    chosen, seen = [], set()
    for i in range(kept):
        start = i * len(cases) // kept
        turned = [case for case in (*cases[start:], *cases[:start]) if case not in chosen]
        chosen.append(max(turned, key=lambda case: len(pairs_of(case) - seen)))
        seen |= pairs_of(chosen[-1])
    return chosen


def pairs_of(case):
    values = [(name, str(value)) for name, value in case.callspec.params.items()]
    return set(itertools.combinations_with_replacement(values, 2))


def pytest_collection_finish():
    """Leave what is imported by now out of every collection: a test that collects looks at its own objects only."""
    gc.collect()
    gc.freeze()
