"""Decompositions that PyTorch has none for, or has one that the device does not run."""

from npu_sim.module.own_decompositions import elementwise, layers, linalg, pooling, recurrent, sampling, strided
from npu_sim.module.own_decompositions.table import OWN, decomposes

__all__ = ["OWN", "decomposes", "elementwise", "layers", "linalg", "pooling", "recurrent", "sampling", "strided"]
