"""The rows of ONNX's operators, a family a file. Importing this registers them."""

from npu_sim.onnx.operators import (
    convolutions,
    elementwise,
    indexing,
    losses,
    normalizations,
    pooling,
    products,
    quantized,
    recurrent,
    reductions,
    resizing,
    shapes,
)

__all__ = [
    "convolutions",
    "elementwise",
    "indexing",
    "losses",
    "normalizations",
    "pooling",
    "products",
    "quantized",
    "recurrent",
    "reductions",
    "resizing",
    "shapes",
]
