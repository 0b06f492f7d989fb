"""``python -m flatparam run`` runs a script as ``python`` does: each script runs both ways, and results are compared.

The scripts have no name of flatparam's in them but where they tell whether it is installed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

import flatparam.__main__
import flatparam.commands.run

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
RUN = ["-m", "flatparam", "run"]


def python(*arguments, cwd, **environment):
    """Run python with ``cwd`` as the working directory; flatparam is found through PYTHONPATH, as if installed.

    No process is left, whatever it started.
    """
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | environment
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=cwd, env=env, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def plain_and_run(*arguments, cwd, **environment):
    return python(*arguments, cwd=cwd, **environment), python(*RUN, *arguments, cwd=cwd, **environment)


def assert_same(plain, run):
    assert run.stdout == plain.stdout
    assert run.stderr == plain.stderr
    assert run.returncode == plain.returncode


FACTS = '''"""The docstring of the script."""
import __main__, atexit, inspect, json, os, pickle, sys, threading

class Point:
    def __init__(self, x):
        self.x = x

def report():
    kept = {name: value for name, value in vars(__main__).items() if name.startswith("__")}
    kept.pop("__annotate__", None)  # of Python 3.14: a function
    kept["__builtins__"] = type(kept["__builtins__"])
    kept["__loader__"] = type(kept["__loader__"])
    kept["__spec__"] = kept["__spec__"] and (kept["__spec__"].name, kept["__spec__"].origin, kept["__spec__"].cached)
    print(*sorted(kept.items()), sep="\\n")
    print(sys.argv, sys.path, os.getcwd(), sep="\\n")
    print(__name__, sys.modules["__main__"] is __main__, vars(__main__) is globals())
    print(pickle.loads(pickle.dumps(Point(3))).x, pickle.dumps(Point(4)), Point.__module__)
    print(inspect.getsource(Point))
    print(sys.flags, sys.stdin.read())

late: int = 5
def last():
    print("at exit", __main__.late, Point(1).x, file=sys.stderr)
atexit.register(last)

def in_thread():
    threading.main_thread().join()
    print("in a thread, after the main one", sys.modules["__main__"].late, file=sys.stderr)

if __name__ == "__main__":
    report()
    threading.Thread(target=in_thread).start()
    installed = "flatparam" in sys.modules and sys.modules["flatparam"].is_installed()
    with open(os.environ["INSTALLED"], "a") as file:
        file.write(f"{installed} ")
'''


@pytest.fixture
def program(tmp_path):
    """A folder with the script ``facts.py``, and the same as a module, a folder, an archive and a link elsewhere."""
    (tmp_path / "package").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "links").mkdir()
    for path in ("facts.py", "package/__init__.py", "package/__main__.py", "package/facts.py", "folder/__main__.py"):
        (tmp_path / path).write_text("" if path.endswith("__init__.py") else FACTS)
    (tmp_path / "links" / "link.py").symlink_to(tmp_path / "facts.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", FACTS)
    return tmp_path


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "command",
    ["facts.py", "links/link.py", "folder", "archive.zip", "-m package.facts", "-m package"],
)
def test_the_script_is_main(program, command):
    installed = program / "installed"
    arguments = [*command.split(), "one", "--two=2", "-m", "run", ""]
    assert_same(*plain_and_run(*arguments, cwd=program, INSTALLED=str(installed)))
    assert installed.read_text() == "False True "


@pytest.mark.sweep(1)
@pytest.mark.parametrize("command", ["facts.py", "folder"])
def test_a_safe_path_stays_safe(program, command):
    """With PYTHONSAFEPATH Python adds no script's folder to sys.path, only a folder that is run."""
    assert_same(*plain_and_run(command, cwd=program, INSTALLED=str(program / "installed"), PYTHONSAFEPATH="1"))


ENDS = {
    "returns": "x = 1",
    "status": "import sys; sys.exit(3)",
    "message": "import sys; sys.exit('a message')",
    "error": "def f(x):\n  1 / x\ntry:\n  f(0)\nexcept ZeroDivisionError as error:\n  raise ValueError(2) from error",
    "hook": "import sys\nsys.excepthook = lambda *e: print(*e[:2], e[2].tb_frame.f_locals['x'])\nx = {}\nx[1]",
    "broken hook": "import sys\nsys.excepthook = 3\n1 / 0",
    "syntax": "def f(:\n    pass",
    "interrupt": "import os, signal\ndef f():\n    os.kill(os.getpid(), signal.SIGINT)\n    input()\nf()",
    "terminated": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\ninput()",
    "at once": "import os\nos._exit(7)",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ENDS)
def test_it_ends_as_python_does(tmp_path, name):
    (tmp_path / "script.py").write_text(ENDS[name])
    plain, run = plain_and_run("script.py", cwd=tmp_path)
    if name == "broken hook":  # Python shows where the hook was called too
        assert run.stderr.startswith("Error in sys.excepthook:\n")
        assert "TypeError: 'int' object is not callable\n\nOriginal exception was:\n" in run.stderr
        assert run.returncode == plain.returncode == 1
    else:
        assert_same(plain, run)


@pytest.mark.thorough
def test_a_module_ends_as_python_does(tmp_path):
    (tmp_path / "module.py").write_text(ENDS["error"])
    (tmp_path / "unfinished.py").write_text(ENDS["syntax"])
    for name in ("module", "unfinished", "absent.module", "json"):
        assert_same(*plain_and_run("-m", name, cwd=tmp_path))


def test_a_script_that_is_not_there(tmp_path):
    plain, run = plain_and_run("absent.py", "x", cwd=tmp_path)
    assert run.stderr.replace("flatparam run", sys.executable) == plain.stderr
    assert (run.stdout, run.returncode) == (plain.stdout, plain.returncode) == ("", 2)


CHILDREN = '''
import json, multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor

class Task:
    """Of the script: a child must find it to unpickle it."""
    def __init__(self, start, depth):
        self.start, self.depth = start, depth

def installed():
    return "flatparam" in sys.modules and sys.modules["flatparam"].is_installed()

def work(task):
    main = sys.modules["__main__"]
    deeper = in_child(Task(task.start, task.depth - 1)) if task.depth > 0 else None
    names = sorted(name for name in vars(main) if not name.startswith("__"))
    here = [main.__name__, main.__file__, getattr(main.__spec__, "name", None), names]
    return [installed(), [type(task).__module__, *here, sys.argv, os.getcwd()], deeper]

def in_child(task):
    context = multiprocessing.get_context(task.start)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, task).result()

STARTS = {"spawn": 1, "forkserver": 0, "fork": 0}  # and how many deep

if __name__ == "__main__":
    results = {start: in_child(Task(start, depth)) for start, depth in STARTS.items()}
    print(json.dumps({"installed here": installed(), "in children": results}))
'''


def split(result):
    """Take what ``work`` returned apart: whether flatparam was installed at each depth, and the facts."""
    installed, facts, deeper = result
    further = split(deeper) if deeper else ([], [])
    return [installed, *further[0]], [facts, *further[1]]


@pytest.mark.thorough
@pytest.mark.parametrize("command", [["{}/script.py"], ["-m", "package.script"]])
def test_children_have_it_installed_too(tmp_path, command):
    """Also where flatparam is found in the working directory only, which is not on the script's sys.path."""
    (tmp_path / "package").mkdir()
    for path in ("script.py", "package/script.py"):
        (tmp_path / path).write_text(CHILDREN)
    arguments = [part.format(tmp_path) for part in command] + ["--an", "argument"]
    path = str(tmp_path) if command[0] == "-m" else ""
    done = [python(*start, *arguments, cwd=ROOT, PYTHONPATH=path) for start in ((), RUN)]
    assert [process.returncode for process in done] == [0, 0], done[0].stderr + done[1].stderr
    plain, run = (json.loads(process.stdout) for process in done)
    assert (plain["installed here"], run["installed here"]) == (False, True)
    for start, depth in (("spawn", 2), ("forkserver", 1), ("fork", 1)):
        were_installed, facts = split(run["in children"][start])
        assert were_installed == [True] * depth, start
        assert facts == split(plain["in children"][start])[1], start


GUARDED_PACKAGE = """
import multiprocessing
from package.work import work

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
"""


@pytest.mark.thorough
def test_a_package_is_not_run_again_in_children(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text("print('main', __name__)\n" + GUARDED_PACKAGE)
    (tmp_path / "package" / "work.py").write_text("def work(x):\n    return 2 * x\n")
    plain, run = plain_and_run("-m", "package", cwd=tmp_path)
    assert_same(plain, run)
    assert run.stdout == "main __main__\n[2, 4]\n"


TRAINING = """
import gc, os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

assert sys.argv[1:] == ["--steps", "3"], sys.argv
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
losses = []
for step in range(3):
    loss = model(torch.arange(18.0).reshape(3, 6) + dist.get_rank() + step).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
with open(f"{os.environ['HANDLES']}{dist.get_rank()}", "w") as file:
    print(type(model._handle).__module__.split(".")[0], *losses, file=file)
dist.barrier()
del model, optimizer, loss
dist.destroy_process_group()
gc.collect()  # ends the group's threads: one that frees a tensor while Python ends aborts (pytorch#179291)
"""


@pytest.mark.thorough
def test_the_older_launcher_runs_a_script_in_the_order_that_is_printed(tmp_path):
    (tmp_path / "train.py").write_text("import os, sys\nprint(os.environ['LOCAL_RANK'], *sys.argv)")
    launch = ["-m", "torch.distributed.launch", "--use-env", "--standalone", "--nproc-per-node", "1"]
    done = python(*launch, *RUN, "train.py", "--steps", "3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "0 train.py --steps 3\n"), done.stderr


@pytest.mark.thorough
def test_torchrun_trains_to_the_same_bits(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = {}
    for name, command in (("torch", []), ("flatparam", RUN)):
        handles = str(tmp_path / name)
        done = python(
            *torchrun, *command, "train.py", "--steps", "3", cwd=tmp_path, HANDLES=handles, GLOO_SOCKET_IFNAME="lo"
        )
        assert done.returncode == 0, done.stderr
        written = [Path(f"{handles}{rank}").read_text().split() for rank in (0, 1)]
        assert [module for module, *_ in written] == [name] * 2
        losses[name] = [values for _, *values in written]
    assert losses["flatparam"] == losses["torch"]
    assert [len(values) for values in losses["torch"]] == [3, 3]


# Usage, in this process: nothing is run

ORDER = "[OPTION ...] -m"


def run_main(capsys, *arguments):
    status = flatparam.__main__.main(["run", *arguments])
    return status, capsys.readouterr()


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(capsys, option):
    status, printed = run_main(capsys, option)
    assert status == 0
    assert printed.out.startswith("usage: python -m flatparam run [--runtime] SCRIPT")
    assert "-m MODULE" in printed.out
    assert "torchrun" in printed.out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "expected -m or a script, got nothing"),
        (["-c", "print()"], "expected -m or a script, got '-c'"),
        (["-m"], "expected a module, got nothing"),
    ],
)
def test_what_is_no_script_is_refused(capsys, arguments, expected):
    status, printed = run_main(capsys, *arguments)
    assert status == 2
    assert printed.err.startswith(f"flatparam run: {expected}\nusage: ")
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "launcher", "options"),
    [
        (["-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"], "python -m torch.distributed.run", ORDER),
        (
            ["-m", "torch.distributed.launch", "train.py"],
            "python -m torch.distributed.launch",
            "--use-env [OPTION ...] -m",  # else it adds --local-rank before our own arguments
        ),
        (["/some/bin/torchrun", "train.py"], "torchrun", ORDER),
        (["/some/bin/accelerate", "launch", "train.py"], "accelerate launch", ORDER),
        (["/some/bin/deepspeed", "train.py"], "deepspeed", "[OPTION ...] --module --no_local_rank"),
    ],
)
def test_a_launcher_is_refused_with_what_was_meant(capsys, arguments, launcher, options):
    """It would start the training in processes that flatparam is not installed in, without a word."""
    status, printed = run_main(capsys, *arguments)
    assert status == 2
    assert printed.out == ""
    assert f"flatparam run: {launcher} starts other Python processes" in printed.err
    assert f"{launcher} {options} flatparam run SCRIPT" in printed.err


def test_a_refused_install_runs_nothing(capsys, monkeypatch, tmp_path):
    def refuse(runtime):
        raise RuntimeError("flatparam is not installed: why")

    monkeypatch.setattr(flatparam.commands.run, "install", refuse)
    (tmp_path / "script.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    status, printed = run_main(capsys, str(tmp_path / "script.py"))
    assert status == 1
    assert printed.err == "flatparam run: flatparam is not installed: why\n"
    assert not (tmp_path / "ran").exists()
