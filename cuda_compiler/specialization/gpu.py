"""The GPU that programs are compiled for by default, and CUDA's limits."""

HOPPER, HOPPER_SHARED_MEMORY = 90, 227 * 1024  # compute capability; shared memory per block in bytes
TURING, AMPERE, ADA = 75, 80, 89  # the first with products of int8, of bfloat16 and of float8 on tensor cores
WARP = 32
MAX_GRID = (2**31 - 1, 65535, 65535)
MULTIPROCESSORS = 132  # of a large GPU, for which work is divided; smaller ones run the same kernels
# Blocks of a cluster → clusters that run at a time where a multiprocessor has room for one block: not all parts of the
# chip have a multiple of four multiprocessors. And where two blocks fit, so that clusters may share a multiprocessor:
# as many as leave about one block for each.
CLUSTERS = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2, 4: 30, 8: 15}
CLUSTERS_SHARING = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2, 4: 32, 8: 16}
RESERVED_SHARED_MEMORY = 1024  # bytes of each block's, which CUDA takes


def memory_of_each(shared_memory: int, blocks: int) -> int:
    """Bytes of shared memory of a block where so many fit a multiprocessor on which one may have `shared_memory`."""
    return (shared_memory + RESERVED_SHARED_MEMORY) // blocks - RESERVED_SHARED_MEMORY
