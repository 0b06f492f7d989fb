"""Rewrites the source of a test that was written for GPUs into one for the CPU and gloo, as it is compiled.

"cuda" becomes "cpu", ``.cuda()`` does nothing, integer devices are the CPU, ``device_ids=`` is dropped,
``torch.cuda.x`` is ``fake_cuda.x`` of this module, nccl is gloo, and the two collectives that torch 2.13 renamed have
their new names.
"""

import ast
import unittest

import torch

MODULE = "_upstream_rewriter_"  # what this module is called in a test module
TRUE_NAMES = ("TEST_CUDA", "TEST_MULTIGPU", "HAS_GPU")
NEW_NAMES = {
    old: new
    for old, new in {
        "all_gather_into_tensor": "all_gather_single",
        "reduce_scatter_tensor": "reduce_scatter_single",
    }.items()
    if hasattr(torch.distributed, new)
}


def parse_for_cpu(source, path):
    """Return the syntax tree of the module ``source``, rewritten."""
    tree = _Rewriter().visit(ast.parse(source, path))
    tree.body.insert(_start(tree.body), ast.parse(f"import {__name__} as {MODULE}").body[0])
    return ast.fix_missing_locations(tree)


def _start(body):
    """The index of the first statement that is neither the docstring nor an import from ``__future__``."""
    for index, statement in enumerate(body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not (is_text or is_future):
            return index
    return len(body)


# What the rewritten tests call


class _FakeCuda:
    """What ``torch.cuda`` is in a test module: devices that are all the CPU."""

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(torch.cpu.device_count)
    current_device = staticmethod(lambda: torch.device("cpu"))
    set_device = synchronize = staticmethod(lambda device=None: None)
    empty_cache = staticmethod(lambda: None)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def __getattr__(self, name):
        if name in ("Stream", "Event", "stream", "current_stream"):
            return getattr(torch.cpu, name)
        raise unittest.SkipTest(f"torch.cuda.{name} has no stand-in on the CPU")


fake_cuda = _FakeCuda()


def cuda(value, *args, **kwargs):
    return value


def to(value, *args, **kwargs):
    return value.to(*(cpu_if_int(arg) for arg in args), **kwargs)


def cpu_if_int(device):
    return torch.device("cpu") if type(device) is int else device


def device(*args, **kwargs):
    """``torch.device``, but any index and any "cuda" is the CPU."""
    kind = args[0] if args else None
    if type(kind) is int or (isinstance(kind, str) and kind.split(":")[0] in ("cuda", "cpu")):
        return torch.device("cpu")
    return torch.device(*args, **kwargs)


# The syntax tree


def _of_torch(node, name):
    """Whether ``node`` is ``torch.<name>``."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    )


def _ours(name):
    return ast.Attribute(ast.Name(MODULE, ast.Load()), name, ast.Load())


def _call(name, *args):
    return ast.Call(_ours(name), list(args), [])


def _is(node, value):
    return isinstance(node, ast.Constant) and node.value == value


class _Rewriter(ast.NodeTransformer):
    def visit_Constant(self, node):
        if not isinstance(node.value, str):
            return node
        value = node.value
        if value == "cuda" or (value.startswith("cuda:") and value[5:].isdigit()):
            value = "cpu"
        elif value == "cpu:gloo,cuda:nccl":
            value = "cpu:gloo"
        elif value.startswith("torch.distributed."):
            name = value.removeprefix("torch.distributed.")
            value = f"torch.distributed.{NEW_NAMES.get(name, name)}"
        return ast.copy_location(ast.Constant(value), node)

    def visit_JoinedStr(self, node):
        """f"cuda:{rank}" is a device; other f-strings are messages and stay as they are."""
        is_device = len(node.values) == 2 and _is(node.values[0], "cuda:")
        return ast.copy_location(ast.Constant("cpu"), node) if is_device else node

    def visit_Name(self, node):
        is_true = isinstance(node.ctx, ast.Load) and node.id in TRUE_NAMES
        return ast.copy_location(ast.Constant(True), node) if is_true else node

    def visit_Attribute(self, node):
        if _of_torch(node, "cuda"):
            return ast.copy_location(_ours("fake_cuda"), node)
        if node.attr == "cuda" and _of_torch(node.value, "version"):
            return ast.copy_location(ast.Constant("12.0"), node)
        of_dist = isinstance(node.value, ast.Name) and node.value.id == "dist"
        if of_dist or _of_torch(node.value, "distributed"):
            node.attr = NEW_NAMES.get(node.attr, node.attr)
        return self.generic_visit(node)

    def visit_Dict(self, node):
        for index, key in enumerate(node.keys):
            value = node.values[index]
            if _is(key, "device_ids"):
                node.values[index] = ast.copy_location(ast.Constant(None), value)
            elif _is(key, "device") or _is(key, "device_id"):
                node.values[index] = ast.copy_location(_call("cpu_if_int", value), value)
        return self.generic_visit(node)

    def visit_Call(self, node):
        called = node.func
        if _of_torch(called, "device"):
            new = ast.Call(_ours("device"), node.args, node.keywords)
            return self.generic_visit(ast.copy_location(new, node))
        if isinstance(called, ast.Name) and called.id == "amp_definitely_not_available":
            return ast.copy_location(ast.Constant(False), node)
        if isinstance(called, ast.Attribute):
            if called.attr == "is_nccl_available":
                return ast.copy_location(ast.Constant(True), node)
            if called.attr == "version" and isinstance(called.value, ast.Name) and called.value.id == "nccl":
                return ast.copy_location(ast.parse("(2, 20, 0)", mode="eval").body, node)
            if called.attr in ("cuda", "to"):
                new = ast.Call(_ours(called.attr), [called.value, *node.args], node.keywords)
                node = ast.copy_location(new, node)
        node.keywords = [self._keyword(key) for key in node.keywords if key.arg not in ("device_ids", "output_device")]
        return self.generic_visit(node)

    def _keyword(self, keyword):
        if keyword.arg == "backend" and _is(keyword.value, "nccl"):
            keyword.value = ast.copy_location(ast.Constant("gloo"), keyword.value)
        elif keyword.arg in ("device", "device_id"):
            keyword.value = ast.copy_location(_call("cpu_if_int", keyword.value), keyword.value)
        return keyword
