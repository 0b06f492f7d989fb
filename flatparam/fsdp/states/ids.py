"""Convert the keys of an unwrapped optimizer's state between FQNs and numbers. `optimizer.py` calls this."""

import copy
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import OptimStateKeyType

from .table import Table


def rekeyed(state: dict[str, Any], key_type: OptimStateKeyType, model: nn.Module, given: Any) -> dict[str, Any]:
    """Return ``state`` with keys of ``key_type``, or ``state`` itself if it has them already. The values are shared.

    The members of each group are sorted, as torch's function sorts them. ``model``: not wrapped. ``given``: its
    optimizer, or the parameters or groups that the optimizer was made from; None: all parameters of ``model``.
    Raises: ValueError for keys that are neither all names nor all numbers, and for a key that fits no parameter.
    """
    if key_type not in (OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID):
        raise ValueError(f"expected key_type to be an OptimStateKeyType, got {key_type!r}")
    wanted = str if key_type is OptimStateKeyType.PARAM_NAME else int
    kinds = {type(key) for key in state["state"]}
    if not kinds:
        kinds = {type(key) for group in state.get("param_groups", ()) for key in group["params"]}
    if kinds - {int, str} or len(kinds) > 1:
        raise ValueError(
            f"expected the optimizer's state to have names or numbers for keys, got {sorted(k.__name__ for k in kinds)}"
        )
    if kinds <= {wanted}:
        return state
    stepped = [one for group in Table(model).groups(given) for one in group]
    keys: dict[Any, Any] = {}
    for number, one in enumerate(stepped):
        for name in one.params[0].names:
            keys.update({name: number} if wanted is int else {number: one.params[0].name})
    try:
        result: dict[str, Any] = {"state": {keys[key]: value for key, value in state["state"].items()}}
        if "param_groups" in state:
            result["param_groups"] = [
                {**copy.deepcopy(group), "params": sorted(keys[key] for key in group["params"])}
                for group in state["param_groups"]
            ]
    except KeyError as error:
        raise ValueError(
            f"the optimizer's state has {error.args[0]!r}, which is no parameter of {type(model).__name__} that the "
            "optimizer has"
        ) from None
    return result
