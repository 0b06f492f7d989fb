"""The code blocks of the pages run as they stand, twice; each page says whom it is for.

Promises:
- each Python block of README.md and docs/ uses only names that it makes or imports
- each Python block of README.md and docs/ runs with its own imports, on two gloo ranks if it trains, and runs again
- the program of a how-to page ends by printing the line that the page names
- the quickstart's model learns, and goes on where it ended on another number of ranks; each line is one write
- each link between pages, and to a heading of a page, has its target
"""

import ast
import builtins
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from scripts import printed_on_ranks
from written import run_and_read_writes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOWTO = sorted((DOCS / "howto").glob("*.md"))
GUIDES = [DOCS / "quickstart.md", *HOWTO]
PAGES = sorted({*DOCS.glob("*.md"), *GUIDES})

IN_OTHER_TESTS = {  # (page, number of the block): the test that runs it as it stands
    ("README", 0): "tests/packaging/test_readme.py",
    ("layerzero", 1): "tests/support/layer_zero_driver.py",
    ("migrating", 1): "tests/fsdp/wrapper/test_migrating.py",
    ("migrating", 2): "tests/fsdp/wrapper/test_migrating.py",
}
MY_TRAINING = """
import torch
from torch import nn

from flatparam import FullyShardedDataParallel

class Block(nn.Linear):
    pass

def Transformer():
    return nn.Sequential(Block(8, 8), Block(8, 8))

def loss(model, batch):
    return model(batch).float().square().mean()

torch.distributed.init_process_group()
torch.manual_seed(0)
steps = [[torch.randn(4, 8) for _ in range(2)] for _ in range(2)]
micro_batches = steps[0]
model, torch_model = FullyShardedDataParallel(Transformer(), use_orig_params=True), Transformer()
optimizer, torch_optimizer = (torch.optim.AdamW(one.parameters()) for one in (model, torch_model))
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
scaler = torch.amp.GradScaler("cpu")
loss(model, steps[0][0]).backward()
optimizer.step()
"""  # what readers have themselves: a block says what it takes from there
END = "\nimport os; os._exit(0)\n"  # a part of a program leaves its groups: gloo's threads may abort a normal exit


def blocks(page):
    found = re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in found]


def is_program(block):
    return "init_process_group()" in block or "elastic.start(" in block


def unmade(block):
    """The names that a block reads and that are made nowhere in it."""
    nodes = list(ast.walk(ast.parse(block)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    made = (
        {name.id for name in names if isinstance(name.ctx, ast.Store)} | set(dir(builtins)) | {"__file__", "__name__"}
    )
    for node in nodes:
        if isinstance(node, ast.alias):
            made.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
    return {name.id for name in names} - made


def headings(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for title in re.findall(r"^#+ (.*)", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def run(folder, program, ranks=2):
    """Run a block in ``folder``, as train.py under torchrun if it is for several ranks; return its writes."""
    name = "train.py" if is_program(program) else "other.py"
    is_part = not is_program(program) and "from my_training import" in program
    (folder / name).write_text(program + END * is_part)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*(launcher if is_program(program) or is_part else []), name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    code, writes, errors = run_and_read_writes([sys.executable, *command], cwd=folder, env=environment)
    assert code == 0, "".join(writes)[-2000:] + errors[-8000:]
    return writes


def told(page):
    """The last line of the page's program, in its own words."""
    [line] = re.findall(r"which ends by printing\n`([^`]+)`", page.read_text())
    return line


def test_each_guide_has_a_program_and_says_how_it_ends():
    assert len(GUIDES) > 10
    assert [sum(map(is_program, blocks(page))) for page in GUIDES] == [1] * len(GUIDES)
    assert all(map(told, HOWTO))


def test_the_blocks_that_other_tests_run_are_there():
    for (page, number), test in IN_OTHER_TESTS.items():
        [file] = [file for file in [ROOT / "README.md", *PAGES] if file.stem == page]
        assert len(blocks(file)) > number
        assert file.name in (ROOT / test).read_text()


@pytest.mark.multiprocess
def test_the_quickstart_learns_and_resumes(tmp_path):
    said = run(tmp_path, blocks(DOCS / "quickstart.md")[0], ranks=2)
    resumed = printed_on_ranks(str(tmp_path / "train.py"), 3, tmp_path).splitlines(keepends=True)
    losses = []
    for lines, rank in ((said, 0), (said, 1), (resumed, 0)):
        found = [re.fullmatch(rf"rank {rank}, step \d+: loss ([\d.]+)\n", line) for line in lines]
        losses.append([float(line[1]) for line in found if line])
        assert len(losses[-1]) == 20
        assert "".join(lines).endswith("saved run/last\n")
    assert all(found[-1] < 0.7 * found[0] for found in losses[:2])
    assert losses[2][0] < 1.1 * losses[0][-1]


WITH_BLOCKS = [page for page in [ROOT / "README.md", *PAGES] if blocks(page)]


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_a_block_uses_only_names_that_it_makes_or_imports(page):
    for number, block in enumerate(blocks(page)):
        if (page.stem, number) not in IN_OTHER_TESTS:
            assert unmade(block) == set(), f"block {number}"


def test_a_name_that_a_block_does_not_make_is_found():
    assert unmade("import torch\nfor part in torch.stack([one for one in mine]): print(part, model)") == {
        "mine",
        "model",
    }


@pytest.mark.multiprocess
@pytest.mark.thorough
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_twice(page, tmp_path):
    (tmp_path / "my_training.py").write_text(MY_TRAINING)
    for _ in range(2):
        for number, block in enumerate(blocks(page)):
            if (page.stem, number) not in IN_OTHER_TESTS:
                writes = run(tmp_path, block)
                if page in HOWTO and is_program(block):
                    assert "".join(writes).endswith(f"{told(page)}\n")


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
