"""Run a command on torch's build for CUDA without a GPU: ``python tests/cuda_stand_in COMMAND...``.

The command gets stand-ins for libcudart, libcuda and libnccl, which are built once into ``build/``. torch's own code
for CUDA runs on them: its allocator, streams and events, process groups of NCCL, graphs. A device is memory of the
host, the CPU runs its kernels, and each stream has a thread. Its speed says nothing. It takes torch for CUDA 13 from
wheels, and that toolkit.

STAND_IN_DEVICES  how many there are (2)
STAND_IN_MIB      memory of each (6144)
STAND_IN_DELAY_US streams rest for up to so long before some of their work (0), which shows missing waits
STAND_IN_TRACE=1  tells whenever the host waits for a device
"""

import fcntl
import hashlib
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
import ptx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SUPPORT = ROOT / "tests" / "support"
COMMON = ["-O1", "-fPIC", "-Wall", f"-I{ROOT / 'csrc'}", f"-I{SUPPORT}"]


def main(command):
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    spec = find_spec("torch")
    torch = Path(spec.origin).parent if spec else None
    headers = torch and [toolkit() / "include", torch.parent / "nvidia/nccl/include"]
    for header, what in ((0, "cuda_runtime_api.h"), (1, "nccl.h")):
        if not torch or not (headers[header] / what).exists():
            print(f"cuda_stand_in: no {what}: it takes torch for CUDA 13 and that toolkit", file=sys.stderr)
            return 3
    folder = build(torch, headers)
    libraries = [str(folder / name) for name in ("libcudart.so.13", "libcuda.so.1", "libnccl.so.2")]
    environment = {**os.environ, "STAND_IN_OPERATIONS": str(folder / "operations.so")}
    environment["LD_PRELOAD"] = ":".join([*libraries, *filter(None, [os.environ.get("LD_PRELOAD")])])
    os.execvpe(command[0], command, environment)


def toolkit():
    return Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")


def build(torch, headers):
    """The folder of the libraries."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".c", ".cpp", ".hpp", ".map"))
    shared = [*sorted(ROOT.glob("csrc/c*/*.[hc]*")), *sorted(SUPPORT.glob("ptx/*.*")), SUPPORT / "boxed.hpp"]
    version = (torch / "version.py").read_bytes()
    key = hashlib.sha1(b"".join(path.read_bytes() for path in [*sources, *shared]) + version).hexdigest()[:12]
    folder = ROOT / "build" / f"cuda-stand-in-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "operations.so").exists():
            compile_all(folder, torch, headers)
    return folder


def missing(torch, prefix):
    """The functions with a prefix that torch's libraries link to, and no file here defines."""
    listed = ["nm", "-D", "--undefined-only", *map(str, sorted((torch / "lib").glob("lib*.so")))]
    needed = set(re.findall(rf" U ({prefix}[A-Z]\w+)", subprocess.check_output(listed, text=True)))
    files = "".join(path.read_text() for path in HERE.iterdir() if path.suffix in (".c", ".cpp"))
    return sorted(needed - set(re.findall(rf"^(?:NOTHING\()?({prefix}[A-Z]\w+)[()]", files, re.MULTILINE)))


def compile_all(folder, torch, headers):
    cc, cxx = (shlex.split(os.environ.get(name) or default) for name, default in (("CC", "gcc"), ("CXX", "g++")))
    cxx += ["-std=c++20", *COMMON, *(f"-isystem{header}" for header in headers)]

    def run(*command):
        subprocess.run([str(word) for word in command], check=True)

    def link(name, sources, *options):
        soname = [f"-Wl,-soname,{name}"] if ".so." in name else []
        run(*cxx, "-shared", *sources, *soname, *options, "-lpthread", "-ldl", "-lrt", "-o", folder / name)

    for name, prefix, options in (
        ("missing.o", "(?:__)?cuda", []),
        ("missing_nccl.o", "nccl", ["-DOF_NCCL"]),
        ("missing_driver.o", "cu", ["-DOF_DRIVER"]),
    ):
        each = "-DFOR_EACH_MISSING(do)=" + " ".join(f"do({lacks})" for lacks in missing(torch, prefix))
        run(*cc, *COMMON, *options, each, "-c", HERE / "missing.c", "-o", folder / name)
    driver = [HERE / "driver.c", folder / "missing_driver.o"]
    run(*cc, *COMMON, "-shared", "-Wl,-soname,libcuda.so.1", *driver, "-o", folder / "libcuda.so.1")
    runtime = [HERE / f"{name}.cpp" for name in ("device", "streams", "graphs", "memory", "kernels")]
    compiled = ptx.compiled(folder / "ptx")
    if "sm_90" not in compiled:
        raise SystemExit("cuda_stand_in: no nvcc that compiles for sm_90: it takes the toolkit of CUDA 13")
    for source in ptx.sources(compiled["sm_90"]):
        runtime.append(folder / f"{source.stem}.o")
        run(*cc, *ptx.FLAGS, "-c", source, "-o", runtime[-1])
    versions = f"-Wl,--version-script={HERE / 'libcudart.map'}"
    link("libcudart.so.13", [*runtime, folder / "missing.o"], versions)
    with_runtime = [f"-L{folder}", "-l:libcudart.so.13"]
    link("libnccl.so.2", [HERE / "nccl.cpp", folder / "missing_nccl.o"], *with_runtime)
    torchs = [f"-isystem{torch / 'include' / more}" for more in (".", "torch/csrc/api/include")]
    names = [f"-L{torch / 'lib'}", *(f"-l{name}" for name in ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda"))]
    # last: where it is, all are
    link("operations.part", [HERE / "operations.cpp"], *torchs, *names, *with_runtime)
    (folder / "operations.part").rename(folder / "operations.so")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
