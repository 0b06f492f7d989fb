"""Messages about collectives: how a rank reports one, and how the reports of two ranks differ.

``trace.py`` calls this to build its messages. The module issues no collective and calls no store.
"""

import enum
import re
from typing import NamedTuple

from ... import _C
from ..names import listed
from .unit_ids import UnitIds

_KINDS = {
    _C.EVENT_GATHERS: "gathers",
    _C.EVENT_REDUCES: "reduces the gradients of",
    _C.EVENT_GATHERS_OUTSIDE: "gathers, to show or to save it,",
    _C.EVENT_REDUCES_ACCUMULATED: "reduces the gradients, and those accumulated in no_sync, of",
    _C.EVENT_AGREES: "compares changes of",
    _C.EVENT_AGREES_ON_GRADIENTS: "compares, to reduce them, which gradients there are of",
    _C.EVENT_CLIPS: "clips the gradients of",
    _C.EVENT_SHOWS_GRADIENTS: "compares, to show them, which gradients there are of",
    _C.EVENT_SCALES: "looks for infinite gradients of",
    _C.EVENT_LEARNS: "compares what the first forwards have written to",
}


_SUMS = {_C.EVENT_AGREES, _C.EVENT_AGREES_ON_GRADIENTS, _C.EVENT_LEARNS}  # sums of flags, each about many units
_STEP = "a forward or a backward"
_CALLS = {  # by kind: the call of a user that issues it. The others belong to a step
    _C.EVENT_GATHERS_OUTSIDE: "state_dict(), summon_full_params() or the like",
    _C.EVENT_CLIPS: "clip_grad_norm_()",
    _C.EVENT_SHOWS_GRADIENTS: "summon_full_params(with_grads=True)",
    _C.EVENT_SCALES: "a gradient scaler",
}


class SetupCollective(enum.Enum):
    """The purposes of collectives that belong to no unit.

    The last three are meetings in a store. ``RESIZES`` is also the purpose of collectives in such a meeting.
    For messages: ``what`` a rank does in it, and the user's ``call`` that issues it.
    """

    BUILDS = "builds a unit", "FullyShardedDataParallel()"
    SENDS_MODULES = (
        "builds a unit that rank 0 gives values (sync_module_states)",
        "FullyShardedDataParallel(sync_module_states=True)",
    )
    LOADS = "compares what it loads", "load_state_dict() or the like"
    TELLS_STATES = "tells which optimizer states it has", "optim_state_dict()"
    SENDS_STATES = "takes the optimizer state that rank 0 has", "optim_state_dict_to_load() or the like"
    COMMITS = "commits a step", "elastic.steps()"
    SAVES_CHECKPOINT = "saves a checkpoint", "checkpoint.save()"
    LOADS_CHECKPOINT = "loads a checkpoint", "checkpoint.load()"
    RESIZES = "moves the model to other ranks", "elastic.resize()"

    def __init__(self, what: str, call: str):
        self.what, self.call = what, call


_EXCHANGES = list(SetupCollective)
# C adds a multiple of this to an id: the ``trained`` of fp_event() in csrc/tensor/fp_channel.h
_EVENTS = 2**32 * _C.EVENT_KINDS
IN_ONE_ORDER = ". Every rank must run the same units in the same order, as often"
_ALIKE = ". Every rank must make these calls in the same order, as often: none of them under `if rank == 0:` alone"
_TRAINED = ". Set requires_grad, and give backward(inputs=...) parameters, alike on every rank"
DIFFERENT = re.compile("the ranks (do|train|run units in) different|Forward order differs")  # by difference()


class CollectiveEvent(NamedTuple):
    """One collective as a rank reports it. C writes and reads its text for the store: fp_report.h.

    ``event``: 2 * C's event id + (1 if the collective is the first of an iteration).
    """

    rank: int
    step: int
    event: int
    what: str
    trained: str = ""  # for a reduction: one digit a parameter, 1 if it requires grad

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}"

    def to_text(self) -> str:
        """Return the text for the store."""
        return _C.write_report(self.rank, self.step, self.event, f"{self.trained} {self.what}")

    @classmethod
    def from_text(cls, said: str) -> "CollectiveEvent":
        """Return the event of a text of ``to_text``."""
        rank, step, event, text = _C.read_report(said)
        trained, _, what = text.partition(" ")
        return cls(rank, step, event, what, trained)


def encode(exchange: SetupCollective) -> int:
    """Return C's event id of a setup collective."""
    return _EXCHANGES.index(exchange) * _C.EVENT_KINDS + _C.EVENT_EXCHANGES


def describe(ids: UnitIds, rank: int, step: int, event: int, new_pass: int) -> CollectiveEvent:
    """Return the report of ``event`` of a ``_C.CollectiveTrace``.

    ``ids``: the units of the same group; ``new_pass``: 1 if the collective is the first of an iteration.
    """
    more, (number, kind) = event // _EVENTS, divmod(event % _EVENTS, _C.EVENT_KINDS)
    if kind == _C.EVENT_EXCHANGES:
        return CollectiveEvent(rank, step, event * 2 + new_pass, f"{_EXCHANGES[number].what}, in step {step}")
    gathers = kind == _C.EVENT_GATHERS
    trained = ids.trained(number) if more and not gathers and kind not in _SUMS else {}
    others = f" and {more % 256 - 1} flat parameters of small units with it" if more % 256 > 1 and gathers else ""
    others = f" and {more - 1} more" if more > 1 and kind in _SUMS else others
    what = f"{_KINDS[kind]} {ids.name(number)}{others}, in step {step}"
    flags = "".join(str(int(is_trained)) for is_trained in trained.values())
    return CollectiveEvent(rank, step, event * 2 + new_pass, what, flags)


def is_learning(event: CollectiveEvent) -> bool:
    """Whether this is the consensus on the parameters that forwards write to: once, after the first forwards."""
    return _kind(event) == _C.EVENT_LEARNS


def difference(ids: UnitIds, first: CollectiveEvent, second: CollectiveEvent) -> tuple[str, str]:
    """Return how two ranks' reports of one collective differ, and what to do about it."""
    one, other = sorted((first, second))
    same_unit = one.event != other.event and (one.event - other.event) % (2 * _EVENTS) == 0
    if same_unit and _kind(one) not in {_C.EVENT_GATHERS, *_SUMS}:
        return _trained_by_one(ids, one, other), _TRAINED
    calls = [_call(event) for event in (one, other)]
    if calls[0] != calls[1]:
        return f"the ranks do different things: {one}, for {calls[0]}; {other}, for {calls[1]}", _ALIKE
    forward = ids.is_in_forward(_number(second))
    what = "Forward order differs across ranks" if forward else "the ranks run units in different orders"
    which = ""
    if one.what == other.what and one.event // 2 != other.event // 2:
        which = ", which are others" if same_unit else ", of another model"
    return f"{what}: {one}; {other}{which}", IN_ONE_ORDER


def _trained_by_one(ids: UnitIds, one: CollectiveEvent, other: CollectiveEvent) -> str:
    number = _number(one)
    names = [f"`{fqn}`" for fqn in ids.trained(number)] or ["a parameter"]
    found = []
    for post, less in ((one, other), (other, one)):
        flags = zip(names, post.trained, less.trained, strict=False)
        alone = [name for name, *trained in flags if trained == ["1", "0"]]
        if alone:
            verb = "requires" if len(alone) == 1 else "require"
            found.append(f"{', '.join(listed(alone))} {verb} grad on rank {post.rank} and not on rank {less.rank}")
    what = "; ".join(found) or f"requires_grad was not the same on ranks {one.rank} and {other.rank}"
    return f"the ranks train different parameters of {ids.name(number)}, in step {one.step}: {what}"


def _call(post: CollectiveEvent) -> str:
    """Return the call that issues the collective, as a user writes it."""
    return _EXCHANGES[_number(post)].call if _kind(post) == _C.EVENT_EXCHANGES else _CALLS.get(_kind(post), _STEP)


def _kind(post: CollectiveEvent) -> int:
    return post.event // 2 % _C.EVENT_KINDS


def _number(post: CollectiveEvent) -> int:
    """Return the id of the flat parameter in ``UnitIds``."""
    return post.event // 2 % _EVENTS // _C.EVENT_KINDS
