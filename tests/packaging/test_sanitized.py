"""The tests under the sanitizers, in several processes side by side.

Promises:
- each test runs in one process, once, and a failure ends that process with pytest's status:
  `test_processes_share_the_files`
"""

import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from sanitized import RUN_PYTEST

LENGTHS = (1, 5, 2, 4, 3)
FILE = """
import time, pytest

@pytest.fixture(scope="module")
def opened():
    yield "here"

@pytest.mark.parametrize("number", range({length}))
def test_it(number, opened):
    time.sleep(0.02)
    with open({log!r}, "a") as file:
        file.write(f"{length} {{number}}\\n")
    assert ({length}, number) != (2, 1)
"""


def test_processes_share_the_files(tmp_path):
    log, taken = tmp_path / "log", tmp_path / "taken"
    taken.mkdir()
    for length in LENGTHS:
        folder = tmp_path / f"of_{length % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"test_{length}.py").write_text(FILE.format(length=length, log=str(log)))
    env = {**os.environ, "LD_PRELOAD": "", "PYTHONMALLOC": "default"}
    arguments = [str(taken), str(tmp_path), f"--rootdir={tmp_path}", "-p", "no:cacheprovider", "--tb=line"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RUN_PYTEST, str(tmp_path / f"status{part}"), *arguments],
            env=env, stdout=subprocess.PIPE, text=True,
        )
        for part in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert sorted(log.read_text().split("\n")[:-1]) == sorted(
        f"{length} {number}" for length in LENGTHS for number in range(length)
    )
    assert sum(int(count) for text in said for count in re.findall(r"(\d+) passed", text)) == sum(LENGTHS) - 1, said
    assert sorted((tmp_path / f"status{part}").read_text() for part in range(2)) == ["0", "1"], said
