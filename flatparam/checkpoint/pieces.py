"""List the parameters and buffers on this rank, those in LayerZero's handles too, and choose the elements it writes.

Replicas share the writing: each element is written by one rank. Nothing is communicated: the placement decides.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from ..common.tensors import refuse_freed
from ..fsdp.names import bare_names
from ..fsdp.unit.local_params import LocalParam, UnitParam, local_params_of, refuse_forms
from ..layer_zero.handle import FlatParamHandle, owner_of
from ..layer_zero.states import IDLE


@dataclass(eq=False, kw_only=True)
class InHandle(LocalParam):
    """A parameter that LayerZero's handle has sharded."""

    handle: FlatParamHandle
    is_managed = True

    def _find_flat(self) -> Tensor:
        flat_param = self.handle.flat_param
        piece = flat_param._shard_param_infos[self.number]
        shard: Tensor = flat_param._zero1_shard.detach()
        refuse_freed(shard, f"the shard that holds `{self.name}`")
        return shard.narrow(0, piece.offset_in_shard or 0, piece.numel_in_shard or 0)

    @property
    def numel(self) -> int:
        return self.flat.numel()

    @property
    def is_sharded(self) -> bool:
        return self.handle.zero1_world_size > 1


def all_held(module: nn.Module, trainable_only: bool = False) -> list[LocalParam]:
    """Return the parameters and buffers on this rank, also in handles. ``trainable_only``: do not refuse frozen ones.

    Raises: ValueError for a tensor that another library has sharded.
    """

    def other(name: str, tensor: Tensor) -> LocalParam | None:
        is_left_out = trainable_only and isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        return None if is_left_out and owner_of(tensor) is None else _in_handle(name, tensor)

    held = list(local_params_of(module, other=other, name_of=bare_names(module)))
    read = (one for one in held if not trainable_only or one.is_buffer or one.owner.requires_grad)
    refuse_forms(read, "flatparam.checkpoint", "use torch.distributed.checkpoint with SHARDED_STATE_DICT")
    return held


def written(held: LocalParam, rank: int, shares: bool = True) -> tuple[int, int]:
    """Return the elements ``[begin, end)`` of the whole tensor, in its memory order, that this rank writes.

    Replicas of a shard write equal parts of it, or unless ``shares`` each writes all of it. ``rank``: in the group that
    saves; rank 0 writes unsharded tensors.
    """
    if held.is_managed and not (shares and isinstance(held, UnitParam)):
        return held.start, held.start + held.numel
    if not isinstance(held, UnitParam):
        return 0, held.numel if rank == 0 else 0
    numel, placement = held.flat_param.layout.shard_numel, held.flat_param.placement
    replica = 0 if placement.replicate is None else dist.get_rank(placement.replicate)
    first, last = numel * replica // placement.replicas, numel * (replica + 1) // placement.replicas
    begin, end = max(first, held.shard_slice.start), min(last, held.shard_slice.start + held.numel)
    start = held.start - held.shard_slice.start
    return (start + begin, start + end) if begin < end else (held.start, held.start)


def _in_handle(name: str, tensor: Tensor) -> LocalParam | None:
    """Return the parameter of ``tensor`` in its handle; None: it is in none, or the handle has not sharded it.

    Raises: ValueError for a tensor of another library's class, or if the handle is in the middle of a pass.
    """
    handle = owner_of(tensor)
    if handle is None or not hasattr(handle.flat_param, "_zero1_shard"):
        if type(tensor) not in (Tensor, nn.Parameter):
            raise ValueError(
                f"`{name}` is a {type(tensor).__name__}, which is sharded by something else: save it by that"
            )
        return None
    if handle._state is not IDLE or handle._is_unsharded:
        raise ValueError(f"`{name}`: its handle is in {handle._state.name}, expected it to be IDLE and sharded")
    handle._write_back()
    flat_param = handle.flat_param
    number = next(i for i, one in enumerate(flat_param._params) if one is tensor)
    shape, stride = tuple(flat_param._shapes[number]), tuple(flat_param._strides[number])
    start = flat_param._shard_param_infos[number].intra_param_start_idx or 0
    return InHandle([name], tensor, shape, stride, number=number, start=start, handle=handle)
