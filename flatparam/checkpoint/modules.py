"""Run the modules' own code for state dicts during a save or a load, without gathering a parameter.

Modules may override or hook ``state_dict`` and ``load_state_dict``: they rename, add or drop entries. This runs that
code on stand-ins (`shown.py`), which have shapes and no values, and finds out which entry is which parameter. A model
without such code is not run. No collective calls: each rank runs it alone, and the checkpoint compares the results.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..fsdp.names import bare_names, clean_tensor_name, join, without_wrappers
from ..fsdp.states.loading import may_become
from ..fsdp.states.model import ungathered
from ..fsdp.states.safetensors_files import DTYPES
from ..fsdp.states.snapshot import Beside, loads_by_itself, overrides, saves_by_itself
from ..fsdp.states.values import same
from ..fsdp.unit.local_params import LocalParam
from .errors import CheckpointError
from .files import NAMES, Chunk
from .reading import OfRank, Source
from .shown import StandIns, shown
from .values import decode, encode

_NORMS = "torch.nn.modules.batchnorm"  # its override has nothing to add if the file has exactly the model's names
_EXTRA = "_extra_state"
_PLAIN = {"version": 1}  # torch's metadata for a module without its own


@dataclass
class Given:
    """A state dict by kinds. ``names``: the keys of each parameter and buffer; ``tensors``, ``values``: other entries.

    ``metadata``: path of a module -> its metadata, if it is not torch's default.
    """

    names: dict[LocalParam, list[str]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Taken:
    """The outcome of the modules' own load.

    ``names``: parameter or buffer -> names in the file to read it from. ``values``: whole tensors that a module's code
    computed. ``before``: the copy that undoes the load.
    """

    names: dict[LocalParam, list[str]]
    values: dict[LocalParam, Tensor]
    missing: list[str]
    unexpected: list[str]
    before: Beside


def given_by(module: nn.Module, held: list[LocalParam]) -> Given | None:
    """Return the state dict of ``module`` by kinds; None: it has ``held`` and nothing else. No collective call.

    Raises: CheckpointError naming the entry, if a hook gives another value for a parameter, or a tensor that no file
    can hold; and any exception of a module.
    """
    if not any(saves_by_itself(inner) or loads_by_itself(inner, _NORMS) for inner in module.modules()):
        return None
    stand_ins = StandIns()
    cut = [one for one in held if one.is_managed]
    with ungathered(), shown(module, cut, stand_ins), stand_ins:
        state = module.state_dict(keep_vars=True)
    found, bare = Given(), bare_names(module)
    by_name = {name: one for one in held for name in one.names}
    by_place = {_place(one.owner): one for one in held if not one.is_managed}
    for key, value in state.items():
        name = bare(key)
        one = (stand_ins.held_of(value) or by_place.get(_place(value))) if isinstance(value, Tensor) else None
        other = by_name.get(name)
        if one is None and other is not None and other not in cut and same(value, other.owner):
            one = other
        if one is not None:
            found.names.setdefault(one, []).append(name)
        elif other is not None:
            raise CheckpointError(
                f"`{name}`: the model's state_dict() has another value than the parameter or buffer of this name, by a "
                "hook or an override. A checkpoint saves the value that the model trains: return the other value under "
                "another name"
            )
        elif isinstance(value, Tensor):
            found.tensors[name] = _tensor(name, value)
        elif name.rpartition(".")[2] != _EXTRA:
            found.values[name] = value
    for one in held:  # parameters that the state dict leaves out are saved too
        names = found.names.setdefault(one, one.names)
        for name in names if names is one.names else ():
            if any(name in others for other, others in found.names.items() if other is not one):
                raise CheckpointError(f"`{name}`: the model's state_dict() has another parameter under this name")
    metadata = getattr(state, "_metadata", {})
    found.metadata = {bare(path): told for path, told in metadata.items()}
    found.metadata = {path: told for path, told in found.metadata.items() if told != _PLAIN}
    return found


def as_they_are(module: nn.Module, held: list[LocalParam], values: Mapping[str, Any], strict: bool) -> set[str]:
    """Return the names in ``values`` under which the state dict of ``module`` has an equal value now.

    ``values``: the file's tensors and others that modules wrote when it was saved, and that no module loads. No
    collective call. Raises: CheckpointError naming one that the state dict has otherwise, if ``strict``: the parameters
    beside it would be loaded without it.
    """
    now = given_by(module, held) if values else None
    here = {} if now is None else {**now.tensors, **now.values}
    found = set()
    for name in [name for name in values if name in here]:
        tensors: dict[str, Tensor] = {}
        if same(values[name], decode(encode(here[name], name, tensors), tensors)):
            found.add(name)
        elif strict:
            raise CheckpointError(
                f"`{name}`, which a module writes into its state dict, is another in the checkpoint, and the module "
                "has no code that loads it: build the model as it was built when it was saved"
            )
    return found


def _place(tensor: Tensor) -> Any:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr() or id(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _tensor(name: str, value: Tensor) -> Tensor:
    """Return ``value``, detached. Raises: CheckpointError if no file can hold it."""
    kind = type(value).__name__
    if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and value.dtype in NAMES:
        if not value.is_meta:
            return value.detach()
        kind = "tensor without values, on the meta device"
    else:
        kind = f"{kind} of {value.dtype}"
    raise CheckpointError(
        f"`{name}`, which a module writes into its state dict, is a {kind}, which cannot be saved: give it dense and "
        "in a dtype of safetensors, or in `extra`"
    )


def take(module: nn.Module, held: list[LocalParam], source: Source) -> Taken | None:
    """Let ``module`` load a state dict of ``source`` with stand-ins for parameters. None: no module has such code.

    Buffers get their values. The caller reads the parameters, by ``Taken.names``. No collective call.
    Raises: any exception of a module; CheckpointError if a module computes with a parameter or keeps a stand-in. All
    attributes are restored then.
    """
    names = {name for one in held for name in one.names}
    own, fits = source.alone, names == {*source.model, *source.about.get("base", {})}
    if not any(loads_by_itself(inner, _NORMS if fits else "") for inner in module.modules()):
        return None
    of_modules = source.about.get("given", [])
    boxes = {name: chunks for name, chunks in source.model.items() if not own or name not in of_modules}
    boxes |= {name: chunks for name, chunks in own.items() if name in source.model or name not in names}

    def read(name: str) -> Tensor:
        if name not in boxes:
            raise CheckpointError(f"`{name}` is of the base, and not in the checkpoint: a module computes with it")
        return source.whole(name, boxes[name])

    stand_ins = StandIns(read)
    state = _state_of(module, held, source, boxes, stand_ins)
    before = Beside(module)
    try:
        with ungathered(), shown(module, [one for one in held if not one.is_buffer], stand_ins), stand_ins:
            result = module.load_state_dict(state, strict=False)
        state.clear()
        _put_values(module, stand_ins)
    except BaseException as error:
        before.restore()
        if type(error) is RuntimeError:  # torch's: several lines, with the names of wrappers
            raise CheckpointError(" ".join(clean_tensor_name(str(error)).split())) from error
        raise
    return _taken(held, stand_ins, result, before, source, bare_names(module))


def _state_of(
    module: nn.Module, held: list[LocalParam], source: Source, boxes: Mapping[str, list[Chunk]], stand_ins: StandIns
) -> Any:
    """Return the state dict that ``module`` loads: values for buffers and modules' entries, stand-ins for the rest."""
    about, of_modules = source.about, source.about.get("given", [])
    buffers = {name: one for one in held if one.is_buffer for name in one.names}
    state: Any = OrderedDict(source.values)
    for name, chunks in boxes.items():
        if name in buffers or name in of_modules:
            if name in buffers and buffers[name].shape == chunks[0].shape:
                check_kind(name, chunks[0], buffers[name].owner.dtype)
            state[name] = source.whole(name, chunks)
        else:
            state[name] = stand_ins.of_file(name, chunks[0].shape, chunks[0].torch_dtype(name))
    for name, (dtype, shape, _) in about.get("base", {}).items():
        if dtype in DTYPES:
            state[name] = stand_ins.of_file(name, tuple(shape), DTYPES[dtype])
    for one in held:
        if one.is_buffer:
            stand_ins.watch(one)
    bare = bare_names(module)
    paths = {path: bare(path) for path, _ in module.named_modules()}  # of each module -> in the unwrapped model
    state = _under_paths(state, paths)
    if "metadata" in about:
        of_first = OfRank(source, 0)
        told = {path: decode(about["metadata"].get(clean, dict(_PLAIN)), of_first) for path, clean in paths.items()}
        state._metadata = OrderedDict(told)
    return state


def _under_paths(state: Mapping[str, Any], paths: Mapping[str, str]) -> Any:
    """Return ``state`` with the keys that torch's ``load_state_dict`` expects of the modules here.

    Units and checkpoint wrappers are left out of the keys: their hooks put them in.
    """
    known = {clean: without_wrappers(path) for path, clean in paths.items()}
    found: Any = OrderedDict()
    for name, value in state.items():
        path, _, rest = name.rpartition(".")
        while path and path not in known:
            path, _, last = path.rpartition(".")
            rest = f"{last}.{rest}"
        found[join(known[path], rest)] = value
    return found


def _taken(
    held: list[LocalParam], stand_ins: StandIns, result: Any, before: Beside, source: Source, bare: Callable[[str], str]
) -> Taken:
    found = Taken({}, {}, [], [], before)
    for one, sources in stand_ins.copied.items():
        for value in sources:
            name = stand_ins.name_of(value)
            if name is None:
                found.values[one] = value
            else:
                found.names.setdefault(one, []).append(name)
    by_name = {name: one for one in held for name in one.names}
    missing = [bare(name) for name in getattr(result, "missing_keys", [])]
    buffers = {one for one in held if one.is_buffer and not set(one.names) <= set(missing)}  # modules have loaded them
    loaded = {*found.names, *found.values, *(buffers - stand_ins.copied.keys())}
    for one in held:  # its module did not load it: read the saved value as it is
        here = next((name for name in one.names if name in source.model and name not in missing), None)
        if one not in loaded and here is not None:
            found.names[one] = [here]
            loaded.add(one)
    found.missing = [one.name for one in held if one not in loaded]
    found.missing += [name for name in missing if name not in by_name and name.rpartition(".")[2] != _EXTRA]
    found.unexpected = [bare(name) for name in getattr(result, "unexpected_keys", [])]
    return found


def check_kind(name: str, chunk: Chunk, dtype: torch.dtype) -> None:
    """Raises: CheckpointError unless ``chunk`` may be loaded into ``dtype``."""
    if not may_become(DTYPES.get(chunk.dtype), dtype):
        raise CheckpointError(f"{chunk.file}: `{name}` has dtype {chunk.dtype}, which cannot be loaded into {dtype}")


def _put_values(module: nn.Module, stand_ins: StandIns) -> None:
    """Replace stand-ins of the file's tensors that modules have kept, in attributes and buffers, with their values.

    Raises: CheckpointError naming a tensor whose stand-in somebody else still refers to.
    """
    for inner in module.modules():
        for mapping in (vars(inner), inner._buffers):
            kept = {key: stand_ins.values(value) for key, value in mapping.items() if stand_ins.name_of(value)}
            mapping.update(kept)
    for name in stand_ins.still_used():
        raise CheckpointError(f"`{name}`: a module keeps this tensor of the file where its values cannot be put")


def extra_states(module: nn.Module, method: str) -> dict[str, Any]:
    """Map the key of an extra state to its module, for modules that override ``method`` (``set_extra_state``, ...)."""
    bare = bare_names(module)
    named = ((path, inner) for path, inner in module.named_modules() if overrides(inner, method))
    return {bare(join(path, _EXTRA)): inner for path, inner in named}


def values_of_modules(
    module: nn.Module, told: Mapping[str, Any], values: Mapping[str, Tensor], strict: bool
) -> list[tuple[Any, Any]]:
    """Return ``(module, argument)`` for each call of ``set_extra_state``.

    ``told``: name -> encoded value. Raises: CheckpointError, if ``strict``, for a value without a module, and for a
    module without a value.
    """
    by_name = extra_states(module, "set_extra_state")
    missing = [name for name, inner in by_name.items() if name not in told and overrides(inner, "get_extra_state")]
    unknown = [name for name in told if name not in by_name]
    if strict and missing:
        raise CheckpointError(f"missing in the checkpoint: `{missing[0]}`")
    if strict and unknown:
        raise CheckpointError(f"the model has no module for `{unknown[0]}`")
    return [(by_name[name], decode(value, values)) for name, value in told.items() if name in by_name]
