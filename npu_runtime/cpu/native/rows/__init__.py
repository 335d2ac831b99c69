"""Kernels that process rows: element-wise ops, norms, softmax, rotary embedding."""
