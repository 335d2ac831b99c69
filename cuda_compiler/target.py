"""`CUDACodegenTarget`: fuses and specializes the op-level calls for an NVIDIA GPU."""

from __future__ import annotations

from cuda_compiler.specialization.gpu import HOPPER, HOPPER_SHARED_MEMORY
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.target import OpLevelTarget
from npu_compiler.target_config import CUDA_GPU


class CUDACodegenTarget(OpLevelTarget):
    """Fuses element-wise calls and specializes all others; the sources travel in the program.

    Args:
        shared_memory: Bytes of shared memory per block on the target GPU; by default Hopper's.
        capability: That GPU's compute capability as CUDA writes it, 90 for 9.0; by default Hopper's.
        phase_clocks: Resident kernels note what each multiprocessor does when, which a profiler's trace shows.
        scales_products: cuBLASLt there multiplies products of float8 with scales by row and column, as it does from
            CUDA 12.9 on for compute capability 9.0.
        reaches_peers: The GPUs of a group reach each other's memory, so kernels can exchange values themselves.
    """

    config = CUDA_GPU

    def __init__(
        self,
        shared_memory: int = HOPPER_SHARED_MEMORY,
        capability: int = HOPPER,
        phase_clocks: bool = False,
        scales_products: bool = True,
        reaches_peers: bool = False,
    ) -> None:
        self.shared_memory = shared_memory
        self.capability = capability
        self.phase_clocks = phase_clocks
        self.scales_products = scales_products and capability == HOPPER
        self.reaches_peers = reaches_peers

    @property
    def key(self) -> str:
        more = " and phase clocks" * self.phase_clocks + " and scaled products" * self.scales_products
        more += " and peers in reach" * self.reaches_peers
        return f"{self.config.name} {self.capability} with {self.shared_memory} bytes of shared memory{more}"

    def shader_source(self, filename: str) -> str:
        return f"cuda_compiler/templates/{filename}"

    def finish(self, plan: ExecutionPlan) -> ExecutionPlan:
        from cuda_compiler.pipeline import generate_kernels  # a program that was compiled before runs without it

        chosen = self.phase_clocks, self.scales_products, self.reaches_peers
        return generate_kernels(plan, self.shared_memory, self.capability, *chosen)


CudaCodegenTarget = CUDACodegenTarget
