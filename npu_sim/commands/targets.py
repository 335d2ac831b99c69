"""The code generation targets by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_compiler import CodegenTarget

TARGETS = ("op_level", "metal_gpu", "cuda_gpu")


def find_target(name: str, phase_clocks: bool = False) -> CodegenTarget:
    """The target of that name; a device's name stands for its target.

    Args:
        phase_clocks: As `CUDACodegenTarget` takes it.

    Raises:
        InputError: there is none of that name, or it has no phase clocks.
    """
    from cuda_compiler import CUDACodegenTarget
    from npu_compiler import MetalCodegenTarget, OpLevelTarget
    from npu_compiler.errors import InputError

    if name in ("cuda", "cuda_gpu"):
        return CUDACodegenTarget(phase_clocks=phase_clocks)
    if phase_clocks:
        raise InputError(f"--phase-clocks is for --target cuda_gpu only; this is {name}")
    if name in ("metal", "metal_gpu"):
        return MetalCodegenTarget()
    if name not in ("cpu", "op_level"):
        raise InputError(
            f"unknown target '{name}'; choose one of op_level (for the CPU and Metal), metal_gpu and cuda_gpu"
        )
    return OpLevelTarget()
