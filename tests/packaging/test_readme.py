"""README.md: its quickstart runs as printed, its figures are those of the tables, its first screen is short.

Promises:
- the quickstart of README.md has at most 15 lines, and torchrun runs it as printed, with the printed output, a
  line in one write, so that the ranks' lines are not mixed
"""

import os
import re
import sys
from pathlib import Path

import pytest
from written import run_and_read_writes

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
FIRST_SCREEN = TEXT.partition("\n## ")[0]
PAGE = (ROOT / "docs" / "performance.md").read_text()


@pytest.mark.multiprocess
def test_the_quickstart_runs_as_printed(tmp_path):
    [program] = re.findall(r"^\*\*Quickstart\*\*: `train\.py`\n\n```python\n(.*?)^```$", TEXT, re.M | re.S)
    assert program.count("\n") <= 15
    [command] = re.findall(r"^`torchrun (.*?)`", TEXT, re.M)
    [output] = re.findall(r"^```\n(rank 0.*?)^```$", TEXT, re.M | re.S)
    (tmp_path / "train.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "torch.distributed.run", *command.split()]
    code, writes, errors = run_and_read_writes(call, cwd=tmp_path, env=environment)
    assert code == 0, errors
    assert sorted(writes) == output.splitlines(keepends=True)
    assert "Warning" not in errors
    assert "1,124,608 parameters" in TEXT
    assert {int(held.replace(",", "")) for held in re.findall(r"holds ([\d,]+)", output)} == {1_124_608 // 2}


FIGURES = [  # in README's first screen, the section of its table, the row, and there
    ("1.41 times", "d", r"tokens a second \|", "= 1.41x"),
    ("1.06 times", "k", r"host time of a step \| of bare", "= 1.06x"),
    ("2.26\n  times", "k", r"host time of a step \| of bare", "= 2.26x"),
    ("96 MiB more", "c", r"peak over base \| 768 MiB", "95.9 MiB"),
    ("not 864", "c", r"peak over base \| 768 MiB", "864 MiB"),
]


@pytest.mark.parametrize(("figure", "section", "row", "cell"), FIGURES, ids=[figure[0] for figure in FIGURES])
def test_a_figure_is_that_of_the_table_that_it_is_linked_to(figure, section, row, cell):
    gains = FIRST_SCREEN.partition("**What it gains**")[2].partition("**When not")[0]
    assert figure in gains
    assert f"docs/performance.md#{section}-" in gains
    [table] = re.findall(rf"<!-- table {section} -->\n(.*?)<!-- end -->", PAGE, re.S)
    assert re.search(rf"^\| {row}.*{re.escape(cell)}", table, re.M)


def test_the_first_screen_says_what_matters_and_no_more():
    assert re.search(r"^\*\*Status: alpha\.\*\* .*Linux", FIRST_SCREEN, re.M)
    assert "NCCL between several GPUs has not run yet" in FIRST_SCREEN
    not_for = FIRST_SCREEN.partition("**When not to use this**\n\n")[2].partition("\n\n")[0]
    assert [line[:2] for line in not_for.splitlines()] == ["- "] * 5
    assert "make demo" in FIRST_SCREEN
    assert "make test" in FIRST_SCREEN
    assert not re.search(r"MISSED|target:|<=", TEXT)
