"""The kernels as nvcc compiles them, on the host: their PTX is translated to C, behind the launches of fp_kernels.cu.

Blocks, and the threads between two barriers of one, take turns here; races.c tells where a device might do otherwise.
What is left to a device then is what ptxas makes of PTX.
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
FLAGS = ["-O1", "-fPIC", "-ffp-contract=off", "-fwrapv", "-Werror=implicit", f"-I{HERE}", f"-I{ROOT / 'csrc'}"]


def compiled(folder):
    """Compile the kernels into an empty folder; return the files of PTX by architecture, "sm_80". No nvcc: none."""
    told = run(sys.executable, "setup.py", "--quiet", "cuda_check", "--folder", folder)
    if "no nvcc" in told:
        return {}
    files = {re.search(r"\.target (sm_\d+)", ptx.read_text())[1]: ptx for ptx in folder.glob("*.ptx")}
    assert files, told
    return files


def sources(ptx):
    """The C of one architecture's kernels, whose PTX is in a file, and of their launches; compile it with ``FLAGS``."""
    translated = ptx.with_suffix(".c")
    translated.write_text(as_c(ptx.read_text()))
    return [translated, HERE / "run.c", HERE / "races.c"]


def library(ptx, *others):
    """These kernels as a library, with other sources and objects."""
    made = ptx.with_suffix(".so")
    options = ["-shared", "-Wl,-Bsymbolic,-z,defs", "-lm", "-lstdc++"]
    sanitizers = shlex.split(os.environ.get("FLATPARAM_TEST_CFLAGS", ""))
    run(*compiler(), *FLAGS, *sanitizers, *sources(ptx), *others, *options, "-o", made)
    return ctypes.CDLL(str(made))


def launched(ptx):
    """The address of the fp_kernels with the launches of ``fp_kernels.o``, which is beside the PTX."""
    function = library(ptx, HERE / "cudart.c", ptx.with_name("fp_kernels.o")).compiled_kernels
    function.restype = ctypes.c_void_p
    return function()


def compiler():
    return shlex.split(os.environ.get("CC") or "gcc")


def run(*command):
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CUDA_ARCH_LIST"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
