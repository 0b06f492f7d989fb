"""The pictures of the benchmarks are readable at README's width, small, and show the figures of the pages.

Promises:
- each picture of the benchmarks shows one message: at most six series, no text over another, at most 60 kB
"""

import itertools
import re
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from benchmarks import document, gpu, picture, rows

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "performance.md"
PICTURES = [message.file for message in picture.MESSAGES] + ["gpu.png"]


@pytest.fixture
def figures(monkeypatch, tmp_path):
    """Draw all pictures from the pages' figures. Returns: file -> figure."""
    drawn, made = [], picture.chart
    monkeypatch.setattr(picture, "chart", lambda *given, **more: drawn.append(made(*given, **more)) or drawn[-1])
    files = [path.name for path in picture.draw(document.read(PAGE), tmp_path)]
    gpu.draw(document.read(DOCS / "gpu.md"), tmp_path / "gpu.png")
    return dict(zip([*files, "gpu.png"], drawn, strict=True))


def texts_of(figure):
    """Return text -> its box in pixels, of all that a reader sees."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in shown]


def overlapping(texts, width, height):
    """Return the texts that lie over each other, or beyond the edge."""
    cut = [text for text, box in texts if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    return cut + [(one[0], two[0]) for one, two in itertools.combinations(texts, 2) if one[1].overlaps(two[1])]


def test_each_picture_has_few_series_and_no_text_over_another(figures):
    assert sorted(figures) == sorted(PICTURES)
    for file, figure in figures.items():
        width, height = figure.get_size_inches() * 100  # dots an inch
        assert width == 800, file
        assert height <= 500, file
        texts = texts_of(figure)
        assert not overlapping(texts, width, height), file
        bars = [bar for bar in figure.axes[0].findobj(Rectangle) if bar is not figure.axes[0].patch]
        assert 3 <= len({bar.get_facecolor() for bar in bars}) <= 6, file
        assert len(figure.axes) == 1, file
        assert min(text.get_fontsize() for text in figure.findobj(Text)) >= 9, file


def test_texts_that_overlap_are_found(figures):
    figure = figures["host.png"]
    figure.axes[0].text(0.02, 0.0, "over the first bar's label, over and over", fontsize=30)
    assert overlapping(texts_of(figure), 800, 800)


def test_the_pictures_show_the_figures_of_the_tables(figures):
    for file, figure in figures.items():
        page = (DOCS / "gpu.md" if file == "gpu.png" else PAGE).read_text()
        cells = [re.split(r"  ", text)[0] for text, _ in texts_of(figure) if "  " in text]
        assert len(cells) >= 3, file
        assert [cell for cell in cells if not re.search(rf"[|=] {re.escape(cell)} ", page)] == [], file


@pytest.mark.parametrize(
    ("file", "key", "row"),
    [
        ("host.png", "k", "host time of a step | of bare"),
        ("host.png", "b", "fp32 | 48 x 10"),
        ("wrapping.png", "c", "peak over base | 3072 MiB"),
        ("tokens.png", "d", "tokens a second"),
        ("checkpoint.png", "j", "save | 4.53 GB"),
    ],
)
def test_a_picture_has_four_figures_of_its_row(figures, file, key, row):
    [table] = re.findall(rf"<!-- table {key} -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    [line] = re.findall(rf"^\| {re.escape(row)} (\|.*)", table, re.MULTILINE)
    drawn = {re.split(r"  ", text)[0] for text, _ in texts_of(figures[file])}
    assert len([cell for cell in drawn if re.search(rf"[|=] {re.escape(cell)} ", line)]) >= 4


def test_a_page_gives_its_figures_back(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table machine -->\n<!-- end -->\n<!-- table x -->\n<!-- end -->\n")
    made = [
        rows.Row.of(
            "step", "1 x 400", "ms", "bare", {"bare": [1.0, 1.0], "ours": [0.5, 2e-6], "theirs": [-3.0, 1234.0]}
        ),
        rows.Row("without ratio", "", "", "", {"ours": 0.25}, {}),
    ]
    document.write({"x": rows.Table("x", "", "", made)}, {"cpu": "a | b"}, page, targets=page)
    for row, back in zip(made, document.read(page)["x"].rows, strict=True):
        assert (back.what, back.size, back.unit) == (row.what, row.size, row.unit)
        assert back.values == {name: float(rows.number(value)) for name, value in row.values.items()}
        assert back.ratios == {name: tuple(float(rows.number(r)) for r in ratio) for name, ratio in row.ratios.items()}


@pytest.mark.parametrize("file", PICTURES)
def test_the_pictures_of_the_pages_are_small_and_shown(file):
    assert (DOCS / file).stat().st_size <= 60_000
    assert imread(DOCS / file).shape[1] == 800
    page = DOCS / "gpu.md" if file == "gpu.png" else PAGE
    assert f"]({file})" in page.read_text()
