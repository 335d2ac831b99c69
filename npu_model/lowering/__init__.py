"""From an op-level program to the tile program of one chip: a file for each family of kernels."""

from npu_model.lowering import elementwise, indexing, integers, movement, pooling, products, rope, rows

__all__ = ["elementwise", "indexing", "integers", "movement", "pooling", "products", "rope", "rows"]
