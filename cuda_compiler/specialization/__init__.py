"""Kernels with geometry, dtypes and parameters compiled in: from a template and a call to CUDA C."""
