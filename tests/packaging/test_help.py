"""Help where users look for it: types and help() of the class, exceptions, `make help`, and commands that are misspelt.

Promises:
- each argument of the class has a type and a line of help; the example in its help trains
- every exception of the package is in one file and a name of ``flatparam``
- `make help` prints each target of the Makefile, from the table of CONTRIBUTING.md
"""

import ast
import inspect
import pydoc
import re
import subprocess
import textwrap
import typing
from pathlib import Path

import forked_scripts
import pytest
import torch
from gloo import fake_world
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP

import flatparam
from flatparam.fsdp import errors

ROOT = Path(__file__).resolve().parents[2]
FSDP = flatparam.FullyShardedDataParallel


def parts_of(hint):
    """Yield a type and the types in it."""
    yield hint
    for part in hint if isinstance(hint, list) else typing.get_args(hint):
        yield from parts_of(part)


def test_every_argument_has_a_type():
    hints = typing.get_type_hints(FSDP.__init__)
    assert {*inspect.signature(FSDP).parameters} == {*hints}
    assert [name for name, hint in hints.items() if typing.Any in parts_of(hint)] == []


def test_help_begins_with_what_the_class_does_and_explains_every_argument():
    own, _, _ = pydoc.plain(pydoc.render_doc(FSDP)).partition("Methods inherited from torch.nn.modules.module.Module")
    lines = inspect.getdoc(FSDP).splitlines()
    assert lines[0].startswith("Shard the parameters, gradients and optimizer state of ``module``")
    assert lines[0] in own.partition("Method resolution order")[0]
    explained = [line.split(":")[0].strip() for line in lines if re.match(r" {4}\w+: ", line)]
    assert explained == [*inspect.signature(FSDP).parameters]
    words = [value.__doc__ for value in vars(nn.Module).values() if callable(value) and value.__doc__]
    assert words
    assert [doc for doc in words if doc.strip().splitlines()[0] in own] == []


def test_each_strategy_has_a_line_of_help():
    lines = inspect.getdoc(flatparam.ShardingStrategy).splitlines()
    explained = [re.match(r"- ``(\w+)``: \w+", line) for line in lines]
    assert [found[1] for found in explained if found] == [*flatparam.ShardingStrategy.__members__]


def test_help_of_methods_sends_to_no_private_function():
    """A user who reads "as ``clip`` does" cannot find ``clip``: names in quotes are public, or arguments."""
    assert "``clip``" not in FSDP.clip_grad_norm_.__doc__
    assert "norm_type" in FSDP.clip_grad_norm_.__doc__


def test_the_methods_that_torchs_class_lacks_are_in_the_docs():
    ours = {name for name in dir(FSDP) if not name.startswith("_")} - {*dir(TorchsFSDP)} - {*dir(nn.Module)}
    methods = {name for name in ours if inspect.isfunction(getattr(FSDP, name))}
    text = (ROOT / "docs" / "runtime.md").read_text()
    table = text.partition("## Methods that torch's class lacks")[2].partition("\n## ")[0]
    assert methods == set(re.findall(r"`(\w+)\(\)`", table))


def test_the_example_in_help_trains():
    example = inspect.getdoc(FSDP).split("Example::")[1].split("Args:")[0]

    class Block(nn.Sequential):
        pass

    names = {"torch": torch, "Block": Block, "FullyShardedDataParallel": FSDP}
    names |= {"MixedPrecision": flatparam.MixedPrecision, "batch": torch.ones(3, 4)}
    made = []

    class Transformer(nn.Sequential):
        def __init__(self):
            super().__init__(Block(nn.Linear(4, 4)), nn.Linear(4, 1))
            made.append(self)

        def forward(self, batch):
            return super().forward(batch).sum()

    with fake_world(2):
        exec(textwrap.dedent(example), names | {"Transformer": Transformer}, names)
    assert len(FSDP.fsdp_modules(names["model"])) == 2
    assert made == [names["model"].module]
    assert names["optimizer"].state


def test_every_exception_is_in_one_file_and_exported():
    found = {}
    for path in (ROOT / "flatparam").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and re.search(
                r"(Error|Warning)\b", " ".join(map(ast.unparse, node.bases))
            ):
                found[node.name] = path.relative_to(ROOT / "flatparam").as_posix()
    assert found.pop("BadInput") == "inspect/planning.py"  # the commands catch it and print its line
    assert set(found.values()) == {"fsdp/errors.py"}
    names = {*found, "StateError", "ShardError"}  # these two are made in C
    assert names == set(re.findall(r"^\| ``(\w+)``", errors.__doc__, re.M))
    for name in names:
        assert getattr(flatparam, name) is getattr(errors, name)
        assert name in flatparam.__all__


def test_make_help_prints_the_table_of_targets():
    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = re.findall(r"^\| `(?:make|PYTHON|ARGS).*$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert len(done.stdout.splitlines()) == len(rows)
    assert "](" not in done.stdout
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert [name for name in targets if not re.search(rf"(make|,) {name}\b", done.stdout)] == []


MISSPELT = [
    (["insepct"], "got 'insepct'; did you mean inspect?"),
    (["something-else"], "got 'something-else'; try --help"),
    (["inspect", "exampels.demo.model:default_model"], "No module named 'exampels'; did you mean examples?"),
    (
        ["inspect", "examples.demo.modle:default_model"],
        "No module named 'examples.demo.modle'; did you mean examples.demo.model?",
    ),
    (["advise", "examples.demo.model:defalt_model"], "has no `defalt_model`; did you mean default_model?"),
    (["inspect", "examples.demo.model:default_model", "--wrap", "Blok"], "ModuleList; did you mean Block?"),
]


@pytest.mark.multiprocess
def test_a_misspelt_name_is_answered_with_the_one_that_is_meant(tmp_path):
    options = {"advise": ["--world-size", "2", "--gpu-memory", "1GB"], "inspect": ["--world-size", "2"]}
    command = forked_scripts.as_main("flatparam")
    programs = [(command, [*arguments, *options.get(arguments[0], [])]) for arguments, _ in MISSPELT]
    for end, (arguments, message) in zip(forked_scripts.run(programs, tmp_path), MISSPELT, strict=True):
        assert end.status == 2, arguments
        assert end.err.rstrip().endswith(message), arguments
