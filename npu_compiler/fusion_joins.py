"""Fusions that make one call of several alike: products of one input, rotations of neighbouring heads, updates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from npu_compiler.ir_reader import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.ops.aliases import slice_bounds
from npu_compiler.weight_recipe import WeightTransformRecipe


def fuse_shared_input_linears(graph: IRGraph) -> IRGraph:
    """One product for linears that read the same tensor (QKV; gate and up).

    Given:   q = linear(x, wq);  k = linear(x, wk);  v = linear(x, wv)
    Result:  t = linear(x, concat(wq, wk, wv));  q, k, v = slices of t   (free: they are views)
    """
    groups: dict[str, list[OpNode]] = {}
    for node in graph.nodes:
        if node.base == "aten.linear" and _can_join(node, graph):
            groups.setdefault(node.inputs[0], []).append(node)
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    replaced: dict[str, list[OpNode]] = {}
    for source, members in groups.items():
        dtypes = {tensors[name].dtype for node in members for name in node.inputs[1:]}
        if len(members) < 2 or len(dtypes) > 1:
            continue
        joined = _join_linears(source, members, tensors, weights)
        replaced[members[0].name] = joined
        replaced.update({node.name: [] for node in members[1:]})
    nodes = [new for node in graph.nodes for new in replaced.get(node.name, [node])]
    return replace(graph, nodes=nodes, tensors=tensors, weights=weights)


def _can_join(node: OpNode, graph: IRGraph) -> bool:
    return (
        all(name in graph.weights for name in node.inputs[1:])
        and len(graph.tensors[node.inputs[1]].shape) == 2
        and len(graph.tensors[node.inputs[0]].shape) >= 2
        and node.outputs[0] not in graph.outputs
    )


def _join_linears(
    source: str,
    members: list[OpNode],
    tensors: dict[str, TensorSpec],
    weights: dict[str, WeightTransformRecipe],
) -> list[OpNode]:
    name = unique_name("+".join(node.name for node in members[:3]), tensors)
    rows = [tensors[node.inputs[1]].shape[0] for node in members]
    width, dtype = tensors[members[0].inputs[1]].shape[1], tensors[members[0].inputs[1]].dtype

    def concat(suffix: str, shape: tuple[int, ...], parts: list[WeightTransformRecipe]) -> str:
        weight = f"{name}.{suffix}"
        tensors[weight] = TensorSpec(weight, shape, dtype)
        weights[weight] = WeightTransformRecipe("concat", tuple(parts), {"axis": 0})
        return weight

    inputs = [source, concat("weight", (sum(rows), width), [weights[node.inputs[1]] for node in members])]
    if any(len(node.inputs) > 2 for node in members):
        zeros = [WeightTransformRecipe("fill", params={"shape": [n], "value": 0.0}) for n in rows]
        biases = [
            weights[node.inputs[2]] if len(node.inputs) > 2 else zero for node, zero in zip(members, zeros, strict=True)
        ]
        inputs.append(concat("bias", (sum(rows),), biases))
    out = tensors[members[0].outputs[0]]
    tensors[name] = replace(out, name=name, shape=(*out.shape[:-1], sum(rows)))
    nodes = [OpNode(name, "aten.linear.default", tuple(inputs), (name,), {})]
    start = 0
    for node, count in zip(members, rows, strict=True):
        attrs = {"dim": len(out.shape) - 1, "start": start, "end": start + count}
        nodes.append(OpNode(node.name, "aten.slice.Tensor", (name,), node.outputs, attrs))
        start += count
    return nodes


@dataclass(frozen=True)
class _Heads:
    """What a rotation turns: columns `start` to `end` of a product [B, T, N], seen as `shape` [B, H, T, D].

    Attributes:
        steps: The slice, the view and the transpose that make the one of the other.
    """

    node: OpNode
    product: str
    start: int
    shape: tuple[int, ...]
    steps: tuple[OpNode, OpNode, OpNode]

    @property
    def end(self) -> int:
        return self.start + self.shape[1] * self.shape[3]


def share_rope(graph: IRGraph) -> IRGraph:
    """One rotation for queries and keys that lie side by side in one product.

    Given:   q = rope(heads(t[…, :n]), cos, sin);  k = rope(heads(t[…, n:m]), cos, sin)
             where heads(x) = transpose(view(x, [B, T, H, D]), 1, 2)
    Result:  r = rope(heads(t[…, :m]), cos, sin);  q, k = r[:, :h], r[:, h:]   (free: they are views)
    """
    producers = graph.producers()
    groups: dict[tuple[object, ...], list[_Heads]] = {}
    for node in graph.nodes:
        heads = _rotated_heads(node, graph, producers)
        if heads is not None:
            batch, _, rows, width = heads.shape
            groups.setdefault((heads.product, node.inputs[1:], batch, rows, width), []).append(heads)
    tensors = dict(graph.tensors)
    replaced: dict[str, list[OpNode]] = {}
    for members in groups.values():
        for run in _neighbours(members):
            first, *rest = (heads.node.name for heads in members if heads in run)
            replaced[first] = _join_rotations(run, tensors)
            replaced.update({name: [] for name in rest})
    nodes = [new for node in graph.nodes for new in replaced.get(node.name, [node])]
    return replace(graph, nodes=nodes, tensors=tensors)


def _rotated_heads(node: OpNode, graph: IRGraph, producers: dict[str, OpNode]) -> _Heads | None:
    """The heads that a rotation turns, if they are columns of a product and all turn by the same angles."""
    if node.base != "npu.rope" or node.outputs[0] in graph.outputs:
        return None
    shape = graph.tensors[node.inputs[0]].shape
    if len(shape) != 4 or any(_varies_by_head(graph.tensors[name].shape) for name in node.inputs[1:]):
        return None
    transpose = producers.get(node.inputs[0])
    view = producers.get(transpose.inputs[0]) if transpose is not None else None
    window = producers.get(view.inputs[0]) if view is not None else None
    if transpose is None or view is None or window is None:
        return None
    columns, product = graph.tensors[window.outputs[0]].shape, graph.tensors[window.inputs[0]].shape
    batch, heads, rows, width = shape
    if transpose.base != "aten.transpose" or {transpose.attrs["dim0"] % 4, transpose.attrs["dim1"] % 4} != {1, 2}:
        return None
    if view.base not in ("aten.view", "aten.reshape", "aten._unsafe_view") or columns != (batch, rows, heads * width):
        return None
    if window.base != "aten.slice" or window.attrs.get("dim", 0) not in (2, -1) or window.attrs.get("step", 1) != 1:
        return None
    start, _ = slice_bounds(product[2], window.attrs.get("start"), window.attrs.get("end"))
    return _Heads(node, window.inputs[0], start, shape, (window, view, transpose))


def _varies_by_head(table: tuple[int, ...]) -> bool:
    return len(table) > 2 and table[-3] != 1


def _neighbours(members: list[_Heads]) -> list[list[_Heads]]:
    """Runs of at least two members whose columns follow each other."""
    runs: list[list[_Heads]] = []
    for heads in sorted(members, key=lambda heads: heads.start):
        if runs and runs[-1][-1].end == heads.start:
            runs[-1].append(heads)
        else:
            runs.append([heads])
    return [run for run in runs if len(run) > 1]


def _join_rotations(run: list[_Heads], tensors: dict[str, TensorSpec]) -> list[OpNode]:
    batch, _, rows, width = run[0].shape
    count = sum(heads.shape[1] for heads in run)
    start, end = run[0].start, run[-1].end
    name = unique_name("+".join(heads.node.name for heads in run), tensors)

    def tensor(suffix: str, like: str, shape: tuple[int, ...]) -> str:
        made = unique_name(f"{name}{suffix}", tensors)
        tensors[made] = replace(tensors[like], name=made, shape=shape)
        return made

    window, view, transpose = (step.outputs[0] for step in run[0].steps)
    columns = tensor(".columns", window, (batch, rows, end - start))
    split = tensor(".split", view, (batch, rows, count, width))
    moved = tensor(".heads", transpose, (batch, count, rows, width))
    rotated = tensor("", run[0].node.outputs[0], (batch, count, rows, width))
    nodes = [
        OpNode(columns, "aten.slice.Tensor", (run[0].product,), (columns,), {"dim": 2, "start": start, "end": end}),
        OpNode(split, "aten.view.default", (columns,), (split,), {"size": [batch, rows, count, width]}),
        OpNode(moved, "aten.transpose.int", (split,), (moved,), {"dim0": 1, "dim1": 2}),
        OpNode(rotated, "npu.rope", (moved, *run[0].node.inputs[1:]), (rotated,), {}),
    ]
    first = 0
    for heads in run:
        attrs = {"dim": 1, "start": first, "end": first + heads.shape[1]}
        nodes.append(OpNode(heads.node.name, "aten.slice.Tensor", (rotated,), heads.node.outputs, attrs))
        first += heads.shape[1]
    return nodes


def pair_cache_updates(graph: IRGraph) -> IRGraph:
    """One call for the new rows of two inputs: a layer's keys and values.

    Given:   k1 = index_copy(k0, dim, index, k);  v1 = index_copy(v0, dim, index, v)
    Result:  k1, v1 = index_copy_pair(k0, index, k, v0, v, dim)
    """
    waiting: dict[object, OpNode] = {}
    pairs: dict[str, OpNode] = {}
    for node in graph.nodes:
        for key, earlier in list(waiting.items()):
            if earlier.outputs[0] in node.inputs:
                del waiting[key]
        if node.base != "aten.index_copy" or node.inputs[0] not in graph.inputs:
            continue
        cache, index, source = node.inputs
        specs = graph.tensors[cache], graph.tensors[source]
        dim = node.attrs["dim"] % max(1, len(specs[0].shape))
        key = (index, dim, *((spec.shape, spec.dtype) for spec in specs))
        if key in waiting:
            pairs[node.name] = waiting.pop(key)
        else:
            waiting[key] = node
    dropped = {earlier.name for earlier in pairs.values()}
    nodes = [_pair(pairs[node.name], node) if node.name in pairs else node for node in graph.nodes]
    return replace(graph, nodes=[node for node in nodes if node.name not in dropped])


def _pair(first: OpNode, second: OpNode) -> OpNode:
    inputs = (*first.inputs, second.inputs[0], second.inputs[2])
    return OpNode(second.name, "npu.index_copy_pair", inputs, (*first.outputs, *second.outputs), first.attrs)
