"""Parameters whose modules need another tensor than a view of the flat buffer.

| parameter | flattened | modules see | state dicts have |
|---|---|---|---|
| plain | itself | a view | the plain tensor |
| DTensor, or a type of a torch FSDP extension: ``Form`` | the local plain tensor | the extension's tensor | the same |
| frozen, a subclass over plain memory (4-bit weights): ``Kept`` | its memory | its class | its memory, plain |

``parameters.py`` finds these parameters; the C core calls ``Extended`` and ``dress_all`` with new views. The module
knows one flat parameter's views and no layout.
Source: torch 2.13, ``torch/distributed/fsdp/_fsdp_extensions.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

from ... import _C
from ...common.collectives import ranks_of
from ...common.tensors import has_gradients
from ...common.torch_private import FSDPExtensions, _FSDPDeviceHandle, torch_extensions
from .placement import Placement


class Form:
    """How to make one parameter from the plain tensor that is flattened, and back."""

    def __init__(self, extension: FSDPExtensions, kept: Any):
        self.extension = extension
        self.kept = kept  # the extension's own record of the parameter; opaque

    def __deepcopy__(self, memo: Any) -> Form:
        return self  # immutable, and a mesh in it belongs to the process

    def __str__(self) -> str:
        return str(getattr(self.kept, "placements", type(self.kept).__name__))

    def of(self, local: Tensor) -> Any:
        """Make the tensor for modules from the unsharded plain tensor; differentiable, in the same memory."""
        return self.extension.post_unflatten_transform(local, self.kept)

    def local(self, value: Tensor) -> Tensor:
        """Return the plain tensor in ``value``, detached: the opposite of ``of``."""
        return local_state(value, (self.extension,))


class Kept:
    """The class and the attributes of a frozen parameter whose bytes are flattened."""

    def __init__(self, param: Tensor):
        self.cls = type(param)
        self.attributes = vars(param)

    def __str__(self) -> str:
        return self.cls.__name__

    def holder(self, plain: Tensor, module: nn.Module) -> str | None:
        """Return the name of an attribute that shares the parameter's memory; None: there is none.

        ``plain``: the parameter's memory; ``module``: its module. The attributes of both are searched, one level deep.
        """
        for at, owner in ((f"{self.cls.__name__}.", self.attributes), ("", vars(module))):
            for name, value in owner.items():
                within = {} if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
                for inner, tensor in ((name, value), *((f"{name}.{key}", one) for key, one in within.items())):
                    if isinstance(tensor, Tensor) and plain.numel() and _shares(tensor, plain):
                        return f"{at}{inner}"
        return None

    def dress(self, plain: Tensor) -> Tensor:
        """Make ``plain`` an object of the subclass, in place. ``plain``: a new tensor that nobody else refers to.

        All objects share one attribute dict, so an attribute that a module sets on one is there on the next.
        """
        plain.__class__ = self.cls
        plain.__dict__ = self.attributes
        return plain


def _shares(tensor: Tensor, plain: Tensor) -> bool:
    """Whether ``tensor``, of any class, uses the storage of ``plain``."""
    inside = plain_memory(tensor) if type(tensor) is not Tensor else tensor
    return inside is not None and _C.is_plain_tensor(inside) and _C.same_storage(inside, plain)


def plain_memory(param: Tensor) -> Tensor | None:
    """Return the memory of a parameter of a subclass as a plain tensor.

    None: it is of no subclass, is on the meta device, or its subclass dispatches operations, so memory is not all.
    """
    if param.is_meta or not is_over_plain_memory(param):
        return None
    plain = stripped(param)
    return plain if _C.is_plain_tensor(plain) else None


def is_over_plain_memory(param: Tensor) -> bool:
    """Whether ``param`` is of a subclass that dispatches no operations: its memory and attributes are all of it."""
    is_plain = type(param) in (Tensor, nn.Parameter, FlatParameter)
    return not is_plain and type(param).__torch_dispatch__ is Tensor.__torch_dispatch__


def is_kept(param: Tensor) -> bool:
    """Whether the bytes of ``param`` are flattened in a flat parameter for bytes, and modules see its subclass."""
    return not param.requires_grad and plain_memory(param) is not None


def is_bytes(param: Tensor) -> bool:
    """Whether ``param`` is flattened as bytes: it is frozen, and of a subclass or of a dtype without gradients."""
    return not param.requires_grad and (not has_gradients(param.dtype) or is_kept(param))


def stripped(value: Tensor) -> Tensor:
    """Return the memory of a tensor of a subclass as a plain tensor, detached."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(Tensor)


def extensions_of(mesh: Any) -> tuple[FSDPExtensions, ...]:
    """Return the extensions of a unit on ``mesh``, in the order in which ``flattened`` asks them.

    They are the extension that the user set in torch, and torch's for DTensors if ``mesh`` is a slice of a mesh.
    """
    found = [] if torch_extensions._extensions is None else [torch_extensions._extensions]
    if mesh is not None and mesh._get_root_mesh() != mesh:
        found.append(DTensorExtensions(_FSDPDeviceHandle.from_device(torch.device(mesh.device_type))))
    return tuple(found)


def flattened(value: Tensor, extensions: Sequence[FSDPExtensions]) -> tuple[Tensor, Form | None]:
    """Return the plain tensor to flatten for ``value``, and its form; ``(value, None)`` if no extension takes it."""
    for extension in extensions:
        local, kept = extension.pre_flatten_transform(value)
        if kept is not None:
            return local.detach(), Form(extension, kept)
    return value, None


def check_mesh(fqn: str, value: Tensor, placement: Placement) -> None:
    """Check the mesh of a DTensor parameter; any other parameter passes.

    Raises: ValueError naming the parameter if its mesh and the unit's groups share other ranks than this one; or if the
    unit's mesh is a slice of a mesh, and the parameter is not on the last dimension of that mesh.
    """
    if not isinstance(value, DTensor):
        return
    theirs = value.device_mesh.mesh.flatten().tolist()
    what = f"parameter `{fqn}` is a DTensor with placements {value.placements} over ranks {theirs}"
    for group in (placement.optim, placement.replicate):
        ours = [] if group is None else ranks_of(group)
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
    """Makes the tensors that modules see in place of one flat parameter's views. C calls it in each forward."""

    def __init__(self, forms: list[Form | None]):
        self._forms = forms
        self._made: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def __call__(self, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return one tensor a view. Each form gets an alias: an extension may put hooks on it, and views are reused."""
        with torch.inference_mode(False), torch.enable_grad():
            made = tuple(
                view if form is None else form.of(view.view_as(view))
                for view, form in zip(views, self._forms, strict=True)
            )
        self._made.update(tensor for tensor, form in zip(made, self._forms, strict=True) if form is not None)
        return made

    def refuse_graphs(self) -> None:
        """Let autograd refuse a backward through the tensors made so far: their memory gets other values now."""
        for tensor in list(self._made):
            torch.autograd.graph.increment_version(tensor)


def dress_all(kept: Sequence[Kept | None], views: tuple[Tensor, ...]) -> None:
    """Make each new view an object of its parameter's class, in place. C calls this for each set of views it makes."""
    for view, one in zip(views, kept, strict=True):
        if one is not None:
            one.dress(view)


def local_state(tensor: Tensor, extensions: Sequence[FSDPExtensions]) -> Tensor:
    """Return the plain tensor with this rank's values of a parameter or buffer, detached."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else flattened(tensor, extensions)[0].detach()
