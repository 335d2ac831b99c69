"""From an op-level program to the tile program of one chip: a file for each family of kernels."""

from npu_model.lowering import convolutions, products

__all__ = ["convolutions", "products"]
