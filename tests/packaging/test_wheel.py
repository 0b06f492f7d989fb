"""One wheel serves several releases of torch: `tools/wheel.py`, and the choice of the extension at import.

The wheel of a small tree is built for torches that are folders with a version, and is imported beside them. The real
wheel is tried with one torch in test_build.py, and with all of them by `.github/workflows/wheels.yml`.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from small_tree import BRIDGE, CORE, PYTHON, ROOT, make_small, replace, run

pytestmark = pytest.mark.multiprocess
MODULE = "import flatparam, flatparam._C as c; from pathlib import Path; print(Path(c.__file__).parent.name, c.FOUR)"


def make_torch(folder, version, cuda=None):
    """Make a package torch that tells its version and has libraries of no content; return the folder to import from."""
    package = folder / f"{version}-{cuda}" / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "version.py").write_text(f"__version__, cuda = {version!r}, {cuda!r}\n")
    (package / "__init__.py").write_text("from . import version\nfrom .version import __version__\n")
    for name in ("c10", "torch", "torch_cpu", "torch_python"):
        subprocess.run(["gcc", "-shared", "-xc", "/dev/null", "-o", package / f"lib/lib{name}.so"], check=True)
    return package.parent


def make_torch_wheel(index, version):
    """Put a torch into a folder in which pip looks for wheels."""
    index.mkdir()
    package, info = make_torch(index, version), f"torch-{version}.dist-info"
    with zipfile.ZipFile(index / f"torch-{version}-py3-none-any.whl", "w") as archive:
        for path in package.rglob("*.*"):
            archive.write(path, path.relative_to(package))
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def python_with(torch, script):
    """Return an interpreter that finds a torch of ours."""
    script.write_text(f'#!/bin/sh\nPYTHONPATH={torch} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel of the small tree for torch 2.12, which pip fetches, and 2.14: (its path, what was printed)."""
    folder, small = tmp_path_factory.mktemp("torches"), make_small(tmp_path_factory.mktemp("tree"))
    make_torch_wheel(folder / "index", "2.12.1")
    python = python_with(make_torch(folder, "2.14.0"), folder / "python")
    (small / "tools").mkdir()
    shutil.copy2(ROOT / "tools/wheel.py", small / "tools")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "index"), "PIP_CONFIG_FILE": os.devnull}
    code, output = run(sys.executable, "tools/wheel.py", "2.12", python, cwd=small, env=offline)
    assert code == 0, output
    [wheel] = (small / "dist").glob("*.whl")
    return wheel, output


@pytest.fixture
def installed(built, tmp_path):
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(tmp_path / "site")
    return tmp_path / "site"


def importing(site, torch, **env):
    """Import the package beside a torch, outside of the tree; return the last line that was printed, and all of it."""
    path = os.pathsep.join(map(str, [torch, site]))
    code, output = run(sys.executable, "-c", MODULE, cwd=site, env={"PYTHONPATH": path, "FLATPARAM_BUILD": "", **env})
    lines = output.splitlines()
    assert (code == 0) == (not lines[-1].startswith("ImportError: ")), output
    return lines[-1], lines


def test_a_wheel_is_built_for_several_torches_and_c_is_compiled_once(built):
    wheel, output = built
    compiled = " ".join(re.findall(r"^compile (.+)$", output, re.MULTILINE)).split()
    assert sorted(compiled) == sorted([CORE, "csrc/core/two.c", PYTHON, BRIDGE, BRIDGE])
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
        archive.extractall(wheel.parent)
    extensions = sorted(name for name in names if "/_C." in name)
    assert [name.split("/")[:3] for name in extensions] == [
        ["flatparam", "_extensions", "torch2.12"],
        ["flatparam", "_extensions", "torch2.14"],
    ]
    for name in extensions:
        assert "no symbols" in subprocess.run(["nm", wheel.parent / name], capture_output=True, text=True).stderr
    assert {"flatparam/_sources/setup.py", f"flatparam/_sources/{BRIDGE}", "flatparam/_sources/csrc/core/one.h"} < names
    assert "flatparam/_build_info.py" not in names
    [needs] = re.findall(r"^Requires-Dist: torch\b(.*)$", metadata, re.MULTILINE)
    assert set(needs.strip(" ()").split(",")) == {">=2.12", "<2.15", "!=2.13.*"}


def test_the_extension_is_taken_by_the_release_of_torch(installed, tmp_path):
    kernels = installed / "flatparam/_extensions/torch2.14+cu13"
    shutil.copytree(kernels.with_name("torch2.14"), kernels)
    for version, cuda, expected in (
        ("2.12.9+cpu", None, "torch2.12 4"),
        ("2.14.1", None, "torch2.14 4"),
        ("2.14.1+cu132", "13.2", "torch2.14+cu13 4"),
        ("2.14.1+cu126", "12.6", "torch2.14 4"),
        ("2.12.1+cu132", "13.2", "torch2.12 4"),
    ):
        assert importing(installed, make_torch(tmp_path, version, cuda))[0] == expected


@pytest.mark.parametrize(
    ("version", "then"),
    [("2.13.0", "set FLATPARAM_BUILD=1 to compile it at the first import"), ("2.16.0", "install another flatparam")],
)
def test_a_torch_that_the_wheel_lacks_is_refused_in_one_line(installed, tmp_path, version, then):
    line, _ = importing(installed, make_torch(tmp_path, version))
    assert line.startswith(
        f"ImportError: flatparam was installed with extensions for torch 2.12, 2.14, but torch {version} is installed: "
        f"install one of these, or {then}"
    )


def test_the_import_compiles_once_where_it_is_asked_to(installed, tmp_path):
    torch, cache = make_torch(tmp_path, "2.13.0"), tmp_path / "cache"
    env = {"PYTHONPATH": f"{torch}:{installed}", "FLATPARAM_BUILD": "1", "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", MODULE]
    settings = {"cwd": installed, "env": os.environ | env, "text": True, "stdout": -1, "stderr": -1}
    both = [subprocess.Popen(command, **settings) for _ in range(2)]
    told = [process.communicate() for process in both]
    python = "{}.{}".format(*sys.version_info[:2])
    assert all(re.fullmatch(rf"torch2\.13\.0-python{python}-\w+ 4\n", out) for out, _ in told), told
    [log] = re.findall(r"compiling the extension, once, into .*; (\S+) tells how far it is", told[0][1] + told[1][1])
    assert Path(log).read_text().startswith("flatparam: 4 files to compile for torch 2.13.0, ")
    assert importing(installed, torch, **env)[1] == [told[0][0].strip()]  # nothing is compiled, nothing is said
    compiler = tmp_path / "gcc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo another compiler || exec gcc "$@"\n')
    compiler.chmod(0o755)
    line, lines = importing(installed, torch, **env, CC=str(compiler))
    assert (len(lines), line == told[0][0].strip()) == (2, False)


def test_an_extension_that_does_not_compile_says_why_in_one_line(installed, tmp_path):
    torch = make_torch(tmp_path, "2.13.0")
    env = {"FLATPARAM_BUILD": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert importing(installed, torch, **env, CC="no-such-compiler")[0] == (
        "ImportError: flatparam needs a C11 and a C++20 compiler; not found: no-such-compiler (set CC to yours); "
        "FLATPARAM_BUILD=1 compiles flatparam's extension"
    )
    replace(installed / "flatparam/_sources" / CORE, "return 1", "return one")
    line, _ = importing(installed, torch, **env)
    log = re.fullmatch(r"ImportError: FLATPARAM_BUILD=1: .* did not compile: error: 1 of 4 .* \((\S+) has all\)", line)
    assert "csrc/core/one.c:2" in Path(log[1]).read_text()
    assert not [path for path in (tmp_path / "cache/flatparam").iterdir() if path.is_dir()]


def test_kernels_get_an_extension_beside_the_one_without(cuda):
    tree, _, env = cuda
    torches = make_torch(tree / "torches", "2.14.0"), make_torch(tree / "torches", "2.15.0")
    env = {**env, "FLATPARAM_TORCHES": os.pathsep.join(str(torch / "torch") for torch in torches)}
    code, output = run(sys.executable, "setup.py", "build_ext", "--build-lib", "lib", cwd=tree, env=env)
    assert code == 0, output
    assert output.count("compile csrc/cuda/kernels.cu") == 1
    assert output.count(f"compile {BRIDGE}") == 2
    modules = {path.parent.name: path.read_bytes() for path in (tree / "lib").rglob("_C.*.so")}
    assert {name: b"fp_kernel" in content for name, content in modules.items()} == {
        **{"torch2.14": False, "torch2.14+cu13": True, "torch2.15": False, "torch2.15+cu13": True}
    }
