"""Modules of drawn steps over streams of tokens: sums, layers that read several of them joined, and class tokens."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn


class RandomStreams(nn.Module):
    """A program of drawn steps over values [N, S, C] of equal shape, as those of dual path networks.

    A step adds two values up; or makes two by a layer that reads several, joined along the channels; or one by a layer
    that reads a value behind the first token of another.

    Attributes:
        example: The argument, [N, S, 2 · C], whose halves are the first values.
        source: The program in words.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.width = draw.choice([3, 4, 8, 16])
        self.example = torch.randn(draw.choice([1, 2]), draw.choice([2, 5, 9]), 2 * self.width)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, tuple[int, ...]]] = []
        count = 2
        for _ in range(draw.randint(3, 10)):
            kind = draw.choice(["add", "add", "join", "join", "token"])
            recent = [max(0, count - 1 - draw.choice([0, 0, 1, 2, 3])) for _ in range(4 if kind == "join" else 2)]
            given = tuple(recent[: draw.randint(2, 4)])
            self.steps.append((kind, given))
            inner = self.width * (len(given) if kind == "join" else 1)
            self.layers.append(nn.Linear(inner, self.width * (2 if kind == "join" else 1)))
            count += 2 if kind == "join" else 1

    @property
    def source(self) -> str:
        return f"{list(self.example.shape)}: " + "; ".join(f"{kind}{list(given)}" for kind, given in self.steps)

    def forward(self, x: Tensor) -> list[Tensor]:
        values = list(x.split(self.width, 2))
        for (kind, given), layer in zip(self.steps, self.layers, strict=True):
            parts = [values[index] for index in given]
            if kind == "add":
                values.append(parts[0] + parts[1])
            elif kind == "join":
                values += layer(torch.cat(parts, 2).relu()).split(self.width, 2)
            else:
                values.append(layer(torch.cat([parts[0][:, :1], parts[1]], 1))[:, 1:])
        return values[-2:]
