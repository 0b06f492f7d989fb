"""Compile the extension at the first import, where FLATPARAM_BUILD=1 asks for it; and find compilers.

A wheel of `make wheel` carries the sources of the extension. ``folder()`` compiles them with this machine's compilers
for the installed torch and keeps the extension in the user's cache, in a folder for each torch, Python, compiler and
set of flags. One process of a machine compiles; the others wait for it, and raise its error if it fails. ``setup.py``
runs this file by its path, so it imports the standard library only.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

COMPILERS = ("CC", ["gcc", "cc", "clang"]), ("CXX", ["g++", "c++", "clang++"])
CUDA_FOLDER = "/usr/local/cuda"
# Of the environment, beside the compilers': a change of these compiles anew.
SETTINGS = ("CFLAGS", "CXXFLAGS", "LDFLAGS", "TORCH_CUDA_ARCH_LIST", "FLATPARAM_CUDA")
COPIED = ("_build_check.py", "_build_here.py", "_version.py")  # what setup.py reads of the package


def find_compiler(variable: str, names: list[str]) -> list[str]:
    """Return the command of the compiler that the environment names, else of the first one installed."""
    command = shlex.split(os.environ.get(variable, ""))
    for candidate in [command] if command else [[name] for name in names]:
        if shutil.which(candidate[0]) is not None:
            return candidate
    tried = command[0] if command else ", ".join(names)
    raise OSError(f"flatparam needs a C11 and a C++20 compiler; not found: {tried} (set {variable} to yours)")


def compiler_version(command: list[str]) -> str:
    """Return the line in which a compiler tells its name and version."""
    return subprocess.check_output([*command, "--version"], text=True).partition("\n")[0]


def find_nvcc() -> str | None:
    """Return the path of nvcc: in the toolkit that the environment names, else on PATH, else where CUDA is installed.

    None: there is none.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = None if named else shutil.which("nvcc")
    return on_path or shutil.which("nvcc", path=str(Path(named or CUDA_FOLDER, "bin")))


def nvcc_release(nvcc: str) -> str:
    """Return the release of a toolkit, such as 13.0."""
    found = re.search(r"release (\d+\.\d+)", subprocess.check_output([nvcc, "--version"], text=True))
    return found[1] if found is not None else "unknown"


def folder(sources: Path, torch_folder: Path, torch_version: str) -> Path:
    """Return the folder of the extension for the installed torch; compile it if it is missing.

    Args: ``sources``: has ``setup.py`` and ``csrc``; ``torch_folder``: has ``version.py`` and ``include``.
    Raises: ImportError if it cannot be compiled. A log of the compilers is kept then.
    """
    began = time.time()
    try:
        key = "\n".join(_key(sources, torch_folder))
    except OSError as error:
        raise ImportError(f"{error}; FLATPARAM_BUILD=1 compiles flatparam's extension") from None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flatparam")
    python = "{}.{}".format(*sys.version_info[:2])
    kept = cache / f"torch{torch_version}-python{python}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if kept.is_dir():
        return kept
    import fcntl

    cache.mkdir(parents=True, exist_ok=True)
    with open(kept.with_name(kept.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, or the process ends
        log = kept.with_name(kept.name + ".log")
        if not kept.is_dir():
            if not (log.is_file() and log.stat().st_mtime > began):  # else another process has failed since
                _compile(sources, torch_folder, kept, log)
            if not kept.is_dir():
                words = (log.read_text().strip().splitlines() or ["nothing was printed"])[-1]
                raise ImportError(f"FLATPARAM_BUILD=1: flatparam's extension did not compile: {words} ({log} has all)")
    return kept


def _key(sources: Path, torch_folder: Path) -> Iterator[str]:
    """Yield all that the extension depends on."""
    yield from (
        sys.version,
        (torch_folder / "version.py").read_text(),
        *(os.environ.get(name, "") for name in SETTINGS),
    )
    for names in COMPILERS:
        command = find_compiler(*names)
        yield from (shlex.join(command), compiler_version(command))
    nvcc = find_nvcc()
    yield from () if nvcc is None else (nvcc, nvcc_release(nvcc))
    for file in sorted(path for path in sources.rglob("*") if path.is_file()):
        yield from (str(file.relative_to(sources)), hashlib.sha256(file.read_bytes()).hexdigest())


def _compile(sources: Path, torch_folder: Path, kept: Path, log: Path) -> None:
    """Compile in a copy of the sources, and put the extension into the folder ``kept``, complete or not at all."""
    about = f"flatparam: compiling the extension, once, into {kept}: 1 to 2 minutes; {log} tells how far it is"
    print(about, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as name:
        tree = Path(name, "tree")
        shutil.copytree(sources, tree)
        (tree / "flatparam").mkdir()
        for copied in COPIED:
            shutil.copy2(Path(__file__).with_name(copied), tree / "flatparam")
        path = os.pathsep.join(filter(None, [str(torch_folder.parent), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "FLATPARAM_TORCHES": ""}
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        with log.open("w") as output:
            status = subprocess.run(command, cwd=tree, env=env, stdout=output, stderr=subprocess.STDOUT).returncode
        if status == 0:
            built = Path(name, "built")
            built.mkdir()
            for module in (tree / "flatparam").glob("_C.*"):
                module.rename(built / module.name)
            built.rename(kept)
