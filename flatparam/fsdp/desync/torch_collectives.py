"""Collectives through ``torch.distributed``, for groups that C++ cannot find and for functions that were replaced.

The C core (``_C.Root``) calls them as ``name(output, input, group)`` and does not wait afterwards: they return when the
result is valid for the current stream. ``Hooked`` and ``Faked`` stand in for the module with a communication hook, and
where the user leaves collectives out to measure time. The module does not know units.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ...common.collectives import NAMES, torchs
from ...common.patches import flat_params_live
from ...common.switches import Fakes

if TYPE_CHECKING:
    from .trace import GroupTrace

# (namespace, name, torch's function): C compares them, and takes the functions of this module once one was replaced
WATCHED: tuple[tuple[dict[str, Any], str, Any], ...] = tuple(
    (vars(dist), name, torchs(name)) for names in NAMES.values() for name in names if name in vars(dist)
)


def _function(kind: str) -> Callable[..., Any]:
    """Return the function of ``kind`` that a user has replaced, else the first that this torch has."""
    known = [entry for entry in WATCHED if entry[1] in NAMES[kind]]
    name = next((name for space, name, function in known if space.get(name) is not function), known[0][1])
    function: Callable[..., Any] = getattr(dist, name)
    return function


def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup, trace: "GroupTrace | None" = None) -> None:
    """Gather ``shard`` ``[n]`` of every rank into ``output`` ``[world size * n]``, in rank order.

    ``trace``: has recorded the collective. The trace waits for it, unless a user has replaced torch's function.
    """
    function = _function("all_gather")
    if trace is None:
        function(output, shard, group=group)
        return
    if any(function is known for _, _, known in WATCHED):
        trace.run_for_values(lambda: function(output, shard, group=group, async_op=True))
    else:
        trace.begin(lambda: function(output, shard, group=group))


def reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``whole`` ``[world size * n]`` over the ranks, and write this rank's part to ``output`` ``[n]``."""
    _function("reduce_scatter")(output, whole, group=group)


def exchange(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Write this rank's part of each rank's ``whole`` ``[world size * n]`` to ``output``, in rank order."""
    _function("exchange")(output, whole, group=group)


def all_reduce(tensor: Tensor, same: Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``tensor`` over the ranks, in place. ``same``: ``tensor`` again, for the common signature."""
    _function("all_reduce")(tensor, group=group)


agree = all_reduce  # of flags ``[units]``: nonzero where some rank calls a unit stale


@flat_params_live.around(
    "torch.distributed.algorithms._comm_hooks.default_hooks:_decompress",
    test="tests/fsdp/wrapper/test_fsdp_settings.py",
)
def _decompressed(decompress: Any, state: Any, grad: Tensor) -> None:
    """Let torch's compressing hooks work on a CPU: they record a stream, which a CPU lacks."""
    if grad.is_cpu:
        grad.data = grad.data.to(state.parameter_type)
    else:
        decompress(state, grad)


class Hooked:
    """The functions of this module with a communication hook, which reduces and averages gradients itself.

    Args: ``hook(state, unsharded gradient, output for the shard)``; for a gradient that is not sharded
    ``hook(state, gradient)``, in place.
    """

    def __init__(self, hook: Callable[..., Any], state: Any):
        self.hook, self.state = hook, state

    all_gather, agree = staticmethod(all_gather), staticmethod(agree)

    def reduce_scatter(self, output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        """Let the hook fill ``output``."""
        self.hook(self.state, whole, output)

    def all_reduce(self, tensor: Tensor, same: Tensor, group: dist.ProcessGroup) -> None:
        """Let the hook change ``tensor``."""
        self.hook(self.state, tensor)


class Faked:
    """The functions of ``base`` without the collectives in ``fakes``. Values are wrong; time can be measured."""

    def __init__(self, base: Any, fakes: Fakes):
        self.base, self.fakes = base, fakes
        self.agree, self.all_reduce = agree, base.all_reduce

    def all_gather(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        """Gather, or put this rank's shard in the place of each rank's, as torch's FakeProcessGroup does."""
        if self.fakes.all_gather:
            output.view(-1, shard.numel()).copy_(shard.clone())  # a copy, since the shard lies in ``output``
        else:
            self.base.all_gather(output, shard, group)

    def reduce_scatter(self, output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        """Reduce-scatter, or take this rank's part of its own gradient."""
        if self.fakes.reduce:
            output.copy_(whole.view(-1, output.numel())[dist.get_rank(group)])
        else:
            self.base.reduce_scatter(output, whole, group)

    def exchange(self, output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        """Exchange parts, or take this rank's own gradient."""
        if self.fakes.reduce:
            output.copy_(whole)
        else:
            self.base.exchange(output, whole, group)
