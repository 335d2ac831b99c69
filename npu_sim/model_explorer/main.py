"""The adapter that Model Explorer imports: it shows IR after each compiler stage, or a program's kernel calls.

Model Explorer (https://github.com/google-ai-edge/model-explorer) passes `.npubin` files to this adapter, and `.json`
files to its own unless the user chooses this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_explorer import Adapter, AdapterMetadata, ModelExplorerGraphs
from model_explorer.graph_builder import (
    Graph,
    GraphCollection,
    GraphNode,
    IncomingEdge,
    KeyValue,
    MetadataItem,
)

from npu_compiler import CompiledProgram, IRGraph, read_ir, trace_stages
from npu_compiler.graph.printer import tensor_type
from npu_compiler.program.describe import family_name, format_bytes, format_flops
from npu_sim.report.facts import data_flow
from npu_sim.report.stages import repeats

PROGRAM = "npubin"
INPUTS, OUTPUTS = "Inputs", "Outputs"


class NPUSimulationAdapter(Adapter):  # type: ignore[misc]
    """Adapter of Model Explorer that opens IR (JSON) and `.npubin` files."""

    metadata = AdapterMetadata(
        id="npu_simulation",
        name="npu-simulation",
        description="IR after each compiler stage, and compiled programs",
        source_repo="",
        fileExts=[PROGRAM, "json"],
    )

    def convert(self, model_path: str, settings: Mapping[str, Any]) -> ModelExplorerGraphs:
        """Return a collection of graphs: one for each stage that changes nodes, or one of a program's kernel calls.

        Raises:
            IRError, ProgramFormatError: the file is not IR, or not a program.
        """
        path = Path(model_path)
        if path.suffix == f".{PROGRAM}":
            program = CompiledProgram.load(path)
            return {"graphCollections": [GraphCollection(label=program.name, graphs=[program_graph(program)])]}
        return {"graphCollections": [GraphCollection(label=path.stem, graphs=stage_graphs(path))]}


def stage_graphs(path: Path) -> list[Graph]:
    """Return the graph as read and after each compiler stage that changes its nodes."""
    graphs: list[Graph] = []
    before: Any = None
    for name, graph in trace_stages(read_ir(path)):
        now = [(node.name, node.op_type, node.inputs) for node in graph.nodes]
        if now != before:
            graphs.append(ir_graph(name, graph))
        before = now
    return graphs


def ir_graph(name: str, graph: IRGraph) -> Graph:
    """Convert an IR graph for Model Explorer; each repetition of a layer gets a namespace (a collapsible group)."""
    layers = _namespaces(repeats(graph))
    sources = {tensor: (f"input:{tensor}", "0") for tensor in (*graph.inputs, *graph.weights, *graph.constants)}
    sources |= {out: (node.name, str(index)) for node in graph.nodes for index, out in enumerate(node.outputs)}
    nodes = [
        GraphNode(
            id=f"input:{tensor}",
            label=tensor,
            namespace=INPUTS,
            outputsMetadata=[_output("0", tensor, tensor_type(graph.tensors[tensor]))],
        )
        for tensor in graph.inputs
    ]
    first_reader: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        for tensor in node.inputs:
            first_reader.setdefault(tensor, index)
    for tensor in (name for name in first_reader if name in graph.weights or name in graph.constants):
        recipe = str(graph.weights[tensor]) if tensor in graph.weights else "constant"
        nodes.append(
            GraphNode(
                id=f"input:{tensor}",
                label="weight" if tensor in graph.weights else "constant",
                namespace=layers.get(first_reader[tensor], ""),
                attrs=[KeyValue("made from", recipe)],
                outputsMetadata=[_output("0", tensor, tensor_type(graph.tensors[tensor]))],
            )
        )
    for index, node in enumerate(graph.nodes):
        nodes.append(
            GraphNode(
                id=node.name,
                label=node.base,
                namespace=layers.get(index, ""),
                attrs=[KeyValue(key, str(value)) for key, value in node.attrs.items() if not key.startswith("_")],
                incomingEdges=[
                    IncomingEdge(sourceNodeId=sources[x][0], sourceNodeOutputId=sources[x][1], targetNodeInputId=str(i))
                    for i, x in enumerate(node.inputs)
                ],
                outputsMetadata=[
                    _output(str(i), out, tensor_type(graph.tensors[out])) for i, out in enumerate(node.outputs)
                ],
            )
        )
    for tensor, returned in zip(graph.outputs, graph.output_names, strict=True):
        source, output = sources[tensor]
        nodes.append(
            GraphNode(
                id=f"output:{returned}",
                label=returned,
                namespace=OUTPUTS,
                incomingEdges=[IncomingEdge(sourceNodeId=source, sourceNodeOutputId=output, targetNodeInputId="0")],
            )
        )
    return Graph(id=name, nodes=nodes)


def program_graph(program: CompiledProgram) -> Graph:
    """Convert a program's kernel calls for Model Explorer; edges lead from a call to those that read its results."""
    nodes = []
    for index, (call, sources) in enumerate(zip(program.kernels, data_flow(program.plan), strict=True)):
        facts = {
            "node": call.node,
            "family": family_name(call),
            "work": format_flops(call.flops),
            "bytes": format_bytes(call.bytes_moved),
            **{f"param {name}": str(value) for name, value in call.params.items()},
        }
        nodes.append(
            GraphNode(
                id=str(index),
                label=call.kernel,
                attrs=[KeyValue(key, value) for key, value in facts.items()],
                incomingEdges=[IncomingEdge(sourceNodeId=str(source)) for source in sources],
                outputsMetadata=[
                    _output(str(i), view.buffer, f"{view.dtype}{list(view.shape)}")
                    for i, view in enumerate(call.outputs)
                ],
            )
        )
    return Graph(id=program.name, nodes=nodes)


def _namespaces(runs: Sequence[Sequence[Any]]) -> dict[int, str]:
    """Return node index → namespace of its repetition, for nodes that are part of repeated layers."""
    names = {}
    for start, period, count, labels in runs:
        for time in range(count):
            name = labels[time] if labels and labels[time] else f"{start + time * period}"
            for index in range(start + time * period, start + (time + 1) * period):
                names[index] = f"layers/{name}"
    return names


def _output(number: str, tensor: str, kind: str) -> MetadataItem:
    return MetadataItem(id=number, attrs=[KeyValue("tensor", tensor), KeyValue("tensor_shape", kind)])
