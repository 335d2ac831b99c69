"""Rotary embedding that is written as single ops, and rotary embeddings of neighbouring heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from npu_compiler.fusions.engine import Either, Fusion, Match, P, Pattern, Rewriter, Var, add, fused, mul, sub
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.ops.aliases import slice_bounds

x = Var("x")


def _is_rotate_half(node: OpNode, graph: IRGraph) -> bool:
    return node.attrs.get("dim", 0) in (-1, len(graph.tensors[node.outputs[0]].shape) - 1) and len(node.inputs) == 2


def _half_slice(second: bool) -> Callable[[OpNode, IRGraph], bool]:
    def where(node: OpNode, graph: IRGraph) -> bool:
        shape = graph.tensors[node.inputs[0]].shape
        half = shape[-1] // 2
        start, end = node.attrs.get("start") or 0, node.attrs.get("end")
        end = shape[-1] if end is None else min(end, shape[-1])
        wanted = (half, shape[-1]) if second else (0, half)
        dim = node.attrs.get("dim", 0)
        return dim in (-1, len(shape) - 1) and (start, end) == wanted and node.attrs.get("step", 1) == 1

    return where


def _are_halves(node: OpNode, graph: IRGraph) -> bool:
    *lead, width = graph.tensors[node.inputs[0]].shape
    shapes = [graph.tensors[name].shape for name in node.outputs]
    return width % 2 == 0 and shapes == [(*lead, width // 2)] * 2


def _chooses(index: int) -> Callable[[OpNode, IRGraph], bool]:
    return lambda node, graph: node.attrs["index"] == index


def _half(index: int) -> Pattern:
    """The pattern of the first half of x's last dimension, or of the second."""
    halves = P("aten.chunk aten.split aten.split_with_sizes", (x,), where=_are_halves)
    return Either(
        P("getitem", (halves,), where=_chooses(index)), P("aten.slice", (x,), where=_half_slice(second=index == 1))
    )


def _every_second(first: int) -> Callable[[OpNode, IRGraph], bool]:
    def where(node: OpNode, graph: IRGraph) -> bool:
        shape = graph.tensors[node.inputs[0]].shape
        bounds = slice_bounds(shape[-1], node.attrs.get("start"), node.attrs.get("end"))
        is_last = node.attrs.get("dim", 0) in (-1, len(shape) - 1)
        return is_last and bounds == (first, shape[-1]) and node.attrs.get("step", 1) == 2

    return where


def _rope_patterns() -> tuple[P, ...]:
    """The patterns of rotary embedding, x · cos + turned · sin, of pairs that lie apart or side by side.

    By halves, turned is cat(−x[half:], x[:half]); of neighbours, it is reshape(stack([−x[1::2], x[0::2]], −1)).
    """
    rotated = P("aten.cat", (P("aten.neg", (_half(1),)), _half(0)), where=_is_rotate_half)
    even = P("aten.slice", (x,), where=_every_second(0))
    odd = P("aten.slice", (x,), where=_every_second(1))
    stacked = P("aten.stack", (P("aten.neg", (odd,)), even), where=_is_rotate_half)
    swapped = P("aten.view aten.reshape aten._unsafe_view aten.flatten", (stacked,))
    return tuple(add(mul(x, Var("cos")), mul(turned, Var("sin"))) for turned in (rotated, swapped))


def _rewrite_rope(match: Match, rewriter: Rewriter) -> OpNode | None:
    names = tuple(match.tensors[name] for name in ("x", "cos", "sin"))
    shapes = [rewriter.tensors[name].shape for name in names]
    if len(shapes[0]) < 2 or shapes[0] != rewriter.tensors[match.root.outputs[0]].shape:
        return None
    if any(shape[-1:] != shapes[0][-1:] for shape in shapes) or shapes[0][-1] % 2:
        return None
    of_neighbours = any(node.base == "aten.stack" for node in match.nodes.values())
    return fused("npu.rope_pairs" if of_neighbours else "npu.rope", match, names)


def _halves_pattern() -> P:
    """The pattern of cat(a · cos − b · sin, b · cos + a · sin), where a and b are the halves of x."""
    cos, sin = Var("cos"), Var("sin")
    lower = sub(mul(_half(0), cos), mul(_half(1), sin))
    upper = add(mul(_half(1), cos), mul(_half(0), sin))
    return P("aten.cat", (lower, upper), where=_is_rotate_half)


def _rewrite_halves(match: Match, rewriter: Rewriter) -> OpNode | None:
    """Replace a rotary embedding by halves by one whose angles are given twice.

    Given:   cat(a · cos − b · sin, b · cos + a · sin)   where a, b = halves of x
    Result:  rope(x, cat(cos, cos), cat(sin, sin))       (the same two in all layers)
    """
    x, *tables = (match.tensors[name] for name in ("x", "cos", "sin"))
    shape = rewriter.tensors[x].shape
    halves = [rewriter.tensors[name].shape for name in tables]
    if len(shape) < 2 or shape != rewriter.tensors[match.root.outputs[0]].shape:
        return None
    if any(half[-1:] != (shape[-1] // 2,) for half in halves):
        return None
    twice = [
        rewriter.node(f"{name}.twice", "aten.cat.default", (name, name), name, (*half[:-1], shape[-1]), dim=-1)
        for name, half in zip(tables, halves, strict=True)
    ]
    return fused("npu.rope", match, (x, *twice))


ROPE = Fusion("rope", _rope_patterns(), _rewrite_rope)
ROPE_BY_HALVES = Fusion("rope_by_halves", (_halves_pattern(),), _rewrite_halves)


@dataclass(frozen=True)
class _Heads:
    """The heads that a rotary embedding reads, as a view of shape [B, H, T, D] of columns of a product [B, T, N].

    Attributes:
        start, end: The range of columns.
        steps: The slice, the view and the transpose between the product and the rotary embedding.
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
    """Replace rotary embeddings of heads that are adjacent columns of one product by one.

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
    """The heads that a rotary embedding reads; None unless they are columns of a product and share their angles."""
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
    """Lists of at least two members whose columns in the product are adjacent, in order."""
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
        tensor_name = unique_name(f"{name}{suffix}", tensors)
        tensors[tensor_name] = replace(tensors[like], name=tensor_name, shape=shape)
        return tensor_name

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
