"""Cycles and traffic of matrix products and convolutions on a systolic array, from formulas.

The array has `rows` × `columns` processing elements. One operand stays in the elements (which one is the `Dataflow`),
the others stream through them:

| dataflow | rows hold | columns hold | streamed over time |
|---|---|---|---|
| weight stationary | k | n | m |
| input stationary | k | m | n |
| output stationary | m | n | k |

A product larger than the array is done in *folds*: ⌈along rows / rows⌉ × ⌈along columns / columns⌉ of them, the folds
along the columns in the outer loop.

Sources: A. Samajdar, Y. Zhu, P. Whatmough, M. Mattina, T. Krishna, "SCALE-Sim: Systolic CNN Accelerator Simulator",
arXiv:1811.02883; A. Samajdar et al., "A Systematic Methodology for Characterizing Scalability of DNN Accelerators using
SCALE-Sim", ISPASS 2020, section III. `docs/npu_model.md` has the comparison with version 3 of the simulator itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from npu_compiler.errors import InputError
from npu_compiler.program.products import Product


class Dataflow(StrEnum):
    """The operand that stays in the array while the others stream through it."""

    WEIGHT = "weight"
    OUTPUT = "output"
    INPUT = "input"


@dataclass(frozen=True)
class ArrayCycles:
    """Cycles of an array that never waits for memory, and its utilization (share of busy multipliers, 0 to 1)."""

    cycles: int
    utilization: float


@dataclass(frozen=True)
class SramAccesses:
    """Numbers of elements that the array reads from SRAM and writes to it.

    `partial_reads` are partial sums read back to be added to, where k takes several folds; SCALE-Sim counts only their
    writes.
    """

    input_reads: int
    weight_reads: int
    output_writes: int
    partial_reads: int

    @property
    def total(self) -> int:
        return self.input_reads + self.weight_reads + self.output_writes + self.partial_reads


@dataclass(frozen=True)
class Mapping:
    """A product laid out on an array: its sizes along rows, columns and time, and its folds in each direction."""

    along_rows: int
    along_columns: int
    time: int
    row_folds: int
    column_folds: int


def mapping(product: Product, rows: int, columns: int, dataflow: Dataflow) -> Mapping:
    """Lay out one product of the batch on an array. Raises `InputError` if the array has no rows or no columns."""
    if rows < 1 or columns < 1:
        raise InputError(f"an array needs at least one row and one column, not {rows}×{columns}")
    m, n, k = product.m, product.n, product.k
    along_rows, along_columns, time = {
        Dataflow.WEIGHT: (k, n, m),
        Dataflow.INPUT: (k, m, n),
        Dataflow.OUTPUT: (m, n, k),
    }[dataflow]
    return Mapping(along_rows, along_columns, time, -(-along_rows // rows), -(-along_columns // columns))


def array_cycles(product: Product, rows: int, columns: int, dataflow: Dataflow) -> ArrayCycles:
    """Cycles without memory stalls: folds × the cycles of one fold.

    Weight and input stationary, a fold takes `rows` cycles to load the stationary operand, `time` to stream, and `rows
    + columns − 2` for the last streamed element to cross the array. Output stationary, nothing is loaded beforehand:
    `time + rows + columns − 2`. A fold that fills the array partly takes as long as a full one. (The ISPASS paper's
    equation adds `rows` cycles of draining to output-stationary folds too; the simulator lets results leave while the
    last ones are computed, and so do we.)
    """
    laid = mapping(product, rows, columns, dataflow)
    fold = laid.time + rows + columns - 2
    if dataflow is not Dataflow.OUTPUT:
        fold += rows
    cycles = fold * laid.row_folds * laid.column_folds * product.batch
    return ArrayCycles(cycles, product.macs / (cycles * rows * columns))


def sram_accesses(product: Product, rows: int, columns: int, dataflow: Dataflow) -> SramAccesses:
    """Elements read and written by the array: a stationary operand once, a streamed one once in each fold."""
    laid = mapping(product, rows, columns, dataflow)
    batch = product.batch
    inputs, weights, outputs = product.m * product.k, product.k * product.n, product.m * product.n
    if dataflow is Dataflow.OUTPUT:
        return SramAccesses(inputs * laid.column_folds * batch, weights * laid.row_folds * batch, outputs * batch, 0)
    if dataflow is Dataflow.WEIGHT:
        inputs *= laid.column_folds
    else:
        weights *= laid.column_folds
    return SramAccesses(
        inputs * batch, weights * batch, outputs * laid.row_folds * batch, outputs * (laid.row_folds - 1) * batch
    )


__all__ = ["ArrayCycles", "Dataflow", "Mapping", "Product", "SramAccesses", "array_cycles", "mapping", "sram_accesses"]
