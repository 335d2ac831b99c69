"""The names of the calls in which a CUDA program leaves something to the runtime."""

CUBLAS_GEMM = "cublas_gemm"  # the kernel of matrix products, which has no source
CONVOLUTION = "convolution"  # the parameter that says what a convolution's call computes
ALTERNATIVES = "alternatives"  # and the one that lists other kernels for it, as [kernel, source, grid, block, shared]
