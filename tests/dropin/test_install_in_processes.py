"""install() in processes that multiprocessing starts, under isinstance, and the names that it leaves alone.

Each case is a script in an interpreter of its own, because what was imported before is the point.
"""

import ast
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from subprocess import PIPE

import pytest

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import multiprocessing, sys

{}

def report(*_):
    name = "torch.distributed.fsdp._flat_param"
    installed = "flatparam" in sys.modules and sys.modules["flatparam"].is_installed()
    owner = sys.modules[name].FlatParamHandle.__module__.split(".")[0] if name in sys.modules else None
    return installed, owner

def report_to(rank, path):
    with open(path + str(rank), "w") as file:
        file.write(repr(report()))

"""
MAIN = """
if __name__ == "__main__":
    {}
    for start in ("spawn", "forkserver"):
        with multiprocessing.get_context(start).Pool(1) as pool:
            print(start, pool.map(report, [0]))
    import torch.multiprocessing
    torch.multiprocessing.spawn(report_to, (sys.argv[1],), nprocs=2)
"""

IN_ONE_PROCESS = {
    "isinstance follows what is installed": """
        import flatparam
        from torch.distributed.fsdp import _flat_param, _runtime_utils, _common_utils
        torchs = _flat_param.FlatParamHandle
        def handle():
            return one_handle.make_handle(_flat_param.FlatParamHandle, torch.nn.Linear(2, 3))
        before = handle()
        flatparam.install()
        during = handle()
        assert isinstance(during, _flat_param.FlatParamHandle) and isinstance(during, flatparam.FlatParamHandle)
        assert not isinstance(before, _flat_param.FlatParamHandle) and isinstance(before, torchs)
        for each in (before, during):
            assert isinstance(each.flat_param, _flat_param.FlatParameter)
            assert isinstance(each._sharding_strategy, _flat_param.HandleShardingStrategy)
            assert isinstance(each._training_state, _common_utils.HandleTrainingState)
            each.shard()
            assert isinstance(each.shard_metadata(), _flat_param.FlatParamShardMetadata)
        flatparam.uninstall()
        assert isinstance(before, _flat_param.FlatParamHandle) and not isinstance(during, _flat_param.FlatParamHandle)
        assert type(handle()) is torchs
        """,
    "nothing is imported but Dynamo, and nothing but the handle changes": """
        import flatparam.dropin.handle, torch.distributed.fsdp, torch._dynamo.trace_rules
        assert flatparam.install
        from torch.distributed.fsdp import _flat_param
        modules = set(sys.modules)
        names = {name: id(value) for name, value in vars(_flat_param).items()}
        flatparam.install()
        assert set(sys.modules) - modules == {"torch.distributed.fsdp.flat_param"}
        assert {name for name, value in vars(_flat_param).items() if id(value) != names[name]} == {"FlatParamHandle"}
        """,
    "the compiler skips our files, and is told once": """
        import flatparam, torch._dynamo.trace_rules as rules
        file = flatparam.FlatParamHandle.unshard.__code__.co_filename
        assert not rules.check_file(file).skipped
        folders = len(rules.SKIP_DIRS)
        for _ in range(3):
            flatparam.install()
            told = rules.SKIP_DIRS[folders:]
            assert rules.check_file(file).skipped and len(told) == len(set(told))
            flatparam.uninstall()
        assert not rules.check_file(one_handle.__file__).skipped
        """,
    "a refusal changes nothing": """
        from torch.distributed.fsdp import _flat_param
        torchs = _flat_param.FlatParamHandle
        unshard = torchs.unshard
        torchs.unshard = lambda self: unshard(self)
        import flatparam
        before = {name: id(value) for name, value in vars(_flat_param).items()}
        for attempt in range(2):
            try:
                flatparam.install()
            except RuntimeError as refusal:
                assert "unshard of torch's FlatParamHandle was replaced" in str(refusal), refusal
            else:
                raise AssertionError("expected a refusal")
        assert {name: id(value) for name, value in vars(_flat_param).items()} == before
        assert not flatparam.is_installed() and "torch.distributed.fsdp.flat_param" not in sys.modules
        torchs.unshard = unshard
        flatparam.install()
        assert flatparam.is_installed()
        """,
    "a subclass of ours in torch's place is used": """
        import flatparam
        from torch.distributed.fsdp import _flat_param, FullyShardedDataParallel
        flatparam.install()
        class Handle(flatparam.FlatParamHandle):
            made = 0
            def __init__(self, *args, **kwargs):
                Handle.made += 1
                super().__init__(*args, **kwargs)
        from torch.distributed.fsdp import _init_utils
        _init_utils.FlatParamHandle = Handle
        model = FullyShardedDataParallel(torch.nn.Linear(2, 3), device_id=torch.device("cpu"))
        assert type(model._handle) is Handle and Handle.made == 1
        model(torch.ones(1, 2)).sum().backward()
        """,
}


def python(*arguments, cwd):
    """Run python, with the tests' helpers importable; return its output. No process is left."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=env,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, errors
    return output


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_in_one_process(name, tmp_path):
    head = "import sys, torch, one_handle\nfrom gloo import fake_world\nwith fake_world():"
    (tmp_path / "script.py").write_text(head + textwrap.indent(textwrap.dedent(IN_ONE_PROCESS[name]), "    "))
    assert python("script.py", cwd=tmp_path) == ""


@pytest.mark.thorough
@pytest.mark.parametrize("at_the_top", [True, False], ids=["of-the-module", "of-main"])
def test_children_have_what_the_script_installs_when_it_is_imported(tmp_path, at_the_top):
    """A spawned child imports the script again: what is under ``if __name__ == "__main__"`` is not done there."""
    install = "import flatparam; flatparam.install()"
    script = CHILD.format(install if at_the_top else "") + MAIN.format("pass" if at_the_top else install)
    (tmp_path / "script.py").write_text(script)
    output = python("script.py", tmp_path / "rank", cwd=tmp_path)
    expected = (True, "flatparam") if at_the_top else (False, None)
    assert output == f"spawn [{expected}]\nforkserver [{expected}]\n"
    for rank in (0, 1):
        installed, owner = ast.literal_eval((tmp_path / f"rank{rank}").read_text())
        assert (installed, owner in ("torch", None)) == (at_the_top, not at_the_top)
