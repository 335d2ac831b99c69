"""The public name of `metal.backend`."""

from npu_runtime.metal.backend import MetalBackend

__all__ = ["MetalBackend"]
