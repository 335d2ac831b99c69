"""The CUDA target: op-level calls become generated kernels, fused where they are element-wise. Needs no GPU."""

from cuda_compiler.target import CUDA_GPU, CUDACodegenTarget, CudaCodegenTarget

__all__ = ["CUDA_GPU", "CUDACodegenTarget", "CudaCodegenTarget"]
