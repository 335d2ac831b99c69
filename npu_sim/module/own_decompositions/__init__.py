"""Decompositions that PyTorch has none for, or has one that the device does not run."""

from npu_sim.module.own_decompositions import elementwise, recurrent
from npu_sim.module.own_decompositions.table import OWN, decomposes

__all__ = ["OWN", "decomposes", "elementwise", "recurrent"]
