"""Whether flatparam can be built and imported here: the platform, torch, and the compiled extension.

``check()`` runs when the package is imported, before the extension is loaded: loading one that was built against
another torch would crash or, worse, read fields at wrong offsets. ``setup.py`` runs this file by its path, where no
torch and no package may be importable, so it imports the standard library only.
"""

import importlib.util
import platform
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

MIN_TORCH = (2, 11)
MAX_TORCH = (2, 15)  # the newest that is known to work; a newer one's handle may have what ours has not
MACHINES = ("x86_64", "aarch64")


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


def torch_requirement(version: str | None) -> str:
    """Return the requirement of a distribution: the minor release that it was built with, as its extension needs it.

    ``version``: of torch; None: a distribution of sources, which can be built with each torch that works.
    """
    if version is None:
        return f"torch>={'.'.join(map(str, MIN_TORCH))},<{MAX_TORCH[0]}.{MAX_TORCH[1] + 1}"
    return "torch=={}.{}.*".format(*release(version))


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


def check() -> None:
    """Raise ImportError, in one line, unless the extension can be loaded. Imports torch, whose libraries it needs."""
    problem = platform_problem(*this_platform())
    if problem is None:
        built_here = any((Path(__file__).parent / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
        problem = import_problem(_installed_torch(), _built_against(), built_here)
    if problem is not None:
        raise ImportError(problem)


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
