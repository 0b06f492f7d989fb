"""Start the process in which simulated ranks run, and bring back what has become of a run.

The process is warm: it has imported torch and flatparam. It forks a child for each run, as threads of ranks that were
killed, or that wait for ever, stay in a process.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import warnings
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
_ADDR_NO_RANDOMIZE = 0x0040000  # of personality(): objects have the same addresses in each process

_server: Any = None


class SimulatedError(AssertionError):
    """An error of a simulated rank, or of the simulation, with its traceback."""


def simulated(program: Any, size: int, seed: int = 0, *args: Any, **options: Any) -> Any:
    """Run ``program(rank, *args)``, a function of a module, on ``size`` simulated ranks; return what ``Run`` has.

    Errors of ranks come back as ``(class name, text)``. Args: ``options``: of ``ranks.simulate``; with ``forked=True``
    each rank is a process, see forked.py.
    Raises: SimulatedError if the process died.
    """
    module = program.__module__
    return SimpleNamespace(**ask(module, _run, module, program.__qualname__, size, seed, args, options))


def ask(imported: str, function: Any, *args: Any, patience: float = 600.0) -> Any:
    """Return ``function(*args)``, called in a child of the warm process.

    Args: ``imported``: the name of a module to import before the fork; ``patience``: real seconds it may take.
    Raises: SimulatedError if it raises, or if the child dies or does not end in time.
    """
    global _server
    if _server is None:
        _server = _Server()
    return _server.ask(imported, function.__module__, function.__qualname__, args, patience)


class _Server:
    """The warm process. ``root``: the tree whose flatparam and tests it imports."""

    def __init__(self, root: Path = ROOT) -> None:
        from simulated import build

        folder = root / FOLDER.relative_to(ROOT)
        self._first = [str(root / "tests" / "support"), str(root)] if root != ROOT else []
        self._proc = tempfile.TemporaryDirectory(prefix="flatparam-proc")
        in_c = [folder / name for name in ("seams.h", "scheduler.h", "processes.h", "heap.h", "disk.h")]
        preloaded = [build(folder / source, in_c) for source in ("seams.c", "disk.c")]
        library = build(folder / "world.cpp", [*in_c, *sorted(folder.glob("*.hpp"))])
        here, there = Pipe()
        self._connection = here
        environment = {
            **os.environ,
            "LD_PRELOAD": ":".join(map(str, preloaded)),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "FLATPARAM_SIMULATED_PROC": self._proc.name,
            "PYTHONPATH": os.pathsep.join(["tests/support", "."]),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.simulation.process", str(there.fileno()), str(library)],
            env=environment,
            cwd=root,
            pass_fds=[there.fileno()],
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE),
        )
        there.close()
        atexit.register(self.close)

    def ask(self, *request: Any) -> Any:
        try:
            self._connection.send(([*self._first, *sys.path], *request))
            kind, value = pickle.loads(self._connection.recv_bytes())
        except BaseException as error:  # of pytest, too: the next request would take this answer
            self.kill()
            if isinstance(error, (EOFError, ConnectionError)):
                raise SimulatedError("the process of the simulation has ended") from None
            raise
        if kind == "error":
            raise SimulatedError(value)
        return value

    def kill(self) -> None:
        """End the process and its children; the next request starts another."""
        global _server
        _server = None
        os.killpg(self._process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._connection.close()
        self._process.wait()
        self._proc.cleanup()


class _Programs:
    """Lives as long as programs of the simulation are run."""


def _serve(connection: Connection) -> None:
    """Answer requests until the other side closes.

    While they are programs of the simulation, flatparam's changes of torch stay: a child that makes them looks at each
    name of each module, and copies the memory of all. Tests' ranks make and undo their own.
    """
    programs = None
    while True:
        try:
            path, imported, module, name, args, patience = connection.recv()
        except EOFError:
            return
        if not module.startswith(f"{__package__}."):
            programs = None
        elif programs is None:
            programs = _Programs()
            hold_changes(programs)
            gc.freeze()
        sys.path[:] = path
        if imported not in sys.modules:
            with contextlib.suppress(Exception):  # the child raises it, too
                importlib.import_module(imported)
            gc.collect()
            gc.freeze()
        here, there = Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            there.send_bytes(pickle.dumps(_answer(module, name, args)))
            os._exit(0)
        there.close()
        try:
            if not here.poll(patience):
                os.kill(child, signal.SIGKILL)
            answer = here.recv_bytes()
        except EOFError:
            _, status = os.waitpid(child, 0)
            answer = pickle.dumps(("error", f"the run died with status {status}"))
        else:
            os.waitpid(child, 0)
        connection.send_bytes(answer)


def _answer(module: str, name: str, args: Any) -> tuple[str, Any]:
    import traceback

    try:
        return "value", getattr(importlib.import_module(module), name)(*args)
    except BaseException:
        return "error", traceback.format_exc()


def _run(module: str, name: str, size: int, seed: int, args: Any, options: dict[str, Any]) -> dict[str, Any]:
    from . import forked, ranks

    warnings.simplefilter("ignore")
    program = getattr(importlib.import_module(module), name)
    simulate = forked.simulate if options.pop("forked", False) else ranks.simulate
    return told(simulate(lambda rank: program(rank, *args), size, seed, **options))


def told(run: Any) -> dict[str, Any]:
    """Return a run as another process, and a checker, gets it."""
    import traceback

    errors = {
        rank: (type(error).__name__, str(error), "".join(traceback.format_exception(error)))
        for rank, error in run.errors.items()
    }
    return {**vars(run), "errors": errors, "story": run.story()}


def _load(library: str) -> None:
    from importlib import util

    spec = util.spec_from_file_location("_simulated_world", library)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["_simulated_world"] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    import gloo
    import torch

    from flatparam.fsdp.unit.registry import hold_changes

    for each in gloo.PRELOADED:
        importlib.import_module(each)
    torch.set_num_threads(1)
    _load(sys.argv[2])
    importlib.import_module("tests.simulation.forked")
    gc.collect()
    gc.freeze()
    _serve(Connection(int(sys.argv[1])))
