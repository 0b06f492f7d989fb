"""The base of all parts of the LayerZero handle: construction, checks, dtypes and state.

The constructor checks all arguments with all ranks before it changes the module.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

from .. import _C
from ..common import optimizers
from ..common.described import Described
from ..common.patches import flat_params_live
from ..common.tensors import check_memory, free, is_allocated
from ..common.torch_private import ParamInfo, SharedParamInfo, _FSDPDeviceHandle, _set_fsdp_flattened
from ..dropin import flatten
from ..dropin.base import Driven
from ..fsdp.api import ShardingStrategy
from ..fsdp.desync.same_unit import check_described
from ..fsdp.sharding.flat_param import FlatParam
from ..fsdp.sharding.parameters import Options, find_originals
from ..fsdp.sharding.parameters import ParamInfo as Original
from ..fsdp.sharding.placement import check_pair, place
from ..fsdp.sharding.torch_attributes import describe
from ..fsdp.sharding.unit_description import describe_unit
from ..fsdp.unit.unit import Unit
from .metadata import ShardParamInfo
from .states import IDLE, HandleTrainingState

owners: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()  # id of a parameter -> its handle


class HandleUnit(Unit):
    """The parameters of a handle. It takes users' writes to them; no registry of units has it.

    ``shard()`` makes ``core``, which has no hooks: the handle calls its steps.
    """

    def __init__(self, module: nn.Module, originals: list[Original], options: Options):
        self.module, self.options, self.summoned = module, options, None
        self.flat_params = [FlatParam(originals, options)]


class Base(Driven):
    """Owns ``unit``. The names of groups, dtypes and states are the reference's."""

    _core: Any = None  # unit.core, from shard() on
    _state: HandleTrainingState = IDLE

    # Set for the drop-in's functions, see handle.py
    _unit = _fsdp_extension = _unsharded_flat_param_for_skipped_views = None
    uses_sharded_strategy = _use_orig_params = True
    _validate_tensors_to_flatten: Callable[[list[Any]], object]

    # Drivers may set the first two, as in the reference
    _needs_param_sync = True
    _param_synced = False
    _is_bound = False  # init_flat_param_attributes() has run
    _is_unsharded = False  # modules have views, or whole parameters
    _is_whole = False  # they have whole parameters
    _gathered = False  # the unsharded tensor has the values of some gather
    _confirmed = False  # ranks have agreed that these are current, for this forward
    _is_gathering = False  # nobody has waited for the last gather yet
    _is_from_masters = False  # the last gather was from the masters
    _in_backward = False  # a backward has begun to add to the prepared gradient
    _is_shown = False  # .grad shows the sum
    _prepared = -1  # the version of the prepared gradient when it was set to zeros; -1: none is prepared
    _agreed: bool | None = None  # what ranks have agreed on staleness, for the next unshard

    # Attributes of the driving runtime
    _ran_pre_backward_hook = False
    _ran_post_backward_hook = False
    _grad_synced = False
    enter_backward = False
    prev_iter_synced = True
    _ag_handle: Any = None

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
        """Check all arguments together with all ranks of ``zero1_process_group``, and cut the parameters into shards.

        A collective call: the constructor. Raises: on all ranks alike; the module is unchanged then.
        """
        what = f"FlatParamHandle of {type(zero3_module).__name__}"
        names = ("zero3_process_group to be a process group", "zero1_process_group to be a process group")
        check_pair(zero3_process_group, zero1_process_group, what=what, names=names)
        self.zero3_process_group, self.zero1_process_group = zero3_process_group, zero1_process_group
        self.zero3_group_rank, self.zero3_group_size = zero3_process_group.rank(), zero3_process_group.size()
        self.zero1_group_rank, self.zero1_world_size = zero1_process_group.rank(), zero1_process_group.size()
        placement = place(ShardingStrategy.LAYER_ZERO, {"inner": zero3_process_group, "wide": zero1_process_group})
        self._has_zero3_copy = placement.has_secondary_shard
        self._stays_unsharded = self.zero3_group_size == 1
        problem, described = None, Described()
        try:
            for name, dtype in (("mp_param_dtype", mp_param_dtype), ("mp_reduce_dtype", mp_reduce_dtype)):
                if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                    raise ValueError(f"{what}: expected {name} to be a floating-point dtype or None, got {dtype!r}")
            self.device = torch.device(device)
            self._zero3_module = self._fully_sharded_module = zero3_module
            params = list(params)
            self._check_params(params, zero3_module, what)
            others = set(zero3_module.parameters()).difference(params)
            originals = find_originals(zero3_module.modules(), zero3_module, others)
            self._orig_param_dtype = params[0].dtype
            self._fwd_bwd_param_dtype = mp_param_dtype or self._orig_param_dtype
            self._reduce_dtype = mp_reduce_dtype or self.full_prec_dtype
            precision = MixedPrecision(self._fwd_bwd_param_dtype, self._reduce_dtype)
            options = Options(placement, precision, use_orig_params=True)
            described = describe_unit("the unit", originals, options)
        except Exception as error:
            problem = error
        try:
            check_described(described, problem, zero1_process_group, what)
        finally:
            problem = None  # its traceback holds this frame
        self._offload_grads = bool(offload_grads)
        self._device_handle: Any = _FSDPDeviceHandle.from_device(self.device)
        self.unit = HandleUnit(zero3_module, originals, options)
        [flat] = self.unit.flat_params
        self.flat_param: Any = flat.flat
        self._aligned_numel = flat.layout.alignment
        self._describe(flat)
        self.unit.name = self._names()
        flat_params_live.hold(self)
        self._note_owner()
        del self._fqn_of

    __init__ = initialize

    def _note_owner(self) -> None:
        owners.update((id(param), self) for param in self.flat_param._params)
        optimizers.note_change()

    def _check_params(self, params: Sequence[Any], module: nn.Module, handle: str) -> None:
        """Raises: ValueError naming a parameter of ``params`` that cannot be flattened, and why."""
        if len(params) == 0:
            raise ValueError(f"Cannot construct a {handle} with an empty parameter list")
        self._fqn_of = {id(param): name for name, param in module.named_parameters()}
        for i, param in enumerate(params):
            if not isinstance(param, torch.Tensor):
                raise TypeError(f"{handle}: expected params[{i}] to be a parameter, got {param!r}")
            name, owner = self._fqn_of.get(id(param)), owners.get(id(param))
            if owner is not None:
                raise ValueError(
                    f"parameter `{name or f'params[{i}]'}` of {handle} is flattened already: it belongs to "
                    f"{owner._names()}; a parameter can be in one unit only"
                )
            if name is None:
                raise flatten.not_in_tree(module, i, param)
            what = flatten.describe(self, param)
            if param.is_complex():
                raise ValueError(f"{what} is complex: LayerZero flattens real parameters only")
            if param.is_meta:
                raise ValueError(f"{what} has no values: give the module memory (to_empty()) and initialize it before")
        self._validate_tensors_to_flatten(list(params))
        for param in params:
            if not _C.is_plain_tensor(param):
                raise ValueError(
                    f"{flatten.describe(self, param)} is no plain tensor but a {type(param).__name__}, and a flat "
                    "parameter would bypass its operations: make it a plain nn.Parameter"
                )
        check_memory([self._fqn_of[id(param)] for param in params], list(params))

    def _describe(self, flat: FlatParam) -> None:
        """Set torch's attributes of ``flat_param``."""
        flat_param = self.flat_param
        describe(flat)
        del flat_param._local_shard, flat_param._mp_shard
        paths = {module: path for path, module in self._zero3_module.named_modules()}
        places = [[(one.name, one.module, paths[one.module]) for one in original.names] for original in flat.originals]
        further = [(place, i) for i, (_, *others) in enumerate(places) for place in others]
        flat_param._fqns = tuple(self._fqn_of[id(param)] for param in flat_param._params)
        flat_param._param_infos = [ParamInfo(*first) for first, *_ in places]
        flat_param._shared_param_infos = tuple(SharedParamInfo(*place, *places[i][0]) for place, i in further)
        flat_param._shared_params = [flat_param._params[i] for _, i in further]
        flat_param._modules = {module for each in places for _, module, _ in each}
        flat_param._param_extensions, flat_param._tensors = ([None] * len(places) for _ in range(2))
        flat_param._is_grad_none_mask = [False] * len(places)
        flat_param._shard_param_infos = tuple(
            ShardParamInfo(*piece, start, start + numel - 1)
            for piece, start, numel in zip(flat.pieces, flat.layout.offsets, flat.layout.numels, strict=True)
        )
        for param in (flat_param, *flat_param._params):
            _set_fsdp_flattened(param)

    def __del__(self) -> None:
        """Break the cycles of ``flat_param`` through autograd's nodes, which Python's collector cannot see."""
        for name in ("_param_infos", "_shared_param_infos", "_modules", "_tensors"):
            vars(getattr(self, "flat_param", self)).pop(name, None)

    @property
    def full_prec_dtype(self) -> torch.dtype:
        """The dtype of masters, accumulated and reduced gradients: the parameters' dtype, at least float32."""
        return torch.promote_types(self._orig_param_dtype, torch.float32)

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of forward, backward and all-gathers."""
        return self._fwd_bwd_param_dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of the reduce-scatter."""
        return self._reduce_dtype

    def _free(self, tensor: Tensor) -> None:
        free(tensor, self._freed_message)

    # Checks with the reference's names

    def _check_padded_unsharded(self, tensor: Tensor) -> None:
        self._check_size(tensor, "unsharded and padded", self.flat_param._padded_unsharded_size)

    @staticmethod
    def _is_storage_freed(tensor: Tensor | None) -> bool:
        return tensor is not None and not is_allocated(tensor)
