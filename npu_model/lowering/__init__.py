"""Lowering of kernel calls to the tile program of one chip: a file for each family of kernels."""

from npu_model.lowering import (
    attention,
    convolutions,
    elementwise,
    indexing,
    integers,
    movement,
    pooling,
    products,
    quantized,
    rope,
    rows,
    scattering,
    sorting,
    transposed,
)

__all__ = [
    "attention",
    "convolutions",
    "elementwise",
    "indexing",
    "integers",
    "movement",
    "pooling",
    "products",
    "quantized",
    "rope",
    "rows",
    "scattering",
    "sorting",
    "transposed",
]
