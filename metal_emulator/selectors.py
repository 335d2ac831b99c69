"""Selectors that the emulator may offer: those of a recorded list, and those that an Apple header documents."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

DOCUMENTED: Mapping[str, str] = {
    "columns": "MPSMatrix.h",
    "encodeToCommandBuffer:leftMatrix:rightMatrix:resultMatrix:": "MPSMatrixMultiplication.h",
    "mathMode": "MTLLibrary.h",
    "matrices": "MPSMatrix.h",
    "matrixBytes": "MPSMatrix.h",
    "matrixDescriptorWithRows:columns:matrices:rowBytes:matrixBytes:dataType:": "MPSMatrix.h",
    "matrixDescriptorWithRows:columns:rowBytes:dataType:": "MPSMatrix.h",
    "path": "NSURL.h",
    "rowBytes": "MPSMatrix.h",
    "rows": "MPSMatrix.h",
    "setBatchSize:": "MPSMatrixMultiplication.h",
    "setBatchStart:": "MPSMatrixMultiplication.h",
    "setMathMode:": "MTLLibrary.h",
}


def listed() -> frozenset[str]:
    """The Objective-C selectors in `selectors.txt`: those known to exist that the emulator offers."""
    return frozenset((files("metal_emulator") / "selectors.txt").read_text(encoding="utf-8").split())
