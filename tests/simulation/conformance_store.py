"""Programs that show the world's store: a TCPStore in the process of rank 0, below prefixes. See conformance.py."""

import datetime
import os
import threading
import time

import torch.distributed as dist

from tests.simulation.conformance import MOMENT, TIME_OUT, Scene, end_in, end_of, make_group, store
from tests.simulation.conformance_calls import value


def connection(scene, seconds=TIME_OUT):
    """Return the world's store over another connection, below a prefix of this run."""
    found = store().clone()
    found.set_timeout(datetime.timedelta(seconds=seconds))
    return dist.PrefixStore(scene.prefix, found)


def store_values():
    """The calls of a store that the first rank makes alone."""
    scene = Scene([])
    if scene.rank != 0:
        return {}
    s = connection(scene)
    s.set("a", "1")
    cases = {
        "get": lambda: s.get("a"),
        "get of a missing key": lambda: s.get("missing"),
        "multi_get of a missing key": lambda: s.multi_get(["a", "missing"]),
        "wait for a missing key": lambda: s.wait(["a", "missing"]),
        "wait for 0.1 s for a missing key": lambda: s.wait(["missing", "b"], datetime.timedelta(seconds=0.1)),
        "wait": lambda: (s.wait(["a"]), s.wait([])),
        "check": lambda: (s.check(["a"]), s.check(["a", "missing"]), s.check(["missing"]), s.check([])),
        "set again": lambda: (s.set("a", "2"), s.get("a")),
        "add": lambda: (s.add("n", 2), s.add("n", -5), s.get("n"), s.add("a", 4), s.get("a")),
        "compare_set of a missing key with something": lambda: (s.compare_set("c", "x", "y"), s.check(["c"])),
        "compare_set of a missing key with nothing": lambda: (s.compare_set("c", "", "y"), s.get("c")),
        "compare_set with another value": lambda: (s.compare_set("c", "z", "w"), s.get("c")),
        "compare_set with its value": lambda: (s.compare_set("c", "y", "w"), s.get("c")),
        "compare_set with nothing": lambda: (s.compare_set("c", "", "v"), s.get("c")),
        "compare_set that changes nothing": lambda: (s.compare_set("c", "w", "w"), s.compare_set("d", "-", "-")),
        "multi_set": lambda: (s.multi_set(["d", "e"], ["4", "5"]), s.multi_get(["e", "d"])),
        "append": lambda: (s.append("f", "x"), s.append("f", "yz"), s.get("f")),
        "delete_key": lambda: (s.delete_key("f"), s.delete_key("f"), s.check(["f"])),
        "has_extended_api": s.has_extended_api,
        "empty value": lambda: (s.set("g", ""), s.get("g"), s.check(["g"]), s.compare_set("g", "", "h"), s.get("g")),
        "empty key": lambda: (s.set("", "x"), s.get(""), s.check([""])),
        "bytes": lambda: (s.set("h", b"\x00\xff"), s.get("h")),
        "large value": lambda: (s.set("i", "x" * (1 << 22)), len(s.get("i"))),
        "key below the prefix": lambda: store().get(f"{scene.prefix}/a"),
        "prefix of a prefix": lambda: (dist.PrefixStore("p", s).set("a", "3"), s.get("p/a")),
        "timeout": lambda: (s.timeout.total_seconds(), s.clone().timeout.total_seconds()),
        "clone": lambda: (type(s.clone()).__name__, s.clone().get("a")),
        "queue": lambda: (s.queue_push("q", "1"), s.queue_push("q", "2"), s.queue_len("q"), s.queue_pop("q")),
        "queue_pop": lambda: (s.queue_pop("q"), s.queue_len("q")),
        "queue_pop of nothing without a wait": lambda: s.queue_pop("q", False),
        "queue_pop of nothing": lambda: s.queue_pop("q"),
    }
    return {name: value(case) for name, case in cases.items()}


def store_broken():
    """``add`` to a text: the server ends this connection, and no other."""
    scene = Scene([])
    if scene.rank != 0:
        return {}
    s, other = connection(scene), connection(scene)
    s.set("text", "x y")
    return {
        "add to a text": value(s.add, "text", 1),
        "then": value(s.check, ["text"]),
        "another connection": value(other.get, "text"),
    }


def store_shared():
    """A connection is locked while a thread waits on it; another connection of the same process is not."""
    scene = Scene([])
    if scene.rank != 0:
        scene.hear_first("waits")
        connection(scene).set("late", "x")
        return {}
    s, facts = connection(scene), {}
    own = s.clone()
    waiting = threading.Thread(target=lambda: facts.update({"wait": value(s.get, "never")}))
    waiting.start()
    time.sleep(MOMENT)
    facts["another connection"] = value(own.check, ["a"])
    facts["the same connection"] = value(s.check, ["a"])
    waiting.join()
    scene.say("waits")
    facts["get of a key that comes"] = value(s.get, "late")
    return facts


def store_gone(*names):
    """The process of rank 0, which holds the store, dies. Each call is made twice, on a connection of its own."""
    scene = Scene(["one"])
    [group] = scene.groups.values()
    others = make_group(range(1, scene.size)) if scene.size > 2 else None
    if scene.rank == 0:
        scene.hear("ready", range(1, scene.size))
        time.sleep(MOMENT)
        os._exit(9)
    own = {name: connection(scene) for name in names}
    waits = connection(scene, 20.0)
    arguments = {
        "check": (["a"],),
        "set": ("a", "1"),
        "get": ("a",),
        "add": ("n", 1),
        "wait": (["a"],),
        "compare_set": ("a", "", "b"),
        "multi_get": (["a"],),
        "multi_set": (["a"], ["b"]),
        "append": ("a", "b"),
        "delete_key": ("a",),
    }
    scene.say("ready")
    facts = {"wait when it dies": value(waits.wait, ["missing"])}
    time.sleep(MOMENT)
    for name, s in own.items():
        for which in ("first", "then"):
            facts[f"{name} {which}"] = value(getattr(s, name), *arguments[name])
    if others is not None:
        facts["others"] = end_in(others)
    facts["collective"] = end_in(group)
    facts["new_group"] = end_of(lambda: make_group() and None)
    facts["clone"] = value(own["check"].clone)
    return facts
