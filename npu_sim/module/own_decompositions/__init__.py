"""Decompositions of ops for which PyTorch has none, or one that the device cannot run."""

from npu_sim.module.own_decompositions import (
    distances,
    elementwise,
    indexing,
    layers,
    linalg,
    ordering,
    pooling,
    recurrent,
    sampling,
    strided,
)
from npu_sim.module.own_decompositions.table import OWN, decomposes

__all__ = [
    "OWN",
    "decomposes",
    "distances",
    "elementwise",
    "indexing",
    "layers",
    "linalg",
    "ordering",
    "pooling",
    "recurrent",
    "sampling",
    "strided",
]
