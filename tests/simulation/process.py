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
import subprocess
import sys
import tempfile
import warnings
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent
_ADDR_NO_RANDOMIZE = 0x0040000  # of personality(): objects have the same addresses in each process

_server: Any = None


class SimulatedError(AssertionError):
    """An error of a simulated rank, or of the simulation, with its traceback."""


def simulated(program: Any, size: int, seed: int = 0, *args: Any, **options: Any) -> Any:
    """Run ``program(rank, *args)``, a function of a module, on ``size`` simulated ranks; return what ``Run`` has.

    Errors of ranks come back as ``(class name, text)``. Args: ``options``: of ``ranks.simulate``.
    Raises: SimulatedError if the process died.
    """
    return _ask((program.__module__, program.__qualname__, size, seed, args, options))


def _ask(request: Any) -> Any:
    global _server
    if _server is None:
        _server = _Server()
    return _server.ask(request)


class _Server:
    def __init__(self) -> None:
        from simulated import build

        self._proc = tempfile.TemporaryDirectory(prefix="flatparam-proc")
        shared = [FOLDER / "seams.h"]
        library, seams = build(FOLDER / "world.cpp", shared), build(FOLDER / "seams.c", shared)
        here, there = Pipe()
        self._connection = here
        environment = {
            **os.environ,
            "LD_PRELOAD": str(seams),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "FLATPARAM_SIMULATED_PROC": self._proc.name,
            "PYTHONPATH": os.pathsep.join(["tests/support", "."]),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.simulation.process", str(there.fileno()), str(library)],
            env=environment,
            cwd=FOLDER.parents[1],
            pass_fds=[there.fileno()],
            preexec_fn=lambda: ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE),
        )
        there.close()
        atexit.register(self.close)

    def ask(self, request: Any) -> Any:
        self._connection.send((sys.path, request))
        try:
            kind, value = pickle.loads(self._connection.recv_bytes())
        except EOFError:
            raise SimulatedError("the process of the simulation has ended") from None
        if kind == "error":
            raise SimulatedError(value)
        return SimpleNamespace(**value)

    def close(self) -> None:
        self._connection.close()
        self._process.wait()
        self._proc.cleanup()


def _serve(connection: Connection) -> None:
    """Answer requests until the other side closes."""
    while True:
        try:
            path, request = connection.recv()
        except EOFError:
            return
        sys.path[:] = path
        if request[0] not in sys.modules:
            with contextlib.suppress(Exception):  # the child raises it, too
                importlib.import_module(request[0])
            gc.collect()
            gc.freeze()
        here, there = Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            there.send_bytes(pickle.dumps(_answer(*request)))
            os._exit(0)
        there.close()
        try:
            connection.send_bytes(here.recv_bytes())
        except EOFError:
            _, status = os.waitpid(child, 0)
            connection.send_bytes(pickle.dumps(("error", f"the run died with status {status}")))
        else:
            os.waitpid(child, 0)


def _answer(module: str, name: str, size: int, seed: int, args: Any, options: dict[str, Any]) -> tuple[str, Any]:
    import traceback

    from . import ranks

    try:
        program = getattr(importlib.import_module(module), name)
        run = ranks.simulate(lambda rank: program(rank, *args), size, seed, **options)
        errors = {
            rank: (type(error).__name__, str(error), "".join(traceback.format_exception(error)))
            for rank, error in run.errors.items()
        }
        return "run", {**vars(run), "errors": errors, "story": run.story()}
    except BaseException:
        return "error", traceback.format_exc()


def _load(library: str) -> None:
    from importlib import util

    spec = util.spec_from_file_location("_simulated_world", library)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["_simulated_world"] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    import torch
    import torch._dynamo  # many calls of torch import it

    import flatparam  # noqa: F401

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _load(sys.argv[2])
    importlib.import_module("tests.simulation.ranks")
    gc.collect()
    gc.freeze()
    _serve(Connection(int(sys.argv[1])))
