"""The CUDA target: op-level calls become generated kernels, fused where they are element-wise. Needs no GPU."""

from cuda_compiler.specialization.gpu import GPU
from cuda_compiler.target import CUDACodegenTarget, CudaCodegenTarget
from npu_compiler.target_config import CUDA_GPU
from npu_compiler.version import __version__

__all__ = ["__version__", "CUDA_GPU", "GPU", "CUDACodegenTarget", "CudaCodegenTarget"]
