"""One rank of the checkpoint benchmark: a model of some size on ours, FSDP1 or FSDP2, saved and loaded."""

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard

from benchmarks import memory
from flatparam import FullyShardedDataParallel, checkpoint
from flatparam.common.tensors import bytes_of

WIDTH = 1024
OURS, FSDP1, FSDP2, COPY = "flatparam", "FSDP1 + DCP", "FSDP2 + DCP", "plain write"


def _model(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def _wrap(name: str, module: nn.Sequential) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cpu = torch.device("cpu")
    for i, layer in enumerate(module):
        if name == FSDP2:
            fully_shard(layer, mesh=mesh)
        elif name == FSDP1:
            module[i] = TorchFSDP(layer, use_orig_params=True, device_mesh=mesh, device_id=cpu)
        else:
            module[i] = FullyShardedDataParallel(layer, use_orig_params=True)
    if name == FSDP2:
        return fully_shard(module, mesh=mesh)
    if name == FSDP1:
        return TorchFSDP(module, use_orig_params=True, device_mesh=mesh, device_id=cpu)
    return FullyShardedDataParallel(module, use_orig_params=True)


def _states(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments}


def _save(name: str, model: nn.Module, optimizer: Any, path: Path) -> None:
    if name == OURS:
        checkpoint.save(path, model, optimizer)
    elif name == COPY:
        _write(model, optimizer, path)
    else:
        writer = dcp.FileSystemWriter(str(path), sync_files=True)
        dcp.save(_states(model, optimizer), storage_writer=writer)


def _write(model: nn.Module, optimizer: Any, path: Path) -> None:
    """The same bytes, a plain file a rank, down to the disk."""
    tensors = [p.detach() for p in model.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    path.mkdir(exist_ok=True)
    with open(path / str(dist.get_rank()), "wb", buffering=0) as file:
        for tensor in tensors:
            view = bytes_of(tensor.contiguous())
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    dist.barrier()


def _load(name: str, model: nn.Module, optimizer: Any, path: Path) -> None:
    if name == OURS:
        checkpoint.load(path, model, optimizer)
    elif name != COPY:
        states = _states(model, optimizer)
        dcp.load(states, storage_reader=dcp.FileSystemReader(str(path)))
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])


def _timed(call: Callable[[], None]) -> tuple[float, int]:
    dist.barrier()
    memory.reset_peak()
    before, start = memory.resident(), time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start, memory.peak() - before


def serve(connection: Connection, folder: Path, name: str, layers: int) -> None:
    """Save and load once; send ``{what: (seconds, bytes of peak)}``."""
    sys.stdout = sys.stderr
    model = _wrap(OURS if name == COPY else name, _model(layers))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    found = {
        "save": _timed(lambda: _save(name, model, optimizer, folder / "saved")),
        "load": _timed(lambda: _load(name, model, optimizer, folder / "saved")),
    }
    connection.send(found)
