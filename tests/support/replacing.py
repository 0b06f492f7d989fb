"""Watching collectives as users do: by putting functions of one's own in the place of ``torch.distributed``'s."""

import contextlib

import torch.distributed as dist


@contextlib.contextmanager
def collectives(names, replacement):
    """``torch.distributed.NAME`` is ``replacement(name, original)`` for each of ``names`` that this torch has."""
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    for name, original in originals.items():
        setattr(dist, name, replacement(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
