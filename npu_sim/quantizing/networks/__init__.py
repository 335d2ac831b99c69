"""Quantization of convolutional networks to 8 bits: ranges of activations from images, and compensated rounding."""
