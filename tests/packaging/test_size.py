"""The code of the package does not grow: lines without comments, docstrings and blank lines, of Python and of C.

A change that makes it smaller lowers the limit.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON_LINES, C_LINES = 21_183, 19_230
FILE_LINES = 700  # with comments
C_STRINGS = re.compile(r'(?:"(?:\\.|[^"\\\n])*"\s*)+')
SPACE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PYTHON_FILES = [*(ROOT / "flatparam").rglob("*.py"), ROOT / "flatparam" / "_C.pyi"]
C_FILES = [file for file in (ROOT / "csrc").rglob("*") if file.suffix in (".c", ".h", ".cpp", ".hpp", ".cu")]


def lines_of_python(text):
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SPACE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def lines_of_c(text):
    code = re.sub(r"/\*.*?\*/|//[^\n]*", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL)
    code = C_STRINGS.sub(lambda text: "\n" * text[0].count("\n") if r"\n--\n\n" in text[0] else text[0], code)
    return sum(bool(line.strip()) for line in code.split("\n"))


def test_the_counts_leave_out_comments_and_docstrings():
    code = '"""One.\n\nTwo."""\n\nX = """a\nb"""  # three\n\n\ndef f():\n    """Four."""\n    # five\n    return X\n'
    assert lines_of_python(code) == 4
    assert lines_of_c("/* one\n * two */\nint a; // three\n\nint b; /* four */\n") == 2
    assert lines_of_c('{"f", f,\n "f()\\n--\\n\\nOne. "\n "Two."},\n{"g",\n "no"\n "docstring"},\n') == 5


def test_the_code_does_not_grow():
    assert sum(lines_of_python(file.read_text()) for file in PYTHON_FILES) <= PYTHON_LINES
    assert sum(lines_of_c(file.read_text()) for file in C_FILES) <= C_LINES


def test_no_file_is_long():
    longest = max((len(file.read_text().split("\n")), str(file)) for file in (*PYTHON_FILES, *C_FILES))
    assert longest[0] <= FILE_LINES, longest
