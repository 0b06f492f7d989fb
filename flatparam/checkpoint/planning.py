"""Plan a save on this rank: the boxes that it writes, and the values that it sends to the first rank for the index.

The plan follows from the layout. No collective call, and nothing is written. `saving.py` carries it out; until then the
tensors in the plan are views of the model's memory, so a save in the background copies them first.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..common.collectives import ranks_of
from ..common.layout import Box
from ..common.tensors import bytes_of, refuse_freed
from ..common.torch_private import TorchsFSDP
from ..fsdp.names import bare_names
from ..fsdp.unit.base import Wrapper, wrappers_in
from ..fsdp.unit.local_params import LocalParam, unit_paths, units_in
from ..layer_zero._sums import Sum
from .base import description, is_trained, sums_of_samples
from .errors import CheckpointError, check_model
from .files import NAMES, Part
from .gradients import taken
from .index import MODEL, OPTIMIZER, RANKS
from .modules import Given, extra_states, given_by
from .optimizers import GRADIENT, Named, states_of
from .pieces import InHandle, all_held, written
from .values import encode

OF_MODULES = "modules."  # before the names of modules' tensors in a rank's file: a module may be called `extra`, `kept`
# Kind of value that must be equal on all ranks -> (its name in messages, advice if it is not)
ALIKE = {
    "gradient": (
        "the gradient of",
        "and no unit manages it: add it up over the ranks, or save after the optimizer's step and zero_grad()",
    ),
    "value": ("the optimizer's", "and no unit manages that parameter: a number must be the same on all ranks"),
    "group": ("an option of the optimizer's group", "and a checkpoint has it once: give each rank's in `extra`"),
}


@dataclass
class Alone:
    """Values that may differ between ranks, as no unit manages them.

    ``tensors``: parameters and buffers; ``states``: their optimizer states; ``modules``: extra states and other entries
    of state dicts, encoded, with their tensors in ``of_modules``.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    modules: Any = None
    of_modules: dict[str, Tensor] = field(default_factory=dict)

    def digest(self) -> str:
        """Return a digest, equal on ranks with equal values."""
        return digest({**self.tensors, **self.states, **self.of_modules, None: self.modules})


@dataclass
class SavePlan:
    """The plan of one rank.

    ``parts``: file -> boxes to write. ``told``: values for the index, as JSON. ``held``: parameters and buffers here.
    ``alone``: values that no unit manages. A rank other than 0 writes its own only if they differ from rank 0's.
    ``given``: what the modules' own code for state dicts gives. ``shares``: replicas of a shard share the writing;
    False: each lists all of it.
    """

    parts: dict[str, list[Part]] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    held: list[LocalParam] = field(default_factory=list)
    alone: Alone = field(default_factory=Alone)
    given: Given | None = None
    shares: bool = True

    @property
    def bytes(self) -> int:
        return sum(part.tensor.nbytes for parts in self.parts.values() for part in parts)

    def add(self, folder: str, key: str, held: LocalParam, values: Tensor, rank: int) -> None:
        """Add the boxes of ``held`` that this rank writes. ``values``: 1-D, in the order of ``held.flat``."""
        begin, end = written(held, rank, self.shares)
        boxes = held.dense.boxes(begin, end)
        if not boxes and rank == 0 and 0 in held.shape:
            self._put(folder, 0, rank, Part.whole(key, values.new_empty(held.shape)))
        for i, box in enumerate(boxes):
            part = Part(key, held.shape, box.offsets, held.dense.view(values, held.start, box))
            self._put(folder, i, rank, part)

    def add_own(self, values: dict[str, Tensor], rank: int) -> None:
        """Add tensors to this rank's own file. ``values``: name -> tensor."""
        for key, value in values.items():
            self._put(RANKS, 0, rank, Part.whole(key, value))

    def keep_alone(self, rank: int, differs: bool) -> None:
        """Add the values of ``alone``. ``differs``: they differ from rank 0's, so this rank writes its own."""
        alone = self.alone
        if differs:
            for kind, tensors in (("own", alone.tensors), ("own_states", alone.states)):
                self.told[kind] = {name: f"{kind}.{name}" for name in tensors}
                self.add_own({f"{kind}.{name}": value for name, value in tensors.items()}, rank)
        if differs or rank == 0:
            self.told["modules"] = alone.modules
            self.add_own(alone.of_modules, rank)

    def _put(self, folder: str, box: int, rank: int, part: Part) -> None:
        refuse_freed(part.tensor, f"`{part.key}`")
        if part.tensor.dtype not in NAMES:
            raise CheckpointError(f"`{part.key}` is of {part.tensor.dtype}, which no safetensors file has")
        # torch's reader takes one box of a name from a file: a second box goes into another file
        name = f"rank-{rank:05}" if folder == RANKS else f"shard-{rank + 1:05}-model-{box + 1:05}"
        self.parts.setdefault(f"{folder}/{name}.safetensors", []).append(part)


def plan_save(
    module: nn.Module, optimizer: Any, extra: Any, rank: int, trainable_only: bool = False, shares: bool = True
) -> SavePlan:
    """Return the plan of ``rank``. Nothing is written; ``.grad`` and the model are as before.

    ``shares``: of ``SavePlan``.

    Raises: CheckpointError, StateError or ValueError naming the parameter or value that cannot be saved.
    """
    check_idle(module, "checkpoint.save")
    units = list(unit_paths(module))
    for unit in units:
        unit.check_not_mismatched("checkpoint.save")
    plan = SavePlan(held=all_held(module, trainable_only), shares=shares)
    named = None if optimizer is None else Named(optimizer, plan.held)
    for held in plan.held:
        if isinstance(held, InHandle) and held.handle._sum != Sum.NONE:
            raise CheckpointError(
                f"`{held.name}`: its handle has gradients of micro-batches that are not reduced: save after the step"
            )
        if not held.has_values:
            raise CheckpointError(f"parameter `{held.name}` has no values yet: load or initialize it first")
    given = plan.given = given_by(module, plan.held)
    names = {held: held.names if given is None else given.names[held] for held in plan.held}
    base = {one: names[one][0] for one in plan.held if trainable_only and not is_trained(one, named)}
    if trainable_only:
        _plan_base(plan, base, rank)
    for held in plan.held:
        for name in names[held] if held not in base else ():
            plan.add(MODEL, name, held, held.flat, rank)
    values: dict[str, Tensor] = {}
    plan.told["extra"] = encode(extra, "extra", values)
    plan.told["aliases"] = {name: first for first, *others in names.values() for name in others} if rank == 0 else {}
    plan.alone.modules = {
        name: encode(inner.get_extra_state(), name, plan.alone.of_modules, OF_MODULES)
        for name, inner in extra_states(module, "get_extra_state").items()
    }
    rest = (one for one in plan.held if not one.is_managed and one not in base)
    plan.alone.tensors = {names[one][0]: one.owner.detach() for one in rest if one.numel or given is not None}
    if given is not None:
        _plan_given(plan, given, base, rank)
    with taken(plan.held, units, "checkpoint.save", saves=optimizer is not None) as kept:
        if named is not None:
            _plan_optimizer(plan, named, values, rank)
            plan.told["kept"] = {name: [start, sums.numel(), owed] for name, (start, sums, owed) in kept.items()}
            values |= {f"kept.{name}": sums for name, (_, sums, _) in kept.items() if sums.numel()}
    plan.add_own(values, rank)
    return plan


def _plan_base(plan: SavePlan, base: dict[LocalParam, str], rank: int) -> None:
    """Describe the parameters in ``base``, which are left out. Raises: CheckpointError if none is left to save."""
    if not any(one not in base and not one.is_buffer for one in plan.held):
        raise CheckpointError("trainable_only=True saves parameters that require grad, and the model has none")
    plan.told["base"] = {name: description(one) for one, name in base.items()}
    plan.told["base_sums"] = sums_of_samples(base, rank)


def _plan_given(plan: SavePlan, given: Given, base: dict[LocalParam, str], rank: int) -> None:
    """Add the entries of the modules' own code: tensors to the model's files, other values to the index.

    Tensors that belong to a parameter in ``base``, as the scales of 4-bit weights do, are left out with it.
    """
    of_base = tuple(f"{name}." for one in base for name in given.names[one])
    given.tensors = {name: tensor for name, tensor in given.tensors.items() if not name.startswith(of_base)}
    plan.alone.tensors |= given.tensors
    for name, value in given.values.items():
        plan.alone.modules[name] = encode(value, name, plan.alone.of_modules, OF_MODULES)
    if rank == 0:
        for name, tensor in given.tensors.items():
            plan._put(MODEL, 0, rank, Part.whole(name, tensor))
        values: dict[str, Tensor] = {}
        plan.told["given"] = list(given.tensors)
        plan.told["metadata"] = {
            path: encode(told, f"_metadata.{path}", values) for path, told in given.metadata.items()
        }
        if values:
            raise CheckpointError(
                f"`{min(values)}`, of a state dict's metadata, is a tensor: write it into the state dict"
            )


def check_idle(module: nn.Module, what: str) -> None:
    """Raises: StateError naming a unit that is in the middle of a pass or summoned; CheckpointError if torch's
    FullyShardedDataParallel wraps a module; ModelTypeError if ``module`` is none."""
    check_model(module, what)
    for path, inner in module.named_modules():
        if isinstance(inner, Wrapper):
            inner._check_idle_here(what)
        if isinstance(inner, TorchsFSDP):
            raise CheckpointError(
                f"{what}: `{path or type(inner).__name__}` is wrapped by torch's FullyShardedDataParallel, whose "
                "shards flatparam does not know: use torch.distributed.checkpoint, or wrap with flatparam's"
            )


def _plan_optimizer(plan: SavePlan, named: Named, values: dict[str, Tensor], rank: int) -> None:
    """Add states, gradients and groups of the optimizers. ``values`` gets the tensors in encoded values."""
    states: dict[str, dict[str, Any]] = {}
    pieces: dict[str, dict[str, list[Any]]] = {}
    alike: dict[str, dict[str, str]] = {kind: {} for kind in ALIKE}
    keys: dict[str, list[str]] = {param.name: [] for group in named.groups for param in group.params if param.numel}
    for held, key, kind, value, of_piece in states_of(named):
        name = f"state.{held.name}.{key}"
        begin, end = written(held, rank, plan.shares)
        if kind == "box":
            plan.add(OPTIMIZER, name, held, value, rank)
        if of_piece:
            pieces.setdefault(held.name, {})[key] = _piece(named, held, key, value, name, values)
        keys.setdefault(held.name, []).append(key)
        if not held.is_managed:
            if kind == "box" and key != GRADIENT:
                whole = Box((0,) * len(held.shape), held.shape)
                plan.alone.states[name] = held.dense.view(value, 0, whole)
            else:
                kind_of, what = ("gradient", held.name) if key == GRADIENT else ("value", name)
                alike[kind_of][what] = _seen(value, name)
        if begin != 0 or end == 0:
            continue  # the rank of the first element writes the other values
        if kind == "value" or (of_piece and value.dim()):
            found = pieces[held.name][key][2] if of_piece else encode(value, name, values)
            states.setdefault(held.name, {})[key] = [found, rank]
        else:
            states.setdefault(held.name, {})[key] = kind
        if kind == "one" and not (of_piece and value.dim()):
            plan._put(OPTIMIZER, 0, rank, Part.whole(name, value.detach()))
    told: dict[str, Any] = {"states": states, "pieces": pieces, "keys": keys}
    for group in named.groups:
        settings_name = f"param_groups[{group.number}]"
        alike["group"][str(group.number)] = _seen(group.settings, settings_name)
        if rank == 0:
            settings = encode(group.settings, settings_name, values)
            told.setdefault("groups", []).append([settings, [held.name for held in group.params]])
            told.setdefault("optimizers", []).append(group.label)
            told["classes"] = named.classes
    plan.told["optimizer"], plan.told["alike"] = told, alike


def _piece(named: Named, held: LocalParam, key: str, value: Any, name: str, values: dict[str, Tensor]) -> list[Any]:
    """Return the form that rank 0 compares of a value, which may describe this rank's piece only.

    ``[layout of the piece, digest, encoded value, whether it has tensors, whether one has dimensions, whether the
    stepped tensor holds several parameters]``. Its tensors go into ``values`` once for a flat parameter: the encoded
    value is None for the other parameters in it.
    """
    inner: dict[str, Tensor] = {}
    one = named.stepped[id(held.owner)]
    found = encode(value, f"piece.{name}", inner)
    seen = _seen(value, name)
    has_tensors = bool(inner) and key != "step"
    if has_tensors and one.here[0] is not held:
        found = None
    elif has_tensors:
        values |= inner
    has_dims = any(tensor.dim() for tensor in inner.values())
    return [one.layout, seen, found, has_tensors, has_dims, len(one.params) > 1]


def _seen(value: Any, path: str) -> str:
    """Return a digest of the value at ``path`` and of the tensors in it."""
    inner: dict[str, Tensor] = {}
    plain = encode(value, path, inner)
    return digest({**inner, None: plain})[:16]


def digest(values: Mapping[Any, Any]) -> str:
    """Return a digest of names, values, and the bytes of tensors."""
    found = hashlib.sha256()
    for name, value in values.items():
        if not isinstance(value, Tensor):
            found.update(f"{name} {value!r} ".encode())
            continue
        found.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        found.update(bytes_of(value.resolve_conj().resolve_neg().cpu().contiguous()))
    return found.hexdigest()


def describe_units(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield how each unit is sharded, for the index. ``ranks``: global ranks in the order of their shards."""
    strategies = {id(w._unit): w.sharding_strategy.name for w in wrappers_in(module)}
    bare = bare_names(module)
    for path, unit in units_in(module):
        placement = unit.options.placement
        group = placement.optim
        ranks = None if group is None else ranks_of(group)
        yield {
            "name": bare(path),
            "strategy": strategies.get(id(unit)),
            "shards": placement.shards,
            "replicas": placement.replicas,
            "parameters_over": placement.param_shards,
            "nested": placement.outer is not None,
            "ranks": ranks and [ranks[placement.holder(shard)] for shard in range(placement.shards)],
            "shard_numels": [flat_param.layout.shard_numel for flat_param in unit.flat_params],
            "dtypes": [str(flat_param.flat.dtype).removeprefix("torch.") for flat_param in unit.flat_params],
            "world": dist.get_world_size() if dist.is_initialized() else 1,
        }
