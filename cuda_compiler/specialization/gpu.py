"""The GPU that is meant where none is named, and CUDA's own sizes."""

HOPPER, HOPPER_SHARED_MEMORY = 90, 227 * 1024  # compute capability, and bytes of shared memory that a block may have
WARP = 32
MAX_GRID = (2**31 - 1, 65535, 65535)
MULTIPROCESSORS = 132  # of a large GPU, for which work is shared out; others run the same kernels
