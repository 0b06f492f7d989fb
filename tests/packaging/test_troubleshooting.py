"""docs/troubleshooting.md has the errors and warnings in their own words; oracle: the strings in the source.

Promises:
- each text of the page is a message of the source, so that a search for the words of an error finds its row
- each exception class has a section; each warning and each error, of Python, C and C++, has a row, which may stand for
  several of one cause
- each row has a cause and a fix of its own, so that one row is enough to read
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
CELLS = re.findall(r"^\| (`[^|]+`) \|", PAGE, re.MULTILINE)  # the first of each row
ROWS = [text for cell in CELLS for text in re.findall("`([^`]+)`", cell)]  # "…" stands for what differs
OF_ONE_FORM = re.findall("`([^`]+)`", PAGE.partition("## Messages of one form")[2].partition("\n## ")[0])
TREES = {
    file: ast.parse(file.read_text()) for file in sorted((ROOT / "flatparam").rglob("*.py")) if file.name[0] != "_C"
}
CALLS = {"StateError", "OrderError", "StoreGoneError", "DeviceError", "WritebackError", "ShardError"}
CALLS |= {"warn", "warn_user", "warn_here", "_break", "_break_without"}
CALLS |= {
    "CheckpointError",
    "FileError",
    "ValueError",
    "TypeError",
    "RuntimeError",
    "KeyError",
    "ImportError",
    "OSError",
}
OF_COMMANDS = {"advise", "commands", "inspect"}  # their messages name the option that was given wrong
C_FILES = sorted((ROOT / "csrc").rglob("*.[ch]*"))
C_STRING = r'"(?:[^"\\\n]|\\.)*"'
C_CALLS = r"\b(PyErr_(Format|SetString)|TORCH_\w*CHECK\w*|TORCH_WARN\w*|fp_(raise|fail)|gone|refuse_(moved|gradient))\("


def words(node):
    """The text of a string in the source, with "…" for each value that is put into it; empty for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""


def words_of_c(text):
    """The strings of C source: neighbours are one string, and "…" stands for a format, or for C++ between strings."""
    for run in re.finditer(rf"{C_STRING}(?:\s*{C_STRING})*", text):
        yield re.sub(r"%[-.0-9lz]*[a-zA-Z]", "…", "".join(one[1:-1] for one in re.findall(C_STRING, run[0])))


def errors_of_c(text):
    """(line, words) of each call of C source that raises or warns; what is between its strings is "…"."""
    for call in re.finditer(C_CALLS, text):
        depth, end = 1, call.end()
        while depth:  # a parenthesis inside of a string has its pair there
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield text.count("\n", 0, call.start()) + 1, "…".join(words_of_c(text[call.end() : end]))


def fits(row, message):
    """Whether the parts of a row, between its "…", come in this order in a message."""
    at = 0
    for part in row.split("…"):
        found = message.find(part.strip(), at)
        if found < 0:
            return False
        at = found + len(part.strip())
    return True


def messages():
    for tree in TREES.values():
        docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        yield from (words(node) for node in ast.walk(tree) if node not in docs)
    for file in C_FILES:
        yield from words_of_c(file.read_text())


def test_each_text_is_a_message_of_the_source():
    found = [message for message in messages() if " " in message]
    assert len(ROWS) > 100
    unknown = [row for row in ROWS if not any(fits(row, message) for message in found)]
    assert not unknown, "no message has these words:\n" + "\n".join(unknown)


def test_each_text_says_enough_to_be_found():
    named = [row for row in ROWS if row not in OF_ONE_FORM]
    short = [row for row in named if max(len(part.split()) for part in row.split("…")) < 3]
    assert not short
    assert len(set(ROWS)) == len(ROWS)


def test_each_class_has_a_section():
    classes = {
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and re.search("(Error|Warning)$", node.name)
    }
    headings = " ".join(re.findall("^## .*", PAGE, re.MULTILINE))
    assert {"OrderError", "CheckpointError"} <= classes
    assert not {name for name in classes | {"StateError", "ShardError"} if name not in headings}


def test_each_warning_and_each_error_has_a_row():
    lacking = []
    for file, tree in TREES.items():
        if file.relative_to(ROOT / "flatparam").parts[0] in OF_COMMANDS:
            continue
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func).rpartition(".")[2]
            text = words(call.args[0]) if name in CALLS and call.args else ""
            if len(re.findall(r"\w+", text)) > 3 and not any(fits(row, text) for row in ROWS):
                lacking.append(f"{file.relative_to(ROOT)}:{call.lineno}: {text}")
    assert not lacking, "docs/troubleshooting.md has no row for:\n" + "\n".join(lacking)


def test_each_error_of_c_has_a_row():
    lacking, count = [], 0
    for file in C_FILES:
        for line, text in errors_of_c(file.read_text()):
            is_told = len(re.findall(r"\w+", text)) > 3
            count += is_told
            if is_told and not any(fits(row, text) for row in ROWS):
                lacking.append(f"{file.relative_to(ROOT)}:{line}: {text}")
    assert count > 130
    assert not lacking, "docs/troubleshooting.md has no row for:\n" + "\n".join(lacking)


def test_each_row_has_a_cause_and_a_fix():
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert not [row for row in rows if len(row) != 3 or not all(row)]
    assert not [row for row in rows if any(re.match(r"the same($|,)", cell) for cell in row[1:])]
