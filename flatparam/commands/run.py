"""``python -m flatparam run [-m] SCRIPT args``: what ``python [-m] SCRIPT args`` does, with flatparam installed.

The script is ``__main__`` in every respect: sys.argv, sys.path[0], pickling, exit status, signals, tracebacks without
frames of ours, processes that it forks or spawns. Not reached are other Python commands that it starts.
"""

import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from ..installing import install

USAGE = """usage: python -m flatparam run [--runtime] SCRIPT [ARGUMENT ...]
       python -m flatparam run [--runtime] -m MODULE [ARGUMENT ...]

Do what `python SCRIPT ...` or `python -m MODULE ...` does, with flatparam's handle under torch's
FullyShardedDataParallel; with --runtime, or FLATPARAM_RUNTIME=1, with flatparam's own class in its place.
With torchrun: torchrun [OPTION ...] -m flatparam run [--runtime] SCRIPT [ARGUMENT ...]"""

# Modules and commands that start Python processes -> their options before the module of these processes
ORDER, ORDER_OF_DEEPSPEED = "[OPTION ...] -m", "[OPTION ...] --module --no_local_rank"
LAUNCHERS = {
    **dict.fromkeys(("torch.distributed.run", "torchrun", "accelerate.commands.launch"), ORDER),
    "torch.distributed.launch": f"--use-env {ORDER}",
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner"), ORDER_OF_DEEPSPEED),
}
CHILD = "flatparam.commands.spawned"  # spawned children run it in place of the script
RUNTIME = "FLATPARAM_RUNTIME"  # in the environment, "1": for this process and those that it starts
BY_NAME, BY_PATH = "init_main_from_name", "init_main_from_path"  # how multiprocessing tells them the script


def main(arguments: list[str]) -> int:
    """Run the script or module that comes first in ``arguments``, with the others. Returns: the exit status."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if arguments[:1] == ["--runtime"]:
        os.environ[RUNTIME] = "1"
        arguments = arguments[1:]
    as_module = arguments[:1] == ["-m"]
    command = arguments[1:] if as_module else arguments
    found = launcher_in(command, as_module)
    if found is not None:
        launcher, order = found
        print(
            f"flatparam run: {launcher} starts other Python processes, which would not use flatparam. Put {launcher} "
            f"first: {launcher} {order} flatparam run SCRIPT [ARGUMENT ...]",
            file=sys.stderr,
        )
        return 2
    if not command or (command[0].startswith("-") and not as_module):
        expected, got = "a module" if as_module else "-m or a script", repr(command[0]) if command else "nothing"
        print(f"flatparam run: expected {expected}, got {got}\n{USAGE}", file=sys.stderr)
        return 2
    try:
        install(runtime=os.environ.get(RUNTIME) == "1")
    except RuntimeError as refusal:
        print(f"flatparam run: {refusal}", file=sys.stderr)
        return 1
    install_in_spawned_children()
    return run_module(command) if as_module else run_script(command)


def launcher_in(command: list[str], as_module: bool) -> tuple[str, str] | None:
    """Return the launcher that ``command`` runs, as a user types it, and its options before a module; None: none.

    A launcher starts the training script in other Python processes.
    """
    name = command[0] if as_module and command else os.path.basename(command[0]) if command else ""
    if name in LAUNCHERS:
        return f"python -m {name}" if as_module else name, LAUNCHERS[name]
    if command[1:2] == ["launch"] and name in ("accelerate", "accelerate.commands.accelerate_cli"):
        return "accelerate launch", ORDER
    return None


def run_module(command: list[str]) -> int:
    """Run a module as ``python -m MODULE args`` does, by runpy. Without such a module the process ends."""
    sys.argv = ["-m", *command[1:]]
    new_main()
    as_main(vars(runpy)["_run_module_as_main"], command[0])
    return 0


def run_script(command: list[str]) -> int:
    """Run a script as ``python SCRIPT args`` does. It may be a folder or an archive with a ``__main__.py``."""
    path = command[0]
    sys.argv = command
    if pkgutil.get_importer(path) is not None:
        set_first_path(os.path.abspath(path), always=True)
        new_main()
        as_main(vars(runpy)["_run_module_as_main"], "__main__", False)
        return 0
    full_path = os.path.abspath(path)
    try:
        with io.open_code(full_path) as file:
            source = file.read()
    except OSError as error:
        print(f"flatparam run: can't open file {full_path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        return 2
    set_first_path(os.path.dirname(os.path.realpath(path)), always=False)
    module = new_main()
    module.__file__ = full_path
    module.__loader__ = SourceFileLoader("__main__", full_path)
    vars(module).update(__cached__=None)
    as_main(exec, as_main(compile, source, full_path, "exec", 0, True), vars(module))
    return 0


def new_main() -> ModuleType:
    """Replace ``__main__`` by a new module, with the names that Python gives it before it reads a script."""
    module = ModuleType("__main__")
    vars(module).update(__builtins__=sys.modules["builtins"])
    if sys.version_info < (3, 14):
        vars(module).update(__annotations__={})
    sys.modules["__main__"] = module
    return module


def set_first_path(folder: str, always: bool) -> None:
    """Replace sys.path[0], where ``python -m flatparam`` has put the working directory, by ``folder``.

    With ``-P`` there is no such entry, and Python adds only a folder or archive that it runs (``always``). If flatparam
    was found in the working directory, its folder is appended: children import flatparam, too.
    """
    safe_path = getattr(sys.flags, "safe_path", False)
    if not safe_path:
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)
    home = str(Path(__file__).resolve().parents[2])
    if home not in map(os.path.realpath, sys.path):
        sys.path.append(home)


def as_main(call: Callable[..., Any], *args: Any) -> Any:
    """Return ``call(*args)``. The traceback of an exception that ends the process begins at ``call``."""
    try:
        return call(*args)
    except SystemExit:
        raise
    except BaseException as error:
        if error.__traceback__ is not None:
            show_from(error.__traceback__.tb_next)
        raise


def show_from(traceback: TracebackType | None) -> None:
    """Let sys.excepthook, as it is now, show the exception that ends the process with this traceback."""
    excepthook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        excepthook(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = show


def install_in_spawned_children() -> None:
    """Let processes that multiprocessing spawns install flatparam before they import the script.

    multiprocessing sends such a process the name of the script to import as ``__mp_main__``. This sends ``CHILD``
    instead, and the script in two more elements of sys.argv, which ``CHILD`` removes.
    """
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        how = BY_NAME if BY_NAME in data else BY_PATH
        data["sys_argv"] = [*data["sys_argv"], how, data.pop(how, "")]
        data[BY_NAME] = CHILD
        return data

    spawn.get_preparation_data = get_preparation_data


def become_child(namespace: dict[str, Any]) -> None:
    """In a spawned process: install flatparam, import the script, and put its names into ``namespace``.

    Like multiprocessing itself, this does not import a ``__main__.py``, which would run the whole program again.
    """
    script, how = sys.argv.pop(), sys.argv.pop()
    install(runtime=os.environ.get(RUNTIME) == "1")
    install_in_spawned_children()
    defined: dict[str, Any] = {}
    if how == BY_PATH and script:
        defined = runpy.run_path(script, run_name="__mp_main__")
    elif script.rpartition(".")[2] != "__main__":
        defined = runpy.run_module(script, run_name="__mp_main__", alter_sys=True)
    namespace.clear()
    namespace.update(defined)
