"""DRAM traffic of one product or convolution on a systolic array with a double-buffered SRAM for each operand.

One half of an SRAM serves the array while the other half is filled, so what can be read again without DRAM is what
lies in one half, the *window*. The model is that of SCALE-Sim's double-buffered SRAM: elements are fetched when they
are first asked for, and when the window is full, it is emptied and filled anew. Operands that fit in a window are
fetched once; others as often as the folds stream them. Results leave when they are written: partial sums too, which
SCALE-Sim's SRAM for outputs never adds to. All counts are elements.

Source: the fold orders of `npu_model.systolic`, and A. Samajdar et al., ISPASS 2020, section III-D, on the working
sets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from npu_compiler.program.products import Product
from npu_model.systolic import Dataflow, Mapping, mapping, sram_accesses


@dataclass(frozen=True)
class Convolution:
    """A convolution `[batch, channels, height, width]` → filters, without padding: sizes include what is padded.

    With `groups`, channels and filters are those of one group.
    """

    channels: int
    height: int
    width: int
    filters: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    batch: int = 1
    groups: int = 1

    @property
    def output_size(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        return (self.height - self.kernel[0]) // self.stride[0] + 1, (self.width - self.kernel[1]) // self.stride[1] + 1

    @property
    def product(self) -> Product:
        """The product of its windows with its weights (im2col)."""
        rows, columns = self.output_size
        taps = self.kernel[0] * self.kernel[1]
        return Product(self.batch * rows * columns, self.filters, taps * self.channels, self.groups)

    def addresses(self) -> NDArray[np.int32]:
        """[windows of an image, elements of a window]: which element of the image (channels last) each of them is."""
        rows, columns = self.output_size
        down = np.arange(rows)[:, None] * self.stride[0] + np.arange(self.kernel[0])
        across = np.arange(columns)[:, None] * self.stride[1] + np.arange(self.kernel[1])
        pixels = down[:, None, :, None] * self.width + across[None, :, None, :]
        elements = pixels[..., None] * self.channels + np.arange(self.channels)
        return elements.reshape(rows * columns, -1).astype(np.int32)


@dataclass(frozen=True)
class Buffers:
    """Elements that the SRAM of each operand holds; half of each serves while the other half is filled."""

    inputs: int
    weights: int


@dataclass(frozen=True)
class DramTraffic:
    """Elements moved between DRAM and SRAM."""

    input_reads: int
    weight_reads: int
    output_writes: int

    @property
    def total(self) -> int:
        return self.input_reads + self.weight_reads + self.output_writes


def dram_traffic(
    work: Product | Convolution, rows: int, columns: int, dataflow: Dataflow, buffers: Buffers
) -> DramTraffic:
    """Elements that a product or a convolution moves on an array of `rows` × `columns`.

    A convolution's windows overlap; its inputs are counted as the SRAM sees them, each element once for as long as it
    stays.
    """
    product = work if isinstance(work, Product) else work.product
    laid = mapping(product, rows, columns, dataflow)
    inputs = _input_reads(work, laid, rows, columns, dataflow, buffers.inputs // 2)
    weights = _weight_reads(product, laid, columns, dataflow, buffers.weights // 2)
    outputs = sram_accesses(product, rows, columns, dataflow).output_writes
    return DramTraffic(inputs * product.batch, weights * product.batch, outputs)


def _input_reads(
    work: Product | Convolution, laid: Mapping, rows: int, columns: int, dataflow: Dataflow, window: int
) -> int:
    passes = 1 if dataflow is Dataflow.INPUT else laid.column_folds
    if isinstance(work, Product):
        return _streamed(work.m * work.k, passes, window)
    windows = work.addresses()
    size = work.batch * len(np.unique(windows))
    if size < window:
        return size
    if dataflow is Dataflow.WEIGHT:  # some elements of every window, then the next ones
        folds = [windows[:, start : start + rows] for start in range(0, windows.shape[1], rows)]
    else:  # all elements of some windows, then the next windows
        along = columns if dataflow is Dataflow.INPUT else rows
        folds = [windows[start : start + along].T for start in range(0, windows.shape[0], along)]
    return passes * work.batch * _fetches(np.concatenate([fold.ravel() for fold in folds]), window)


def _weight_reads(product: Product, laid: Mapping, columns: int, dataflow: Dataflow, window: int) -> int:
    size = product.k * product.n
    if dataflow is Dataflow.WEIGHT:
        return size
    if dataflow is Dataflow.INPUT:
        return _streamed(size, laid.column_folds, window)
    blocks = [product.k * min(columns, product.n - start) for start in range(0, product.n, columns)]
    return _repeated(blocks, laid.row_folds, window)


def _streamed(size: int, passes: int, window: int) -> int:
    """Fetches of `passes` passes over the same elements in the same order: once, if they fit in the window."""
    return size if size < window else size * passes


def _repeated(blocks: list[int], repeats: int, window: int) -> int:
    """Fetches of blocks that are each read `repeats` times before the next one.

    Where the window fills within a block, the part of it that was fetched before is fetched a second time.
    """
    fetched = filled = 0
    for block in blocks:
        if repeats > 1 and block >= window:
            fetched, filled = fetched + block * repeats, (filled + block * repeats) % window
            continue
        fetched += block
        filled += block
        if filled >= window:
            again = block - (filled - window) if repeats > 1 else 0
            fetched, filled = fetched + again, filled - window + again
    return fetched


def _fetches(addresses: NDArray[np.int32], window: int) -> int:
    """Fetches of a sequence of reads by a buffer that keeps what it fetched until it holds `window` elements."""
    order = np.argsort(addresses, kind="stable")
    same = addresses[order][1:] == addresses[order][:-1]
    before = np.full(len(addresses), -1)  # where the same address was read before
    before[order[1:][same]] = order[:-1][same]
    start = fetched = 0
    while start < len(addresses):
        stop, filled = start, 0
        while stop < len(addresses) and filled < window:
            misses = start + np.flatnonzero(before[stop : stop + 8 * window] < start) + (stop - start)
            take = min(window - filled, len(misses))
            filled += take
            stop = int(misses[take - 1]) + 1 if filled == window else stop + 8 * window
        fetched, start = fetched + filled, stop
    return fetched
