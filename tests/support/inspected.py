"""Factories for ``python -m flatparam inspect`` and ``advise``, good ones and bad ones; and no matplotlib."""

import importlib
import sys

import torch
from fsdp_models import Block, Model
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from torch import nn

model = Model
ready = nn.Linear(2, 2)
number = 3


def with_norms():
    return nn.Sequential(Block(5), nn.BatchNorm1d(5), nn.Sequential(Block(5), nn.BatchNorm1d(5)))


def frozen():
    made = Model()
    for block in made.blocks:
        block.inner.requires_grad_(False)
    return made


def uneven():
    """Runs of equal blocks, between a larger one and a frozen one."""
    made = Model(blocks=10)
    made.blocks[3].inner, made.blocks[3].outer = nn.Linear(5, 21), nn.Linear(21, 5, bias=False)
    made.blocks[7].requires_grad_(False)
    return made


def eight():
    """Blocks that can be put together by two and by four."""
    return Model(blocks=8)


def mixed():
    made = Model()
    made.blocks.to(torch.bfloat16)
    return made


def tied_below():
    made = Model()
    made.extra = made.blocks[0].scale
    return made


def tied_beside():
    made = Model()
    made.blocks[2].inner.weight = made.blocks[0].inner.weight
    return made


def tied_within():
    made = Model()
    made.blocks[1].twin = made.blocks[1].inner
    return made


def with_data():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="cpu"))


def raises():
    raise RuntimeError("no\nconfig")


def leaves():
    raise SystemExit("bye")


def takes(width):
    return nn.Linear(width, width)


def makes_a_dict():
    return {}


def halves():
    made = nn.Linear(3, 3)
    made.table = nn.Parameter(torch.zeros(3, dtype=torch.uint8).view(torch.uint4), requires_grad=False)
    return made


def lazy():
    return nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))


def empty():
    made = nn.Module()
    made.nothing = nn.Parameter(torch.empty(0))
    return made


def without_matplotlib(monkeypatch, picture):
    """Have imports of matplotlib fail, also in the module ``picture``, whatever has been imported before."""
    for name in [name for name in sys.modules if name.startswith(("matplotlib", picture))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    package, _, name = picture.rpartition(".")
    monkeypatch.delattr(importlib.import_module(package), name, raising=False)


def drawn_texts(monkeypatch):
    """Return a list that collects ``(text, box in pixels)`` of each text that matplotlib draws in a figure."""
    found = []
    draw_text, draw_figure = Text.draw, Figure.draw

    def begin(self, renderer):
        found.clear()  # a figure is drawn once for its layout, too
        draw_figure(self, renderer)

    def draw(self, renderer):
        draw_text(self, renderer)
        if self.get_visible() and self.get_text().strip():
            found.append((self.get_text(), self.get_window_extent(renderer)))

    monkeypatch.setattr(Figure, "draw", begin)
    monkeypatch.setattr(Text, "draw", draw)
    return found


def overlapping(texts):
    """Return the pairs of texts that share more than a pixel."""
    pairs = ((a, b) for i, a in enumerate(texts) for b in texts[:i])
    cuts = ((a, b, Bbox.intersection(box, other)) for (a, box), (b, other) in pairs)
    return [(a, b) for a, b, cut in cuts if cut is not None and min(cut.width, cut.height) > 1]
