"""The files that are compiled, their flags, and when they are compiled again. Most tests build a small tree."""

import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from small_tree import BRIDGE, CORE, PYTHON, build, compiled_in, later, replace, run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = (".py", ".md", ".ipynb")
LEFT_OUT = ("asan", "sanitize-*", "torches", "wheel", "*.pyc")  # when the tree is copied
GUIDES = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md")
pytestmark = pytest.mark.multiprocess


@pytest.fixture
def logged(tmp_path_factory):
    """Compilers that write down their arguments: returns (environment that names them, function that reads them)."""
    folder = tmp_path_factory.mktemp("compilers")
    log = folder / "log"
    for name in ("gcc", "g++"):
        script = folder / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" >>{log}\nexec {shutil.which(name)} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def commands():
        """Return the arguments of every compilation since the last call, by source file."""
        lines = [line.split() for line in log.read_text().splitlines()]
        log.write_text("")
        return {line[line.index("-c") + 1]: line for line in lines if "-c" in line}

    return {"CC": str(folder / "gcc"), "CXX": str(folder / "g++")}, commands


def included_by(header, sources):
    """Return which of the sources include a header, directly or not: our own reading, not the compiler's."""

    def included(path):
        names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
        places = (folder / name for name in names for folder in (path.parent, ROOT / "csrc"))
        return {place for place in places if place.is_file()}

    def reaches(path, seen):
        for place in included(path) - seen:
            seen.add(place)
            reaches(place, seen)
        return seen

    return {source for source in sources if ROOT / "csrc" / header in reaches(ROOT / source, set())}


def copy_of_the_project(target):
    """Copy what a build needs, compiled objects included, with the files' times; compile what is not up to date."""
    for name in ("csrc", "flatparam", "build"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "Makefile", *GUIDES):
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, target / name)
    for name in ("docs", "tests", "tools", "benchmarks", "examples"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    build(target, "--strict")
    return target


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return copy_of_the_project(tmp_path_factory.mktemp("build") / "project")


def test_the_project_compiles_only_what_changed(project):
    files = [*(ROOT / "csrc").rglob("*.c*"), *(ROOT / "tests/c/testing").glob("*.c")]
    sources = {str(path.relative_to(ROOT)) for path in files if path.suffix in (".c", ".cpp")}
    assert build(project, "--strict") == set()
    later(project / "csrc/module/fp_module.c")
    assert build(project, "--strict") == {"csrc/module/fp_module.c"}
    later(project / "csrc/python/fp_args.h")
    expected = included_by("python/fp_args.h", sources)
    assert 1 < len(expected) < len(sources)
    assert build(project, "--strict") == expected
    assert build(project, "--strict") == set()


def test_a_header_of_one_language_compiles_its_readers_in_all(small):
    assert build(small) == {CORE, "csrc/core/two.c", PYTHON, BRIDGE}
    assert build(small) == set()
    later(small / "csrc/core/two.h")
    assert build(small) == {"csrc/core/two.c", BRIDGE}
    later(small / "csrc/core/one.c")
    assert build(small) == {CORE}


def test_lines_tell_what_is_compiled_and_how_far_it_is(small, tmp_path):
    compiler = tmp_path / "slow"
    compiler.write_text('#!/bin/sh\ncase "$*" in *" -c "*) sleep 1 ;; esac\nexec gcc "$@"\n')
    compiler.chmod(0o755)
    replace(small / "setup.py", "HEARTBEAT = 10", "HEARTBEAT = 0.2")
    command = (sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--parallel=1")
    lines = run(*command, cwd=small, env={"CC": str(compiler)})[1].splitlines()
    if torch.version.cuda is not None:  # the first line tells whether nvcc is there
        del lines[0]
    first = (
        f"flatparam: 4 files to compile for torch {torch.__version__}, 1 at a time; a first build takes 1 to 2 minutes"
    )
    assert lines[0] == first
    told = [re.fullmatch(r"flatparam: (\d) of 4 files compiled in \d+ s", line) for line in lines]
    compiled = [int(line[1]) for line in told if line]
    assert sorted(compiled) == compiled
    assert {1, 2, 3} <= set(compiled) <= {0, 1, 2, 3}  # each compiler of a C file takes longer than five heartbeats
    assert len(lines) == 1 + 4 + len(compiled) + 1  # "compile" for each file, then "link"
    status, lines = run(*command, cwd=small, env={"CC": str(compiler)})
    assert (status, "compile" in lines) == (0, False)


def test_cpp_files_are_compiled_as_two_that_include_the_others(small):
    names = [f"csrc/tensor/more{i}.cpp" for i in range(3)]
    for i, name in enumerate(names):
        (small / name).write_text(f'#include "core/two.h"\nint fp_more{i}();\nint fp_more{i}() {{ return {i}; }}\n')
    assert build(small) == {CORE, "csrc/core/two.c", PYTHON, BRIDGE, *names}
    later(small / names[0])
    assert build(small) == {names[0], names[2]}
    later(small / BRIDGE)
    assert build(small) == {names[1], BRIDGE}
    (small / names[0]).unlink()
    assert build(small) == {names[2]}
    assert build(small) == set()


@pytest.mark.thorough
def test_the_module_has_what_was_compiled_last(small):
    def four():
        code = "import torch, flatparam._C as c; print(c.FOUR)"
        return run(sys.executable, "-c", code, cwd=small)[1].strip()

    build(small)
    assert four() == "4"
    replace(small / CORE, "return 1", "return 10")
    assert build(small) == {CORE}
    assert four() == "13"
    build(small, "--strict")  # other objects, put in the same place
    replace(small / CORE, "return 10", "return 1")
    build(small)
    assert four() == "4"


def test_a_file_saved_while_it_is_compiled_is_compiled_again(small, tmp_path_factory):
    compiler = tmp_path_factory.mktemp("compiler") / "gcc"
    compiler.write_text(
        f'#!/bin/sh\n{shutil.which("gcc")} "$@" && case "$*" in *core/one.c*) touch csrc/core/one.c; esac\n'
    )
    compiler.chmod(0o755)
    build(small, CC=str(compiler))
    assert build(small, CC=str(compiler)) == {CORE}


def test_other_flags_and_another_compiler_compile_again(small, logged):
    everything, every_c = {CORE, "csrc/core/two.c", PYTHON, BRIDGE}, {CORE, "csrc/core/two.c", PYTHON}
    gcc = {"CC": "gcc", "CXX": "g++"}
    assert build(small, **gcc) == everything
    assert build(small, **gcc, CFLAGS="-O1") == every_c
    assert build(small, **gcc, CFLAGS="-O1") == set()
    assert build(small, **{**gcc, "CC": logged[0]["CC"]}) == every_c
    assert build(small, "--strict", **gcc) == everything
    assert build(small, "--strict", **gcc) == set()


def test_each_language_has_its_own_flags(small, logged):
    env, commands = logged
    build(small, "--strict", CFLAGS="-ffast-math", **env)
    strict = commands()
    assert set(strict) == {CORE, "csrc/core/two.c", PYTHON, BRIDGE}
    warnings = {"-Wall", "-Wextra", "-Wno-unused-parameter", "-Wconversion", "-Wshadow", "-Werror"}
    for source, command in strict.items():
        language, compiler = ("c11", "gcc") if source.endswith(".c") else ("c++20", "g++")
        assert command[0] == compiler
        assert [word for word in command if word.startswith("-std=")] == [f"-std={language}"]
        assert warnings < set(command)
        assert not [word for word in command if word.startswith(("-march", "-mtune"))]
        assert command.count(source) == 1  # one file a command
        included = [Path(folder) for word, folder in itertools.pairwise(command) if word == "-isystem"]
        assert any((folder / "Python.h").is_file() for folder in included) == ("/core/" not in source)
        assert any((folder / "ATen/ATen.h").is_file() for folder in included) == (source == BRIDGE)
        assert [word for word in command if word.startswith("-I")] == ["-Icsrc"]
        # what makes the arithmetic exact comes last, so that CFLAGS cannot take it back
        assert max(i for i, word in enumerate(command) if "fast-math" in word) == command.index("-fno-fast-math")
        assert "-ffp-contract=off" in command
    build(small, **env)
    assert not any(set(command) & warnings for command in commands().values())


@pytest.mark.parametrize("source", [CORE, PYTHON, BRIDGE])
def test_a_warning_is_an_error_in_development_only(small, source):
    with (small / source).open("a") as file:
        file.write("short fp_narrow(int);\nshort fp_narrow(int wide) { return wide; }\n")
    code, output = run(sys.executable, "setup.py", "build_ext", "--inplace", "--strict", cwd=small)
    assert code != 0
    assert re.search(r"\[-Werror[=,]\S*conversion\]", output)  # GCC's words, and Clang's
    assert "error: 1 of 4 files did not compile" in output.splitlines()[-1]
    assert source in build(small)


def test_a_file_that_failed_is_compiled_again_alone(small):
    replace(small / CORE, "return 1;", "return one;")
    code, output = run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=small)
    assert code != 0
    assert "csrc/core/one.c:2" in output
    replace(small / CORE, "return one;", "return 1;")
    assert build(small) == {CORE}


def test_a_removed_source_leaves_the_module(small):
    build(small)
    replace(small / PYTHON, "fp_one() + fp_three()", "4")
    (small / CORE).unlink()
    assert build(small) == {PYTHON}
    symbols = subprocess.check_output(["nm", *map(str, (small / "flatparam").glob("_C.*.so"))], text=True)
    assert "fp_two" in symbols
    assert "fp_one" not in symbols


def test_torch_is_linked_for_the_bridge_only(small):
    def needed():
        [module] = (small / "flatparam").glob("_C.*.so")
        headers = subprocess.check_output(["objdump", "-p", str(module)], text=True)
        return set(re.findall(r"NEEDED +(\S+)", headers)), "RUNPATH" in headers or "RPATH" in headers

    replace(small / BRIDGE, 'extern "C"', '#include <ATen/core/Tensor.h>\n\nextern "C"')
    replace(small / BRIDGE, "return", "at::Tensor tensor;\n    tensor.detach();\n    return")
    build(small)
    libraries, has_path = needed()
    assert {"libc10.so", "libtorch_cpu.so"} <= libraries
    assert not has_path  # found by name, since torch is imported first: the module can be moved with its Python

    shutil.rmtree(small / "csrc/tensor")
    replace(small / PYTHON, '#include "tensor/tensors.h"\n', "")
    replace(small / PYTHON, "fp_three()", "3")
    assert build(small) == {PYTHON}
    assert not [name for name in needed()[0] if "torch" in name or "c10" in name]


def test_a_libstdcxx_that_is_linked_statically_is_the_modules_own(small):
    replace(small / BRIDGE, 'extern "C"', '#include <sstream>\n\nextern "C"')
    replace(small / BRIDGE, "return", 'int read = 0;\n    std::istringstream("4") >> read;\n    return read +')
    build(small, LDFLAGS="-static-libstdc++")
    [module] = (small / "flatparam").glob("_C.*.so")
    for shown, has_facets in (["--defined-only"], True), (["--dynamic", "--defined-only"], False):
        assert ("_ZNSt7num_get" in subprocess.check_output(["nm", *shown, str(module)], text=True)) is has_facets


def test_the_sanitizer_build_is_apart(small):
    build(small)
    [module] = (small / "flatparam").glob("_C.*.so")
    before = module.read_bytes()
    code, output = run(sys.executable, "setup.py", "build_ext", "--sanitize", "--build-lib", "build/asan", cwd=small)
    assert code == 0, output
    assert module.read_bytes() == before
    assert b"__asan_init" not in before
    assert b"__asan_init" in (small / "build/asan/flatparam" / module.name).read_bytes()
    assert build(small) == set()


PTXAS = """ptxas info    : Compiling entry function '_ZN1_4packIL8fp_dtype1ELm0EEEv' for 'sm_80'
ptxas info    : Function properties for x
    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""


def test_kernels_are_compiled_where_torch_has_cuda(cuda, logged):
    tree, toolkit, env = cuda
    env = {**env, **logged[0]}
    everything = {CORE, "csrc/core/two.c", PYTHON, BRIDGE}
    assert build(tree, "--strict", **env) == {*everything, "csrc/cuda/kernels.cu"}
    [command] = (toolkit / "log").read_text().splitlines()
    words = command.split()
    assert {"-fmad=false", "-Icsrc", "-Werror=all-warnings"} < set(words)
    codes = [word.rpartition("code=")[2] for word in words if "code=" in word]
    assert codes == ["sm_80", "sm_90", "compute_90"]  # what this nvcc knows, and the last as PTX
    [module] = (tree / "flatparam").glob("_C.*.so")
    assert "fp_kernel" in subprocess.check_output(["nm", str(module)], text=True)
    assert build(tree, "--strict", **env) == set()
    later(tree / CORE.replace(".c", ".h"))
    assert build(tree, "--strict", **env) == {"csrc/cuda/kernels.cu", CORE, PYTHON}
    assert build(tree, "--strict", **env, TORCH_CUDA_ARCH_LIST="7.5 9.0a 12.0+PTX") == {"csrc/cuda/kernels.cu"}
    assert "code=sm_90a" in (toolkit / "log").read_text()
    assert "_75" not in (toolkit / "log").read_text()  # older than what the kernels need, as lists for others have it
    assert "code=compute_120" in (toolkit / "log").read_text()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "kernels by "),
        ({"FLATPARAM_CUDA": "0"}, "left out, as FLATPARAM_CUDA=0 asks for"),
        (
            {"CUDA_HOME": "/nowhere"},
            "no nvcc in CUDA_HOME, in CUDA_PATH, on PATH or in /usr/local/cuda: kernels",
        ),
        ({"RELEASE": "12.9"}, "torch is built for CUDA 13.0, "),
        ({"TORCH_CUDA_ARCH_LIST": "7.0"}, None),
        ({"TORCH_CUDA_ARCH_LIST": "Hopper"}, None),
    ],
)
def test_one_line_says_what_becomes_of_the_kernels(cuda, changes, line):
    tree, _, env = cuda
    code, output = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tree, env={**env, **changes})
    if line is None:  # an architecture that is none
        assert code != 0
        assert f'expected 8.0 or newer, such as "8.0;9.0+PTX", got {changes["TORCH_CUDA_ARCH_LIST"]}' in output
        return
    assert code == 0, output
    assert len([found for found in output.splitlines() if found.startswith(f"flatparam: CUDA: {line}")]) == 1, output
    assert ("csrc/cuda/kernels.cu" in compiled_in(output)) == (not changes)


def test_a_toolkit_in_the_usual_place_is_found(cuda):
    tree, toolkit, env = cuda
    replace(tree / "flatparam/_build_here.py", 'CUDA_FOLDER = "/usr/local/cuda"', f'CUDA_FOLDER = "{toolkit}"')
    tools = {Path(shutil.which(name)).parent for name in ("gcc", "g++", "ld")}
    assert not [folder for folder in tools if (folder / "nvcc").exists()]
    env = {**env, "CUDA_HOME": "", "CUDA_PATH": "", "PATH": os.pathsep.join(map(str, tools))}
    code, output = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tree, env=env)
    assert code == 0, output
    assert f"flatparam: CUDA: kernels by {toolkit}/bin/nvcc" in output


def test_cuda_check_fails_for_what_is_not_in_registers(cuda):
    tree, toolkit, env = cuda
    told = toolkit / "ptxas"
    for in_memory in ((0, 0, 0), (16, 0, 0), (8, 16, 0), (8, 0, 16)):
        told.write_text(PTXAS.format(*in_memory))
        code, output = run(sys.executable, "setup.py", "-q", "cuda_check", cwd=tree, env={**env, "PTXAS": str(told)})
        assert (code != 0) == any(in_memory), output
        assert f"sm_80 40 ({max(in_memory)})" in output
    code, output = run(sys.executable, "setup.py", "-q", "cuda_check", cwd=tree, env={**env, "CUDA_HOME": "/nowhere"})
    assert code == 0
    assert output.splitlines() == [
        "cuda-check: no nvcc in CUDA_HOME, in CUDA_PATH, on PATH or in /usr/local/cuda: nothing was compiled"
    ]


def test_a_missing_compiler_is_named_in_one_line(small):
    code, output = run(sys.executable, "setup.py", "-q", "build_ext", cwd=small, env={"CC": "no-such-compiler"})
    assert code != 0
    assert output.splitlines() == [
        "error: flatparam needs a C11 and a C++20 compiler; not found: no-such-compiler (set CC to yours)"
    ]


def test_the_sdist_has_every_source_and_builds_from_itself(project, tmp_path):
    code, output = run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path), cwd=project)
    assert code == 0, output
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        tar.extractall(tmp_path)
    wanted = {str(path.relative_to(project)) for path in (project / "csrc").rglob("*") if path.is_file()}
    wanted |= {str(path.relative_to(project)) for path in (project / "tests").rglob("*") if path.is_file()}
    wanted |= {str(path.relative_to(project)) for path in (project / "docs").rglob("*") if path.is_file()} | {*GUIDES}
    wanted |= {str(path.relative_to(project)) for path in (project / "examples").rglob("*") if path.suffix in EXAMPLES}
    wanted |= {"setup.py", "pyproject.toml", "LICENSE", "README.md", "flatparam/_C.pyi", "flatparam/py.typed"}
    assert wanted <= names
    assert not [name for name in names if name.endswith((".so", ".o", "_build_info.py"))]
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    shutil.copytree(project / "build", unpacked / "build")  # a missing header would make its readers compile, and fail
    assert build(unpacked, "--strict") == set()
    assert list((unpacked / "flatparam").glob("_C.*.so"))


@pytest.fixture(scope="module")
def wheel(project, tmp_path_factory):
    """The wheel for the installed torch alone: (its size, its extension in the archive, the folder to import from)."""
    code, output = run(sys.executable, "tools/wheel.py", sys.executable, cwd=project)
    assert code == 0, output
    assert compiled_in(output) == set()  # these objects are those of `make build`
    [path] = (project / "dist").glob("*.whl")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(site)
        extension = min(
            (info for info in archive.infolist() if "/_C.c" in info.filename), key=lambda one: one.file_size
        )
    return path.stat().st_size, extension, site


def test_a_wheel_for_five_torches_has_at_most_5_mb_for_the_cpu(wheel):
    size, extension, _ = wheel
    assert size + 4 * extension.compress_size <= 5e6
    assert extension.file_size <= 1.5e6


def test_a_wheel_needs_no_compiler_and_the_import_takes_less_than_60_ms_over_torch(wheel):
    env = {"PYTHONPATH": str(wheel[2]), "PATH": "/nowhere"}
    code, output = run(sys.executable, "-m", "flatparam", "doctor", cwd=wheel[2], env=env)
    assert code == 0, output
    assert f"\nextension  {wheel[2]}/flatparam/_extensions/torch" in output
    code = "import torch, time; begin = time.process_time(); import flatparam; print(time.process_time() - begin)"
    took = [float(run(sys.executable, "-c", code, cwd=wheel[2], env=env)[1]) for _ in range(3)]
    assert min(took) < 0.06


@pytest.mark.thorough
def test_a_model_trains_by_a_wheel_on_one_and_two_ranks(wheel):
    env = {"PYTHONPATH": str(wheel[2]), "PATH": "/nowhere"}
    code, output = run(sys.executable, str(ROOT / "tests/packaging/wheel_ranks.py"), cwd=wheel[2], env=env)
    assert code == 0, output
    assert "1 and 2 ranks: equal" in output


def test_an_installation_has_the_types_and_every_module_and_no_other_package(project, tmp_path):
    code, output = run(sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path), cwd=project)
    assert code == 0, output
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "flatparam").rglob("*.py")}
    assert wanted | {"flatparam/py.typed", "flatparam/_C.pyi"} <= there
    assert {name.split("/")[0] for name in there} == {"flatparam"}
