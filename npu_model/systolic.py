"""Cycles of a matrix product on a systolic array, without memory stalls.

The formulas are those of SCALE-Sim (Samajdar et al., "A Systematic Methodology for Characterizing Scalability of DNN
Accelerators using SCALE-Sim", ISPASS 2020, section III): a product is mapped to `spatial_rows` × `spatial_columns` of
processing elements during `temporal` steps, in folds of the array's size, each of which takes

    2 · rows + columns + temporal - 2 cycles.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from npu_compiler.program.products import Product


class Dataflow(Enum):
    """Which operand stays in the processing elements while the others stream through them."""

    WEIGHT_STATIONARY = "weight_stationary"
    OUTPUT_STATIONARY = "output_stationary"
    INPUT_STATIONARY = "input_stationary"


@dataclass(frozen=True)
class ArrayCycles:
    """Cycles of a product on one array, and the share of them in which a processing element multiplies, on average."""

    cycles: int
    utilization: float


def mapped(product: Product, dataflow: Dataflow) -> tuple[int, int, int]:
    """(spatial rows, spatial columns, temporal steps) of one of a product's batches."""
    if dataflow is Dataflow.OUTPUT_STATIONARY:
        return product.m, product.n, product.k
    if dataflow is Dataflow.WEIGHT_STATIONARY:
        return product.k, product.n, product.m
    return product.k, product.m, product.n


def array_cycles(product: Product, rows: int, columns: int, dataflow: Dataflow) -> ArrayCycles:
    """Cycles of a product on an array of `rows` × `columns`, its batches one after the other."""
    spatial_rows, spatial_columns, temporal = mapped(product, dataflow)
    folds = -(-spatial_rows // rows) * -(-spatial_columns // columns)
    cycles = product.batch * folds * (2 * rows + columns + temporal - 2)
    return ArrayCycles(cycles, product.macs / (cycles * rows * columns) if cycles else 0.0)


__all__ = ["ArrayCycles", "Dataflow", "Product", "array_cycles", "mapped"]
