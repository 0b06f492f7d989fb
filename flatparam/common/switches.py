"""What FSDP reads from the environment when a module is wrapped."""

import os
from typing import NamedTuple

from .torch_private import _warn_use_fake_all_gather, _warn_use_fake_reduce, logger


def environment_is_on(name: str) -> bool:
    """Only ``1`` switches on, as in torch."""
    return os.environ.get(name, "") == "1"


class Fakes(NamedTuple):
    """Which collectives are left out, so that the time without them can be measured."""

    all_gather: bool
    reduce: bool


def fakes() -> Fakes:
    """What the environment says, with a warning of each, once in a process."""
    found = Fakes(environment_is_on("FSDP_USE_FAKE_ALL_GATHER"), environment_is_on("FSDP_USE_FAKE_REDUCE"))
    if found.all_gather:
        _warn_use_fake_all_gather(
            logger, "FSDP_USE_FAKE_ALL_GATHER=1: nothing is all-gathered; training is wrong, only its time counts."
        )
    if found.reduce:
        _warn_use_fake_reduce(
            logger, "FSDP_USE_FAKE_REDUCE=1: nothing is reduced; training is wrong, only its time counts."
        )
    return found
