"""Convolutions, products, pooling and sums of 8-bit integers."""
