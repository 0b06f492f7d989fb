"""Parameters on the meta device that are wrapped without values, which a later load fills.

A placeholder with 0 elements on the real device stands for the meta parameter (its template) until the unit is built.
``parameters.py`` asks for templates; ``flat_param.py`` fills shards with ``blank``. The module knows no layout.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_templates: Any = WeakIdKeyDictionary()  # placeholder -> the meta parameter that it stands for
# meta parameter -> weak reference to its placeholder: a parameter with several names needs one placeholder
_placeholders: Any = WeakIdKeyDictionary()


def defer_init(module: nn.Module) -> None:
    """Pass this as ``param_init_fn`` to wrap a module on the meta device and load its values later.

    Each rank allocates only its shard. The shard is NaN until ``load_safetensors()`` or ``load_state_dict()`` fills it.
    Buffers in state dicts get memory too: NaN, or zero if their dtype has no NaN. Fill non-persistent buffers yourself:
    pass a function that calls this one and then fills them.
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
    """Fill ``tensor`` with NaN, or with zero if its dtype has no NaN, and return it."""
    return tensor.fill_(torch.nan) if _has_nan(tensor.dtype) else tensor.zero_()


def is_blank(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has the values that ``blank`` writes."""
    return bool(tensor.isnan().all()) if _has_nan(tensor.dtype) else not tensor.reshape(-1).view(torch.uint8).any()


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
    """Return the meta parameter that a placeholder stands for; None for any other parameter."""
    template: nn.Parameter | None = _templates.get(param)
    return template
