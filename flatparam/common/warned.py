"""Warnings about the user's arguments: on one rank, and at the user's line. The wrapper's constructor uses them."""

import sys
import warnings

import torch.distributed as dist


def is_first_rank() -> bool:
    """Whether this is rank 0, which alone warns of something that all ranks do alike."""
    return not dist.is_initialized() or dist.get_rank() == 0


def warn_user(message: str) -> None:
    """Warn with the line of the nearest caller outside of flatparam."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "flatparam":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
