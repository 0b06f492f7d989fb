"""Parameters on the meta device that are wrapped without values: a checkpoint that is loaded later brings them."""

import weakref
from typing import Any

import torch
import torch.nn as nn
from torch.utils.weak import WeakIdKeyDictionary

_templates: Any = WeakIdKeyDictionary()  # placeholder -> the meta parameter that it stands for
_placeholders: Any = WeakIdKeyDictionary()  # and back, as weak references, for parameters with several names


def defer_init(module: nn.Module) -> None:
    """As ``param_init_fn``: leave parameters on the meta device without values, for a checkpoint to bring them.

    No rank ever has more of them than its shard, which is NaN until ``load_safetensors()`` or ``load_state_dict()`` has
    filled it. Buffers that state dicts hold get memory (NaN, or zero where there is none); fill others yourself, in a
    function of your own that calls this one.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    for name, param in list(module._parameters.items()):
        if param is not None and param.is_meta:
            module._parameters[name] = _placeholder(param, device)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
            module._buffers[name] = blank(torch.empty_like(buffer, device=device))


def _has_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point and dtype is not torch.float4_e2m1fn_x2) or dtype.is_complex


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, filled with NaN, or with zero where its dtype has none."""
    return tensor.fill_(torch.nan) if _has_nan(tensor.dtype) else tensor.zero_()


def is_blank(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is as ``blank`` leaves it."""
    if _has_nan(tensor.dtype):
        return bool(tensor.isnan().all())
    return not tensor.reshape(-1).view(torch.uint8).any()


def _placeholder(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    known = _placeholders.get(param)
    made = None if known is None else known()
    if made is None:
        made = nn.Parameter(torch.empty(0, dtype=param.dtype, device=device), requires_grad=param.requires_grad)
        vars(made).update(vars(param))
        _placeholders[param] = weakref.ref(made)
        _templates[made] = param
    return made


def template_of(param: nn.Parameter) -> nn.Parameter | None:
    """The parameter on the meta device that a placeholder stands for; None for any other parameter."""
    template: nn.Parameter | None = _templates.get(param)
    return template
