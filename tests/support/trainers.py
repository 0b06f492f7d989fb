"""What the tests of trainers share: the class that is under torch's name, and what a trainer wants on a CPU.

The oracles are torch's own class, and, where a trainer saves, torch's class with flatparam's handle: torch's own handle
ends the process when it saves on a CPU.
"""

import contextlib
import functools
import importlib.util
import itertools
import os
import pathlib
import sys
import tempfile
import time
import types

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Model
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.optimizer import register_optimizer_step_post_hook

import flatparam
from flatparam.common.torch_private import TorchsFSDP

KINDS = ("torch", "dropin", "runtime")


class Wider(Model):
    """Every parameter has a row for each rank: torch's distributed checkpoint loads no other, of neither class."""

    def __init__(self, blocks=3):
        super().__init__(width=6, blocks=blocks)
        self.last = nn.Linear(6, 2, bias=False)


def needs(package):
    """Skip the tests of a file where a trainer is not installed. It is not imported, which takes seconds."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make integrations", allow_module_level=True)
    if importlib.util.find_spec("torchvision") is not None:
        _import_torchvision()


@contextlib.contextmanager
def under(kind):
    """Have torch's name of the class mean torch's own, torch's on flatparam's handle, or flatparam's runtime."""
    if kind != "torch":
        flatparam.install(runtime=kind == "runtime")
    init = TorchsFSDP.__init__
    TorchsFSDP.__init__ = _on_the_cpu(init)
    try:
        yield
    finally:
        TorchsFSDP.__init__ = init
        flatparam.uninstall()


def _on_the_cpu(init):
    """torch's class takes the CPU for a device only where it is named."""

    @functools.wraps(init)
    def __init__(self, *args, device_id=None, **kwargs):
        init(self, *args, device_id=torch.device("cpu") if device_id is None else device_id, **kwargs)

    return __init__


@contextlib.contextmanager
def seconds_of_steps():
    """Yield a list of seconds of this thread on a processor, each between two steps of an optimizer, whoever asks."""
    ends, seconds = [], []
    hook = register_optimizer_step_post_hook(lambda *ignored: ends.append(time.thread_time()))
    try:
        yield seconds
    finally:
        hook.remove()
        seconds += [later - earlier for earlier, later in itertools.pairwise(ends)]


def look_like_torchrun():
    """Set what torchrun sets for a process. Trainers look for it; the process group is there already."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def tell_accelerate_of_an_accelerator():
    """Have accelerate take gloo ranks on the CPU for ranks on accelerators: it shards on no others.

    It asks for the device of each kind by name, so the CPU is one of a kind (`torch.musa`) that nobody else here has.
    """
    import accelerate.utils.dataclasses
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    look_like_torchrun()
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    torch.musa = types.SimpleNamespace(current_device=lambda: torch.device("cpu"))
    accelerate.utils.dataclasses.is_musa_available = lambda: True
    PartialState._prepare_backend = lambda self, *args: ("gloo", DistributedType.MULTI_GPU)
    AcceleratorState._reset_state(True)


def _import_torchvision():
    """Import torchvision, which trainers import, also where it is built for CUDA and torch for the CPU.

    Its operators do not load then, and it fails where it describes two of them, which no test calls.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float threshold) -> Tensor")
        importlib.import_module("torchvision").library = library  # which takes its operators with it when it goes


def same_files(folder, expected, but=()):
    """Fail unless two folders have files of the same names, ``but`` some, which hold the same values."""
    folders = [pathlib.Path(path) for path in (folder, expected)]
    names = [[path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file()] for root in folders]
    assert names[0] == names[1]
    assert names[0]
    for name in names[0]:
        files = [root / name for root in folders]
        if name.name == ".metadata":
            contents = [_of_distributed(file.parent) for file in files]
        elif name.suffix in (".bin", ".pt", ".ckpt") and name.name not in but:
            contents = [torch.load(file, weights_only=True) for file in files]
        elif name.suffix != ".distcp" and name.name not in but:
            assert files[0].read_bytes() == files[1].read_bytes(), name
            continue
        else:
            continue
        same(*contents, str(name))


def same(value, expected, where=""):
    """Fail unless two values of dicts, lists and tensors are the same, bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert value.dtype == expected.dtype, where
        assert torch.equal(value, expected), where
    elif isinstance(expected, dict):
        assert set(value) == set(expected), where
        for key in expected:
            same(value[key], expected[key], f"{where} {key}")
    elif isinstance(expected, list | tuple):
        assert len(value) == len(expected), where
        for i, pair in enumerate(zip(value, expected, strict=True)):
            same(*pair, f"{where} {i}")
    elif isinstance(expected, str):
        assert value == expected.replace("dropin", "runtime"), where  # names of folders
    else:
        assert value == expected, where


def _of_distributed(folder):
    """All that a distributed checkpoint of torch holds."""
    with tempfile.NamedTemporaryFile() as whole:
        dcp_to_torch_save(folder, whole.name)
        return torch.load(whole.name, weights_only=True)
