"""Write down everything of a training run that a user could see, so that two runs can be compared bit for bit.

A run gives a list of events. An event is a label and a tuple of plain values: a tensor becomes its type, dtype, shape,
stride, flags and the hash of its bytes; a parameter also gets a number that says which object it is. Names that start
with one of OURS are not looked at: the handle under test may keep private things of its own.
"""

import contextlib
import functools
import hashlib

import replacing
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, _runtime_utils
from torch.distributed.tensor import DTensor

OURS = ("_fp", "_flatparam")
STORAGES = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard", "_local_shard", "_saved_grad_shard")


def digest(tensor, signed_zeros=True):
    """Return the hash of a dense tensor's elements, in logical order, and its first ones for the message."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return f"sparse: {digest(tensor.to_dense())}"
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return "no data"
    if tensor.numel() == 0:
        return "empty"
    if tensor.untyped_storage().size() == 0:
        return "freed"
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    if not signed_zeros:
        flat = torch.where(flat == 0, 0, flat)
    raw = flat.view(torch.uint8).numpy().tobytes()
    return f"{hashlib.sha1(raw).hexdigest()[:16]} {[round(float(x), 5) for x in flat[:4].double()]}"


def describe(tensor, signed_zeros=True):
    """Return what a user can see of one tensor, as a tuple of plain values."""
    if tensor is None:
        return ("None",)
    if not isinstance(tensor, torch.Tensor):
        return (type(tensor).__qualname__, repr(tensor))
    seen = digest(tensor, signed_zeros)
    stale = seen in ("freed", "empty") and not isinstance(tensor, nn.Parameter)
    try:
        is_leaf = "unknown" if stale else tensor.is_leaf  # torch may refuse to look at a view of memory since freed
    except RuntimeError:
        is_leaf = "refused"  # a view made under no_grad, of what was changed in place since
    return (
        f"{type(tensor).__module__}.{type(tensor).__qualname__}",
        str(tensor.dtype),
        tuple(tensor.shape),
        tuple(tensor.stride()) if tensor.layout is torch.strided else "no strides",
        f"requires_grad={tensor.requires_grad} is_leaf={is_leaf} device={tensor.device}",
        f"flat={isinstance(tensor, FlatParameter)} parameter={isinstance(tensor, nn.Parameter)}",
        seen,
    )


class Recorder:
    """The events of one run on one rank."""

    def __init__(self):
        self.events = []
        self._objects = []  # the parameters seen so far; kept alive, so that no identity is used twice
        self._inside = False

    def add(self, label, *values):
        self.events.append((label, values))

    def tensor(self, label, tensor):
        self.add(label, *describe(tensor))

    def gradient(self, label, gradient):
        """Record ``.grad``, whose zeros the drop-in marks by their signs between micro-batches."""
        self.add(label, *describe(gradient, signed_zeros=False))

    def value(self, label, value):
        """Record what a state dict holds: tensors, sharded ones by their pieces, containers, plain values."""
        if isinstance(value, ShardedTensor):
            self.add(f"{label} sharded", repr(value.metadata()))
            for number, piece in enumerate(value.local_shards()):
                self.tensor(f"{label} piece {number}, {piece.metadata!r}", piece.tensor)
        elif isinstance(value, DTensor):
            self.tensor(f"{label} {value.placements} {tuple(value.shape)} {value.stride()}", value.to_local())
        elif isinstance(value, torch.Tensor):
            self.tensor(label, value)
        elif isinstance(value, dict):
            self.add(f"{label} {type(value).__name__}", *map(repr, value))
            for key, item in value.items():
                self.value(f"{label}.{key}", item)
        elif isinstance(value, list):
            self.add(f"{label} list", len(value))
            for number, item in enumerate(value):
                self.value(f"{label}[{number}]", item)
        else:
            self.add(label, repr(value))

    def identity(self, tensor):
        """Return the number of a parameter object: the same number for the same object, in order of appearance."""
        if not isinstance(tensor, nn.Parameter):
            return "not a parameter"
        for number, seen in enumerate(self._objects):
            if seen is tensor:
                return number
        self._objects.append(tensor)
        return len(self._objects) - 1

    def parameters(self, label, model):
        """Record named_parameters: order, names, identity, place, values and gradients; then each unit's state."""
        flats = [unit._handle.flat_param for unit in units(model)]
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.add(f"{label} {name}", self.identity(parameter), place(parameter, flats), *describe(parameter))
            self.add(
                f"{label} {name}.grad", place(parameter.grad, flats), *describe(parameter.grad, signed_zeros=False)
            )
        for number, flat in enumerate(flats):
            self.add(f"{label} unit {number}", self.identity(flat), *describe(flat))
            self.gradient(f"{label} unit {number} grad", flat.grad)
            self.add(f"{label} unit {number} attributes", *sorted(n for n in vars(flat) if not n.startswith(OURS)))
            self.add(f"{label} unit {number} mask", repr(getattr(flat, "_is_grad_none_mask", "absent")))
            for name in STORAGES:
                self.add(f"{label} unit {number} {name}", allocated(getattr(flat, name, None)))
        for name, buffer in model.named_buffers():
            self.tensor(f"{label} buffer {name}", buffer)

    def attributes(self, label, module):
        """Record what ``module.weight`` and its like are at this moment: parameters, or views of the flat parameter."""
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                self.add(f"{label} __dict__ {name}", self.identity(value), *describe(value))
        for name, value in module._parameters.items():
            self.add(f"{label} _parameters {name}", self.identity(value), *describe(value))
        names = sorted(set(module._parameters) | {n for n, v in vars(module).items() if isinstance(v, torch.Tensor)})
        for name in names:
            value = getattr(module, name)
            self.add(f"{label} getattr {name}", value is module._parameters.get(name), *describe(value))

    def watch(self, model):
        """Record each inner module's parameters inside forward, and again when its output gets its gradient."""

        def in_forward(module, args, name):
            self.attributes(f"in forward of {name}", module)

        def after_forward(module, args, output, name):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(functools.partial(in_backward, module=module, name=name))

        def in_backward(gradient, module, name):
            self.tensor(f"gradient of the output of {name}", gradient)
            self.attributes(f"in backward of {name}", module)

        for name, module in model.named_modules():
            if list(module.children()) or isinstance(module, FullyShardedDataParallel):
                continue
            module.register_forward_pre_hook(functools.partial(in_forward, name=name))
            module.register_forward_hook(functools.partial(after_forward, name=name))

    @contextlib.contextmanager
    def collectives(self):
        """Record every collective that is asked of ``torch.distributed``: kind, bytes, dtype and group, in order."""

        def recorded(name, original):
            @functools.wraps(original)
            def call(*args, **kwargs):
                if self._inside:  # one collective made of another counts once
                    return original(*args, **kwargs)
                self._inside = True
                try:
                    self.add("collective", *_collective(name, args, kwargs))
                    return original(*args, **kwargs)
                finally:
                    self._inside = False

            return call

        with replacing.collectives(COLLECTIVES, recorded):
            yield


# the kind under which each function counts: torch has several names for one thing
COLLECTIVES = {
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather of one buffer",
    "all_gather_single": "all_gather of one buffer",
    "_all_gather_base": "all_gather of one buffer",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter of one buffer",
    "reduce_scatter_single": "reduce_scatter of one buffer",
    "_reduce_scatter_base": "reduce_scatter of one buffer",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all_single",
    "all_gather_object": "all_gather_object",
    "broadcast_object_list": "broadcast_object_list",
    "gather_object": "gather_object",
    "barrier": "barrier",
    "_broadcast_coalesced": "_broadcast_coalesced",
}


def _collective(name, args, kwargs):
    kind = COLLECTIVES[name]
    values = [*args, *kwargs.values()]
    if name == "all_gather" and _equal_chunks_of_one_buffer(args[0]):
        kind = "all_gather of one buffer"
    sizes = []
    dtypes = set()
    group = dist.group.WORLD
    for value in values:
        if isinstance(value, dist.ProcessGroup):
            group = value
        parts = value if isinstance(value, (list, tuple)) else [value]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        if tensors:
            sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
            dtypes.update(str(tensor.dtype) for tensor in tensors)
    is_real = group in dist.distributed_c10d._world.pg_group_ranks
    members = tuple(dist.get_process_group_ranks(group)) if is_real else type(group).__name__
    return kind, tuple(sizes), tuple(sorted(dtypes)), members


def _equal_chunks_of_one_buffer(tensors):
    first = tensors[0]
    return all(
        t.is_contiguous()
        and t.numel() == first.numel()
        and t.data_ptr() == first.data_ptr() + i * first.numel() * first.element_size()
        for i, t in enumerate(tensors)
    )


def units(model):
    """Return the FSDP modules of ``model`` that own parameters, outermost first."""
    return [unit for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle is not None]


def reshard(model):
    """Free what forwards have left gathered: torch's handle would summon that, and ours gathers it anew."""
    for unit in units(model):
        if unit._handle.uses_sharded_strategy:
            _runtime_utils._reshard(unit, unit._handle, True)


def allocated(tensor):
    """Return the dtype of a tensor and the bytes of its storage, or that there is none."""
    if tensor is None:
        return "absent"
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.untyped_storage().size()} bytes"


def place(tensor, flats):
    """Say where a tensor's memory lies: at which element of which unit's flat parameter or flat gradient."""
    if tensor is None or tensor.numel() == 0:
        return "nowhere"
    for number, flat in enumerate(flats):
        for kind, whole in (("data", flat), ("grad", flat.grad)):
            if whole is not None and whole.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() != 0:
                return f"unit {number} {kind} + {(tensor.data_ptr() - whole.data_ptr()) // tensor.element_size()}"
    return "elsewhere"


def first_difference(expected, got):
    """Return a readable account of where two lists of events part, or None where they are equal."""
    for number, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            before = "\n".join(f"    {event}" for event in expected[max(0, number - 3) : number])
            return f"event {number} of {len(expected)}:\n{before}\n  torch: {a}\n  ours:  {b}"
    if len(expected) != len(got):
        more = max(expected, got, key=len)[min(len(expected), len(got))]
        return f"{len(expected)} events with torch, {len(got)} with ours; the first that one lacks: {more}"
    return None
