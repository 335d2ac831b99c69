"""Latency, traffic and energy of a compiled program on a chip that is described in a file."""

from npu_model.systolic import ArrayCycles, Dataflow, Product, array_cycles

__all__ = ["ArrayCycles", "Dataflow", "Product", "array_cycles"]
