"""What older torch versions wrote and imported, understood while flatparam is installed.

- ``torch.distributed.fsdp.flat_param``: the module's name up to torch 2.1, in scripts and as the path in pickles.
- ``FlatParamShardMetadata`` of four fields, as torch up to 2.5 pickled and made it: it knew row-major parameters only,
  so the strides and contiguities that torch 2.6 put between its fields follow from the shapes.
"""

import functools
import sys
from itertools import accumulate
from typing import Any

import torch.distributed.fsdp

from ..common.torch_private import FlatParamShardMetadata, torch_flat_param

OLD_NAME = "flat_param"
OLD_PATH = f"torch.distributed.fsdp.{OLD_NAME}"

_OLD_FIELDS = ("param_names", "param_shapes", "param_numels", "param_offsets")

_new_metadata: Any = FlatParamShardMetadata.__new__
_make_metadata: Any = vars(FlatParamShardMetadata)["_make"]


def add() -> None:
    """Let what older versions wrote be imported and unpickled. Does nothing where torch itself has the old module."""
    package: Any = sys.modules["torch.distributed.fsdp"]
    if OLD_PATH not in sys.modules:
        sys.modules[OLD_PATH] = torch_flat_param
        setattr(package, OLD_NAME, torch_flat_param)
    _set_ways_to_make_metadata(staticmethod(_new_metadata_of_any_version), classmethod(_make_metadata_of_any_version))


def remove() -> None:
    """Undo ``add()``."""
    package: Any = sys.modules["torch.distributed.fsdp"]
    if sys.modules.get(OLD_PATH) is torch_flat_param:
        del sys.modules[OLD_PATH]
        delattr(package, OLD_NAME)
    _set_ways_to_make_metadata(staticmethod(_new_metadata), _make_metadata)


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
    return names, shapes, tuple(_row_major(shape) for shape in shapes), (True,) * len(shapes), numels, offsets


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as ``Tensor.stride()`` gives them: an extent of 0 counts as 1."""
    inner = [max(extent, 1) for extent in reversed(shape[1:])]
    return tuple(accumulate(inner, lambda stride, extent: stride * extent, initial=1))[::-1] if shape else ()
