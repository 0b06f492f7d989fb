"""What older torch versions wrote and imported, understood while flatparam is installed.

- ``torch.distributed.fsdp.flat_param``: the module's name up to torch 2.1, in scripts and as the path in pickles.
- ``FlatParamShardMetadata`` of four fields, as torch up to 2.5 pickled it: it knew row-major parameters only, so the
  strides and contiguities that torch 2.6 put between its fields follow from the shapes.
"""

import functools
import sys
from itertools import accumulate
from typing import Any

import torch.distributed.fsdp
import torch.distributed.fsdp._flat_param as torch_flat_param
from torch.distributed.fsdp._flat_param import FlatParamShardMetadata

OLD_NAME = "flat_param"
OLD_PATH = f"torch.distributed.fsdp.{OLD_NAME}"

_new_metadata: Any = FlatParamShardMetadata.__new__


def add() -> None:
    """Let what older versions wrote be imported and unpickled. Does nothing where torch itself has the old module."""
    package: Any = sys.modules["torch.distributed.fsdp"]
    if OLD_PATH not in sys.modules:
        sys.modules[OLD_PATH] = torch_flat_param
        setattr(package, OLD_NAME, torch_flat_param)
    setattr(FlatParamShardMetadata, "__new__", staticmethod(_new_metadata_of_any_version))  # noqa: B010


def remove() -> None:
    """Undo ``add()``."""
    package: Any = sys.modules["torch.distributed.fsdp"]
    if sys.modules.get(OLD_PATH) is torch_flat_param:
        del sys.modules[OLD_PATH]
        delattr(package, OLD_NAME)
    setattr(FlatParamShardMetadata, "__new__", staticmethod(_new_metadata))  # noqa: B010


@functools.wraps(_new_metadata)
def _new_metadata_of_any_version(cls: type, *fields: Any, **named: Any) -> Any:
    if len(fields) == 4 and not named:
        names, shapes, numels, offsets = fields
        strides = tuple(_row_major(shape) for shape in shapes)
        fields = (names, shapes, strides, (True,) * len(shapes), numels, offsets)
    return _new_metadata(cls, *fields, **named)


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as ``Tensor.stride()`` gives them: an extent of 0 counts as 1."""
    inner = [max(extent, 1) for extent in reversed(shape[1:])]
    return tuple(accumulate(inner, lambda stride, extent: stride * extent, initial=1))[::-1] if shape else ()
