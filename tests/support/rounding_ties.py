"""Rows whose elements lie at and beside the midpoints of two codes, where a different rounding shows."""

from __future__ import annotations

import numpy as np


def row_beside_ties(kind: str, largest: float, random: np.random.Generator) -> np.ndarray:
    """A row [1024] in float32 with this largest magnitude: ties of one of `ROW_FORMATS`, up to two steps aside."""
    if kind == "int8":
        ties = random.integers(-127, 127, 1016) + 0.5
    else:
        signs, exponents = random.choice([-1, 1], 1016), random.integers(-9, 4, 1016)
        ties = signs * (16.5 + random.integers(0, 16, 1016)) * 2.0**exponents
    scale = np.float32(largest) / np.float32(127 if kind == "int8" else 448)
    values = (ties * np.float64(scale)).astype(np.float32)
    for _ in range(2):
        values = np.nextafter(values, random.choice(np.array([-np.inf, np.inf, 0], np.float32), 1016))
    return np.concatenate([np.clip(values, -largest, largest), np.full(8, largest, np.float32)])
