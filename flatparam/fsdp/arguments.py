"""The types of the constructor's arguments: what each must be, before anything is done with it."""

import torch.nn as nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision

from .placement import Placement

_FLAGS = (
    "sync_module_states",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "segments",
    "offload_grads",
    "check_values",
)
_CLASSES: dict[str, type] = {
    "module": nn.Module,
    "cpu_offload": CPUOffload,
    "mixed_precision": MixedPrecision,
    "placement": Placement,
}


def check_types(**arguments: object) -> None:
    """Raises: TypeError naming the first argument of another type than it is documented to have, and what came."""
    for name, value in arguments.items():
        if name in _FLAGS:
            wanted, fits = "True or False", isinstance(value, int)
        else:
            cls = _CLASSES[name]
            wanted = f"{cls.__module__.split('.')[0]}'s {cls.__name__}{'' if name == 'module' else ' or None'}"
            fits = isinstance(value, cls) or (value is None and name != "module")
        if not fits:
            raise TypeError(f"expected {name} to be {wanted}, got {value!r:.200} ({type(value).__name__})")
