"""Ops that other ops compute: read and written as IR, refused where the IR is wrong, put back as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ir_builder import IRBuilder

from npu_compiler import IRError, IRGraph, compile, partition, read_ir
from npu_compiler.graph.composites import as_written, closed_composites
from npu_compiler.graph.writer import graph_to_dict
from npu_runtime import execute_cpu_partition


def addr(*, leaks: bool = False) -> dict[str, Any]:
    """A matrix plus an outer product, computed by an unsqueeze, a product and a sum; relu of it."""
    g = IRBuilder()
    x, a, b = g.input("x", 3, 4), g.input("a", 3), g.input("b", 4)
    with g.composite("aten.addr.default", x, a, b) as results:
        product = g("aten.mul.Tensor", g("aten.unsqueeze.default", a, 1), b)
        results.append(g("aten.add.Tensor", product, x))
    return g.output(g("aten.relu.default", results[0]), *([product] if leaks else [])).ir()


def names(graph: IRGraph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_a_composite_is_put_back_as_it_was_written() -> None:
    graph = read_ir(addr())
    (composite,) = closed_composites(graph)
    assert names(composite.parts) == ["unsqueeze", "mul", "add"]
    whole = as_written(graph, ["addr"])
    assert names(whole) == ["addr", "relu"] and composite.node.outputs == ("add",)
    rng = np.random.default_rng(0)
    inputs = {n: rng.normal(size=s).astype(np.float32) for n, s in (("x", (3, 4)), ("a", 3), ("b", 4))}
    wanted = np.maximum(inputs["x"] + np.outer(inputs["a"], inputs["b"]), 0)
    for each in (graph, whole):
        (result,) = execute_cpu_partition(each, inputs).values()
        np.testing.assert_allclose(result, wanted, rtol=1e-6)


def test_a_composite_survives_writing() -> None:
    graph = read_ir(addr())
    again = read_ir(graph_to_dict(graph))
    assert [(c.node, names(c.parts)) for c in again.composites] == [(c.node, names(c.parts)) for c in graph.composites]


def test_a_compiled_program_holds_the_parts() -> None:
    assert [call.node for call in compile(addr()).kernels] == [call.node for call in compile(graph_of_parts()).kernels]


def graph_of_parts() -> dict[str, Any]:
    return {key: value for key, value in addr().items() if key != "composites"}


def test_a_composite_whose_parts_others_read_stays_in_parts() -> None:
    assert closed_composites(read_ir(addr(leaks=True))) == ()
    plan = partition(addr(leaks=True), lambda op: "mul" not in op)
    assert {"unsqueeze", "mul", "add"} <= set(names(plan.graph))


def test_an_op_with_a_part_that_is_refused_runs_whole_in_pytorch() -> None:
    plan = partition(addr(), lambda op: "mul" not in op)
    assert [(part.device, names(part.graph)) for part in plan.partitions] == [("cpu", ["addr"]), ("npu", ["relu"])]
    assert plan.reasons == {"addr": "its part 'mul': the given support function rejects the op"}


def _parts(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda ir: ir["composites"][0].update(parts=value)


def _node(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda ir: ir["composites"][0]["node"].update(changes)


def _twice(ir: dict[str, Any]) -> None:
    ir["composites"] *= 2


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no list": (_parts("mul"), "composite 'addr': field 'parts' is not a list of nodes of the graph"),
    "no node": (_parts(["mull"]), "composite 'addr': field 'parts' is not a list of nodes of the graph"),
    "shared parts": (_twice, "composite 'addr': field 'parts' is not a list of nodes of the graph"),
    "name taken": (_node(name="relu"), "composite 'relu': a node of the graph has the same name"),
    "no outputs": (_node(outputs=[]), "composite 'addr': its outputs are not tensors that its parts make"),
    "foreign output": (_parts(["mul"]), "composite 'addr': its outputs are not tensors that its parts make"),
    "nothing": (lambda ir: ir.update(composites=[None]), "node 0: expected an object, got NoneType"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_composite_that_contradicts_its_graph_is_refused(name: str) -> None:
    change, message = WRONG[name]
    ir = copy.deepcopy(addr())
    change(ir)
    with pytest.raises(IRError) as error:
        read_ir(ir)
    assert message in str(error.value)


def test_a_composite_that_reads_its_own_parts_is_refused() -> None:
    ir = addr()
    ir["composites"][0]["node"]["inputs"][0] = ir["nodes"][2]["inputs"][0]
    with pytest.raises(IRError, match="composite 'addr': it reads what its own parts make"):
        read_ir(ir)
