"""DLPack: who takes a full parameter by its address keeps the memory, which would else be freed or gathered into."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack

from .. import _C


@functools.cache
def watch() -> None:
    """Lend what is exported from now on. torch marks memory that NumPy has, not what DLPack's readers have."""
    native: Any = torch._C
    for name in ("_to_dlpack", "_to_dlpack_versioned"):
        export = getattr(native, name)
        lending = _lending(export)
        for module in (native, torch, torch.utils.dlpack):
            for alias in [alias for alias, value in vars(module).items() if value is export]:
                setattr(module, alias, lending)
    tensor: Any = torch.Tensor
    if "__dlpack_c_exchange_api__" in vars(tensor):
        tensor.__dlpack_c_exchange_api__ = _C.lending_exchange(tensor.__dlpack_c_exchange_api__)


def _lending(export: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(export)
    def lending(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        capsule = export(tensor, *args, **kwargs)
        _C.lend(tensor)
        return capsule

    return lending
