"""Correctness of every model type of transformers on a device, against eager PyTorch."""
