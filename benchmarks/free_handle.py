"""torch's FSDP1 on a handle that costs nothing: what no handle can take off it.

Its steps do nothing and its modules keep the views of one forward: no unit is gathered, freed or re-viewed. torch's
runtime reduces the gradients.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._flat_param import HandleTrainingState
from torch.distributed.fsdp._traversal_utils import _get_fsdp_handles

from benchmarks.models import SHAPE
from flatparam import FlatParamHandle


def _nothing(self: Any, *args: Any) -> bool:
    return False


STEPS = (
    *("pre_unshard", "unshard", "post_unshard", "needs_unshard", "reshard", "post_reshard"),
    *("prepare_gradient_for_optim", "_reset_flat_param_grad_info_if_needed", "_reset_is_grad_none"),
    *("_use_unsharded_grad_views", "_use_sharded_grad_views"),
)


def _drop_gradient(self: Any) -> None:
    self.flat_param.grad = None


FreeHandle = type(
    "FreeHandle",
    (FlatParamHandle,),
    {
        **dict.fromkeys(STEPS, _nothing),
        "prepare_gradient_for_backward": _drop_gradient,
        "_training_state": None,  # an attribute like any other
    },
)


def set_free(wrapped: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Exchange the handles of ``wrapped``, units of ``benchmarks.models`` on flatparam's handle."""
    wrapped(torch.ones(SHAPE, dtype=dtype)).sum().backward()
    for handle in _get_fsdp_handles(wrapped):
        handle._training_state = HandleTrainingState.FORWARD
        handle.pre_unshard()
        handle.unshard()
        handle.post_unshard()
        for info in handle.flat_param._param_infos:
            del info.module._parameters[info.param_name]  # the views stay attributes
        handle.__class__ = FreeHandle
        handle._training_state = HandleTrainingState.IDLE
    return wrapped
