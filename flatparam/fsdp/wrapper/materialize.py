"""Give a unit's parameters and buffers memory, a device and equal values on all ranks, before they are flattened.

The constructor calls ``materialize``, ``move`` and, with ``sync_module_states``, ``synchronize``, in this order. Each
works on the modules of one unit. This file knows no unit object and no layout.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...common.tensors import same_storage
from ...common.torch_private import FSDPExtensions
from ...common.warned import warn_user
from ..desync import checked_collectives
from ..desync.events import SetupCollective
from ..errors import DeviceError
from ..sharding.deferred import template_of
from ..sharding.extensions import is_over_plain_memory, local_state
from ..sharding.placement import Placement

_BUCKET_BYTES = 250 * 1024 * 1024


def own_modules(
    module: nn.Module, is_unit: Callable[[nn.Module], bool], ignored: set[nn.Module]
) -> Iterator[nn.Module]:
    """Yield ``module`` and the modules below that are neither ignored nor in another unit, breadth first."""
    seen = {module}
    waiting = deque([module])
    while waiting:
        current = waiting.popleft()
        yield current
        for child in current.children():
            if child not in seen and child not in ignored and not is_unit(child):
                seen.add(child)
                waiting.append(child)


def own_state(modules: list[nn.Module], ignored_params: set[nn.Parameter]) -> Iterator[Tensor]:
    """Yield the parameters, except ignored ones, and the buffers that ``modules`` register themselves, each once."""
    seen: set[int] = set()
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or id(tensor) in seen or (ignored_params and tensor in ignored_params):
                continue
            seen.add(id(tensor))
            yield tensor


def parameters_of(modules: list[nn.Module]) -> dict[tuple[nn.Module, str], nn.Parameter]:
    """The parameters that ``modules`` register themselves, by module and name."""
    named = ((module, name, param) for module in modules for name, param in module._parameters.items())
    return {(module, name): param for module, name, param in named if param is not None}


def device_of(device_id: int | str | torch.device | None) -> torch.device | None:
    """The device that ``device_id`` names. Without an index it is the current device of that type, with a warning."""
    if device_id is None:
        return None
    if isinstance(device_id, int):
        kind = torch.accelerator.current_accelerator(check_available=True)
        if kind is None:
            raise DeviceError(f"device_id={device_id} names an accelerator, there is none: pass torch.device('cpu')")
        return torch.device(kind.type, device_id)
    device = torch.device(device_id)
    if device.index is None and device.type != "cpu":
        warn_user(f"device_id={device} has no index: the current device of this kind is used")
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def materialize(
    modules: list[nn.Module],
    ignored_params: set[nn.Parameter],
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device | None,
) -> None:
    """Give tensors on the meta device memory and values, if there are any.

    Calls ``param_init_fn(module)`` for each module, or else ``reset_parameters()`` of each module with such tensors. A
    call fills only tensors that the module registers itself. It may replace the objects:

    - Tied parameters and buffers stay tied, with the values of the module that was filled last.
    - Ignored parameters stay the same objects with their values. If an ignored parameter on the meta device is
      replaced, the new one is added to ``ignored_params``.

    Raises: ValueError for a ``param_init_fn`` that cannot be called or that leaves a tensor on the meta device, and for
    a frozen parameter that was of a subclass, as 4-bit weights are, and is a plain one now; AttributeError naming a
    class without ``reset_parameters``.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(f"expected {param_init_fn!r} to be callable, got {type(param_init_fn).__name__}")
    if not any(tensor.is_meta for tensor in own_state(modules, ignored_params)):
        return
    target = device or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    objects = _Objects(modules, ignored_params)
    classes = {
        place: type(param)
        for place, param in parameters_of(modules).items()
        if param.is_meta and param not in ignored_params and not param.requires_grad and is_over_plain_memory(param)
    }
    for module in modules:
        if param_init_fn is not None:
            param_init_fn(module)
        elif any(tensor.is_meta for tensor in own_state([module], ignored_params)):
            _reset(module, target)
        objects.restore(module)
    for module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor not in ignored_params and tensor.is_meta:
                raise ValueError(
                    f"param_init_fn left `{name}` of {type(module).__name__} (shape {tuple(tensor.shape)}) on the meta "
                    "device: it gets every module of the unit, and fills what that module registers itself"
                )
    for (module, name), cls in classes.items():
        if not isinstance(module._parameters.get(name), cls):
            raise ValueError(
                f"parameter `{name}` of {type(module).__name__} is a {cls.__name__} on the meta device, and became a "
                f"plain Parameter, without its attributes: let param_init_fn put a {cls.__name__} there, or build the "
                "module with memory"
            )


def _reset(module: nn.Module, device: torch.device) -> None:
    module.to_empty(device=device, recurse=False)
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is None:
        raise AttributeError(
            f"{type(module).__name__} has parameters or buffers on the meta device and no reset_parameters(): "
            "define it, or pass param_init_fn"
        )
    with torch.no_grad():
        reset()


class _Objects:
    """The tied and the ignored parameters and buffers of ``modules``, as they are before the modules are filled."""

    def __init__(self, modules: list[nn.Module], ignored_params: set[nn.Parameter]):
        self._ignored_params = ignored_params
        self._ignored: dict[nn.Module, list[tuple[str, nn.Parameter, Tensor]]] = {}
        self._tied: dict[nn.Module, list[tuple[dict[str, Any], str, list[tuple[dict[str, Any], str]]]]] = {}
        places: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
        for module in modules:
            for registered in (module._parameters, module._buffers):
                for name, tensor in registered.items():
                    if tensor is None:
                        continue
                    if tensor in ignored_params:
                        self._ignored.setdefault(module, []).append((name, tensor, tensor.data))  # type: ignore[arg-type]
                    else:
                        places.setdefault(tensor, []).append((registered, name))
                        self._tied.setdefault(module, []).append((registered, name, places[tensor]))

    def restore(self, module: nn.Module) -> None:
        """After ``module`` was filled: put its new tensors into the modules tied to it, and its ignored ones back."""
        for name, param, data in self._ignored.get(module, ()):
            now = module._parameters[name]
            if param.is_meta and now is not None and now is not param and template_of(now) is None:
                self._ignored_params.add(now)
                continue
            module._parameters[name] = param
            if not same_storage(param, data):
                param.data = data
        for registered, name, places in self._tied.get(module, ()):
            for others, other in places if len(places) > 1 else ():
                others[other] = registered[name]


def accelerator_of(
    modules: list[nn.Module], ignored_params: set[nn.Parameter], device: torch.device | None
) -> torch.device | None:
    """With ``offload_params``: the device to compute on; None: the host.

    It is ``device`` if that is given, else the first accelerator with a parameter or buffer, else the current
    accelerator.
    """
    if device is None:
        devices = [tensor.device for tensor in own_state(modules, ignored_params)]
        device = next((found for found in devices if found.type not in ("cpu", "meta")), None)
    kind = torch.accelerator.current_accelerator(check_available=True) if device is None else None
    if kind is not None:
        device = torch.device(kind.type, torch.accelerator.current_device_index())
    return None if device is None or device.type == "cpu" else device


def move(
    modules: list[nn.Module],
    ignored_params: set[nn.Parameter],
    device: torch.device | None,
    of_params: torch.device | None,
    of_buffers: torch.device | None,
) -> None:
    """Move parameters to ``of_params`` and buffers to ``of_buffers``.

    ``of_params`` None: move nothing. Parameters keep their identity, and gradients move along. Ignored parameters stay.
    Raises: DeviceError for a parameter that lies neither on the CPU nor on ``device``, if that is given.
    """
    if of_params is None:
        return
    for module in modules:
        for name, param in module._parameters.items():
            if param is None or (ignored_params and param in ignored_params):
                continue
            if device is not None and param.device != device and param.device.type != "cpu":
                raise DeviceError(
                    f"device_id={device}, but parameter `{name}` of {type(module).__name__} is on {param.device}"
                )
            moved = None if param.device == of_params else param.data.to(of_params)
            if moved is not None and type(moved) is Tensor and torch._has_compatible_shallow_copy_type(param, moved):
                param.data = moved
            elif moved is not None:  # a device outside of torch, or a subclass, which holds another tensor
                torch.utils.swap_tensors(param, nn.Parameter(moved, param.requires_grad))
            if param.grad is not None:
                param.grad = param.grad.to(of_params)
        for name, buffer in module._buffers.items():
            if buffer is not None and of_buffers is not None:
                put_buffer(module, name, buffer.to(of_buffers))


def put_buffer(module: nn.Module, name: str, value: Tensor) -> Tensor:
    """Set the data of the buffer ``name`` to ``value``, so that all references to it see it. Return the buffer.

    If that is impossible (a device outside of torch, or a subclass), register ``value`` in ``module`` instead. As
    torch's FSDP does.
    """
    buffer = module._buffers[name]
    if type(value) is type(buffer) is Tensor and torch._has_compatible_shallow_copy_type(buffer, value):
        buffer.data = value
        return buffer
    module._buffers[name] = value
    return value


def synchronize(
    modules: list[nn.Module],
    ignored_params: set[nn.Parameter],
    placement: Placement,
    device: torch.device | None,
    extensions: tuple[FSDPExtensions, ...],
) -> None:
    """Broadcast parameters and buffers from the first rank: over the replicas, then over the ranks that share the unit.

    A collective call. ``device``: send from there, if the tensors lie elsewhere.
    """
    tensors = (local_state(tensor, extensions) for tensor in own_state(modules, ignored_params))
    states = [tensor for tensor in tensors if tensor.numel() > 0]
    sent = states if device is None else [tensor.to(device) for tensor in states]
    for group in (placement.replicate, placement.optim):
        if group is not None and states:
            for bucket in _buckets(sent):
                _broadcast(bucket, group)
    if device is not None:
        for state, received in zip(states, sent, strict=True):
            state.copy_(received)


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one dtype and device, to be broadcast as one: up to ``_BUCKET_BYTES``, or one tensor.

    The lists depend on order, dtypes and sizes alone, so all ranks have the same.
    """
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        if tensor.nbytes > room.get(kind, 0) and kind in filling:
            yield filling.pop(kind)
        if kind not in filling:
            filling[kind], room[kind] = [], _BUCKET_BYTES
        filling[kind].append(tensor)
        room[kind] -= tensor.nbytes
    yield from filling.values()


@torch.no_grad()
def _broadcast(bucket: list[Tensor], group: dist.ProcessGroup) -> None:
    """Broadcast a copy from the first rank of ``group``, then set the tensors. Ctrl-C in the wait changes nothing."""
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    checked_collectives.exchange(
        SetupCollective.SENDS_MODULES, dist.broadcast, flat.view(torch.uint8), group=group, group_src=0
    )
    for tensor, received in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(received.view(tensor.shape))
