"""The scripts and the notebook of examples/ run on gloo ranks, and print the last lines that they promise.

Promises:
- each example runs as its head says and prints the last lines that it promises, with public names alone
- examples/elastic.py trains on when a rank is killed, with the loss that it has without
- examples/resume_elsewhere.py loads the same bits at other numbers of ranks and in other strategies
"""

import ast
import json
import os
import re
import sys

import forked_scripts
import pytest
from scripts import EXAMPLES, check_help, check_last_lines, head_of, printed_on_ranks

import flatparam

SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "__init__.py")
OF_TOOLS = ("hf_trainer.py", "lightning_fabric.py", "qlora.py")  # in tests/integrations/test_trainers_examples.py
OWN = [script for script in SCRIPTS if script not in OF_TOOLS]
README = (EXAMPLES / "README.md").read_text()


def commands_of(script):
    """Return (ranks, arguments) of each torchrun line in the head of an example."""
    found = re.findall(rf"torchrun .*--nproc-per-node (\d).* examples/{script}(.*)", head_of(script))
    return [(int(ranks), arguments.split("#")[0].split()) for ranks, arguments in found]


def run(*command, folder):
    """Return the standard output and the standard error of a Python process in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, *command]
    done = forked_scripts.completed(call, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize("script", [script for script in OWN if script not in ("elastic.py", "resume_elsewhere.py")])
def test_an_example_prints_the_last_lines_that_its_head_promises(script, tmp_path):
    ranks, arguments = commands_of(script)[0]
    printed = printed_on_ranks(script, ranks, tmp_path, *arguments)
    check_last_lines(printed, head_of(script).split("\n\n")[-1])


@pytest.mark.multiprocess
def test_torchrun_and_python_start_an_example_as_its_head_says(tmp_path):
    script = str(EXAMPLES / "gpt.py")
    _, (ranks, arguments) = commands_of("gpt.py")
    options = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    printed, _ = run(*options, script, "--steps", "20", *arguments, folder=tmp_path)
    check_last_lines(printed, "step 20: loss 3.07\n2 ranks, FULL_SHARD, bf16: each holds 67,456 of 134,912 parameters")
    printed, _ = run(script, "--steps", "10", *arguments, folder=tmp_path)  # on one rank
    check_last_lines(printed, "step 30: loss 3.21\n1 ranks, FULL_SHARD, bf16: each holds 134,912 of 134,912 parameters")


@pytest.mark.multiprocess
@pytest.mark.parametrize("is_killed", [True, False])
def test_training_goes_on_when_a_rank_is_killed(is_killed, tmp_path):
    path = str(EXAMPLES / "elastic.py")
    (ranks, arguments), _ = commands_of("elastic.py")
    options = ["--max-restarts", "0", "--standalone", f"--nproc-per-node={ranks}", "-m", "flatparam.elastic"]
    arguments = arguments if is_killed else ["--pause", "0"]
    printed, errors = run("-m", "torch.distributed.run", *options, path, *arguments, folder=tmp_path)
    loss, steps = head_of("elastic.py").split("\n\n")[-1].splitlines()
    assert ("ranks go on from step" in errors) == is_killed
    if not is_killed or " on 2 ranks" not in printed:  # the new process has joined before a step without it
        steps = "40 steps: 40 on 3 ranks"
    check_last_lines(printed, f"{loss}\n{steps}")
    assert sum(map(int, re.findall(r"(\d+) on", printed))) == 40


@pytest.mark.multiprocess
def test_a_state_is_loaded_elsewhere_with_the_same_bits(tmp_path):
    script = "resume_elsewhere.py"
    (ranks, arguments), (others, elsewhere) = commands_of(script)
    printed = [printed_on_ranks(script, ranks, tmp_path, *arguments)]
    runs = ((others, elsewhere), (4, [*arguments, "--strategy", "LAYER_ZERO_NESTED"]), (1, arguments))
    for size, more in runs:
        step, checksum = re.search(r"saved at step (\d+): (sha256 [0-9a-f]{16})\n$", printed[-1]).groups()
        printed.append(printed_on_ranks(script, size, tmp_path, *more))
        assert re.match(rf"loaded at step {step} by {size} ranks, \w+: {checksum}\n", printed[-1]), printed
        assert printed[-1].count(checksum) == 1  # another one is saved: it has trained
    check_last_lines("".join(printed[:2]), head_of(script).split("\n\n")[-1])


@pytest.mark.multiprocess
def test_the_notebook_prints_the_outputs_that_are_in_it(tmp_path):
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "notebook.py").write_text("\n\n".join("".join(cell["source"]) for cell in code))
    outputs = "".join(line for cell in code for output in cell["outputs"] for line in output["text"])
    assert outputs.count("\n") == 3
    check_last_lines(run("notebook.py", folder=tmp_path)[0], outputs)


@pytest.mark.parametrize("script", OWN)
def test_an_example_explains_its_options(script, capsys):
    check_help(script, capsys)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_can_be_copied(script):
    """It is short, stands alone, and uses public names of flatparam."""
    text = (EXAMPLES / script).read_text()
    assert text.count("\n") < 150
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module.split(".")[0] not in ("examples", "tests", "benchmarks")
            if node.module.split(".")[0] == "flatparam":
                assert node.module == "flatparam"
                assert {alias.name for alias in node.names} <= {*flatparam.__all__, "checkpoint", "elastic"}
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr.endswith("__") or node.attr == "_exit", node.attr


@pytest.mark.parametrize("script", [*SCRIPTS, "notebook.ipynb"])
def test_the_table_has_each_example_with_its_command_and_last_line(script):
    (row,) = [line for line in README.splitlines() if line.startswith(f"| [{script}]({script})")]
    if script.endswith(".py"):
        command = re.search(r"torchrun [^#\n]*", head_of(script))[0].strip()
        assert f"`{command}`" in row
        assert f"`{head_of(script).splitlines()[-1].strip()}`" in row
