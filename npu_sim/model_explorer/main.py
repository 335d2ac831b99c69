"""The adapter, which Model Explorer imports: IR as the graph after each stage, a program as its kernel calls.

Model Explorer (https://github.com/google-ai-edge/model-explorer) gives `.json` files to its own adapter unless the user
chooses another one, and `.npubin` files to this one.
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
    """Opens IR JSON and `.npubin` files."""

    metadata = AdapterMetadata(
        id="npu_simulation",
        name="npu-simulation",
        description="IR after each compiler stage, and compiled programs",
        source_repo="",
        fileExts=[PROGRAM, "json"],
    )

    def convert(self, model_path: str, settings: Mapping[str, Any]) -> ModelExplorerGraphs:
        """A collection of graphs: one per stage that changes something, or one of kernel calls.

        Raises:
            IRError, ProgramFormatError: the file is no IR, or no program.
        """
        path = Path(model_path)
        if path.suffix == f".{PROGRAM}":
            program = CompiledProgram.load(path)
            return {"graphCollections": [GraphCollection(label=program.name, graphs=[program_graph(program)])]}
        return {"graphCollections": [GraphCollection(label=path.stem, graphs=stage_graphs(path))]}


def stage_graphs(path: Path) -> list[Graph]:
    """The graph as read and after each stage that changes its nodes."""
    graphs: list[Graph] = []
    before: Any = None
    for name, graph in trace_stages(read_ir(path)):
        now = [(node.name, node.op_type, node.inputs) for node in graph.nodes]
        if now != before:
            graphs.append(ir_graph(name, graph))
        before = now
    return graphs


def ir_graph(name: str, graph: IRGraph) -> Graph:
    """A graph of the compiler; nodes of a layer that repeats are in a namespace of that layer."""
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
    """The kernel calls of a program; an edge leads from a call to those that read what it wrote."""
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
    """Index of a node in a repetition → the namespace of that time."""
    names = {}
    for start, period, count, labels in runs:
        for time in range(count):
            name = labels[time] if labels and labels[time] else f"{start + time * period}"
            for index in range(start + time * period, start + (time + 1) * period):
                names[index] = f"layers/{name}"
    return names


def _output(number: str, tensor: str, kind: str) -> MetadataItem:
    return MetadataItem(id=number, attrs=[KeyValue("tensor", tensor), KeyValue("tensor_shape", kind)])
