"""flatparam/_C.pyi describes the extension: the same names, the same parameters, nothing more."""

import ast
import inspect
from pathlib import Path

import flatparam
from flatparam import _C

STUB = Path(flatparam.__file__).with_name("_C.pyi")
INHERITED = set(dir(object)) | set(dir(Exception)) | {"__module__", "__weakref__", "__dict__"}


def names_of(body):
    """Return the functions, classes and annotated names that the statements of a stub define."""
    names = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return names | {node.target.id: node for node in body if isinstance(node, ast.AnnAssign)}


def test_the_stub_has_the_module_s_names():
    stub = {name for name in names_of(ast.parse(STUB.read_text()).body) if not name.startswith("_")}
    assert stub == {name for name in dir(_C) if not name.startswith("__")}


def test_the_stub_has_the_classes_names():
    classes = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef)]
    assert {node.name for node in classes} >= {name for name in dir(_C) if isinstance(getattr(_C, name), type)}
    for node in classes:
        there = {name for name in dir(getattr(_C, node.name)) if name not in INHERITED}
        assert {name for name in names_of(node.body) if name not in INHERITED} == there, node.name


def parameters_in_stub(node):
    """Return [(name, kind, has a default)] of a stub's function."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    kinds = ["POSITIONAL_ONLY"] * len(arguments.posonlyargs) + ["POSITIONAL_OR_KEYWORD"] * len(arguments.args)
    required = len(plain) - len(arguments.defaults)
    found = [(plain[i].arg, kinds[i], i >= required) for i in range(len(plain))]
    found += [(arguments.vararg.arg, "VAR_POSITIONAL", False)] if arguments.vararg else []
    return found + ([(arguments.kwarg.arg, "VAR_KEYWORD", False)] if arguments.kwarg else [])


def parameters_in_module(function):
    """Return the same of a function of the extension, as help() shows it."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind.name, p.default is not inspect.Parameter.empty) for p in parameters]


def test_the_stub_has_the_functions_parameters():
    body = ast.parse(STUB.read_text()).body
    functions = [(node, getattr(_C, node.name)) for node in body if isinstance(node, ast.FunctionDef)]
    for owner in [node for node in body if isinstance(node, ast.ClassDef)]:
        methods = [node for node in owner.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("__")]
        methods = [node for node in methods if not node.decorator_list]  # a property has no parameters
        functions += [(node, getattr(getattr(_C, owner.name), node.name)) for node in methods]
    assert functions
    for node, function in functions:
        assert parameters_in_stub(node) == parameters_in_module(function), node.name


def test_the_types_are_shipped():
    assert STUB.with_name("py.typed").is_file()
