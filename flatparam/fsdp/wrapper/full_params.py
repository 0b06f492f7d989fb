"""The wrapper's ``summon_full_params``, and the methods of modules that need full parameters or their names.

``unit/summon.py`` gathers and writes back. This file chooses the units and checks the arguments.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ...common.warned import warn_user
from ..desync.checked_collectives import telling
from ..either import or_torchs
from ..errors import WritebackError
from ..names import without_units
from ..unit.base import W, Wrapper
from ..unit.summon import refuse_unreduced, summon
from ..unit.unit import Unit


@or_torchs
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> contextlib.AbstractContextManager[None]:
    """A block in which the parameters of the units under ``module`` are whole, in full precision.

    A collective call. All arguments but ``module`` must be equal on all ranks.

    - ``recurse``: the units below ``module`` too.
    - ``writeback``: each rank copies its part of the writes into its shard when the block ends.
    - ``rank0_only``: only rank 0 of the group that shares a unit has full parameters, others have their shards.
    - ``offload_to_cpu``: the full parameters lie in host memory.
    - ``with_grads``: ``.grad`` is whole too.

    Raises: ValueError in a forward, a backward or another summon; for ``writeback`` with ``rank0_only``; for
    ``with_grads`` with accumulated gradients that are not reduced yet; and if ranks were wrapped with different
    values, because the whole would be a mixture.
    """

    def units() -> list[Unit]:
        if writeback and rank0_only:
            raise WritebackError(
                "writeback=True with rank0_only=True is not supported: it would leave the ranks with different "
                "parameters. Pass one of them"
            )
        found = []
        for each in module.modules() if recurse else [module]:
            if isinstance(each, Wrapper):
                each._check_idle(
                    "summon_full_params: Cannot manually unshard parameters during forward/backward or another summon"
                )
                found.append(each._unit)
        for unit in found:
            unit.check_not_mismatched("summon_full_params")
        if with_grads:
            refuse_unreduced(found, "summon_full_params(with_grads=True)")
        if offload_to_cpu and not rank0_only:
            warn_user(
                "summon_full_params(offload_to_cpu=True) without rank0_only=True holds every parameter once a rank "
                "in the memory of each host",
                found[0].options.placement.compared if found else (),
            )
        return found

    return summon(
        units, writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads
    )


def apply(wrapper: W, fn: Callable[[nn.Module], None]) -> W:
    """Call ``fn`` on every module while the parameters of its unit are whole. Its writes are kept.

    A collective call: it summons this unit, and each unit below before it comes to the modules of that.
    """
    wrapper._check_idle("apply")
    with summon(lambda: [wrapper._unit], writeback=True), telling(lambda: [wrapper._unit]):
        super(Wrapper, wrapper).apply(fn)
    return wrapper


def named_parameters(wrapper: Wrapper, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """As of any module; while this unit is summoned, with the names of the unwrapped model."""
    wrapper._forget_interrupted()
    for name, param in super(Wrapper, wrapper).named_parameters(*args, **kwargs):
        yield (without_units(name) if wrapper._unit.summoned is not None else name), param


def named_buffers(wrapper: Wrapper, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """As of any module; while this unit is summoned, with the names of the unwrapped model."""
    for name, buffer in super(Wrapper, wrapper).named_buffers(*args, **kwargs):
        yield (without_units(name) if wrapper._unit.summoned is not None else name), buffer
