"""The rows of the element-wise table as the macro that the shader templates expand."""

from __future__ import annotations

from npu_compiler.codegen import MetalCodegenTarget
from npu_compiler.elementwise import ELEMENTWISE, Elementwise


def elementwise_macro(filename: str) -> str:
    """The value of `ELEMENTWISE_OPS` for a shader file: one `ELEMENTWISE(kernel, attributes, float, int)` per kernel.

    Empty for a file that holds no element-wise kernels.
    """
    target = MetalCodegenTarget()
    forms = [(op, f"{op.name}{form}") for op in ELEMENTWISE.values() for form in ("_kernel", "_broadcast_kernel")]
    return " ".join(_row(kernel, op) for op, kernel in forms if target.elementwise_kernel(kernel)[1] == filename)


def _row(kernel: str, op: Elementwise) -> str:
    attributes = " ".join(f"const float {name} = params.attrs[{index}];" for index, name in enumerate(op.attrs))
    return f"ELEMENTWISE({kernel}, ({attributes}), ({op.expr}), ({op.integer or '0'}))"
