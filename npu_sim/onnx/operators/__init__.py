"""Converters of ONNX's operators, a file for each family; importing this package registers them."""

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
