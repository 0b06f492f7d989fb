"""Collectives of several ranks on one accelerator (staged.cpp): NCCL refuses a GPU that two ranks share."""

from pathlib import Path

import simulated
import torch.distributed as dist

SOURCE = Path(__file__).with_suffix(".cpp")


def build():
    return simulated.build(SOURCE)


def use(library, device):
    """From now on ``backend="<device>:staged"`` is one."""
    dist.Backend.register_backend("staged", simulated.collectives(simulated.load(library)), devices=[device])
