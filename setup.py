"""Compile flatparam._C: C11 and C++20 sources side by side, each with its own flags, only what changed, in parallel.

A compiler needs 25 s for torch's headers whatever it compiles with them, so the C++ files are compiled as two: the
first of each half includes the others. That takes 80 s of processor time, not 400. Names in them are therefore unique.

C files include no header of torch: their objects, and nvcc's, serve every torch.

torch's BuildExtension compiles C as C++ and gives one set of flags to all sources, so this file has a build_ext of its
own. Its options beside the usual ones:
    --strict     warnings are errors (what `make build` uses; an installation never does)
    --sanitize   AddressSanitizer and UndefinedBehaviorSanitizer (what `make asan` uses)
    --checks     assertions of the runtime's invariants (what `make check-build` uses)
Environment: CC, CXX, CFLAGS, CXXFLAGS, LDFLAGS; FLATPARAM_URL, the project's address, for a release's metadata.
Where torch is built for CUDA, also CUDA_HOME, CUDA_PATH, TORCH_CUDA_ARCH_LIST; FLATPARAM_CUDA=0: no kernels.
FLATPARAM_TORCHES, the folders of several torches, joined by colons (what `make wheel` uses): an extension for each,
without symbols, in flatparam/_extensions, a second one with kernels where there can be, the sources in _sources.
Objects are kept under build_temp, a folder for each set of options.
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import setuptools
from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError, PlatformError

CHECKS = runpy.run_path("flatparam/_build_check.py")
HERE = runpy.run_path("flatparam/_build_here.py")
find_compiler, find_nvcc, nvcc_release = HERE["find_compiler"], HERE["find_nvcc"], HERE["nvcc_release"]

# The commands that need torch; pip runs dist_info before it downloads what flatparam depends on. Not sdist, egg_info.
WHEEL = {"bdist_wheel", "dist_info", "editable_wheel"}
NEEDS_TORCH = {"build", "build_ext", "develop", "install", *WHEEL}

C_FLAGS = ["-std=c11", "-O3"]
# All torches that work have the new ABI of std::string; some compilers of Red Hat choose the old one.
CXX_FLAGS = ["-std=c++20", "-O2", "-fvisibility-inlines-hidden", "-D_GLIBCXX_USE_CXX11_ABI=1"]
# Behind CFLAGS: results equal torch's bit for bit, so no fused multiply-add and no relaxed arithmetic.
FLAGS = ["-fPIC", "-pthread", "-g1", "-fvisibility=hidden", "-DNDEBUG", "-Icsrc", "-ffp-contract=off", "-fno-fast-math"]
STRICT = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wconversion", "-Wshadow", "-Werror"]
SANITIZE = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
# As exact as FLAGS. nvcc gives what is behind -Xcompiler to the host's compiler.
NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fmad=false",
    "-Icsrc",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-DNDEBUG",
    "--threads=0",
]
NVCC_STRICT = ["-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra"]
CUDA_FOLDER = HERE["CUDA_FOLDER"]
CUDA_ARCHS = ["8.0", "9.0", "10.0"]  # and the last as PTX, for what comes later
HEARTBEAT = 10  # seconds from one line to the next while compilers run
TORCH_LIBRARIES = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
BUILD_INFO = '''"""Written by setup.py: what the extension was built against."""

TORCH_VERSION = "{}"
'''


def sources(testing: bool = False) -> list[str]:
    """Return the files to compile, the slowest (C++) first; ``testing``: with what tests need and nobody else."""
    folders = [
        "csrc/tensor/*.cpp",
        "csrc/desync/*.cpp",
        "csrc/runtime/*.c",
        "csrc/python/*.c",
        "csrc/module/*.c",
        "csrc/core/*.c",
        *(["tests/c/testing/*.c"] * testing),
    ]
    return [str(path) for pattern in folders for path in sorted(Path().glob(pattern))]


def say(line: str) -> None:
    """Print a line in one write: threads share the output, and under pip it is no terminal."""
    print(f"{line}\n", end="", flush=True)


class Torch(NamedTuple):
    """An installed torch: its folder, its release, and the release of CUDA that it is built for, None if for none."""

    folder: Path
    version: str
    cuda: str | None


def read_torch(folder: Path) -> Torch:
    """Read about a torch without importing it, which takes seconds."""
    names = runpy.run_path(str(folder / "version.py"))
    return Torch(folder, str(names["__version__"]), names.get("cuda"))


def torches() -> list[Torch]:
    """Return the torches to build for: those of FLATPARAM_TORCHES, else the installed one, if there is one."""
    folders = [Path(folder) for folder in os.environ.get("FLATPARAM_TORCHES", "").split(os.pathsep) if folder]
    spec = None if folders else find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        folders = [Path(spec.submodule_search_locations[0])]
    return [read_torch(folder) for folder in folders]


def gencode(nvcc: str) -> list[str]:
    """Return nvcc's options for the architectures in TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX"), else for CUDA_ARCHS.

    Older ones than 8.0 are left out, unless there are no others: a list is often made for other packages too.
    """
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not archs:
        known = subprocess.check_output([nvcc, "--list-gpu-arch"], text=True).split()
        archs = [arch for arch in CUDA_ARCHS if f"compute_{arch.replace('.', '')}" in known]
        archs[-1:] = [f"{arch}+PTX" for arch in archs[-1:]]
    options, found = [], [re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", arch) for arch in archs]
    wanted = [match for match in found if match is not None and int(match[1]) >= 8]
    if not wanted or None in found:
        listed = " ".join(archs)
        raise PlatformError(f'TORCH_CUDA_ARCH_LIST: expected 8.0 or newer, such as "8.0;9.0+PTX", got {listed}')
    for match in wanted:
        number = match[1] + match[2]
        options += [
            f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in ("sm", *["compute"] * bool(match[3]))
        ]
    return options


def cuda_library(nvcc: str, torch: Torch) -> str | None:
    """Return the CUDA runtime to link to, the toolkit's or torch's: by its name, under which torch has loaded one."""
    toolkit, packages = Path(nvcc).resolve().parents[1], torch.folder.parent
    patterns = [(toolkit, f"{folder}/libcudart.so*") for folder in ("lib64", "lib", "targets/*/lib", "lib/*-linux-gnu")]
    for folder, pattern in [*patterns, (packages, "nvidia/*/lib/libcudart.so*")]:
        for path in sorted(folder.glob(pattern)):
            return str(path)
    return None


def cuda_toolkit(torch: Torch) -> tuple[str | None, str]:
    """Return the nvcc for csrc/cuda beside a torch that is built for CUDA, or None; and a line about it."""
    wanted = str(torch.cuda)
    if os.environ.get("FLATPARAM_CUDA") == "0":
        return None, "left out, as FLATPARAM_CUDA=0 asks for"
    instead = "kernels left out, torch's operations do their work"
    nvcc = find_nvcc()
    if nvcc is None:
        return None, f"no nvcc in CUDA_HOME, in CUDA_PATH, on PATH or in {CUDA_FOLDER}: {instead}"
    release = nvcc_release(nvcc)
    if release.partition(".")[0] != wanted.partition(".")[0]:
        return None, f"torch is built for CUDA {wanted}, {nvcc} is of {release}: {instead}"
    if cuda_library(nvcc, torch) is None:
        return None, f"no libcudart.so beside {nvcc}: {instead}"
    return nvcc, f"kernels by {nvcc} {release}, {' '.join(word.rpartition('code=')[2] for word in gencode(nvcc))}"


class Step:
    """One command that makes one file, and whether it has to run.

    It has to when the file is missing, was made by another command or another version of the tools (``versions``), or
    is not newer than every file it was made from: ``inputs``, and the headers that the compiler listed (-MMD).
    """

    def __init__(self, command: list[str], inputs: list[str], output: Path, versions: str) -> None:
        self.command, self.inputs, self.output = command, inputs, output
        self.fingerprint = "\n".join([versions, shlex.join(command)])
        self.record = output.with_name(output.name + ".cmd")
        self.depfile = output.with_suffix(".d")

    def is_due(self) -> bool:
        if not self.output.is_file() or not self.record.is_file() or self.record.read_text() != self.fingerprint:
            return True
        made = self.output.stat().st_mtime_ns
        files = [Path(name) for name in [*self.inputs, *self.headers()]]
        return any(not file.is_file() or file.stat().st_mtime_ns >= made for file in files)

    def headers(self) -> list[str]:
        if not self.depfile.is_file():
            return []
        rule = self.depfile.read_text().replace("\\\n", " ").partition(": ")[2]
        return [name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", rule.strip())]

    def run(self) -> str | None:
        """Run the command; return None, or what it printed when it failed."""
        self.record.unlink(missing_ok=True)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.touch()
        started = self.output.stat().st_mtime_ns  # an input saved while the command runs is newer than the output
        done = subprocess.run(self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            return f"{shlex.join(self.command)}\n{done.stdout}"
        os.utime(self.output, ns=(started, started))
        self.record.write_text(self.fingerprint)
        return None


class Build(NamedTuple):
    """An extension to link: for ``torch``, with the kernels that ``nvcc`` compiles, None: without kernels."""

    torch: Torch
    nvcc: str | None

    @property
    def name(self) -> str:
        """Return the folder of this extension among those for several torches."""
        return CHECKS["extension_name"](self.torch.version, self.torch.cuda if self.nvcc is not None else None)


class BuildExtension(build_ext):
    """The command build_ext: compile what changed, link, put the module and _build_info.py where they belong."""

    user_options = [
        *build_ext.user_options,
        ("strict", None, "treat warnings as errors"),
        ("sanitize", None, "build with AddressSanitizer and UndefinedBehaviorSanitizer"),
        ("checks", None, "assert the invariants of the runtime's structs"),
    ]
    boolean_options = [*build_ext.boolean_options, "strict", "sanitize", "checks"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.strict = False
        self.sanitize = False
        self.checks = False

    def run(self) -> None:
        self.set_up()
        builds = [Build(torch, nvcc) for torch in torches() for nvcc in self.toolkits(torch)]
        compiled = [[self.compile_step(group, build) for group in self.compiled_together(build)] for build in builds]
        steps = {step.output: step for steps in compiled for step in steps}  # an object of C serves every torch
        self.run_all([step for step in steps.values() if step.is_due()])
        for build, inputs in zip(builds, compiled, strict=True):
            link = self.link_step([str(step.output) for step in inputs], build)
            if link.is_due():
                say(f"link {link.output}")
                error = link.run()
                if error is not None:
                    raise LinkError(error)
            self.put(link.output, build)
        if self.several:
            self.put_sources()

    def set_up(self) -> None:
        """Find the compilers and Python's headers."""
        self.cc, self.cxx = (find_compiler(*names) for names in HERE["COMPILERS"])
        self.python_include = list(dict.fromkeys([sysconfig.get_path("include"), sysconfig.get_path("platinclude")]))
        if not any((Path(folder) / "Python.h").is_file() for folder in self.python_include):
            raise PlatformError(f"no Python.h in {self.python_include[0]}: install Python's headers (python3-dev)")
        self.several = bool(os.environ.get("FLATPARAM_TORCHES"))
        chosen = [name for name in ("sanitize", "checks", "strict") if getattr(self, name)]
        self.folder = Path(self.build_temp) / ("-".join(chosen) or "release")
        self.versions = "\n".join([f"Python {sys.version}", *map(HERE["compiler_version"], (self.cc, self.cxx))])
        self.target = Path(self.get_ext_fullpath("flatparam._C"))

    def toolkits(self, torch: Torch) -> list[str | None]:
        """Return for which nvcc (None: without kernels) to link an extension for ``torch``."""
        nvcc, line = (None, "") if torch.cuda is None else cuda_toolkit(torch)
        if torch.cuda is not None:
            say(f"flatparam: CUDA: {line}")
        return [None, nvcc] if self.several and nvcc is not None else [nvcc]

    def folder_of(self, torch: Torch) -> Path:
        """Return the folder of the objects that depend on ``torch``."""
        return self.folder.with_name(f"{self.folder.name}-torch{torch.version}")

    def compiled_together(self, build: "Build") -> list[list[str]]:
        """Return the sources in groups, one for each command: a C file each, the C++ files in two."""
        files = sources(testing=(self.strict or self.sanitize) and not self.several)
        cxx = [source for source in files if source.endswith(".cpp")]
        cuda = [] if build.nvcc is None else [[str(path)] for path in sorted(Path("csrc/cuda").glob("*.cu"))]
        return cuda + [group for group in (cxx[::2], cxx[1::2]) if group] + [[f] for f in files if f not in cxx]

    def compile_step(self, group: list[str], build: "Build") -> Step:
        source, included = group[0], group[1:]
        is_cxx, torch, versions = source.endswith(".cpp"), build.torch, self.versions
        output = (self.folder_of(torch) if is_cxx else self.folder) / Path(source).with_suffix(".o")
        if source.endswith(".cu"):
            command = [build.nvcc, *NVCC_FLAGS, *(NVCC_STRICT if self.strict else []), *gencode(build.nvcc)]
            command += ["-MMD", "-MF", str(output.with_suffix(".d")), "-c", source, "-o", str(output)]
            return Step(command, group, output, f"{versions}\nnvcc {nvcc_release(build.nvcc)}")
        if is_cxx:
            command = [*self.cxx, *CXX_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")), *FLAGS]
            headers = torch.folder / "include"
            system = [*self.python_include, str(headers), str(headers / "torch/csrc/api/include")]
            versions += f"\ntorch {torch.version}"
        else:
            command = [*self.cc, *C_FLAGS, *shlex.split(os.environ.get("CFLAGS", "")), *FLAGS]
            system = [] if "/core/" in source else self.python_include
        command += ["-DFP_CHECK"] if self.checks else []
        command += STRICT if self.strict or self.sanitize else []
        command += SANITIZE if self.sanitize else []
        command += [word for folder in system for word in ("-isystem", folder)]
        command += [word for file in included for word in ("-include", file)]
        command += ["-MMD", "-MF", str(output.with_suffix(".d")), "-c", source, "-o", str(output)]
        return Step(command, group, output, versions)

    def link_step(self, objects: list[str], build: "Build") -> Step:
        # What comes from a static library is the module's own: where g++ links libstdc++ so, some of its names would be
        # bound to another library's copy, and reading a number from a stream would crash.
        command = [*self.cxx, "-shared", "-pthread", "-Wl,--exclude-libs,ALL", *objects]
        command += shlex.split(os.environ.get("LDFLAGS", ""))
        command += SANITIZE if self.sanitize else []
        command += ["-Wl,--strip-all"] if self.several else []
        if any("/tensor/" in name for name in objects):
            # No run path: torch is always imported first, and its libraries are then found by their names.
            command += [f"-L{build.torch.folder / 'lib'}", "-Wl,--as-needed", *TORCH_LIBRARIES]
        command += [] if build.nvcc is None else [str(cuda_library(build.nvcc, build.torch))]
        module = self.folder_of(build.torch) / (build.name if self.several else "") / self.target.name
        return Step([*command, "-o", str(module)], objects, module, f"{self.versions}\ntorch {build.torch.version}")

    def run_all(self, steps: list[Step]) -> None:
        """Compile in parallel; print what is compiled, how far it is, and what every failing command printed."""

        def announce_and_run(step: Step) -> str | None:
            say(f"compile {' '.join(step.inputs)}")
            return step.run()

        if not steps:
            return
        files, workers = sum(len(step.inputs) for step in steps), self.parallel or len(os.sched_getaffinity(0))
        releases, begun = ", ".join(dict.fromkeys(torch.version for torch in torches())), time.monotonic()
        say(
            f"flatparam: {files} files to compile for torch {releases}, {workers} at a time; "
            "a first build takes 1 to 2 minutes"
        )
        with ThreadPoolExecutor(workers) as pool:
            runs = {pool.submit(announce_and_run, step): step for step in steps}
            while left := wait(runs, timeout=HEARTBEAT).not_done:
                compiled = files - sum(len(runs[run].inputs) for run in left)
                say(f"flatparam: {compiled} of {files} files compiled in {time.monotonic() - begun:.0f} s")
        errors = [error for run in runs if (error := run.result()) is not None]
        if errors:
            print("\n".join(errors), file=sys.stderr, flush=True)
            raise CompileError(f"{len(errors)} of {len(steps)} files did not compile (see above)")

    def put(self, module: Path, build: "Build") -> None:
        """Copy the module to its package, and say there which torch it is for; touch nothing that is right already."""
        several = self.target.parent / CHECKS["EXTENSIONS"] / build.name / self.target.name
        target = several if self.several else self.target
        target.parent.mkdir(parents=True, exist_ok=True)
        made, there = module.stat(), target.stat() if target.is_file() else None
        if there is None or (there.st_size, there.st_mtime_ns) != (made.st_size, made.st_mtime_ns):
            temporary = target.with_name(target.name + ".new")
            shutil.copy2(module, temporary)
            os.replace(temporary, target)  # a process that has the old one loaded keeps it
        info = target.with_name("_build_info.py")
        text = BUILD_INFO.format(build.torch.version)
        if not self.several and (not info.is_file() or info.read_text() != text):
            info.write_text(text)

    def put_sources(self) -> None:
        """Put what flatparam/_build_here.py compiles into the package."""
        to = self.target.parent / CHECKS["SOURCES"]
        shutil.copytree("csrc", to / "csrc", ignore=shutil.ignore_patterns("*.md"), dirs_exist_ok=True)
        for name in ("setup.py", "README.md"):
            shutil.copy2(name, to)


class CudaCheck(Command):
    """The command cuda_check: compile the kernels for all architectures; threads with memory of their own fail."""

    user_options: list = [("folder=", None, "a folder for all that nvcc writes, its PTX included")]

    def initialize_options(self) -> None:
        self.folder = None

    def finalize_options(self) -> None:
        self.keep = ["--keep", f"--keep-dir={self.folder}"] if self.folder else []
        self.folder = Path(self.folder or "build/cuda-check")

    def run(self) -> None:
        nvcc = find_nvcc()
        if nvcc is None:
            print(f"cuda-check: no nvcc in CUDA_HOME, in CUDA_PATH, on PATH or in {CUDA_FOLDER}: nothing was compiled")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        print(f"cuda-check: {nvcc} {nvcc_release(nvcc)}; registers of a thread, and bytes it has in memory instead")
        failed = 0
        for source in sorted(Path("csrc/cuda").glob("*.cu")):
            command = [nvcc, *NVCC_FLAGS, *NVCC_STRICT, *gencode(nvcc), "-Xptxas=-v", "-c", str(source)]
            command += ["-o", str(self.folder / f"{source.stem}.o"), *self.keep]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode != 0:
                raise CompileError(f"{shlex.join(command)}\n{done.stdout}")
            failed += self.report(done.stdout)
        if failed:
            raise CompileError(f"cuda-check: {failed} kernels put to memory what belongs in registers")

    def report(self, output: str) -> int:
        """Print a line for each kernel that ptxas tells of; return how many have a stack frame or spill."""
        told: dict[str, dict[str, tuple[int, int]]] = {}
        pattern = (
            r"entry function '(\S+)' for 'sm_(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes"
            r".*?Used (\d+) registers"
        )
        for name, arch, *in_memory, registers in re.findall(pattern, output, re.DOTALL):
            told.setdefault(name, {})[arch] = (int(registers), max(map(int, in_memory)))
        if not told:
            raise CompileError(f"cuda-check: nothing of what ptxas tells is understood:\n{output}")
        for name, by_arch in sorted(told.items()):
            kind = re.search(r"(pack|norm|scale)I(?:L8fp_dtype(\d)E)?Lm(\d+)E", name)
            if kind is not None:
                target = "" if kind[2] is None else f" to {('fp64', 'fp32', 'bf16', 'fp16')[int(kind[2])]}"
                name = f"{kind[1]}{target}, " + ("table in memory" if kind[3] == "0" else f"table of {kind[3]} bytes")
            cells = [f"sm_{arch} {used} ({in_memory})" for arch, (used, in_memory) in by_arch.items()]
            print(f"{name:36}{', '.join(cells)}")
        return sum(any(in_memory for _, in_memory in by_arch.values()) for by_arch in told.values())


def problem(commands: set[str]) -> str | None:
    """Say in one line why these commands of setup.py cannot run here, or return None."""
    if not commands & NEEDS_TORCH:
        return None
    versions = [torch.version for torch in torches()]
    problems = [CHECKS["torch_problem"](version) for version in versions or [None]]
    found = next(filter(None, [CHECKS["platform_problem"](*CHECKS["this_platform"]()), *problems]), None)
    makes_wheels = CHECKS["release"](setuptools.__version__) >= (70, 1) or find_spec("wheel") is not None
    if found is None and commands & WHEEL and not makes_wheels:
        return (
            f"flatparam needs setuptools >= 70.1 to be installed, found {setuptools.__version__}: "
            "pip install --upgrade setuptools, then: pip install --no-build-isolation ."
        )
    return found


PROBLEM = problem(set(sys.argv[1:]))
if PROBLEM is not None:
    raise SystemExit(PROBLEM)

BUILDS = set(sys.argv[1:]) & NEEDS_TORCH


URL = os.environ.get("FLATPARAM_URL", "").rstrip("/")  # where the publisher has the project: the sources name no host
TAG = f"v{runpy.run_path('flatparam/_version.py')['__version__']}"


def addresses() -> dict[str, str]:
    """Return the project's addresses for the metadata; empty without FLATPARAM_URL."""
    if not URL:
        return {}
    at = f"{URL}/blob/{TAG}"
    return {
        "Source": URL,
        "Issues": f"{URL}/issues",
        "Changelog": f"{at}/CHANGELOG.md",
        "Documentation": f"{at}/docs/runtime.md",
    }


def description() -> str:
    """Return README.md. With FLATPARAM_URL its links and pictures are absolute: a package index has no other files."""
    text = Path("README.md").read_text()
    if not URL:
        return text
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\g<1>{URL}/raw/{TAG}/", text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{URL}/blob/{TAG}/", text)


setup(
    install_requires=[CHECKS["torch_requirement"]([torch.version for torch in torches()] if BUILDS else [])],
    license="BSD-3-Clause",  # here and not in pyproject.toml, where setuptools before 77 does not take an expression
    project_urls=addresses(),
    long_description=description(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("flatparam._C", sources=sources())],
    cmdclass={"build_ext": BuildExtension, "cuda_check": CudaCheck},
)
