"""Refuse or correct tools that do not know our class and would take shards for whole parameters, in silence.

Tools that look for a marker on each module meet the properties in ``unit/markers.py``. This file covers the others: it
checks when they register a module, or replaces one of their functions, while a unit lives.

=============================================  ==============================
tool                                           behaviour for sharded parameters
=============================================  ==============================
DistributedDataParallel, DataParallel          refused
torch's ``fsdp_modules`` and its callers       refused
plans of ``torch.distributed.checkpoint``      refused if a state has shards
``clip_grad_norm_``                            counts the shards of all ranks
``get_total_norm``                             refused
LBFGS, ZeroRedundancyOptimizer                 refused when they step
Adafactor, LAMB, LARS and the like             a warning for pieces of parameters
states of optimizers that were not converted   refused at the next step
``average_parameters``                         refused
``save_pretrained`` of transformers and PEFT   refused for modules of units
``GradScaler``, ``ShardedGradScaler``          all ranks skip a step together
``backward(inputs=)``, ``autograd.grad``       see ``backward_inputs.py``
=============================================  ==============================
"""

import contextlib
import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ... import _C
from ...common import optimizers
from ...common.torch_private import TorchsFSDP
from ...common.warned import warn_user
from ..desync import checked_collectives
from ..errors import StateError
from ..names import FLAT_PARAM, join
from ..unit.clip import by_group, clip
from ..unit.markers import STATES, RefusingMarkers, of_whole_values
from ..unit.registry import all_units, flat_param_of, owner_of_param, sharded_now, units_live
from ..unit.summon import refuse_unreduced
from ..unit.torch_calls import seen_as
from ..unit.unit import units_of

_TEST = "tests/fsdp/interop/test_fsdp_foreign.py"
_WRAPPERS = (DistributedDataParallel, DataParallel)


def refuse_wrapped(module: nn.Module, ignored: Collection[nn.Module]) -> None:
    """Raises: ValueError naming a module in ``module`` that another data-parallel class manages.

    The wrapper's constructor calls this before it changes ``module``. ``ignored``: modules that are not looked at.
    """
    for path, inner in module.named_modules():
        if inner in ignored:
            continue
        if isinstance(inner, (*_WRAPPERS, TorchsFSDP)):
            which, instead = f"a {type(inner).__name__} of torch", "Pass the module that it wraps (its `.module`)"
        elif isinstance(inner, FSDPModule):
            which, instead = f"a {type(inner).__name__} that fully_shard() has sharded", "Pass it as it was before"
        else:
            continue
        where = f"at `{path}`" if path else "itself"
        raise ValueError(
            f"the unit of {type(module).__name__} would hold {which} ({where}), which would reduce shards, or shard "
            f"them again. {instead}, or ignore it (ignored_modules)"
        )


@units_live.around(
    "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.fsdp_modules",
    test=_TEST,
    owner=TorchsFSDP,
)
def _refuse_roots(original: Any, module: nn.Module, root_only: bool = False) -> list[TorchsFSDP]:
    """Let torch's ``fsdp_modules`` read our markers, also with ``root_only``, where it reads none."""
    for inner in module.modules():
        if isinstance(inner, RefusingMarkers):
            inner._refuse_composing()
    found: list[TorchsFSDP] = original(module, root_only)
    return found


@units_live.register(register_module_module_registration_hook, _TEST)
def _refuse_data_parallel(module: nn.Module, name: str, inner: nn.Module | None) -> None:
    """Refuse units in DistributedDataParallel and DataParallel, which register a module before they communicate.

    Raises: StateError if ``inner`` has a parameter of a unit that DistributedDataParallel would manage.
    """
    if not isinstance(module, _WRAPPERS) or inner is None:
        return
    ignored = getattr(module, "parameters_to_ignore", ())
    for unit in units_of(inner.modules()):
        managed = {id(param) for _, param in unit.parameters()}
        if any(id(param) in managed and path not in ignored for path, param in inner.named_parameters()):
            raise StateError(
                f"{type(module).__name__} does not know {unit.name} of flatparam's FullyShardedDataParallel: it would "
                "copy one rank's shards over those of the others. That class averages gradients over all ranks of its "
                "groups: call it alone (for replicas of shards: ShardingStrategy.HYBRID_SHARD)"
            )


_CHECKPOINT = "torch.distributed.checkpoint"  # importing it takes half a second


@units_live.around(f"{_CHECKPOINT}.default_planner:create_default_local_save_plan", test=_TEST)
@units_live.around(f"{_CHECKPOINT}.default_planner:create_default_local_load_plan", test=_TEST)
def _checking_plans(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse states with shards in plans of ``torch.distributed.checkpoint``."""
    refuse_shards((*args, *kwargs.values())[0])
    return function(*args, **kwargs)


@units_live.around(f"{_CHECKPOINT}.state_dict_saver:_stateful_to_state_dict", test=_TEST)
def _checking_states(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse states with shards before asynchronous saving: it plans with copies, in which shards are not found."""
    result = function(*args, **kwargs)
    refuse_shards(result)
    return result


def refuse_shards(state: Any) -> None:
    """Raises: StateError if ``state`` has plain tensors that are shards of parameters or of optimizer state.

    torch would keep the shard of one rank for all ranks. Shards are found by their storages, in nested containers.
    """
    shards = {
        flat_param.flat.untyped_storage().data_ptr(): f"parameters of {unit.name}"
        for unit in all_units()
        for flat_param in unit.flat_params
        if flat_param.is_sharded and unit.summoned is None and not unit.is_away
    }
    plain = [(name, tensor) for name, tensor in _tensors("", state) if _C.is_plain_tensor(tensor)] if shards else []
    _refuse_those_in(shards, plain)
    if any(tensor.dim() > 0 for _, tensor in plain):  # the search over all objects is slow
        _refuse_those_in(_states_of_shards(), plain)


def _states_of_shards() -> dict[int, str]:
    """Address of a storage -> description, for optimizer state of sharded parameters in all optimizers alive."""
    found: dict[int, str] = {}
    for optimizer in [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]:
        for param, values in optimizer.state.items():
            owner = owner_of_param(param)
            if owner is not None and owner.flat_param.is_sharded:
                tensors = (value for value in values.values() if isinstance(value, Tensor) and value.dim() > 0)
                what = f"the {type(optimizer).__name__} state of {owner.unit.name}"
                found.update((value.untyped_storage().data_ptr(), what) for value in tensors)
    return found


def _refuse_those_in(shards: dict[int, str], given: list[tuple[str, Tensor]]) -> None:
    for name, tensor in given:
        address = tensor.untyped_storage().data_ptr()
        if address in shards and address != 0:
            raise StateError(
                f"torch.distributed.checkpoint: `{name}` has this rank's shards of {shards[address]}, and it "
                f"would save the shards of one rank for all ranks. {STATES}"
            )


def _tensors(path: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, Mapping | list | tuple):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _tensors(join(path, str(key)), value)


@units_live.replace("torch.nn.utils.clip_grad:clip_grad_norm_", test=_TEST, everywhere=True)
def _clip_over_ranks(original: Any) -> Any:
    """Let ``clip_grad_norm_`` count the shards of all ranks: a collective call then.

    Models without sharded parameters use torch's function.
    """

    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        found = [] if torch.compiler.is_compiling() else sharded_now(params)
        if not found:
            result: Tensor = original(params or parameters, max_norm, norm_type, error_if_nonfinite, foreach)
            return result
        refuse_unreduced(dict.fromkeys(unit for unit, _ in found), "torch.nn.utils.clip_grad_norm_")
        owned = {id(param): (flat_param_of(param), param) for param in params}
        return clip(by_group(owned.values()), float(max_norm), float(norm_type), error_if_nonfinite)

    return seen_as(clip_grad_norm_, original)


@units_live.replace("torch.nn.utils.clip_grad:_get_total_norm", test=_TEST, everywhere=True)
def _refuse_norms_of_shards(original: Any) -> Any:
    """Let ``torch.nn.utils.get_total_norm`` refuse gradients of shards.

    It gets gradients without their parameters, and its callers expect no collective.
    """

    def get_total_norm(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            _refuse_shards_of_gradients(tensors)
        result: Tensor = original(tensors, *args, **kwargs)
        return result

    return seen_as(get_total_norm, original)


def _refuse_shards_of_gradients(tensors: list[Tensor]) -> None:
    given = {id(tensor) for tensor in tensors}
    owners = (param for unit in all_units() for _, param in unit.parameters() if id(param.grad) in given)
    for unit, _ in sharded_now(owners):
        raise StateError(
            f"torch.nn.utils.get_total_norm: a gradient of {unit.name} is this rank's shard, so each rank would clip "
            "by another norm: call torch.nn.utils.clip_grad_norm_() or model.clip_grad_norm_(), whose norm is over all "
            "ranks"
        )


_WHOLE_ONLY = {  # class of an optimizer of torch -> why it cannot step shards
    "LBFGS": "multiplies gradients of all parameters with each other, so each rank would step another way: use "
    "ShardingStrategy.NO_SHARD, or another optimizer",
    "ZeroRedundancyOptimizer": "copies the values that one rank has stepped to the others: use its inner optimizer, "
    "whose states are sharded as parameters are",
}


@units_live.register(register_optimizer_step_pre_hook, "tests/fsdp/unit/test_fsdp_exchanges.py")
def _take_data(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Take data that a user gave parameters since backward into the flat parameters, which the optimizer steps.

    Original parameters have such data themselves. A step inside of a backward finds views that backward frees. Raises:
    as ``Unit.write_back``.
    """
    for unit in optimizers.units_of(optimizer):
        root = unit.core.root
        if not unit.options.use_orig_params and unit.core.is_written and (root is None or root.state == "IDLE"):
            unit.sync_user_writes()


@units_live.register(register_optimizer_step_pre_hook, "tests/fsdp/interop/test_fsdp_optimizers.py")
def _refuse_for_whole_only(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse steps of optimizers that would step shards and need whole parameters.

    Raises: StateError for a class in ``_WHOLE_ONLY``.
    """
    for name in [cls.__name__ for cls in type(optimizer).__mro__ if cls.__name__ in _WHOLE_ONLY]:
        for unit, _ in sharded_now(param for group in optimizer.param_groups for param in group["params"]):
            raise StateError(
                f"{name}.step(): a parameter of {unit.name} is this rank's shard. {name} {_WHOLE_ONLY[name]}"
            )


# Optimizers whose step depends on norms, or on rows and columns, of a whole parameter
_BY_PARAMETER = {"Adafactor", "CAME", "LAMB", "LARS", "Lamb", "Lars", "SOAP", "Shampoo"}
_told_of_pieces: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@units_live.register(register_optimizer_step_pre_hook, "tests/fsdp/interop/test_fsdp_optimizers.py")
def _warn_of_pieces(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Warn once where an optimizer in ``_BY_PARAMETER`` steps a piece of a parameter, or a flat parameter."""
    name = type(optimizer).__name__
    if name not in _BY_PARAMETER or optimizer in _told_of_pieces:
        return
    _told_of_pieces.add(optimizer)
    for param in (param for group in optimizer.param_groups for param in group["params"] if param.numel()):
        owner = owner_of_param(param)
        if owner is None or owner.unit.summoned is not None:
            continue
        shape = next((one.shape for one in owner.flat_param.originals if one.param is param), None)
        if shape != param.shape:
            warn_user(
                f"{name}.step(): the step of a parameter depends on all of its elements, and "
                f"`{owner.name or FLAT_PARAM}` of {owner.unit.name} has shape {tuple(param.shape)} on this rank, so it "
                "trains otherwise than unsharded: wrap with use_orig_params=True and atomic=torch.Tensor.numel, which "
                "keeps each parameter on one rank"
            )
            return


# torch's optimizers whose states have one element for each of the parameter, or one in all
_BY_ELEMENT = {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
# Optimizer -> its first parameter's states when all were checked. `load_state_dict` puts a new dict in their place
_state_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[Any, Any]] = weakref.WeakKeyDictionary()


@units_live.register(register_optimizer_step_pre_hook, "tests/fsdp/interop/test_fsdp_optimizers.py")
def _refuse_states_of_other_shapes(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse the first step after a load of states that do not have the numel of this rank's pieces.

    torch's step would fail without a name. Other classes of optimizers may have states of any shape, so only torch's
    and flatparam's that work by element are checked.
    Raises: StateError naming parameter and key.
    """
    first = next(iter(optimizer.state.values()), None)
    if first is None or _state_checked.get(optimizer) is first:
        return
    cls = type(optimizer)
    if cls.__name__ in _BY_ELEMENT and cls.__module__.startswith(("torch.optim", "flatparam.optim")):
        for param, state in optimizer.state.items():
            owner = owner_of_param(param)
            if owner is None or owner.unit.summoned is not None or not param.requires_grad or param.numel() == 0:
                continue
            for key, value in state.items():
                if isinstance(value, Tensor) and value.numel() not in (1, param.numel()):
                    raise StateError(
                        f"{cls.__name__}.step(): the state `{key}` of `{owner.name or FLAT_PARAM}` of "
                        f"{owner.unit.name} has shape {tuple(value.shape)}, and this rank's piece of the parameter "
                        f"{tuple(param.shape)}. Convert a state before it is loaded: "
                        "optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, "
                        "optimizer, state)); or use flatparam.checkpoint.load(path, model, optimizer)"
                    )
    _state_checked[optimizer] = first


@units_live.around("torch.distributed.algorithms.model_averaging.utils:average_parameters", test=_TEST, everywhere=True)
def _refuse_averages(average: Callable[..., None], params: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
    """Let torch's model averaging refuse shards: it would average shards of different parameters."""
    params = list(params)
    for unit, _ in sharded_now(params):
        raise StateError(
            f"average_parameters: a parameter of {unit.name} is this rank's shard, which would be averaged with "
            "other ranks' shards. Ranks of one group have the same values already; for groups that train apart use "
            "ShardingStrategy.NO_SHARD"
        )
    average(iter(params), *args, **kwargs)


@units_live.replace("transformers.modeling_utils:PreTrainedModel.save_pretrained", test=_TEST)
@units_live.replace("peft.peft_model:PeftModel.save_pretrained", test=_TEST)
def _refuse_to_save_pieces(save: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``save_pretrained`` of transformers and PEFT refuse to save pieces, also of a module inside of a unit."""
    return of_whole_values(save)


@units_live.around("torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler.unscale_", test=_TEST)
def _counting_once(unscale: Callable[..., Any], self: ShardedGradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Limit the flag of infinite gradients of ``ShardedGradScaler`` to 1, and say which rank does not come to it.

    torch adds the flag over the ranks. Fused optimizers skip a step if it is 1, and step if it is any other number.
    """
    group = (self.process_group or dist.group.WORLD) if self.is_enabled() else None
    with checked_collectives.explaining_over(group) if group else contextlib.nullcontext():
        unscale(self, optimizer)
    if self.is_enabled():
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.clamp_(max=1.0)


@units_live.around("torch.amp.grad_scaler:GradScaler._unscale_grads_", test=_TEST)
@units_live.around("torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler._unscale_grads_", test=_TEST)
def _agreeing(
    unscale: Callable[..., dict[torch.device, Tensor]],
    self: GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    """Let all ranks skip a step of a gradient scaler together.

    Each rank sees infinite gradients in its own shards only, so the flags are all-reduced: a collective call if the
    optimizer steps sharded parameters. They get one shape: torch's ``ShardedGradScaler`` makes two, one for fused
    optimizers, and cannot add them.
    """
    found_inf = found_inf.reshape(())
    found = unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
    shards = sharded_now(param for group in optimizer.param_groups for param in group["params"])
    if shards:
        found = found or {found_inf.device: found_inf}  # a rank without gradients takes part too
        any_inf = torch.stack([value.to(shards[0][1].device) for value in found.values()]).amax()
        by_group = {id(flat_param.placement.optim): flat_param for _, flat_param in reversed(shards)}
        for flat_param in by_group.values():
            checked_collectives.all_reduce(any_inf, dist.ReduceOp.MAX, flat_param, _C.EVENT_SCALES)
        first, *others = found.values()  # fused optimizers add the flags of devices, and skip if the sum is 1
        first.copy_(any_inf)
        for value in others:
            value.zero_()
    return found
