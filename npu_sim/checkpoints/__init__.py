"""Weights in few bits as others store them, by parameter name."""

from npu_sim.checkpoints.folder import QuantizedTensors

__all__ = ["QuantizedTensors"]
