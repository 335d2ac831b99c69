"""Modules of drawn steps around concatenations: chains that grow, tensors in several of them, splits, tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WIDTHS = (1, 3, 4, 8, 8, 16, 16, 24)  # channels; half of them whole packs of what kernels move at a time


class RandomConcatenations(nn.Module):
    """A program of drawn steps over images [N, C, H, W] or tokens [N, S, C], each of which adds one value or more.

    Args:
        moves: Whether to draw only steps that compute or move single elements.

    Attributes:
        source: The program in words.
        returned: The values that the program returns.
    """

    def __init__(self, seed: int, moves: bool = False) -> None:
        super().__init__()
        self._moves = moves
        self._draw = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, Callable[..., list[Tensor]], tuple[int, ...]]] = []
        size = self._draw.choice([1, 5, 6])
        images = (self._draw.choice([1, 2, 3]), self._draw.choice(_WIDTHS), size, self._draw.choice([size, 7]))
        tokens = (self._draw.choice([1, 2, 3]), self._draw.choice([1, 4, 9]), self._draw.choice([8, 12, 16]))
        self.example = torch.randn(images if self._draw.random() < 0.7 else tokens)
        values = [self.example]
        for _ in range(self._draw.randint(3, 14)):
            self._add_step(values)
        last = len(values) - 1
        chosen = (self._draw.randrange(len(values)) for _ in range(self._draw.randint(0, 2)))
        self.returned = tuple(dict.fromkeys((last, *chosen)))

    @property
    def source(self) -> str:
        return "; ".join(f"{name}{list(given)}" for name, _, given in self.steps) + f" -> {self.returned}"

    def forward(self, x: Tensor) -> list[Tensor]:
        values = [x]
        for _, step, given in self.steps:
            values += step(*(values[index] for index in given))
        return [values[index] for index in self.returned]

    def _add_step(self, values: list[Tensor]) -> None:
        steps = [self._concatenate, self._apply if self._moves else self._layer]
        steps += [] if self._moves else [self._exchange]
        kind = self._draw.choice([*steps, *steps, self._apply, self._split, self._update])
        name, step, given = kind(values)
        with torch.no_grad():
            added = step(*(values[index] for index in given))
        if all(0 < x.numel() <= 60_000 for x in added):
            self.steps.append((name, step, given))
            values += added

    def _concatenate(self, values: list[Tensor]) -> tuple[str, Callable[..., list[Tensor]], tuple[int, ...]]:
        """A concatenation of the newest value and others, often all that fit, as DenseNet's."""
        first = values[-1] if self._draw.random() < 0.7 else self._draw.choice(values)
        dim = self._draw.choice([1, 1, 1, first.dim() - 1])

        def fits(x: Tensor) -> bool:
            return x.dim() == first.dim() and all(
                at == dim or mine == own for at, (mine, own) in enumerate(zip(x.shape, first.shape, strict=True))
            )

        matching = [index for index, x in enumerate(values) if fits(x)]
        if self._draw.random() < 0.5:
            matching = self._draw.choices(matching, k=self._draw.randint(2, 4))
        given = tuple(matching[-6:])
        return f"cat_{dim}", lambda *parts: [torch.cat(parts, dim)], given

    def _layer(self, values: list[Tensor]) -> tuple[str, Callable[..., list[Tensor]], tuple[int, ...]]:
        index = self._recent(values)
        x, draw = values[index], self._draw
        width = draw.choice(_WIDTHS)
        if x.dim() == 4:
            c = x.shape[1]
            parts = draw.choice([parts for parts in (1, 2, c) if c % parts == width % parts == 0])
            taps = draw.choice([1, 3])
            made = [
                lambda: nn.Conv2d(c, width, taps, padding=taps // 2, groups=parts),
                lambda: nn.Sequential(nn.Conv2d(c, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
                lambda: nn.Sequential(nn.BatchNorm2d(c), nn.ReLU()),
                lambda: nn.Conv2d(c, c, 3, padding=1, groups=c),
                lambda: nn.MaxPool2d(3, 1, 1),
                lambda: nn.AvgPool2d(3, 1, 1),
                lambda: nn.GroupNorm(1, c) if x[0].numel() > 1 else nn.ReLU(),
                lambda: nn.ConvTranspose2d(c, width, 3, padding=1),
                lambda: nn.AdaptiveAvgPool2d(1),
            ]
        else:
            c = x.shape[2]
            made = [lambda: nn.Linear(c, width), lambda: nn.LayerNorm(c), lambda: nn.Softmax(draw.choice([1, 2]))]
        layer = draw.choice(made)().eval()
        self.layers.append(layer)
        return repr(layer), lambda x: [layer(x)], (index,)

    def _apply(self, values: list[Tensor]) -> tuple[str, Callable[..., list[Tensor]], tuple[int, ...]]:
        index = self._recent(values)
        alike = [at for at, x in enumerate(values) if x.shape == values[index].shape]
        other = self._draw.choice(alike)
        name, step, given = self._draw.choice(
            [
                ("relu", lambda x: [F.relu(x)], (index,)),
                ("add", lambda x, y: [x + y], (index, other)),
                ("scale", lambda x, y: [x * 0.5 + y], (index, other)),
                ("mean", lambda x: [x - x.mean(-1, keepdim=True)], (index,)),
                ("shuffled", lambda x: [x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)], (index,)),
                ("turned", lambda x: [x.transpose(-1, -2)], (index,)),
            ]
        )
        odd = name == "shuffled" and values[index].shape[1] % 2
        return ("relu", lambda x: [F.relu(x)], (index,)) if odd else (name, step, given)

    def _split(self, values: list[Tensor]) -> tuple[str, Callable[..., list[Tensor]], tuple[int, ...]]:
        index = self._recent(values)
        dim = self._draw.choice([1, 1, values[index].dim() - 1])
        size = values[index].shape[dim]
        if size == 1:
            return "relu", lambda x: [F.relu(x)], (index,)
        at = self._draw.choice([1, size // 2, -(-size // 2)])
        return f"split_{dim}_{at}", lambda x: list(x.split([at, size - at], dim)), (index,)

    def _exchange(self, values: list[Tensor]) -> tuple[str, Callable[..., list[Tensor]], tuple[int, ...]]:
        """A layer over a part of the channels, in its place, with the other part as it was, as CSPNet's blocks have.

        The old part may be among the values that later steps read.
        """
        index = self._recent(values)
        dim = 1 if values[index].dim() == 4 else 2
        channels = values[index].shape[dim]
        if channels == 1:
            return "relu", lambda x: [F.relu(x)], (index,)
        at = self._draw.choice([1, channels // 2, channels // 2])
        first, adds, kept = (self._draw.random() < share for share in (0.5, 0.5, 0.3))
        width = at if first else channels - at
        layer = nn.Conv2d(width, width, 3, padding=1) if dim == 1 else nn.Linear(width, width)
        self.layers.append(layer)

        def exchange(x: Tensor) -> list[Tensor]:
            parts = list(F.relu(x).split([at, channels - at], dim))
            old = parts[1 - first]
            parts[1 - first] = layer(old) + old if adds else layer(old)
            return [*([old] if kept else []), torch.cat(parts, dim)]

        return f"exchange_{at}_{first}_{adds}_{kept}", exchange, (index,)

    def _update(self, values: list[Tensor]) -> tuple[str, Callable[..., list[Tensor]], tuple[int, ...]]:
        """An update of a slice in place, of a new tensor, perhaps from values of that tensor itself."""
        index = self._recent(values)
        dims = [self._draw.randrange(1, values[index].dim()) for _ in range(self._draw.randint(1, 2))]
        starts = [self._draw.randrange(values[index].shape[dim]) for dim in dims]
        kept = self._draw.random() < 0.3

        def update(x: Tensor) -> list[Tensor]:
            changed = x * 2
            part = changed
            for dim, start in zip(dims, starts, strict=True):
                part = part.narrow(dim, start, part.shape[dim] - start) if start < part.shape[dim] else part
            old = changed.clone() if kept else x
            part.copy_(part + part.flip(1) * 0.25)
            return [changed + old * 0.5 if kept else changed]

        return f"update_{dims}_{starts}_{kept}", update, (index,)

    def _recent(self, values: list[Tensor]) -> int:
        return len(values) - 1 if self._draw.random() < 0.6 else self._draw.randrange(len(values))
