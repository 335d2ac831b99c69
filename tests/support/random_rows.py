"""Modules of drawn steps around softmaxes and norms over rows: element-wise chains before, behind and between them."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = tuple[str, Callable[..., Tensor]]

_COLUMNS, _MASK, _FACTORS, _VALUES = 0, 1, (0, 2, 3), 4  # inputs: those of each column, masks, factors, whole values

_OVER_ROWS: list[Step] = [
    ("layer_norm", lambda x, weight: F.layer_norm(x, weight.shape, weight, weight)),
    ("bare_layer_norm", lambda x, weight: F.layer_norm(x, weight.shape)),
    ("rms_norm", lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5)),
    ("softmax", lambda x, _: x.softmax(-1)),
    ("log_softmax", lambda x, _: x.log_softmax(-1)),
]
_BY_ELEMENTS: list[Step] = [
    ("relu", F.relu),
    ("tanh", torch.tanh),
    ("neg", torch.neg),
    ("leaky_relu", lambda x: torch.where(x > 0, x, x * 0.1)),
    ("turn", lambda x: torch.cat(x.tensor_split(2, 1)[::-1], 1)),
    ("shuffle", lambda x: x.reshape(x.shape[1], x.shape[0], -1).transpose(0, 1)),
]


class RandomRows(nn.Module):
    """A program of drawn steps over tokens [N, S, C], each of which adds a value, most often of the newest ones.

    Attributes:
        examples: The inputs.
        source: The program in words.
        returned: The values that the program returns.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = random.Random(seed)
        torch.manual_seed(seed)
        images, tokens, width = (self._draw.choice(sizes) for sizes in ([1, 2], [1, 5, 8], [3, 8, 20, 24, 64]))
        shapes = [(width,), (tokens, width), (tokens, 1), (images, 1, 1), *[(images, tokens, width)] * 2]
        self.examples = tuple(map(torch.randn, shapes))
        self.steps: list[tuple[Step, tuple[int, ...]]] = []
        for count in range(len(shapes), len(shapes) + self._draw.randint(4, 10)):
            self.steps.append(self._step(count))
        last = len(shapes) + len(self.steps) - 1
        chosen = (self._draw.randint(len(shapes), last) for _ in range(self._draw.randint(0, 2)))
        self.returned = tuple(dict.fromkeys((last, *chosen)))

    @property
    def source(self) -> str:
        return "; ".join(f"{name}{list(given)}" for (name, _), given in self.steps) + f" -> {self.returned}"

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        values = list(inputs)
        for (_, step), given in self.steps:
            values.append(step(*(values[index] for index in given)))
        return [values[index] for index in self.returned]

    def _step(self, count: int) -> tuple[Step, tuple[int, ...]]:
        """A step, and the numbers of its operands among `count` values."""
        newest, other = (max(_VALUES, count - 1 - int(self._draw.expovariate(0.7))) for _ in range(2))
        kind = self._draw.choice(["rows", "rows", "mask", "elements", "elements", "add", "add", "scale"])
        if kind == "rows":
            return self._draw.choice(_OVER_ROWS), (newest, _COLUMNS)
        if kind == "mask":
            return ("masked_softmax", lambda x, mask: (x * 0.5 + mask).softmax(-1)), (newest, _MASK)
        if kind == "elements":
            return self._draw.choice(_BY_ELEMENTS), (newest,)
        if kind == "add":
            return ("add", torch.add), (newest, other)
        return ("mul", torch.mul), (newest, self._draw.choice(_FACTORS))
