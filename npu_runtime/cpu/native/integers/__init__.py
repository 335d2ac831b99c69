"""Convolutions, products, pooling and sums of bytes."""
