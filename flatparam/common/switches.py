"""torch's environment switches of FSDP, read when a module is wrapped. The runtime and the drop-in use them."""

import os
from typing import NamedTuple

from .torch_private import _warn_use_fake_all_gather, _warn_use_fake_reduce, logger


def environment_is_on(name: str) -> bool:
    """Whether variable ``name`` is ``1``. As in torch, no other value switches on."""
    return os.environ.get(name, "") == "1"


class Fakes(NamedTuple):
    """The collectives that are left out, to measure the time without them."""

    all_gather: bool
    reduce: bool


def fakes() -> Fakes:
    """Read FSDP_USE_FAKE_ALL_GATHER and FSDP_USE_FAKE_REDUCE; warn of each that is on, once in a process."""
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
