"""Door to the compiler's op table: the CUDA target supports what the compiler lowers, since every kernel has a rule."""

from npu_compiler.op_support import get_supported_ops, is_op_supported, unsupported_reason

__all__ = ["get_supported_ops", "is_op_supported", "unsupported_reason"]
