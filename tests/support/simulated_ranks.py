"""Run a function on simulated ranks: threads of one process, in virtual time. ``gloo.run_ranks`` has real processes.

Each rank has its own torch world, default generator of random numbers, and warnings. All else that a process has once
is common to the ranks: modules' variables, patches, ``os.environ``, working folder, standard output, memory. The test
of a function that depends on these uses ``gloo.run_ranks``.
"""

import contextlib
import faulthandler
import importlib.util
import os
import pickle
import sys
import tempfile
import traceback
import warnings
import zlib
from pathlib import Path

import gloo
import torch.distributed as dist

REASONS = ("", "waits for what will not come", "did not end in time", "did not end")  # by the reason of a run
REAL_TIME = 240.0  # seconds that a run may take


def simulate_ranks(fn, world_size, *args, timeout=120.0, environment=None):
    """Call ``fn(*args)`` on every rank of a new simulated world; return the list of the ranks' results.

    The seed comes from the test's name: a test has the same run each time. Ranks are real ones outside of Linux, and
    if ``FLATPARAM_TEST_RANKS`` is "processes".
    Args: those of ``gloo.run_ranks``. ``timeout`` is in virtual seconds.
    Raises: RankFailure when a rank raises or is not done in time, or when the process dies.
    """
    gloo.check_mark()
    if os.environ.get("FLATPARAM_TEST_RANKS") == "processes" or sys.platform != "linux":
        return gloo.run_ranks(fn, world_size, *args, timeout=timeout, environment=environment)
    from tests.simulation.process import SimulatedError, ask

    seed = zlib.crc32(os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0].encode())
    with tempfile.TemporaryDirectory(prefix="flatparam-ranks-") as folder:
        output = Path(folder, "output")
        payload = pickle.dumps((fn, args))
        try:
            results, reports = ask(
                *(fn.__module__, run, payload, world_size, seed, timeout, environment or {}, str(output)),
                patience=REAL_TIME,
            )
        except SimulatedError as error:
            results, reports = [], [str(error)]
        if reports:
            reports.append(output.read_text(errors="replace")[-6000:] if output.exists() else "")
            raise gloo.RankFailure("\n".join(reports))
    return [pickle.loads(result) for result in results]


def run(payload, world_size, seed, timeout, environment, output):
    """Return the results, pickled, and a report for each rank that did not give one. In the simulation's process."""
    from tests.simulation import ranks

    to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(to, 1)
    os.dup2(to, 2)
    faulthandler.enable(file=to)
    faulthandler.dump_traceback_later(REAL_TIME - 2.0, file=to)
    os.environ.update(environment)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist.set_debug_level_from_env()
    notes = ["nothing yet"] * world_size
    gloo.tell = lambda text: notes.__setitem__(ranks.seams.fp_sim_rank(), text)

    def live(rank):
        fn, args = pickle.loads(payload)
        result = pickle.dumps(fn(*args))
        for check in gloo.checks:
            check()
        dist.barrier()
        dist.destroy_process_group()
        return result

    with warnings_of_ranks(world_size, ranks.seams.fp_sim_rank):
        run = ranks.simulate(live, world_size, seed, limit=timeout, timeout=timeout)
    reports = []
    for rank in range(world_size):
        if rank in run.errors:
            told = f"ended with an error; it was doing: {notes[rank]}\n"
            told += "".join(traceback.format_exception(run.errors[rank]))
        elif rank not in run.results:
            told = f"{REASONS[run.reason]}; it was doing: {notes[rank]}"
        else:
            continue
        reports.append(f"rank {rank} {told}")
    if run.stacks:
        reports.append(run.stacks)
    sys.stdout.flush()
    return [run.results.get(rank) for rank in range(world_size)], reports


@contextlib.contextmanager
def warnings_of_ranks(size, here):
    """Give each rank the filters and the record of warnings that a process has. ``here()``: the rank, or -1."""
    before = sys.modules["warnings"]
    changed = ("simplefilter", "filterwarnings", "resetwarnings")  # use the variables of their module
    kept = {name: getattr(before, name) for name in changed}
    modules = [_copy_of_warnings() for _ in range(size)]

    def module():
        rank = here()
        return before if rank < 0 else modules[rank]

    class Warnings(type(before)):
        def __getattribute__(self, name):
            return getattr(module(), name)

        def __setattr__(self, name, value):
            setattr(module(), name, value)

    def of_rank(name):
        return lambda *args, **kwargs: (kept[name] if here() < 0 else getattr(module(), name))(*args, **kwargs)

    for name in changed:
        setattr(before, name, of_rank(name))
    sys.modules["warnings"] = Warnings("warnings")
    try:
        yield
    finally:
        sys.modules["warnings"] = before
        for name, function in kept.items():
            setattr(before, name, function)


def _copy_of_warnings():
    in_python = "_py_warnings" if sys.version_info >= (3, 14) else "warnings"
    spec = importlib.util.find_spec(in_python)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if sys.version_info >= (3, 14):
        module._set_module(module)
    module.filters = list(_DEFAULTS)
    return module


_DEFAULTS = warnings.filters
