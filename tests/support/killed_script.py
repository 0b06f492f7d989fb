"""A script of ``flatparam.elastic`` that kills itself where tests/elastic/kills.py tells it to.

A point is a place in the code: a phase, how often the process comes to it, and the part of the phase's time that has
passed. The kernel sends the signal then, whatever the process does. Each step saves, clips and loads, or not.

Arguments: the number of steps, and a folder. In it ``orders`` has a number and strikes, and ``orders`` is replaced for
new ones.
"""

import contextlib
import ctypes
import faulthandler
import functools
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
from elastic_script import Net, batch, optimizer_of, say
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint, elastic
from flatparam.elastic import epochs, parity, training
from flatparam.elastic.epochs import MEMBER

CLIP = 1.5  # below most of the gradients, which are whole numbers up to 4
SAVES = 4  # each such step saves, trains on another batch, and loads
PACE = 0.15  # seconds of a step
WAITS = 0.4  # while new processes are to join
# seconds of a phase that this process has not been in yet
FIRST = {"recover": 0.5, "join": 0.5, "grow": 0.5, "ask": 0.5, "build": 0.1, "save": 0.05, "load": 0.05}
_OTHER = 0.03


class _Event(ctypes.Structure):
    """C's ``struct sigevent``."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    )


def signal_in(seconds, number):
    """Let the kernel send this process a signal, also where it runs in C: a thread would wait for the interpreter."""
    library, timer = ctypes.CDLL("librt.so.1"), ctypes.c_void_p()
    assert library.timer_create(0, ctypes.byref(_Event(None, number, 0)), ctypes.byref(timer)) == 0
    whole, part = divmod(max(1, int(seconds * 1e9)), 10**9)
    assert library.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, whole, part), None) == 0


class Points:
    """The phases of this process, and the strikes that wait for it. ``spent`` files: a strike is for one process."""

    def __init__(self, folder, member):
        self.folder, self.member = Path(folder), member
        self._seen, self._number, self._strikes = None, -1, []
        self._seconds = dict(FIRST)
        self.drains = False
        self.outer = ""

    def _read(self):
        """Read the orders again if they have changed."""
        with contextlib.suppress(FileNotFoundError):
            now = os.stat(self.folder / "orders").st_mtime_ns
            if now == self._seen:
                return
            self._seen = now
            said = json.loads((self.folder / "orders").read_text())
            self._number, self.drains = said["number"], said["drains"]
            slot = int(self.member.split(".")[0])
            self._strikes = [[i, dict(one)] for i, one in enumerate(said["strikes"]) if one["slot"] == slot]

    def _strike_at(self, phase):
        for i, one in self._strikes:
            if one["phase"] == phase:
                one["nth"] -= 1
                with contextlib.suppress(FileExistsError):
                    if one["nth"] < 0:
                        os.close(os.open(self.folder / f"spent-{self._number}-{i}", os.O_CREAT | os.O_EXCL))
                        return i, one
        return None

    @contextlib.contextmanager
    def phase(self, name):
        self._read()
        begin = time.monotonic()
        struck = self._strike_at(name)
        if struck is not None:
            i, one = struck
            number = signal.SIGSTOP if one["kind"] == "stop" else signal.SIGKILL
            delay = one["part"] * self._seconds.get(name, _OTHER)
            say(f"struck {self._number} {i} {self.member} {time.time() + delay}")
            signal_in(delay, number)
        try:
            yield
        finally:
            if struck is not None:  # the phase was shorter than the one before
                os.kill(os.getpid(), number)
            self._seconds[name] = time.monotonic() - begin

    def around(self, owner, name, phase):
        """Let the calls of ``owner.name`` be a phase. ``phase``: its name, or a function of the call's arguments."""
        below = getattr(owner, name)

        @functools.wraps(below)
        def call(*args, **kwargs):
            with self.phase(phase(*args) if callable(phase) else phase):
                return below(*args, **kwargs)

        setattr(owner, name, call)

    def watch(self):
        """Let the parts of ``flatparam.elastic`` be phases."""
        self.around(training.Session, "commit", "commit")
        self.around(parity.Generation, "send", "parity")
        self.around(parity.Generation, "complete", "parity")
        self.around(training.Session, "ask_to_join", "ask")
        parts = [(training.Session, "end_world"), (epochs.Epochs, "meet"), (training.Session, "make_world")]
        parts += [(training.Session, "_find_state"), (training, "rebuild"), (training, "enter")]
        for owner, name in parts:
            self.around(owner, name, lambda *_, name=name: f"{self.outer} {name.strip('_')}")
        go_to = training.Session.go_to

        @functools.wraps(go_to)
        def going(session, epoch):
            joins = session.joins is not None
            self.outer = "join" if joins else "grow" if len(epoch.members) > len(session.epoch.members) else "recover"
            try:
                with self.phase(self.outer):
                    go_to(session, epoch)
            finally:
                self.outer = ""

        training.Session.go_to = going


def say_resources(epoch, member):
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    numbers = [pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]
    say(f"resources {epoch} {member} {' '.join(map(str, numbers))}")


class Watched(nn.Module):
    """Tells when its part of the backward begins: those of later parts are reduced then."""

    def __init__(self, part):
        super().__init__()
        self.part = part
        self.begins = None

    def forward(self, x):
        x, total = self.part(x)
        if self.begins is not None and total.requires_grad:
            total.register_hook(lambda _: self.begins())
        return x, total


def built(points):
    with points.phase("build"):
        net = Net()
        for i in range(len(net.parts)):
            net.parts[i] = FSDP(net.parts[i])
        net.parts[0] = Watched(net.parts[0])
        model = FSDP(net)
        return model, optimizer_of(model)


def train(points, model, optimizer, given):
    """One step. Returns: its loss."""
    first = model.module.parts[0]
    with contextlib.ExitStack() as reduces:
        first.begins = lambda: reduces.enter_context(points.phase("reduce"))
        with points.phase("forward"):
            loss = model(given)
        with points.phase("backward"):
            loss.backward()
    with points.phase("clip"):
        model.clip_grad_norm_(CLIP, math.inf)  # the largest gradient has no rounding
    with points.phase("step"):
        optimizer.step()
    optimizer.zero_grad()
    return loss


def main(until, folder, redundancy):
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    me = os.environ[MEMBER]
    points = Points(folder, me)
    points.watch()
    say(f"begins {me} {os.getpid()}")
    model, optimizer = elastic.start(lambda: built(points), redundancy=redundancy)
    last, steps = -1, 0
    for step in elastic.steps(model, optimizer, int(until)):
        with elastic.survive():
            begin = time.time()
            epoch = training.session().epoch.number
            if not points.drains:
                time.sleep(PACE if elastic.size() == int(os.environ["WORLD_SIZE"]) else WAITS)
            if step % SAVES == 1:
                path = os.path.join(folder, f"checkpoint-{step // SAVES % 2}")
                with points.phase("save"):
                    checkpoint.save(path, model, optimizer, extra=[step, epoch], overwrite=True)
                train(points, model, optimizer, batch(step, 100 + elastic.rank()))
                with points.phase("load"):
                    checkpoint.load(path, model, optimizer)
            loss = train(points, model, optimizer, batch(step, elastic.rank())).item()
            say(f"step {step} {elastic.size()} {elastic.rank()} {epoch} {begin} {loss.hex()} {me}")
            steps = steps + 1 if epoch == last else 0
            last = epoch
            if steps == 1:
                say_resources(epoch, me)
    params = torch.cat([value.flatten() for value in model.state_dict().values()])
    say(f"end {params.numpy().tobytes().hex()}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
