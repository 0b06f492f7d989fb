"""The demo's language model on its text, as ``benchmarks.training`` trains it."""

from collections.abc import Callable
from typing import Any

from torch import nn

from examples.demo.config import Config
from examples.demo.data import Corpus, load_text
from examples.demo.model import GPT, Block, loss_of


def build(config: Config, rank: int) -> tuple[nn.Module, type[nn.Module], Callable[[nn.Module, int], Any]]:
    """The model, what is a unit of it, and what gives its loss of a step."""
    corpus = Corpus(config, load_text())
    return GPT(config), Block, lambda model, step: loss_of(model, corpus.training_batch(step, rank))
