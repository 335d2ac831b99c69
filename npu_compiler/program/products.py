"""`Product`: the size of a matrix product that a kernel computes, as its declaration states it."""

from __future__ import annotations

from dataclasses import dataclass, field

from npu_compiler.errors import InputError


@dataclass(frozen=True)
class Window:
    """The sliding window of a convolution.

    Attributes:
        taps: Number of its pixels, each of which is multiplied with an element of the weight.
        stride: Columns by which it moves.
        width: Columns of the output.
    """

    taps: int
    stride: int
    width: int


@dataclass(frozen=True)
class Product:
    """`batch` independent matrix products `[m, k] × [k, n]`: m rows of inputs, k summed, n columns of weights.

    A convolution is the product of its windows (a row for each pixel of the output) with its weight.

    Attributes:
        window: The convolution's window; None for a product that is no convolution.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    window: Window | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k, self.batch) < 1:
            raise InputError(f"a product needs sizes of at least 1, not m={self.m} n={self.n} k={self.k} ×{self.batch}")

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all the products."""
        return self.m * self.n * self.k * self.batch
