"""tests/PROMISES.md has the head of every test file, and names no test that does not exist."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "promises.py"


def test_the_page_is_that_of_the_test_files():
    found = subprocess.run([sys.executable, TOOL, "--check"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
