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
from npu_sim.module.own_decompositions.table import OWN, STAYS, decomposes, stays_where

__all__ = [
    "OWN",
    "STAYS",
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
    "stays_where",
    "strided",
]
