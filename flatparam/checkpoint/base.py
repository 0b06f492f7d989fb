"""Describe the parameters that a checkpoint of trained parameters leaves out, its base, and compare a model with it.

A load must not combine adapters with another base. The index keeps name, dtype and shape of each base parameter, and a
sum over samples of its values. The sum does not depend on how ranks shard the parameter. Saves and loads call this.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..fsdp.unit.local_params import LocalParam
from .errors import CheckpointError
from .files import NAMES
from .optimizers import Named
from .pieces import written

SAMPLES = 1024  # at most so many elements of a parameter, evenly spread
_WRAPS = 2**64
_MIX = 0x1E3779B97F4A7C15  # odd, and below 2**63

Base = Mapping[str, list[Any]]  # name -> [dtype, shape, sum over the samples as hexadecimal text, or None]


def is_trained(held: LocalParam, named: Named | None) -> bool:
    """Whether ``held`` is saved: a buffer, a parameter that requires grad, or one that an optimizer keeps state for."""
    return held.is_buffer or held.owner.requires_grad or (named is not None and bool(named.state_of(held.owner)))


def description(held: LocalParam) -> list[Any]:
    """Return ``[dtype, shape]`` of the whole tensor, for JSON."""
    return [NAMES.get(held.owner.dtype, str(held.owner.dtype)), list(held.shape)]


def sums_of_samples(names: Mapping[LocalParam, str], rank: int) -> dict[str, int]:
    """Return for each name a sum modulo 2**64 over the samples that ``rank`` would write.

    The total over all ranks depends on the values alone, not on how they are sharded. Tensor subclasses are left out.
    """
    plain = ((held, name) for held, name in names.items() if type(held.owner) in (Tensor, nn.Parameter))
    return {name: _sum(held, *written(held, rank)) for held, name in plain}


def _sum(held: LocalParam, begin: int, end: int) -> int:
    numel = torch.Size(held.shape).numel()
    count = min(numel, SAMPLES)
    if begin == end:
        return 0
    index = torch.arange(count, device="cpu") * numel // max(count, 1)  # of the tensor in rows
    places = zip(torch.unravel_index(index, held.shape), held.stride, strict=True)
    place = sum((at * step for at, step in places), torch.zeros_like(index))  # in the order of its memory
    here = (place >= begin) & (place < end)
    values = held.flat.detach().view(torch.uint8).view(-1, held.flat.itemsize)
    some = values.index_select(0, (place[here] - held.start).to(values.device)).cpu().long()
    number = torch.zeros_like(index[here])
    for i in range(some.shape[1]):
        number = (number + some[:, i] + 1) * _MIX
        number = number ^ (number >> 29)
    return int(((index[here] * 2 + 1) * number).sum()) % _WRAPS


def check_names(base: Base, names: Mapping[LocalParam, str], known: set[str], strict: bool) -> None:
    """Compare the model's base parameters, ``names``, with ``base``. ``known``: all names in the model.

    Raises: CheckpointError naming the first parameter with another shape or without values; if ``strict``, also one
    with another dtype, or that the model lacks.
    """
    absent = next((name for name in base if name not in known), None)
    if strict and absent is not None:
        raise CheckpointError(f"{_needs(base)}, with `{absent}`, which the model has not")
    for held, name in names.items():
        (dtype, shape), (has, here) = base[name][:2], description(held)
        if shape != here or (strict and dtype != has):
            raise CheckpointError(f"{_needs(base)}: `{name}` is {dtype} of shape {shape} there, and {has} {here} here")
        if not held.has_values:
            raise CheckpointError(f"{_needs(base)}: `{name}` has no values yet: load the base first")


def _added(told: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for sums in told:
        for name, number in sums.items():
            found[name] = (found.get(name, 0) + number) % _WRAPS
    return found


def with_sums(base: Base, told: Iterable[Mapping[str, int]]) -> dict[str, list[Any]]:
    """Return ``base`` with the total of all ranks' sums, as text: readers of JSON round large numbers."""
    found = _added(told)
    return {name: [*one, f"{found[name]:016x}" if name in found else None] for name, one in base.items()}


def check_sums(base: Base, told: Iterable[Mapping[str, int]]) -> None:
    """Compare the total of ``told``, each rank's sums, with ``base``. Raises: CheckpointError naming a parameter."""
    found = _added(told)
    wrong = [name for name, number in found.items() if base[name][2] not in (None, f"{number:016x}")]
    if wrong:
        raise CheckpointError(
            f"{_needs(base)}: `{wrong[0]}` has other values here, as {len(wrong)} of {len(found)} parameters that were "
            "compared: load that base first, or pass strict=False to load into another one"
        )


def _needs(base: Base) -> str:
    return f"the checkpoint has trained parameters alone, and needs the base of {len(base)} that they were trained on"
