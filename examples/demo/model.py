"""A byte-level GPT: pre-norm blocks, causal attention, learned positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Config


class Block(nn.Module):
    """Attention and a feed-forward layer, each on a normalised input and added to the stream: one FSDP unit."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """``[batch, time, width]`` to the same shape."""
        batch, time, width = stream.shape
        parts = self.query_key_value(self.attention_norm(stream)).split(width, dim=-1)
        query, key, value = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = stream + self.feed_out(F.gelu(self.feed_in(self.feed_norm(stream))))
        return out


class GPT(nn.Module):
    """Bytes in, logits of the next byte out.

    Args: ``config``, of which width, depth, heads and context count; ``config.seed`` seeds the initial weights.
    Shapes: ``[batch, time]`` of int64 to ``[batch, time, 256]``, ``time <= context``.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        self.context = config.context
        self.bytes = nn.Embedding(256, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the byte after each of ``tokens``."""
        stream = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean loss of ``model`` in nats a byte on ``[batch, context + 1]`` rows, in fp32 whatever the model's type."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, seed: int, temperature: float = 0.8) -> str:
    """``prompt`` and ``length`` more bytes drawn from ``model``, as text."""
    generator = torch.Generator().manual_seed(seed)
    tokens, device = torch.tensor([list(prompt)]), next(model.parameters()).device
    for _ in range(length):
        logits = model(tokens[:, -model.context :].to(device))[0, -1].float().cpu() / temperature
        drawn = torch.multinomial(logits.softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens, drawn[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def default_model() -> GPT:
    """The model of the demo's default settings; ``python -m flatparam inspect examples.demo.model:default_model``."""
    return GPT(Config())
