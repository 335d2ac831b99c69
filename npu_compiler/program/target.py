"""`CodegenTarget`: names the kernels of a device. The only thing in which code generation differs between targets."""

from __future__ import annotations

from abc import ABC, abstractmethod

from npu_compiler.program.kernels import KERNELS
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.target_config import METAL_GPU, TargetConfig


class CodegenTarget(ABC):
    """Maps kernel families to a target's kernel names and source files. Nothing else differs between targets."""

    config: TargetConfig

    @property
    def key(self) -> str:
        """What tells apart targets whose programs differ, for caches."""
        return self.config.name

    @abstractmethod
    def elementwise_kernel(self, kernel_name: str) -> tuple[str, str]:
        """(kernel, source file) of an element-wise kernel."""

    @abstractmethod
    def matmul_kernel(self, is_vec: bool, transpose_b: bool) -> tuple[str, str]:
        """(kernel, source file) of a matrix product; `is_vec` when it has one row."""

    @abstractmethod
    def fused_kernel(self, kernel_type: str) -> tuple[str, str]:
        """(kernel, source file) of any other kernel, fused ones included."""

    @abstractmethod
    def shader_source(self, filename: str) -> str:
        """The path or package resource of a source file."""

    def finish(self, plan: ExecutionPlan) -> ExecutionPlan:
        """What this target does with the calls before memory is planned: fuse them, generate their sources."""
        return plan


class MetalCodegenTarget(CodegenTarget):
    """The op-level target that Metal and the CPU device share."""

    config = METAL_GPU

    def elementwise_kernel(self, kernel_name: str) -> tuple[str, str]:
        if kernel_name.endswith("_broadcast_kernel"):
            return kernel_name, "elementwise_broadcast.metal"
        if kernel_name == "add_relu_kernel":
            return kernel_name, "add_relu.metal"
        basic = kernel_name in ("add_kernel", "relu_kernel", "copy_kernel")
        return kernel_name, "elementwise.metal" if basic else "elementwise_extended.metal"

    def matmul_kernel(self, is_vec: bool, transpose_b: bool) -> tuple[str, str]:
        stem = "matmul_vec" if is_vec else "matmul"
        return f"{stem}_kernel" if transpose_b else f"{stem}_notrans_kernel", "matmul.metal"

    def fused_kernel(self, kernel_type: str) -> tuple[str, str]:
        return kernel_type, KERNELS[kernel_type].source

    def shader_source(self, filename: str) -> str:
        return f"metal_kernels/{filename}"
