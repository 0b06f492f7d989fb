"""A sharded model that torch.compile traces as one graph: the graph has the collectives and the computation.

A unit's flat parameter is gathered by a functional collective in the unit's forward and cut into views; autograd
reduces its gradient. In a compiled model the gathered data are freed after the forward and gathered again in backward,
as with FULL_SHARD, and the compiler may order communication and computation. Without the compiler they stay until the
backward: then the runtime (``FullyShardedDataParallel``) needs less memory and time.

Source: SimpleFSDP (arXiv 2411.00284), which gathers each parameter by itself.
"""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from . import _C
from .common.layout import FlatLayout
from .common.torch_private import _pytree
from .fsdp.interop.patches import refuse_wrapped
from .fsdp.names import join
from .fsdp.sharding.placement import averaging_factors, world
from .fsdp.sharding.pytrees import find_tensors
from .fsdp.states.snapshot import Before, loads_by_itself, overrides
from .fsdp.unit.base import Wrapper
from .fsdp.wrapper.arguments import check_dtype
from .fsdp.wrapper.wrap import check_not_tied, replace_modules, targets_of

__all__ = ["TracedUnit", "full_state_dict", "load_full_state_dict", "shard"]

_ALIGNED_BYTES = 16  # to which each parameter starts at a multiple
_NORMS = "torch.nn.modules.batchnorm"  # its override has nothing to add if the state dict has the model's names


def shard(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    auto_wrap_policy: Any = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> "TracedUnit":
    """Shard ``module`` over a group, to be compiled: ``torch.compile(shard(module, ...), fullgraph=True)``.

    Args: ``auto_wrap_policy``: which modules are units beside the whole, as of FullyShardedDataParallel;
    ``param_dtype``: of forward, backward and all-gathers (None: the parameters' own); ``reduce_dtype``: of the
    reduce-scatters (None: ``param_dtype``). Every rank has the same module, with the same values.
    ``parameters()`` are 1-D, one a unit, DTensors sharded over the group: torch's optimizers, ``clip_grad_norm_`` and
    distributed checkpoints take them as they are. Gradients are averaged over the ranks.
    Raises: ValueError naming the parameter, before anything is changed, unless all of a unit are real floating-point
    ones on one device, of one dtype, and all or none require grad; for a parameter that two units share or that a
    module keeps in another attribute too (a list), and for a module that holds units already. TypeError for a dtype
    that is none of floating point.
    """
    check_dtype("param_dtype", param_dtype)
    check_dtype("reduce_dtype", reduce_dtype)
    refuse_wrapped(module, ())
    for path, each in module.named_modules():
        if isinstance(each, Wrapper | TracedUnit):
            where = f"`{path}` in it" if path else "it"
            raise ValueError(f"expected a module without units, {where} is a {type(each).__name__}: shard it as it was")
    group = world() if process_group is None else process_group
    targets = {} if auto_wrap_policy is None else targets_of(module, auto_wrap_policy, set(), set(), {})
    check_not_tied(module, targets, set(), set())
    paths: dict[nn.Module, list[str]] = {each: [] for each in module.modules()}
    for name, each in module.named_modules(remove_duplicate=False):
        paths[each].append(name)
    own = {each: _own_modules(each, targets) for each in (*targets, module)}
    places = {each: _places(modules) for each, modules in own.items()}
    for each in own:
        _check(paths[each][0], places[each])
    _check_kept(module)

    def wrap(each: nn.Module, ignored: Any = None) -> TracedUnit:
        return TracedUnit(each, paths[each], own[each], group, param_dtype, reduce_dtype)

    replace_modules(module, targets, wrap)
    return wrap(module)


_Places = Mapping[str, tuple[nn.Module, str, nn.Parameter]]  # by its name in the unit: where a parameter is, and it


def _places(modules: Mapping[str, nn.Module]) -> _Places:
    return {
        join(path, name): (module, name, param)
        for path, module in modules.items()
        for name, param in module._parameters.items()
        if param is not None
    }


class TracedUnit(nn.Module):
    """One unit: ``module``, whose parameters are views of ``flat_param``, gathered, in its forward; see ``shard()``."""

    def __init__(
        self,
        module: nn.Module,
        paths: list[str],
        own_modules: Mapping[str, nn.Module],
        group: dist.ProcessGroup,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        places = _places(own_modules)
        params = list(dict.fromkeys(param for *_, param in places.values()))
        index = {param: i for i, param in enumerate(params)}  # a shared one has several names
        self._names = [(name, index[param]) for name, (*_, param) in places.items()]
        named = {(owner, name): key for key, (owner, name, _) in places.items()}  # one, if in several places
        self._set = [(key, index[places[key][2]]) for key in named.values()]
        self._paths, self._shapes, self._ranks = paths, [param.shape for param in params], group.size()
        self.module, self._own_modules = module, dict(own_modules)
        self.flat_param: Any = None  # a DTensor
        if params:
            first = params[0]
            size = first.element_size()
            aligned = max(1, _ALIGNED_BYTES // size)
            self._layout = FlatLayout.of_shapes(self._shapes, self._ranks, itemsize=size, alignment=aligned)
            self._cuts = list(zip(self._layout.offsets, self._layout.numels, self._shapes, strict=True))
            self._rank = group.rank()
            own = self._part_of([param.detach() for param in params])
            mesh = DeviceMesh.from_group(group, first.device.type)
            sharded = DTensor.from_local(own, mesh, (Shard(0),), run_check=False)
            self.flat_param = nn.Parameter(sharded, requires_grad=first.requires_grad)
            self._param_dtype, self._reduce_dtype = param_dtype, reduce_dtype
            self._group = group.group_name, self._ranks
            self._factors = averaging_factors(self._ranks)
        self._removed = [(owner, name, index[places[key][2]]) for (owner, name), key in named.items()]
        self._recurrent = [each for each in self._own_modules.values() if isinstance(each, nn.RNNBase)]
        self._take_out()
        for param in params:  # whoever has one still would compute with values that are not trained
            param.data = param.data.new_empty(0)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # while this is made, or copied
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module.__getitem__(key)  # type: ignore[operator]

    def __repr__(self) -> str:
        self._put_in([torch.empty(shape, device="meta") for shape in self._shapes])  # modules look at them there
        try:
            return super().__repr__()
        finally:
            self._take_out()

    def _put_in(self, values: list[Tensor]) -> list[nn.Parameter]:
        trained = self.flat_param is not None and self.flat_param.requires_grad
        params = [nn.Parameter(value, requires_grad=trained) for value in values]
        for owner, name, i in self._removed:
            owner._parameters[name] = params[i]
        return params

    def _take_out(self) -> None:
        for owner, name, _ in self._removed:
            owner._parameters.pop(name, None)
        self._empty_recurrent()

    def _empty_recurrent(self) -> None:
        """Take the weights out of the lists that recurrent layers keep beside their attributes."""
        for each in self._recurrent:
            each._flat_weights[:] = [None] * len(each._flat_weights)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's."""
        if self.flat_param is None:
            return self.module(*args, **kwargs)
        low = self._param_dtype or self.flat_param.dtype
        if low != self.flat_param.dtype:  # as the runtime casts a unit's inputs
            args, kwargs = _pytree.tree_map_only(
                Tensor, lambda value: value.to(low) if value.is_floating_point() else value, (args, kwargs)
            )
        own = self.flat_param.to_local()
        if torch.is_grad_enabled() and own.requires_grad:
            whole = checkpoint(self._gathered, own, low, use_reentrant=False, context_fn=_gathered_again)
        else:  # nothing is kept for a backward; torch.compile cannot trace a Function there
            whole = _gather(own, low, *self._group)
        return self._computed(whole, args, kwargs)

    def _gathered(self, own: Tensor, low: torch.dtype) -> Tensor:
        how = low, self._reduce_dtype or low, *self._group, *self._factors
        whole: Tensor = _Gather.apply(own, *how)  # type: ignore[no-untyped-call]
        return whole

    def _computed(self, whole: Tensor, args: Any, kwargs: Any) -> Any:
        """The module's forward. Where torch.compile breaks the graph in it, it ends the first one at this call.

        That graph has a DTensor as its input, so no two outputs may share memory, as views do.
        """
        cut = self._cut(whole)
        views = {name: cut[i] for name, i in self._set}
        if not self._recurrent:
            return functional_call(self.module, views, args, kwargs)
        try:
            return functional_call(self.module, views, args, kwargs)
        finally:
            self._empty_recurrent()

    def _cut(self, whole: Tensor) -> list[Tensor]:
        return [whole[start : start + numel].view(shape) for start, numel, shape in self._cuts]

    def _whole(self) -> list[Tensor]:
        """Every parameter, in its own precision. A collective call."""
        return [] if self.flat_param is None else self._cut(self.flat_param.detach().full_tensor())

    def _part_of(self, params: list[Tensor]) -> Tensor:
        """This rank's shard of the flat parameter that whole ``params`` make."""
        shard = self._layout.shard_range(self._rank)
        return self._layout.flatten([param.contiguous() for param in params], 0.0, *shard)

    def _loaded(self, state: Mapping[str, Tensor]) -> Tensor | None:
        """This rank's shard of the parameters in ``state``; where that is empty, of those in their modules now."""
        if self.flat_param is None:
            return None
        by_index = {i: state[fqn] for fqn, i in self._fqns() if state}
        by_index = by_index or {i: getattr(owner, name) for owner, name, i in self._removed}
        own = self.flat_param.to_local()
        return self._part_of([by_index[i].detach().to(own) for i in range(len(by_index))])

    def _fqns(self) -> list[tuple[str, int]]:
        return [(join(path, name), i) for path in self._paths for name, i in self._names]


def _gather(own: Tensor, low: torch.dtype, name: str, ranks: int) -> Tensor:
    """Every rank's ``[n]``, in ``low``, as ``[ranks * n]``."""
    collectives: Any = torch.ops._c10d_functional
    whole: Tensor = collectives.wait_tensor(collectives.all_gather_into_tensor(own.to(low), ranks, name))
    return whole


class _Gather(torch.autograd.Function):
    """``_gather``; backward: the average, reduced in ``reduce_dtype``."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, low: torch.dtype, reduce_dtype: torch.dtype, name: str, ranks: int, *factors: float
    ) -> Tensor:
        ctx.how = own.dtype, reduce_dtype, name, ranks, factors
        return _gather(own, low, name, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dtype, reduce_dtype, name, ranks, (before, after) = ctx.how
        collectives = torch.ops._c10d_functional
        reduced = collectives.reduce_scatter_tensor(grad.to(reduce_dtype) / before, "sum", ranks, name)
        return (collectives.wait_tensor(reduced) / after).to(dtype), *[None] * 6


def _always(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


_gathered_again = functools.partial(create_selective_checkpoint_contexts, _always)


@torch.no_grad()
def full_state_dict(model: "TracedUnit") -> "OrderedDict[str, Any]":
    """The state dict that the module had before ``shard()``, hooks, overrides and extra states included.

    All ranks call it. Names are those of the unwrapped module; tensors are clones, parameters in their dtypes.
    ``model``: from ``shard()``.
    """
    with _as_it_was(model, _units(model)) as params:
        new = {id(param) for own in params for param in own}  # each is given out once, and else cloned

        def cloned(value: Tensor) -> Tensor:
            is_new = id(value) in new
            new.discard(id(value))
            return value.detach() if is_new else value.detach().clone()

        state = model.module.state_dict(keep_vars=True)
        found: Any = OrderedDict((name, _pytree.tree_map_only(Tensor, cloned, value)) for name, value in state.items())
        if hasattr(state, "_metadata"):
            found._metadata = state._metadata
    return found  # type: ignore[no-any-return]


@torch.no_grad()
def load_full_state_dict(model: "TracedUnit", state: Mapping[str, Any]) -> None:
    """Load a state dict of ``full_state_dict``, or of the plain module: each rank loads its part.

    Nothing is communicated, unless a module has a hook or an override for loading, or an extra state: it gets whole
    parameters, so all ranks call this then.
    Raises: KeyError naming missing and unexpected names, ValueError naming a parameter of another shape, and any
    exception of ``load_state_dict`` of the module; then nothing is loaded.
    """
    units = _units(model)
    by_modules = any(loads_by_itself(each, _NORMS) or overrides(each, "set_extra_state") for each in model.modules())
    own = {} if by_modules else {fqn: unit._shapes[i] for unit in units for fqn, i in unit._fqns()}
    for fqn, shape in own.items():
        if fqn in state and state[fqn].shape != shape:
            raise ValueError(f"expected `{fqn}` to have shape {tuple(shape)}, got {tuple(state[fqn].shape)}")
    others: Any = state if by_modules else {name: value for name, value in state.items() if name not in own}
    with _as_it_was(model, units if by_modules else []):
        before = Before(model.module, [], parameters=False)
        try:
            told = model.module.load_state_dict(others, strict=False)
            missing = sorted({*(own.keys() - state.keys()), *getattr(told, "missing_keys", ())})
            more = sorted(getattr(told, "unexpected_keys", ()))
            if missing or more:
                raise KeyError(f"missing from the state dict: {missing}; in no unit: {more}")
            parts = [unit._loaded({} if by_modules else state) for unit in units]
        except BaseException:
            before.restore()
            raise
    for unit, part in zip(units, parts, strict=True):
        if part is not None:
            unit.flat_param.to_local().copy_(part)


@contextlib.contextmanager
def _as_it_was(model: "TracedUnit", filled: Iterable["TracedUnit"]) -> Iterator[list[list[nn.Parameter]]]:
    """Put modules in the places of units, so that ``model.module`` is as before ``shard()``, without parameters.

    ``filled``: the units whose parameters are there, whole; a collective call. Gives their new parameters.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, TracedUnit)
    ]
    whole = [[param.clone() for param in unit._whole()] for unit in filled]
    try:
        for parent, name, unit in places:
            parent._modules[name] = unit.module
        yield [unit._put_in(values) for unit, values in zip(filled, whole, strict=True)]
    finally:
        for parent, name, unit in places:
            parent._modules[name] = unit
        for unit in filled:
            unit._take_out()


def _units(model: nn.Module) -> list[TracedUnit]:
    if not isinstance(model, TracedUnit):
        raise TypeError(f"expected the model that shard() returned, before torch.compile, got a {type(model).__name__}")
    return [module for module in model.modules() if isinstance(module, TracedUnit)]


def _own_modules(unit: nn.Module, others: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """The modules of one unit by their names in it: without those of units in it."""
    below = set(unit.modules()) - {unit}
    inside = {module for other in others if other in below for module in other.modules()}
    return {name: module for name, module in unit.named_modules(remove_duplicate=False) if module not in inside}


def _check(path: str, places: _Places) -> None:
    params = {join(path, name): param for name, (*_, param) in places.items()}
    first_fqn, first = next(iter(params.items()), ("", None))
    for fqn, param in params.items():
        if not param.is_floating_point() or param.is_meta or not _C.is_plain_tensor(param.detach()):
            what = f"of {param.dtype}" if not param.is_floating_point() else f"that is a {type(param.data).__name__}"
            what = "on the meta device, without values" if param.is_meta else what
            raise ValueError(f"expected `{fqn}` to be a real floating-point parameter with values, got one {what}")
        for kind in ("dtype", "device", "requires_grad"):
            if getattr(param, kind) != getattr(first, kind):
                raise ValueError(
                    f"expected all parameters of a unit to have one {kind}: `{first_fqn}` has {getattr(first, kind)}, "
                    f"`{fqn}` {getattr(param, kind)}. Put one of them into another unit by auto_wrap_policy"
                )
    if params and not any(param.numel() for param in params.values()):
        raise ValueError(f"expected a parameter of a unit to have elements: all are empty, `{first_fqn}` is one")


def _check_kept(module: nn.Module) -> None:
    """Refuse a parameter that is in another attribute of a module: no view of the unit's forward would stand there."""
    params = {id(param): fqn for fqn, param in module.named_parameters()}
    for path, each in module.named_modules():
        known = ["_parameters", *(["_flat_weights"] if isinstance(each, nn.RNNBase) else [])]  # a unit empties both
        for name, value in vars(each).items():
            for tensor in () if name in known else find_tensors(value):
                if id(tensor) in params:
                    raise ValueError(
                        f"`{join(path, name)}` keeps the parameter `{params[id(tensor)]}`: it would compute with the "
                        "values of now. Let the module read the parameter from the attribute that registers it"
                    )
