"""The structure of the package: which module imports which. Read from the source, type hints included."""

import ast
import importlib
import re
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
    "elastic": {"checkpoint", "common", "fsdp"},
}


def name_of(file):
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imports_of(name):
    """Full names of what a module imports, in functions and for type checkers too."""
    package = name.split(".") if FILES[name].name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(FILES[name].read_text())):
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
    files = FILES.keys() - {"flatparam"}  # which loads its names when they are first asked for
    list(TopologicalSorter({name: own_imports_of(name) for name in files}).static_order())  # else CycleError


def test_lower_layers_import_no_upper_ones():
    for name in FILES:
        layer = name.split(".")[1] if "." in name else ""
        for other in own_imports_of(name) if layer in LAYERS else ():
            assert other.split(".")[1] in {layer, *LAYERS[layer]}, f"{name} imports {other}"


ROOMS = ["desync", "sharding", "unit", "interop", "states", "wrapper"]  # of fsdp; each may import those before it


def test_a_room_of_fsdp_imports_those_below_it():
    rooms = {name: name.split(".")[2] for name in FILES if name.count(".") > 2 and name.startswith("flatparam.fsdp.")}
    assert set(rooms.values()) == set(ROOMS)
    for name, room in rooms.items():
        for other in own_imports_of(name) & rooms.keys():
            assert ROOMS.index(rooms[other]) <= ROOMS.index(room), f"{name} imports {other}"


MOST_LINES = 45  # of a function, without its head and docstring


def test_no_function_is_long():
    for name, file in FILES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
                lines = node.end_lineno - body[0].lineno + 1
                assert lines <= MOST_LINES, f"{name}.{node.name} has {lines} lines: cut it into parts"


def test_no_method_needs_more_than_its_class():
    """``self: Any`` tells type checkers to look away: such a method is a function of an object with what it uses."""
    for name, file in FILES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            for method in node.body if isinstance(node, ast.ClassDef) else []:
                first = method.args.args[:1] if isinstance(method, ast.FunctionDef) else []
                typed = any(each.arg == "self" and each.annotation is not None for each in first)
                assert not typed, f"{name}.{node.name}.{method.name} types self"


MOST_BASES = 3  # classes of ours that a class of ours is made from
IN_PARTS = {"flatparam.layer_zero"}  # its handle is one class in files, each a base of the next


def test_no_class_is_joined_from_many():
    """A part of a class that only one class has is no class: it is functions of the object that they work on."""
    for name in FILES.keys() - {"flatparam.__main__"}:
        for kind in vars(importlib.import_module(name)).values():
            if isinstance(kind, type) and kind.__module__ == name and name.rpartition(".")[0] not in IN_PARTS:
                bases = [base.__name__ for base in kind.__mro__[1:] if base.__module__.startswith("flatparam.")]
                assert len(bases) <= MOST_BASES, f"{name}.{kind.__name__} is joined from {bases}"


STORES = "flatparam.fsdp.desync.stores"  # the one file that calls stores in Python
EXCEPTIONS = {
    "flatparam.common.collectives": {"PrefixStore"},  # no call
    "flatparam.common.pickling": {"pg_map"},  # for the names of backends
    "flatparam.dropin.comparing": {"_get_default_store"},  # may not import the runtime; expects each error of its calls
}
RAW = re.compile("_get_default_store|pg_map|getStore|(File|Hash|Prefix|TCP)Store")


def test_one_file_calls_stores():
    """Nothing else gets at one of torch's, of which a call may raise what says nothing to users."""
    for name, file in FILES.items():
        nodes = ast.walk(ast.parse(file.read_text()))
        raw = {node.attr for node in nodes if isinstance(node, ast.Attribute) and RAW.fullmatch(node.attr)}
        allowed = EXCEPTIONS.get(name, set())
        assert name == STORES or raw <= allowed, f"{name} uses {raw}: ask {STORES} for a store"


def test_calls_of_the_board_are_guarded():
    """The C++ side calls a store for ``_C.HealthBoard``: from one class, whose methods tell that the store is gone."""
    (board,) = (
        node
        for node in ast.parse(FILES["flatparam.fsdp.desync.liveness"].read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "HealthBoard"
    )
    for method in board.body:
        calls = [node.func for node in ast.walk(method) if isinstance(node, ast.Call)]
        native = {
            call.attr for call in calls if isinstance(call, ast.Attribute) and "native" in ast.unparse(call.value)
        }
        guarded = isinstance(method, ast.FunctionDef) and "reaching()" in map(ast.unparse, method.decorator_list)
        assert guarded or native <= {"said"}, f"Board.{method.name} calls {native}"  # which asks no store
    elsewhere = {"flatparam.fsdp.desync.trace": {"watch", "around_wait"}}  # which ask none, or catch all
    for name, file in FILES.items():
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
        native = {node.attr for node in calls if ast.unparse(node.value).endswith(".native")}
        allowed = elsewhere.get(name, set())
        assert name == "flatparam.fsdp.desync.liveness" or native & BOARD <= allowed, f"{name} calls {native}"


BOARD = {method for method in dir(flatparam._C.HealthBoard) if not method.startswith("_")}
IN_CPP = re.compile(
    r"(store_?|posts_|group\.getStore\(\))->(set|get|add|check|compareSet|multiGet|deleteKey|get_to_str|wait)\("
)


def test_three_files_call_stores_in_cpp():
    """Those behind ``_C.HealthBoard``."""
    for file in sorted((PACKAGE.parent / "csrc").rglob("*.[ch]*")):
        if file.name not in ("fp_board.cpp", "fp_calls.cpp", "fp_watch.cpp"):
            assert not IN_CPP.search(file.read_text()), file


STRUCTS = {
    "fp_root": "runtime/fp_types.h",
    "fp_unit": "runtime/fp_types.h",
    "fp_flat_param": "runtime/fp_flat_param.h",
    "fp_flat_buffer_plan": "tensor/fp_flat_buffer.h",
    "fp_flat_buffer": "tensor/fp_flat_buffer.hpp",
}
MOST_FIELDS = 120  # of all five; a field more wants another one gone: one that follows from others, or says the same
IN_CPP_STRUCTS = re.compile(
    r"\n    \w[^;{]*\([^;{]*\)(?: const)?\s*\{.*?\n    \}|enum class \w+ \{[^}]*\} ?", re.DOTALL
)


def fields_of(struct):
    """The names of a struct's fields: an array, or another struct, is one; functions and enums are none."""
    text = (PACKAGE.parent / "csrc" / STRUCTS[struct]).read_text()
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    if f"}} {struct};" in text:
        end = text.index(f"}} {struct};")
        body = text[text.rindex("{", 0, end) + 1 : end]
    else:
        body = text.partition(f"struct {struct} : ")[2].partition("{")[2].partition("\n};")[0]
    body = re.sub("<[^;]*?>", "", IN_CPP_STRUCTS.sub("", body).replace("PyObject_HEAD", ""))
    declared = [line.partition("=")[0].strip() for line in body.split(";") if "(" not in line]
    return [name for line in declared for name in re.findall(r"(\w+)\s*(?:,|$)", line)]


def test_the_structs_of_the_runtime_have_few_fields():
    found = {struct: fields_of(struct) for struct in STRUCTS}
    some = {"fp_root": "watched", "fp_unit": "next_forward", "fp_flat_param": "shown", "fp_flat_buffer": "node"}
    assert all(name in found[struct] for struct, name in some.items())
    assert sum(map(len, found.values())) <= MOST_FIELDS, {struct: len(names) for struct, names in found.items()}


def test_a_test_file_imports_test_files_of_its_folder_alone():
    """So that a folder of tests runs by itself: pytest finds test files in the folders that it was given."""
    tests = Path(__file__).parents[1]
    for file in tests.rglob("*.py"):
        for name in re.findall(r"^(?:from|import) (test_\w+)", file.read_text(), re.MULTILINE):
            assert file.with_name(f"{name}.py").is_file(), f"{file.relative_to(tests)} imports {name}"
