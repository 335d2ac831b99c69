"""Sharding rules of the op table: ops over tensors that are divided among ranks (the devices of a group).

A rule is given one tensor of a node and how that is divided. It returns how the node's other tensors must be divided
for every rank to compute its part independently, or None if that is impossible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from npu_compiler.graph.mesh import Split
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.ops.registry import Args, Shards, ViewRule, find_op
from npu_compiler.program.views import View, contiguous_strides


def shard_elementwise(node: OpNode, graph: IRGraph, tensor: str, split: Split) -> Shards | None:
    """Divide all operands that have the dimension along it; operands that are broadcast along it are whole."""
    shapes = {name: graph.tensors[name].shape for name in (*node.inputs, *node.outputs)}
    rank = len(shapes[node.outputs[0]])
    aligned = [(dim + rank - len(shapes[tensor]), parts) for dim, parts in split]
    out = graph.tensors[node.outputs[0]].shape
    splits: dict[str, Split] = {}
    for name, shape in shapes.items():
        offset = rank - len(shape)
        own = tuple((d - offset, parts) for d, parts in aligned if d >= offset and shape[d - offset] == out[d])
        if own and own != tuple((d - offset, parts) for d, parts in aligned[: len(own)]):
            return None  # broadcast along an outer dimension only: its parts would not follow the ranks' order
        if own:
            splits[name] = own
    return Shards(splits) if splits.get(tensor) == split else None


def shard_view(node: OpNode, graph: IRGraph, tensor: str, split: Split) -> Shards | None:
    """Divide a view op: a divided dimension of the input is found in the output by the memory that it spans."""
    op = find_op(node.op_type)
    assert op is not None and op.view is not None
    rule = op.view
    steps = [node if rule.part is None else rule.part(node, graph, index) for index in range(len(node.outputs))]
    if any(step.inputs[0] != node.inputs[0] for step in steps):
        return None
    source, splits = node.inputs[0], {tensor: split}
    if tensor != source:
        step = steps[node.outputs.index(tensor)]
        before = _before(*_views(step, graph), split)
        if before is None:
            return None
        splits[source] = before
    for step in steps:
        if step.outputs[0] not in splits:
            after = _after(*_views(step, graph), splits[source])
            if after is None:
                return None
            splits[step.outputs[0]] = after
    return Shards(splits)


def _views(step: OpNode, graph: IRGraph) -> tuple[View, View | None]:
    """The input of a view op as a contiguous view, and its output as a view of that memory.

    None if that is impossible.
    """
    op = find_op(step.op_type)
    rule: ViewRule | None = None if op is None else op.view
    spec = graph.tensors[step.inputs[0]]
    source = View(spec.name, spec.shape, contiguous_strides(spec.shape), 0, spec.dtype)
    return source, None if rule is None else rule.window(step, source, graph.tensors[step.outputs[0]])


def _spanning(view: View, span: int) -> int | None:
    """The first dimension that covers exactly `span` elements of memory, or None."""
    dims = (d for d in range(view.rank) if view.shape[d] > 1 and view.strides[d] * view.shape[d] == span)
    return next(dims, None)


def _after(source: View, out: View | None, split: Split) -> Split | None:
    splits = []
    for dim, parts in split:
        same = None if out is None else _spanning(out, source.strides[dim] * source.shape[dim])
        if same is None:
            return None
        splits.append((same, parts))
    return tuple(splits)


def _before(source: View, out: View | None, split: Split) -> Split | None:
    """The split of a view's source, from that of the view; None if there is none.

    Dimensions that the view repeats stay whole; if it joins dimensions, the outer one is divided.
    """
    splits: list[tuple[int, int]] = []
    for dim, parts in split:
        if out is not None and out.strides[dim] == 0:
            continue
        same = None if out is None else _spanning(source, out.strides[dim] * out.shape[dim])
        if same is None:
            return None
        size = source.shape[same]
        if size % parts and parts % size == 0:
            inner = _spanning(source, source.strides[same])
            if inner is None:
                return None
            splits += [(same, size), (inner, parts // size)]
        else:
            splits.append((same, parts))
    return tuple(splits) or None


def shard_linear(node: OpNode, graph: IRGraph, tensor: str, split: Split) -> Shards | None:
    """Divide a linear: each rank computes a part of the output's columns or, if the input is divided, a summand."""
    x, weight, *bias = node.inputs
    (out,) = node.outputs
    if not {weight, *bias} <= graph.weights.keys() or tensor not in (x, out) or len(split) != 1:
        return None
    (dim, parts), last = split[0], len(graph.tensors[tensor].shape) - 1
    if dim != last or len(graph.tensors[weight].shape) != 2:
        return None
    if tensor == out:
        return Shards({out: split, **dict.fromkeys((weight, *bias), ((0, parts),))})
    return Shards({x: split, weight: ((1, parts),)}, is_sum=True, once=frozenset(bias))


def shard_attention(node: OpNode, graph: IRGraph, tensor: str, split: Split) -> Shards | None:
    """Divide attention by heads, sinks too; with fewer KV heads than ranks, several ranks hold the same KV head."""
    query, _, _, *others = node.inputs
    if len(graph.tensors[query].shape) != 4 or len(split) != 1 or split[0][0] != 1 or tensor in others:
        return None
    ((_, parts),), args = split, Args(node)
    splits = _by_heads(node, graph, split)
    if (mask := args.tensor("attn_mask")) is not None:
        shape = graph.tensors[mask].shape
        if len(shape) >= 3 and shape[-3] > 1:
            splits[mask] = ((len(shape) - 3, parts),)
    if (sinks := args.tensor("sinks")) is not None:
        splits[sinks] = ((0, parts),)
    return Shards(splits) if splits.get(tensor) == split else None


def _by_heads(node: OpNode, graph: IRGraph, split: Split) -> dict[str, Split]:
    """Tensor name → split along dimension 1, the heads, for queries, keys, values and output of an attention.

    If a KV head is shared by several parts of `split`, keys and values are divided into as many parts as they have
    heads. With a single head they are left out: every rank holds it.
    """
    query, key, value = node.inputs[:3]
    ((_, parts),) = split
    shared = graph.tensors[key].shape[1]
    own = shared if shared % parts and parts % shared == 0 else parts
    splits: dict[str, Split] = {query: split, node.outputs[0]: split}
    return splits | ({key: ((1, own),), value: ((1, own),)} if own > 1 else {})


def shard_paged_attention(node: OpNode, graph: IRGraph, tensor: str, split: Split) -> Shards | None:
    """Divide paged attention by heads, like `shard_attention`, sinks too; tables, sequences and positions are whole."""
    if len(split) != 1 or split[0][0] != 1:
        return None
    ((_, parts),) = split
    splits = {**_by_heads(node, graph, split), **dict.fromkeys(node.inputs[6:], ((0, parts),))}
    return Shards(splits) if splits.get(tensor) == split else None


def shard_rows_update(node: OpNode, graph: IRGraph, tensor: str, split: Split) -> Shards | None:
    """Divide an update of rows along any dimension but the one whose rows are replaced."""
    whole, index, rows = node.inputs
    dim = int(node.attrs["dim"]) % len(graph.tensors[whole].shape)
    if tensor == index or any(d == dim for d, _ in split):
        return None
    return Shards(dict.fromkeys((whole, rows, node.outputs[0]), split))


def shard_along_others(node: OpNode, graph: IRGraph, tensor: str, split: Split) -> Shards | None:
    """Divide an op that joins or reduces along some dimensions, along a dimension that it keeps."""
    rank = len(graph.tensors[node.inputs[0]].shape)
    given: Any = node.attrs.get("dim", 0)
    dims = {int(dim) % rank for dim in (given if isinstance(given, (list, tuple)) else [given])}
    out = node.outputs[0]
    kept = [d for d in range(rank) if len(graph.tensors[out].shape) == rank or d not in dims]
    if tensor == out:
        split = tuple((kept[d], parts) for d, parts in split)
    if any(d in dims for d, _ in split):
        return None
    after = tuple((kept.index(d), parts) for d, parts in split)
    return Shards({**dict.fromkeys(node.inputs, split), **dict.fromkeys(node.outputs, after)})


def with_part_shapes(node: OpNode, graph: IRGraph) -> OpNode:
    """The node with attributes that state its output's shape set to that shape in the divided graph."""
    shape = list(graph.tensors[node.outputs[0]].shape)
    stated = {key for key in ("size", "shape") if len(node.attrs.get(key) or ()) == len(shape)}
    return replace(node, attrs={**node.attrs, **dict.fromkeys(stated, shape)}) if stated else node


def shard_embedding(
    node: OpNode, graph: IRGraph, first: str, rows: int, taken: Mapping[str, TensorSpec]
) -> tuple[list[OpNode], dict[str, TensorSpec]]:
    """The nodes of an embedding over a part of its table, with 0 for indices of other parts, and the new tensors.

    Given:   out = embedding(table, ids)
    Result:  inside = 0 <= ids - first < rows;  out = where(inside, embedding(table, where(inside, ids - first, 0)), 0)

    Args:
        first: Name of an integer [1]: the first row of the part.
        rows: Number of rows of the part.
        taken: Tensors whose names are in use.
    """
    table, ids = node.inputs
    (out,) = node.outputs
    nodes: list[OpNode] = []
    specs: dict[str, TensorSpec] = {}

    def add(stem: str, op: str, inputs: tuple[str, ...], like: str, dtype: str = "", **attrs: Any) -> str:
        name = unique_name(f"{out}.{stem}", {**taken, **specs})
        spec = graph.tensors[like]
        specs[name] = TensorSpec(name, spec.shape, dtype or spec.dtype)
        nodes.append(OpNode(name, op, inputs, (name,), attrs))
        return name

    place = add("place", "aten.sub.Tensor", (ids, first), ids)
    above = add("above", "aten.ge.Scalar", (place,), ids, "bool", other=0)
    below = add("below", "aten.lt.Scalar", (place,), ids, "bool", other=rows)
    inside = add("inside", "aten.logical_and.default", (above, below), ids, "bool")
    index = add("index", "aten.where.ScalarOther", (inside, place), ids, other=0)
    row = add("row", node.op_type, (table, index), out)
    nodes[-1] = replace(nodes[-1], attrs=node.attrs)
    column = add("column", "aten.unsqueeze.default", (inside,), ids, "bool", dim=len(graph.tensors[ids].shape))
    specs[column] = replace(specs[column], shape=(*graph.tensors[ids].shape, 1))
    nodes.append(OpNode(node.name, "aten.where.ScalarOther", (column, row), (out,), {"other": 0.0}))
    return nodes, specs
