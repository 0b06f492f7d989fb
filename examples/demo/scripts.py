"""``python -m examples.demo.scripts``: run each script of examples/ with the torchrun line in its head."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .processes import Stopped, environment, stop_on_signals

EXAMPLES = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 300  # an example takes ten seconds, or some more beside other programs


@dataclass(frozen=True)
class Script:
    """An example. ``command``: its arguments for torchrun; ``needs``: packages and ``GPUs``; ``lines``: its last."""

    path: Path
    command: list[str]
    needs: list[str]
    lines: int

    @classmethod
    def of(cls, path: Path) -> Script:
        """Read the head of an example: the first torchrun line, "Needs ...", the last lines. Raises: ValueError."""
        head = ast.get_docstring(ast.parse(path.read_text())) or ""
        command = re.search(rf"torchrun (.*)examples/{path.name}(.*)", head)
        if command is None:
            raise ValueError(f"the head of {path} has no torchrun line")
        needs = re.search(r"Needs ([^.:]*)", head)
        return cls(
            path,
            [*command[1].split(), str(path), *command[2].split("#")[0].split()],
            re.split(r", | and ", needs[1]) if needs else [],
            len(head.split("\n\n")[-1].splitlines()),
        )

    def missing(self) -> list[str]:
        """Return what it needs and this machine lacks."""
        return [name for name in self.needs if (not _has_gpus() if name == "GPUs" else find_spec(name) is None)]

    def run(self, folder: Path) -> bool:
        """Run it in ``folder``, and print its last lines, or all that a failing one printed. Returns: it succeeded."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        paths = [str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [*launcher, *self.command],
            cwd=folder,
            env={**environment(1), "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C comes once, from here
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_SECONDS)
            reason = f"exit status {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate()
            reason = f"no end after {LIMIT_SECONDS} s"
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks, which lead sessions of their own: do not kill it
                process.communicate()
        printed = output.splitlines()
        for line in printed if reason else printed[-self.lines :]:
            print(f"    {line}")
        if reason:
            print(f"    FAILED: {reason}")
        return not reason


def _has_gpus() -> bool:
    import torch

    return torch.cuda.is_available()


def run_all(paths: list[Path]) -> int:
    """Run the examples one after the other in a folder that is removed. Returns: 0 when none failed, else 1."""
    scripts = [Script.of(path) for path in paths]
    failed = []
    print(f"running {len(scripts)} examples in a folder that is removed at the end", flush=True)
    with tempfile.TemporaryDirectory(prefix="flatparam-examples-") as folder:
        for number, script in enumerate(scripts, 1):
            missing = ", ".join(script.missing())
            state = f"skipped, it needs {missing}" if missing else f"torchrun {script.command[0]} {script.command[1]}"
            print(f"[{number}/{len(scripts)}] examples/{script.path.name}: {state}", flush=True)
            if not missing and not script.run(Path(folder)):
                failed.append(script.path.name)
    print(f"examples that failed: {', '.join(failed)}" if failed else "no example failed")
    return 1 if failed else 0


def main() -> int:
    """Run all examples. Returns: the exit status."""
    stop_on_signals()
    try:
        return run_all(sorted(path for path in EXAMPLES.glob("*.py") if path.name != "__init__.py"))
    except Stopped as stopped:
        print(f"examples: stopped by {stopped}; all processes ended", file=sys.stderr)
        return 128 + stopped.signum


if __name__ == "__main__":
    sys.exit(main())
