"""Kernels that go along rows: element-wise ones, norms, softmax, rotary embedding."""
