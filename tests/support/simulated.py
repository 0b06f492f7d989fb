"""The device "sim": an accelerator with streams, events and pinned memory, in host memory (simulated_device.cpp)."""

import fcntl
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import gloo
import torch
import torch.distributed as dist

SOURCE = Path(__file__).with_name("simulated_device.cpp")
SHARED = [SOURCE.with_name("boxed.hpp"), *sorted(SOURCE.with_name("sim").glob("*.hpp"))]
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-Wall", "-Wl,--exclude-libs,ALL"]


def build(source=SOURCE, shared=SHARED):
    """Compile the device, or another source, unless that was done before; return the library's path.

    ``shared``: what it includes. A source in C is compiled without torch.
    """
    read = b"".join(path.read_bytes() for path in [source, *shared]) + f"{torch.__version__} {sys.version}".encode()
    key = hashlib.sha1(read).hexdigest()[:12]
    folder = source.parents[2] / "build" / f"{source.stem}-{key}"
    library = folder / f"{source.stem}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits instead of compiling the same
        if not library.exists():
            (_compile_c if source.suffix == ".c" else _compile)(source, library.with_suffix(".part"))
            library.with_suffix(".part").rename(library)
    return library


def _compile(source, library):
    inside = Path(torch.__file__).parent
    headers = [inside / "include", inside / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    subprocess.run(
        [
            *(shlex.split(os.environ.get("CXX", "")) or ["g++"]),
            *FLAGS,
            *(f"-isystem{header}" for header in headers),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(str(source), "-o", str(library)),
            *(f"-L{inside / 'lib'}", f"-Wl,-rpath,{inside / 'lib'}"),
            *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
        ],
        check=True,
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
    )


def _compile_c(source, library):
    compiler = shlex.split(os.environ.get("CC", "")) or ["gcc"]
    flags = ["-std=c11", "-O2", "-g1", "-fPIC", "-shared", "-Wall", "-Wextra", "-pthread"]
    subprocess.run([*compiler, *flags, str(source), "-o", str(library), "-ldl"], check=True)


def use(library, late="others", on_host=None):
    """Have this process use the device; return its module: ``memory()``, ``put_off()``, ...

    ``late``: which streams are, "others" than the one that computes or just the "computing" one; ``on_host``: as in
    ``collectives``.

    A process that has it has an accelerator for good, so only processes of a test's own should.
    """
    torch.utils.rename_privateuse1_backend("sim")
    device = load(library)
    torch._register_device_module("sim", _module(device))
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("simulated", collectives(device, on_host), devices=["sim"])
    dist.Backend.backend_capability["fake"].append("sim")  # as it has the devices that torch knows
    device.late(late)
    gloo.checks.append(device.synchronize)  # which tells of memory that was written to after it was freed
    return device


def load(library):
    spec = importlib.util.spec_from_file_location(Path(library).stem, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def new_group(ranks=None, on_host=False):
    """A process group whose collectives take the device's tensors alone, as NCCL's do. ``on_host``: the host's too."""
    return dist.new_group(ranks, backend=backend(on_host))


def backend(on_host):
    return "cpu:gloo,sim:simulated" if on_host else "sim:simulated"


def collectives(module, on_host=None):
    """What makes a backend of a module's collectives, which are in the end gloo's, or those that ``on_host`` makes."""

    def create(store, rank, size, timeout):
        make = on_host or dist.distributed_c10d.ProcessGroupGloo
        return module.collectives(make(store, rank, size, timeout))

    return create


def _module(device):
    """What torch.cuda is to CUDA."""
    module = types.ModuleType("torch.sim")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = device.count
    module.current_device = device.here
    module.set_device = lambda index: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda index=0: torch.get_rng_state()
    module.set_rng_state = lambda state, index=0: torch.set_rng_state(state)
    module.synchronize = lambda index=None: device.synchronize()
    module.empty_cache = lambda: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.Stream = lambda *args, **kwargs: torch.Stream(torch.device("sim", device.here()))
    module.Event = lambda *args, **kwargs: torch.Event(torch.device("sim", device.here()))
    module.stream = lambda stream: stream
    module.current_stream = lambda index=None: torch.accelerator.current_stream()
    return module
