"""Raise an exception at one chosen line of a step, then train on, and see whether training is right.

A place is a line of a file and how many times it had run before: the same place is found again in the next run of the
same step, on every rank. The lines are counted by ``sys.settrace``, which also sees those that autograd calls: on the
CPU it runs hooks in the thread that called backward.
"""

import collections
import contextlib
import dataclasses
import pathlib
import sys

import torch
import torch.distributed as dist
from gloo import handle_of, note
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, _runtime_utils

import flatparam

_PACKAGE = pathlib.Path(flatparam.__file__).parent
FILES = {  # where exceptions are raised
    "handle": [str(path) for part in ("common", "dropin") for path in _PACKAGE.joinpath(part).glob("*.py")],
    "runtime": [_runtime_utils.__file__],
    "user": [__file__],
}


class Interrupted(Exception):
    """What the tests raise in place of what a user's code raises."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the model of a test is sharded and trained; travels to the ranks."""

    strategy: str = "FULL_SHARD"
    orig: bool = True
    bf16: bool = False
    root: bool = True  # whether the root has parameters of its own
    accumulated: str = ""  # a backward before the interrupted step: "sync" or "no_sync"
    steps_on: bool = False  # the optimizer steps on what was accumulated, although the forward after it failed
    forward_prefetch: bool = False

    def __str__(self):
        parts = [self.strategy.lower(), "orig" if self.orig else "flat", "bf16" if self.bf16 else "fp32"]
        others = [f"{self.accumulated}_before"] * bool(self.accumulated) + ["no_root"] * (not self.root)
        return "-".join(parts + others + ["then_step"] * self.steps_on + ["prefetch"] * self.forward_prefetch)


class Block(nn.Module):
    """Three parameters, of which the ranks hold parts."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5, bias=False)

    def forward(self, x):
        inner = torch.relu(self.a(x))
        if inner.requires_grad:
            inner.register_hook(_user_hook)
        return self.b(inner) + x


def _user_hook(gradient):
    return gradient * 1


class Net(nn.Module):
    """Two blocks, each a unit, and a head that belongs to the root."""

    def __init__(self, root):
        super().__init__()
        self.one = Block()
        self.two = Block()
        self.head = nn.Linear(5, 3) if root else nn.Identity()

    def forward(self, x):
        x = self.one(x)
        x = self.two(x)
        return self.head(x)


def build(setting):
    torch.manual_seed(3)
    net = Net(setting.root)
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = {
        "sharding_strategy": ShardingStrategy[setting.strategy],
        "use_orig_params": setting.orig,
        "mixed_precision": low if setting.bf16 else None,
        "device_id": torch.device("cpu"),
        "forward_prefetch": setting.forward_prefetch,
    }
    net.one = FullyShardedDataParallel(net.one, **settings)
    net.two = FullyShardedDataParallel(net.two, **settings)
    return FullyShardedDataParallel(net, **settings)


def batch(i):
    generator = torch.Generator().manual_seed(100 * i + dist.get_rank())
    return torch.randn(4, 5, generator=generator)


def loss(model, i):
    return model(batch(i)).float().pow(2).mean()


def weights(model):
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def start(setting):
    """Return a model that has made one step, and its optimizer."""
    model = build(setting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    if setting.accumulated:
        with model.no_sync() if setting.accumulated == "no_sync" else contextlib.nullcontext():
            loss(model, 1).backward()
    return model, optimizer


def go_on(model, optimizer):
    """Return the weights after two more steps."""
    optimizer.zero_grad()
    for i in (3, 4):
        loss(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def equal(expected, got):
    return len(expected) == len(got) and all(torch.equal(e, g) for e, g in zip(expected, got, strict=True))


class Bomb:
    """In its context, raises ``error`` at one place of ``files``; if ``at`` is None, lists all the places.

    ``in_exits``: in methods ``__exit__`` too, as a signal may come there.
    """

    def __init__(self, files, at=None, error=Interrupted, in_exits=False):
        self.files, self.at, self.error = frozenset(files), at, error
        self._spared = ("__del__",) if in_exits else ("__exit__", "__del__")  # a __del__ swallows what it raises
        self.places = []
        self.exploded = False
        self._runs = collections.Counter()

    def __enter__(self):
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *exception):
        sys.settrace(None)

    def _enter_function(self, frame, event, argument):
        return self._line if frame.f_code.co_filename in self.files else None

    def _line(self, frame, event, argument):
        if event == "line" and frame.f_code.co_name not in self._spared:
            line = (frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno)
            self._runs[line] += 1
            place = (*line, self._runs[line])
            if self.at is None:
                self.places.append(place)
            elif place == self.at:
                self.exploded = True
                sys.settrace(None)
                raise self.error(f"in {line[1]}, line {line[2]}")
        return self._line


def interrupted_step(model, bomb):
    """Make a forward and a backward with the bomb in; return how far it came."""
    phase = "forward"
    try:
        with bomb:
            value = loss(model, 2)
            phase = "backward"
            value.backward()
            phase = "done"
    except (Interrupted, KeyboardInterrupt):
        pass
    return phase


def places_on_all_ranks(setting, where):
    """The places of one step that every rank comes to, in order."""
    model, _ = start(setting)
    bomb = Bomb(FILES[where])
    interrupted_step(model, bomb)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, bomb.places)
    common = set(found[0]).intersection(*found)
    return [place for place in found[0] if place in common]


def outcomes(setting, where, first, stride, kind="flatparam"):
    """Interrupt a step at every ``stride``-th place and train on.

    Returns for each place its function, its line, the phase it was in, and "right" or what is wrong.
    """
    with handle_of("torch"):
        model, optimizer = start(setting)
        without = go_on(model, optimizer)
        model, optimizer = start(setting)
        if setting.steps_on:
            optimizer.step()
        stepped = go_on(model, optimizer)
    found = []
    with handle_of(kind):
        for k, place in enumerate(places_on_all_ranks(setting, where)[first::stride]):
            note(f"{setting} interrupted at {place}")
            model, optimizer = start(setting)
            bomb = Bomb(FILES[where], place, KeyboardInterrupt if k % 2 else Interrupted)
            phase = interrupted_step(model, bomb)
            stepping = setting.steps_on and phase == "forward"
            if stepping:
                optimizer.step()
            try:
                got = go_on(model, optimizer)
                result = "right" if equal(stepped if stepping else without, got) else "other weights"
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            found.append((place[1], place[2], phase, result if bomb.exploded else "not interrupted"))
    return found
