"""The programs of the quickstart and of the how-to pages run as they stand; each page says whom it is for.

Promises:
- each program of the quickstart and of the how-to pages runs on two gloo ranks, with its own imports
- the quickstart's model learns
- each link between pages, and to a heading of a page, has its target
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = [DOCS / "quickstart.md", *sorted((DOCS / "howto").glob("*.md"))]
PAGES = sorted({*DOCS.glob("*.md"), *GUIDES})


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def is_program(block):
    return "init_process_group()" in block


PROGRAMS = {
    f"{page.stem}-{number}": block for page in GUIDES for number, block in enumerate(filter(is_program, blocks(page)))
}


def headings(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for title in re.findall(r"^#+ (.*)", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def run(folder, program):
    (folder / "train.py").write_text(program)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return done.stdout


def test_each_guide_has_a_program():
    assert len(GUIDES) > 10
    assert not [page.name for page in GUIDES if not any(map(is_program, blocks(page)))]


@pytest.mark.multiprocess
def test_the_quickstart_learns(tmp_path):
    said = run(tmp_path, PROGRAMS["quickstart-0"])
    for rank in (0, 1):
        losses = [float(loss) for loss in re.findall(rf"rank {rank}, step \d+: loss ([\d.]+)", said)]
        assert len(losses) == 20
        assert losses[-1] < 0.7 * losses[0]


@pytest.mark.multiprocess
@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"quickstart-0"}))
def test_the_program_of_a_guide_runs(name, tmp_path):
    run(tmp_path, PROGRAMS[name])


OF_MAINTAINERS = {"patches", "releasing", "targets"}  # which say so in their first sentence, or are made by a tool


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in OF_MAINTAINERS], ids=lambda page: page.stem
)
def test_a_page_says_its_kind_and_whom_it_is_for(page):
    title, empty, audience = page.read_text().split("\n")[:3]
    assert title.startswith("# ")
    assert not empty
    assert re.match(r"\*((Tutorial|How-to|Reference|Explanation)\. )?For (users|contributors)", audience)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_have_targets(page):
    for target, heading in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {target}"
        if heading:
            assert heading in headings(file), f"{page.name}: {target}#{heading}"
