"""Ops that decompose into many: what they cost in parts and as they were written decides how they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npu_compiler import CompiledProgram, partition, read_ir
from npu_compiler.graph.composites import closed_composites
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.partitioning.prices import Estimate, Link, Prices
from npu_compiler.program.target import OpLevelTarget
from npu_runtime import CPUBackend, DAGExecutor
from npu_sim.module.trace import export, ir_of_exported, trace

ROWS, NUMBERS = torch.randn(5, 64), torch.tensor([3, 0, 3, 1, 2, 3])
IMAGE = torch.randn(2, 3, 6, 8)
# Op → a function of one tensor or more, and its arguments.
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "aten.cummax": (lambda x: torch.cummax(x, -1), (ROWS,)),
    "aten.cummin": (lambda x: torch.cummin(x, 1)[0], (ROWS,)),
    "aten.cumprod": (lambda x: x.cumprod(-1), (ROWS,)),
    "aten.logcumsumexp": (lambda x: x.logcumsumexp(0), (ROWS,)),
    "aten.kthvalue": (lambda x: torch.kthvalue(x, 2), (ROWS,)),
    "aten.mode": (lambda x: torch.mode(x.round())[0], (ROWS,)),
    "aten.grid_sampler": (
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        (IMAGE, torch.randn(2, 4, 4, 2)),
    ),
    "aten._cdist_forward": (lambda x: torch.ops.aten._cdist_forward(x, x, 1.0, None), (ROWS,)),
    "aten.frexp": (torch.frexp, (ROWS,)),
    "aten.take": (lambda x, n: x.take(n), (ROWS, NUMBERS)),
    "aten.addr": (torch.addr, (torch.randn(3, 4), torch.randn(3), torch.randn(4))),
    "aten.hypot": (torch.hypot, (ROWS, ROWS + 1)),
}


class Net(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


class Counted(Prices):
    """A microsecond for each kernel call of the device, and some for each op of the host; nothing besides."""

    device = "counting"
    link = Link(1e30, 0.0, 0.0)

    def __init__(self, of_host: float) -> None:
        self._of_host = of_host

    def calls(self, program: CompiledProgram) -> Sequence[float]:
        return [1e-6] * len(program.kernels)

    def if_supported(self, node: OpNode, graph: IRGraph, compute_dtype: str) -> Estimate:
        return Estimate(self._of_host, True)

    def host(self, node: OpNode, graph: IRGraph) -> float:
        return self._of_host


def graph_of(op: str) -> tuple[IRGraph, list[torch.Tensor], dict[str, torch.Tensor]]:
    """The graph of an op, what PyTorch says that it gives, and its inputs by name."""
    function, args = CASES[op]
    graph = read_ir(ir_of_exported(export(Net(function).eval(), args)))
    expected = torch.utils._pytree.tree_leaves(function(*args))
    return graph, expected, dict(zip(graph.inputs, args, strict=True))


@pytest.mark.parametrize("op", CASES)
def test_an_op_is_in_parts_only_where_these_cost_less(op: str) -> None:
    """A host whose op takes as long as fewer calls than the device needs runs the op as it was written."""
    graph, expected, inputs = graph_of(op)
    assert op in {composite.node.base for composite in closed_composites(graph)}
    in_parts = partition(graph, compute_dtype="float32")
    assert in_parts.reasons == {}
    calls = sum(len(program.kernels) for program in in_parts.programs(OpLevelTarget()))
    for limit in (0.5, 1.5 * calls):
        plan = partition(graph, target=OpLevelTarget(), compute_dtype="float32", prices=Counted(1e-6 * limit))
        assert plan.price is not None
        assert (op in {node.base for node in plan.graph.nodes}) == (limit < calls)
        assert plan.price.seconds <= min(1e-6 * calls, plan.price.host_alone) + 1e-15
        assert plan.price.seconds == pytest.approx(1e-15 * plan.price.problem.price(plan.price.on_device))
        executor = DAGExecutor(plan, CPUBackend(tune=False))
        results = executor.execute({name: value.numpy() for name, value in inputs.items()})
        for result, wanted in zip(results.values(), expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(result), wanted, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_a_running_maximum_is_of_hundreds_of_calls() -> None:
    """Eight layers of `Linear` and `cummax` on a device that takes as long for a call as the host for an op."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.cummax(layer(x), -1)[0]
            return x

    graph = read_ir(ir_of_exported(export(Model().eval(), (ROWS,))))
    in_parts = partition(graph, compute_dtype="float32")
    assert sum(len(program.kernels) for program in in_parts.programs(OpLevelTarget())) > 200
    plan = partition(graph, target=OpLevelTarget(), compute_dtype="float32", prices=Counted(1e-6))
    assert plan.price is not None and plan.price.seconds == pytest.approx(16e-6)
    assert [node.base for node in plan.graph.nodes].count("aten.cummax") == 8
    assert sum(len(program.kernels) for program in plan.programs(OpLevelTarget())) <= 8


def test_a_composite_within_another_is_a_part_of_it() -> None:
    """`logcumsumexp` is computed by `logaddexp`, which is itself computed by other ops."""
    graph, _, _ = graph_of("aten.logcumsumexp")
    assert [composite.node.base for composite in closed_composites(graph)] == ["aten.logcumsumexp"]


@pytest.mark.parametrize("function", [lambda x: x.hypot_(x * 2) + 1, lambda x: torch.atleast_3d(x).mul_(2)])
def test_a_call_that_writes_in_place_has_no_whole_form(function: Callable[..., Any]) -> None:
    graph = read_ir(trace(export(Net(function).eval(), (ROWS,)), "net").ir)
    assert all("_." not in composite.node.op_type for composite in graph.composites)
    assert all("atleast" not in composite.node.op_type for composite in graph.composites)
