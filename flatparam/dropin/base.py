"""The base of FlatParamHandle: its attributes, checks and messages, and the marks of fast paths.

The other modules hold functions whose first argument is a `Handle`: `post_backward.py`, `views.py`, `writeback.py`,
`recovery.py`, `gradients.py`, `gathering.py`, `flatten.py`. Each imports those before it. `handle.py` gives them
torch's names as methods. torch's runtime calls these, in the thread of the forward or of autograd. Users replace
attributes and methods that have torch's names, so code of ours calls them through the handle, never by the function.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from .. import _C
from ..common import optimizers
from ..common.patches import Lifetime
from ..common.tensors import free, has_memory, same_storage
from ..common.torch_private import HandleTrainingState, is_torchdynamo_compiling, torch_flat_param

if TYPE_CHECKING:
    TorchsNames = torch_flat_param.FlatParamHandle  # a Handle has all its methods, with its signatures: see handle.py
else:
    TorchsNames = object

Method = TypeVar("Method", bound=Callable[..., Any])
installed = Lifetime("from `install()` to `uninstall()`")
TORCH_HANDLE: Any = torch_flat_param.FlatParamHandle  # before install() replaces it

# Fast paths: each does the work of these methods without calling them. The handle takes a fast path only if none of its
# methods was replaced, on the class or on the handle.
VIEWS = ("_get_unflat_views_unaligned", "_get_unflat_views_aligned")  # C's loops make and set the views
FLATTEN = ("flatten_tensors", "flatten_tensors_into_flat_param")  # copies parameters into the flat parameter, in C
STREAM = (  # fills the shard from the originals, without a flat parameter before it
    *(*FLATTEN, *VIEWS, "shard", "_get_shard", "_get_unpadded_shard"),
    *("_use_unsharded_views", "_take_over_attributes"),
)
_PADDED = ("_alloc_padded_unsharded_flat_param", "_get_padded_unsharded_flat_param")
_CHECKS = ("_check_sharded_strategy", "_check_unsharded")
UNSHARD = (  # unshards in one call
    *(*VIEWS, *_PADDED, *_CHECKS, "_check_storage_freed"),
    *("needs_unshard", "_use_unsharded_flat_param", "_use_unsharded_views"),
)
RESHARD = (  # reshards in one call
    *(*VIEWS, *_PADDED, *_CHECKS, "_check_sharded", "_check_on_compute_device", "_use_low_precision_shard"),
    *("_use_sharded_flat_param", "_use_sharded_views", "_use_sharded_grad_views", "_use_unsharded_grad_views"),
    "_free_unsharded_flat_param",
)


def unseen(method: Method) -> Method:
    """Hide ``method`` from selective activation checkpoints: they must run it again, and keep none of its results."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _C.unseen_by_checkpoints(method, *args, **kwargs)

    return cast(Method, call)


_FREED_FOR_GRAPH = (
    ". If this is a backward through the graph of one with create_graph=True (gradients of gradients): that needs the "
    "parameters between the two, which only sharding_strategy=NO_SHARD without mixed precision of parameters has"
)


# Attributes with the other tensors that the flat parameter's data may be
_OTHER_MEMORY = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")


class Driven:
    """What LayerZero's handle has too: attributes, messages and checks. torch's runtime sets the first six."""

    _handle_index: int | None = None
    _pre_forward_order_index: int | None = None
    _post_forward_index: int | None = None
    _needs_pre_forward_unshard = False
    _needs_pre_backward_unshard = False
    _prefetched = False

    flat_param: Any  # a FlatParameter, with the attributes that its docstring lists
    device: torch.device  # of computation and communication
    _fully_sharded_module: nn.Module
    _fqn_of: Mapping[int, str] = MappingProxyType({})  # id -> FQN, until the metadata have the names

    def _names(self, most: int = 3) -> str:
        """Return the unit's name for messages: its module and the FQNs of its first ``most`` parameters."""
        fqns = self.flat_param._fqns
        more = f", ... ({len(fqns)} in all)" if len(fqns) > most else ""
        return f"the flat parameter of {type(self._fully_sharded_module).__name__} ({', '.join(fqns[:most])}{more})"

    @cached_property
    def _freed_message(self) -> str:
        return (
            f"the memory of {self._names(20)} is freed: it is sharded outside of its module's forward and backward. "
            "Read or change full parameters inside FullyShardedDataParallel.summon_full_params(model), or run them "
            "through the wrapped module"
        )

    def _about(self, message: str, index: int | None = None) -> str:
        """Return ``message`` with the FQN of parameter ``index``, or with the unit's name."""
        return f"{message} [{self._names() if index is None else self.flat_param._fqns[index]}]"

    def _wrong(self, message: str, index: int | None = None) -> AssertionError:
        """Return the error of a failed check."""
        return AssertionError(self._about(message, index))

    def _check_on_compute_device(self, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise self._wrong(f"Expects tensor to be on the compute device {self.device}, was on {tensor.device}")

    def _check_on_cpu(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise self._wrong(f"Expects tensor to be on CPU but got {tensor.device}")

    @staticmethod
    def _check_storage_freed(tensor: Tensor) -> None:
        if not is_torchdynamo_compiling() and has_memory(tensor):
            raise AssertionError("Expects storage to be freed but got storage with size > 0")

    @staticmethod
    def _check_storage_allocated(tensor: Tensor) -> None:
        if not has_memory(tensor):
            raise AssertionError("Expects storage to be allocated but it is freed")

    def _check_size(self, tensor: Tensor, what: str, size: torch.Size) -> None:
        if tensor is None or tensor.size() != size:
            came = "`None`" if tensor is None else f"size {tensor.size()}"
            raise self._wrong(f"Expects tensor to be {what} with size {size} but got {came}")

    def _check_unsharded(self, tensor: Tensor) -> None:
        self._check_size(tensor, "unsharded", self.flat_param._unpadded_unsharded_size)

    def _check_sharded(self, tensor: Tensor) -> None:
        self._check_size(tensor, "sharded", self.flat_param._sharded_size)


_uncounted = [0]  # the count for handles that no runtime has numbered


class _Numbered(threading.local):
    """The root whose handles this thread numbers now: its count of optimizer steps and its handles. Both are shared."""

    def __init__(self) -> None:
        self.steps = _uncounted
        self.units: list[weakref.ref[Handle]] = []


_numbered = _Numbered()


class Handle(Driven, TorchsNames):
    """The attributes of torch's handle. Users may write them: they are read at each use, and never cached."""

    _fake_process_group: Any  # if environment variables ask for one
    _fwd_bwd_param_dtype: torch.dtype  # never None after _init_param_reduce_dtypes()
    _unit: Any = None  # a _C.ModuleParams, the loops in C; None: use torch's operations
    # Strategies that stay unsharded after forward leave the modules' unsharded views in place: the tensor under these
    # views. None: the views are of the flat parameter
    _unsharded_flat_param_for_skipped_views: Any = None

    # Our own, in the order of the modules that use them

    _shard_seen: Tensor | None = None  # `_local_shard` at the last check
    _padded_to: int | None = None  # padding aligns parameters to so many elements; None: a user's layout
    _backward_made_graph = False  # a backward with create_graph=True has used the unsharded flat parameter

    _accumulators: object = None  # nodes that accumulate the flat gradient: see `_C.note_accumulator`
    _runtimes_hook: Callable[..., Any] | None = None  # from the last forward
    # In a backward that does not reach the parameters: (node, hook, version of the gradient)
    _kept_hook: tuple[Any, Callable[..., Any], int | None] | None = None

    # Set by a user. Our own method is not stored: a bound method would be a reference cycle
    _own_way_to_unflatten: Callable[..., Iterable[Tensor]] | None = None

    # Offloading: (gradient of earlier backwards, version of `_cpu_grad` that held it). torch keeps only the last
    # gradient when gradients are accumulated outside of no_sync()
    _offloaded_grad: tuple[Tensor, int] | None = None
    _versions_left_by_backward: Sequence[int | None] = ()  # of gradients, after the last backward in no_sync()
    _put_aside = False  # this backward has moved the earlier gradient aside

    _state = HandleTrainingState.IDLE
    steps = _uncounted  # [number of steps of optimizers that hold a parameter of the model]
    _ran_pre_backward_hook: bool  # the runtime sets it, from the first forward on
    _is_of_backward = False  # whether `_state` was set while autograd ran
    _steps_seen = 0  # `steps` when the last forward began
    _left_versions: int | None = None  # sum of the parameters' versions when a forward left them gathered
    _left_values: tuple[Tensor, int] | None = None  # (sample of the shard then, forwards since)

    _is_compared = _is_reduction_compared = False  # with the units of other ranks, see comparing.py
    _model: Sequence["weakref.ref[Handle]"] = ()  # of the model, as the runtime numbered them
    _replicas: Any = None  # HYBRID_SHARD: the group over which the runtime all-reduces the reduced gradient
    _replicas_serial = 0  # the number of this handle among those with these replicas
    _native: tuple[Any, _C.Gather | None] = (None, None)  # (group, its gather in C, or None: use torch's Python)

    _shards_next = False  # see is_sharded_next()
    _unflattened: Sequence[Tensor] | None = None  # until shard(): the originals, if the flat data are not written

    _own_methods: ClassVar[dict[str, Any]] = {}  # name -> method or property as defined here; filled in handle.py

    def _init_get_unflat_views_fn(self, align_addresses: bool) -> None:
        self._aligns_addresses = align_addresses

    @property
    def _get_unflat_views(self) -> Callable[..., Iterable[Tensor]]:
        """The function that unflattens. Users may set another one."""
        if self._own_way_to_unflatten is not None:
            return self._own_way_to_unflatten
        own: Callable[..., Iterable[Tensor]] = self._get_unflat_views_unaligned
        return self._get_unflat_views_aligned if self._aligns_addresses else own

    @_get_unflat_views.setter
    def _get_unflat_views(self, way: Callable[..., Iterable[Tensor]]) -> None:
        self._own_way_to_unflatten = way

    @property
    def _handle_index(self) -> int | None:
        return vars(self).get("_handle_index")

    @_handle_index.setter
    def _handle_index(self, index: int | None) -> None:
        """Store the index. All handles of a root, which the runtime numbers in a row, share one count of steps.

        A count for each handle could differ between ranks: a rank without elements of a unit may leave its parameters
        out of the optimizer.
        """
        if index == 0:
            _numbered.steps, _numbered.units = [0], []
            optimizers.note_change()
        vars(self)["_handle_index"], self.steps, self._model = index, _numbered.steps, _numbered.units
        if index is not None:
            _numbered.units.append(weakref.ref(self))

    @property
    def units_of_model(self) -> list["Handle"]:
        """The handles of this handle's root, in the order of their numbers; this one alone if no runtime drives it."""
        return [unit for unit in (ref() for ref in self._model) if unit is not None] or [self]

    def _layout_of(self, numels: Sequence[int], aligned_numel: int) -> _C.Layout:
        """Return the layout of parameters of these sizes, not all 0. Padded if ``aligned_numel`` > 0."""
        try:
            return _C.Layout(numels, self.world_size, 1, aligned_numel)
        except _C.ShardError:
            raise _C.ShardError(
                f"the flat parameter would have {sum(numels)} elements, more than 64 bits count; wrap it in more units"
            ) from None

    @property
    def _layout(self) -> _C.Layout:
        """The layout of the original parameters, if flatparam has made it."""
        return self._layout_of(self.flat_param._numels, self._padded_to or 0)

    @property
    def _all_infos(self) -> tuple[Any, ...]:
        """The places of all original parameters, then the further places of shared ones."""
        return (*self.flat_param._param_infos, *self.flat_param._shared_param_infos)

    def _is_replaced(self, *names: str) -> bool:
        """Whether a user replaced one of these methods, on the class or on this handle."""
        found = ((getattr(self, name), self._own_methods[name]) for name in names)
        return any(getattr(method, "__func__", method) is not own for method, own in found)

    def _keep_moved_shard(self) -> None:
        """Follow the user who moved or converted the sharded flat parameter (``.to()``): update ``_local_shard``.

        torch keeps the old ``_local_shard``, and writes to the new memory are lost in the next forward. If the user has
        set ``_local_shard``, it is kept.
        """
        flat_param = self.flat_param
        shard = getattr(flat_param, "_local_shard", None)
        if shard is None:
            return
        seen, self._shard_seen = self._shard_seen, shard
        if seen is None or shard is not seen or same_storage(seen, flat_param):
            return
        ours = (getattr(flat_param, name, None) for name in _OTHER_MEMORY)
        if shard.shape != flat_param.shape or any(
            tensor is not None and same_storage(tensor, flat_param) for tensor in ours
        ):
            return
        if shard.dtype != flat_param.dtype:  # as `.double()` does
            self.init_flat_param_attributes()
            self._shard_seen = flat_param._local_shard
        elif not self._offload_params:
            flat_param._local_shard = self._shard_seen = flat_param.data
        elif flat_param.is_cpu:
            shard.copy_(flat_param.detach())  # it stays in pinned memory
            flat_param.data = shard

    # Messages and checks

    @property
    def _freed_reason(self) -> str | None:
        """The message of the error when a user reads or writes a freed parameter of this unit.

        None, and no error, if a user has replaced a method that allocates: torch's resize of a storage reads it first.
        """
        if self._is_replaced("_alloc_padded_unsharded_flat_param", "_use_low_precision_shard"):
            return None
        return self._freed_message + (_FREED_FOR_GRAPH if self._backward_made_graph else "")

    def _free(self, tensor: Tensor) -> None:
        """Free ``tensor``'s memory. Reading it then raises an error that names this unit.

        After a backward with create_graph=True the storage keeps its size: else a second backward through that graph
        would make views of an empty storage, without this error.
        """
        free(tensor, self._freed_reason, self._backward_made_graph)

    def _check_sharded_strategy(self) -> None:
        if not self.uses_sharded_strategy:
            raise self._wrong("Expects sharded strategy, not NO_SHARD")

    def _check_memory_of_shard(self, shard: Tensor) -> None:
        """Raises: ValueError if the storage is smaller than ``shard``: a collective would access memory beyond it."""
        numel = shard.numel()
        if _C.is_plain_tensor(shard) and _C.storage_numel(shard) < shard.storage_offset() + numel:
            raise ValueError(
                self._about(
                    f"the storage of its shard has room for {_C.storage_numel(shard)} elements of {numel}: it was "
                    "freed or resized outside of flatparam, and its values are lost. Leave storages as they are"
                )
            )

    def _check_low_precision_shard(self) -> None:
        if not self._uses_param_mixed_precision:
            raise self._wrong("Not using low precision for parameters")
        shard = getattr(self.flat_param, "_mp_shard", None)
        if shard is None:
            raise self._wrong("Expects `_mp_shard` to exist")
        if shard.device != self.device:
            raise self._wrong(f"Expects the low precision shard to be on {self.device} but got {shard.device}")


# Properties and methods of torch's that do the same here: they use attributes, and methods that we define
for _name in (
    *("uses_sharded_strategy", "_uses_param_mixed_precision", "_uses_reduce_mixed_precision", "_force_full_precision"),
    *("_skipped_use_sharded_views", "_fqns_in_shard", "is_sharded", "param_module_names", "shared_param_module_names"),
    *("post_unshard", "post_reshard", "reshard_grad", "unflatten_as_params", "_get_modules", "_get_sharded_size"),
    *("_get_flat_param_offsets", "_init_setattr_fns", "_init_param_reduce_dtypes", "__repr__"),
    "_use_unsharded_flat_param",
):
    setattr(Handle, _name, vars(TORCH_HANDLE)[_name])
