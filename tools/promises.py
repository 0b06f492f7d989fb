"""Write tests/PROMISES.md: the head of each test file, by folder.

A head is the file's docstring. Its first paragraph says in a sentence what the file shows. A list under ``Promises:``
has one promise an item, with the tests that show it in backticks.

    python tools/promises.py            write the page
    python tools/promises.py --check    exit status 1 if the page is out of date, or names a test that does not exist
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pages import keep

TESTS = Path(__file__).resolve().parent.parent / "tests"
PAGE = TESTS / "PROMISES.md"
TOP = """\
# Promises, and the tests that show them
`python tools/promises.py` makes this page from the heads of the test files. `make test ARGS="-k NAME"` runs one test.
Unless a line says otherwise, the oracle is an unsharded module, ranks are two gloo processes or two simulated ranks,
and equal means bit for bit. Lines that begin with "where torch 2.13 goes wrong" name a fault of torch's class that ours
does not have.
"""


def head_of(file: Path) -> tuple[str, list[str]]:
    """Return the first paragraph of a test file's docstring, and the items under ``Promises:``, each on one line."""
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    about, _, promises = doc.partition("\n\nPromises:\n")
    items = re.split(r"^- ", promises, flags=re.MULTILINE)[1:]
    return " ".join(about.partition("\n\n")[0].split()), [" ".join(item.split()) for item in items]


def files() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"), key=lambda file: (file.parent, file.name))


def page() -> str:
    lines, folder = [TOP], None
    for file in files():
        where = file.relative_to(TESTS)
        if where.parent != folder:
            folder = where.parent
            lines.append(f"\n## {folder}\n")
        about, promises = head_of(file)
        lines.append(f"- [{file.name}]({where}): {about}\n")
        lines += [f"  - {promise}\n" for promise in promises]
    return "".join(lines)


def faults() -> Iterator[str]:
    """Yield a line for each file without a head, and for each test that a promise names and that does not exist."""
    by_name = {file.name: file for file in files()}
    for file in by_name.values():
        about, promises = head_of(file)
        if not about:
            yield f"{file}: has no docstring that says what it shows"
        for other, test in re.findall(r"`(?:\w+/)*(?:(test_\w+\.py)(?:::)?)?(test_\w+)?`", " ".join(promises)):
            named = by_name.get(other) if other else file
            if named is None or (test and f"def {test}(" not in named.read_text()):
                yield f"{file}: names {other}::{test}, which does not exist"


def main(arguments: list[str]) -> int:
    return keep(PAGE, page(), list(faults()), arguments, "python tools/promises.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
