"""``python -m flatparam doctor``: print what flatparam runs on, and check what it takes from torch's internals.

Exit status: 0; 1 if a check fails. If no extension fits the installed torch, the import of flatparam says so in one
line, before this command begins, and the status is 1 too.
"""

import ast
import os
import platform
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pydoc import locate
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn

from flatparam import _C
from flatparam._version import __version__

USAGE = """usage: python -m flatparam doctor

Print the versions, devices and NCCL, the extension that was loaded and whether it has kernels. Check the names and the
behaviour of torch's internals, and one step of training on one rank. Exit status 1: a check has failed."""
PACKAGE = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Print the report. Returns: the exit status."""
    if arguments:
        print(USAGE, file=sys.stdout if arguments[0] in ("-h", "--help") else sys.stderr)
        return 0 if arguments[0] in ("-h", "--help") else 2
    for name, fact in facts().items():
        print(f"{name:<11}{fact}")
    failed = 0
    for text, check in CHECKS.items():
        problems = problems_of(check)
        failed += bool(problems)
        print(f"{'FAILED' if problems else 'passed':<11}{text}", flush=True)
        for problem in problems:
            print(f"{'':<11}{problem}")
    return int(failed > 0)


def facts() -> dict[str, str]:
    """Return a line for each thing that flatparam runs on."""
    return {
        "flatparam": f"{__version__}, {PACKAGE}",
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "torch": f"{torch.__version__}, {Path(torch.__file__).parent}",
        "device": device(),
        "NCCL": nccl(),
        "extension": extension(),
        "kernels": kernels(),
    }


def device() -> str:
    """Return the devices that torch finds."""
    if not torch.cuda.is_available():
        return f"CPU, {torch.get_num_threads()} threads"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}: {', '.join(names)}"


def nccl() -> str:
    """Return the release of NCCL."""
    if not dist.is_nccl_available():
        return "none: this torch is built without it"
    return ".".join(map(str, torch.cuda.nccl.version()))


def extension() -> str:
    """Return the file of the extension that was loaded, and its origin."""
    file = Path(_C.__file__)
    if file.parent == PACKAGE:
        return f"{file}: built in place, or installed for this torch alone"
    return f"{file}: {'of the wheel' if PACKAGE in file.parents else 'compiled here, by FLATPARAM_BUILD=1'}"


def kernels() -> str:
    """Return whether the extension has kernels, and if not, why it needs none or how to get them."""
    if b"libcudart.so" in Path(_C.__file__).read_bytes():
        return "in the extension"
    if torch.version.cuda is None:
        return "none: this torch is built for the CPU"
    return "none: torch's operations do their work; build flatparam where nvcc is (docs/gpu.md)"


def problems_of(check: Callable[[], list[str]]) -> list[str]:
    """Return a line for each problem that ``check`` finds; an exception is one too."""
    try:
        return check()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def private_names() -> list[str]:
    """Return the names that ``common/torch_private.py`` imports and this torch lacks."""
    missing = []
    for node in ast.walk(ast.parse((PACKAGE / "common" / "torch_private.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and str(node.module).startswith("torch"):
            module = import_module(str(node.module))
            missing += [f"{node.module}.{name.name}" for name in node.names if not hasattr(module, name.name)]
    return missing


def replaced_names() -> list[str]:
    """Return the functions of torch that flatparam replaces while it is in use, and that this torch lacks."""
    for name in ("flatparam._api", "flatparam.checkpoint", "flatparam.layer_zero", "flatparam.installing"):
        import_module(name)
    from ..common.patches import replaced

    return [target for target in replaced() if target[:5] == "torch" and locate(target.replace(":", ".")) is None]


def handle_names() -> list[str]:
    """Return the names of torch's handle that flatparam's lacks."""
    from ..common.torch_private import torch_flat_param
    from ..dropin import flat_param, install

    return install.missing_names(torch_flat_param, flat_param)


def handle_behaviour() -> list[str]:
    """Return the settings in which torch's handle and flatparam's give different results on a tiny module."""
    from ..dropin import install
    from ..dropin.base import TORCH_HANDLE
    from ..dropin.handle import FlatParamHandle

    return install.differences(FlatParamHandle, TORCH_HANDLE)


def step() -> list[str]:
    """Return the parameters that differ from an unsharded module's after a step of the runtime on one rank."""
    from flatparam import FullyShardedDataParallel, ShardingStrategy

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            plain, inner = (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)) for _ in range(2))
            inner.load_state_dict(plain.state_dict())
            wrapped = FullyShardedDataParallel(inner, sharding_strategy=ShardingStrategy.NO_SHARD)
            for model in (plain, wrapped):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                model(torch.arange(8.0).view(2, 4)).sum().backward()
                optimizer.step()
            found = wrapped.state_dict()
            return [name for name, value in plain.state_dict().items() if not torch.equal(found[name], value)]
        finally:
            dist.destroy_process_group()


CHECKS = {
    "torch has all private names that flatparam imports": private_names,
    "torch has all functions that flatparam replaces": replaced_names,
    "torch's handle has no name that flatparam's lacks": handle_names,
    "torch's handle and flatparam's agree on a tiny module": handle_behaviour,
    "a step of the runtime on one rank equals the unsharded module's": step,
}
