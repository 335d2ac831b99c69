"""Turn matrix products that sum over a single element into element-wise products."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name

_PRODUCTS = frozenset({"aten.matmul", "aten.mm", "aten.bmm"})


def lower_outer_products(graph: IRGraph) -> IRGraph:
    """Turn each matrix product whose inner dimension is 1 into an element-wise product, which fuses with others.

    Given:   m = matmul(a, b);  y = transpose(m, -1, -2)    with a: [..., M, 1], b: [..., 1, N]
    Result:  y = mul(transpose(b), transpose(a))            and, where m is not only transposed, m = mul(a, b)

    Rotary angles are such a product, of frequencies and positions; some versions of transformers write it as a matmul.
    """
    consumers, tensors = graph.consumers(), dict(graph.tensors)
    nodes: list[OpNode] = []
    transposed: set[str] = set()

    def transpose(name: str) -> str:
        spec = tensors[name]
        result = unique_name(f"{name}.transposed", tensors)
        tensors[result] = TensorSpec(result, (*spec.shape[:-2], spec.shape[-1], spec.shape[-2]), spec.dtype)
        nodes.append(OpNode(result, "aten.transpose.int", (name,), (result,), {"dim0": -2, "dim1": -1}))
        return result

    for node in graph.nodes:
        if node.name in transposed:
            continue
        if _is_outer_product(node, graph):
            readers = consumers.get(node.outputs[0], [])
            inputs, outputs, name = node.inputs, node.outputs, node.name
            if len(readers) == 1 and node.outputs[0] not in graph.outputs and _swaps_the_last_two(readers[0], graph):
                transposed.add(readers[0].name)
                inputs = transpose(inputs[1]), transpose(inputs[0])
                outputs, name = readers[0].outputs, readers[0].name
            node = OpNode(name, "aten.mul.Tensor", inputs, outputs)
        nodes.append(node)
    return replace(graph, nodes=nodes, tensors=tensors)


def _is_outer_product(node: OpNode, graph: IRGraph) -> bool:
    if node.base not in _PRODUCTS or len(node.inputs) != 2:
        return False
    left, right = (graph.tensors[name].shape for name in node.inputs)
    return len(left) >= 2 and len(right) >= 2 and left[-1] == right[-2] == 1


def _swaps_the_last_two(node: OpNode, graph: IRGraph) -> bool:
    if node.op_type != "aten.transpose.int":
        return False
    rank = len(graph.tensors[node.inputs[0]].shape)
    return {node.attrs[dim] % rank for dim in ("dim0", "dim1")} == {rank - 2, rank - 1}
