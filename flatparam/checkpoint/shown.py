"""Stand-ins: meta tensors of a parameter's whole shape, which modules see while their own code saves or loads.

They avoid a gather. Code that names, moves or copies a parameter works on them; code that computes with one raises.
`modules.py` calls this. Everything is undone at the end of the blocks, also after an exception.
"""

import collections
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..common.torch_private import _pytree
from ..fsdp.sharding.pytrees import find_tensors
from ..fsdp.unit.local_params import LocalParam, UnitParam
from .errors import CheckpointError

# Methods that return the stand-in itself: a state dict sees the same value
_SAME = {"detach", "detach_", "clone", "cpu", "contiguous", "requires_grad_"}
# Methods and attributes that need no values
_ASKED = {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex", "element_size"}
_ASKED |= {"__len__", "is_contiguous", "storage_offset", "__repr__"}
_MOVED = {"to", "cpu", "contiguous"}
_FIELDS = {"shape", "dtype", "layout", "ndim", "requires_grad", "is_sparse", "is_quantized", "is_leaf", "is_nested"}
_FIELDS |= {"itemsize", "nbytes", "grad_fn", "grad", "_version"}
_OF_DEVICE = {"device", "is_meta", "is_cuda", "is_cpu"}


class StandIns(TorchFunctionMode):
    """The stand-ins of one save or load, and the mode that intercepts torch functions on them while it is active.

    There are two kinds: of the model's parameters, and of the file's tensors in the state dict. ``read``: returns the
    values of a tensor of the file, for code that computes with it. ``copied``: parameter or buffer -> the tensors that
    were copied into it: stand-ins of the file, or values.
    """

    def __init__(self, read: Callable[[str], Tensor] | None = None):
        super().__init__()
        self.read = read
        self.copied: dict[LocalParam, list[Tensor]] = {}
        self._of_model: dict[int, tuple[Tensor, LocalParam]] = {}
        self._in_file: dict[int, tuple[Tensor, str]] = {}
        self._storages: dict[int, str] = {}  # address of such a stand-in's storage -> name
        self._whole: dict[int, tuple[Tensor, LocalParam]] = {}

    def held_of(self, value: Any) -> LocalParam | None:
        """Return the parameter whose stand-in ``value`` is; None: it is no such stand-in."""
        return self._of_model.get(id(value), (None, None))[1]

    def name_of(self, value: Any) -> str | None:
        """Return the name of the file's tensor whose stand-in ``value`` is; None: it is no such stand-in.

        A Parameter that was made of a stand-in is one too: it has the stand-in's storage.
        """
        if id(value) in self._in_file:
            return self._in_file[id(value)][1]
        return self._storages.get(value.untyped_storage()._cdata) if _is_made(value) else None

    def of_held(self, held: LocalParam) -> nn.Parameter:
        """Make a stand-in of a parameter, with the attributes of the parameter object."""
        param = held.original.param if isinstance(held, UnitParam) else held.owner
        empty = torch.empty_strided(held.shape, held.stride, dtype=held.owner.dtype, device="meta")
        made = nn.Parameter(empty, requires_grad=held.owner.requires_grad)
        if isinstance(held, UnitParam) and held.original.kept is not None:
            made.__dict__ = held.original.kept.attributes  # those of its class, such as the scales of 4-bit weights
        else:
            made.__dict__.update(vars(param))
        self._of_model[id(made)] = made, held
        return made

    def of_file(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make a stand-in of a tensor of the file."""
        made = torch.empty(shape, dtype=dtype, device="meta")
        self._in_file[id(made)] = made, name
        self._storages[made.untyped_storage()._cdata] = name
        return made

    def watch(self, held: LocalParam) -> None:
        """Record copies from a stand-in into ``held``, for which modules have the tensor itself."""
        self._whole[id(held.owner)] = held.owner, held

    def values(self, value: Any) -> Any:
        """Return ``value``, or the file's values if it is a stand-in of the file."""
        name = self.name_of(value)
        if name is None:
            return value
        assert self.read is not None
        return self.read(name)

    def still_used(self) -> list[str]:
        """Return names of the file's tensors to whose stand-ins others than this object refer."""
        counts = collections.Counter(id(source) for sources in self.copied.values() for source in sources)
        mine = 3  # references: the dict, the loop variable, the argument
        return [name for made, name in self._in_file.values() if sys.getrefcount(made) > mine + counts[id(made)]]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first, second, name = *(*args, None, None)[:2], getattr(func, "__name__", "")
        field = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else None
        if field in _FIELDS or name in _ASKED:
            return func(*args, **kwargs)
        if name in ("__eq__", "__ne__") and second is None:  # `None in [weight]`: no value is looked at
            return NotImplemented
        held = self.held_of(first)
        if name == "copy_" and (held is not None or (id(first) in self._whole and self.name_of(second) is not None)):
            self.note(held or self._whole[id(first)][1], second)
            return first
        if held is not None:
            if name in _SAME or field == "data" or (name == "to" and not _converts(args, kwargs)):
                return first
            if field in _OF_DEVICE:
                return False if field == "is_meta" else getattr(held.owner, field)
        elif _is_made(first) and self.name_of(first) is not None:
            sets = name == "__set__" and self.name_of(second) == self.name_of(first)
            if sets or field == "data" or (name in _MOVED and not _converts(args, kwargs)):
                return None if sets else first
        elif field in _OF_DEVICE and self.name_of(first) is not None:
            return getattr(torch.empty(0, device="cpu"), field)
        for value in find_tensors((args, kwargs)):
            other = self.held_of(value)
            if other is not None:
                raise CheckpointError(
                    f"a module's own code computes with `{other.name}` ({field or name}) while it saves or loads a "
                    "state dict, where no rank has all of its values: keep the result in a buffer, or in `extra`"
                )
        args, kwargs = _pytree.tree_map(self.values, (args, kwargs))
        return func(*args, **kwargs)

    def note(self, held: LocalParam, source: Any) -> None:
        """Record that ``source`` is copied into ``held``. Raises: CheckpointError if it is no value of the file."""
        if not isinstance(source, Tensor) or self.held_of(source) is not None:
            raise CheckpointError(f"`{held.name}` is loaded from a value that is in no file: {type(source).__name__}")
        if tuple(source.shape) != held.shape:
            raise CheckpointError(f"`{held.name}` has shape {held.shape}, and is loaded from {tuple(source.shape)}")
        self.copied.setdefault(held, []).append(source)


def _is_made(value: Any) -> bool:
    """Whether ``value`` may be a Parameter that a module has made of a stand-in of the file."""
    return type(value) is nn.Parameter and value.is_meta


def _converts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``Tensor.to(*args, **kwargs)`` would change the dtype."""
    value, *rest = (*args, *kwargs.values())
    dtypes = (one.dtype if isinstance(one, Tensor) else one for one in rest)
    return any(isinstance(dtype, torch.dtype) and dtype != value.dtype for dtype in dtypes)


@contextmanager
def shown(module: nn.Module, held: Iterable[LocalParam], stand_ins: StandIns) -> Iterator[None]:
    """For the block, replace the parameters of ``held`` in ``module`` with stand-ins, and remove flat parameters.

    At its end, also after an exception, the modules have their parameters again. A parameter that a module has replaced
    by a stand-in of the file counts as copied from it. Raises: CheckpointError naming one that was replaced otherwise.
    """
    places = _places(module, list(held), stand_ins)
    shown_before = ({name: vars(inner)[name] for name in new if name in vars(inner)} for inner, new in places)
    before = [(dict(inner._parameters), views) for (inner, _), views in zip(places, shown_before, strict=True)]
    try:
        for inner, new in places:
            for name, param in new.items():
                inner.__dict__.pop(name, None)
                if param is None:
                    del inner._parameters[name]
                else:
                    inner._parameters[name] = param
        yield
        for inner, new in places:
            for name, param in new.items():
                now, one = inner._parameters.get(name), stand_ins.held_of(param)
                if one is not None and _is_made(now) and stand_ins.name_of(now) is not None:
                    stand_ins.note(one, now)
                elif now is not param or name in inner.__dict__:
                    raise CheckpointError(
                        f"`{one.name if one else name}`: {type(inner).__name__} replaces this parameter while a state "
                        "dict is saved or loaded, which cannot be kept: copy into it instead"
                    )
    finally:
        for (inner, new), (parameters, views) in zip(places, before, strict=True):
            for name in new:
                inner.__dict__.pop(name, None)
            if list(inner._parameters) != list(parameters):
                inner._parameters.clear()
            inner._parameters.update(parameters)
            inner.__dict__.update(views)  # the last forward has left them


def _places(
    module: nn.Module, held: list[LocalParam], stand_ins: StandIns
) -> list[tuple[nn.Module, dict[str, nn.Parameter | None]]]:
    """Return for each module: name -> stand-in; None: a flat parameter, which is removed."""
    found: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
    alone: dict[int, nn.Parameter | None] = {}
    for one in held:
        made = stand_ins.of_held(one)
        for place in one.original.names if isinstance(one, UnitParam) else ():
            found.setdefault(place.module, {})[place.name] = made
        alone[id(one.owner)] = None if isinstance(one, UnitParam) else made
    for inner in module.modules():
        for name, param in inner._parameters.items():
            if id(param) in alone and name not in found.get(inner, {}):
                found.setdefault(inner, {})[name] = alone[id(param)]
    return list(found.items())
