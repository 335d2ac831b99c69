"""What the NPU supports, as questions to the op table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_compiler.ops import OPS, find_op
from npu_compiler.ops.registry import is_assertion, unsupported_reason

__all__ = ["get_supported_ops", "is_op_supported", "unsupported_reason"]


def is_op_supported(op_type: str, attrs: Mapping[str, Any] | None = None) -> bool:
    """Whether the op table has a row for an op type, any overload, in-place variants included.

    A row may still refuse a node for its shapes, dtypes or attributes; `partition()` asks it about each node.
    """
    if is_assertion(op_type):
        return True
    return find_op(op_type) is not None and not op_type.startswith("npu.")


def get_supported_ops() -> list[str]:
    """Names of all supported ATen ops (without overload, unless overloads differ), sorted."""
    return sorted(name for name in OPS if not name.startswith("npu."))
