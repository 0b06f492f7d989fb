"""The kernels as nvcc compiles them, on the host: their PTX is translated to C, behind the launches of fp_kernels.cu.

What is left to a device then is what ptxas makes of PTX, and the device itself.
"""

import ctypes
import os
import shlex
import subprocess
import sys
from pathlib import Path

from .translate import as_c

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def compiled(folder):
    """Compile the kernels into an empty folder; return the files of PTX by architecture, "sm_80". No nvcc: none."""
    run(sys.executable, "setup.py", "--quiet", "cuda_check", "--folder", folder)
    return {ptx.stem.replace("fp_kernels.compute", "sm"): ptx for ptx in folder.glob("*.ptx")}


def library(ptx):
    """The kernels of one architecture, whose PTX is in a file beside the object with the launches, as a library."""
    translated, made = ptx.with_suffix(".c"), ptx.with_suffix(".so")
    translated.write_text(as_c(ptx.read_text()))
    compiler = [*shlex.split(os.environ.get("CC") or "gcc"), "-O1", "-fwrapv", "-fPIC", "-w", "-Werror=implicit"]
    sources = [f"-I{HERE}", f"-I{ROOT / 'csrc'}", translated, HERE / "cudart.c", ptx.with_name("fp_kernels.o")]
    run(*compiler, *sources, "-shared", "-Wl,-Bsymbolic,-z,lazy", "-lm", "-lstdc++", "-o", made)
    return ctypes.CDLL(str(made), mode=os.RTLD_LAZY)  # not all that nvcc refers to is called


def kernels_in(library):
    """The address of its fp_kernels."""
    library.compiled_kernels.restype = ctypes.c_void_p
    return library.compiled_kernels()


def run(*command):
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
