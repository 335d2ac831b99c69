"""Door to `graph`: reading IR, and the graph that is read."""

from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec
from npu_compiler.graph.reader import read_ir

__all__ = ["IRGraph", "OpNode", "TensorSpec", "read_ir"]
