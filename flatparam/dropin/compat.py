"""What other parts of torch do, and old versions did, as long as flatparam is installed.

- ``torch.distributed.fsdp.flat_param``: the module's name up to torch 2.1, in scripts and as the path in pickles.
- ``FlatParamShardMetadata`` of four fields, as torch up to 2.5 pickled and made it: it knew row-major parameters only,
  so the strides and contiguities that torch 2.6 put between its fields follow from the shapes.
- Gathered optimizer states keep their values. For ``use_orig_params=True`` torch gathers the states of a unit (Adam's
  ``exp_avg``, then ``exp_avg_sq``) one after another into one buffer, and returns views of it. Where nothing copies
  them (on the CPU, or ``offload_to_cpu=False``), every state of a saved optimizer has the values of the last one.
"""

import functools
import sys
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..common.tensors import row_major
from ..common.torch_private import FlatParamShardMetadata, _optim_utils, torch_flat_param
from .handle import FlatParamHandle

OLD_NAME = "flat_param"
OLD_PATH = f"torch.distributed.fsdp.{OLD_NAME}"

_OLD_FIELDS = ("param_names", "param_shapes", "param_numels", "param_offsets")

_new_metadata: Any = FlatParamShardMetadata.__new__
_make_metadata: Any = vars(FlatParamShardMetadata)["_make"]
_UNFLATTEN = "_unflatten_orig_param_states"  # called as each state is gathered; another torch may do without
_unflatten: Any = getattr(_optim_utils, _UNFLATTEN, None)


def add() -> None:
    """Begin with it. The old module stays torch's own where torch has it."""
    package: Any = sys.modules["torch.distributed.fsdp"]
    if OLD_PATH not in sys.modules:
        sys.modules[OLD_PATH] = torch_flat_param
        setattr(package, OLD_NAME, torch_flat_param)
    _set_ways_to_make_metadata(staticmethod(_new_metadata_of_any_version), classmethod(_make_metadata_of_any_version))
    if _unflatten is not None:
        setattr(_optim_utils, _UNFLATTEN, _unflatten_apart)


def remove() -> None:
    """Undo ``add()``."""
    package: Any = sys.modules["torch.distributed.fsdp"]
    if sys.modules.get(OLD_PATH) is torch_flat_param:
        del sys.modules[OLD_PATH]
        delattr(package, OLD_NAME)
    _set_ways_to_make_metadata(staticmethod(_new_metadata), _make_metadata)
    if getattr(_optim_utils, _UNFLATTEN, None) is _unflatten_apart:
        setattr(_optim_utils, _UNFLATTEN, _unflatten)


def _set_ways_to_make_metadata(new: Any, make: Any) -> None:
    kind: Any = FlatParamShardMetadata
    kind.__new__, kind._make = new, make


@functools.wraps(_new_metadata)
def _new_metadata_of_any_version(cls: type, *fields: Any, **named: Any) -> Any:
    if len(fields) + len(named) == len(_OLD_FIELDS) and set(named) == set(_OLD_FIELDS[len(fields) :]):
        fields = _filled_in(*fields, *(named.pop(name) for name in _OLD_FIELDS[len(fields) :]))
    return _new_metadata(cls, *fields, **named)


def _make_metadata_of_any_version(cls: type, iterable: Any) -> Any:
    fields = tuple(iterable)
    return _make_metadata.__func__(cls, _filled_in(*fields) if len(fields) == len(_OLD_FIELDS) else fields)


def _filled_in(names: Any, shapes: Any, numels: Any, offsets: Any) -> tuple[Any, ...]:
    """The fields with strides and contiguities, of parameters that are all row-major."""
    return names, shapes, tuple(map(row_major, shapes)), (True,) * len(shapes), numels, offsets


@functools.wraps(_unflatten)
def _unflatten_apart(info: Any, states: dict[str, dict[str, Any]], name: str, *settings: Any, **named: Any) -> None:
    """Copy out of the buffer what torch leaves in it, for units with flatparam's handle."""
    gathered = {_address(state.get(name)) for state in states.values()} - {None}
    _unflatten(info, states, name, *settings, **named)
    if isinstance(info.handle, FlatParamHandle):
        for state in states.values():
            if _address(state.get(name)) in gathered:
                state[name] = state[name].clone()


def _address(value: Any) -> int | None:
    """Where the memory of a tensor or of a DTensor's local part begins; None for anything else."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.untyped_storage().data_ptr() if type(local) is Tensor else None
