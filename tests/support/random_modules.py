"""Random modules of layers, functions, views, in-place writes and decisions about shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensors = Sequence[torch.Tensor]
Step = Callable[..., torch.Tensor]


class RandomModule(nn.Module):
    """A program of drawn steps, each of which takes some of the values so far and adds one.

    Attributes:
        source: The program in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, Step, tuple[int, ...]]] = []
        self.returned: tuple[int, ...] = ()

    @property
    def source(self) -> str:
        return "; ".join(f"{name}({', '.join(map(str, given))})" for name, _, given in self.steps) + (
            f" -> {self.returned}"
        )

    def forward(self, *inputs: torch.Tensor) -> Any:
        values = list(inputs)
        for _, step, given in self.steps:
            values.append(step(*(values[index] for index in given)))
        return tuple(values[index] for index in self.returned)


def random_module(seed: int) -> tuple[RandomModule, tuple[torch.Tensor, ...]]:
    """A module in eval mode and its inputs; the same for the same seed."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    inputs = tuple(torch.randn(_shape(draw)) for _ in range(draw.randint(1, 3)))
    module = RandomModule().eval()
    values: list[torch.Tensor] = [x.clone() for x in inputs]
    wanted = draw.randint(3, 12)
    for _ in range(20 * wanted):
        if len(module.steps) == wanted:
            break
        index = draw.choice([draw.randrange(len(values)), len(values) - 1])
        kind = draw.choice([_layers, _unary, _binary, _views, _writes, _sizes])
        name, step, others = kind(draw, values, index, module)
        if step is None:
            continue
        module.steps.append((name, step, (index, *others)))
        module.returned = (len(inputs) + len(module.steps) - 1,)
        made = _run(module, inputs)
        if made is None:
            module.steps.pop()
        else:
            values = made
    last = len(values) - 1
    module.returned = tuple(dict.fromkeys((last, *(draw.randrange(len(values)) for _ in range(draw.randint(0, 2))))))
    return module, inputs


def _run(module: RandomModule, inputs: Tensors) -> list[torch.Tensor] | None:
    """All values of the program; None if it fails, grows too large or is sensitive to rounding."""
    values = [x.clone() for x in inputs]
    with torch.no_grad():
        for _, step, given in module.steps:
            try:
                values.append(step(*(values[index] for index in given)))
            except (RuntimeError, IndexError, ValueError, AssertionError):
                return None
    last = values[-1]
    is_small = 0 < last.numel() <= 20_000 and 1 <= last.dim() <= 5
    return values if is_small and all(x.isfinite().all() and x.abs().max() < 1e3 for x in values) else None


def _shape(draw: random.Random) -> tuple[int, ...]:
    return draw.choice(
        [
            (draw.randint(1, 3), draw.randint(1, 8), draw.randint(1, 9), draw.randint(1, 9)),
            (draw.randint(1, 3), draw.randint(1, 7), draw.randint(1, 12)),
            (draw.randint(1, 6), draw.randint(1, 12)),
        ]
    )


_Drawn = tuple[str, Step | None, tuple[int, ...]]


def _layers(draw: random.Random, values: Tensors, index: int, module: RandomModule) -> _Drawn:
    x = values[index]
    size, rank = x.shape[-1], x.dim()
    groups = draw.choice([1, x.shape[1] if rank > 2 else 1])
    made: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(size, draw.randint(1, 9), bias=draw.random() < 0.7),
        lambda: nn.LayerNorm(size, elementwise_affine=draw.random() < 0.7),
        lambda: nn.RMSNorm(size),
        lambda: nn.PReLU(),
        lambda: nn.Dropout(0.5),
        lambda: nn.Softmax(draw.randrange(rank)),
    ]
    if rank == 4:
        c = x.shape[1]
        made += [
            lambda: nn.Conv2d(
                c,
                groups * draw.randint(1, 3),
                draw.randint(1, 3),
                draw.randint(1, 3),
                draw.randint(0, 2),
                draw.randint(1, 2),
                groups,
                draw.random() < 0.7,
            ),
            lambda: nn.ConvTranspose2d(c, draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 2)),
            lambda: nn.BatchNorm2d(c),
            lambda: nn.GroupNorm(groups, c),
            lambda: nn.InstanceNorm2d(c, affine=draw.random() < 0.5),
            lambda: nn.MaxPool2d(draw.randint(1, 3), draw.randint(1, 2), 1, ceil_mode=draw.random() < 0.3),
            lambda: nn.AvgPool2d(draw.randint(1, 3), draw.randint(1, 2), ceil_mode=draw.random() < 0.3),
            lambda: nn.AdaptiveAvgPool2d((draw.randint(1, 3), draw.randint(1, 3))),
            lambda: nn.Upsample(scale_factor=2, mode=draw.choice(["nearest", "bilinear"])),
            lambda: nn.PixelUnshuffle(draw.randint(1, 2)),
            lambda: nn.ZeroPad2d(draw.randint(0, 2)),
        ]
    if rank == 3:
        c = x.shape[1]
        made += [
            lambda: nn.Conv1d(c, draw.randint(1, 5), draw.randint(1, 3), draw.randint(1, 2), draw.randint(0, 2)),
            lambda: nn.BatchNorm1d(c),
            lambda: nn.MaxPool1d(draw.randint(1, 3), draw.randint(1, 2)),
            lambda: _First(nn.GRU(size, draw.randint(1, 5), batch_first=draw.random() < 0.5)),
            lambda: _First(nn.LSTM(size, draw.randint(1, 5), bidirectional=draw.random() < 0.5)),
            lambda: _Attend(nn.MultiheadAttention(size, 1, batch_first=True)),
        ]
    layer = draw.choice(made)().eval()
    module.layers.append(layer)
    return repr(layer), layer, ()


class _First(nn.Module):
    """A layer's first result."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)[0]


class _Attend(_First):
    """Self-attention."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x, x, x, need_weights=False)[0]


def _unary(draw: random.Random, values: Tensors, index: int, module: RandomModule) -> _Drawn:
    dim = draw.randrange(values[index].dim())
    keep = draw.random() < 0.5
    steps: dict[str, Step] = {
        "gelu": F.gelu,
        "silu": F.silu,
        "relu": F.relu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "softplus": F.softplus,
        "hardswish": F.hardswish,
        "exp_clamped": lambda x: x.clamp(-3, 3).exp(),
        "log1p_abs": lambda x: x.abs().log1p(),
        "sin_mul": lambda x: x.sin() * 0.5 + x,
        "square": lambda x: x**2,
        "rsqrt": lambda x: (x * x + 1).rsqrt(),
        f"softmax_{dim}": lambda x: x.softmax(dim),
        f"log_softmax_{dim}": lambda x: F.log_softmax(x, dim),
        f"cumsum_{dim}": lambda x: x.cumsum(dim),
        f"sort_{dim}": lambda x: x.sort(dim).values,
        f"mean_{dim}_{keep}": lambda x: x.mean(dim, keep),
        f"sum_{dim}_{keep}": lambda x: x.sum(dim, keep),
        f"amax_{dim}_{keep}": lambda x: x.amax(dim, keep),
        f"var_{dim}": lambda x: x.var(dim, correction=0),
        f"logsumexp_{dim}_{keep}": lambda x: x.logsumexp(dim, keep),
        f"norm_{dim}": lambda x: x.norm(dim=dim, keepdim=True),
        f"topk_{dim}": lambda x: x.topk(1, dim).values,
        f"normalize_{dim}": lambda x: F.normalize(x, dim=dim),
        f"roll_{dim}": lambda x: x.roll(1, dim),
        f"flip_{dim}": lambda x: x.flip(dim),
        "pad": lambda x: F.pad(x, (1, 2), value=0.5),
        "tril": torch.tril,
        "where": lambda x: torch.where(x > 0.1, x, x * 0.25),
        "masked_fill": lambda x: x.masked_fill(x < -0.3, -1.0),
        "gram": lambda x: torch.einsum("...ij,...kj->...ik", x, x) / x.shape[-1],
        "mish": F.mish,
        "hardshrink": F.hardshrink,
        "repeat": lambda x: x.repeat(*([1] * (x.dim() - 1)), 2),
    }
    name = draw.choice(list(steps))
    return name, steps[name], ()


def _binary(draw: random.Random, values: Tensors, index: int, module: RandomModule) -> _Drawn:
    other = draw.randrange(len(values))
    dim = draw.randrange(values[index].dim())
    steps: dict[str, Step] = {
        "add": torch.add,
        "sub": lambda x, y: x - 0.5 * y,
        "mul": torch.mul,
        "div": lambda x, y: x / (y.abs() + 1),
        "maximum": torch.maximum,
        "hypot": torch.hypot,
        "matmul": lambda x, y: x @ y / x.shape[-1],
        "matmul_t": lambda x, y: x @ y.transpose(-1, -2) / x.shape[-1],
        "where": lambda x, y: torch.where(x > y + 0.05, x, y),
        "lerp": lambda x, y: torch.lerp(x, y, 0.3),
        f"cat_{dim}": lambda x, y: torch.cat([x, y, x], dim),
        f"stack_{dim}": lambda x, y: torch.stack([x, y], dim),
        "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.1),
        f"gather_{dim}": lambda x, y: x.gather(dim, y.argsort(dim)),
        f"index_{dim}": lambda x, y: x.index_select(dim, torch.tensor([0, -1 % x.shape[dim]])),
    }
    name = draw.choice(list(steps))
    return name, steps[name], (other,)


def _views(draw: random.Random, values: Tensors, index: int, module: RandomModule) -> _Drawn:
    rank = values[index].dim()
    one, two = draw.randrange(rank), draw.randrange(rank)
    order = draw.sample(range(rank), rank)
    steps: dict[str, Step] = {
        f"transpose_{one}_{two}": lambda x: x.transpose(one, two),
        f"permute_{order}": lambda x: x.permute(order),
        f"unsqueeze_{one}": lambda x: x.unsqueeze(one),
        f"squeeze_{one}": lambda x: x.squeeze(one),
        f"select_{one}": lambda x: x.select(one, -1),
        f"slice_{one}": lambda x: x.narrow(one, 0, max(1, x.shape[one] // 2)),
        "step": lambda x: x[..., ::2],
        "after_first": lambda x: x[1:] if x.shape[0] > 1 else x,
        f"chunk_{one}": lambda x: x.chunk(2, one)[-1],
        f"split_{one}": lambda x: x.split(1, one)[0],
        "flatten": lambda x: x.flatten(1) if x.dim() > 1 else x,
        "reshape": lambda x: x.reshape(x.shape[0], -1, 1),
        "contiguous": lambda x: x.contiguous(),
        "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape),
        "unflatten": lambda x: x.unflatten(-1, (1, x.shape[-1])),
        f"diagonal_{one}_{two}": lambda x: x.diagonal(0, one, two),
        "view_t": lambda x: x.mT.contiguous().view(*x.shape[:-2], -1),
        f"movedim_{one}_{two}": lambda x: x.movedim(one, two),
        f"unbind_{one}": lambda x: x.unbind(one)[0],
        f"unfold_{one}": lambda x: x.unfold(one, min(2, x.shape[one]), 1),
    }
    name = draw.choice(list(steps))
    return name, steps[name], ()


def _writes(draw: random.Random, values: Tensors, index: int, module: RandomModule) -> _Drawn:
    other = draw.randrange(len(values))

    def into_first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[..., 0] = y.mean()
        return x

    def into_half(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[: max(1, x.shape[0] // 2)].mul_(0.5).add_(y.sum().tanh())
        return x

    def into_copy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        z.transpose(0, -1)[0] = 0.25
        return z + y.amax()

    def into_mask(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.masked_fill_(x > 0.7, 0.7) + y.min()

    steps: dict[str, Step] = {
        "add_": lambda x, y: x.add_(y),
        "mul_": lambda x, y: x.mul_(0.5),
        "relu_": lambda x, y: x.relu_(),
        "clamp_": lambda x, y: x.clamp_(-1, 1),
        "copy_": lambda x, y: x.copy_(y),
        "zero_part_": lambda x, y: x[..., -1:].zero_(),
        "fill_": lambda x, y: x.select(0, 0).fill_(0.5),
        "sub_": lambda x, y: x.sub_(y, alpha=0.5),
        "into_first": into_first,
        "into_half": into_half,
        "into_copy": into_copy,
        "into_mask": into_mask,
    }
    name = draw.choice(list(steps))
    return name, steps[name], (other,)


def _sizes(draw: random.Random, values: Tensors, index: int, module: RandomModule) -> _Drawn:
    def by_size(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 1 else x + 1

    def halves(x: torch.Tensor) -> torch.Tensor:
        for _ in range(min(2, x.shape[-1])):
            x = x + x.mean(-1, keepdim=True) / x.shape[-1]
        return x

    steps: dict[str, Step] = {
        "by_size": by_size,
        "halves": halves,
        "per_element": lambda x: x / x.numel(),
        "positions": lambda x: x + torch.arange(x.shape[-1]) / x.shape[-1],
        "heads": lambda x: x.view(*x.shape[:-1], 1, x.shape[-1]).transpose(-2, -3) if x.dim() > 1 else x,
        "causal": lambda x: x.masked_fill(torch.ones(x.shape[-2:]).triu(1).bool(), 0.0),
        "rows": lambda x: torch.stack([row * 0.5 for row in x]),
        # Of a number that is exact: one that differs in its last place might round the other way.
        "rounded": lambda x: x + x.clamp(1.3, 1.3).half().float(),
        "in_bfloat16": lambda x: x + (x.clamp(1.3, 1.3).bfloat16() * 3).float(),
        "full": lambda x: torch.full_like(x, 0.3) + x,
        "new": lambda x: torch.zeros(x.shape[0], 2, dtype=x.dtype) + x.sum(),
    }
    name = draw.choice(list(steps))
    return name, steps[name], ()
