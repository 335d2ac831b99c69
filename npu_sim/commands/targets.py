"""The code generation targets by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_compiler import CodegenTarget

TARGETS = ("op_level", "metal_gpu", "cuda_gpu")


def find_target(name: str) -> CodegenTarget:
    """The target of that name; a device's name stands for its target. Raises `InputError` if there is none."""
    from cuda_compiler import CUDACodegenTarget
    from npu_compiler import MetalCodegenTarget, OpLevelTarget
    from npu_compiler.errors import InputError

    if name in ("cuda", "cuda_gpu"):
        return CUDACodegenTarget()
    if name in ("metal", "metal_gpu"):
        return MetalCodegenTarget()
    if name not in ("cpu", "op_level"):
        raise InputError(
            f"unknown target '{name}'; choose one of op_level (for the CPU and Metal), metal_gpu and cuda_gpu"
        )
    return OpLevelTarget()
