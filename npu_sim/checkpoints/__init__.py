"""Weights in few bits as others store them, by parameter name."""

from npu_sim.checkpoints.folder import quantized_tensors

__all__ = ["quantized_tensors"]
