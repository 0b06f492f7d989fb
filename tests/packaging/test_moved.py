"""Import paths of 0.1.0 that scripts and pickles name."""

import importlib
import pickle
import subprocess
import sys

import pytest

import flatparam
from flatparam._moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_module_of_the_new_one(old):
    module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])
    assert module.__spec__.name == module.__name__ == MOVED[old]


def test_pickles_of_old_paths_load():
    by_name = b"cflatparam.handle\nFlatParamHandle\n."  # protocol 0: a global, by module and name
    assert pickle.loads(by_name) is flatparam.FlatParamHandle


@pytest.mark.multiprocess
def test_an_old_path_can_be_the_first_that_is_imported():
    code = "from flatparam.layout import FlatLayout; import flatparam; assert FlatLayout is flatparam.FlatLayout"
    subprocess.run([sys.executable, "-c", code], check=True)
