"""One version: of the package, of its metadata and of the citation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flatparam

ROOT = Path(__file__).resolve().parents[2]


def test_the_package_tells_its_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", flatparam.__version__)
    assert f"\nversion: {flatparam.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {flatparam.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.multiprocess
def test_the_metadata_have_the_same_version_and_every_python():
    command = [sys.executable, "setup.py", "-q", "--version", "--classifiers"]
    version, *classifiers = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    assert version == flatparam.__version__
    minors = {int(name.rpartition(".")[2]) for name in classifiers if re.fullmatch(r".* :: Python :: 3\.\d+", name)}
    assert minors == set(range(10, 15))
    assert "Typing :: Typed" in classifiers
