"""No arguments, however wrong, crash the interpreter in a call of the C extension; a broken error return shows too."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import forked_scripts
import pytest

import flatparam
from flatparam import _C

pytestmark = pytest.mark.multiprocess

CALLS = int(os.environ.get("FLATPARAM_HOSTILE_CALLS", "400"))  # of each callable: 40,000 of all together
SUPPORT = pathlib.Path(__file__).parents[1] / "support"


def public_names():
    names = [name for name, value in vars(_C).items() if callable(value) and not name.startswith("__")]
    for name in list(names):
        if isinstance(getattr(_C, name), type) and not issubclass(getattr(_C, name), BaseException):
            names += [f"{name}.{method}" for method in vars(getattr(_C, name)) if not method.startswith("__")]
    return sorted(names)


@functools.cache
def results():
    """Run the hostile calls once for all tests; return what became of each callable."""
    package = str(pathlib.Path(flatparam.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(SUPPORT / "hostile_calls.py"), str(CALLS), "1"]
    process = forked_scripts.completed(command, env=environment, stderr=subprocess.DEVNULL)
    process.check_returncode()
    return {line["name"]: line for line in map(json.loads, process.stdout.splitlines())}


@pytest.mark.parametrize("name", public_names())
def test_no_arguments_crash_the_interpreter(name):
    result = results()[name]
    assert result["status"] == 0, f"ended with {result['status']} in or after: {result['last']}"


def test_everything_callable_was_called_with_good_and_bad_arguments():
    assert set(results()) == set(public_names())
    raised = {name: int(result["last"].split()[1]) for name, result in results().items() if result["status"] == 0}
    assert len(raised) > 10
    assert any(0 < count < CALLS for count in raised.values())
