"""Read boxes in the memory of ranks on the same machine, in place of sending them.

Each rank shows the addresses of its boxes, and a word: random bytes. A rank that finds the word at its address can read
the boxes, too. So each rank tries, and nothing is assumed about hosts, containers and permissions. The reader looks for
the word again after the read, because a rank that leaves the call early zeroes its word before its boxes change.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from ..checkpoint.files import Part
from ..common.tensors import bytes_of

_WORD = 16  # bytes


class Shown(NamedTuple):
    """What a rank tells of its memory. ``boxes``: file -> the address of each box; 0: it must be sent."""

    process: int
    word: bytes
    at: int
    boxes: dict[str, list[int]]


def new_word() -> Tensor:
    """Return random bytes, for ``show``. Set them to zero to take the boxes back."""
    word = torch.empty(_WORD, dtype=torch.uint8, device="cpu")
    bytes_of(word)[:] = secrets.token_bytes(_WORD)
    return word


def show(parts: Mapping[str, list[Part]], word: Tensor) -> Shown:
    """Let other ranks read the boxes in ``parts``. Keep both arguments until all ranks have agreed that they did."""
    _C.allow_reads()
    boxes = {file: [_address(part.tensor) for part in theirs] for file, theirs in parts.items()}
    return Shown(os.getpid(), bytes(bytes_of(word)), word.data_ptr(), boxes)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor whose elements lie in one run in memory that the system can read, else 0."""
    is_run = tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return tensor.data_ptr() if is_run and not tensor.is_pinned() else 0  # a driver's memory may have no pages


def read(shown: Shown, runs: Sequence[tuple[Tensor, int]] = ()) -> bool:
    """Fill tensors, each one run, from addresses in the memory that another rank has ``shown``.

    Returns: whether its word was there afterwards; if not, the values of the tensors are undefined.
    """
    found = torch.zeros(_WORD, dtype=torch.uint8, device="cpu")
    every = [*runs, (found, shown.at)]
    try:
        _C.read_process(shown.process, [number for out, at in every for number in (out.data_ptr(), at, out.nbytes)])
    except OSError:
        return False
    return bytes_of(found) == shown.word
