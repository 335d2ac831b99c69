"""The rows of ONNX's operators, a family a file. Importing this registers them."""

from npu_sim.onnx.operators import (
    attention,
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
    spectra,
)

__all__ = [
    "attention",
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
    "spectra",
]
