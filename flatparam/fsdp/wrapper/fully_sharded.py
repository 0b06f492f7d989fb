"""The wrapper class: its constructor, and torch's names for the functions of ``wrapper`` and ``states``.

The constructor checks all arguments before it changes the module, and tells the other ranks if it fails. Then it gives
parameters memory and values, compares the unit with the other ranks, and builds it. A policy wraps descendants first.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from functools import partialmethod
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, StateDictType

from ...common.switches import environment_is_on, fakes
from ...common.torch_private import TorchsFSDP, _override_module_mixed_precision
from ...common.warned import one_of_each, warn_user
from ..api import ProcessGroups, ShardingStrategy, Strategy, WrapPolicy
from ..desync.checked_collectives import check_exchanges
from ..desync.same_unit import Agreed, check_same_unit, telling
from ..desync.unit_ids import assign
from ..errors import StateError, WritebackError
from ..interop.patches import refuse_wrapped
from ..names import FSDP_WRAPPED_MODULE
from ..sharding.extensions import extensions_of
from ..sharding.parameters import (
    Atomic,
    Options,
    ParamInfo,
    check_layout_arguments,
    choose_blocks,
    default_alignment,
    find_originals,
)
from ..sharding.placement import Placement, check_pair, groups_of_machine
from ..sharding.unit_description import check_device, describe_unit, digests_of
from ..states import model, optimizer, state_dict_type
from ..unit.additions import seal, take_out
from ..unit.base import Wrapper
from ..unit.unit import Unit
from . import copying, full_params
from . import forward as passes
from .arguments import (
    check_bytes,
    check_not_shared,
    check_types,
    default_groups,
    first_name,
    ignored,
    placement_of,
    planned,
    strategy_of_one_rank,
    warn_of_frozen,
    warn_of_padding,
)
from .materialize import accelerator_of, device_of, materialize, move, own_modules, parameters_of, synchronize
from .torch_names import TorchNames
from .wrap import check_not_tied, replace_modules, targets_of

__all__ = ["FullyShardedDataParallel", "StateError", "WritebackError"]

_HOST = torch.device("cpu")
# Names in the constructor that are no arguments of the units that a policy makes
_OF_THE_TREE = ("self", "__class__", "module", "auto_wrap_policy", "ignored_modules", "ignored_states")


class _Class(type):
    """While our class stands in the place of torch's, ``isinstance`` is True for torch's wrappers too.

    So programs that ask for the class by torch's name still know models that torch's class has wrapped.
    """

    is_in_place_of_torchs = False

    def __instancecheck__(cls, instance: Any) -> bool:
        own: bool = super().__instancecheck__(instance)
        return own or (vars(cls).get("is_in_place_of_torchs", False) and isinstance(instance, TorchsFSDP))


class FullyShardedDataParallel(TorchNames, metaclass=_Class):
    """Shard the parameters, gradients and optimizer state of ``module`` over ranks, and train it as before.

    Each wrapped module is a unit. A forward or backward gathers the parameters of one unit from all ranks, computes,
    and frees them; backward reduces gradients to shards. The API is that of torch's class of this name. Example::

        model = FullyShardedDataParallel(
            Transformer(),
            auto_wrap_policy={Block},  # each Block is a unit, the rest another
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            sync_module_states=True,  # all ranks start from the weights of rank 0
        )
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # after wrapping
        model(batch).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()

    Args:
        module: the module to wrap. It is changed in place.
        process_group: the ranks to shard over (None: all). Hybrid strategies take (inner, outer), LayerZero (inner,
            all ranks) or (inner, all ranks, outer).
        sharding_strategy: a :class:`ShardingStrategy`, torch's, or a name (None: FULL_SHARD).
        cpu_offload: ``CPUOffload(offload_params=True)`` keeps shards and gradients in host memory.
        auto_wrap_policy: the inner modules that become units: a set of classes, a policy of torch's, or a callable.
            None: ``module`` is one unit.
        backward_prefetch: when backward gathers the next unit: before this unit's computing (BACKWARD_PRE), after it
            (BACKWARD_POST), or when that unit begins (None).
        mixed_precision: the dtypes of computing, reducing and buffers. Shards keep their dtype.
        ignored_modules: modules whose parameters stay as they are. ``ignored_states`` replaces it.
        param_init_fn: gives memory and values to a module on the meta device.
        device_id: the device to move the module to and to compute on (None: where it is).
        sync_module_states: send the values of rank 0 to the other ranks before sharding.
        forward_prefetch: forward gathers one unit ahead; on an accelerator it does so from the second forward anyway.
        limit_all_gathers: no effect: memory is freed in the order of the program.
        use_orig_params: ``parameters()`` shows the parameters of the module, each with its part of the shard; else
            one flat parameter a unit.
        ignored_states: modules or parameters that stay as they are.
        device_mesh: a mesh in the place of ``process_group``; with two dimensions for hybrid strategies and LayerZero.
        placement: the groups for parameters, gradients and optimizer state (:class:`Placement`), in the place of
            strategy and process group.
        segments: a unit has a flat parameter for each dtype. Frozen parameters have flat parameters of their own, which
            have no gradient memory and are not reduced.
        shard_alignment: parameters and shards start at multiples of so many bytes, a power of two (None: 16 on CUDA,
            else torch's layout).
        atomic: which elements stay on one rank: ``"row"``, the elements with one index of dimension 0, or a
            callable(param) that returns the number of elements of a block.
        offload_grads: for LAYER_ZERO and LAYER_ZERO_NESTED: accumulated gradients lie in host memory.
        check_values: compare digests of the initial values over the ranks.
        min_unit_bytes: consecutive units with fewer unsharded bytes are gathered together, until they have so many
            bytes; in forward from the second forward on. 0: each unit by itself.
        reduction: None: ``.grad`` is the average over the ranks. ``"ordered"``: the sum, to which the ranks' gradients
            are added one by one: its bits do not depend on the number of ranks (docs/equality.md).

    Building a wrapper is a collective call of the ranks in its groups.
    Raises: TypeError for an argument of another type; ValueError for arguments that contradict each other or are not
    supported, and if ranks differ or another rank has raised.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroups | None = None,
        sharding_strategy: Strategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        placement: Placement | None = None,
        segments: bool = False,
        shard_alignment: int | None = None,
        atomic: Atomic = None,
        offload_grads: bool = False,
        check_values: bool = True,
        min_unit_bytes: int = 0,
        reduction: Literal["ordered"] | None = None,
    ):
        """Wrap ``module``. The arguments are described above."""
        arguments = {name: value for name, value in locals().items() if name not in _OF_THE_TREE}
        super().__init__()
        copying.watch_torch(self)
        comparing = default_groups(process_group, device_mesh, placement)
        warning: list[Any] = []  # the groups whose first rank warns
        with telling(comparing), one_of_each(warning) as collected:
            self._choose_placement(arguments, auto_wrap_policy is not None)
            comparing[:] = warning[:] = self._placement.compared
            check_types(module=module, **arguments)
            self._take_settings(module, arguments)
            ignored_modules_set, self._ignored_params = ignored(module, ignored_modules, ignored_states)
            self._check_gradients(offload_grads)
            refuse_wrapped(module, ignored_modules_set)
            if auto_wrap_policy is not None:
                targets = self._targets(module, auto_wrap_policy, ignored_modules_set, arguments)
                collected.wraps(module, planned(module, targets))
                self._wrap(module, targets)
            self._take_inner(module)
            self._device_id = device_of(device_id)
            own = list(own_modules(module, lambda inner: isinstance(inner, Wrapper), ignored_modules_set))
            check_not_shared(module, own)
            before = parameters_of(own)
            originals, options, device = self._prepare(module, own, arguments)
            name = f"the unit of {type(module).__name__}"
            place = collected.place_of(module)
            check_device(name + place, originals, options)
            agreed = check_same_unit(
                describe_unit(name, originals, options),
                comparing,
                self._placement.param if self._placement.has_secondary_shard else None,
                lambda: digests_of(originals) if check_values and not sync_module_states else {},
                (name + place, collected.plan),
            )
            if device is not None:
                check_exchanges(self._placement.groups, device)
            self._placement = self._placement.with_host(device)
            if sync_module_states:
                synchronize(own, self._ignored_params, self._placement, options.device, options.extensions)
            self._buffer_dtypes = {}
            self.add_module(FSDP_WRAPPED_MODULE, module)
            self._unit = Unit(module, originals, dataclasses.replace(options, placement=self._placement), name)
            take_out(self._unit, before)
            self._join_registry(agreed, own)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a name that is a tensor or module of the wrapped module there: on the wrapper it would not be used.

        A subclass sets all names on the wrapper.
        """
        self._holder(name, value).__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._holder(name, None).__delattr__(name)

    def _holder(self, name: str, value: Any) -> Any:
        """Return the module that has a tensor or module ``name``, or None there, which ``value`` may replace.

        It is the wrapped module or a wrapper around it, of activation checkpoints or a unit's; else ``super()``.
        """
        inner = vars(self).get("_modules", {}).get(FSDP_WRAPPED_MODULE)
        while inner is not None and type(self) is FullyShardedDataParallel:
            now = vars(inner).get(name, False)  # a tensor: a view of a flat parameter
            is_part = isinstance(now, Tensor) or (now is None and isinstance(value, (Tensor, nn.Module, type(None))))
            if is_part or any(name in place for place in (inner._parameters, inner._buffers, inner._modules)):
                return super() if name in (*nn.Module.__dir__(self), *Wrapper.__annotations__) else inner
            inner = inner._modules.get("_checkpoint_wrapped_module", inner._modules.get(FSDP_WRAPPED_MODULE))
        return super()

    def _choose_placement(self, arguments: dict[str, Any], has_policy: bool) -> None:
        """Set strategy and placement. If a policy and no groups are given, put the machine's groups into ``arguments``.

        The units that the policy makes get these arguments, and so the same groups.
        """
        strategy, mesh, placement = (arguments[name] for name in ("sharding_strategy", "device_mesh", "placement"))
        self._strategy = ShardingStrategy.of(strategy)
        if has_policy and arguments["process_group"] is mesh is placement is None:
            arguments["process_group"] = groups_of_machine(self._strategy)
        self._placement = placement_of(self._strategy, arguments["process_group"], mesh, strategy, placement)
        self._strategy = strategy_of_one_rank(self._strategy, self._placement)
        if placement is not None and placement.has_secondary_shard:
            check_pair(placement.param, placement.optim, placement.outer, what="Placement")

    def _take_settings(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        """Check the module and the settings that need no other object, and set the attributes with torch's names."""
        if isinstance(module, Wrapper):
            wrapped: Unit = vars(module)["_unit"]
            raise ValueError(
                f"the module is a FullyShardedDataParallel already, {wrapped.name} with {first_name(wrapped)}: "
                "wrap a module once (its `.module` is the wrapped module)"
            )
        prefetch = arguments["backward_prefetch"]
        if prefetch not in passes.PREFETCH:
            raise TypeError(f"expected backward_prefetch to be a BackwardPrefetch or None, got {prefetch!r}")
        check_layout_arguments(arguments["shard_alignment"], arguments["atomic"])
        check_bytes("min_unit_bytes", arguments["min_unit_bytes"])
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warn_user(
                "FSDP will not all-gather parameters for containers that do not implement forward: "
                f"a {type(module).__name__} has none. Wrap the modules in it, or the one that holds it"
            )
        for name in ("backward_prefetch", "forward_prefetch", "min_unit_bytes", "reduction", "use_orig_params"):
            setattr(self, f"_{name}", arguments[name])
        self.limit_all_gathers = arguments["limit_all_gathers"]
        self.mixed_precision = arguments["mixed_precision"] or MixedPrecision()
        self.cpu_offload = arguments["cpu_offload"] or CPUOffload()

    def _check_gradients(self, offload_grads: bool) -> None:
        """Raises: ValueError if the strategy does not add or offload gradients as the arguments ask."""
        if self._placement.full_precision and self.mixed_precision.keep_low_precision_grads:
            raise ValueError(
                f"{self._strategy.name} adds gradients in the parameter's own precision: "
                "keep_low_precision_grads=True would lose that; leave it out"
            )
        if offload_grads and not self._placement.full_precision:
            raise ValueError(
                f"{self._strategy.name} does not offload gradients: offload_grads=True is for LAYER_ZERO and "
                "LAYER_ZERO_NESTED, which add them up over micro-batches"
            )
        if self._reduction not in (None, "ordered"):
            raise ValueError(f'expected reduction to be "ordered" or None, got {self._reduction!r}')
        if self._reduction is not None and (self._placement.replicate is not None or self._placement.outer is not None):
            raise ValueError(
                f'reduction="ordered" adds the gradients of all ranks in one order, and {self._strategy.name} reduces '
                "them over two groups, or on all ranks: take FULL_SHARD, SHARD_GRAD_OP, ZERO_1 or LAYER_ZERO"
            )

    def _take_inner(self, module: nn.Module) -> None:
        """Ignore the parameters that inner wrappers ignore, and become the outer wrapper of those that have none."""
        for inner in module.modules():
            if isinstance(inner, Wrapper):
                self._ignored_params |= inner._ignored_params
                if inner._outer is None or inner._outer() is None:
                    inner._outer = weakref.ref(self)

    def _prepare(
        self, module: nn.Module, own: list[nn.Module], arguments: dict[str, Any]
    ) -> tuple[list[ParamInfo], Options, torch.device | None]:
        """Give the parameters memory and values on the right device.

        Returns: the parameters of the unit, its settings, and the device of forward and backward (None: no parameters).
        """
        device, ignored_params = self._device_id, self._ignored_params
        computes_on = None  # the device of forward and backward, if the shards lie elsewhere
        if self.cpu_offload.offload_params:
            computes_on = accelerator_of(own, ignored_params, device)
        on_host = _HOST if computes_on else device
        materialize(own, ignored_params, arguments["param_init_fn"], on_host)
        move(own, ignored_params, device, on_host, computes_on or device)
        extensions = extensions_of(self._placement.mesh)
        originals = find_originals(own, module, ignored_params, extensions, self._placement)
        choose_blocks(originals, arguments["atomic"])
        of_params = computes_on or next((original.param.device for original in originals), device)
        alignment = arguments["shard_alignment"]
        options = Options(
            self._placement,
            self.mixed_precision,
            self._use_orig_params,
            arguments["segments"],
            default_alignment(of_params) if alignment is None else alignment,
            arguments["atomic"],
            arguments["offload_grads"],
            self._reduction is not None,
            computes_on,
            self.cpu_offload.offload_params,
            extensions,
            self._min_unit_bytes,
        )
        return originals, options, of_params

    def _join_registry(self, agreed: Agreed, own: list[nn.Module]) -> None:
        """Give the unit its id, seal its modules, and set the attributes that later calls read."""
        assign(self._unit, agreed.numbers)
        self._unit.mismatched = agreed.mismatched
        if agreed.mismatched:
            why = self._unit.why_mismatched()
            warn_user(f"{why}. The first forward raises this, unless values are loaded")
        seal(self._unit, [self, *own], self._ignored_params)
        warn_of_padding(self._unit)
        self._full_in_eval = environment_is_on("FSDP_USE_FULL_PREC_IN_EVAL")
        self._fakes = fakes()
        self._missing = []
        self._settings = state_dict_type.first_settings()
        self.register_load_state_dict_pre_hook(model.before_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(model.after_load)  # type: ignore[no-untyped-call]

    def _targets(
        self, module: nn.Module, policy: Any, ignored_modules: set[nn.Module], arguments: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Map each descendant that becomes a unit to its constructor's arguments. Checks the policy.

        The policy selects them; modules of the classes that mixed precision ignores become units, too.
        """
        for path, inner in module.named_modules():
            if isinstance(inner, Wrapper):
                raise ValueError(
                    f"FSDP auto wrapping requires modules to not already have FSDP applied but found {path} in "
                    f"{type(module).__name__}: a policy wraps a tree without units"
                )
        ignored_params = self._ignored_params
        targets = targets_of(module, policy, ignored_modules, ignored_params, arguments)
        precision = self.mixed_precision
        full_precision = tuple(precision._module_classes_to_ignore) if arguments["mixed_precision"] is not None else ()
        for inner in module.modules():
            if isinstance(inner, full_precision) and inner is not module and inner not in ignored_modules:
                targets[inner] = {**arguments, "mixed_precision": None}
        if arguments["use_orig_params"] and not arguments["segments"]:
            warn_of_frozen(module, set(targets), ignored_modules, ignored_params)
        check_not_tied(module, targets, ignored_modules, ignored_params)
        if full_precision:
            names = _override_module_mixed_precision(module, full_precision)
            if names:
                warn_user(
                    f"mixed precision is off for modules of {sorted(cls.__name__ for cls in names)}. "
                    "These modules will be wrapped as separate FSDP units, which compute in full precision"
                )
        return targets

    def _wrap(self, module: nn.Module, targets: dict[nn.Module, dict[str, Any]]) -> None:
        def wrap(target: nn.Module, arguments: dict[str, Any]) -> nn.Module:
            given = {name: value for name, value in arguments.items() if name != "auto_wrap_policy"}
            given["ignored_states"] = list(self._ignored_params & set(target.parameters())) or None
            return type(self)(target, **given)

        replace_modules(module, targets, wrap)

    # forward.py

    forward = passes.forward
    no_sync = passes.no_sync
    reset_state = passes.reset_state
    sync_params = passes.sync_params
    refresh = passes.refresh
    train = passes.train
    register_comm_hook = passes.register_comm_hook
    clip_grad_norm_ = passes.clip_grad_norm_
    _lazy_init = passes.lazy_init

    # full_params.py

    summon_full_params = staticmethod(full_params.summon_full_params)
    _summon_full_params = full_params.summon_full_params
    apply = full_params.apply
    named_parameters = full_params.named_parameters
    named_buffers = full_params.named_buffers

    # copying.py

    __copy__ = copying.copy_wrapper
    __deepcopy__ = copying.deepcopy_wrapper
    __reduce_ex__ = copying.reduce_wrapper
    __setstate__ = copying.set_state
    _apply = copying.apply_to_tensors

    # states/state_dict_type.py

    set_state_dict_type = staticmethod(state_dict_type.set_state_dict_type)
    get_state_dict_type = staticmethod(state_dict_type.get_state_dict_type)
    state_dict_type = staticmethod(state_dict_type.state_dict_type)
    _state_dict_type = property(attrgetter("_settings.state_dict_type"))
    _state_dict_config = property(attrgetter("_settings.state_dict_config"))
    _optim_state_dict_config = property(attrgetter("_settings.optim_state_dict_config"))

    # states/model.py

    state_dict = model.state_dict
    load_state_dict = model.load_state_dict
    # These four are names of torch 1.12's class
    _local_state_dict = partialmethod(model.in_form, StateDictType.LOCAL_STATE_DICT, "state_dict")
    _sharded_state_dict = partialmethod(model.in_form, StateDictType.SHARDED_STATE_DICT, "state_dict")
    _load_local_state_dict = partialmethod(model.in_form, StateDictType.LOCAL_STATE_DICT, "load_state_dict")
    _load_sharded_state_dict = partialmethod(model.in_form, StateDictType.SHARDED_STATE_DICT, "load_state_dict")

    # states/optimizer.py

    full_optim_state_dict = staticmethod(optimizer.full_optim_state_dict)
    optim_state_dict = staticmethod(optimizer.optim_state_dict)
    sharded_optim_state_dict = staticmethod(optimizer.sharded_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optimizer.flatten_sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optimizer.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optimizer.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optimizer.rekey_optim_state_dict)
    optim_state_dict_to_load = staticmethod(optimizer.optim_state_dict_to_load)
