"""Run a function in several real processes joined by gloo, and bring back what each of them returned.

The processes are forked from a fork server: a clean interpreter which has torch imported but has started no thread, so
that a launch costs a tenth of a second and never inherits what the test runner did before. They meet through a
FileStore in a temporary folder and talk over the loopback device: no port is chosen by us. Every process computes with
one thread, because BLAS adds in another order with more.
"""

import collections
import contextlib
import ctypes
import datetime
import faulthandler
import json
import multiprocessing
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing import connection

import forked_scripts
import torch
import torch.distributed as dist

PRELOADED = (
    "pytest",
    "hypothesis",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._flat_param",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.checkpoint",
    "torch.distributed._tensor",
    "torch.distributed.optim",
    "torch.testing._internal.distributed.fake_pg",
    "flatparam._api",  # where it is found from the working folder, as is the next; else each rank imports it
    "tests.support.preloaded",
)
GRACE = 3.0  # seconds that the other ranks get to tell their own error, once one rank has failed
ENDING = 30.0  # seconds in which a process that has closed its pipe ends, on a busy machine

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))
tell = None  # in a rank: gives the test process a text


class RankFailure(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback and what it printed."""


def note(text):
    """Tell the test process what this rank is doing now: the failure message of a hang or a crash shows it."""
    if tell is not None:
        tell(str(text))


_said = collections.Counter()  # by rank, as ranks may be threads: how often each was, or was waited for


def _time(what):
    """Return the key in the store for the next time that this is said."""
    _said[dist.get_rank(), what] += 1
    return f"said: {what}, {_said[dist.get_rank(), what]}"


def say(what):
    """Let ranks go on that wait until this is said, as often. Through the world's store: no collective takes part."""
    dist.distributed_c10d._get_default_store().set(_time(what), "")


def wait_until_said(what):
    """Without the store's own wait, which would keep other threads of this rank from it."""
    store, key = dist.distributed_c10d._get_default_store(), _time(what)
    while not store.check([key]):
        time.sleep(0.01)


checks = []  # what a rank calls when its function has returned
may_start = True  # whether the test that runs is marked as one that starts ranks (see conftest.py)


def run_ranks(fn, world_size, *args, timeout=120.0, environment=None):
    """Call ``fn(*args)`` on every rank of a new gloo world; return the list of the ranks' results.

    Args: ``fn`` and ``args`` can be pickled (a function of a module, not a lambda), and so can the results.
        ``timeout`` in seconds holds for all ranks together. ``environment`` has variables to set on every rank before
        the process group is made; torch itself is imported already, but its TORCH_DISTRIBUTED_DEBUG is read anew.
    Raises: RankFailure when a rank raises, dies or is not done in time. No process is left in any case.
    """
    check_mark()
    with tempfile.TemporaryDirectory(prefix="flatparam-ranks-") as folder:
        ranks = [_Rank(fn, rank, world_size, folder, args, timeout, environment) for rank in range(world_size)]
        try:
            _wait_for(ranks, time.monotonic() + timeout)
            failed = [rank for rank in ranks if not rank.succeeded]
            if failed:
                raise RankFailure("\n".join(rank.report() for rank in failed))
            return [pickle.loads(rank.result) for rank in ranks]
        finally:
            for rank in ranks:
                rank.end()


def check_mark():
    """Raise AssertionError in a test that is not marked as one that starts ranks."""
    assert may_start, "a test that starts ranks has pytest.mark.multiprocess (CONTRIBUTING.md): add it"


def script(function, *arguments, **settings):
    """A process that makes this call and ends as a script does, unlike a rank of ``run_ranks``."""
    call = f"import {function.__module__} as module; module.{function.__name__}{arguments}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return forked_scripts.Popen([sys.executable, "-c", call], env=environment, is_finalized=True, **settings)


def printed_by(program):
    """Run ``program``, a file beside this one, in a process of its own; return the JSON that it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = forked_scripts.completed([sys.executable, pathlib.Path(__file__).with_name(program)], env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ends_of_ranks(fn, world_size, *args, timeout=120.0, environment=None):
    """The same for ranks that may raise or die: for each ``(exit code, result or None, what it noted last)``.

    Those that are stopped or do not end in time have None for a code.
    """
    check_mark()
    with tempfile.TemporaryDirectory(prefix="flatparam-ranks-") as folder:
        ranks = [_Rank(fn, rank, world_size, folder, args, timeout, environment) for rank in range(world_size)]
        try:
            _wait_for(ranks, time.monotonic() + timeout, grace=timeout)
            for rank in ranks:
                if rank.process.exitcode is None:  # what it did is shown where the test fails
                    print(rank.report())
            results = [None if rank.result is None else pickle.loads(rank.result) for rank in ranks]
            return [(r.process.exitcode, result, r.last_note) for r, result in zip(ranks, results, strict=True)]
        finally:
            for rank in ranks:
                rank.end()


class _Rank:
    """One process, as the test process sees it."""

    def __init__(self, fn, rank, world_size, folder, args, timeout, environment):
        self.rank = rank
        self.output = pathlib.Path(folder, f"rank{rank}.out")
        self.last_note = "nothing yet"
        self.result = None
        self.error = None
        self.reading, writing = _context.Pipe(duplex=False)
        self.process = _context.Process(
            target=_rank_main, args=(writing, fn, rank, world_size, folder, args, timeout, environment), daemon=True
        )
        self.process.start()
        writing.close()

    @property
    def succeeded(self):
        return self.result is not None

    @property
    def done(self):
        return self.reading.closed

    def read(self):
        """Take one message, or learn that the process has closed its end."""
        try:
            kind, content = pickle.loads(self.reading.recv_bytes())
        except EOFError:
            self.reading.close()
            return
        if kind == "note":
            self.last_note = content
        elif kind == "ok":
            self.result = content
        else:
            self.error = content

    def report(self):
        code = self.process.exitcode
        if code is None:
            how = "did not end in time"
            os.kill(self.process.pid, signal.SIGQUIT)  # it prints where its threads are
            time.sleep(0.3)
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        printed = self.output.read_text(errors="replace")[-6000:] if self.output.exists() else ""
        printed += "" if code is not None else _threads_of(self.process.pid)
        return f"rank {self.rank} {how}; it was doing: {self.last_note}\n{self.error or ''}\n{printed}"

    def end(self):
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        if not self.reading.closed:
            self.reading.close()


def _threads_of(pid):
    """What the system says of a process that hangs: its threads' names, states, and what each has asked of it."""
    told = ""
    for thread in pathlib.Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            _, state, *fields = thread.joinpath("stat").read_text().rpartition(")")[2].split(" ")
            ticks = sum(map(int, fields[10:12]))
            told += f"\nthread {thread.joinpath('comm').read_text().strip()}: {state}, {ticks} ticks"
            told += ", system call " + thread.joinpath("syscall").read_text().split()[0]  # not everybody may read that
    return told


def _wait_for(ranks, deadline, grace=GRACE):
    """Read messages until every rank is done, or one has failed and the grace is over, or the deadline has passed."""
    while True:
        waiting = [rank for rank in ranks if not rank.done]
        left = deadline - time.monotonic()
        if not waiting or left <= 0:
            break
        ready = connection.wait([rank.reading for rank in waiting], timeout=left)
        for rank in waiting:
            if rank.reading in ready:
                rank.read()
        if any(rank.error is not None or (rank.done and not rank.succeeded) for rank in ranks):
            deadline = min(deadline, time.monotonic() + grace)
    for rank in ranks:
        rank.process.join(timeout=ENDING if rank.done else 0)


def _rank_main(writing, fn, rank, world_size, folder, args, timeout, environment):
    global tell
    _die_with_the_parent()
    output = os.open(os.path.join(folder, f"rank{rank}.out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(file=output)
    faulthandler.register(signal.SIGQUIT, file=output)
    faulthandler.dump_traceback_later(max(timeout - 2.0, 0.5), file=output)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(environment or {})
    if os.environ.get("FLATPARAM_TEST_DEVICE") != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo on the CPU, also where there is a GPU
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)

    def tell(text):
        writing.send_bytes(pickle.dumps(("note", text)))

    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        result = pickle.dumps(fn(*args))
        for check in checks:
            check()
        leave_world()
        writing.send_bytes(pickle.dumps(("ok", result)))
    except BaseException:
        writing.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        raise SystemExit(1) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
        writing.close()


def leave_world():
    """Destroy the world when all its ranks are connected: one that still connects would fail if another one left."""
    dist.barrier()
    dist.destroy_process_group()


def meet_again(store, backend="gloo"):
    """The world anew, with another store. A rank that is killed while it writes to a FileStore leaves half a record.

    The others would read at its end for ever: torch's File::read takes no end of a file for an error.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    leave_world()
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def meet_in_a_server():
    """The world anew, with a store in the process of rank 0, as torchrun has it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    ports = [None] * dist.get_world_size()
    dist.all_gather_object(ports, server.port if server else None)
    meet_again(server or dist.TCPStore("127.0.0.1", ports[0], is_master=False))


def _die_with_the_parent():
    """Have the kernel kill this process when the fork server ends, so that none outlives a killed test runner."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


HANDLES = ("torch", "flatparam")


@contextlib.contextmanager
def handle_of(kind):
    """Have modules wrapped inside use torch's own handle (``"torch"``) or ours (``"flatparam"``)."""
    import flatparam

    if kind not in HANDLES:
        raise ValueError(f"expected one of {HANDLES}, got {kind!r}")
    if kind == "flatparam":
        if not _inside:
            if flatparam.is_installed():
                raise AssertionError("flatparam is installed already: the comparison would be with itself")
            flatparam.install()
        _inside.append(kind)
    elif flatparam.is_installed():
        raise AssertionError("flatparam is installed already: the comparison would be with itself")
    try:
        yield
    finally:
        if kind == "flatparam":
            _inside.pop()
            if not _inside:
                flatparam.uninstall()


_inside = []  # one item for each thread of this process that uses our handle: ranks may be threads


def check_handles(model, kind):
    """Fail unless every handle in ``model`` is of ``kind``: a comparison of torch with itself proves nothing."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    import flatparam

    handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle is not None]
    assert handles, "expected at least one unit with parameters"
    for handle in handles:
        assert isinstance(handle, flatparam.FlatParamHandle) == (kind == "flatparam"), (kind, type(handle))


def both_handles(fn, *args):
    """Call ``fn(kind, *args)`` under torch's handle, then under ours, with the same seed; return both results."""
    results = []
    for kind in HANDLES:
        torch.manual_seed(1234)
        note(f"{fn.__name__} with the handle of {kind}")
        with handle_of(kind):
            results.append(fn(kind, *args))
        dist.barrier()
    return tuple(results)


def run_both(fn, world_size, *args, timeout=120.0, environment=None):
    """Return, for each rank, what ``fn(kind, *args)`` gave under torch's handle and under ours."""
    return run_ranks(both_handles, world_size, fn, *args, timeout=timeout, environment=environment)


@contextlib.contextmanager
def fake_world(world_size=1, rank=0, store=None):
    """Make this process rank ``rank`` of a world that does not exist; yields its group. Nothing is communicated.

    ``store``: what the others write to; without one nothing is kept.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=store or FakeStore(), rank=rank, world_size=world_size)
    try:
        with _written_reductions() if torch.__version__ < (2, 13) else contextlib.nullcontext():
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _written_reductions():
    """Let a reduce-scatter over a fake group write its output: this rank's slice of its input.

    Source: ``FakeProcessGroup`` of torch 2.13 does so. That of the versions before leaves the output uninitialized.
    """
    library = torch.library.Library("c10d", "IMPL")

    def write(output, given, group):
        rank = dist.ProcessGroup.unbox(group).rank()
        output.view(-1).copy_(given.reshape(-1)[rank * output.numel() : (rank + 1) * output.numel()])

    def one(output, given, group, *rest):
        write(output, given, group)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.c10d._reduce_scatter_base_.default(output, given, group, *rest)

    def several(outputs, given, group, *rest):
        for output, one_given in zip(outputs, given, strict=True):
            write(output, one_given, group)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.c10d.reduce_scatter_tensor_coalesced_.default(outputs, given, group, *rest)

    library.impl("_reduce_scatter_base_", one, "AutogradCPU")
    library.impl("reduce_scatter_tensor_coalesced_", several, "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()
