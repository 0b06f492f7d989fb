"""Find or make the Python environment for a make target, and print its interpreter's path as the only standard output.

Usage: python tools/environment.py GROUP...    GROUP: build, or an extra of pyproject.toml

The interpreter that runs this file is used as it is if it has a torch that flatparam can be built against; otherwise
.venv is (made from it when missing). What the groups need and the environment lacks is installed with pip, after saying
so; when nothing is lacking, no network is touched and this takes a tenth of a second. Standard library only.
"""

import ast
import importlib
import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = "{}.{}".format(*sys.version_info[:2])
TORCH_TO_INSTALL = "torch==2.13.0"
BUILD_NEEDS = ["setuptools>=65"]  # to build in place; to make a wheel takes a newer one
TORCH_NOTE = (
    "torch is the large part: about 0.2 GB as a CPU build, several GB where the index's default is a CUDA build.\n"
    "To get the CPU build there, stop this, set PIP_EXTRA_INDEX_URL to the CPU index that the install page of PyTorch\n"
    "names, and run make again."
)


def say(text):
    print(f"flatparam: {text}", file=sys.stderr, flush=True)


def run(*command):
    """Run a command with its output on standard error; return whether it succeeded."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode == 0


def numbers(version):
    """Return the leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"[0-9.]*[0-9]", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def is_met(requirement):
    """Tell whether an installed package meets ``name``, ``name>=version`` or ``name==version``."""
    name, relation, wanted = re.split(r"(>=|==|$)", requirement, maxsplit=1)
    try:
        found = numbers(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False
    return found == numbers(wanted) if relation == "==" else found >= numbers(wanted)


def requirements(group):
    """Return what a group needs, as pyproject.toml says (read without tomllib, which Python 3.10 has not)."""
    if group == "build":
        return BUILD_NEEDS
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    array = re.search(rf"^{group} = (\[[^\]]*\])", text, re.MULTILINE)
    if array is None:
        raise SystemExit(f"flatparam: pyproject.toml has no group {group!r}")
    return ast.literal_eval(array[1])


def has_torch():
    """Tell whether this interpreter has a torch that flatparam can be built against, without importing it."""
    if importlib.util.find_spec("torch") is None:
        return False
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return runpy.run_path(str(ROOT / "flatparam" / "_build_check.py"))["torch_problem"](version) is None


def continue_in_venv(arguments):
    """Run this file again with .venv's interpreter, made first if it is missing."""
    python = VENV / "bin" / "python"
    if not python.exists():
        say(f"creating {VENV} with Python {PYTHON} ({sys.executable})")
        if not run(sys.executable, "-m", "venv", str(VENV)):
            shutil.rmtree(VENV, ignore_errors=True)
            raise SystemExit("flatparam: could not create .venv (on Debian and Ubuntu: apt install python3-venv)")
    elif not list(VENV.glob(f"lib*/python{PYTHON}")):
        raise SystemExit(f"flatparam: {VENV} is not of Python {PYTHON}: remove it, or name another PYTHON=")
    os.execv(python, [str(python), __file__, *arguments])


def install(missing):
    """Install requirements into this interpreter's environment, or end with one line."""
    say(f"installing into {sys.prefix} from your package index: {', '.join(missing)}")
    if TORCH_TO_INSTALL in missing:
        say(TORCH_NOTE)
    if importlib.util.find_spec("pip") is None and not run(sys.executable, "-m", "ensurepip"):
        raise SystemExit(f"flatparam: {sys.executable} has no pip to install {', '.join(missing)} with")
    kept = [f"torch=={importlib.metadata.version('torch')}"] if has_torch() else []  # what comes with others fits it
    if not run(sys.executable, "-m", "pip", "install", *missing, *kept):
        raise SystemExit(f"flatparam: could not install {', '.join(missing)} into {sys.prefix} (see above)")


def main(groups):
    if sys.version_info < (3, 10):  # noqa: UP036 - this file is what says so
        raise SystemExit(f"flatparam: Python 3.10 or newer is needed, {sys.executable} is {PYTHON}")
    if not has_torch() and Path(sys.prefix).resolve() != VENV.resolve():
        continue_in_venv(groups)
    missing = [] if has_torch() else [TORCH_TO_INSTALL]
    missing += [need for group in groups for need in requirements(group) if not is_met(need)]
    if missing:
        install(missing)
    print(sys.executable)


if __name__ == "__main__":
    main(sys.argv[1:])
