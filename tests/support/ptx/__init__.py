"""The kernels as nvcc compiles them, on the host: their PTX is translated to C, behind the launches of fp_kernels.cu.

What is left to a device then is what ptxas makes of PTX, and what happens at the same time: blocks, and the threads
between two barriers of one, take turns here.
"""

import ctypes
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from .translate import as_c

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def compiled(folder):
    """Compile the kernels into an empty folder; return the files of PTX by architecture, "sm_80". No nvcc: none."""
    told = run(sys.executable, "setup.py", "--quiet", "cuda_check", "--folder", folder)
    if "no nvcc" in told:
        return {}
    files = {re.search(r"\.target (sm_\d+)", ptx.read_text())[1]: ptx for ptx in folder.glob("*.ptx")}
    assert files, told
    return files


def library(ptx):
    """The kernels of one architecture, whose PTX is in a file beside the object with the launches, as a library."""
    translated, made = ptx.with_suffix(".c"), ptx.with_suffix(".so")
    translated.write_text(as_c(ptx.read_text()))
    return loaded(made, translated, HERE / "cudart.c", ptx.with_name("fp_kernels.o"), "-lstdc++")


def loaded(made, *sources):
    compiler = [*shlex.split(os.environ.get("CC") or "gcc"), "-O1", "-ffp-contract=off", "-fwrapv", "-Werror=implicit"]
    flags = ["-fPIC", "-shared", "-Wl,-Bsymbolic,-z,defs", f"-I{HERE}", f"-I{ROOT / 'csrc'}"]
    run(*compiler, *flags, *sources, "-lm", "-o", made)
    return ctypes.CDLL(str(made))


def kernels_in(library):
    """The address of its fp_kernels."""
    library.compiled_kernels.restype = ctypes.c_void_p
    return library.compiled_kernels()


def run(*command):
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CUDA_ARCH_LIST"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
