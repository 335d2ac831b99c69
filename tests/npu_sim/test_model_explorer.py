"""The adapter for Google's Model Explorer, judged with Model Explorer's own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, compile, trace_stages
from npu_compiler.errors import IRError, ProgramFormatError

pytest.importorskip("model_explorer", reason="Model Explorer is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    g = IRBuilder("layers")
    x = g.input("x", 4, 16)
    for index in range(5):
        up = g("aten.linear.default", x, g.weight(f"layers.{index}.up", 16, 16))
        x = g("aten.add.Tensor", x, g("aten.mul.Tensor", up, g("aten.sigmoid.default", up)))
    ir = g.output(x).ir()
    (tmp_path / "net.json").write_text(json.dumps(ir))
    compile(ir).save(tmp_path / "net.npubin")
    return tmp_path


def converted(path: Path) -> list[Any]:
    """The graphs of the one collection, as Model Explorer's server finds the adapter and asks it."""
    from model_explorer.extension_manager import ExtensionManager
    from model_explorer.utils import convert_adapter_response

    manager = ExtensionManager(["npu_sim.model_explorer"])
    manager.load_extensions()
    (found,) = [extension for extension in manager.extensions if extension.metadata.id == "npu_simulation"]
    assert path.suffix.removeprefix(".") in found.metadata.fileExts
    command = {"cmdId": "convert", "extensionId": "npu_simulation", "modelPath": str(path), "settings": {}}
    answer = manager.run_cmd({**command, "deleteAfterConversion": False})
    json.dumps(answer)
    adapter = manager.adapter_runner.run_adapter(extension=found, cmd=command)
    (collection,) = adapter["graphCollections"]
    assert convert_adapter_response(adapter) == answer
    return list(collection.graphs)


def check_edges(graph: Any) -> None:
    """Each edge leads from an output that is there."""
    outputs = {node.id: {item.id for item in node.outputsMetadata} for node in graph.nodes}
    assert len(outputs) == len(graph.nodes), "ids are unique"
    for node in graph.nodes:
        for edge in node.incomingEdges:
            assert edge.sourceNodeOutputId in outputs[edge.sourceNodeId]


def test_ir_is_a_graph_per_stage_that_changes_it(folder: Path) -> None:
    graphs = converted(folder / "net.json")
    stages = dict(trace_stages(folder / "net.json"))
    assert [graph.id for graph in graphs][0] == "read" and len(graphs) > 1
    for graph in graphs:
        check_edges(graph)
        known = {node.id: node for node in graph.nodes}
        for node in stages[graph.id].nodes:
            assert known[node.name].label == node.base
            assert len(known[node.name].incomingEdges) == len(node.inputs)


def test_layers_have_namespaces_with_their_weights(folder: Path) -> None:
    read = converted(folder / "net.json")[0]
    spaces = [node.namespace for node in read.nodes if node.label == "weight"]
    assert spaces == [f"layers/layers.{index}" for index in range(5)]


def test_a_program_is_its_kernel_calls(folder: Path) -> None:
    (graph,) = converted(folder / "net.npubin")
    check_edges(graph)
    program = CompiledProgram.load(folder / "net.npubin")
    assert [node.label for node in graph.nodes] == [call.kernel for call in program.kernels]
    assert any(node.incomingEdges for node in graph.nodes)


def test_other_files_are_refused(folder: Path) -> None:
    from npu_sim.model_explorer.main import NPUSimulationAdapter

    for name, error in (("bad.json", IRError), ("bad.npubin", ProgramFormatError)):
        (folder / name).write_text("{}")
        with pytest.raises(error):
            NPUSimulationAdapter().convert(str(folder / name), {})
