"""Every name of ``torch.distributed.fsdp._flat_param``, with ``FlatParamHandle`` from here.

Enums, named tuples, ``FlatParameter`` and the small helpers are torch's own objects: what compares, pickles or looks up
one of them finds the same one, whether flatparam is installed or not. Only the handle is ours.
"""

from ..common.torch_private import torch_flat_param as _torch_flat_param
from .handle import FlatParamHandle

globals().update(
    {name: value for name, value in vars(_torch_flat_param).items() if not name.startswith("__")}
    | {"FlatParamHandle": FlatParamHandle}
)
__all__ = list(_torch_flat_param.__all__)
