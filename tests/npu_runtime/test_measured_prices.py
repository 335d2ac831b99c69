"""Prices of a real device: what it and PyTorch take for the nodes of a graph, measured on zeros."""

from __future__ import annotations

import numpy as np
import pytest
from exact_divisions import cheapest_of_all
from ir_builder import IRBuilder

from npu_compiler import IRGraph, partition, read_ir
from npu_runtime import CPUBackend, DAGExecutor, execute_cpu_partition
from npu_runtime.measured_prices import MeasuredPrices

STATE = {name: np.eye(32, dtype=np.float32) for name in ("a", "b")}


def graph() -> IRGraph:
    """Two equal layers with an op between that the device lacks, and a table of rows."""
    g = IRBuilder()
    x = g("aten.linear.default", g.input("x", 32, 32), g.weight("a", 32, 32))
    x = g.getitem(g("aten.cummax.default", x, -1), 0)
    x = g("aten.linear.default", x, g.weight("b", 32, 32))
    return read_ir(g.output(g("aten.index_select.default", x, 0, g.input("rows", 8, dtype="int64"))).ir())


@pytest.fixture(scope="module")
def prices() -> MeasuredPrices:
    return MeasuredPrices(CPUBackend(tune=False), STATE)


def test_a_plan_has_the_least_of_the_measured_prices(prices: MeasuredPrices) -> None:
    plan = partition(graph(), target=CPUBackend(tune=False).target, compute_dtype="float32", prices=prices)
    price = plan.price
    assert price is not None and 0 < price.seconds <= price.host_alone
    least = 1e-15 * cheapest_of_all(price.problem)
    assert price.seconds == pytest.approx(least) or price.seconds == price.host_alone
    executor = DAGExecutor(plan, CPUBackend(tune=False))
    executor.load_weights(STATE)
    inputs = {"x": np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32), "rows": np.arange(8)}
    wanted = execute_cpu_partition(plan.graph, inputs, STATE)
    for name, value in wanted.items():
        np.testing.assert_allclose(executor.execute(inputs)[name], value, atol=1e-5)


def test_nodes_that_are_alike_are_measured_once(prices: MeasuredPrices, monkeypatch: pytest.MonkeyPatch) -> None:
    own = graph()
    first, second = (node for node in own.nodes if node.base == "aten.linear")
    seconds = prices.host(first, own)
    monkeypatch.setattr(prices, "_measured_node", lambda node, graph: pytest.fail("measured again"))
    assert prices.host(second, own) == seconds > 0
    assert prices.host(next(node for node in own.nodes if node.base == "getitem"), own) == 0


def test_calls_of_a_program_add_up_to_its_run(prices: MeasuredPrices) -> None:
    (part,) = partition(graph(), lambda op: "cummax" not in op, compute_dtype="float32").partitions[:1]
    program = partition(part.graph, compute_dtype="float32").programs(CPUBackend(tune=False).target)[0]
    times = prices.calls(program)
    assert len(times) == len(program.kernels) and all(seconds >= 0 for seconds in times)
    assert prices.link.seconds(10**6) > prices.link.seconds(0) > 0
