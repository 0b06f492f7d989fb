"""Parameters that are flattened in another form: DTensors of tensor parallelism, and what torch's FSDP extensions take.

An extension makes of a parameter the plain tensor that is flattened and sharded, and of that, whole again, what modules
and state dicts have. A frozen parameter of a subclass over plain memory, 4-bit weights say, needs none: what modules
have in a forward is made an object of the subclass, and state dicts have its plain bytes, as torch's class gives them.

Source: torch 2.13, ``torch/distributed/fsdp/_fsdp_extensions.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

from ... import _C
from ...common.tensors import has_gradients
from ...common.torch_private import FSDPExtensions, _FSDPDeviceHandle, torch_extensions
from .placement import Placement


class Form:
    """What one parameter is, beside the plain tensor that is flattened."""

    def __init__(self, extension: FSDPExtensions, kept: Any):
        self.extension = extension
        self.kept = kept  # what the extension needs to make the parameter of the tensor

    def __deepcopy__(self, memo: Any) -> Form:
        return self  # a mesh belongs to the process, and nothing here changes

    def __str__(self) -> str:
        return str(getattr(self.kept, "placements", type(self.kept).__name__))

    def of(self, local: Tensor) -> Any:
        """The parameter as modules have it, of a whole plain tensor; differentiable, in the same memory."""
        return self.extension.post_unflatten_transform(local, self.kept)

    def local(self, value: Tensor) -> Tensor:
        """The opposite, detached."""
        return local_state(value, (self.extension,))


class Kept:
    """The class and the attributes of a frozen parameter whose bytes are flattened: what modules need of it."""

    def __init__(self, param: Tensor):
        self.cls = type(param)
        self.attributes = vars(param)

    def __str__(self) -> str:
        return self.cls.__name__

    def holder(self, plain: Tensor, module: nn.Module) -> str | None:
        """The name of what has the memory of the parameter, ``plain`` of ``module``, beside it; None: nothing has."""
        for at, owner in ((f"{self.cls.__name__}.", self.attributes), ("", vars(module))):
            for name, value in owner.items():
                within = {} if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
                for inner, tensor in ((name, value), *((f"{name}.{key}", one) for key, one in within.items())):
                    if isinstance(tensor, Tensor) and plain.numel() and _shares(tensor, plain):
                        return f"{at}{inner}"
        return None

    def dress(self, plain: Tensor) -> Tensor:
        """Make ``plain``, a new tensor of nobody else, an object of the subclass; what is set on one, all have."""
        plain.__class__ = self.cls
        plain.__dict__ = self.attributes
        return plain


def _shares(tensor: Tensor, plain: Tensor) -> bool:
    """Whether a tensor of any kind lies in the storage of ``plain``."""
    inside = plain_memory(tensor) if type(tensor) is not Tensor else tensor
    return inside is not None and _C.is_plain_tensor(inside) and _C.same_storage(inside, plain)


def plain_memory(param: Tensor) -> Tensor | None:
    """The plain tensor that a parameter of a subclass is; None: it is of no subclass, or is more than its memory."""
    if type(param) in (Tensor, nn.Parameter, FlatParameter) or param.is_meta:
        return None
    if type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    plain = stripped(param)
    return plain if _C.is_plain_tensor(plain) else None


def is_kept(param: Tensor) -> bool:
    """Whether its bytes are flattened apart, and modules get an object of its subclass."""
    return not param.requires_grad and plain_memory(param) is not None


def is_bytes(param: Tensor) -> bool:
    """Whether it is flattened apart, as bytes: frozen, and of a subclass, or of a dtype that has no gradients."""
    return not param.requires_grad and (not has_gradients(param.dtype) or is_kept(param))


def stripped(value: Tensor) -> Tensor:
    """The memory of a tensor of a subclass as a plain tensor, detached."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(Tensor)


def extensions_of(mesh: Any) -> tuple[FSDPExtensions, ...]:
    """Those of a unit on ``mesh``, in the order in which they are asked: the one that was set, and that of a slice."""
    found = [] if torch_extensions._extensions is None else [torch_extensions._extensions]
    if mesh is not None and mesh._get_root_mesh() != mesh:
        found.append(DTensorExtensions(_FSDPDeviceHandle.from_device(torch.device(mesh.device_type))))
    return tuple(found)


def flattened(value: Tensor, extensions: Sequence[FSDPExtensions]) -> tuple[Tensor, Form | None]:
    """What is flattened in place of ``value``, a plain tensor, and its form; itself and None if it is one."""
    for extension in extensions:
        local, kept = extension.pre_flatten_transform(value)
        if kept is not None:
            return local.detach(), Form(extension, kept)
    return value, None


def check_mesh(fqn: str, value: Tensor, placement: Placement) -> None:
    """Raises: ValueError naming a DTensor parameter that is not spread over the last dimension of the unit's mesh."""
    if not isinstance(value, DTensor):
        return
    theirs = value.device_mesh.mesh.flatten().tolist()
    what = f"parameter `{fqn}` is a DTensor with placements {value.placements} over ranks {theirs}"
    for group in (placement.optim, placement.replicate):
        ours = [] if group is None else dist.get_process_group_ranks(group)
        both = sorted(set(ours) & set(theirs) - {dist.get_rank()})
        if both:
            raise ValueError(
                f"{what}, and the unit is spread over ranks {ours}: tensor parallelism must be over other ranks than "
                f"the unit's, but both have {both}. Pass device_mesh= another dimension of the mesh"
            )
    if placement.mesh is None:
        return
    root = placement.mesh._get_root_mesh().mesh
    row = root[tuple((root == dist.get_rank()).nonzero()[0][:-1])].tolist()
    if value.device_mesh.ndim != 1 or row != theirs:
        raise ValueError(
            f"{what}, expected one dimension, the last of the mesh that device_mesh is a slice of: there this rank is "
            f"with ranks {row}"
        )


class Extended:
    """Makes what modules have in place of the views of one flat parameter: the C core calls it in each forward."""

    def __init__(self, forms: list[Form | None]):
        self._forms = forms
        self._made: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def __call__(self, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of each view its form, of an alias of it: an extension may put hooks on it, and the views stay."""
        with torch.inference_mode(False), torch.enable_grad():
            made = tuple(
                view if form is None else form.of(view.view_as(view))
                for view, form in zip(views, self._forms, strict=True)
            )
        self._made.update(tensor for tensor, form in zip(made, self._forms, strict=True) if form is not None)
        return made

    def refuse_graphs(self) -> None:
        """Let autograd refuse the graphs that need the values of what was made: they change."""
        for tensor in list(self._made):
            torch.autograd.graph.increment_version(tensor)


def dress_all(kept: Sequence[Kept | None], views: tuple[Tensor, ...]) -> None:
    """Make each of ``views``, new and of one flat parameter, an object of the class that its parameter has."""
    for view, one in zip(views, kept, strict=True):
        if one is not None:
            one.dress(view)


def local_state(tensor: Tensor, extensions: Sequence[FSDPExtensions]) -> Tensor:
    """The plain tensor that has the values of a parameter or buffer, detached."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    return flattened(tensor, extensions)[0].detach()
