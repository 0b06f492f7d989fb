"""Warnings about something that all ranks do alike: on one rank, once, and at the user's line."""

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from .. import _C

_of_thread = threading.local()
_BETWEEN = ("flatparam", "torch", "contextlib")  # packages whose lines call ours on behalf of the user


def is_first_rank(groups: Iterable[Any] = ()) -> bool:
    """Whether this is the first rank of each of ``groups``, or without groups rank 0. It alone warns for all ranks.

    Before there are groups, the launcher's variable RANK decides.
    """
    groups = tuple(groups)
    if groups:
        return all(dist.get_rank(group) == 0 for group in groups)
    return dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


def warn_user(message: str, groups: Iterable[Any] = (), category: type[Warning] = UserWarning) -> None:
    """Warn on the first rank of ``groups``, with the line of the nearest caller outside of flatparam and torch.

    In a block of ``one_of_each`` the warning is collected, and ``groups`` are those of the block.
    """
    frame = sys._getframe(1)
    collected: Collected | None = getattr(_of_thread, "collected", None)
    if collected is not None:
        collected.add((frame.f_code.co_filename, frame.f_lineno), message, category)
    elif is_first_rank(groups):
        warn_here(message, category)


def one_of_each(groups: list[Any]) -> _C.Block:
    """Return a block that collects the warnings of ``warn_user``. At its end it gives one for each line that warned.

    A block within a block does nothing: so a model's constructor warns once, not once for each unit. The warnings are
    given after an exception too, as they may explain it. Both blocks' target is the outer one's ``Collected``.
    ``groups``: filled by the caller until the end.
    """
    outer: Collected | None = getattr(_of_thread, "collected", None)
    if outer is not None:
        return _C.Block(lambda: outer, lambda: None)
    collected = Collected()

    def begin() -> Collected:
        _of_thread.collected = collected
        return collected

    def end() -> None:
        _of_thread.collected = None
        collected.give(groups)

    return _C.Block(begin, end)


class Collected:
    """The warnings of a block: by the line that warned, the first message, its category and the number of them.

    ``plan``: the units that the block builds, in words, for errors in blocks within it.
    """

    def __init__(self) -> None:
        self.plan = ""
        self._paths: dict[int, str] = {}
        self._found: dict[tuple[str, int], tuple[str, type[Warning], int]] = {}

    def wraps(self, root: nn.Module, plan: str) -> None:
        """The block builds the units of ``root``."""
        self.plan = plan
        self._paths = {id(module): path for path, module in root.named_modules()}

    def place_of(self, module: nn.Module) -> str:
        """Return the place of ``module`` in the root, for messages; empty: it is the root, or there is none."""
        path = self._paths.get(id(module))
        return f" at `{path}`" if path else ""

    def add(self, line: tuple[str, int], message: str, category: type[Warning]) -> None:
        first, _, count = self._found.get(line, (message, category, 0))
        self._found[line] = first, category, count + 1

    def give(self, groups: list[Any]) -> None:
        found, self._found = self._found, {}
        if not found or not is_first_rank(groups):
            return
        # a warning that is an error may not replace the exception that ends the block
        with contextlib.nullcontext() if sys.exc_info()[0] is None else contextlib.suppress(Warning):
            for message, category, count in found.values():
                warn_here(message if count == 1 else f"{message} (and {count - 1} more of this kind)", category)


def warn_here(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn on this rank, whichever it is, at the line of ``warn_user``: of something that other ranks may not have."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
