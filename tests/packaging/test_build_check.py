"""Unsupported systems and releases of torch are refused in one line with the remedy, and nothing is built."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from flatparam import _build_check

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = [f"flatparam/{name}.py" for name in ("__init__", "_build_check", "_build_here", "_version")]


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.13.0+cpu", (2, 13)), ("2.11.0+cu130", (2, 11)), ("2.14.0a0+git1234567", (2, 14)), ("3.0", (3, 0))],
)
def test_release_of_a_version(version, expected):
    assert _build_check.release(version) == expected


@pytest.mark.parametrize(
    ("system", "machine", "bits", "works"),
    [
        ("linux", "x86_64", 64, True),
        ("linux", "aarch64", 64, True),
        ("linux", "x86_64", 32, False),
        ("linux", "riscv64", 64, False),
        ("darwin", "arm64", 64, False),
        ("win32", "AMD64", 64, False),
    ],
)
def test_platforms(system, machine, bits, works):
    problem = _build_check.platform_problem(system, machine, bits)
    assert (problem is None) == works
    if problem is not None:
        assert f"{bits}-bit {system} on {machine}" in problem
        assert "\n" not in problem


@pytest.mark.parametrize(
    ("version", "words"),
    [
        *(("2.11.0", None), ("2.15.0+cu132", None), ("2.15.9", None), ("2.10.1", "found 2.10.1")),
        *(("2.16.0", "found 2.16.0"), ("3.0.1", "found 3.0.1"), ("1.13", "found 1.13"), (None, "found none")),
    ],
)
def test_torch_to_build_against(version, words):
    problem = _build_check.torch_problem(version)
    assert (problem is None) == (words is None)
    if words is not None:
        assert words in problem
        assert "torch >= 2.11" in problem or "torch 2.11 to 2.15" in problem
        assert "pip install --no-build-isolation ." in problem
        assert "\n" not in problem


@pytest.mark.parametrize(
    ("installed", "built_against", "built_here", "words"),
    [
        ("2.13.0+cpu", "2.13.0+cpu", True, None),
        ("2.13.1+cu130", "2.13.0+cpu", True, None),  # a patch release keeps the ABI
        ("2.11.0", "2.13.0+cpu", True, "built against torch 2.13.0+cpu, but torch 2.11.0 is installed"),
        ("2.14.0a0+git12", "2.13.0", True, "built against torch 2.13.0, but torch 2.14.0a0+git12 is installed"),
        ("3.13.0", "2.13.0", True, "torch 3.13.0"),
        ("2.13.0", None, True, "not built for Python"),
        ("2.13.0", "2.13.0", False, "not built for Python"),
        (None, "2.13.0", True, "none is installed"),
    ],
)
def test_what_the_import_refuses(installed, built_against, built_here, words):
    problem = _build_check.import_problem(installed, built_against, built_here)
    assert (problem is None) == (words is None)
    if words is not None:
        assert words in problem
        assert "\n" not in problem


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (["2.13.0+cpu"], "torch==2.13.*"),
        (["2.15.1"], "torch==2.15.*"),
        ([], "torch>=2.11,<2.16"),
        (["2.11.0", "2.13.1+cpu", "2.12.0"], "torch>=2.11,<2.14"),
        (["2.15.0", "2.11.0"], "torch>=2.11,<2.16,!=2.12.*,!=2.13.*,!=2.14.*"),
    ],
)
def test_what_a_distribution_needs(versions, expected):
    assert _build_check.torch_requirement(versions) == expected


@pytest.mark.multiprocess
def test_a_wheel_says_which_torch_it_was_built_with(tmp_path):
    """So that pip does not leave it beside a torch in which it cannot be loaded; sources say what they work with."""
    installed = ".".join(map(str, _build_check.release(str(torch.__version__))))
    for command, expected in (("dist_info", f"torch=={installed}.*"), ("egg_info", "torch<2.16,>=2.11")):
        tree = tmp_path / command
        tree.mkdir()
        shutil.copytree(ROOT / "csrc", tree / "csrc")
        shutil.copytree(ROOT / "flatparam", tree / "flatparam", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for name in ("setup.py", "pyproject.toml", "README.md"):
            shutil.copy2(ROOT / name, tree / name)
        done = subprocess.run([sys.executable, "setup.py", "-q", command], cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        [metadata] = [*tree.glob("*.dist-info/METADATA"), *tree.glob("*.egg-info/PKG-INFO")]
        needs = re.findall(r"^Requires-Dist: (torch\b.*)$", metadata.read_text(), re.MULTILINE)
        assert [need.replace("(", "").replace(")", "").replace("torch ", "torch") for need in needs] == [expected]


def importing(package_parent, **env):
    """Import flatparam from a folder in a new process; return the last line that it printed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*env.pop("first", []), package_parent])), **env}
    done = subprocess.run(
        [sys.executable, "-c", "import flatparam; print('imported')"],
        cwd=package_parent,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout.splitlines()[-1]


@pytest.fixture
def package(tmp_path):
    """A copy of the package, its extension replaced by bytes that no loader takes."""
    copy = tmp_path / "copy" / "flatparam"
    shutil.copytree(ROOT / "flatparam", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for module in copy.glob("_C.*.so"):
        module.write_bytes(b"not a library")
    return copy


@pytest.mark.multiprocess
def test_another_torch_is_refused_before_the_extension_is_loaded(package, tmp_path):
    torch = tmp_path / "other" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("__version__ = '2.999.0'\n")
    line = importing(package.parent, first=[tmp_path / "other"])
    assert re.match(r"ImportError: flatparam was built against torch \S+, but torch 2\.999\.0 is installed: ", line)


@pytest.mark.multiprocess
def test_a_package_that_was_never_built_says_how_to(package):
    for module in package.glob("_C.*.so"):
        module.unlink()
    line = importing(package.parent)
    assert line.startswith("ImportError: flatparam's extension is not built for Python 3.")
    assert "make build" in line


@pytest.fixture
def bare_python(tmp_path):
    """A virtual environment that sees pip, setuptools and nothing else: (its interpreter, its folder of packages)."""
    venv.create(tmp_path / "venv", symlinks=True)
    site = tmp_path / "site"
    site.mkdir()
    for name in ("pip", "setuptools", "_distutils_hack"):
        package = Path(importlib.util.find_spec(name).origin).parent
        for path in [package, *package.parent.glob(f"{name}-*.*-info")]:
            (site / path.name).symlink_to(path)
    return tmp_path / "venv" / "bin" / "python", site


def run_in_a_new_tree(bare_python, tmp_path, *command):
    """Run the interpreter in a copy of the sources; return (exit code, standard output and error together)."""
    python, site = bare_python
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    (tree / "flatparam").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", *PACKAGE):
        shutil.copy2(ROOT / name, tree / name)
    env = {**os.environ, "PYTHONPATH": str(site), "PIP_NO_INDEX": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        [str(python), *command], cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


NO_TORCH = (
    "flatparam compiles against the installed torch and found none: install torch >= 2.11, "
    "then: pip install --no-build-isolation . (without that option pip builds apart from what is installed, where no "
    "torch ever is)"
)


PIP_INSTALL = ("-m", "pip", "install", "--no-build-isolation", ".")


@pytest.mark.multiprocess
def test_pip_install_without_torch_says_so_in_one_line_and_fetches_nothing(bare_python, tmp_path):
    code, output = run_in_a_new_tree(bare_python, tmp_path, *PIP_INSTALL)
    assert code != 0
    assert "[1 lines of output]" in output
    assert output.count(NO_TORCH) == 1
    assert "No matching distribution" not in output  # it did not get as far as looking for torch


@pytest.mark.multiprocess
def test_setup_without_torch_says_so_in_one_line(bare_python, tmp_path):
    code, output = run_in_a_new_tree(bare_python, tmp_path, "setup.py", "build_ext", "--inplace")
    assert code != 0
    assert output == NO_TORCH + "\n"
