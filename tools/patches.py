"""Write docs/patches.md: all changes that flatparam makes to torch and to the process.

python tools/patches.py            write the page
python tools/patches.py --check    exit status 1 if the page is out of date, or names a test that does not exist
"""

import sys
from importlib import import_module
from pathlib import Path

from pages import keep

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "patches.md"
TOP = """\
# Changes of torch and of the process
`python tools/patches.py` makes this page from the table in `flatparam/common/patches.py`. Each module declares its
changes there, with the time in which they are in force; before and afterwards every function of torch is the object
that it was. Where another library has replaced our function in between, its function stays, and ours below it calls
the original alone. A change takes no time in a step: it is made when its time begins and undone when it ends.

`module:name` is an attribute that is replaced, or the function that registers a hook.
"""


def page() -> str:
    for module in (
        "flatparam._api",
        "flatparam.checkpoint",
        "flatparam.layer_zero",
        "flatparam.installing",
        "flatparam.elastic",
    ):
        import_module(module)
    from flatparam.common.patches import TABLE

    lines = [TOP]
    for when in dict.fromkeys(entry.when for entry in TABLE):
        lines.append(f"\n## {when[0].upper()}{when[1:]}\n| target | why | undo | test |\n|---|---|---|---|\n")
        rows: dict[tuple[str, str, str], list[str]] = {}
        for entry in (entry for entry in TABLE if entry.when == when):
            rows.setdefault((entry.why, entry.undo, entry.test), []).extend(entry.targets)
        for (why, undo, test), targets in rows.items():
            shown = "<br>".join(f"`{target}`" for target in targets)
            lines.append(f"| {shown} | {why} | {undo} | [{Path(test).name}](../{test}) |\n")
    return "".join(lines)


def main(arguments: list[str]) -> int:
    text = page()
    from flatparam.common.patches import TABLE

    found = [f"{entry.targets}: no test {entry.test!r}" for entry in TABLE if not (ROOT / entry.test).is_file()]
    found += [f"{entry.targets}: does not say why" for entry in TABLE if not entry.why]
    return keep(PAGE, text, found, arguments, "python tools/patches.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
