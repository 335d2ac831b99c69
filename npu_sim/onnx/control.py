"""Control flow decided while reading: the taken branch of `If`, and unrolled iterations of `Loop` and `Scan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch

from npu_sim.onnx.rows import Call, Refusal, Row, node_title
from npu_sim.onnx.steps import Attributes, Env, Reader, Slot

MOST_ROUNDS = 1024
_SELECT = Row(lambda call, x: torch.select(x, call.attr("axis"), call.attr("index")))
_STACK = Row(lambda call, *parts: torch.stack(parts, call.attr("axis", 0)))


def _if(
    importer: Reader, node: ir.Node, inputs: list[Slot | None], env: Env, opsets: Mapping[str, int], attrs: Attributes
) -> list[Slot]:
    condition = _given(inputs, 0)
    goes = bool(importer.constant(condition, "condition", title_of(node)).reshape(-1)[0])
    return _run(importer, _graph(node, "then_branch" if goes else "else_branch"), [], env, opsets, attrs)


def _loop(
    importer: Reader, node: ir.Node, inputs: list[Slot | None], env: Env, opsets: Mapping[str, int], attrs: Attributes
) -> list[Slot]:
    where, body = title_of(node), _graph(node, "body")
    trips = inputs[0] if inputs else None
    most = None if trips is None else int(importer.constant(trips, "number of rounds", where).reshape(-1)[0])
    goes = inputs[1] if len(inputs) > 1 else None
    carried = [_given(inputs, index) for index in range(2, len(inputs))]
    rows: list[list[Slot]] = [[] for _ in range(len(body.outputs) - 1 - len(carried))]
    count = 0
    while (most is None or count < most) and (
        goes is None or bool(importer.constant(goes, "condition", where).reshape(-1)[0])
    ):
        if count == MOST_ROUNDS:
            raise Refusal(f"has more than {MOST_ROUNDS} rounds")
        round_number = importer.slot(torch.tensor(count, dtype=torch.int64), True)
        still = goes or importer.slot(torch.tensor(True), True)
        goes, *results = _run(importer, body, [round_number, still, *carried], env, opsets, attrs)
        carried = results[: len(carried)]
        for row, result in zip(rows, results[len(carried) :], strict=True):
            row.append(result)
        count += 1
    if rows and not count:
        raise Refusal("has results of no rounds, whose shape is not known")
    return [*carried, *(_stacked(importer, row, 0, where) for row in rows)]


def _scan(
    importer: Reader, node: ir.Node, inputs: list[Slot | None], env: Env, opsets: Mapping[str, int], attrs: Attributes
) -> list[Slot]:
    where, body = title_of(node), _graph(node, "body")
    facts = importer.attributes(node, attrs, where)
    scanned = int(facts["num_scan_inputs"])
    states = [_given(inputs, index) for index in range(len(inputs) - scanned)]
    series = [_given(inputs, index) for index in range(len(inputs) - scanned, len(inputs))]
    axes = facts.get("scan_input_axes", [0] * scanned)
    backwards = facts.get("scan_input_directions", [0] * scanned)
    length = series[0].fake.shape[axes[0]]
    if not 0 < length <= MOST_ROUNDS:
        raise Refusal(f"has {length} rounds; known are 1 to {MOST_ROUNDS}")
    rows: list[list[Slot]] = [[] for _ in range(len(body.outputs) - len(states))]
    for step in range(length):
        parts: list[Slot] = []
        for slot, axis, back in zip(series, axes, backwards, strict=True):
            call = Call("Scan", 0, {"axis": axis, "index": length - 1 - step if back else step})
            parts += importer.apply(_SELECT, call, [slot], where) or []
        results = _run(importer, body, [*states, *parts], env, opsets, attrs)
        states = results[: len(states)]
        for row, result in zip(rows, results[len(states) :], strict=True):
            row.append(result)
    ends = facts.get("scan_output_axes", [0] * len(rows))
    turned = facts.get("scan_output_directions", [0] * len(rows))
    stacked = [
        _stacked(importer, row[::-1] if back else row, axis, where)
        for row, axis, back in zip(rows, ends, turned, strict=True)
    ]
    return [*states, *stacked]


def _stacked(importer: Reader, parts: list[Slot], axis: int, where: str) -> Slot:
    made = importer.apply(_STACK, Call("Stack", 0, {"axis": axis}), parts, where)
    assert made is not None
    return made[0]


def _run(
    importer: Reader, body: ir.Graph, inputs: list[Slot], env: Env, opsets: Mapping[str, int], attrs: Attributes
) -> list[Slot]:
    """Compute the outputs of a subgraph, which can also read the values of the graph around it."""
    inner = dict(env)
    if len(body.inputs) != len(inputs):
        raise Refusal(f"has a body of {len(body.inputs)} inputs, which gets {len(inputs)}")
    inner.update(zip(body.inputs, inputs, strict=True))
    for name, value in body.initializers.items():
        assert value.const_value is not None
        inner[value] = importer.slot(importer.tensor(value.const_value, f"initializer '{name}'"), True)
    importer.run_nodes(body, inner, opsets, attrs)
    return [importer.read(value, inner, f"output '{value.name}' of a subgraph") for value in body.outputs]


def _graph(node: ir.Node, name: str) -> ir.Graph:
    attr = node.attributes.get(name)
    if attr is None or attr.type != ir.AttributeType.GRAPH:
        raise Refusal(f"has no graph '{name}'")
    return attr.as_graph()


def _given(inputs: list[Slot | None], index: int) -> Slot:
    slot = inputs[index] if index < len(inputs) else None
    if slot is None:
        raise Refusal(f"leaves out input {index}")
    return slot


def title_of(node: ir.Node) -> str:
    """Return the description of a node for error messages."""
    return node_title(node.name or (str(node.outputs[0].name) if node.outputs else ""), node.op_type)


CONTROL_FLOW: dict[str, Callable[..., Any]] = {"If": _if, "Loop": _loop, "Scan": _scan}
