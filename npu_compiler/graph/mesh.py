"""A graph's tensors over several devices: how many ranks there are, and which part of a tensor each holds.

Every rank runs the same program, so all parts of a tensor have one shape. What differs between ranks is which part of
the weights they load (`weight_recipe`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from npu_compiler.errors import InputError

Split: TypeAlias = tuple[tuple[int, int], ...]
"""The dimensions along which a tensor is divided, outermost first, each with the number of its parts: `((1, 4),)` is
four parts along dimension 1. A tensor of fewer parts than ranks is there several times, on ranks that follow each
other: part i of p is that of the ranks r of n with r · p // n = i."""


@dataclass(frozen=True)
class Mesh:
    """The ranks among which a graph is divided.

    Attributes:
        ranks: Number of ranks.
        least_table: Tables of embeddings with fewer elements are on all ranks whole: dividing one costs a reduction.
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
    """The shape of a part; where a dimension does not divide evenly, of the largest part."""
    sizes = list(shape)
    for dim, parts in split:
        sizes[dim] = -(-sizes[dim] // parts)
    return tuple(sizes)


def divides(shape: tuple[int, ...], split: Split) -> bool:
    """Whether all parts are equally large."""
    return all(shape[dim] % parts == 0 for dim, parts in split)
