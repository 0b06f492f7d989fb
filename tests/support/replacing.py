"""Watching collectives as users do: by putting functions of one's own in the place of ``torch.distributed``'s.

Ranks may be threads of one process: each has its own functions.
"""

import contextlib
import functools

import torch.distributed as dist

_replaced = {}  # name in torch.distributed -> (torch's function, {rank: its replacement}), while a rank has one


@contextlib.contextmanager
def collectives(names, replacement):
    """``torch.distributed.NAME`` is ``replacement(name, original)`` for each of ``names`` that this torch has.

    Only this rank's calls reach the replacement.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            if hasattr(dist, name):
                stack.enter_context(_one(name, replacement))
        yield


@contextlib.contextmanager
def _one(name, replacement):
    rank = dist.get_rank()
    if name not in _replaced:
        _replaced[name] = getattr(dist, name), {}
        setattr(dist, name, _of_this_rank(*_replaced[name]))
    original, own = _replaced[name]
    before = own.get(rank, original)
    own[rank] = replacement(name, before)
    try:
        yield
    finally:
        own[rank] = before
        if all(function is original for function in own.values()):
            del _replaced[name]
            setattr(dist, name, original)


def _of_this_rank(original, own):
    @functools.wraps(original)
    def call(*args, **kwargs):
        return own.get(dist.get_rank(), original)(*args, **kwargs)

    return call
