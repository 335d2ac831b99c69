"""Convolutional networks in bytes: ranges of their tensors from images, and weights rounded for what the layers see."""
