"""`CUDACodegenTarget`: fuses and specializes the op-level calls for an NVIDIA GPU."""

from __future__ import annotations

from cuda_compiler.specialization.gpu import HOPPER, HOPPER_SHARED_MEMORY
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.target import OpLevelTarget
from npu_compiler.target_config import TargetConfig

CUDA_GPU = TargetConfig(name="cuda_gpu", channel_alignment_bytes=1, programs_are_code=True)


class CUDACodegenTarget(OpLevelTarget):
    """Fuses element-wise calls and specializes all others; the sources travel in the program.

    Args:
        shared_memory: Bytes of shared memory per block on the target GPU; by default Hopper's.
        capability: That GPU's compute capability as CUDA writes it, 90 for 9.0; by default Hopper's.
        phase_clocks: Resident kernels note what each multiprocessor does when, which a profiler's trace shows.
    """

    config = CUDA_GPU

    def __init__(
        self, shared_memory: int = HOPPER_SHARED_MEMORY, capability: int = HOPPER, phase_clocks: bool = False
    ) -> None:
        self.shared_memory = shared_memory
        self.capability = capability
        self.phase_clocks = phase_clocks

    @property
    def key(self) -> str:
        clocks = " and phase clocks" * self.phase_clocks
        return f"{self.config.name} {self.capability} with {self.shared_memory} bytes of shared memory{clocks}"

    def shader_source(self, filename: str) -> str:
        return f"cuda_compiler/templates/{filename}"

    def finish(self, plan: ExecutionPlan) -> ExecutionPlan:
        from cuda_compiler.pipeline import generate_kernels  # a program that was compiled before runs without it

        return generate_kernels(plan, self.shared_memory, self.capability, self.phase_clocks)


CudaCodegenTarget = CUDACodegenTarget
