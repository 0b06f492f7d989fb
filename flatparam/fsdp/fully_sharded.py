"""The wrapper that users see."""

import contextlib
import copy
import copyreg
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.autograd import profiler
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp.api import FullOptimStateDictConfig
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function

from .. import _C
from ..common import dlpack
from ..common.compiling import leave_out_of_graphs
from ..common.torch_private import _override_module_mixed_precision
from . import collectives, peers
from . import state_dict as state_dicts
from .additions import close, closed, watch_registrations
from .agreement import Building, check_same_unit, groups_of_placement, telling
from .api import ShardingStrategy, TrainingState
from .arguments import check_types
from .blocks import Atomic, check_layout_arguments
from .clip import clip_grad_norm
from .errors import StateError
from .foreign import Marks, refuse_wrapped, watch
from .in_backward import step_in_backward
from .loading import Values, agree_on_loading, check_kinds, values_of
from .materialize import accelerator_of, device_of, materialize, move, own_modules, synchronize
from .memory import MemoryPlan
from .names import FSDP_PREFIX, FSDP_WRAPPED_MODULE, clean_tensor_name, without_units
from .order import follow
from .originals import Options, choose_blocks, find_originals
from .outputs import cast_floats, find_tensors, move_tensors
from .owners import owner_of, owner_of_param
from .pairs import check_pair, outer_group
from .pickling import pickled
from .placement import Placement, groups_of, place
from .plan import Piece, memory_plan, shard_map
from .recomputation import is_never_recomputed
from .register import enroll, enroll_loaded
from .restoring import Before
from .summon import Summoned, check_reduced, refuse_step, refuse_unreduced, summon
from .unit import Unit, units_of
from .wrap import check_not_tied, replace_modules, targets_of

_HOST = torch.device("cpu")
_CLOSED = "_closed"  # in a pickle: the modules that nothing may be added to
_PREFETCH = {None: 0, BackwardPrefetch.BACKWARD_PRE: 1, BackwardPrefetch.BACKWARD_POST: 2}


@functools.cache
def _watch_torch() -> None:
    register_optimizer_step_pre_hook(refuse_step)
    register_optimizer_step_pre_hook(check_reduced)
    register_optimizer_step_post_hook(_C.note_optimizer_step)
    dlpack.watch()


class FullyShardedDataParallel(Marks, nn.Module):
    """Shards ``module``'s parameters over ranks, with the API of torch's class of this name.

    Args: those of ``torch.distributed.fsdp.FullyShardedDataParallel`` (2.13), and
        ``placement``: groups to shard over (:class:`Placement`) instead of strategy and process group;
        ``segments``: a unit may hold parameters of several dtypes, and frozen beside trainable ones, each in a flat
        parameter of its own: frozen ones have no gradient memory and are not reduced;
        ``check_values``: compare digests of the initial values over the ranks.

    ``limit_all_gathers`` holds always: memory is freed in the order of the program, so there is nothing to limit.
    Raises: ValueError for arguments that contradict each other or name what is not supported.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
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
        device_mesh: Any = None,
        *,
        placement: Placement | None = None,
        segments: bool = False,
        shard_alignment: int | None = None,
        atomic: Atomic = None,
        offload_grads: bool = False,
        check_values: bool = True,
    ):
        super().__init__()
        _watch_torch()
        leave_out_of_graphs()
        watch()
        peers.enter()
        watch_registrations()
        building = Building(_default_groups(process_group, device_mesh, placement))
        with telling(building):
            self._strategy = ShardingStrategy.of(sharding_strategy)
            if placement is not None:
                check_types(placement=placement)
                if process_group is not None or device_mesh is not None or sharding_strategy is not None:
                    raise ValueError(
                        "placement= replaces process_group, device_mesh and sharding_strategy: pass only one"
                    )
                self._placement = placement
                if placement.copied:
                    check_pair(placement.param, placement.optim, "Placement")
                if placement.outer is not None:
                    outer_group(placement.param, placement.optim, placement.outer)
            else:
                self._placement = place(self._strategy, groups_of(self._strategy, process_group, device_mesh))
            building.groups = groups_of_placement(self._placement)
            check_types(
                module=module,
                cpu_offload=cpu_offload,
                mixed_precision=mixed_precision,
                sync_module_states=sync_module_states,
                forward_prefetch=forward_prefetch,
                limit_all_gathers=limit_all_gathers,
                use_orig_params=use_orig_params,
                segments=segments,
                offload_grads=offload_grads,
                check_values=check_values,
            )
            if isinstance(module, FullyShardedDataParallel):
                wrapped: Unit = vars(module)["_unit"]
                raise ValueError(
                    f"the module is a FullyShardedDataParallel already, {wrapped.name} with {_first_name(wrapped)}: "
                    "wrap it once (its `.module` is what it has wrapped)"
                )
            if backward_prefetch not in _PREFETCH:
                raise TypeError(
                    f"expected backward_prefetch to be a BackwardPrefetch or None, got {backward_prefetch!r}"
                )
            check_layout_arguments(shard_alignment, atomic)
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                warnings.warn(
                    f"a {type(module).__name__} has no forward, so its unit never gathers its parameters: wrap the "
                    "modules in it, or the one that holds it",
                    stacklevel=2,
                )
            self._backward_prefetch = backward_prefetch
            self._forward_prefetch = forward_prefetch
            self.limit_all_gathers = limit_all_gathers
            self.mixed_precision = mixed_precision if mixed_precision is not None else MixedPrecision()
            self.cpu_offload = cpu_offload if cpu_offload is not None else CPUOffload()
            self._use_orig_params = use_orig_params
            ignored_modules_set, ignored_params = _ignored(module, ignored_modules, ignored_states)
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
            self._ignored_params = ignored_params
            if auto_wrap_policy is not None:
                self._wrap_descendants(
                    module,
                    auto_wrap_policy,
                    ignored_modules_set,
                    ignored_params,
                    {
                        "process_group": process_group,
                        "sharding_strategy": sharding_strategy,
                        "cpu_offload": cpu_offload,
                        "backward_prefetch": backward_prefetch,
                        "mixed_precision": mixed_precision,
                        "param_init_fn": param_init_fn,
                        "device_id": device_id,
                        "sync_module_states": sync_module_states,
                        "forward_prefetch": forward_prefetch,
                        "limit_all_gathers": limit_all_gathers,
                        "use_orig_params": use_orig_params,
                        "device_mesh": device_mesh,
                        "placement": placement,
                        "segments": segments,
                        "shard_alignment": shard_alignment,
                        "atomic": atomic,
                        "offload_grads": offload_grads,
                        "check_values": check_values,
                    },
                )
            for inner in module.modules():
                if isinstance(inner, FullyShardedDataParallel):
                    ignored_params |= inner._ignored_params
                    if inner._outer is None or inner._outer() is None:
                        inner._outer = weakref.ref(self)
            self._outer: weakref.ref[FullyShardedDataParallel] | None = None
            self._device_id = device = device_of(device_id)
            own = list(own_modules(module, _is_unit, ignored_modules_set))
            refuse_wrapped(own)
            self._check_not_shared(module, own)
            computes_on = None  # if that is not where the shards lie
            if self.cpu_offload.offload_params:
                computes_on = accelerator_of(own, ignored_params, device)
            materialize(own, ignored_params, param_init_fn, _HOST if computes_on else device)
            move(own, ignored_params, device, _HOST if computes_on else device, computes_on or device)
            originals = find_originals(own, module, ignored_params, clean_tensor_name)
            choose_blocks(originals, atomic)
            options = Options(
                self._placement,
                self.mixed_precision,
                use_orig_params,
                segments,
                shard_alignment,
                atomic,
                offload_grads,
                computes_on,
            )
            name = f"the unit of {type(module).__name__}"
            agreed = check_same_unit(name, originals, options, check_values and not sync_module_states)
            building.groups = []
            if sync_module_states:
                synchronize(own, ignored_params, self._placement, computes_on)
            self._buffer_dtypes: dict[str, torch.dtype] = {}
            self.add_module(FSDP_WRAPPED_MODULE, module)
            self._unit = Unit(module, originals, options, name)
            enroll(self._unit, agreed.numbers)
            self._unit.apart = agreed.apart
            if agreed.apart is not None:
                warnings.warn(f"{agreed.apart}. The first forward raises this, unless values are loaded", stacklevel=2)
            close(self._unit, [self, *own], ignored_params)
            _warn_of_padding(self._unit)
            self._is_root = False
            self._casts_to: torch.dtype | None = None
            self._full_in_eval = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1"
            self._in_full = False  # now
            self._moves_to: torch.device | None = None  # inputs of the root
            self._loading: Summoned | None = None
            self._comm_hook: collectives.Hooked | None = None
            self._settings = StateDictSettings(
                StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
            )
            self.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]

    def _wrap_descendants(
        self,
        module: nn.Module,
        policy: Any,
        ignored_modules: set[nn.Module],
        ignored_params: set[nn.Parameter],
        arguments: dict[str, Any],
    ) -> None:
        if any(_is_unit(inner) for inner in module.modules()):
            raise ValueError("a policy wraps a tree without units; this one has FullyShardedDataParallel already")
        targets = targets_of(module, policy, ignored_modules, ignored_params, arguments)
        precision = self.mixed_precision
        full_precision = tuple(precision._module_classes_to_ignore) if arguments["mixed_precision"] is not None else ()
        if full_precision:
            for inner in module.modules():
                if isinstance(inner, full_precision) and inner is not module and inner not in ignored_modules:
                    targets[inner] = {**arguments, "mixed_precision": None}
        check_not_tied(module, targets, ignored_modules, ignored_params)
        if full_precision:
            names = _override_module_mixed_precision(module, full_precision)
            if names:
                warnings.warn(
                    f"mixed precision is off for modules of {sorted(cls.__name__ for cls in names)}: each becomes a "
                    "unit of its own that computes in full precision",
                    stacklevel=4,
                )
        replace_modules(
            module,
            targets,
            lambda target, kwargs: type(self)(
                target,
                **{
                    **{key: value for key, value in kwargs.items() if key != "auto_wrap_policy"},
                    "ignored_states": list(ignored_params & set(target.parameters())) or None,
                },
            ),
        )

    def _check_not_shared(self, module: nn.Module, own: list[nn.Module]) -> None:
        """Refuse a parameter, and a module with parameters, that another unit has. Raises: ValueError naming both."""
        for inner in own:
            unit = owner_of(inner)
            if unit is not None:
                raise ValueError(
                    f"a {type(inner).__name__} in {type(module).__name__} is shared with {unit.name}, which has its "
                    "parameters: reached outside of that unit it would run without. Make it a unit of its own, or wrap "
                    "both places in one unit"
                )
            for name, param in inner._parameters.items():
                owner = None if param is None else owner_of_param(param)
                if owner is not None:
                    raise ValueError(
                        f"parameter `{name}` of a {type(inner).__name__} in {type(module).__name__} is shared with "
                        f"`{owner[1]}` of {owner[0].name}: each would train a copy of its own. Wrap both in one unit, "
                        "or ignore the parameter"
                    )

    # The step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its full parameters."""
        unit = self._unit
        if unit.summoned is not None:
            return self._forward_summoned(unit.summoned, args, kwargs)
        if not self._use_orig_params:
            unit.check_registered()
        step = unit.step
        if step.run is None:
            self._lazy_init()
        if self._full_in_eval:
            self._choose_precision()
        records = torch.is_grad_enabled()
        if not records:
            self._refuse_untrained()
        device = self._moves_to
        if device is not None and not all(isinstance(arg, Tensor) and arg.device == device for arg in args):
            args = move_tensors(device, args, self._unit.name)
        if device is not None and kwargs:
            kwargs = move_tensors(device, kwargs, self._unit.name)
        if self._casts_to is not None:
            args, kwargs = cast_floats(self._casts_to, args), cast_floats(self._casts_to, kwargs)
        if records and step.has_frozen:
            self._watch_inputs((args, kwargs))
        try:
            step.pre_forward()
            module: Any = self._modules[FSDP_WRAPPED_MODULE]
            if profiler._is_profiler_enabled:
                with record_function(f"flatparam forward: {self._unit.name}"):
                    output = module(*args, **kwargs)
            else:
                output = module(*args, **kwargs)
            return step.post_forward(output)
        except BaseException as error:
            try:
                unit.explain(error)
            finally:
                step.abort_forward()
                unit.check_shards(error)
            raise

    def _refuse_untrained(self) -> None:
        """Raises: StateError in a reentrant checkpoint that would leave this unit, which is to be trained, as it is."""
        if is_never_recomputed(FullyShardedDataParallel.forward.__code__, self.training) and any(
            segment.is_trained for unit in units_of(self.modules()) for segment in unit.segments
        ):
            raise StateError(
                f"{self._unit.name} runs in a reentrant checkpoint, which recomputes it in backward if an input "
                "requires grad, and none does: its parameters would get no gradient. Use "
                "checkpoint(..., use_reentrant=False), call requires_grad_() on an input, or freeze the parameters"
            )

    def _forward_summoned(self, summoned: Summoned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the wrapped module inside summon_full_params(): with the parameters that are there, in full precision.

        Raises: StateError on a rank that has shards only. A backward through it raises one too.
        """
        unit = self._unit
        if not summoned.shown:
            raise StateError(
                f"{unit.name}: forward inside summon_full_params(rank0_only=True) on a rank that has its shards only: "
                "call it on rank 0, or summon without rank0_only"
            )
        for whole in summoned.wholes[:1]:
            args, kwargs = move_tensors(whole.device, (args, kwargs), unit.name)
            if self.mixed_precision.param_dtype is not None:
                args, kwargs = cast_floats(whole.dtype, (args, kwargs))
        self._put_buffers(True)
        try:
            with self._units_below_in_full() as below:
                output = self.module(*args, **kwargs)
        finally:
            self._put_buffers(self._in_full)
        outer = self._outer() if self._outer is not None else None
        if outer is not None and not outer._in_full and unit.step.run is not None and unit.step.run.state == "FORWARD":
            dtype = self.mixed_precision.param_dtype
            output = output if dtype is None else cast_floats(dtype, output)  # the unit around it expects that
        units = [unit, *(wrapper._unit for wrapper in below)]
        if torch.is_grad_enabled() and any(segment.is_trained for unit in units for segment in unit.segments):
            for tensor in find_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(_refuse_backward, unit.name))
        return output

    @contextlib.contextmanager
    def _units_below_in_full(self) -> "Generator[list[FullyShardedDataParallel], None, None]":
        """Have the units below that are not summoned compute in full precision too; yields those that would not."""
        below = [
            wrapper
            for wrapper in self.fsdp_modules(self)
            if wrapper._unit.summoned is None
            and wrapper.mixed_precision.param_dtype is not None
            and not (wrapper._full_in_eval and not wrapper.module.training)
        ]
        if below and self._unit.step.run is None:
            self._lazy_init()
        before = [wrapper._full_in_eval for wrapper in below]
        try:
            for wrapper in below:
                wrapper._full_in_eval = False
                wrapper._compute_in_full(True)
            yield below
        finally:
            for wrapper, full_in_eval in zip(below, before, strict=True):
                wrapper._full_in_eval = full_in_eval
                wrapper._compute_in_full(False)

    def _watch_inputs(self, inputs: Any) -> None:
        """Free frozen parameters in backward as soon as the gradients that they are needed for are there.

        With an input that nothing computed they are freed when backward ends: ``autograd.grad`` does not tell of those.
        """
        tensors = [tensor for tensor in find_tensors(inputs) if tensor.requires_grad]
        if tensors and all(tensor.grad_fn is not None for tensor in tensors) and self._unit.step.expect_inputs():
            torch.autograd.graph.register_multi_grad_hook(
                tensors, functools.partial(_inputs_done, weakref.ref(self._unit))
            )

    def _outermost(self) -> "FullyShardedDataParallel":
        outer = self._outer() if self._outer is not None else None
        return self if outer is None else outer._outermost()

    def _lazy_init(self) -> None:
        """Join all units of the tree in one run; the first forward does it."""
        root = self._outermost()
        run = _C.Root(
            _PREFETCH[root._backward_prefetch],
            root._forward_prefetch,
            collectives if root._comm_hook is None else root._comm_hook,
            collectives.WATCHED,
            find_tensors,
        )
        wrappers = self.fsdp_modules(root)
        for wrapper in wrappers:
            if wrapper._use_orig_params != root._use_orig_params:
                raise ValueError(
                    f"all units of a tree must have one use_orig_params: {root._unit.name} has "
                    f"{root._use_orig_params}, {wrapper._unit.name} {wrapper._use_orig_params}"
                )
            if wrapper.limit_all_gathers != root.limit_all_gathers:
                raise ValueError("all units of a tree must have one limit_all_gathers")
        run.always_python = int(root._comm_hook is not None)
        paths = {id(inner): path for path, inner in root.named_modules()}
        for wrapper in reversed(wrappers):  # the root last: if this fails, its next forward tries again
            path = clean_tensor_name(paths[id(wrapper)] + ".").rstrip(".")
            wrapper._unit.rename(f"the unit of {type(wrapper.module).__name__} at `{path}`")
            if wrapper._unit.apart is not None:
                raise ValueError(wrapper._unit.apart)
            step_in_backward(wrapper._unit)
            wrapper._unit.step.join(run)
            if root._comm_hook is not None:
                wrapper._unit.step.average_elsewhere()
            wrapper._is_root = wrapper is root
            wrapper._casts_to = None if wrapper._in_full else wrapper._casts()
            has_any = any(True for _ in wrapper.parameters())
            wrapper._moves_to = wrapper.compute_device if wrapper is root and has_any else None
        follow(run, [(wrapper._unit, wrapper.compute_device) for wrapper in wrappers])
        root._cast_buffers(wrappers)

    @torch.inference_mode(False)
    def _cast_buffers(self, wrappers: list["FullyShardedDataParallel"]) -> None:
        """Buffers go to the dtype that the innermost unit around them asks for, once."""
        done: set[int] = set()
        for wrapper in reversed(wrappers):
            dtype = wrapper.mixed_precision.buffer_dtype
            for path, module in wrapper.module.named_modules():
                for name, buffer in module._buffers.items():
                    if buffer is None or id(buffer) in done:
                        continue
                    done.add(id(buffer))
                    if dtype is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                        key = without_units(f"{path}.{name}" if path else name)
                        wrapper._buffer_dtypes.setdefault(key, buffer.dtype)
                        module._buffers[name] = buffer.to(dtype)
                        done.add(id(module._buffers[name]))

    def _casts(self) -> torch.dtype | None:
        """What floating inputs are cast to."""
        precision = self.mixed_precision
        casts = precision.cast_root_forward_inputs if self._is_root else precision.cast_forward_inputs
        return precision.param_dtype if casts else None

    def _choose_precision(self) -> None:
        """In full for evaluation, with FSDP_USE_FULL_PREC_IN_EVAL=1: parameters, reductions, buffers and inputs."""
        module: Any = self._modules[FSDP_WRAPPED_MODULE]
        in_full = not module.training
        if in_full != self._in_full:
            self._compute_in_full(in_full)

    def _compute_in_full(self, in_full: bool) -> None:
        self._unit.step.compute_in_full(in_full)
        self._in_full = in_full
        self._casts_to = None if in_full else self._casts()
        self._put_buffers(in_full)

    @torch.inference_mode(False)
    def _put_buffers(self, in_full: bool) -> None:
        """Have the buffers that are cast in their own dtype, or in the one that they are cast to."""
        if not self._buffer_dtypes:
            return
        for path, inner in self.module.named_modules():
            for name, buffer in inner._buffers.items():
                dtype = self._buffer_dtypes.get(without_units(f"{path}.{name}" if path else name))
                if buffer is not None and dtype is not None:
                    inner._buffers[name] = buffer.to(dtype if in_full else self.mixed_precision.buffer_dtype)

    def _check_root(self, what: str) -> None:
        """Raises: StateError unless this is the outermost unit and nothing is under way."""
        if self._outermost() is not self:
            raise StateError(f"`{what}()` should only be called on the root FSDP instance; this is {self._unit.name}")
        self._check_idle(what)

    def _check_idle(self, what: str) -> None:
        for wrapper in self.fsdp_modules(self):
            wrapper._forget_interrupted()
            if wrapper.training_state is not TrainingState.IDLE:
                raise StateError(
                    f"{what}: expected {wrapper._unit.name} to be IDLE, it is in {wrapper.training_state.name}"
                )

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Within the block gradients are kept unsharded and not reduced. For the root, between steps."""
        self._check_root("no_sync")
        if self._unit.step.run is None:
            self._lazy_init()
        run: Any = self._unit.step.run
        run.blocks += 1
        run.synchronize = 0
        try:
            yield
        finally:
            run.blocks -= 1
            run.synchronize = int(run.blocks == 0)

    def sync_params(self) -> None:
        """Gather the parameters anew wherever they have changed, into what forward and backward gather from.

        For LAYER_ZERO and ZERO_1, whose first forward after a change does it otherwise; nothing for other strategies.
        A collective call, for the root, between steps. Raises: StateError naming the state and those allowed.
        """
        self._check_root("sync_params")
        if self._unit.step.run is None:
            self._lazy_init()
        run: Any = self._unit.step.run
        run.refresh()

    def refresh(self) -> None:
        """Take the parameters' values as they are now, whatever has written them, for the next forward and backward.

        For LAYER_ZERO and ZERO_1 after writes that torch does not count, as ``param.data.copy_(average)``, and between
        micro-batches in ``no_sync`` for units that are not resharded after forward; others gather in every forward. A
        collective call, for the root, between passes.
        Raises: StateError naming the state and those allowed.
        """
        self._check_root("refresh")
        for unit in units_of(self.modules()):
            unit.step.invalidate()
        self.sync_params()

    def train(self, mode: bool = True) -> "FullyShardedDataParallel":
        """As of any module. Where it begins or ends an evaluation, weights may have been exchanged by ``.data``."""
        if "_unit" in vars(self) and not (mode and self.training):
            self._unit.step.doubt()
        super().train(mode)
        return self

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce and average the gradients of all units. For the root, once, before the first forward.

        ``hook(state, gradient, output)``: the padded unsharded gradient of a unit, and the shard to fill; without
        sharding ``hook(state, gradient)``, in place.
        """
        if not callable(hook):
            raise ValueError(f"expected hook to be callable, got {type(hook).__name__}")
        self._check_root("register_comm_hook")
        if self._comm_hook is not None or self._unit.step.run is not None:
            raise StateError("register_comm_hook: once, before the first forward")
        for wrapper in self.fsdp_modules(self):
            if wrapper._placement.shards > 1 and (wrapper._placement.replicas > 1 or wrapper._placement.outer):
                raise StateError(f"register_comm_hook: not for a grid of ranks ({wrapper.sharding_strategy.name})")
        self._comm_hook = collectives.Hooked(hook, state)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``; returns the norm before.

        A collective call, for the root, between backward and the optimizer's step.
        Raises: ValueError for gradients of ``no_sync`` that are not reduced yet.
        """
        self._check_root("clip_grad_norm_")
        units = list(units_of(self.modules()))
        refuse_unreduced(units, "clip_grad_norm_")
        return clip_grad_norm(
            units,
            [param for param in self.parameters() if isinstance(param, nn.Parameter)],
            float(max_norm),
            float(norm_type),
            self.compute_device,
        )

    # Full parameters

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Within the block the parameters of the units under ``module`` are whole, in full precision.

        A collective call. ``writeback``: each rank keeps its own shard of what was written. ``rank0_only``: rank 0 of
        the group that shares a unit sees them, the others their shards. ``with_grads``: ``.grad`` too.
        Raises: ValueError in a forward, a backward or another summon, for ``writeback`` with ``rank0_only``, and for
        ``with_grads`` with gradients of ``no_sync`` that are not reduced yet.
        """
        if writeback and rank0_only:
            raise WritebackError(
                "writeback=True with rank0_only=True would leave the ranks with different parameters: pass one of them"
            )
        wrappers = [inner for inner in module.modules() if _is_unit(inner)] if recurse else [module]
        units = []
        for wrapper in wrappers:
            if isinstance(wrapper, FullyShardedDataParallel):
                wrapper._check_idle("summon_full_params")
                units.append(wrapper._unit)
        if with_grads:
            refuse_unreduced(units, "summon_full_params(with_grads=True)")
        if offload_to_cpu and not rank0_only:
            warnings.warn(
                "summon_full_params(offload_to_cpu=True) without rank0_only=True holds every parameter once a rank in "
                "the memory of each host",
                stacklevel=3,
            )
        with summon(
            units,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        ):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Call ``fn`` on every module, while the parameters of its unit are whole; what it writes is kept."""
        self._check_idle("apply")
        with summon([self._unit], writeback=True):
            super().apply(fn)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; while this unit is summoned, with the names of the unwrapped model."""
        self._forget_interrupted()
        for name, param in super().named_parameters(*args, **kwargs):
            yield (without_units(name) if self._unit.summoned is not None else name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of any module; while this unit is summoned, with the names of the unwrapped model."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (without_units(name) if self._unit.summoned is not None else name), buffer

    # State dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Every parameter whole, in its own precision, under the names of the unwrapped model. A collective call."""
        if self._unit.summoned is None:
            self._check_idle_here("state_dict")
        config = self._settings.state_dict_config
        rank0_only, to_cpu = getattr(config, "rank0_only", False), config.offload_to_cpu
        names = ("destination", "prefix", "keep_vars")
        kwargs.update(zip(names, args, strict=False))
        prefix = kwargs.get("prefix", "")
        already = self._unit.summoned is not None
        units = [] if already else [self._unit]
        on_host = to_cpu and self._unit.options.device is not None  # where the parameters are
        with summon(units, writeback=False, offload_to_cpu=on_host):
            result = super().state_dict(**kwargs)
            state_dicts.own_entries(
                self._unit,
                result,
                prefix + FSDP_PREFIX,
                keep_vars=kwargs.get("keep_vars", False),
                to_cpu=to_cpu,
                drop=rank0_only and self._placement.rank != 0,
            )
        state_dicts.strip_prefix(result, prefix)
        state_dicts.restore_buffers(result, self._buffer_dtypes, prefix)
        return result

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a full state dict, which every rank has; all ranks load all of it, or none anything. A collective call.

        Names in messages are those of the unwrapped model. Until it is done this takes the bytes of this rank's shards,
        and of what no unit manages, once more.
        Raises: RuntimeError on every rank for keys, shapes or kinds of dtype that do not fit on one of them, and for
        values that differ between ranks.
        """
        self._check_idle("load_state_dict")
        units = list(units_of(self.modules()))
        before, error, result = Before(self, units), None, None
        values: Values = {}
        try:
            try:
                result = super().load_state_dict(state_dict, strict=strict, assign=assign)
                check_kinds(self, state_dict)
                values = values_of(self, state_dict)
            finally:
                for wrapper in self.fsdp_modules(self):
                    wrapper._end_loading()
        except Exception as caught:
            error = RuntimeError(str(caught).replace(FSDP_PREFIX, "")) if type(caught) is RuntimeError else caught
        try:
            said = None if error is None else f"{type(error).__name__}: {error}"
            agree_on_loading("load_state_dict", units, said, values)
        except RuntimeError as told:
            before.restore()
            raise (told if error is None else error) from None
        return result

    def _end_loading(self) -> None:
        if self._loading is not None:
            loading, self._loading = self._loading, None
            loading.leave()

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> StateDictSettings:
        """Choose what ``state_dict`` of the units under ``module`` gives; returns the settings before.

        Raises: ValueError for another kind than FULL_STATE_DICT, which is not supported yet.
        """
        if state_dict_type is not StateDictType.FULL_STATE_DICT:
            raise ValueError(f"{state_dict_type} is not supported yet: only FULL_STATE_DICT is")
        config = state_dict_config if state_dict_config is not None else FullStateDictConfig()
        optim_config = optim_state_dict_config if optim_state_dict_config is not None else FullOptimStateDictConfig()
        if not isinstance(config, FullStateDictConfig):
            raise StateError(f"{state_dict_type} takes a FullStateDictConfig, got {type(config).__name__}")
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        previous = [wrapper._settings for wrapper in wrappers]
        for wrapper in wrappers:
            wrapper._settings = StateDictSettings(state_dict_type, config, optim_config)
        if not previous:
            return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
        return previous[0]

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of the units under ``module``."""
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        if not wrappers:
            raise ValueError(f"{type(module).__name__} holds no FullyShardedDataParallel")
        return wrappers[0]._settings

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Generator[None, None, None]:
        """``set_state_dict_type`` for the block; the settings before are restored, also after an exception."""
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        before = [wrapper._settings for wrapper in wrappers]
        configs = (state_dict_config, optim_state_dict_config)
        FullyShardedDataParallel.set_state_dict_type(module, state_dict_type, *configs)
        try:
            yield
        finally:
            for wrapper, settings in zip(wrappers, before, strict=True):
                wrapper._settings = settings

    # Copying and moving

    def __deepcopy__(self, memo: dict[int, Any]) -> "FullyShardedDataParallel":
        """A copy with shards of its own, over the same groups; it has not run yet."""
        self._check_idle("deepcopy")
        wrappers = self.fsdp_modules(self)
        had_views = [wrapper._unit.step.shows_views for wrapper in wrappers]
        for wrapper in wrappers:
            wrapper._unit.look_over()
            wrapper._unit.step.put(False)
            for views in wrapper._unit.step.views():
                memo.update((id(view), torch.empty(0)) for view in views or ())  # the copy makes its own
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        try:
            for key, value in vars(self).items():
                left_out = key in ("_outer", "_comm_hook")
                vars(copied)[key] = None if left_out else copy.deepcopy(value, memo)
        finally:
            for wrapper, views_before in zip(wrappers, had_views, strict=True):
                wrapper._unit.step.put(views_before or not wrapper._use_orig_params)
        copied._comm_hook = self._comm_hook
        own = [memo.get(id(module), module) for module in closed(self._unit, self.modules())]
        close(copied._unit, own, copied._ignored_params)
        for inner in copied.fsdp_modules(copied)[1:]:
            if inner._outer is None:
                inner._outer = weakref.ref(copied)
        return copied

    def __copy__(self) -> "FullyShardedDataParallel":
        """It shares everything, as a shallow copy of a module does."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """This rank's shards and the modules, between two steps, without gradients; loaded by the same rank."""
        self._check_idle("pickling")
        for unit in units_of(self.modules()):
            unit.look_over()
        state = {**vars(self), "_outer": None, _CLOSED: closed(self._unit, self.modules())}
        return copyreg.__newobj__, (type(self),), pickled(state, units_of(self.modules()))  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        _watch_torch()
        leave_out_of_graphs()
        watch()
        watch_registrations()
        peers.enter()
        own = state.pop(_CLOSED)
        vars(self).update(state)
        self._unit.come_alive()
        close(self._unit, own, self._ignored_params)
        enroll_loaded(self._unit)
        for inner in self.fsdp_modules(self)[1:]:
            if inner._outer is None:
                inner._outer = weakref.ref(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FullyShardedDataParallel":
        self._check_idle_here("changing device or dtype")
        for wrapper in self.fsdp_modules(self):
            wrapper._check_stays(fn)
        unit = self._unit
        unit.look_over()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for segment in unit.segments:
            if self._use_orig_params:
                segment.flat.data = fn(segment.flat.data)
            segment.pin()
            if self._use_orig_params:
                segment.point_at_pieces()
        unit.step.invalidate()
        unit.step.make_views()
        return self

    def _check_stays(self, fn: Callable[[Tensor], Tensor]) -> None:
        for segment in self._unit.segments:
            probe = fn(segment.flat.new_empty(0))
            if probe.is_meta:
                raise ValueError(
                    f"{self._unit.name} would lose the values of {_first_name(self._unit)} on the meta device: make "
                    "the module there, and wrap it with param_init_fn=defer_init"
                )
            dtype = probe.dtype
            if self._placement.full_precision and dtype.itemsize < min(4, segment.flat.dtype.itemsize):
                raise ValueError(
                    f"{self._unit.name} keeps its parameters in full precision with {self._strategy.name}: {dtype} "
                    "would lose that. Use MixedPrecision(param_dtype=...)"
                )

    def _forget_interrupted(self) -> None:
        """After an exception in a backward the modules shall have their parameters again."""
        run = self._unit.step.run
        if run is not None and run.state == "INTERRUPTED":
            run.recover()

    def _check_idle_here(self, what: str) -> None:
        self._forget_interrupted()
        if self.training_state is not TrainingState.IDLE:
            raise StateError(f"{what}: expected {self._unit.name} to be IDLE, it is in {self.training_state.name}")

    # What there is

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> "list[FullyShardedDataParallel]":
        """The units in ``module``, itself included, depth first; ``root_only``: those that no other one holds."""
        found = [inner for inner in module.modules() if isinstance(inner, FullyShardedDataParallel)]
        return [inner for inner in found if inner._outermost() is inner] if root_only else found

    def shard_map(self) -> list[Piece]:
        """What every rank holds of every parameter of this unit and of those below it. No communication."""
        paths = {id(inner): clean_tensor_name(path + ".").rstrip(".") for path, inner in self.named_modules(prefix="")}
        return shard_map((paths[id(wrapper)], wrapper._unit) for wrapper in self.fsdp_modules(self))

    def memory_plan(self, optimizer_bytes: int = 8) -> MemoryPlan:
        """The bytes that this rank will hold, before training. No communication.

        ``optimizer_bytes``: of optimizer state for each element of the shard; 8 for Adam in fp32.
        """
        prefetches = self._backward_prefetch is not None or self._forward_prefetch
        return memory_plan((wrapper._unit for wrapper in self.fsdp_modules(self)), optimizer_bytes, prefetches)

    def check_is_root(self) -> bool:
        """Whether no other unit holds this one. Changes nothing."""
        return self._outermost() is self

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        module: Any = self._modules[FSDP_WRAPPED_MODULE]
        inner = getattr(module, "_checkpoint_wrapped_module", None)
        return module if inner is None else inner

    @property
    def training_state(self) -> TrainingState:
        """What this unit is doing."""
        unit = self._unit
        if unit.summoned is not None:
            return TrainingState.SUMMON_FULL_PARAMS
        if unit.step.run is not None and unit.step.run.state in ("FORWARD", "BACKWARD"):
            return TrainingState.FORWARD_BACKWARD
        return TrainingState.IDLE

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy it was made with."""
        return self._strategy

    @property
    def placement(self) -> Placement:
        """The groups over which this unit is spread."""
        return self._placement

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward gathers the next unit."""
        return self._backward_prefetch

    @property
    def process_group(self) -> Any:
        """The group that shares this unit, or that reduces its gradient."""
        group = self._placement.optim or self._placement.replicate
        return dist.group.WORLD if group is None else group

    @property
    def rank(self) -> int:
        """This rank in ``process_group``."""
        return dist.get_rank(self.process_group)

    @property
    def world_size(self) -> int:
        """The ranks in ``process_group``."""
        return dist.get_world_size(self.process_group)

    @property
    def compute_device(self) -> torch.device:
        """Where forward and backward of this unit run; if it has no parameters, those of the units below."""
        for unit in units_of(self.modules()):
            for segment in unit.segments:
                return segment.device
        return next((param.device for param in self.module.parameters()), torch.device("cpu"))

    # Names of torch 1.12

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient, those of units below too."""
        return [param for param in self.parameters() if param.grad is not None]

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are summed over the ranks."""
        return self._placement.factors[0]

    @property
    def gradient_postdivide_factor(self) -> float:
        """And after."""
        return self._placement.factors[1]

    @property
    def reshard_after_forward(self) -> bool:
        """Whether the unsharded parameters are freed between forward and backward."""
        return self._placement.reshard_after_forward

    @property
    def numel_padded_per_param(self) -> list[int]:
        """Of each flat parameter of this unit: how many elements at the end of this rank's shard are padding."""
        return [segment.layout.shard(segment.placement.rank).padding for segment in self._unit.segments]

    @property
    def device_id(self) -> torch.device | None:
        """The device that was asked for."""
        return self._device_id

    def _summon_full_params(
        self, recurse: bool = True, writeback: bool = True, rank0_only: bool = False, offload_to_cpu: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """``summon_full_params`` of this unit, and with ``recurse`` those below it."""
        return self.summon_full_params(self, recurse, writeback, rank0_only, offload_to_cpu)

    @property
    def params(self) -> list[nn.Parameter]:
        """The flat parameters of this unit."""
        return [segment.flat for segment in self._unit.segments]

    def __getattr__(self, name: str) -> Any:
        if name == "_unit":
            raise StateError(
                "this FullyShardedDataParallel was not wrapped to the end: its constructor has raised an error, or is "
                "still running"
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if FSDP_WRAPPED_MODULE not in modules:
                raise
            inner = modules[FSDP_WRAPPED_MODULE]
            try:
                return getattr(inner, name)
            except AttributeError:
                if not name.startswith("_") or hasattr(type(inner), name):
                    raise
            raise  # of the wrapper: who asks for a private attribute means that of a class

    def __getitem__(self, key: Any) -> Any:
        return self.module.__getitem__(key)  # type: ignore[operator]


def _refuse_backward(name: str, grad: Tensor) -> None:
    raise StateError(
        f"{name}: backward through a forward that was made inside summon_full_params(): parameters are whole there, so "
        "their gradients would be neither sharded nor reduced. Call it outside of summon_full_params(), or under "
        "torch.no_grad()"
    )


def _inputs_done(unit: "weakref.ref[Unit]", gradients: Any) -> None:
    alive = unit()
    if alive is not None:
        alive.step.inputs_done()


class WritebackError(ValueError, NotImplementedError):
    """What both of torch's versions raise for writeback with rank0_only."""


def _default_groups(process_group: Any, device_mesh: Any, placement: Any) -> list[dist.ProcessGroup]:
    """Over which the other ranks will compare what they build, before it is known what this one builds."""
    if not dist.is_initialized() or not (process_group is None and device_mesh is None and placement is None):
        return []
    world: Any = dist.group.WORLD
    return [world]


def _first_name(unit: Unit) -> str:
    """For messages: one of its parameters."""
    names = [original.fqn for segment in unit.segments for original in segment.originals]
    return f"parameter `{names[0]}`" if names else "no parameters"


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel)


def _warn_of_padding(unit: Unit) -> None:
    """Say when blocks that may not be cut make more than half of the wire, and a mebibyte, padding."""
    layouts = [segment.layout for segment in unit.segments]
    padded = sum(layout.shard_bytes * layout.world_size for layout in layouts)
    held = sum(sum(layout.numels) * layout.itemsize for layout in layouts)
    if unit.options.atomic is not None and padded - held > max(held, 2**20):
        shards = unit.options.placement.shards
        warnings.warn(
            f"{unit.name}: {1 - held / padded:.0%} of what is gathered and reduced is padding: with atomic= its {held} "
            f"bytes take {shards} shards of {padded // shards}. Make larger units, or smaller blocks",
            stacklevel=3,
        )


def _ignored(module: nn.Module, ignored_modules: Any, ignored_states: Any) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The modules, descendants included, and parameters that are not managed."""
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
        )
    states = list(ignored_states if ignored_states is not None else ignored_modules or ())
    if all(isinstance(state, nn.Parameter) for state in states):
        params = set(states)
        modules: set[nn.Module] = set()
    elif all(isinstance(state, nn.Module) for state in states):
        for state in states:
            if _is_unit(state):
                raise ValueError(f"`ignored_modules` should not include FSDP modules, got {type(state).__name__}")
            if state is module:
                warnings.warn("the module itself is ignored: this unit manages no parameter", stacklevel=3)
        modules = {inner for state in states for inner in state.modules() if not _is_unit(inner)}
        params = {param for inner in modules for param in inner._parameters.values() if param is not None}
    else:
        kinds = sorted({type(state).__name__ for state in states})
        raise ValueError(f"ignored_states expects all nn.Parameter or all nn.Module, got {', '.join(kinds)}")
    return modules, params


def _before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    assert isinstance(module, FullyShardedDataParallel)
    state_dicts.insert_prefix(state_dict, prefix)
    if module._unit.summoned is None:
        on_host = module._unit.options.device is not None  # as the shards are
        loading = Summoned(module._unit, writeback=True, offload_to_cpu=on_host, loads=True)
        loading.enter()
        module._loading = loading


def _after_load(module: nn.Module, incompatible: Any) -> None:
    assert isinstance(module, FullyShardedDataParallel)
    module._end_loading()
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [without_units(key) for key in keys]
