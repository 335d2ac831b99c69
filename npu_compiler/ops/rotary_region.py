"""Expands the rotary embedding that `torch.export` leaves as one opaque node (a region) when gradients are enabled.

    Given:   cos, sin = wrap_with_set_grad_enabled(position_ids, inv_freq)
    Result:  angle = position_ids[..., None] * inv_freq;  emb = cat(angle, angle)
             cos = cos(emb);  sin = sin(emb)

Extraction under `torch.no_grad()` keeps the region's own nodes, which is exact for every model; this stage covers the
plain rotary embedding only, and leaves any other region alone (a `ConstraintError` then says what to do).
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from npu_compiler.graph.dtypes import is_float, is_int
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name

OPAQUE_OP = "wrap_with_set_grad_enabled"


def expand_rotary_regions(graph: IRGraph) -> IRGraph:
    """Replace each opaque region that has the signature of a rotary embedding by a standard one, with a warning.

    The standard one has no attention scaling. Other regions stay as they are.
    """
    if not any(node.op_type == OPAQUE_OP for node in graph.nodes):
        return graph
    tensors = dict(graph.tensors)
    nodes: list[OpNode] = []
    if any(node.op_type == OPAQUE_OP and is_rotary_region(node, graph) for node in graph.nodes):
        warnings.warn(
            "the IR holds an opaque region with the signature of a rotary embedding; it is compiled as a standard one, "
            "without attention scaling. Extract under torch.no_grad() to keep the region's own ops.",
            stacklevel=2,
        )
    for node in graph.nodes:
        if node.op_type == OPAQUE_OP and is_rotary_region(node, graph):
            nodes.extend(_rotary_nodes(node, tensors, _is_interleaved(node, graph)))
        else:
            nodes.append(node)
    return replace(graph, nodes=nodes, tensors=tensors)


def is_rotary_region(node: OpNode, graph: IRGraph) -> bool:
    """Whether a node takes [B, T] integer positions and [D/2] frequencies, and returns two [B, T, D] float tensors."""
    if len(node.inputs) != 2 or len(node.outputs) != 2:
        return False
    positions, frequencies = (graph.tensors[name] for name in node.inputs)
    cos, sin = (graph.tensors[name] for name in node.outputs)
    return (
        is_int(positions.dtype)
        and is_float(frequencies.dtype)
        and len(frequencies.shape) == 1
        and cos.shape == sin.shape == (*positions.shape, 2 * frequencies.shape[0])
    )


def _is_interleaved(node: OpNode, graph: IRGraph) -> bool:
    """Whether the region repeats each angle twice in a row, for a model that rotates even and odd elements.

    The sign is that elements are sliced with a step of 2 and cos is used whole. (GLM and DeepSeek rotate even and odd
    elements too, but first take half of a concatenated cos.)
    """
    width = graph.tensors[node.outputs[0]].shape[-1]
    rotates_pairs = any(
        other.base == "aten.slice"
        and other.attrs.get("step", 1) == 2
        and graph.tensors[other.inputs[0]].shape[-1] == width
        for other in graph.nodes
    )
    return rotates_pairs and not _is_sliced(node.outputs[0], graph)


def _is_sliced(name: str, graph: IRGraph) -> bool:
    """Whether any node slices a tensor, directly or after it was cast, expanded, or given or rid of dimensions of 1."""
    passing = {"getitem", "aten.unsqueeze", "aten.to", "aten.squeeze", "aten.expand"}
    for node in graph.consumers().get(name, []):
        if node.base == "aten.slice":
            return True
        if node.base in passing and any(_is_sliced(out, graph) for out in node.outputs):
            return True
    return False


def _rotary_nodes(node: OpNode, tensors: dict[str, TensorSpec], interleaved: bool) -> list[OpNode]:
    positions, frequencies = node.inputs
    shape, half = tensors[node.outputs[0]].shape, tensors[frequencies].shape[0]
    nodes: list[OpNode] = []

    def add(stem: str, op_type: str, inputs: tuple[str, ...], out: tuple[int, ...], **attrs: object) -> str:
        name = unique_name(f"{node.name}.{stem}", tensors)
        tensors[name] = TensorSpec(name, out, "float32" if stem != "position" else tensors[positions].dtype)
        nodes.append(OpNode(name, op_type, inputs, (name,), attrs))
        return name

    column = add("position", "aten.unsqueeze.default", (positions,), (*shape[:-1], 1), dim=-1)
    as_float = add("position_float", "aten.to.dtype", (column,), (*shape[:-1], 1), dtype="float32")
    angle = add("angle", "aten.mul.Tensor", (as_float, frequencies), (*shape[:-1], half))
    if interleaved:
        full = add("angles", "aten.repeat_interleave.self_int", (angle,), shape, repeats=2, dim=-1)
    else:
        full = add("angles", "aten.cat.default", (angle, angle), shape, dim=-1, _tensor_list_sizes=[2])
    for out, function in zip(node.outputs, ("cos", "sin"), strict=True):
        value = add(function, f"aten.{function}.default", (full,), shape)
        nodes.append(
            OpNode(f"{node.name}.{function}_out", "aten.to.dtype", (value,), (out,), {"dtype": tensors[out].dtype})
        )
    return nodes
