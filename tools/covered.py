"""Run pytest and print which lines of the package and of csrc it came to: a table for each, a row a file.

Usage: python tools/covered.py [argument of pytest...]

The package is measured by coverage.py, also in the processes that tests start. csrc is measured by gcov, on a build of
its own in build/coverage; processes that use the build in place, or end by a signal, do not count there.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path("build/coverage")
OBJECTS = FOLDER / "objects"
GCOV = "--coverage -fprofile-update=atomic"  # several threads count
SETTINGS = f"""[run]
branch = true
data_file = {FOLDER}/data
disable_warnings = module-not-imported, no-data-collected
parallel = true
patch =
    subprocess
    _exit
relative_files = true
source_pkgs = flatparam
[paths]
package =
    flatparam/
    */flatparam/
[report]
exclude_also = if TYPE_CHECKING:
skip_empty = true
"""


def build() -> None:
    """Build the package in FOLDER, with counters in the extension; compile what changed."""
    flags = {"CFLAGS": f"-O1 {GCOV}", "CXXFLAGS": f"-O0 {GCOV}", "LDFLAGS": "--coverage"}
    shutil.rmtree(FOLDER / "flatparam", ignore_errors=True)
    for command in (["build_py"], ["build_ext", "--strict", "--build-temp", str(OBJECTS)]):
        setup = [sys.executable, "setup.py", "--quiet", *command, "--build-lib", str(FOLDER)]
        subprocess.run(setup, check=True, env=os.environ | flags)


def main(arguments: list[str]) -> int:
    """Build, run pytest, print the tables; return pytest's exit status."""
    build()
    for old in [*FOLDER.glob("data*"), *OBJECTS.rglob("*.gcda")]:
        old.unlink()
    settings = FOLDER / "coveragerc"
    settings.write_text(SETTINGS)
    coverage = [sys.executable, "-m", "coverage"]
    pytest = ["-m", "pytest", "-n", "auto", "--maxprocesses", "5", "--dist", "loadfile"]
    pytest += ["-o", f"pythonpath={FOLDER} . tests/support", *arguments]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.resolve())}
    status = subprocess.run([*coverage, "run", f"--rcfile={settings}", *pytest], env=environment).returncode
    subprocess.run([*coverage, "combine", "--quiet", f"--rcfile={settings}"], check=True)
    subprocess.run([*coverage, "report", f"--rcfile={settings}"], check=True)
    gcovr = [sys.executable, "-m", "gcovr", "--root", ".", "--filter", "csrc/", "--print-summary"]
    subprocess.run([*gcovr, "--gcov-ignore-parse-errors=suspicious_hits.warn", str(OBJECTS)], check=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
