"""The text and its batches: the language reference that every CPython carries, as bytes."""

from __future__ import annotations

from pydoc_data import topics

import torch
from torch import Tensor

from .config import Config

VALIDATION_PART = 10  # one byte in ten, at the end of the text


def load_text() -> bytes:
    """All topics of ``pydoc help()``, in alphabetical order: about 0.47 MB of English."""
    return "\n\n".join(text for _, text in sorted(topics.topics.items())).encode()


class Corpus:
    """Training and validation batches, a function of (seed, step, rank) and the settings' sizes.

    Args: ``config``; ``text`` as bytes, of which the last tenth is for validation.
    Shapes: a batch is ``[batch, context + 1]`` int64 bytes: all but the last are input, all but the first are target.
    Raises: ValueError when either part is shorter than one such row.
    """

    def __init__(self, config: Config, text: bytes) -> None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        split = len(data) - len(data) // VALIDATION_PART
        row = config.context + 1
        if len(data) - split < row:
            raise ValueError(f"expected at least {row} bytes of validation text, got {len(data) - split}")
        self._config = config
        self.training = data[:split].unfold(0, row, 1)  # every window of a row, as a view
        self.validation = data[split:].unfold(0, row, 1)

    def training_batch(self, step: int, rank: int, micro_batch: int = 0) -> Tensor:
        """A micro-batch of one rank in one step: random windows of the training text."""
        config = self._config
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        shape = (config.micro_batches, config.ranks, config.batch)
        picks = torch.randint(len(self.training), shape, generator=generator)
        return self.training[picks[micro_batch, rank]].to(config.device)

    def validation_batches(self, rank: int) -> list[Tensor]:
        """One rank's validation batches, the same at every step: windows at equal distances over the whole part."""
        config = self._config
        shape = (config.ranks, config.validation_batches, config.batch)
        total = shape[0] * shape[1] * shape[2]
        starts = torch.arange(total) * (len(self.validation) - 1) // max(1, total - 1)
        return list(self.validation[starts.view(shape)[rank]].to(config.device))
