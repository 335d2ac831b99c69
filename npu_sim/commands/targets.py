"""Lookup of code generation targets by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_compiler import CodegenTarget


def find_target(name: str, phase_clocks: bool = False) -> CodegenTarget:
    """Return the target of that name: built in, or from an installed plug-in; a device's name stands for its target.

    Args:
        phase_clocks: Record the time of each phase inside resident CUDA kernels; see `GPU`.

    Raises:
        InputError: there is no target of that name, or it has no phase clocks.
    """
    from cuda_compiler import GPU, CUDACodegenTarget
    from npu_compiler import MetalCodegenTarget, OpLevelTarget
    from npu_compiler.errors import InputError
    from npu_compiler.program.target import load_plugin_target

    if name in ("cuda", "cuda_gpu"):
        return CUDACodegenTarget(GPU(phase_clocks=phase_clocks))
    if phase_clocks:
        raise InputError(f"--phase-clocks is for --target cuda_gpu only; this is {name}")
    if name in ("metal", "metal_gpu"):
        return MetalCodegenTarget()
    if name in ("cpu", "op_level"):
        return OpLevelTarget()
    if name.startswith("npu:"):
        from npu_model import NPUTarget, load_chip

        return NPUTarget(load_chip(name.removeprefix("npu:")))
    target = load_plugin_target(name)
    if target is None:
        names = ", ".join(["op_level (for the CPU and Metal)", *target_names()[1:]])
        raise InputError(f"unknown target '{name}'; choose one of {names}")
    return target


def target_names() -> list[str]:
    """Return the names of the targets available here, `op_level` first."""
    from npu_compiler.program.target import plugin_targets
    from npu_model.chip import shipped_chips

    return ["op_level", "metal_gpu", "cuda_gpu", *(f"npu:{chip}" for chip in shipped_chips()), *plugin_targets()]
