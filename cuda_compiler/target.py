"""`CUDACodegenTarget`: fuses and specializes the op-level calls for an NVIDIA GPU."""

from __future__ import annotations

from cuda_compiler.specialization.gpu import GPU
from npu_compiler.program.target import OpLevelTarget, PlanStage
from npu_compiler.target_config import CUDA_GPU


class CUDACodegenTarget(OpLevelTarget):
    """Fuses element-wise calls and specializes all others; the sources travel in the program.

    Args:
        gpu: The GPU that the program is for; by default an H100.
    """

    config = CUDA_GPU

    def __init__(self, gpu: GPU | None = None) -> None:
        self.gpu = gpu or GPU()

    @property
    def key(self) -> str:
        gpu = self.gpu
        more = " and phase clocks" * gpu.phase_clocks + " and scaled products" * gpu.scales_products
        more += " and peers in reach" * gpu.reaches_peers
        parts = f"{gpu.multiprocessors} multiprocessors and {gpu.shared_memory} bytes of shared memory"
        return f"{self.config.name} {gpu.capability} with {parts}{more}"

    def shader_source(self, filename: str) -> str:
        return f"cuda_compiler/templates/{filename}"

    def stages(self) -> list[PlanStage]:
        from cuda_compiler.pipeline import cuda_stages  # a program that was compiled before runs without it

        return cuda_stages(self.gpu)


CudaCodegenTarget = CUDACodegenTarget
