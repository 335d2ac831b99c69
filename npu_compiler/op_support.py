"""Functions that tell whether the NPU supports an op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_compiler.graph.model import OpNode
from npu_compiler.ops import OPS, find_op
from npu_compiler.ops.registry import is_assertion, unsupported_reason
from npu_compiler.program.target import CodegenTarget

__all__ = ["get_supported_ops", "given_attrs", "is_op_supported", "supports_node", "unsupported_reason"]


def is_op_supported(op_type: str, attrs: Mapping[str, Any] | None = None) -> bool:
    """Whether the op table has a row for an op type, in any overload or in-place variant.

    A row may still refuse a node because of its shapes, dtypes or attributes; `partition()` asks it about each node.
    """
    if is_assertion(op_type):
        return True
    return find_op(op_type) is not None and not op_type.startswith("npu.")


def get_supported_ops() -> list[str]:
    """Names of all supported ATen ops (without overload, unless overloads differ), sorted."""
    return sorted(name for name in OPS if not name.startswith("npu."))


def supports_node(target: CodegenTarget, node: OpNode) -> bool:
    """Whether a target has a node's op with its attributes; always true for views, which at most copy."""
    op = find_op(node.op_type)
    return op is not None and op.view is not None or target.supports(node.op_type, given_attrs(node))


def given_attrs(node: OpNode) -> dict[str, Any]:
    """A node's attributes, without those that only the compiler reads."""
    return {key: value for key, value in node.attrs.items() if not key.startswith("_")}
