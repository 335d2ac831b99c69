"""Turn einsums that are batched matrix products into these, so that later fusions, as of attention, know them."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.ops.matmul import parse_einsum


def lower_einsums(graph: IRGraph) -> IRGraph:
    """Turn each einsum into a matmul of permuted operands where it multiplies one matrix by one of each batch element.

    Given:   s = einsum("bhlk,bhtk->bhlt", q, k)
    Result:  p = permute(k, [0, 1, 3, 2]);  s = matmul(q, p)
    """
    tensors = dict(graph.tensors)
    nodes: list[OpNode] = []
    for node in graph.nodes:
        product = _as_product(node, graph) if node.base == "aten.einsum" else None
        if product is not None:
            inputs = []
            for name, dims in product:
                if dims != sorted(dims):
                    permuted = unique_name(f"{node.name}.permuted", tensors)
                    shape = tuple(tensors[name].shape[dim] for dim in dims)
                    tensors[permuted] = TensorSpec(permuted, shape, tensors[name].dtype)
                    nodes.append(OpNode(permuted, "aten.permute.default", (name,), (permuted,), {"dims": dims}))
                    name = permuted
                inputs.append(name)
            node = OpNode(node.name, "aten.matmul.default", tuple(inputs), node.outputs)
        nodes.append(node)
    return replace(graph, nodes=nodes, tensors=tensors)


def _as_product(node: OpNode, graph: IRGraph) -> list[tuple[str, list[int]]] | None:
    """Return the factors [batch…, m, k] and [batch…, k, n], each as a tensor and the order of its dimensions.

    None if the einsum is no such product, or one whose batches or sums broadcast.
    """
    parsed = parse_einsum(node, graph)
    if parsed is None or len(parsed[0]) != 2 or len(parsed[1]) < 3:
        return None
    terms, result = parsed
    *batch, rows, columns = list(result)
    operands = dict(zip(terms, node.inputs, strict=True)) if terms[0] != terms[1] else {}
    left = next((term for term in operands if rows in term and columns not in term), "")
    right = next((term for term in operands if columns in term and rows not in term), "")
    inner = "".join(set(left) - {rows, *batch})
    if {*left} != {*batch, rows, inner} or {*right} != {*batch, inner, columns} or len(inner) != 1:
        return None
    sizes: dict[str, int] = {}
    for term, name in operands.items():
        for letter, size in zip(term, graph.tensors[name].shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return None
    orders = ((left, [*batch, rows, inner]), (right, [*batch, inner, columns]))
    return [(operands[term], [term.index(letter) for letter in order]) for term, order in orders]
