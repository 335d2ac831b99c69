"""Chooses the int8 and uint8 tensors that are stored in one byte per element; all others are int32 on the device."""

from __future__ import annotations

from npu_compiler.graph.dtypes import BYTE_DTYPES
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.registry import ByteStorage, find_op


def storable_in_bytes(graph: IRGraph) -> set[str]:
    """The int8 and uint8 tensors all of whose producers and readers, also through views, can handle bytes."""
    names = {name for name, spec in graph.tensors.items() if spec.dtype in BYTE_DTYPES}
    touched = _touching(graph, names)
    while refused := {x for x in names if not all(_handles_bytes(node, names) for node in touched[x])}:
        names -= refused
    return names


def in_bytes(graph: IRGraph) -> set[str]:
    """The tensors that are stored in one byte per element: those of integer kernels, and views of them."""
    names = storable_in_bytes(graph)
    touched = _touching(graph, names)
    needed = {name for name in names if any(_needs_bytes(node) for node in touched[name])}
    while shown := {
        x
        for x in names - needed
        if any(_is_view(node) and needed & {*node.inputs, *node.outputs} for node in touched[x])
    }:
        needed |= shown
    return needed


def _touching(graph: IRGraph, names: set[str]) -> dict[str, list[OpNode]]:
    """Tensor → the nodes that read or write it."""
    touched: dict[str, list[OpNode]] = {name: [] for name in names}
    for node in graph.nodes if names else ():
        for name in {*node.inputs, *node.outputs} & names:
            touched[name].append(node)
    return touched


def _handles_bytes(node: OpNode, names: set[str]) -> bool:
    op = find_op(node.op_type)
    if op is not None and op.byte_storage is not ByteStorage.NONE:
        return True
    return _is_view(node) and {node.inputs[0], node.outputs[0]} <= names


def _needs_bytes(node: OpNode) -> bool:
    op = find_op(node.op_type)
    return op is not None and op.byte_storage is ByteStorage.REQUIRED


def _is_view(node: OpNode) -> bool:
    """Whether a node with one input is a view op that keeps the dtype; if no strides express the view, it copies."""
    op = find_op(node.op_type)
    return op is not None and op.view is not None and op.moves and not op.is_cast and len(node.inputs) == 1
