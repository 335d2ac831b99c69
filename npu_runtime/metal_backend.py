"""Door to `metal.backend`."""

from npu_runtime.metal.backend import MetalBackend

__all__ = ["MetalBackend"]
