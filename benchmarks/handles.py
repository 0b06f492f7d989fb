"""One handle driven by hand, torch's or ours: its single steps, each timed by itself."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import _flat_param
from torch.distributed.fsdp._common_utils import HandleTrainingState

import flatparam
from benchmarks.measuring import seconds

OURS, TORCH, UNSAFE = "flatparam", "torch", "torch unsafe"
KINDS: dict[str, tuple[Any, bool]] = {  # (class, FSDP_USE_UNSAFE_SETATTR)
    OURS: (flatparam.FlatParamHandle, False),
    TORCH: (_flat_param.FlatParamHandle, False),
    UNSAFE: (_flat_param.FlatParamHandle, True),
}


@contextlib.contextmanager
def _environment(unsafe: bool) -> Iterator[None]:
    name = _flat_param._FSDP_USE_UNSAFE_SETATTR
    before = os.environ.pop(name, None)
    if unsafe:
        os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def make(kind: str, module: nn.Module, use_orig_params: bool) -> Any:
    """A FULL_SHARD handle over ``module``'s parameters in the default group, just constructed."""
    handle_class, unsafe = KINDS[kind]
    with _environment(unsafe):
        return handle_class(
            list(module.parameters()),
            module,
            torch.device("cpu"),
            _flat_param.HandleShardingStrategy.FULL_SHARD,
            False,
            None,
            None,
            False,
            dist.group.WORLD,
            use_orig_params,
        )


class Driven:
    """A handle that has been sharded and takes the steps of a training step one by one."""

    def __init__(self, kind: str, module: nn.Module, use_orig_params: bool) -> None:
        self.handle = make(kind, module, use_orig_params)
        self.handle.shard()
        self.handle.init_flat_param_attributes()
        self._use_orig_params = use_orig_params
        self._sharded_grad = torch.ones_like(self.handle.flat_param.data)
        self._unsharded_grad = torch.ones(self.handle.flat_param._unpadded_unsharded_size)

    def sample(self) -> dict[str, float]:
        """Seconds of each step of one cycle."""
        handle, flat_param = self.handle, self.handle.flat_param
        taken = {}
        states = HandleTrainingState

        if self._use_orig_params:
            flat_param.grad = self._sharded_grad
            taken["grad views, sharded"] = seconds(handle._use_sharded_grad_views)
            taken["writeback check"] = seconds(handle._writeback_orig_params)
            self._clear_grads()
            handle._training_state = states.SUMMON_FULL_PARAMS
            self._unshard()
            taken["unsharded views, summoned"] = seconds(self._unsharded_views(as_params=True))
            flat_param.grad = self._unsharded_grad
            taken["grad views, unsharded"] = seconds(handle._use_unsharded_grad_views)
            self._clear_grads()
            self._shard()
            handle._use_sharded_views()
        handle._training_state = states.FORWARD
        self._unshard()
        taken["unsharded views, forward"] = seconds(self._unsharded_views(as_params=False))
        self._shard()
        if self._use_orig_params:
            taken["sharded views, after forward"] = seconds(handle._use_sharded_views)
            handle._training_state = states.BACKWARD_PRE
            self._unshard()
            taken["unsharded views, backward"] = seconds(self._unsharded_views(as_params=False))
            self._shard()
            handle._training_state = states.BACKWARD_POST
            taken["sharded views, after backward"] = seconds(handle._use_sharded_views)
        else:
            self._unshard()
            taken["unsharded views, summoned"] = seconds(self._unsharded_views(as_params=True))
            self._unsharded_views(as_params=False)()
            self._shard()
        handle._training_state = states.IDLE
        return taken

    def _unsharded_views(self, as_params: bool) -> Callable[[], None]:
        def call() -> None:
            self.handle._use_unsharded_views(as_params=as_params)

        return call

    def _unshard(self) -> None:
        padded = self.handle._alloc_padded_unsharded_flat_param()
        flat_param = self.handle.flat_param
        flat_param.data = padded[: flat_param._unpadded_unsharded_size.numel()]

    def _shard(self) -> None:
        self.handle._free_unsharded_flat_param()
        flat_param = self.handle.flat_param
        flat_param.data = flat_param._local_shard

    def _clear_grads(self) -> None:
        flat_param = self.handle.flat_param
        flat_param.grad = None
        for param in flat_param._params:
            param.grad = None


class Constructed:
    """Handles constructed from a new module each time."""

    def __init__(self, kind: str, make_module: Callable[[], nn.Module], use_orig_params: bool) -> None:
        self._kind, self._make_module, self._use_orig_params = kind, make_module, use_orig_params

    def sample(self) -> dict[str, float]:
        """Seconds to construct a handle, to flatten the tensors alone, and to make a shard's metadata alone."""
        module = self._make_module()
        tensors = [parameter.detach() for parameter in module.parameters()]
        made: list[Any] = []
        taken = {"construction": seconds(lambda: made.append(make(self._kind, module, self._use_orig_params)))}
        [handle] = made
        aligned = handle._aligned_numel
        taken["flatten"] = seconds(lambda: handle.flatten_tensors_into_flat_param(tensors, aligned, True))
        taken["shard"] = seconds(handle.shard)
        numel = handle.flat_param.numel()
        taken["shard's metadata"] = seconds(lambda: handle._get_shard_metadata(0, numel - 1))
        taken["shard_metadata()"] = seconds(handle.shard_metadata)
        return taken
