"""`Product`: the matrix product that a kernel computes, as its declaration says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """[m, k] × [k, n], `batch` times. A convolution is the product of its windows with its weight."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def macs(self) -> int:
        """Multiply-accumulates."""
        return self.m * self.n * self.k * self.batch
