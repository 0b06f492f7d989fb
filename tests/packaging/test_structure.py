"""The structure of the package: who imports whom. Read from the source, imports inside functions included."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import flatparam

PACKAGE = Path(flatparam.__file__).parent
PRIVATE = "flatparam.common.torch_private"  # the one file that imports torch's private modules

# What a folder may import of the others
LAYERS = {
    "common": set(),
    "dropin": {"common"},
    "fsdp": {"common"},
    "layer_zero": {"common", "dropin", "fsdp"},
    "checkpoint": {"common", "fsdp", "layer_zero", "_version"},
}


def name_of(file):
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imports_of(name):
    """Full names of what a module imports, in functions too; not what only type checkers see."""
    package = name.split(".") if FILES[name].name == "__init__.py" else name.split(".")[:-1]
    waiting = [ast.parse(FILES[name].read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_imports_of(name):
    """The modules of the package that a module imports."""
    found = ((full if full in FILES else full.rpartition(".")[0]) for full in imports_of(name))
    return {module for module in found if module in FILES and module not in (name, "flatparam")}


def test_one_file_imports_torchs_private_modules():
    for name in FILES:
        private = [full for full in imports_of(name) if full.startswith("torch.") and "._" in full]
        assert name == PRIVATE or not private, f"{name} imports {private}: import it from {PRIVATE}"


def test_no_import_cycle():
    list(TopologicalSorter({name: own_imports_of(name) for name in FILES}).static_order())  # else CycleError


def test_lower_layers_import_no_upper_ones():
    for name in FILES:
        layer = name.split(".")[1] if "." in name else ""
        for other in own_imports_of(name) if layer in LAYERS else ():
            assert other.split(".")[1] in {layer, *LAYERS[layer]}, f"{name} imports {other}"
