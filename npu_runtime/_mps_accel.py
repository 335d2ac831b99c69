"""The public name of `metal.mps_accel`: matrix products by MetalPerformanceShaders."""

from npu_runtime.metal.mps_accel import MPSLaunch, addend_of, as_product, epilogue_of

__all__ = ["MPSLaunch", "addend_of", "as_product", "epilogue_of"]
