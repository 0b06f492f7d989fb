"""transformers' GPT-2 with random weights and random tokens, as ``benchmarks.training`` trains it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.utils import logging

from examples.demo.config import Config


def build(config: Config, rank: int) -> tuple[nn.Module, type[nn.Module], Callable[[nn.Module, int], Any]]:
    """The model, what is a unit of it, and what gives its loss of a step."""
    logging.set_verbosity_error()
    torch.manual_seed(config.seed)
    sizes = dict(n_layer=config.depth, n_embd=config.width, n_head=4, n_positions=config.context)
    tokens = dict(vocab_size=256, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))

    def loss(model: nn.Module, step: int) -> Any:
        generator = torch.Generator().manual_seed(step * config.ranks + rank)
        batch = torch.randint(256, (config.batch, config.context), generator=generator)
        return model(input_ids=batch, labels=batch).loss

    return model, GPT2Block, loss
