"""Single nodes: the kernel calls to which a node is lowered if it is not fused with others."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from npu_compiler.compiler import compile
from npu_compiler.errors import NPUError
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.registry import unsupported_reason
from npu_compiler.options import CompileOptions
from npu_compiler.passes.precision import native_dtype
from npu_compiler.program.plan import ExecutionPlan


class LoneNodes:
    """A cache of plans of single nodes for the op-level target; equal nodes share a plan."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, ExecutionPlan | None] = {}

    def plan(self, node: OpNode, graph: IRGraph, compute_dtype: str) -> ExecutionPlan | None:
        """The plan of a node by itself; None if the op table cannot lower it without its neighbours."""
        key = (signature(node, graph), compute_dtype)
        if key not in self._plans:
            self._plans[key] = _plan(node, graph, compute_dtype)
        return self._plans[key]


def signature(node: OpNode, graph: IRGraph) -> Hashable:
    """A key that is equal for nodes with equal ops and attributes and equal specs of inputs and outputs."""
    tensors = (graph.tensors[name] for name in (*node.inputs, *node.outputs))
    places = tuple((name in graph.weights, name in graph.constants) for name in node.inputs)
    return node.op_type, repr(node.attrs), places, tuple((spec.shape, spec.dtype, spec.storage) for spec in tensors)


def _plan(node: OpNode, graph: IRGraph, compute_dtype: str) -> ExecutionPlan | None:
    if node.base == "getitem" or unsupported_reason(node, graph) is not None:
        return None
    try:
        return compile(alone(node, graph), None, CompileOptions(compute_dtype)).plan
    except NPUError:
        return None


def alone(node: OpNode, graph: IRGraph) -> IRGraph:
    """The graph of a node by itself; its inputs are the tensors it reads, except weights and constants."""
    read = list(dict.fromkeys(node.inputs))
    parts = [other for other in graph.nodes if other.base == "getitem" and set(other.inputs) & set(node.outputs)]
    outputs = [name for part in parts for name in part.outputs] or list(node.outputs)
    tensors = {name: graph.tensors[name] for n in (node, *parts) for name in (*n.inputs, *n.outputs)}
    return replace(
        graph,
        nodes=[node, *parts],
        tensors=tensors,
        inputs=[name for name in read if name not in graph.weights and name not in graph.constants],
        outputs=outputs,
        output_names=list(outputs),
        weights={name: graph.weights[name] for name in read if name in graph.weights},
        constants={name: graph.constants[name] for name in read if name in graph.constants},
        native_dtype=native_dtype(graph),
    )
