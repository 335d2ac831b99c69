"""The CUDA device: kernels through NVRTC, matrix products through cuBLASLt, a run as one CUDA graph launch."""

from cuda_runtime.cuda_backend import CUDABackend, CudaBackend, CUDABuffer, CudaBuffer
from cuda_runtime.cuda_executor import CUDAExecutor, CudaExecutor
from npu_compiler.version import __version__

__all__ = ["__version__", "CUDABackend", "CUDABuffer", "CUDAExecutor", "CudaBackend", "CudaBuffer", "CudaExecutor"]
