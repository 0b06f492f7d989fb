"""LayerZero's FlatParamHandle: one unit, sharded over two groups, driven call by call without a wrapper.

The constructor checks all arguments with all ranks before it changes the module.
"""

import functools
import inspect
import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from .. import _C
from ..common.described import Described
from ..common.tensors import check_memory
from ..common.torch_private import FlatParameter, HandleShardingStrategy
from ..dropin import flatten
from ..dropin.base import TORCH_HANDLE
from ..dropin.handle import FlatParamHandle as FlatParam
from ..fsdp.desync.same_unit import check_described
from ..fsdp.sharding.placement import check_pair
from ._gradients import Gradients
from .metadata import FlatParamShardMetadata
from .states import IDLE

_owners: "weakref.WeakValueDictionary[int, FlatParamHandle]" = weakref.WeakValueDictionary()  # by parameters' ids


class FlatParamHandle(Gradients):
    """Owns the flat parameter of one unit: masters sharded over the zero1 group, zero3 shards over the zero3 group.

    Args:
        params: the parameters to flatten: at least one, all in ``zero3_module``'s tree, real, floating-point, of one
            dtype and device, in no other handle.
        zero3_module: the module whose forward needs them.
        device: the device of computation and communication.
        mp_param_dtype: dtype of forward, backward and all-gathers; None for the parameters' own.
        mp_reduce_dtype: dtype of the reduce-scatter; None for the masters' dtype: the parameters', at least float32.
        zero3_process_group: the ranks over which forward and backward gather; disjoint groups of one size.
        zero1_process_group: the ranks that share masters, gradients and optimizer state; it contains the zero3 group.
        offload_grads: keep the sum of the micro-batches in pinned host memory, ``4 * N`` bytes.

    All ranks of ``zero1_process_group`` must construct it with equal arguments. Shapes: ``flat_param`` is 1-D: N
    elements unsharded, N / ranks of zero1 sharded; `_parameters.py` has the other tensors.
    Raises: ValueError or TypeError on all ranks alike, in the cases that docs/layerzero.md lists.
    Source: MindSpeed's LayerZeRO, ``zero3/flat_param.py``: its names and order of calls. docs/layerzero.md lists the
    differences.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter | Tensor],
        zero3_module: nn.Module,
        device: torch.device,
        mp_param_dtype: torch.dtype | None,
        mp_reduce_dtype: torch.dtype | None,
        zero3_process_group: dist.ProcessGroup,
        zero1_process_group: dist.ProcessGroup,
        offload_grads: bool = False,
    ) -> None:
        params = list(params)
        dtypes, groups = (mp_param_dtype, mp_reduce_dtype), (zero3_process_group, zero1_process_group)
        self.initialize(params, zero3_module, device, *dtypes, *groups, offload_grads)
        FlatParam.__init__(
            self._flat,
            params,
            zero3_module,
            self.device,
            HandleShardingStrategy.FULL_SHARD,
            False,  # offload_params
            *dtypes,
            False,  # keep_low_precision_grads
            zero1_process_group,
            use_orig_params=True,
        )
        self.flat_param = self._flat.flat_param
        self._device_handle, self._aligned_numel = self._flat._device_handle, self._flat._aligned_numel
        self._orig_param_dtype = params[0].dtype
        self._set_state(IDLE)
        self._fwd_bwd_param_dtype = mp_param_dtype or self._orig_param_dtype
        self._reduce_dtype = mp_reduce_dtype or self.full_prec_dtype
        _owners.update((id(param), self) for param in params)

    def initialize(
        self,
        params: Sequence[nn.Parameter | Tensor],
        zero3_module: nn.Module,
        device: torch.device,
        mp_param_dtype: torch.dtype | None,
        mp_reduce_dtype: torch.dtype | None,
        zero3_process_group: dist.ProcessGroup,
        zero1_process_group: dist.ProcessGroup,
        offload_grads: bool = False,
    ) -> None:
        """Check all arguments together with all ranks of ``zero1_process_group``; store groups and device.

        A collective call. Raises: on all ranks alike; the module is unchanged then.
        """
        what = f"FlatParamHandle of {type(zero3_module).__name__}"
        _check_groups(zero3_process_group, zero1_process_group, what)
        self.zero3_process_group, self.zero1_process_group = zero3_process_group, zero1_process_group
        self.zero3_group_rank, self.zero3_group_size = zero3_process_group.rank(), zero3_process_group.size()
        self.zero1_group_rank, self.zero1_world_size = zero1_process_group.rank(), zero1_process_group.size()
        self._has_zero3_copy = 1 < self.zero3_group_size < self.zero1_world_size
        self._stays_unsharded = self.zero3_group_size == 1
        problem, described = None, Described()
        try:
            for name, dtype in (("mp_param_dtype", mp_param_dtype), ("mp_reduce_dtype", mp_reduce_dtype)):
                if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                    raise ValueError(f"{what}: expected {name} to be a floating-point dtype or None, got {dtype!r}")
            self.device, self._zero3_module = torch.device(device), zero3_module
            self._is_on_host = self.device.type == "cpu"
            names = self._check_params(params, zero3_module, what)
            settings = (
                f"zero3 of {self.zero3_group_size}, zero1 of {self.zero1_world_size} ranks, "
                f"mp_param_dtype={mp_param_dtype}, mp_reduce_dtype={mp_reduce_dtype}, offload_grads={offload_grads}"
            )
            described = [
                ("the unit", settings),
                *(
                    (
                        f"parameter `{name}`",
                        f"shape {tuple(param.shape)}, strides {param.stride()}, {param.dtype}, "
                        f"requires_grad={param.requires_grad}",
                    )
                    for name, param in zip(names, params, strict=True)
                ),
            ]
        except Exception as error:
            problem = error
        try:
            check_described(described, problem, zero1_process_group)
        finally:
            problem = None  # its traceback holds this frame
        self._offload_grads = bool(offload_grads)

    def _check_params(self, params: Sequence[Any], module: nn.Module, what: str) -> list[str]:
        """Return the FQNs of ``params``. Raises: ValueError naming a parameter that cannot be flattened, and why."""
        if len(params) == 0:
            raise ValueError(f"Cannot construct a {what} with an empty parameter list")
        for i, param in enumerate(params):
            if not isinstance(param, torch.Tensor):
                raise TypeError(f"{what}: expected params[{i}] to be a parameter, got {param!r}")
            owner = _owners.get(id(param))
            if owner is not None:
                name = next((name for name, other in module.named_parameters() if other is param), f"params[{i}]")
                raise ValueError(
                    f"parameter `{name}` of {what} is flattened already: it belongs to {owner._names()}; a parameter "
                    "can be in one unit only"
                )
        self._flat = flat = FlatParam.__new__(FlatParam)  # __init__ builds it after all ranks have agreed
        flat._padding_value = 0.0  # drivers take norms of the flat parameter
        flat._use_orig_params = True
        flatten.find(flat, params, module)
        for param in params:
            if param.is_complex():
                raise ValueError(f"{flatten.describe(flat, param)} is complex: LayerZero flattens real parameters only")
            if param.is_meta:
                raise ValueError(
                    f"{flatten.describe(flat, param)} has no values: give the module memory (to_empty()) and "
                    "initialize it before"
                )
        flat._validate_tensors_to_flatten(list(params))
        for param in params:
            if not _C.is_plain_tensor(param):
                raise ValueError(
                    f"{flatten.describe(flat, param)} is no plain tensor but a {type(param).__name__}, and a flat "
                    "parameter would bypass its operations: make it a plain nn.Parameter"
                )
        names = [flat._fqn_of[id(param)] for param in params]
        check_memory(names, list(params))
        return names

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Call ``flat_param.to(...)``, before ``shard()``. Raises: RuntimeError after it: the master would not move."""
        if hasattr(self.flat_param, "_zero1_shard"):
            raise RuntimeError(
                f"{self._names()} is sharded already: move or convert the module before its handle is constructed"
            )
        self._flat.flat_param_to(*args, **kwargs)

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Describe the elements of each original parameter in the zero1 shard; leave out parameters without any."""
        flat = self.flat_param
        fields: Any = _C.held(flat._shard_param_infos, flat._fqns, flat._shapes, flat._numels)
        return FlatParamShardMetadata(*fields)

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(self._no_copies)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(self._no_copies)

    @property
    def _no_copies(self) -> str:
        return (
            f"{self._names()} cannot be copied or pickled: it belongs to its process groups; copy the module before it "
            "is flattened, or save the parameters"
        )

    def __repr__(self) -> str:
        return f"layer_zero.FlatParamHandle(flat_param.fqns={self.flat_param._fqns})"

    # Methods that the drop-in's handle does

    def flatten_tensors(self, tensors: list[Tensor], aligned_numel: int, div: int | None = None) -> Tensor:
        """Concatenate ``tensors``, padded as the flat parameter if ``aligned_numel`` > 0. ``div``: ranks of zero1."""
        if div not in (None, self.zero1_world_size):
            raise ValueError(self._about(f"expected div to be {self.zero1_world_size}, the ranks of zero1, got {div}"))
        return self._flat.flatten_tensors(tensors, aligned_numel)

    def flatten_tensors_into_flat_param(
        self, tensors: list[Tensor], aligned_numel: int, requires_grad: bool, div: int | None = None
    ) -> FlatParameter:
        """Concatenate ``tensors`` into a new flat parameter without metadata."""
        return FlatParameter(self.flatten_tensors(tensors, aligned_numel, div), requires_grad=requires_grad)

    def _deregister_orig_params(self) -> None:
        """Remove the original parameters from their modules. Users' replacements are written back first."""
        self._reset_flat_param_grad_info_if_needed()
        self._write_back()
        TORCH_HANDLE._deregister_orig_params(self._flat)

    # Looking things up

    def _named_module_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(FQN, the module's current attribute)`` for each original parameter."""
        for fqn, info in zip(self.flat_param._fqns, self.flat_param._param_infos, strict=True):
            yield fqn, getattr(info.module, info.param_name)

    def _get_orig_param_by_name(self, total_name: str) -> nn.Parameter | None:
        """Return the original parameter with the FQN ``total_name``, or None."""
        return dict(zip(self.flat_param._fqns, self.flat_param._params, strict=True)).get(total_name)

    def _get_module_param_by_name(self, total_name: str) -> Tensor | None:
        """Return the module's current attribute for the FQN ``total_name``, or None."""
        return dict(self._named_module_parameters()).get(total_name)

    def _shard_grad_list(self) -> Iterator[Tensor | None]:
        """Yield the gradients of the original parameters."""
        for param in self.flat_param._params:
            yield param.grad


def owner_of(param: Tensor) -> FlatParamHandle | None:
    """Return the handle that has flattened ``param``, or None."""
    return _owners.get(id(param))


def _check_groups(zero3: Any, zero1: Any, what: str) -> None:
    """Check that a unit can be sharded over the two groups. All ranks of ``zero1`` call it.

    Raises: TypeError for an object that is no process group. ValueError, naming sizes and ranks, unless this rank is in
    both groups, and the zero3 groups of all ranks have one size, are disjoint and cover ``zero1``.
    """
    for name, group in (("zero3_process_group", zero3), ("zero1_process_group", zero1)):
        if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{what}: expected {name} to be a group that this rank is in, got {group!r}")
        if not hasattr(group, "rank") or not hasattr(group, "size"):
            raise TypeError(f"{what}: expected {name} to be a process group, got {type(group).__name__}")
        if group.rank() < 0:
            raise ValueError(f"{what}: this rank is not in {name}, of ranks {dist.get_process_group_ranks(group)}")
    check_pair(zero3, zero1, what)


# Methods of the reference's handle that forward to the drop-in's handle
_OF_FLAT_PARAM = (
    *("is_sharded", "param_module_names", "shared_param_module_names", "unflatten_as_params"),
    *("_check_on_cpu", "_check_sharded", "_check_storage_allocated", "_check_storage_freed"),
    *("_check_unsharded", "_get_flat_param_offsets", "_get_modules", "_get_shard", "_get_unflat_views_aligned"),
    *("_get_unflat_views_unaligned", "_get_unpadded_shard", "_use_unsharded_grad_views"),
    "_validate_tensors_to_flatten",
)


def _of_flat_param(method: Any) -> Any:
    if isinstance(method, staticmethod):
        return method

    @functools.wraps(method)
    def call(self: FlatParamHandle, *args: Any, **kwargs: Any) -> Any:
        return method(self._flat, *args, **kwargs)

    return call


for _name in _OF_FLAT_PARAM:
    setattr(FlatParamHandle, _name, _of_flat_param(inspect.getattr_static(FlatParam, _name)))
for _name in ("_fqns_in_shard", "_get_unflat_views", "_skipped_use_sharded_views"):
    setattr(FlatParamHandle, _name, property(operator.attrgetter(f"_flat.{_name}")))
