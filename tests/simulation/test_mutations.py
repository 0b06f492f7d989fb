"""The mended bugs that mutations.py undoes can still be undone.

Promises:
- the mended text of each is in today's source exactly once, and no two have one name:
  `test_each_mended_text_is_there_once`
- the test that finds it again, where no random program does, is there: `test_the_test_of_each_is_there`
- a text that is not there once is refused: `test_a_text_that_is_not_there_once_is_refused`
"""

import re

import pytest

from tests.simulation.mutation_table import MUTATIONS, Mutation
from tests.simulation.mutations import undo
from tests.simulation.process import ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mended_text_is_there_once(mutation):
    for file, mended, broken in mutation.edits:
        assert (ROOT / file).read_text().count(mended) == 1, file
        assert mended != broken
    assert re.fullmatch(r"[0-9a-f]{7}", mutation.commit)
    assert [each.name for each in MUTATIONS].count(mutation.name) == 1


def test_the_test_of_each_is_there():
    for mutation in MUTATIONS:
        file, _, name = mutation.test.partition("::")
        assert not file or (ROOT / file).is_file(), mutation.name
        assert not name or f"\ndef {name}(" in (ROOT / file).read_text(), mutation.name


@pytest.mark.parametrize("text", ["a = 2\n", "a = 1\na = 1\n"])
def test_a_text_that_is_not_there_once_is_refused(tmp_path, text):
    (tmp_path / "file.py").write_text(text)
    with pytest.raises(ValueError, match="one: expected once in file"):
        undo(Mutation("one", "0123456", "", (("file.py", "a = 1\n", "a = 3\n"),)), tmp_path)
    assert (tmp_path / "file.py").read_text() == text


def test_a_mended_bug_is_undone(tmp_path):
    (tmp_path / "file.py").write_text("a = 1\nb = 1\n")
    assert not undo(Mutation("one", "0123456", "", (("file.py", "a = 1\n", "a = 3\n"),)), tmp_path)
    assert (tmp_path / "file.py").read_text() == "a = 3\nb = 1\n"
