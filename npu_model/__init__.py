"""Latency, traffic and energy of a compiled program on a chip that is described in a file (docs/npu_model.md)."""

from npu_compiler.program.products import Product
from npu_model.chip import Chip, load_chip, parse_chip, shipped_chips
from npu_model.result import CallResult, Energy, Result
from npu_model.simulation import simulate
from npu_model.simulator import Cause
from npu_model.systolic import ArrayCycles, Dataflow, array_cycles

__all__ = [
    "ArrayCycles",
    "CallResult",
    "Cause",
    "Chip",
    "Dataflow",
    "Energy",
    "Product",
    "Result",
    "array_cycles",
    "load_chip",
    "parse_chip",
    "shipped_chips",
    "simulate",
]
