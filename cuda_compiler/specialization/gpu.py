"""The GPU that kernels are generated for, and limits of CUDA."""

from __future__ import annotations

from dataclasses import dataclass

_TURING, _AMPERE, _ADA, _HOPPER = 75, 80, 89, 90
WARP = 32
REGISTERS = 1 << 16  # of a multiprocessor
MAX_GRID = (2**31 - 1, 65535, 65535)
MULTIPROCESSORS = 132  # of a large GPU, for which work is divided; smaller ones run the same kernels
# Blocks of a cluster → clusters that run at a time where a multiprocessor has room for one block: not all parts of the
# chip have a multiple of four multiprocessors. And where two blocks fit, so that clusters may share a multiprocessor:
# as many as leave about one block for each.
CLUSTERS = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2, 4: 30, 8: 15}
CLUSTERS_SHARING = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2, 4: 32, 8: 16}
RESERVED_SHARED_MEMORY = 1024  # bytes of each block's, which CUDA takes


def memory_of_each(shared_memory: int, blocks: int) -> int:
    """The most shared memory, in bytes, that a block may have if `blocks` of them are to share a multiprocessor."""
    return (shared_memory + RESERVED_SHARED_MEMORY) // blocks - RESERVED_SHARED_MEMORY


@dataclass(frozen=True)
class GPU:
    """The GPU that kernels are generated for; by default an H100.

    Attributes:
        capability: Compute capability as CUDA writes it: 90 is 9.0.
        shared_memory: Bytes of shared memory per block.
        multiprocessors: Number of multiprocessors.
        has_scaled_gemm: Whether cuBLASLt can scale float8 products by row and column: CUDA 12.9 and later.
        reaches_peers: Whether the GPUs of a group reach each other's memory, so that kernels can exchange values.
        phase_clocks: Whether resident kernels record when each multiprocessor does what, for a profiler's trace.
    """

    capability: int = _HOPPER
    shared_memory: int = 227 * 1024
    multiprocessors: int = MULTIPROCESSORS
    has_scaled_gemm: bool = True
    reaches_peers: bool = False
    phase_clocks: bool = False

    @property
    def has_warpgroups(self) -> bool:
        """Whether four warps can multiply matrices together (`wgmma`), which only Hopper can."""
        return self.capability == _HOPPER

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can form clusters, whose blocks reach each other's shared memory."""
        return self.capability >= _HOPPER

    @property
    def multiplies_int8(self) -> bool:
        """Whether tensor cores multiply int8."""
        return self.capability >= _TURING

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether tensor cores multiply bfloat16."""
        return self.capability >= _AMPERE

    @property
    def multiplies_float8(self) -> bool:
        """Whether tensor cores multiply float8."""
        return self.capability >= _ADA

    @property
    def scales_products(self) -> bool:
        """Whether cuBLASLt can multiply a float8 product by scales of its rows and columns on this GPU."""
        return self.has_scaled_gemm and self.capability == _HOPPER
