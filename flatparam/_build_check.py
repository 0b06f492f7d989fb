"""Whether flatparam can be built and imported here: the platform, torch, and the compiled extension.

``check()`` runs when the package is imported, before the extension is loaded: loading one that was built against
another torch would crash or, worse, read fields at wrong offsets. ``setup.py`` runs this file by its path, where no
torch and no package may be importable, so it imports the standard library only.
"""

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

MIN_TORCH = (2, 11)
MAX_TORCH = (2, 15)  # the newest that is known to work; a newer one's handle may have what ours has not
MACHINES = ("x86_64", "aarch64")
EXTENSIONS, SOURCES = "_extensions", "_sources"  # folders of the package, in a wheel for several torches


def release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version, such as ``2.13.0+cpu`` or ``2.14.0a0+git1234567``."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"not a version: {version!r}")
    return int(match[1]), int(match[2])


def platform_problem(system: str, machine: str, bits: int) -> str | None:
    """Say in one line why this platform is not supported, or return None. ``system`` is that of ``sys.platform``."""
    if system == "linux" and machine in MACHINES and bits == 64:
        return None
    return f"flatparam runs on 64-bit Linux on {' or '.join(MACHINES)}; this is {bits}-bit {system} on {machine}"


def torch_problem(version: str | None) -> str | None:
    """Say in one line why flatparam cannot be built against this torch (None: not installed), or return None."""
    wanted, newest = (".".join(map(str, bound)) for bound in (MIN_TORCH, MAX_TORCH))
    then = "then: pip install --no-build-isolation ."
    if version is None:
        return (
            f"flatparam compiles against the installed torch and found none: install torch >= {wanted}, {then} "
            "(without that option pip builds apart from what is installed, where no torch ever is)"
        )
    if release(version) < MIN_TORCH:
        return f"flatparam needs torch >= {wanted}, found {version}: install a newer torch, {then}"
    if release(version) > MAX_TORCH:
        return (
            f"flatparam knows torch {wanted} to {newest}, found {version}: take a newer flatparam, or install "
            f'"torch=={newest}.*", {then}'
        )
    return None


def torch_requirement(versions: Iterable[str]) -> str:
    """Return the requirement of a distribution: the minor releases that it was built with, as its extensions need them.

    ``versions``: of torch; none: a distribution of sources, which can be built with each torch that works.
    """
    built = {release(version) for version in versions}
    if len(built) == 1:
        return "torch=={}.{}.*".format(*built.pop())
    (major, first), (_, last) = (min(built), max(built)) if built else (MIN_TORCH, MAX_TORCH)
    missing = [f"!={major}.{minor}.*" for minor in range(first, last) if built and (major, minor) not in built]
    return ",".join([f"torch>={major}.{first}", f"<{major}.{last + 1}", *missing])


def extension_name(version: str, cuda: str | None) -> str:
    """Return the folder, in ``EXTENSIONS``, of the extension for a torch. ``cuda``: its kernels' release, or None."""
    kernels = "" if cuda is None else f"+cu{cuda.partition('.')[0]}"
    return "torch{}.{}".format(*release(version)) + kernels


def wheel_problem(torch_version: str, there: Iterable[str]) -> str:
    """Say in one line that none of the extensions in a wheel, with these names of folders, fits the installed torch."""
    listed = sorted({release(name.removeprefix("torch")) for name in there})
    then = "set FLATPARAM_BUILD=1 to compile it at the first import (takes a C and a C++ compiler and Python's headers)"
    if torch_problem(torch_version) is not None:
        then = "install another flatparam"
    return (
        f"flatparam was installed with extensions for torch {', '.join('{}.{}'.format(*one) for one in listed)}, but "
        f"torch {torch_version} is installed: install one of these, or {then}"
    )


def import_problem(torch_version: str | None, built_against: str | None, built_here: bool) -> str | None:
    """Say in one line why the extension must not be loaded, or return None.

    Args: ``torch_version``: of the installed torch, None if there is none; ``built_against``: the torch that the
    extension was compiled with, None if it was never compiled; ``built_here``: it was compiled for this Python.
    """
    if torch_version is None:
        return "flatparam needs torch, and none is installed in this Python"
    if built_against is None or not built_here:
        python = ".".join(map(str, sys.version_info[:2]))
        return (
            f"flatparam's extension is not built for Python {python}: run `make build` in the source tree, "
            "or `pip install --no-build-isolation .`"
        )
    if release(torch_version) != release(built_against):
        return (
            f"flatparam was built against torch {built_against}, but torch {torch_version} is installed: build it "
            "again with `make build`, or `pip install --no-build-isolation --force-reinstall --no-deps .`"
        )
    return None


def this_platform() -> tuple[str, str, int]:
    """Return the arguments of platform_problem for the running interpreter."""
    return sys.platform, platform.machine(), 64 if sys.maxsize > 2**32 else 32


def check() -> list[str]:
    """Return the folders, beside the package's own, in which the extension lies; [] if it lies in the package.

    Imports torch, whose libraries the extension needs. Raises: ImportError, in one line, if none can be loaded.
    """
    package = Path(__file__).parent
    problem = platform_problem(*this_platform())
    version = _installed_torch() if problem is None else None
    built = {path.parent for suffix in EXTENSION_SUFFIXES for path in package.glob(f"{EXTENSIONS}/*/_C{suffix}")}
    if version is not None and built:
        return [str(_chosen(package, {path.name for path in built}, version))]
    if problem is None:
        built_here = any((package / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
        problem = import_problem(version, _built_against(), built_here)
    if problem is not None:
        raise ImportError(problem)
    return []


def _chosen(package: Path, built: set[str], version: str) -> Path:
    """Return the folder of the extension to load, of those in a wheel, or one that is compiled now."""
    import torch

    if os.environ.get("FLATPARAM_BUILD") == "1":
        from flatparam import _build_here

        return _build_here.folder(package / SOURCES, Path(torch.__path__[0]), version)
    for cuda in (torch.version.cuda, None):  # kernels are left out where there is no nvcc
        if (name := extension_name(version, cuda)) in built:
            return package / EXTENSIONS / name
    raise ImportError(wheel_problem(version, built))


def _installed_torch() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return str(torch.__version__)


def _built_against() -> str | None:
    try:
        from flatparam._build_info import TORCH_VERSION
    except ModuleNotFoundError:
        return None
    return TORCH_VERSION
