"""The table of element-wise ops as a macro that the shader templates expand."""

from __future__ import annotations

from functools import cache

import npu_compiler.ops  # noqa: F401  (fills the table of element-wise kernels)
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS, Elementwise
from npu_compiler.program.functions import c_text
from npu_compiler.program.target import MetalCodegenTarget


@cache
def elementwise_macro(filename: str) -> str:
    """The value of `ELEMENTWISE_OPS` for a shader file; empty for a file without element-wise kernels.

    It has the functions that the ops need and a row per op, as `elementwise_template.metal` takes them. A kernel and
    its `_scalar` form share a row; the latter reads operands that are numbers from the parameters.
    """
    target = MetalCodegenTarget()
    rows: dict[str, str] = {}
    functions: dict[str, str] = {}
    for kernel in ELEMENTWISE_KERNELS.values():
        if target.source(kernel.name) == filename:
            rows[kernel.function] = _row(kernel.function, kernel.op)
            functions |= {function.name: c_text(function, "inline") for function in kernel.op.functions}
    return " ".join([*functions.values(), *rows.values()])


def _row(function: str, op: Elementwise) -> str:
    attributes = " ".join(f"const float {name} = params.attrs[{index}];" for index, name in enumerate(op.attrs))
    if op.integer is None:
        return f"ELEMENTWISE_FLOAT({function}, {attributes}, ({op.expr}))"
    return f"ELEMENTWISE({function}, {attributes}, ({op.expr}), ({op.integer}))"
