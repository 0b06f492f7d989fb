"""Small models that between them have what the handle must get right; each comes with its batches.

All sizes are odd or prime, so that no split falls on the edge of a parameter by luck.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual block; the unit that the runs wrap, freeze and checkpoint."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Checkpointed(nn.Module):
    """Runs a block under activation checkpointing."""

    def __init__(self, block, reentrant):
        super().__init__()
        self.block = block
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class Gain(nn.Module):
    """Holds one parameter of one element: fewer than there are ranks."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.25]))

    def forward(self, x):
        return x * self.gain


class Mlp(nn.Module):
    """Linear layers and blocks of odd sizes."""

    def __init__(self, depth=2):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(depth))
        self.gain = Gain()
        self.last = nn.Linear(7, 3, bias=False)

    def forward(self, x, step):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.gain(x))

    def batch(self, generator):
        return torch.randn(4, 5, generator=generator)


class Tied(nn.Module):
    """A language model whose output layer is its embedding; two more names for one parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.bias_again = nn.Linear(6, 11)
        self.bias_again.bias = self.head.bias

    def forward(self, tokens, step):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.bias_again(x)

    def batch(self, generator):
        return torch.randint(0, 11, (3, 4), generator=generator)


class Convolutions(nn.Module):
    """Channels-last weights, a 1x1 kernel (contiguous in two formats), a transposed weight, and buffers."""

    def __init__(self, strided=True):
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.second = nn.Conv2d(5, 7, 1)
        self.blocks = nn.ModuleList([Block(7)])
        self.last = nn.Linear(7, 3)
        if strided:
            self.last.weight = nn.Parameter(self.last.weight.detach().t().contiguous().t())
            self.to(memory_format=torch.channels_last)

    def forward(self, x, step):
        x = self.second(functional.relu(self.norm(self.first(x))))
        x = x.mean((2, 3))
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def batch(self, generator):
        return torch.randn(2, 3, 5, 5, generator=generator)


class Images(Convolutions):
    """The same, with contiguous weights."""

    def __init__(self):
        super().__init__(strided=False)


class Strided(Convolutions):
    """The same strided weights without the normalisation, which torch keeps in fp32 under mixed precision."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()


class Unused(nn.Module):
    """A layer and a block that no step uses, and a layer and a block that only every other step uses."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.never = nn.Linear(7, 2)
        self.sometimes = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.last = nn.Linear(7, 3)

    def forward(self, x, step):
        x = self.blocks[0](self.first(x))
        if step % 2:
            x = self.blocks[1](self.sometimes(x))
        return self.last(x)

    def batch(self, generator):
        return torch.randn(4, 5, generator=generator)


class Twice(nn.Module):
    """A block and a layer that one forward calls twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([Block(7)])
        self.again = nn.Linear(7, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, x, step):
        x = self.blocks[0](self.first(x))
        x = self.again(functional.gelu(self.again(x)))
        return self.last(self.blocks[0](x))

    def batch(self, generator):
        return torch.randn(4, 5, generator=generator)


class Frozen(Mlp):
    """Has a wholly frozen block, and outside of the blocks some frozen parameters beside trained ones."""

    def __init__(self):
        super().__init__(depth=3)
        self.blocks[1].requires_grad_(False)
        self.first.weight.requires_grad_(False)
        self.gain.gain.requires_grad_(False)


class FrozenBlocks(Mlp):
    """Has wholly frozen blocks only, as ``use_orig_params=False`` asks."""

    def __init__(self):
        super().__init__(depth=3)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


MODELS = {
    "mlp": Mlp,
    "tied": Tied,
    "conv": Convolutions,
    "images": Images,
    "strided": Strided,
    "unused": Unused,
    "twice": Twice,
    "frozen": Frozen,
    "frozen_blocks": FrozenBlocks,
}
