"""The module that host cost is measured with: many small parameters, kernels as short as they come."""

import torch
from torch import Tensor, nn

SHAPE = (4, 8)  # of every parameter: 32 elements


class Unit(nn.Module):
    """One unit: each of ``n`` parameters is multiplied into the activation, elementwise."""

    def __init__(self, n: int) -> None:
        super().__init__()
        for i in range(n):
            self.register_parameter(f"p{i}", nn.Parameter(torch.full(SHAPE, 1.0 + i % 7 / 1024)))
        self.names = [f"p{i}" for i in range(n)]

    def forward(self, x: Tensor) -> Tensor:
        """``SHAPE`` to the same shape."""
        for name in self.names:
            x = x * getattr(self, name)
        return x


class Stack(nn.Module):
    """``units`` of ``n`` parameters each, one after another."""

    def __init__(self, units: int, n: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(n) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x
