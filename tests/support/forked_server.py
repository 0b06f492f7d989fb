"""A Python process that has imported torch, which takes seconds, and forks for each command that it is given.

forked_scripts.py starts it. The package is not imported: each fork finds it by the PYTHONPATH of its own environment.
"""

import atexit
import builtins
import contextlib
import faulthandler
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import logging
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref

MOST = 1 << 17  # bytes of a request
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.launcher.api",  # with these three torchrun has nothing to import
    "torch.distributed.argparse_util",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)
PATH = sys.path[1:]  # what Python has of its own, behind PYTHONPATH
execute_child = subprocess.Popen._execute_child


def serve(requests):
    """Fork for each request, and tell of pids and ends. Return, in a child, what to run; end where no more can come."""
    children = {}  # the file descriptor of a process -> (its pid, the pipe that tells of its end)
    gc.collect()
    gc.freeze()  # else a script that ends would look through all of torch several times, for half of a second
    while True:
        for ready in select.select([requests, *children], [], [])[0]:
            if ready is not requests:
                pid, told = children.pop(ready)
                status = os.waitpid(pid, 0)[1]
                with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                    os.write(told, b"%d\n" % status)
                fds = ready, told
            else:
                text, fds, _, _ = socket.recv_fds(requests, MOST, 32)
                if not text:
                    os._exit(0)
                pid = os.fork()
                if pid == 0:
                    requests.detach()  # else its end would close what has its number by then
                    return begin(fds, **json.loads(text))
                told = fds.pop(0)
                with contextlib.suppress(BrokenPipeError):
                    os.write(told, b"%d\n" % pid)
                children[os.pidfd_open(pid)] = pid, told
            for fd in fds:
                os.close(fd)


def begin(fds, arguments, folder, environment, is_session, passed, is_finalized=True, imported=None):
    """Be what an ``exec`` would have begun, or with ``imported`` another server. Return what to run."""
    if imported is not None:
        keep(fds[1:])
        go_on_as(environment, folder, ["-c", ""])
        for name in imported:
            importlib.import_module(name)
        return serve(socket.socket(fileno=fds[1]))
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for fd in fds[1:]]
    for fd, number in zip(above, (0, 1, 2, *passed), strict=True):
        os.dup2(fd, number)
    keep(passed)
    if is_session:
        os.setsid()
    subprocess.Popen._execute_child = fork_python
    run = go_on_as(environment, folder, arguments)
    return run if is_finalized else functools.partial(end, run)


def keep(fds):
    """Close all other files but the standard ones."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def go_on_as(environment, folder, arguments):
    """Set what Python takes from its environment and its arguments; return what to run."""
    import torch

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    while arguments[0] in ("-u", "-X"):
        if arguments[0] == "-X":
            assert arguments.pop(1) == "faulthandler"
            faulthandler.enable()
        else:
            environment = environment | {"PYTHONUNBUFFERED": "1"}
        arguments = arguments[1:]
    if "PYTHONUNBUFFERED" in environment:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    torch.distributed.set_debug_level_from_env()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    kind, *sys.argv = arguments
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        return functools.partial(runpy._run_module_as_main, sys.argv[0])
    if kind == "-c":
        sys.path.insert(0, "")
        code, sys.argv[0] = compile(sys.argv[0], "<string>", "exec"), "-c"
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
        sys.argv.insert(0, kind)
        main.__file__ = kind
        with open(kind, "rb") as file:
            code = compile(file.read(), kind, "exec")
    return functools.partial(exec, code, vars(main))


def fork_python(process, *given):
    """As ``Popen._execute_child``; a command of Python goes on in the fork, so that torchrun's ranks start at once."""
    bound = inspect.signature(execute_child).bind(process, *given)
    made = bound.arguments
    program, *arguments = map(os.fsdecode, made["args"])
    if program == sys.executable:
        environment = dict(os.environ if made["env"] is None else made["env"])
        made["preexec_fn"] = functools.partial(go_on, environment, arguments, made["pass_fds"])
    return execute_child(*bound.args)


def go_on(environment, arguments, passed):
    """Run a command in a fork, with nothing of its parent's but modules."""
    gc.enable()  # which Popen has not, for this call
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    atexit._clear()
    weakref.finalize._registered_with_atexit = False
    for function in (logging.shutdown, multiprocessing.util._exit_function):
        atexit.register(function)
    sys.excepthook = sys.__excepthook__
    keep(passed)  # Popen returns in the parent
    end(go_on_as(environment, os.getcwd(), arguments))


def end(run):
    """Call ``run``, and end as a script does, but for Python's last look through all of torch, for 0.3 s."""
    status, is_interrupted = 0, False
    try:
        run()
    except SystemExit as ends:
        status = ends.code if isinstance(ends.code, int) else int(ends.code is not None)
        if not isinstance(ends.code, int | None):
            print(ends.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        status = 1
        is_interrupted = isinstance(error, KeyboardInterrupt)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 255)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))()
