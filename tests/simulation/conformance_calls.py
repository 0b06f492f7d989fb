"""Programs that show the calls of c10d while no rank fails, or one alone: works, arguments, sums, groups.

See conformance.py. Each returns facts by name. A fact is the value of a call, or how it ends.
"""

import datetime
import time
from functools import partial

import torch
import torch.distributed as dist

from tests.simulation.conformance import (
    LATE,
    MOMENT,
    TIME_OUT,
    Begun,
    Scene,
    begin,
    end_in,
    end_of,
    ends,
    filled,
    make_group,
    raised,
    when,
)

SLICE = datetime.timedelta(seconds=0.1)
BACKEND = torch.device("cpu")


def value(function, *arguments):
    """Return what a call returns, or how it fails; and when, unless at once."""
    began = time.monotonic()
    try:
        found = function(*arguments)
    except Exception as error:
        return raised(error, began)
    late = when(began)
    return f"{found!r}" if late == "at once" else f"{found!r} {late}"


# ---------------------------------------------------------------------------------------------------------------------
# Works


def pending_work(name):
    """A work while the last rank is late, and when it has ended."""
    scene = Scene([name])
    [group] = scene.groups.values()
    if scene.is_last:
        scene.hear("begins", [0])
        time.sleep(LATE)
        begin(name, group).wait()
        return {}
    work = begin(name, group)
    scene.say("begins")
    facts = {
        "pending is_completed": value(work.is_completed),
        "pending is_success": value(work.is_success),
        "pending future": value(lambda: work.get_future().done()),
        "wait for 0.1 s": value(work.wait, SLICE),
        "is_completed after that": value(work.is_completed),
    }
    scene.hear("begins", [0])
    time.sleep(LATE + MOMENT)
    facts |= {
        "ended is_completed": value(work.is_completed),
        "ended is_success": value(work.is_success),
        "ended future": value(lambda: work.get_future().done()),
        "wait": value(work.wait),
        "waited is_completed": value(work.is_completed),
        "wait again": value(work.wait),
        "result": value(lambda: [tensor.tolist() for tensor in work.result()]),
    }
    return facts


def failed_work(name):
    """A work that has failed, since the last rank never comes."""
    scene = Scene([name])
    [group] = scene.groups.values()
    if scene.is_last:
        scene.hear("has looked", [0])
        return {}
    work = begin(name, group)
    time.sleep(1.3 * TIME_OUT)
    facts = {
        "is_completed": value(work.is_completed),
        "is_success": value(work.is_success),
        "future": value(lambda: work.get_future().done()),
        "wait for 0.1 s": value(work.wait, SLICE),
        "wait": value(work.wait),
        "wait again": value(work.wait),
        "waited is_completed": value(work.is_completed),
        "future.wait": value(lambda: work.get_future().wait()),
    }
    scene.say("has looked")
    return facts


def many_works():
    """Five all-reduces of one group, begun at once; the last rank never comes."""
    scene = Scene(["all_reduce"])
    [group] = scene.groups.values()
    if scene.is_last:
        scene.hear("ends", [0])
        return {}
    found = ends({str(i): Begun(begin, "all_reduce", group) for i in range(5)})
    scene.say("ends")
    return {"all": sorted(set(found.values()))}


def order_of_ends():
    """A large all-reduce, and a small one begun after it: whether the large one is pending when the small one ends."""
    one, other = make_group(), make_group()
    facts = {}
    for name, second in (("in one group", one), ("in two groups", other)):
        dist.barrier(one)
        large = dist.all_reduce(torch.ones(1 << 25), group=one, async_op=True)
        dist.all_reduce(torch.ones(4), group=second, async_op=True).wait()
        facts[name] = value(large.is_completed)
        large.wait()
    return facts


def wait_for_second():
    """Two all-reduces of one group; the last rank comes late. Wait for the second, then look at the first."""
    scene = Scene(["all_reduce"])
    [group] = scene.groups.values()
    if scene.is_last:
        time.sleep(LATE)
    works = [begin("all_reduce", group) for _ in range(2)]
    works[1].wait()
    time.sleep(MOMENT)
    return {"first is_completed": value(works[0].is_completed)}


def complete_at_return():
    """With ``async_op=False`` a call returns None, and its result is there."""
    group = make_group()
    mine, gathered, part = filled(2, group), torch.zeros(2 * group.size()), torch.zeros(2)
    return {
        "all_reduce": value(dist.all_reduce, mine, dist.ReduceOp.SUM, group) + f" {mine.tolist()}",
        "all_gather_into_tensor": value(dist.all_gather_into_tensor, gathered, filled(2, group), group)
        + f" {gathered.tolist()}",
        "reduce_scatter_tensor": value(dist.reduce_scatter_tensor, part, gathered, dist.ReduceOp.SUM, group)
        + f" {part.tolist()}",
    }


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def when_read(name):
    """The first rank changes its input after the begin and before the last rank comes. One element of each chunk."""
    scene = Scene([name])
    [group] = scene.groups.values()
    size = group.size()
    given = filled(4 * size if name == "reduce_scatter_tensor" else 4, group)
    out = torch.full((4 * size if name.startswith("all_gather") else 4,), -1.0)
    start = {
        "all_reduce": lambda: dist.all_reduce(given, group=group, async_op=True),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(out, given, group, async_op=True),
        "all_gather": lambda: dist.all_gather(list(out.chunk(size)), given, group, async_op=True),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(out, given, group=group, async_op=True),
        "broadcast from first": lambda: dist.broadcast(given, group_src=0, group=group, async_op=True),
        "broadcast from last": lambda: dist.broadcast(given, group_src=size - 1, group=group, async_op=True),
    }[name]
    facts = {}
    if scene.is_last:
        scene.hear("changes", [0])
        start().wait()
    else:
        work = start()
        time.sleep(MOMENT)
        facts["before"] = f"input {given[::4].tolist()} output {out[::4].tolist()}"
        given.fill_(100.0)
        scene.say("changes")
        time.sleep(2 * MOMENT)
        facts["before the wait"] = f"input {given[::4].tolist()} output {out[::4].tolist()}"
        work.wait()
    facts["after"] = f"input {given[::4].tolist()} output {out[::4].tolist()}"
    return facts


def in_place():
    """The input is a part of the output, or the reverse: this rank's part, or that of another."""
    group = make_group()
    size, facts = group.size(), {}
    for place, at in (("own", group.rank()), ("other", (group.rank() + 1) % size)):
        whole = torch.full((2 * size,), -1.0)
        mine = whole[2 * at : 2 * at + 2].copy_(filled(2, group))
        end = end_of(dist.all_gather_into_tensor, whole, mine, group, async_op=True)
        facts[f"all_gather_into_tensor from {place} place"] = f"{end} {whole.tolist()}"
        whole = filled(2 * size, group)
        end = end_of(dist.reduce_scatter_tensor, whole[2 * at : 2 * at + 2], whole, group=group, async_op=True)
        facts[f"reduce_scatter_tensor into {place} place"] = f"{end} {whole.tolist()}"
    return facts


def strided():
    """Tensors that are not contiguous, on all ranks."""
    group = make_group()
    big, column = filled(16, group).view(4, 4), filled(16, group).view(4, 4)
    reduced = filled(16, group).view(4, 4)
    part, gathered = torch.zeros(4, 4), torch.zeros(8, 2)
    return {
        "all_gather_into_tensor": end_of(
            dist.all_gather_into_tensor, gathered[:, 0], column[:, 0], group, async_op=True
        )
        + f" {gathered.t().tolist()}",
        "all_reduce": end_of(dist.all_reduce, reduced.t()[:2], group=group, async_op=True) + f" {reduced[0].tolist()}",
        "reduce_scatter_tensor": end_of(
            dist.reduce_scatter_tensor, part.t()[:2], torch.ones(4, 4), group=group, async_op=True
        )
        + f" {part[0].tolist()}",
        "broadcast": end_of(dist.broadcast, big.t()[:2], group_src=0, group=group, async_op=True)
        + f" {big[0].tolist()}",
    }


def empty(*names):
    """Tensors without elements."""
    scene = Scene(names)
    return scene.after(ends(scene.begin(numel=0)))


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def _wrong_calls():
    """Yield, by name, calls that gloo refuses or that communicate nothing: a function of the group.

    Not here: a send to a rank that the group does not have. gloo reads past the end of its list of pairs; some end at
    the time-out, some in a crash.
    """
    four, eight, ints = torch.ones(4), torch.ones(8), torch.ones(8, dtype=torch.int32)
    square, meta = torch.ones(4, 4), torch.ones(4, device="meta")
    gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    cases = {
        "all_gather_into_tensor other numel": (gather, torch.ones(6), four),
        "all_gather_into_tensor other dtype": (gather, ints, four),
        "all_gather_into_tensor other shape": (gather, square, eight),
        "all_gather_into_tensor meta": (gather, torch.ones(8, device="meta"), meta),
        "all_gather_into_tensor meta input": (gather, eight, meta),
        "all_gather one output": (dist.all_gather, [four], four),
        "all_gather other numel": (dist.all_gather, [four, torch.ones(3)], four),
        "all_gather other dtype": (dist.all_gather, [four, ints[:4]], four),
        "reduce_scatter_tensor other numel": (scatter, four, torch.ones(6)),
        "reduce_scatter_tensor other dtype": (scatter, ints[:4], eight),
        "all_reduce meta": (dist.all_reduce, meta),
        "all_reduce no tensor": (dist.all_reduce, 3),
        "all_reduce complex max": (dist.all_reduce, four + 1j, dist.ReduceOp.MAX),
        "all_reduce float band": (dist.all_reduce, four, dist.ReduceOp.BAND),
        "all_reduce premul_sum": (dist.all_reduce, four, dist._make_nccl_premul_sum(2.0)),
        "broadcast meta": (dist.broadcast, meta, 0),
    }
    for name, (function, *arguments) in cases.items():
        yield name, partial(function, *arguments, async_op=True)
    yield "broadcast from nobody", partial(dist.broadcast, four, group_src=5, async_op=True)
    yield "send not contiguous", partial(dist.isend, square[:, 0], group_dst=1)


def refused():
    """Calls that the first rank alone makes, each in a group, and the next all-reduce of all ranks in that group."""
    cases = dict(_wrong_calls())
    scene = Scene(cases)
    found = dict.fromkeys(cases, "-")
    if not scene.is_last:
        found = {name: end_of(case, group=scene.groups[name]) for name, case in cases.items()}
    return scene.after(found)


def group_of_others():
    """A collective in a group without this rank."""
    group = make_group([1])
    return {"all_reduce": end_of(dist.all_reduce, torch.ones(4), group=group, async_op=True)}


def operations(name, *dtypes):
    """An operation of reductions by dtype: all-reduce and reduce-scatter."""
    facts = {}
    for dtype in dtypes:
        given = torch.full((2,), 1, dtype=getattr(torch, dtype))
        part, operation = torch.zeros_like(given), getattr(dist.ReduceOp, name)
        end = end_of(dist.all_reduce, given, operation, group=make_group(), async_op=True)
        facts[f"all_reduce {dtype}"] = f"{end} {given.tolist()}" if end.startswith("ends") else end
        whole = torch.full((2 * dist.get_world_size(),), 1, dtype=given.dtype)
        end = end_of(dist.reduce_scatter_tensor, part, whole, operation, group=make_group(), async_op=True)
        facts[f"reduce_scatter_tensor {dtype}"] = f"{end} {part.tolist()}" if end.startswith("ends") else end
    return facts


def sums(*dtypes):
    """Whether all ranks get the same bits, and whether they are those of the sum in the order of ranks."""
    group = make_group()
    size, me, facts = group.size(), group.rank(), {}
    for name in dtypes:
        numel = 60 * size
        makers = [torch.Generator().manual_seed(rank) for rank in range(size)]
        everyone = [torch.randn(numel, generator=maker).to(getattr(torch, name)) for maker in makers]
        expected = everyone[0].clone()
        for other in everyone[1:]:
            expected += other
        reduced, part = everyone[me].clone(), torch.empty(60, dtype=expected.dtype)
        dist.all_reduce(reduced, group=group)
        dist.reduce_scatter_tensor(part, everyone[me], group=group)
        found = [torch.empty_like(reduced) for _ in range(size)]
        dist.all_gather(found, reduced, group)
        facts[f"{name} agree"] = value(lambda: all(torch.equal(reduced, other) for other in found))  # noqa: B023
        facts[f"{name} all_reduce in order"] = value(torch.equal, reduced, expected)
        facts[f"{name} reduce_scatter_tensor like it"] = value(torch.equal, part, reduced[60 * me : 60 * me + 60])
    return facts


# ---------------------------------------------------------------------------------------------------------------------
# Point to point


def point_to_point():
    """Two messages: one is waited for after the time-out, the other has come before the wait; a third never comes."""
    scene = Scene(["pair"])
    [group] = scene.groups.values()
    last, facts = group.size() - 1, {}
    if scene.is_last:
        got = torch.zeros(2)
        work = dist.irecv(got, group=group, group_src=0)
        facts["pending is_completed"] = value(work.is_completed)
        time.sleep(1.3 * TIME_OUT)
        scene.say("waits")
        facts["wait after the time-out"] = value(work.wait) + f" {got.tolist()}"
        facts["waited is_completed"] = value(work.is_completed)
        work = dist.irecv(got, group=group, group_src=0)
        time.sleep(MOMENT)
        facts["is_completed when it has come"] = value(work.is_completed) + f" {got.tolist()}"
        facts["wait for 0.1 s then"] = value(work.wait, SLICE)
        work = dist.irecv(got, group=group, group_src=0)
        facts["wait for 0.1 s for nothing"] = value(work.wait, SLICE)
        scene.say("has waited")
    else:
        scene.hear_last("waits")
        given = torch.tensor([1.0, 2.0])
        work = dist.isend(given, group=group, group_dst=last)
        facts["isend wait"] = value(work.wait)
        facts["send"] = value(partial(dist.send, given + 10, group=group, group_dst=last))
        scene.hear_last("has waited")
    facts["next"] = end_in(group)
    return facts


def tags():
    """Messages with tags, received in the other order, and one from any rank."""
    group = make_group()
    got = [torch.zeros(1) for _ in range(3)]
    if group.rank() == 0:
        works = [dist.isend(torch.full((1,), float(tag)), group=group, group_dst=1, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
        return {"send": value(partial(dist.send, torch.full((1,), 3.0), group=group, group_dst=1))}
    for tag in (2, 1):
        dist.recv(got[tag], group=group, group_src=0, tag=tag)
    return {"from any": value(dist.recv, got[0], None, group), "got": f"{[each.item() for each in got]}"}


# ---------------------------------------------------------------------------------------------------------------------
# Groups


def new_group_alone():
    """The last rank comes to new_group() when the others have given up. The next new_group() is for all ranks."""
    scene = Scene([])
    if scene.is_last:
        scene.hear_others("gives up")
    facts = {"new_group": end_of(lambda: make_group() and None)}
    scene.say("gives up")
    scene.hear("gives up", range(scene.size))
    facts["next"] = end_in(make_group())
    return facts


def destroyed():
    """The last rank destroys a group. Its connections are closed when the last reference to it goes."""
    scene = Scene(["one"])
    group = scene.groups.pop("one")
    facts = {}
    if scene.is_last:
        facts["destroy"] = value(dist.destroy_process_group, group)
        facts["destroy again"] = value(dist.destroy_process_group, group)
        scene.say("destroys")
        facts["then"] = end_in(group)
        del group
        scene.say("forgets")
        return facts
    scene.hear_last("destroys")
    facts["then"] = end_in(group)
    scene.hear_last("forgets")
    facts["forgotten"] = end_in(group)
    return facts


def aborted():
    """The last rank aborts a backend with a collective that the others do not join."""
    scene = Scene(["one"])
    [group] = scene.groups.values()
    facts = {}
    if scene.is_last:
        work = Begun(begin, "all_reduce", group)
        facts["abort"] = value(group._get_backend(BACKEND).abort)
        facts["pending"] = work.end()
        scene.say("aborts")
    else:
        scene.hear_last("aborts")
    facts["next"] = end_in(group)
    return facts
