"""Every name of ``torch.distributed.fsdp._flat_param``, with ``FlatParamHandle`` from here.

Enums, named tuples, ``FlatParameter`` and small functions are torch's own objects: code that compares, pickles or looks
them up finds the same object, whether flatparam is installed or not. Only the handle is flatparam's.
"""

from ..common.torch_private import torch_flat_param as _torch_flat_param
from .handle import FlatParamHandle

globals().update(
    {name: value for name, value in vars(_torch_flat_param).items() if not name.startswith("__")}
    | {"FlatParamHandle": FlatParamHandle}
)
__all__ = list(_torch_flat_param.__all__)
