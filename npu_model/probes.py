"""Probes of ops: small sample nodes, of which those that fit an op show whether a chip can run it.

Probes are not written for single ops: each is tried on every row of the op table until one can be lowered, so that the
row itself decides which shapes and attributes it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from npu_compiler.errors import NPUError
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.registry import OPS, Op, unsupported_reason
from npu_compiler.partitioning.lone_nodes import LoneNodes

Shape = tuple[int, ...]
_FLOAT, _INT, _BOOL = "float32", "int64", "bool"


@dataclass(frozen=True)
class Probe:
    """Shapes, dtypes and attributes of a sample node.

    Attributes:
        inputs: Shape and dtype of each input; further inputs are like the last one.
        output: Shape and dtype of the output.
        attrs: The node's attributes.
    """

    inputs: Sequence[tuple[Shape, str]]
    output: tuple[Shape, str]
    attrs: Mapping[str, Any] = field(default_factory=dict)


def _same(shape: Shape, dtype: str = _FLOAT, result: str = "", **attrs: Any) -> Probe:
    return Probe([(shape, dtype)], (shape, result or dtype), attrs)


def _probes() -> Iterator[Probe]:
    square, row = (8, 8), (8,)
    for dtype in (_FLOAT, _INT, _BOOL):
        yield _same(square, dtype)
        yield _same(square, dtype, other=2)
    yield from (_same(square, _FLOAT, _BOOL), _same(square, _FLOAT, _BOOL, other=1.0))
    yield from (_same(square, _FLOAT, value=1.0), _same(square, _FLOAT, exponent=2.0), _same(square, _FLOAT, dim=-1))
    yield Probe([(square, _BOOL), (square, _FLOAT)], (square, _FLOAT))
    yield Probe([(square, _FLOAT), (square, _BOOL)], (square, _FLOAT), {"value": 0.0})
    for kept in (row, (1, 8)):
        yield Probe([(square, _FLOAT)], (kept, _FLOAT), {"dim": [0], "keepdim": len(kept) == 2})
        yield Probe([(square, _FLOAT)], (kept, _INT), {"dim": 0, "keepdim": len(kept) == 2})
        yield Probe([(square, _BOOL)], (kept, _BOOL), {"dim": 0, "keepdim": len(kept) == 2})
    yield Probe([(square, _FLOAT)], ((), _FLOAT))
    yield _same(square, _FLOAT, normalized_shape=[8], eps=1e-5)
    yield Probe([((2, 8, 4, 4), _FLOAT), (row, _FLOAT)], ((2, 8, 4, 4), _FLOAT), {"num_groups": 2, "eps": 1e-5})
    yield Probe([((2, 8, 4, 4), _FLOAT), (row, _FLOAT)], ((2, 8, 4, 4), _FLOAT), {"training": False, "eps": 1e-5})
    for rank in (1, 2, 3):
        image, smaller, half = ((1, 8, *[size] * rank) for size in (8, 6, 4))
        window = (8, 8, *[3] * rank)
        yield Probe([(image, _FLOAT), (window, _FLOAT)], (smaller, _FLOAT))
        yield Probe([(smaller, _FLOAT), (window, _FLOAT)], (image, _FLOAT))
        sizes = {"stride": [1] * rank, "padding": [0] * rank, "dilation": [1] * rank}
        for is_transposed, source, result in ((False, image, smaller), (True, smaller, image)):
            rest = {"transposed": is_transposed, "output_padding": [0] * rank, "groups": 1}
            yield Probe([(source, _FLOAT), (window, _FLOAT)], (result, _FLOAT), {**sizes, **rest})
        yield Probe([(image, _FLOAT)], (half, _FLOAT), {"kernel_size": [2] * rank, "stride": [2] * rank})
        yield Probe([(image, _FLOAT)], (half, _FLOAT), {"output_size": [4] * rank})
        yield Probe([(half, _FLOAT)], (image, _FLOAT), {"output_size": [8] * rank, "align_corners": False})
        yield Probe([(smaller, _FLOAT)], (image, _FLOAT), {"padding": [1] * (2 * rank)})
        yield Probe([(smaller, _FLOAT)], (image, _FLOAT), {"pad": [1] * (2 * rank), "value": 0.0})
    yield _same((2, 8, 8))
    yield _same((1, 2, 8, 8))
    yield Probe([(square, _FLOAT), (row, _FLOAT)], (row, _FLOAT))
    yield Probe([(row, _FLOAT)], ((), _FLOAT))
    yield Probe([(row, _FLOAT)], (square, _FLOAT))
    yield Probe([(square, _FLOAT), ((3,), _INT)], ((3, 8), _FLOAT))
    yield Probe([(square, _FLOAT), ((3,), _INT)], ((3, 8), _FLOAT), {"dim": 0})
    yield Probe([(square, _FLOAT), (square, _INT)], (square, _FLOAT), {"dim": 0})
    for value in ({"value": 1.0}, {}):
        yield Probe([(square, _FLOAT), (square, _INT), (square, _FLOAT)], (square, _FLOAT), {"dim": 0, **value})
        yield Probe([(square, _FLOAT), ((3,), _INT), ((3, 8), _FLOAT)], (square, _FLOAT), {"dim": 0, **value})
    attributes: list[dict[str, Any]] = [
        {"dims": [0]},
        {"k": 8},
        {"shifts": [1], "dims": [0]},
        {"diagonal": 0},
        {"min": 0.0, "max": 1.0},
    ]
    for attrs in attributes:
        yield Probe([(square, _FLOAT)], (square, _FLOAT), attrs)
    yield Probe([], (square, _FLOAT), {"size": [8, 8], "fill_value": 1.0})
    yield Probe([], (row, _FLOAT), {"start": 0, "end": 8, "step": 1, "steps": 8})
    yield Probe([(square, _FLOAT)], ((16, 8), _FLOAT), {"dim": 0})
    yield Probe([(square, _FLOAT)], ((16, 8), _FLOAT), {"repeats": [2, 1]})


_PROBES = tuple(_probes())


def probe(name: str, lone: LoneNodes) -> tuple[OpNode, IRGraph] | None:
    """A sample node of an op, and its graph, that the compiler can lower by itself; None if no probe fits the op."""
    op = OPS[name]
    op_type = name if name.count(".") > 1 else f"{name}.default"
    for each in _PROBES:
        for count in _counts(op, each):
            node, graph = _graph(op, op_type, each, count)
            try:
                if unsupported_reason(node, graph) is None:
                    plan = lone.plan(node, graph, _FLOAT)
                    if plan is not None and plan.calls:
                        return node, graph
            except (NPUError, ArithmeticError, LookupError, TypeError, ValueError, AssertionError):
                continue  # this shape is none that the row takes
    return None


def _counts(op: Op, each: Probe) -> Iterable[int]:
    """Numbers of inputs to try: those of the op's declaration and of the probe, the more specific one first."""
    own, given = len(op.tensors), len(each.inputs)
    return dict.fromkeys((own, given) if given == 1 else (given, own) if given else (0,))


def _graph(op: Op, op_type: str, each: Probe, count: int) -> tuple[OpNode, IRGraph]:
    names = [f"x{index}" for index in range(count)]
    given = [each.inputs[min(index, len(each.inputs) - 1)] for index in range(count)]
    tensors = {name: TensorSpec(name, shape, dtype) for name, (shape, dtype) in zip(names, given, strict=True)}
    tensors["y"] = TensorSpec("y", *each.output)
    node = OpNode(op.name.replace(".", "_"), op_type, tuple(names), ("y",), dict(each.attrs))
    return node, IRGraph("probe", [node], tensors, names, ["y"], ["y"], {}, {}, _FLOAT)


__all__ = ["probe"]
