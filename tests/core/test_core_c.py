"""The C unit tests of the core (tests/c) compile without a warning and pass, plain and under the sanitizers."""

import os
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess  # with the sanitizers of its own

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "tests" / "c").glob("test_*.c"))
SOURCES = sorted((ROOT / "csrc" / "core").glob("*.c"))
COMPILER = shlex.split(os.environ.get("CC", "")) or [shutil.which("gcc") or "cc"]
FLAGS = ["-std=c11", "-g", "-ffp-contract=off", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'c'}"]
STRICT = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wconversion", "-Wshadow", "-Werror"]
SANITIZED = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def run(command, **options):
    """Run a command, by itself: without the libraries that a sanitized run of the tests loads into every process."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def compiles(flags):
    """Whether the compiler can make a program with these flags (not every one comes with the sanitizers' libraries)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*COMPILER, *flags, "-x", "c", "-", "-o", f"{folder}/program"]
        return run(command, input="int main(void) { return 0; }\n").returncode == 0


VARIANTS = {"plain": ["-O2"], "sanitized": SANITIZED}
HAS_SANITIZERS = compiles(SANITIZED)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("plain", marks=[pytest.mark.thorough] * HAS_SANITIZERS),
        *["sanitized"] * HAS_SANITIZERS,
    ],
)
def variant(request, tmp_path_factory):
    """Compile the core once; return the flags and the object files."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = [*COMPILER, *FLAGS, *STRICT, *VARIANTS[request.param]]

    def compile_one(source):
        output = folder / f"{source.stem}.o"
        done = run([*flags, "-c", str(source), "-o", str(output)])
        assert done.returncode == 0, done.stdout
        return str(output)

    with ThreadPoolExecutor(2) as pool:
        return flags, list(pool.map(compile_one, SOURCES))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_c_program(program, variant, tmp_path):
    flags, objects = variant
    executable = tmp_path / program.stem
    done = run([*flags, str(program), *objects, "-lm", "-o", str(executable)])
    assert done.returncode == 0, done.stdout
    done = run([str(executable)], timeout=120)
    assert (done.returncode, done.stdout) == (0, "")


def test_each_failed_check_is_seen(variant, tmp_path):
    flags, objects = variant
    source = tmp_path / "fails.c"
    source.write_text('#include "check.h"\nint main(void) { CHECK_EQ(1, 2); CHECK(0); return check_result(); }\n')
    executable = tmp_path / "fails"
    assert run([*flags, str(source), *objects, "-o", str(executable)]).returncode == 0
    done = run([str(executable)])
    assert done.returncode == 1
    assert "1 is 1, expected 2" in done.stdout
    assert done.stdout.count("fails.c:2:") == 2


def test_every_core_file_has_its_test():
    tested = {path.stem.removeprefix("test_") for path in PROGRAMS}
    helpers = {"simd": "pack", "float": "pack"}  # tested by way of these
    for source in SOURCES:
        name = source.stem.removeprefix("fp_")
        assert helpers.get(name, "pack" if name.startswith("cast_") else name) in tested, source.name


@pytest.mark.sweep(4)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_compiler_s_analyzer_has_nothing_to_say(source):
    analyzer = ["-fanalyzer"] if compiles(["-fanalyzer"]) else ["--analyze"]  # GCC's, else Clang's
    with tempfile.TemporaryDirectory() as folder:
        done = run([*COMPILER, *FLAGS, *STRICT, "-O1", *analyzer, "-c", str(source), "-o", f"{folder}/out.o"])
    assert (done.returncode, done.stdout) == (0, "")
