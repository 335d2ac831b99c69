"""Lower each node of a graph through its row of the op table."""

from __future__ import annotations

from npu_compiler.codegen_core import CodegenTarget
from npu_compiler.ir_reader import IRGraph
from npu_compiler.lowering import Lowering
from npu_compiler.ops import OPS, find_op
from npu_compiler.ops.registry import well_formed
from npu_compiler.views import View, contiguous_strides

HANDLED_OPS = frozenset(name for name in OPS if not name.startswith("npu."))


def lower_graph(graph: IRGraph, target: CodegenTarget) -> Lowering:
    """Walk the nodes in order; afterwards every tensor has a view and every launch is in `calls`.

    Raises:
        IRError: a node lacks an input or an attribute, or its attributes or output do not go with its inputs.
    """
    ctx = Lowering(graph, target)
    for name in (*graph.inputs, *graph.weights, *graph.constants):
        spec = graph.tensors[name]
        strides = contiguous_strides(spec.alloc_shape or spec.shape)
        ctx.views[name] = View(name, spec.shape, strides, 0, spec.storage)
    for node in graph.nodes:
        op = find_op(node.op_type)
        assert op is not None, f"{node.op_type} passed the constraint check"
        ctx.node = node
        with well_formed(node):
            op.lower(ctx, node)
    return ctx
