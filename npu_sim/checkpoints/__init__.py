"""Checkpoints of quantized weights in the formats of other tools, read as `QuantizedArray`s by parameter name."""

from npu_sim.checkpoints.folder import quantized_tensors

__all__ = ["quantized_tensors"]
