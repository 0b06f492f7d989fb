"""One version: of the package, of its metadata and of the citation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flatparam
from flatparam.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def test_the_package_tells_its_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", flatparam.__version__)
    assert f"\nversion: {flatparam.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {flatparam.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_command_tells_it(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"flatparam {flatparam.__version__}\n"


@pytest.mark.multiprocess
def test_the_metadata_have_the_same_version_and_every_python():
    command = [sys.executable, "setup.py", "-q", "--version", "--classifiers"]
    version, *classifiers = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    assert version == flatparam.__version__
    minors = {int(name.rpartition(".")[2]) for name in classifiers if re.fullmatch(r".* :: Python :: 3\.\d+", name)}
    assert minors == set(range(10, 15))
    assert "Typing :: Typed" in classifiers


@pytest.mark.multiprocess
@pytest.mark.parametrize("url", ["", "https://example.org/flatparam/"])
def test_the_metadata_have_the_addresses_that_the_publisher_gives(url, tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "FLATPARAM_URL": url}, capture_output=True)
    [metadata] = tmp_path.glob("*/PKG-INFO")
    said = dict(re.findall(r"^Project-URL: (\w+), (\S+)$", metadata.read_text(), re.MULTILINE))
    assert set(said) == ({"Source", "Issues", "Changelog", "Documentation"} if url else set())
    _, _, description = metadata.read_text().partition("\n\n")
    for mark, address in re.findall(r"(!?)\[[^]]*\]\(([^)]*)\)", description):
        said[f"in the description: {address}"] = address
        assert url == "" or f"/{'raw' if mark else 'blob'}/v{flatparam.__version__}/" in address
    assert len(said) > 20
    for address in said.values():
        path = address
        if url:
            assert re.fullmatch(r"https://example\.org/flatparam(/issues|/(blob|raw)/v[\d.]+/(\S+))?", address)
            path = address.partition(f"/v{flatparam.__version__}/")[2]
        assert (ROOT / path.partition("#")[0]).exists()
