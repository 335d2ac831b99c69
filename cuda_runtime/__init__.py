"""The CUDA device: kernels through NVRTC, matrix products through cuBLASLt, a run as one CUDA graph launch."""

from cuda_runtime.cuda_backend import CUDABackend, CudaBackend, CUDABuffer, CudaBuffer
from cuda_runtime.cuda_executor import CUDAExecutor, CudaExecutor

__all__ = ["CUDABackend", "CUDABuffer", "CUDAExecutor", "CudaBackend", "CudaBuffer", "CudaExecutor"]
