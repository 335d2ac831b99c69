"""A chip as numbers, and the cycles of its systolic arrays."""

from npu_model.chip.description import (
    Chip,
    Control,
    Dma,
    Dram,
    DramBanks,
    Energy,
    Launch,
    Matrix,
    Output,
    Sram,
    Vector,
    load_chip,
    parse_chip,
    shipped_chips,
)
from npu_model.chip.systolic import ArrayCycles, Dataflow, array_cycles

__all__ = [
    "ArrayCycles",
    "Chip",
    "Control",
    "Dataflow",
    "Dma",
    "Dram",
    "DramBanks",
    "Energy",
    "Launch",
    "Matrix",
    "Output",
    "Sram",
    "Vector",
    "array_cycles",
    "load_chip",
    "parse_chip",
    "shipped_chips",
]
