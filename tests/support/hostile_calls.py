"""Call everything public of flatparam._C with arguments that nobody should pass. A script, run by test_bad_calls.py.

Each callable is tried in a forked process of its own: with a wild tuple of arguments, or with a valid call of which one
or two values, however deep inside, were exchanged. Prints a line of JSON for each callable: how the process ended, how
many calls raised, and the call that was running when it crashed. ``hostile_calls.py CALLS SEED``
"""

import array
import gc
import json
import os
import pathlib
import random
import resource
import signal
import sys
import tempfile
import warnings

import torch
from torch import nn
from torch.distributed.fsdp._flat_param import _ShardParamInfo

from flatparam import _C

ROOM = 3 << 30  # bytes of address space that a call may take: a size that is believed fails to allocate, and shows


class Refuses:
    """Raises whatever is asked of it."""

    def _refuse(self, *args):
        raise KeyError("refused")

    __index__ = __int__ = __float__ = __bool__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __eq__ = __hash__ = __contains__ = _refuse

    def __getattr__(self, name):
        raise LookupError(name)


class Liar:
    """Says that it is of any length, a number, a tensor; and gives something else."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value

    def __len__(self):
        return self.value

    def __float__(self):
        return "no float"

    def __iter__(self):
        return iter([self.value, "x", None])

    def __getitem__(self, position):
        return self

    __class__ = property(lambda self: torch.Tensor)


class Changes:
    """Empties or fills the containers it knows as soon as it is looked at, then goes on as if nothing had happened."""

    def __init__(self, *containers):
        self.containers = containers

    def _change(self):
        for container in self.containers:
            if isinstance(container, dict):
                container.clear()
            elif isinstance(container, list):
                if len(container) > 3:
                    del container[:]
                else:
                    container.extend([None] * 50)
        gc.collect()

    def __index__(self):
        self._change()
        return 1

    def __float__(self):
        self._change()
        return 1.0

    def __bool__(self):
        self._change()
        return True

    def __len__(self):
        self._change()
        return 2

    def __iter__(self):
        self._change()
        return iter([1, 2])

    def __getitem__(self, position):
        self._change()
        return 1

    def __eq__(self, other):
        self._change()
        return False

    def __hash__(self):
        return 7

    def __del__(self):
        self._change()


class Name(str):
    """An attribute name whose comparison runs code."""

    def __eq__(self, other):
        gc.collect()
        return str.__eq__(self, other)

    __hash__ = str.__hash__


class Overridden(nn.Module):
    """Deletes its own parameters while they are set, and refuses to be asked."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def __setattr__(self, name, value):
        self.__dict__.get("_parameters", {}).clear()
        object.__setattr__(self, name, value)

    def __delattr__(self, name):
        raise AttributeError(name)


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise ValueError("not by this class")


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def without_dict(attribute, value):
    module = nn.Linear(2, 2)
    object.__setattr__(module, attribute, value)
    return module


def generator_that_raises():
    yield 1
    raise KeyError("in the middle")


def endless_list():
    endless = []
    endless.append(endless)
    return endless


WILD = [
    *(lambda value=value: value for value in (None, True, 0, 1, -1, 2, 7, 2**31, -(2**31) - 1, 2**40, 2**62)),
    *(lambda value=value: value for value in (2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 0.5, float("nan"), 1e308)),
    *(
        lambda value=value: value
        for value in ("", "weight", "fp32", "bf16", "no\0name", "\ud800", b"", b"12345678", ...)
    ),
    *(lambda value=value: value for value in ((), int, torch.float32, torch.device("cpu"), torch.Size([2]), object())),
    *(list, dict, set, Refuses, Changes, bytearray, object, Overridden, endless_list, generator_that_raises),
    lambda: Liar(-1),
    lambda: Liar(2**40),
    lambda: Liar(2**70),
    lambda: Name("weight"),
    lambda: [None],
    lambda: [1, 2, 3],
    lambda: [[], [[]], ()],
    lambda: {1: 2},
    lambda: range(10**12),
    lambda: iter([torch.ones(1)]),
    lambda: bytearray(64),
    lambda: memoryview(bytes(64)),
    lambda: memoryview(bytearray(64))[::2],
    lambda: array.array("d", [1.0] * 8),
    lambda: torch.arange(8.0).numpy(),
    lambda: torch.ones(3),
    lambda: torch.ones(0),
    lambda: torch.tensor(1.0),
    lambda: torch.ones(3, dtype=torch.int64),
    lambda: torch.ones(3, dtype=torch.complex64).conj(),
    lambda: torch.ones(4, dtype=torch.bfloat16)[::2],
    lambda: torch.ones(1).expand(10),
    lambda: torch.ones(3, requires_grad=True),
    lambda: torch.ones(3, requires_grad=True) * 2,
    lambda: nn.Parameter(torch.ones(2, 3)),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.eye(3).to_sparse_csr(),
    lambda: torch.ones(3, device="meta"),
    lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: torch.ones(3).as_subclass(Subclass),
    lambda: nn.Parameter.__new__(nn.Parameter),
    lambda: torch.Tensor.__new__(torch.Tensor),
    lambda: torch.ones(3, dtype=torch.float8_e4m3fn),
    lambda: torch.empty(3, 2**40, device="meta"),
    lambda: nn.Linear(2, 2),
    lambda: nn.Module.__new__(nn.Module),
    lambda: without_dict("_parameters", None),
    lambda: without_dict("_parameters", [1]),
    lambda: without_dict("_buffers", 3),
    lambda: _ShardParamInfo(True, -5, 2**62, 0, 1),
    lambda: _ShardParamInfo(None, "a", None, [], {}),
    freed,
]


def infos():
    return (_ShardParamInfo(True, 0, 6, 0, 5), _ShardParamInfo(False, None, None, None, None))


def unit_arguments():
    module = nn.Linear(3, 2)
    other = nn.Linear(3, 2)
    other.bias = module.bias
    return [[(module, "weight", [2, 3], None, 0), (module, "bias", [2], [1], 8)], [(other, "bias", 1)], 10]


def params():
    return [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))]


def segment_arguments(*middle):
    return [[(bytearray(16), 0, 4), (None, 4, 2), (bytearray(8), 6, 2)], *middle, bytearray(32)]


def a_flat():
    return torch.arange(10.0)


# a valid call of each; a callable that is not here gets wild arguments only
VALID = {
    "ModuleParams": unit_arguments,
    "ModuleParams.views": lambda: [a_flat().requires_grad_()],
    "ModuleParams.register_tensors": lambda: [[torch.ones(2, 3), torch.ones(2)], True, False],
    "ModuleParams.register_parameters": lambda: [params(), [nn.Parameter(torch.ones(2))], False],
    "ModuleParams.use_parameters": lambda: [a_flat(), params(), [nn.Parameter(torch.ones(2))], False],
    "ModuleParams.use_unsharded": lambda: [
        a_flat(),
        torch.ones(12),
        [torch.ones(2, 3), torch.ones(2)],
        False,
        True,
        False,
    ],
    "ModuleParams.use_sharded": lambda: [
        a_flat(),
        a_flat()[:6].clone(),
        params(),
        [nn.Parameter(torch.ones(2))],
        infos(),
        False,
    ],
    "ModuleParams.scan": lambda: [params(), a_flat(), a_flat(), infos()],
    "ModuleParams.set_grads": lambda: [a_flat()],
    "ModuleParams.set_grad_pieces": lambda: [params(), torch.ones(6), [False, False], False, infos()],
    "is_plain": lambda: [torch.ones(2), torch.ones(2)],
    "same_storage": lambda: [torch.ones(2), torch.ones(2)],
    "storage_numel": lambda: [torch.ones(2)],
    "allocate": lambda: [torch.empty(0), 0],
    "free": lambda: [torch.ones(8), "freed on purpose"],
    "versions": lambda: [params()],
    "lend": lambda: [torch.ones(2)],
    "lending_exchange": lambda: [torch._C._dlpack_exchange_api()],
    "clear_grads": lambda: [params()],
    "note_accumulator": lambda: [_C.note_accumulator(None, torch.ones(2)), a_flat().requires_grad_()],
    "accumulators": lambda: [_C.note_accumulator(None, torch.ones(2))],
    "grad_summary": lambda: [params()],
    "convert": lambda: [torch.ones(8), torch.ones(8, dtype=torch.bfloat16), True],
    "is_as_defined": lambda: [nn.Linear(2, 3), {"forward": nn.Linear.forward}, ("forward", "extra_repr")],
    "pack": lambda: [*segment_arguments("float32"), "float32", 0, 8],
    "pack_raw": lambda: [*segment_arguments(4), 0, 8],
    "simd_level": lambda: ["baseline"],
    "Layout": lambda: [[5, 1, 7], 3, 4, 16, [1, 1, 7]],
    "Layout.params_in": lambda: [2, 9],
    "Layout.parts": lambda: [2, 9],
    "Layout.shard_range": lambda: [1],
    "Layout.flatten": lambda: [[torch.ones(5), torch.ones(1), torch.ones(7)], 42.0, 3, 9],
    "held": lambda: [infos(), ["weight", "bias"], ((2, 3), (2,))],
    "survey": lambda: [params()],
    "boxes_of_range": lambda: [[3, 4, 5], 7, 44],
}


def exchange(value, source, depth=0):
    """Return the value with one of its parts, at any depth, exchanged for a wild one; lists keep their identity."""
    if (
        isinstance(value, (list, tuple))
        and not isinstance(value, torch.Size)
        and value
        and (depth == 0 or source.random() < 0.75)
    ):
        position = source.randrange(len(value))
        items = value if isinstance(value, list) else list(value)
        part = exchange(items[position], source, depth + 1)
        if source.random() < 0.15:
            part = Changes(items, *(item for item in items if isinstance(item, list)))
        if position < len(items):  # what was exchanged may have emptied the list
            items[position] = part
        if isinstance(value, list):
            return value
        return tuple.__new__(type(value), items)
    return source.choice(WILD)() if depth else value


def arguments(name, source):
    make = VALID.get(name)
    if make is None or source.random() < 0.25:
        return [source.choice(WILD)() for _ in range(source.randrange(6))]
    valid = make()
    for _ in range(source.choice((0, 1, 1, 1, 2, 3))):
        valid = exchange(valid, source)
    if source.random() < 0.05:
        valid = valid[:-1] if source.random() < 0.5 else [*valid, source.choice(WILD)()]
    return valid


def callables():
    """Return the name of everything callable in the extension module: functions, types, methods of their instances."""
    names = []
    for name, value in vars(_C).items():
        if name.startswith("__") or not callable(value):
            continue
        names.append(name)
        if isinstance(value, type) and not issubclass(value, BaseException):
            names += [f"{name}.{method}" for method in vars(value) if not method.startswith("__")]
    return sorted(names)


def target(name, source):
    """Return what to call: for a method, bound to an instance of its type, now and then a freshly made one."""
    owner, _, method = name.partition(".")
    if not method:
        return getattr(_C, owner)
    return getattr(getattr(_C, owner)(*VALID[owner]()), method)


def try_out(name, calls, seed, log):
    """Make the calls; return how many raised. The call that runs is written to ``log`` before it is made."""
    source = random.Random(f"{name} {seed}")
    raised = 0
    for number in range(calls):
        values = arguments(name, source)
        os.pwrite(log, f"{number} {name} {short(values)}"[:1500].encode(errors="replace").ljust(1500), 0)
        try:
            target(name, source)(*values)
        except SystemError as error:
            raise SystemExit(f"SystemError, a broken error return: {error}") from error
        except (Exception, MemoryError):
            raised += 1
        del values
        if number % 200 == 0:
            gc.collect()
    if name in VALID and name != "alloc_fail_at":
        target(name, source)(*VALID[name]())  # still works
    return raised


def short(value):
    """Return a few words for a value, however it behaves when it is looked at."""
    try:
        if type(value) in (list, tuple) and len(value) < 20:
            return "[" + ", ".join("..." if item is value else short(item) for item in value) + "]"
        if isinstance(value, torch.Tensor):
            return f"{type(value).__name__} {list(value.shape)} {value.dtype}"
        plain = type(value) in (int, float, str, bytes, bool, type(None))
        return repr(value)[:40] if plain else type(value).__name__
    except Exception:
        return object.__repr__(value)


def run_in_a_fork(name, calls, seed):
    """Return what became of one callable, tried in a process that may die."""
    with tempfile.TemporaryFile() as log:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            signal.alarm(150)
            size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = 1
            try:
                raised = try_out(name, calls, seed, log.fileno())
                os.pwrite(log.fileno(), f"raised {raised}".encode().ljust(1500), 0)
                code = 0
            except BaseException as error:
                os.pwrite(log.fileno(), f"{type(error).__name__}: {error} after ".encode(errors="replace"), 1500)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        log.seek(0)
        last = " ".join(log.read().decode(errors="replace").replace("\0", "").split())
        return {"name": name, "status": os.waitstatus_to_exitcode(status), "last": last}


def main():
    calls, seed = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.collect()
    gc.freeze()  # the children's many collections look at the arguments only, not at all of torch
    for name in callables():
        print(json.dumps(run_in_a_fork(name, calls, seed)), flush=True)


if __name__ == "__main__":
    main()
