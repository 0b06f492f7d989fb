"""Change the dtype or the device of a flat parameter's shard in a unit that is trained on.

Trainers do both through names of torch's handle: they make the shards fp32 for a model that was read in 16 bits, and
move shards off the device while it does other work. ``torch_names.py`` calls ``store`` and ``move``; the first forward
calls ``choose_dtype``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import _C
from ...common.tensors import rounds
from ..desync.same_unit import check_described
from ..errors import StateError
from ..sharding.flat_param import FlatParam
from ..unit.base import Wrapper
from ..unit.unit import Unit
from .copying import check_stays


@torch.no_grad()
def store(wrapper: Wrapper, flat_param: FlatParam, dtype: Any) -> None:
    """Cast the shard and its gradients to ``dtype``. The dtypes of computation and reduction stay.

    Without ``param_dtype`` the unit goes on computing in the dtype that the shard had before, as in torch's class,
    unless the first forward decides otherwise (``choose_dtype``).
    Raises: TypeError if ``dtype`` is no floating dtype; ValueError if it would round; StateError in a pass, and, for a
    unit without ``param_dtype``, after the first forward.
    """
    unit, flat = wrapper._unit, flat_param.flat
    what = f"{unit.name}: its shard with `{flat_param.originals[0].fqn}`"
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"{what}: expected a floating torch.dtype to store it in, got {dtype!r}")
    if rounds(flat.dtype, dtype):
        raise ValueError(
            f"{what} is in {flat.dtype}, which {dtype} would round: convert the model before it is wrapped, or with "
            f"model.to({dtype})"
        )
    wrapper._check_idle_here("changing the dtype of a shard")
    keeps = flat_param.compute_dtype is None and flat.is_floating_point() and dtype != flat_param.dtype
    if keeps and unit.core.root is not None:
        raise StateError(
            f"{what} can be put in {dtype} before the first forward only, as there is no mixed precision: pass "
            "MixedPrecision(param_dtype=...), or call this before"
        )
    _put(wrapper, flat_param, lambda tensor: tensor.to(dtype))
    unit.sync_user_writes()  # with use_orig_params users write to the originals
    if keeps:
        flat_param.compute_dtype, flat_param.keeps_dtype = flat_param.dtype, True
        unit.make_core()
    else:
        unit.go_on()


def choose_dtype(wrappers: Sequence[Wrapper], inputs: Iterable[Tensor]) -> None:
    """Before the first forward of a tree: choose the dtype that masters compute in, which ``store`` has cast.

    Only for units without ``param_dtype``. If all floating ``inputs`` have the dtype of the masters, the units compute
    in it, where torch's class would refuse the inputs. Else they compute in the dtype from before ``store``.
    A collective call if there are such masters: ranks compare the choice.
    Raises: ValueError on all ranks if they choose differently.
    """
    kept = [flat_param for wrapper in wrappers for flat_param in wrapper._unit.flat_params if flat_param.keeps_dtype]
    if not kept:
        return
    floating = {tensor.dtype for tensor in inputs if tensor.is_floating_point()}
    in_full = bool(floating) and all(floating == {flat_param.flat.dtype} for flat_param in kept)
    in_full = in_full and not torch.is_autocast_enabled(kept[0].device.type)  # autocast takes both dtypes
    said = [("the dtype of floating inputs", f"{each.flat.dtype}, as of the shards: {in_full}") for each in kept]
    for group in wrappers[0]._placement.compared:
        check_described(said, None, group)
    for flat_param in kept:
        flat_param.keeps_dtype = False
        if in_full:
            flat_param.compute_dtype = None
    for wrapper in wrappers if in_full else ():
        if any(flat_param in kept for flat_param in wrapper._unit.flat_params):
            wrapper._unit.make_core()


@torch.no_grad()
def move(wrapper: Wrapper, flat_param: FlatParam, *args: Any, **kwargs: Any) -> None:
    """Move the shard and its gradients as ``Tensor.to(*args, **kwargs)`` does. Frees the gathered data.

    A move to the host is never ``non_blocking``, because the host may read the shard at once. Local.
    Raises: StateError in a pass; ValueError for the meta device, and for accumulated gradients that are not reduced.
    """

    def to(tensor: Tensor) -> Tensor:
        if tensor.new_empty(0).to(*args, **kwargs).is_cpu:
            return tensor.to(*args, **{**kwargs, "non_blocking": False})
        return tensor.to(*args, **kwargs)

    wrapper._check_idle_here("flat_param_to")
    check_stays(wrapper, to)
    unit = wrapper._unit
    unit.sync_user_writes()
    unit.core.release()
    _put(wrapper, flat_param, to)
    unit.go_on()
    wrapper._move_inputs()


def _put(wrapper: Wrapper, flat_param: FlatParam, fn: Callable[[Tensor], Tensor]) -> None:
    """Replace the data of the shard and of its gradients by ``fn`` of them. If ``fn`` raises, nothing changes."""
    flat, unit = flat_param.flat, wrapper._unit
    flat_param.refuse_freed(flat)
    unit.refuse_freed_gradients()
    grads = [(param, fn(param.grad)) for param in flat_param.stepped if param.grad is not None]
    data = fn(flat.detach())
    if torch._has_compatible_shallow_copy_type(flat, data):
        flat.data = data
    else:
        _exchange(unit, flat_param, data)
    for param, grad in grads:
        _C.set_grad(param, grad)


def _exchange(unit: Unit, flat_param: FlatParam, data: Tensor) -> None:
    """Set the data of the parameters if ``.data`` cannot: to or from a device outside of torch.

    It swaps the tensors inside of the Parameter objects.
    Raises: StateError if a graph refers to one of them: its gradient would be lost.
    """
    pieces = {id(here.original.param): (here.original.param, here.of(data)) for here in flat_param.shard_slices()}
    given = [(flat_param.flat, data), *(pieces.values() if flat_param.use_orig_params else ())]
    for param, _ in given:
        if param._use_count() > 1:
            raise StateError(
                f"{unit.name}: a graph has saved `{flat_param.originals[0].fqn}` or another parameter of its shard, so "
                "the shard cannot be moved to or from this device: delete the outputs of that graph first"
            )
    for param, value in given:
        torch._C._swap_tensor_impl(param, nn.Parameter(value, param.requires_grad))
