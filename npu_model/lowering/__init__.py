"""From an op-level program to the tile program of one chip: a file for each family of kernels."""

from npu_model.lowering import (
    attention,
    codes,
    convolutions,
    elementwise,
    indexing,
    movement,
    pooling,
    products,
    quantized,
    rows,
    transposed,
)

__all__ = [
    "attention",
    "codes",
    "convolutions",
    "elementwise",
    "indexing",
    "movement",
    "pooling",
    "products",
    "quantized",
    "rows",
    "transposed",
]
