"""The CUDA device: kernels through NVRTC, matrix products through cuBLASLt, a run as one CUDA graph launch."""

from cuda_runtime.cuda_backend import CUDABackend, CUDABuffer

__all__ = ["CUDABackend", "CUDABuffer"]
