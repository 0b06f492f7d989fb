"""tools/environment.py finds the Python of a make target: the one given if it has torch, else .venv; it says what it
installs, and with nothing to install it needs no network."""

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "environment.py"
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}

spec = importlib.util.spec_from_file_location("environment", SCRIPT)
environment = importlib.util.module_from_spec(spec)
spec.loader.exec_module(environment)


def run(python, tree, *groups):
    """Run the script of a tree without network; return (exit code, standard output, lines of standard error)."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | OFFLINE
    command = [str(python), str(tree / "tools" / "environment.py"), *groups]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.fixture
def tree(tmp_path):
    """A tree with the script, and with a group of packages that no index has."""
    for name in ("tools/environment.py", "flatparam/_build_check.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / "pyproject.toml").write_text(
        'here = ["pytest>=1"]\ntest = ["pytest>=1", "flatparam-no-such-package>=2"]\n'
    )
    return tmp_path


@pytest.fixture
def python_without_torch(tmp_path):
    venv.create(tmp_path / "bare", symlinks=True)
    return tmp_path / "bare" / "bin" / "python"


@pytest.mark.multiprocess
def test_an_interpreter_with_torch_is_used_as_it_is(tree):
    assert run(sys.executable, tree, "build", "here") == (0, f"{sys.executable}\n", [])
    assert not (tree / ".venv").exists()


@pytest.mark.multiprocess
def test_what_is_lacking_is_said_before_it_is_installed(tree):
    code, out, lines = run(sys.executable, tree, "build", "test")
    assert code != 0
    assert out == ""
    assert lines[0].startswith(f"flatparam: installing into {sys.prefix} ")
    assert lines[0].endswith(": flatparam-no-such-package>=2")  # and not pytest, which is there
    assert lines[-1].startswith("flatparam: could not install flatparam-no-such-package>=2 into")


@pytest.mark.multiprocess
def test_without_torch_a_venv_is_made_and_the_download_announced(tree, python_without_torch):
    code, out, lines = run(python_without_torch, tree, "build")
    assert code != 0  # there is no network in this test
    assert out == ""
    assert lines[0].startswith(f"flatparam: creating {tree}/.venv with Python 3.")
    [announced] = [line for line in lines if line.startswith("flatparam: installing into")]
    assert f"into {tree}/.venv" in announced
    assert "torch==2.13.0" in announced
    assert any("several GB where the index's default is a CUDA build" in line for line in lines)
    assert lines[-1].startswith("flatparam: could not install torch==2.13.0")
    again = run(python_without_torch, tree, "build")[2]
    assert not [line for line in again if "creating" in line]


@pytest.mark.multiprocess
def test_a_venv_of_another_python_is_not_used(tree, python_without_torch):
    (tree / ".venv" / "bin").mkdir(parents=True)
    (tree / ".venv" / "bin" / "python").symlink_to(python_without_torch)
    (tree / ".venv" / "lib" / "python3.2").mkdir(parents=True)
    code, out, lines = run(python_without_torch, tree, "build")
    assert code != 0
    assert out == ""
    assert len(lines) == 1
    assert "is not of Python 3." in lines[0]


@pytest.mark.parametrize(
    ("requirement", "met"),
    [
        ("pytest", True),
        ("pytest>=1", True),
        (f"pytest>={pytest.__version__}", True),
        ("pytest>=999", False),
        (f"pytest=={pytest.__version__}", True),
        ("pytest==0.1", False),
        ("flatparam-no-such-package", False),
        ("torch>=2.11", True),  # "2.13.0+cpu": what follows the plus is no part of the order
    ],
)
def test_requirements(requirement, met):
    assert environment.is_met(requirement) == met


def test_the_groups_of_the_project_can_be_read():
    declared = (ROOT / "pyproject.toml").read_text()
    for group in ("demo", "test", "lint", "docs", "coverage", "upstream", "integrations"):
        found = environment.requirements(group)
        assert found
        assert all(f'"{requirement}"' in declared for requirement in found)
        assert all(environment.is_met(requirement) in (True, False) for requirement in found)
    with pytest.raises(SystemExit, match="no group 'tset'"):
        environment.requirements("tset")
