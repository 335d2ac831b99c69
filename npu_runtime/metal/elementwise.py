"""The rows of the element-wise table as the macro that the shader templates expand."""

from __future__ import annotations

from functools import cache

from npu_compiler.ops import ELEMENTWISE
from npu_compiler.program.elementwise import Elementwise
from npu_compiler.program.target import MetalCodegenTarget

_FORMS = ("_kernel", "_scalar_kernel", "_broadcast_kernel", "_scalar_broadcast_kernel")


@cache
def elementwise_macro(filename: str) -> str:
    """The value of `ELEMENTWISE_OPS` for a shader file; empty for a file that holds no element-wise kernels.

    It is a row per function, as `elementwise_template.metal` takes them. A kernel and its `_scalar` form are one
    function, which reads an absent operand from the parameters.
    """
    target = MetalCodegenTarget()
    rows: dict[str, str] = {}
    for op in ELEMENTWISE.values():
        for form in _FORMS:
            if target.elementwise_kernel(f"{op.name}{form}")[1] == filename:
                function = f"{op.name}{form.replace('_scalar', '')}"
                rows[function] = _row(function, op)
    return " ".join(rows.values())


def _row(function: str, op: Elementwise) -> str:
    attributes = " ".join(f"const float {name} = params.attrs[{index}];" for index, name in enumerate(op.attrs))
    if op.integer is None:
        return f"ELEMENTWISE_FLOAT({function}, {attributes}, ({op.expr}))"
    return f"ELEMENTWISE({function}, {attributes}, ({op.expr}), ({op.integer}))"
