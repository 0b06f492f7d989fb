"""The benchmark of two deaths and a return counts as it says, and its picture and figures are in docs/elastic.md.

Promises:
- steps that are computed again are told apart, and seconds are counted from a death to the next step that is new
- docs/elastic.png shows both ways without text over text, in 60 kB, and docs/elastic.md has the figures of both
"""

import json
import signal
from pathlib import Path

import pytest
from matplotlib.image import imread

from benchmarks import document, elastic
from tests.packaging.test_pictures import overlapping, texts_of

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def followed(monkeypatch):
    """A run of eight steps with deaths in steps 2 and 5; three steps are computed again after the first."""
    kills, times = [], iter([101.1, 107.0])
    monkeypatch.setattr(elastic, "DEATHS", (2, 5))
    monkeypatch.setattr(elastic.os, "kill", lambda process, number: kills.append((process, number)))
    monkeypatch.setattr(elastic.time, "monotonic", lambda: next(times))
    events = [{"slot": slot, "process": 10 + slot} for slot in range(4)]
    steps = [(0, 4, 100.0), (1, 4, 100.5), (2, 4, 101.0), (3, 4, 101.2), (1, 3, 104.0), (2, 3, 104.5), (3, 3, 105.0)]
    steps += [(4, 3, 105.5), (5, 3, 106.0), (5, 4, 106.5), (6, 3, 108.5), (7, 3, 109.0)]
    events += [{"step": step, "ranks": ranks, "begin": end - 0.2, "end": end} for step, ranks, end in steps]
    events.insert(-3, {"slot": 3, "process": 23})
    made = elastic.Run()
    made.follow(map(json.dumps, events))
    assert kills == [(13, signal.SIGKILL), (23, signal.SIGKILL)]  # the second waits for the return
    return made


def test_steps_that_are_new_are_told_from_those_computed_again(followed):
    assert [step for step, *_ in followed.new] == list(range(8))
    assert followed.useful == 8 / 12
    assert followed.seconds == 9.0
    assert followed.deaths == [101.1, 107.0]
    assert followed.pauses == pytest.approx([4.4, 1.5])
    seconds, rates = followed.rate()
    assert seconds == [float(second) for second in range(10)]
    assert [rate / elastic.TOKENS for rate in rates] == [2, 2, 0, 0, 0, 1, 1, 0, 1, 1]


def test_the_figures_are_medians_of_all_runs(followed):
    other = elastic.Run([(0, 0.0, 0.0), (1, 0.0, 1.0), (2, 2.0, 4.0)], [1.0, 1.0])
    made = elastic.table({elastic.ELASTIC: [followed] * 2 + [other], elastic.RESTARTS: [other]})
    assert [row.values[elastic.ELASTIC] for row in made.rows] == pytest.approx([3.0, 9.0, 8 / 12])
    assert [row.values[elastic.RESTARTS] for row in made.rows] == [3.0, 4.0, 1.0]


def test_no_text_of_the_picture_is_over_another(followed):
    figure = elastic.chart({elastic.ELASTIC: followed, elastic.RESTARTS: followed})
    width, height = figure.get_size_inches() * 100
    assert not overlapping(texts_of(figure), width, height)
    assert len(figure.axes[0].lines) == 4  # a curve and the deaths of each way


def test_the_page_has_the_picture_and_the_figures():
    assert (DOCS / "elastic.png").stat().st_size <= 60_000
    assert imread(DOCS / "elastic.png").shape[1] == 800
    assert "](elastic.png)" in (DOCS / "elastic.md").read_text()
    rows = document.read(DOCS / "elastic.md")["elastic"].rows
    assert [row.what for row in rows] == [row.what for row in elastic.table({}).rows]
    assert all({*row.values} == {*elastic.WAYS} for row in rows)
