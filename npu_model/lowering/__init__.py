"""From an op-level program to the tile program of one chip: a file for each family of kernels."""

from npu_model.lowering import (
    attention,
    codes,
    convolutions,
    elementwise,
    pooling,
    products,
    quantized,
    transposed,
)

__all__ = ["attention", "codes", "convolutions", "elementwise", "pooling", "products", "quantized", "transposed"]
