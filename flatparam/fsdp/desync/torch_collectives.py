"""Collectives through ``torch.distributed``, for groups that C++ does not know and for functions that were replaced.

The C core calls them as ``name(output, input, group)`` and waits for nothing afterwards.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ...common.collectives import NAMES, torchs
from ...common.switches import Fakes
from ...common.torch_private import default_hooks

if TYPE_CHECKING:
    from .trace import GroupTrace

# (namespace, name, torch's function): once one of them is another, the Python way is taken.
WATCHED: tuple[tuple[dict[str, Any], str, Any], ...] = tuple(
    (vars(dist), name, torchs(name)) for names in NAMES.values() for name in names if name in vars(dist)
)


def _function(kind: str) -> Callable[..., Any]:
    """The function that was replaced, else the first that this torch has."""
    known = [entry for entry in WATCHED if entry[1] in NAMES[kind]]
    name = next((name for space, name, function in known if space.get(name) is not function), known[0][1])
    function: Callable[..., Any] = getattr(dist, name)
    return function


def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup, trace: "GroupTrace | None" = None) -> None:
    """``shard`` ``[n]`` of every rank into ``output`` ``[world size * n]``, in rank order.

    ``trace``: was told of it, and waits for it where no function of torch's was replaced.
    """
    function = _function("all_gather")
    if trace is None:
        function(output, shard, group=group)
        return
    trace.core.launch()
    if any(function is known for _, _, known in WATCHED):
        trace.wait_for_values(function(output, shard, group=group, async_op=True))
    else:
        function(output, shard, group=group)
        trace.core.begin()


def reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """The sum over ranks of ``whole`` ``[world size * n]``: this rank's part into ``output`` ``[n]``."""
    _function("reduce_scatter")(output, whole, group=group)


def all_reduce(tensor: Tensor, same: Tensor, group: dist.ProcessGroup) -> None:
    """The sum over ranks, in place."""
    _function("all_reduce")(tensor, group=group)


agree = all_reduce  # of flags ``[units]``: what some rank calls out of date


@functools.cache
def let_hooks_compress() -> None:
    """Have torch's hooks that compress gradients work on a CPU too, which has no stream to record."""
    decompress = default_hooks._decompress

    @functools.wraps(decompress)
    def decompressed(state: Any, grad: Tensor) -> None:
        if grad.is_cpu:
            grad.data = grad.data.to(state.parameter_type)
        else:
            decompress(state, grad)

    default_hooks._decompress = decompressed


class Hooked:
    """The same functions with a communication hook that reduces, and averages, gradients in its own way.

    Args: ``hook(state, unsharded gradient, output for the shard)``; for a gradient that is not sharded
    ``hook(state, gradient)``, in place.
    """

    def __init__(self, hook: Callable[..., Any], state: Any):
        let_hooks_compress()
        self.hook, self.state = hook, state

    all_gather, agree = staticmethod(all_gather), staticmethod(agree)

    def reduce_scatter(self, output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        """Let the hook fill ``output``."""
        self.hook(self.state, whole, output)

    def all_reduce(self, tensor: Tensor, same: Tensor, group: dist.ProcessGroup) -> None:
        """Let the hook change ``tensor``."""
        self.hook(self.state, tensor)


class Faked:
    """The functions of ``base`` without the communication that ``fakes`` leaves out: of other ranks nothing comes."""

    def __init__(self, base: Any, fakes: Fakes):
        self.base, self.fakes = base, fakes
        self.agree, self.all_reduce = agree, base.all_reduce

    def all_gather(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        """This rank's shard in the place of each, as with torch's FakeProcessGroup; or all of them."""
        if self.fakes.all_gather:
            output.view(-1, shard.numel()).copy_(shard.clone())  # which lies in it
        else:
            self.base.all_gather(output, shard, group)

    def reduce_scatter(self, output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        """Of this rank's gradient alone, or of all."""
        if self.fakes.reduce:
            output.copy_(whole.view(-1, output.numel())[dist.get_rank(group)])
        else:
            self.base.reduce_scatter(output, whole, group)
