"""Door to `program`: the data that code generation produces, and the targets that name its kernels."""

from npu_compiler.program.kernels import KERNELS, KernelCall, KernelDecl, declare_kernel
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan, WeightSpec
from npu_compiler.program.target import CodegenTarget, MetalCodegenTarget, OpLevelTarget

__all__ = [
    "KERNELS",
    "BufferAllocation",
    "CodegenTarget",
    "ExecutionPlan",
    "KernelCall",
    "KernelDecl",
    "MetalCodegenTarget",
    "OpLevelTarget",
    "WeightSpec",
    "declare_kernel",
]
