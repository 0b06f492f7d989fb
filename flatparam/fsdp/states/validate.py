"""Check the dtypes of a loaded state dict and digest its values. torch has checked its keys and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ..names import clean_tensor_name
from ..sharding.unit_description import digest_of
from ..unit.local_params import UnitParam, local_params_of
from ..unit.unit import Unit
from .entries import is_own
from .loading import Values, kind_of
from .rows import is_rows
from .values import dtype_of


def checked_values(module: nn.Module, state: Mapping[str, Any], compared: set[Unit | None]) -> Values:
    """Return digests of the whole values in ``state``, which must be the same on all ranks that share a unit.

    Left out are units in ``compared``, whose digests the caller has already, and values that are the module's own
    parameters, of which ranks have different slices. This rank's values are checked; the caller compares over ranks.

    Raises: RuntimeError naming the key, if the module's tensor has another kind of dtype (floating, complex, integer:
    see ``kind_of``), or an integer dtype that cannot hold a value.
    """
    params = {name: one for one in local_params_of(module) for name in one.names}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    dtypes = {clean_tensor_name(name): tensor.dtype for name, tensor in named}
    dtypes |= {name: one.owner.dtype for name, one in params.items()}
    found: dict[UnitParam, set[str]] = {}  # ranks may use different FQNs of a tied parameter
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        name, in_rows = clean_tensor_name(key), is_rows(value)
        has, dtype = dtype_of(value), dtypes.get(name)
        if dtype is not None and has != dtype:
            if kind_of(has) != kind_of(dtype):
                raise RuntimeError(f"`{key}` has dtype {has}, which cannot be loaded into {dtype}: convert it first")
            if kind_of(dtype) == "integer" and not in_rows and not torch.equal(value.to(dtype).to(has), value):
                raise RuntimeError(f"`{key}` of {has} has values that {dtype} cannot hold")
        one = params.get(name)
        if isinstance(one, UnitParam) and one.unit not in compared and not in_rows and not is_own(value, one):
            digest = digest_of(value.detach().cpu().contiguous())
            found.setdefault(one, set()).add(f"{has} {tuple(value.shape)} {digest}")
    return {one.name: (one.unit, " ".join(sorted(digests))) for one, digests in found.items()}
