"""Programs that show how c10d behaves when a rank fails, is late, or calls otherwise: functions of one rank.

A program starts in a world with a store, makes its own groups, and returns facts by name: texts, or tuples of texts. It
uses torch, ``time`` and ``os`` only, so that real processes and simulated ranks can run it alike. ``conformance_calls``
and ``conformance_store`` have more programs, and ``conformance_table`` the facts that are expected.
"""

import datetime
import os
import re
import signal
import time

import torch
import torch.distributed as dist

TIME_OUT = 1.5  # seconds, of every group that a program makes
SOON = 0.5 * TIME_OUT  # less is "at once"
LATE = 0.7 * TIME_OUT  # when a rank comes that comes in time, but late
MOMENT = 0.3  # seconds in which one rank surely sees that another has gone
DIED, STOPPED = "died", "stopped"
LOST = "connection lost"

# ---------------------------------------------------------------------------------------------------------------------
# Words


def when(began, ended=None):
    """Name the time between two: at once, in time, at the time-out, or later."""
    taken = (ended or time.monotonic()) - began
    if taken < SOON:
        return "at once"
    if taken < 0.9 * TIME_OUT:
        return "in time"
    return "at time-out" if taken < 1.8 * TIME_OUT else "later"


def text_of(error):
    """Return the first sentence of a message, 80 characters of it, without addresses, numbers and places in sources.

    The name of a lost connection depends on the contents of the socket: the three names are one here.
    """
    text = str(error).partition("Exception raised from")[0].strip().partition("\n")[0]
    text = re.sub(r"\[?/[^ \]]*\.(cc|cpp|h):\d+\]?:?", "[source]", text.partition(". This is typically caused by")[0])
    text = re.sub(r"\[[0-9a-f.:]*\]:\d+|\d+\.\d+\.\d+\.\d+(:\d+)?", "<address>", text)
    text = re.sub(r"(Gloo connectFullMesh failed).*", r"\1", text)
    text = re.sub(r".*(Connection closed by peer|Connection reset by peer|Broken pipe).*", LOST, text)
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text).partition(". ")[0][:80].rstrip()


def raised(error, began, where="raises", ended=None):
    return f"{where}, {when(began, ended)}: {type(error).__name__}: {text_of(error)}"


# ---------------------------------------------------------------------------------------------------------------------
# Groups, signals between ranks, collectives


def make_group(ranks=None):
    return dist.new_group(ranks, timeout=datetime.timedelta(seconds=TIME_OUT), backend="gloo")


def store():
    return dist.distributed_c10d._get_default_store()


def filled(numel, group, dtype=torch.float32):
    return torch.full((numel,), group.rank() + 1, dtype=dtype)


def _chunks(numel, group, dtype):
    return [filled(numel, group, dtype) for _ in range(group.size())]


def _to_last(group, numel, dtype):
    """The first rank sends to the last, which receives. The others do nothing, as in ``_from_last``."""
    last = group.size() - 1
    if group.rank() == 0:
        return dist.isend(filled(numel, group, dtype), group=group, group_dst=last)
    return dist.irecv(filled(numel, group, dtype), group=group, group_src=0) if group.rank() == last else None


def _from_last(group, numel, dtype):
    last = group.size() - 1
    if group.rank() == last:
        return dist.isend(filled(numel, group, dtype), group=group, group_dst=0)
    return dist.irecv(filled(numel, group, dtype), group=group, group_src=last) if group.rank() == 0 else None


def _gather(group, numel, dtype):
    chunks = _chunks(numel, group, dtype) if group.rank() == 0 else None
    return dist.gather(filled(numel, group, dtype), chunks, group_dst=0, group=group, async_op=True)


def _scatter(group, numel, dtype):
    chunks = _chunks(numel, group, dtype) if group.rank() == 0 else None
    return dist.scatter(filled(numel, group, dtype), chunks, group_src=0, group=group, async_op=True)


def _coalesced(group, numel, dtype):
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for _ in range(2):
            dist.all_reduce(filled(numel, group, dtype), group=group)
    return _Several(manager.works)


class _Several:
    def __init__(self, works):
        self._works = works

    def is_completed(self):
        return all([work.is_completed() for work in self._works])

    def wait(self):
        for work in self._works:
            work.wait()


COLLECTIVES = {
    "all_reduce": lambda g, n, d: dist.all_reduce(filled(n, g, d), group=g, async_op=True),
    "all_reduce max": lambda g, n, d: dist.all_reduce(filled(n, g, d), dist.ReduceOp.MAX, group=g, async_op=True),
    "all_gather_into_tensor": lambda g, n, d: dist.all_gather_into_tensor(
        filled(n * g.size(), g, d), filled(n, g, d), g, async_op=True
    ),
    "all_gather": lambda g, n, d: dist.all_gather(_chunks(n, g, d), filled(n, g, d), g, async_op=True),
    "all_gather_object": lambda g, n, d: dist.all_gather_object([None] * g.size(), n, g),
    "reduce_scatter_tensor": lambda g, n, d: dist.reduce_scatter_tensor(
        filled(n, g, d), filled(n * g.size(), g, d), group=g, async_op=True
    ),
    "reduce": lambda g, n, d: dist.reduce(filled(n, g, d), group_dst=0, group=g, async_op=True),
    "broadcast from first": lambda g, n, d: dist.broadcast(filled(n, g, d), group_src=0, group=g, async_op=True),
    "broadcast from last": lambda g, n, d: dist.broadcast(
        filled(n, g, d), group_src=g.size() - 1, group=g, async_op=True
    ),
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all_single": lambda g, n, d: dist.all_to_all_single(
        filled(n * g.size(), g, d), filled(n * g.size(), g, d), group=g, async_op=True
    ),
    "barrier": lambda g, n, d: dist.barrier(g, async_op=True),
    "monitored_barrier": lambda g, n, d: dist.monitored_barrier(g, datetime.timedelta(seconds=TIME_OUT)),
    "send to last": _to_last,
    "receive from last": _from_last,
    "coalesced": _coalesced,
}


class Begun:
    """A collective that this rank has begun, perhaps with an error."""

    def __init__(self, begin, *arguments, **settings):
        self.name = arguments[0] if arguments else None
        self.began, self.ended, self._work, self._end = time.monotonic(), None, None, None
        try:
            self._work = begin(*arguments, **settings)
        except Exception as error:
            self._end = raised(error, self.began, "begin")

        if self._work is None:
            self.ended = time.monotonic()

    def look(self):
        """Note the time of its end. Return whether it has ended."""
        if self.ended is None and self._work.is_completed():
            self.ended = time.monotonic()
        return self.ended is not None

    def end(self):
        """Wait, and say how it ends: where it raises (begin, wait), what, when."""
        try:
            if self._work is not None:
                self._work.wait()
        except Exception as error:
            return raised(error, self.began, "wait", self.ended)
        return self._end or f"ends {when(self.began, self.ended)}"


POINT_TO_POINT = ("send to last", "receive from last")
SAY_NOTHING = (*POINT_TO_POINT, "reduce_scatter_tensor")  # is_completed() of their works is False before wait()


def ends(begun):
    """Return the ends, by name, of collectives that run at the same time."""
    watched = [each for each in begun.values() if each.name not in SAY_NOTHING]
    last = time.monotonic() + 2 * TIME_OUT
    while not all([each.look() for each in watched]) and time.monotonic() < last:
        time.sleep(0.01)
    return {name: each.end() for name, each in begun.items()}


def end_of(begin, *arguments, **settings):
    return Begun(begin, *arguments, **settings).end()


def begin(name, group, numel=4, dtype=torch.float32):
    return COLLECTIVES[name](group, numel, dtype)


def end_in(group, name="all_reduce"):
    return end_of(begin, name, group)


class Scene:
    """A group of all ranks for each collective, a group of all but the last rank, and the last rank, which fails."""

    def __init__(self, names):
        signals = make_group()
        self.groups = {name: make_group() for name in names}
        self.rank, self.size = signals.rank(), signals.size()
        self.prefix = f"conformance {signals.group_name}"
        self.is_last = self.rank == self.size - 1
        self._others = make_group(range(self.size - 1)) if self.size > 2 else None

    def say(self, word):
        """Let the ranks go on that ``hear`` this word. Through the store: no collective takes part."""
        store().set(f"{self.prefix}/{word} {self.rank}", "said")

    def hear(self, word, ranks):
        store().wait([f"{self.prefix}/{word} {rank}" for rank in ranks])

    def hear_first(self, word):
        """Wait until the first rank has said the word, and a moment more."""
        self.hear(word, [0])
        time.sleep(MOMENT)

    def hear_last(self, word):
        """Wait until the last rank has said the word, and a moment more."""
        self.hear(word, [self.size - 1])
        time.sleep(MOMENT)

    def hear_others(self, word):
        """Wait until each rank but the last has said the word, and a moment more."""
        self.hear(word, range(self.size - 1))
        time.sleep(MOMENT)

    def begin(self, **settings):
        return {name: Begun(begin, name, group, **settings) for name, group in self.groups.items()}

    def close(self):
        """Destroy the groups. Their connections are closed when the last reference to a group goes."""
        while self.groups:
            dist.destroy_process_group(self.groups.popitem()[1])

    def after(self, found, lives=True):
        """Add to each end that of an all-reduce in the same group, and one of the group without the last rank.

        Those begin when all are here: the last rank too, if it ``lives``. None: they begin a moment from now.
        """
        self.say("goes on")
        if lives is None:
            time.sleep(MOMENT)
        else:
            self.hear("goes on", range(self.size - (not lives)))
        following = ends({name: Begun(begin, "all_reduce", group) for name, group in self.groups.items()})
        facts = {name: (end, following[name]) for name, end in found.items()}
        if self._others is not None and not self.is_last:
            self.say("ends")
            self.hear("ends", range(self.size - 1))
            facts["others"] = (end_in(self._others),)
        return facts


# ---------------------------------------------------------------------------------------------------------------------
# Programs: the last rank fails. Each returns, by collective, its end and that of the next one in the group.


def killed_before(*names):
    """The last rank dies before the others begin."""
    scene = Scene(names)
    if scene.is_last:
        scene.say("dies")
        os._exit(9)
    scene.hear_last("dies")
    return scene.after(ends(scene.begin()), lives=False)


def killed_during(*names):
    """The last rank dies when the others have begun."""
    scene = Scene(names)
    if scene.is_last:
        scene.hear_others("begins")
        os._exit(9)
    scene.say("begins")
    return scene.after(ends(scene.begin()), lives=False)


def closed_before(*names):
    """The last rank destroys its groups before the others begin; the world stays."""
    scene = Scene(names)
    if scene.is_last:
        scene.close()
        scene.say("closes")
        return {}
    scene.hear_last("closes")
    return scene.after(ends(scene.begin()), lives=False)


def closed_during(*names):
    """The last rank destroys its groups when the others have begun."""
    scene = Scene(names)
    if scene.is_last:
        scene.hear_others("begins")
        scene.close()
        return {}
    scene.say("begins")
    return scene.after(ends(scene.begin()), lives=False)


def never(*names):
    """The last rank is elsewhere, as if it were stopped. It comes when the others have given up."""
    scene = Scene(names)
    if scene.is_last:
        scene.hear_others("gives up")
        return scene.after(ends(scene.begin()))
    found = ends(scene.begin())
    scene.say("gives up")
    return scene.after(found)


def killed_after(*names):
    """The last rank takes part to its end, and dies then."""
    scene = Scene(names)
    found = ends(scene.begin())
    if scene.is_last:
        os._exit(9)
    time.sleep(MOMENT)
    return scene.after(found, lives=False)


def killed_amid(*names):
    """The last rank dies while data flow: it has begun, and the others have not."""
    scene = Scene(names)
    if scene.is_last:
        begun = scene.begin(numel=1 << 20)
        scene.say("begins")
        time.sleep(MOMENT)
        del begun
        os._exit(9)
    scene.hear_last("begins")
    time.sleep(MOMENT)
    return scene.after(ends(scene.begin(numel=1 << 20)), lives=False)


def stopped(*names):
    """The last rank is stopped, before the others begin. For processes only."""
    scene = Scene(names)
    if scene.is_last:
        scene.say("stops")
        os.kill(os.getpid(), signal.SIGSTOP)
    scene.hear_last("stops")
    return scene.after(ends(scene.begin()), lives=False)


def late(*names):
    """The last rank comes in time, but late."""
    scene = Scene(names)
    if scene.is_last:
        time.sleep(LATE)
    return scene.after(ends(scene.begin()))


def other_collective(*pairs):
    """The last rank calls the second collective of a pair, the others the first."""
    scene = Scene(pairs)
    begun = {pair: Begun(begin, pair.split(" | ")[scene.is_last], group) for pair, group in scene.groups.items()}
    return scene.after(ends(begun), lives=None)


def other_numel(numel, *names):
    """The last rank brings ``numel`` elements where the others bring 4."""
    scene = Scene(names)
    return scene.after(ends(scene.begin(numel=numel if scene.is_last else 4)), lives=None)


def other_dtype(dtype, *names):
    """The last rank brings another dtype where the others bring float32."""
    scene = Scene(names)
    return scene.after(ends(scene.begin(dtype=getattr(torch, dtype) if scene.is_last else torch.float32)), lives=None)
