"""What the tools that make pages of the documentation share."""

from collections.abc import Sequence
from pathlib import Path


def keep(page: Path, text: str, faults: Sequence[str], arguments: Sequence[str], tool: str) -> int:
    """Write ``text`` to ``page``; with the argument ``--check`` only compare. Print the faults.

    ``faults``: found by the caller; ``tool``: the command that writes the page. Returns the exit status: 1 for faults.
    """
    found = list(faults)
    if list(arguments) != ["--check"]:
        page.write_text(text)
    elif not page.exists() or page.read_text() != text:
        found.append(f"{page} is out of date: run {tool}")
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)
