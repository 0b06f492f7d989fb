"""A small tree that setup.py builds: a few sources in each language; and a toolkit of CUDA that only logs."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE, PYTHON, BRIDGE = "csrc/core/one.c", "csrc/module/module.c", "csrc/tensor/tensors.cpp"
PACKAGE = [f"flatparam/{name}.py" for name in ("_build_check", "_build_here", "_version")]
SMALL_TREE = {
    "csrc/core/one.h": "int fp_one(void);\n",
    "csrc/core/two.h": "#define FP_TWO 2\n",
    "csrc/core/one.c": '#include "core/one.h"\nint fp_one(void) { return 1; }\n',
    "csrc/core/two.c": '#include "core/two.h"\nint fp_two(void);\nint fp_two(void) { return FP_TWO; }\n',
    "csrc/tensor/tensors.h": "int fp_three(void);\n",
    "csrc/tensor/tensors.cpp": 'extern "C" {\n#include "tensor/tensors.h"\n}\n#include "core/two.h"\n'
    "int fp_three(void) { return FP_TWO + 1; }\n",
    "csrc/module/module.c": '#include <Python.h>\n#include "core/one.h"\n#include "tensor/tensors.h"\n'
    'static struct PyModuleDef fp_module = {PyModuleDef_HEAD_INIT, .m_name = "_C"};\n'
    "PyMODINIT_FUNC PyInit__C(void) {\n    PyObject *module = PyModule_Create(&fp_module);\n"
    '    PyModule_AddIntConstant(module, "FOUR", fp_one() + fp_three());\n    return module;\n}\n',
    "flatparam/__init__.py": "from flatparam import _build_check\n__path__ += _build_check.check()\n",
}

NVCC = """#!/bin/sh
case "$*" in
    *--version) echo "Cuda compilation tools, release $RELEASE, V$RELEASE.1" ;;
    *--list-gpu-arch) printf 'compute_80\\ncompute_90\\n' ;;
    *) echo nvcc "$@" >>$LOG
       for word; do case "$last" in -o) out=$word ;; -MF) dep=$word ;; -c) in=$word ;; esac; last=$word; done
       case "$*" in *-Xptxas=-v*) cat $PTXAS; exit ;; esac
       echo "$out : $in csrc/core/one.h" >$dep
       exec gcc -xc -fPIC -Icsrc -c $in -o $out ;;
esac
"""


def make_small(tree):
    """Write the small tree into a folder; return the folder."""
    for name, text in SMALL_TREE.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    for name in ("setup.py", "pyproject.toml", "README.md", *PACKAGE):
        shutil.copy2(ROOT / name, tree / name)
    return tree


def run(*command, cwd, env=None):
    """Run a command to its end; return (exit code, standard output and error together)."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def build(tree, *options, **env):
    """Run build_ext in place; return the set of files that were compiled."""
    code, output = run(sys.executable, "setup.py", "build_ext", "--inplace", *options, cwd=tree, env=env)
    assert code == 0, output
    return compiled_in(output)


def compiled_in(output):
    compiled = " ".join(re.findall(r"^compile (.+)$", output, re.MULTILINE)).split()
    assert len(set(compiled)) == len(compiled)
    return set(compiled)


def later(path):
    """Save a file again, at a time that no file system takes for that of the last build."""
    time.sleep(0.02)
    path.touch()


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
