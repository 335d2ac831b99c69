"""Door to `codegen`: the lowering of single ops."""

from npu_compiler.codegen import HANDLED_OPS, lower_graph

__all__ = ["HANDLED_OPS", "lower_graph"]
