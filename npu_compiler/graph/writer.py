"""Write an `IRGraph` as the IR that `read_ir` reads."""

from __future__ import annotations

from typing import Any

from npu_compiler.graph.composites import closed_composites
from npu_compiler.graph.model import IRGraph, OpNode


def graph_to_dict(graph: IRGraph) -> dict[str, Any]:
    """The IR dict of a graph whose weights are still plain checkpoint keys; the inverse of `read_ir`."""
    makers = {out: (node.name, index) for node in graph.nodes for index, out in enumerate(node.outputs)}
    makers.update({name: (name, 0) for name in graph.inputs})

    def meta(name: str) -> dict[str, Any]:
        spec = graph.tensors[name]
        data: dict[str, Any] = {"name": name, "shape": list(spec.shape), "dtype": spec.dtype}
        if spec.storage:
            data["storage"] = spec.storage
        if spec.bounds is not None:
            data["bounds"] = list(spec.bounds)
        if name in makers:
            data["producer_node"], data["producer_output_idx"] = makers[name]
        return data

    def described(node: OpNode) -> dict[str, Any]:
        return {
            "name": node.name,
            "op_type": node.op_type,
            "inputs": [meta(name) for name in node.inputs],
            "outputs": [meta(name) for name in node.outputs],
            "attrs": dict(node.attrs),
        }

    composites = [
        {"node": described(composite.node), "parts": [node.name for node in composite.parts.nodes]}
        for composite in closed_composites(graph)
    ]
    keys = {name: next(recipe.keys()) for name, recipe in graph.weights.items()}
    named = {**keys, **{name: name for name in graph.constants}}
    return {
        "model_name": graph.name,
        "native_dtype": graph.native_dtype,
        "graph_inputs": [meta(name) for name in graph.inputs],
        "graph_outputs": [meta(name) for name in graph.outputs],
        "output_names": list(graph.output_names),
        "weights": [{**meta(name), "name": key} for key, name in {key: name for name, key in named.items()}.items()],
        "weight_name_mapping": named,
        "constants": {
            name: {"data": value.tolist(), "dtype": value.dtype.name} for name, value in graph.constants.items()
        },
        "nodes": [described(node) for node in graph.nodes],
        **({"composites": composites} if composites else {}),
    }
