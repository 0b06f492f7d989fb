"""Warnings of what a user wrote: once, and at the user's line."""

import sys
import warnings

import torch.distributed as dist


def is_first_rank() -> bool:
    """Whether this process warns of what all ranks do alike."""
    return not dist.is_initialized() or dist.get_rank() == 0


def warn_user(message: str) -> None:
    """Warn at the line outside of flatparam that has led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "flatparam":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
