"""Send a full optimizer state from the first rank of a group to the others.

First one broadcast of a pickled header: shapes, dtypes and small values. All ranks check the header before they come
to the tensors. Then one broadcast for each flat parameter and key, in an order that all ranks know from the header.
`optimizer.py` calls this.
"""

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.tensors import as_sent
from ..desync import checked_collectives
from ..desync.events import SetupCollective
from ..sharding.flat_param import FlatParam
from ..sharding.parameters import in_order
from ..unit.local_params import UnitParam
from .optimizer_loading import Fetch, by_first_name
from .table import Table
from .values import described


def _from_first(data: bytes, group: dist.ProcessGroup) -> Any:
    """Return the object that the first rank has pickled as ``data``. A collective call: two broadcasts."""
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    size = torch.tensor([len(data)], device=device)
    _broadcast(size, group)
    buffer = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8).to(device)
    _broadcast(buffer, group)
    return pickle.loads(buffer.cpu().numpy().tobytes())


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    checked_collectives.exchange(SetupCollective.SENDS_STATES, dist.broadcast, tensor, group=group, group_src=0)


def from_first(table: Table, full: Mapping[str, Any] | None, group: dist.ProcessGroup) -> tuple[dict[str, Any], Fetch]:
    """Return ``(header, fetch)`` for ``cut``. ``full``: the state; only the first rank's is used. A collective call.

    Each fetch is a collective call too: a broadcast of one key of a whole flat parameter, from which each rank takes
    its elements. Raises: ValueError on every rank, if the first rank has no state, or one that cannot be pickled.
    """
    is_first = dist.get_rank(group) == 0
    try:
        data = pickle.dumps(_header(table, full) if full else "rank 0 has no full optimizer state") if is_first else b""
    except Exception as error:
        data = pickle.dumps(f"rank 0 has a state that cannot be sent to other ranks: {type(error).__name__}: {error}")
    header = _from_first(data, group)
    if isinstance(header, str):
        raise ValueError(header)
    whole = by_first_name(table, full.get("state", {})) if is_first and full else {}

    @torch.no_grad()
    def fetch(
        flat_param: FlatParam, key: str, dtype: torch.dtype, params: list[UnitParam]
    ) -> Iterator[tuple[UnitParam, Tensor]]:
        flat = torch.empty(flat_param.layout.numel, dtype=dtype, device=flat_param.device)
        for param in params if is_first else ():
            value = in_order(whole[param.name][key].detach(), param.stride)
            flat.narrow(0, flat_param.layout.offsets[param.number], value.numel()).copy_(value)
        _broadcast(as_sent(flat), group)
        for param in params:
            yield param, flat.narrow(0, flat_param.layout.offsets[param.number] + param.start, param.numel)

    return header, fetch


def _header(table: Table, full: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``full`` with a ``Like`` in place of each tensor of its parameter's shape: those are broadcast later."""
    state: dict[Any, Any] = {}
    for name, values in full.get("state", {}).items():
        param = table.by_name.get(name)
        if param is None or param.flat_param is None:
            state[name] = values
        else:
            state[name] = {key: described(value, param.shape) for key, value in values.items()}
    return {"state": state, **({"param_groups": full["param_groups"]} if "param_groups" in full else {})}
