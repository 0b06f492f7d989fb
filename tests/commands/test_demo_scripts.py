"""The examples as `make demo` runs them: last lines, reasons why some are left out or fail, and no rank that stays."""

import os
import signal
import subprocess
import sys
import time

import forked_scripts
import pytest

from examples.demo import scripts

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """torchrun and its ranks begin as forks."""
    monkeypatch.setattr(scripts.subprocess, "Popen", forked_scripts.Popen)


def example(folder, code, needs=""):
    """Return the path of an example with ``code`` and two promised lines."""
    path = folder / "small.py"
    command = "    torchrun --nproc-per-node 1 examples/small.py --steps 3   # short"
    head = f"{command}\n\n{needs}The last lines:\n\n    a\n    b\n"
    path.write_text(f'"""Do something.\n\n{head}"""\n{code}\n')
    return path


def test_an_example_runs_as_its_head_says_and_its_last_lines_are_printed(tmp_path, capfd):
    code = "import os, sys\nprint('first')\nprint(sys.argv[1:], os.environ['WORLD_SIZE'])\nprint('last')"
    assert scripts.run_all([example(tmp_path, code)]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "running 1 examples in a folder that is removed at the end",
        "[1/1] examples/small.py: torchrun --nproc-per-node 1",
        "    ['--steps', '3'] 1",
        "    last",
        "no example failed",
    ]


def test_an_example_that_fails_is_named_with_its_output(tmp_path, capfd):
    assert scripts.run_all([example(tmp_path, "print('first')\nraise ValueError('wrong data')")]) == 1
    printed = capfd.readouterr().out
    assert "    first\n" in printed
    assert "ValueError: wrong data" in printed
    assert printed.endswith("    FAILED: exit status 1\nexamples that failed: small.py\n")


def test_an_example_that_does_not_end_is_ended(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(scripts, "LIMIT_SECONDS", 3)
    assert scripts.run_all([example(tmp_path, "import time\ntime.sleep(600)")]) == 1
    assert "    FAILED: no end after 3 s\n" in capfd.readouterr().out


def test_all_that_an_example_lacks_is_named(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(scripts, "_has_gpus", lambda: False)
    path = example(tmp_path, "raise AssertionError", "Needs torch, no_such_package and GPUs. ")
    assert scripts.run_all([path]) == 0
    assert "\n[1/1] examples/small.py: skipped, it needs no_such_package, GPUs\n" in capfd.readouterr().out


def test_an_example_without_a_command_is_refused_before_any_runs(tmp_path, capfd):
    other = tmp_path / "other.py"
    other.write_text('"""Nothing."""\n')
    with pytest.raises(ValueError, match=r"other\.py has no torchrun line"):
        scripts.run_all([example(tmp_path, "print('first')"), other])
    assert capfd.readouterr().out == ""


def test_no_rank_stays_after_an_interruption(tmp_path):
    pid = tmp_path / "pid"
    code = f"import os, time\nopen({str(tmp_path / 'new')!r}, 'w').write(str(os.getpid()))\n"
    code += f"os.replace({str(tmp_path / 'new')!r}, {str(pid)!r})\ntime.sleep(600)"
    path = example(tmp_path, code)
    parent = "import pathlib, sys\nfrom examples.demo import scripts\nscripts.stop_on_signals()\n"
    parent += "scripts.run_all([pathlib.Path(sys.argv[1])])"
    root = str(scripts.EXAMPLES.parent)
    process = forked_scripts.Popen([sys.executable, "-c", parent, str(path)], cwd=root, stderr=subprocess.DEVNULL)
    try:
        while not pid.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) != 0
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
    finally:
        process.kill()
        process.wait()
