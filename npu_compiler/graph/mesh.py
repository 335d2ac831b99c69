"""The division of a graph's tensors among several devices: number of ranks, and the part of a tensor on each.

A rank is one of the devices. All ranks run one program, so all parts of a tensor have one shape. Ranks differ in the
part of the weights that they load (`weight_recipe`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from npu_compiler.errors import InputError

Split: TypeAlias = tuple[tuple[int, int], ...]
"""The dimensions along which a tensor is divided, outermost first, each with its number of parts.

`((1, 4),)` is four parts along dimension 1. A tensor of p parts, fewer than the n ranks, is stored several times: rank
r holds part r · p // n.
"""


@dataclass(frozen=True)
class Mesh:
    """The ranks among which a graph is divided.

    Attributes:
        ranks: Number of ranks.
        least_table: Embedding tables with fewer elements are whole on all ranks, since dividing one costs a reduction.
    """

    ranks: int
    least_table: int = 2**20

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InputError(f"a graph is divided among 1 or more devices, not {self.ranks}")


def pieces(split: Split) -> int:
    """Number of parts into which a tensor is divided."""
    return math.prod(parts for _, parts in split)


def part_shape(shape: tuple[int, ...], split: Split) -> tuple[int, ...]:
    """The shape of a part; if a dimension does not divide evenly, that of the largest part."""
    sizes = list(shape)
    for dim, parts in split:
        sizes[dim] = -(-sizes[dim] // parts)
    return tuple(sizes)


def divides(shape: tuple[int, ...], split: Split) -> bool:
    """Whether the parts of a split are all equally large."""
    return all(shape[dim] % parts == 0 for dim, parts in split)
