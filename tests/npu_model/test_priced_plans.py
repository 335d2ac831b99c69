"""Plans of a chip and its host: the least price there is, right answers, and one timeline that adds up."""

from __future__ import annotations

import json
import random
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact_divisions import cheapest_of_all
from ir_builder import IRBuilder, Tensor

from npu_compiler import InputError, PartitionPlan, partition, read_ir
from npu_model import Chip, NPUBackend, NPUTarget, load_chip, parse_chip, simulate, simulate_plan
from npu_model.analysis.plan import find_gains, what_if
from npu_runtime import DAGExecutor, Profiler, execute_cpu_partition

EDGE = (files("npu_model.chip") / "chips" / "edge.toml").read_text("utf-8").partition("# Assumed")[0]
UNARY = ("relu", "gelu", "tanh", "erfinv", "exp", "sinh", "neg")


def chip(ops: str = "", *, gflops: float = 4, overhead: float = 1, link: float = 4, launch: float = 2) -> Chip:
    """The chip `edge` with these ops, host and link."""
    return parse_chip(
        f"{EDGE}\n[ops]\n{ops}\n[host]\ngflops = {gflops}\nbandwidth_gb_s = 4\noverhead_us = {overhead}\n"
        f"[link]\nbandwidth_gb_s = {link}\nlatency_us = {overhead / 4}\nlaunch_us = {launch}",
        "test",
    )


def running_product(g: IRBuilder, x: Tensor, size: int) -> Tensor:
    """`cumprod` along the last axis, computed by other ops."""
    with g.composite("aten.cumprod.default", x, -1) as results:
        step = 1
        while step < size:
            left, right = g("aten.slice.Tensor", x, -1, 0, size - step), g("aten.slice.Tensor", x, -1, step, size)
            first = g("aten.slice.Tensor", x, -1, 0, step)
            x = g("aten.cat.default", [first, g("aten.mul.Tensor", left, right)], -1)
            step *= 2
        results.append(x)
    return x


def drawn(seed: int) -> tuple[dict[str, Any], Chip]:
    """A random graph, some of its ops computed by others, and a chip that lacks some of its ops."""
    draw = random.Random(seed)
    g = IRBuilder()
    values = [g.input("x", 64, 64), g.input("y", 64, 64)]
    for index in range(draw.randint(2, 7)):
        kind, source = draw.random(), draw.choice(values[-3:])
        if kind < 0.35:
            made = g("aten.linear.default", source, g.weight(f"w{index}", 64, 64))
        elif kind < 0.55:
            made = g("aten.add.Tensor", source, draw.choice(values))
        elif kind < 0.65:
            made = g("aten.softmax.int", source, -1)
        elif kind < 0.71:
            made = running_product(g, source, 64)
        elif kind < 0.77:
            made = g.getitem(g("aten.topk.default", source, 64), 0)
        else:
            made = g(f"aten.{draw.choice(UNARY)}.default", source)
        values.append(made)
    ir = g.output(values[-1], *draw.sample(values[2:], draw.randint(0, 1))).ir()
    lacking = draw.sample([*UNARY, "softmax", "linear", "add", "mul"], draw.randint(0, 4))
    own = chip(
        f"without = {json.dumps(lacking)}",
        gflops=draw.choice((2, 20)),
        overhead=draw.choice((0, 1, 10)),
        link=draw.choice((0.5, 4, 40)),
        launch=draw.choice((0, 2, 10)),
    )
    return ir, own


def check_price(seed: int) -> None:
    ir, own = drawn(seed)
    plan = partition(ir, npu=own)
    price, problem = plan.price, plan.price.problem if plan.price else None
    assert price is not None and problem is not None
    ticks = 1e-15 * problem.price(price.on_device)
    assert price.seconds == pytest.approx(ticks, rel=1e-6, abs=1e-12)
    least = 1e-15 * cheapest_of_all(problem)
    run = simulate_plan(plan, own)
    check_composites(plan)
    if price.on_device.count(True) or ticks == pytest.approx(least, rel=1e-9):
        assert ticks == pytest.approx(least, rel=1e-9)
    else:  # calls overlap otherwise in the plan's own programs, so that these took longer than the host
        assert price.seconds == price.host_alone
    assert run.seconds <= price.host_alone * (1 + 1e-9) + 1e-12
    assert run.transfers == pytest.approx(price.transfers, abs=1e-12)
    assert run.launches == pytest.approx(price.launches, abs=1e-12)
    assert run.host == pytest.approx(price.host, abs=1e-12)


def check_composites(plan: PartitionPlan) -> None:
    """Each is on the device in parts, or on the host as it was written."""
    assert plan.source is not None
    names = {node.name for node in plan.graph.nodes}
    for composite in plan.source.composites:
        parts = {node.name for node in composite.parts.nodes} & names
        assert parts <= plan.on_device
        assert not (parts and composite.node.name in names)
        assert composite.node.name not in plan.on_device


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_costs_less(seed: int) -> None:
    check_price(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30, 200))
def test_no_plan_of_many_graphs_costs_less(seed: int) -> None:
    check_price(seed)


@pytest.mark.parametrize("seed", range(200, 206))
def test_a_plan_computes_what_pytorch_computes(seed: int) -> None:
    ir, own = drawn(seed)
    plan = partition(ir, npu=own, compute_dtype="float32")
    backend = NPUBackend(own)
    rng = np.random.default_rng(seed)
    inputs = {name: rng.uniform(-0.5, 0.5, (64, 64)).astype(np.float32) for name in ("x", "y")}
    keys = [key for recipe in read_ir(ir).weights.values() for key in recipe.keys()]
    state = {key: rng.normal(0, 0.1, (64, 64)).astype(np.float32) for key in keys}
    executor = DAGExecutor(plan, backend)
    executor.load_weights(state)
    results = executor.execute(inputs)
    wanted = execute_cpu_partition(read_ir(ir), inputs, state)
    for name, value in wanted.items():
        np.testing.assert_allclose(results[name], value, rtol=1e-3, atol=1e-3)
    assert backend.simulated_seconds == pytest.approx(simulate_plan(plan, own).seconds)


def model() -> dict[str, Any]:
    """Two large layers with an op between that the chip may lack."""
    g = IRBuilder()
    x = g("aten.linear.default", g.input("x", 256, 256), g.weight("a", 256, 256))
    x = g("aten.linear.default", g("aten.gelu.default", x), g.weight("b", 256, 256))
    return g.output(g("aten.tanh.default", x)).ir()


def test_a_plan_says_where_each_node_runs_and_why() -> None:
    plan = partition(model(), npu=chip('without = ["gelu"]'))
    assert [part.device for part in plan.partitions] == ["npu", "cpu", "npu"]
    assert plan.price is not None
    units = {unit.nodes: unit for unit in plan.price.units}
    gelu = units["gelu",]
    assert (gelu.on_device, gelu.device) == (False, None)
    assert gelu.reason == plan.reasons["gelu"] == "chip 'edge' lacks gelu ([ops] without)"
    assert gelu.if_supported is not None and 0 < gelu.if_supported.seconds < gelu.host
    assert all(unit.on_device and not unit.reason for nodes, unit in units.items() if nodes != ("gelu",))
    assert (plan.price.runs, plan.price.launches) == (2, pytest.approx(4e-6))


def test_an_island_that_does_not_pay_is_on_the_host_and_says_what_it_costs() -> None:
    plan = partition(model(), npu=chip('without = ["gelu", "linear"]', overhead=0, link=0.5, launch=50))
    assert [part.device for part in plan.partitions] == ["cpu"]
    reason = plan.reasons["tanh"]
    assert (
        reason.startswith("it does not pay: ") and " on the host, " in reason and "for transfers and launch" in reason
    )


def test_nodes_that_become_one_kernel_are_priced_together() -> None:
    price = partition(model(), npu=chip()).price
    assert price is not None
    assert any(set(unit.nodes) == {"linear", "gelu"} and unit.name == "aten.linear + aten.gelu" for unit in price.units)


def test_all_on_the_device_costs_what_simulate_says() -> None:
    own = chip(launch=0)
    plan = partition(model(), npu=own)
    assert plan.price is not None and [part.device for part in plan.partitions] == ["npu"]
    (program,) = plan.programs(NPUTarget(own))
    assert plan.price.device == pytest.approx(simulate(program, own).seconds)


def test_what_an_op_would_gain_is_the_difference_of_two_plans() -> None:
    lacking = chip('without = ["gelu"]')
    plan, whole = partition(model(), npu=lacking), partition(model(), npu=chip())
    assert plan.price is not None and whole.price is not None
    (gain,) = find_gains(plan, lacking)
    assert (gain.op, gain.count, gain.is_assumed) == ("aten.gelu", 1, False)
    assert gain.seconds == pytest.approx(plan.price.seconds - whole.price.seconds)
    assert what_if(plan, lacking, ["aten.gelu"]).seconds == pytest.approx(whole.price.seconds)


def test_an_op_without_a_kernel_is_assumed_to_take_as_long_as_its_bytes() -> None:
    g = IRBuilder()
    x = g("aten.linear.default", g.input("x", 256, 256), g.weight("a", 256, 256))
    x = g.getitem(g("aten.cummax.default", x, -1), 0)
    ir = g.output(g("aten.linear.default", x, g.weight("b", 256, 256))).ir()
    own = chip()
    plan = partition(ir, npu=own)
    (gain,) = find_gains(plan, own)
    assert (gain.op, gain.is_assumed) == ("aten.cummax", True) and gain.seconds > 0
    assert plan.price is not None
    unit = next(unit for unit in plan.price.units if "aten.cummax" in unit.ops)
    assert unit.if_supported is not None
    moved = (2 * 2 + 4) * 256 * 256  # x and the values in 16 bits, and the indices in 32
    assert unit.if_supported.seconds >= moved / (1e9 * own.dram.bandwidth_gb_s)


@pytest.mark.parametrize("launch, gflops, is_whole", [(0, 0.5, False), (2, 40, True)])
def test_an_op_of_many_parts_is_where_it_takes_less_time(launch: float, gflops: float, is_whole: bool) -> None:
    """An op without a kernel is computed by others on the chip or as a whole on the host, whichever is faster."""
    g = IRBuilder()
    y = running_product(g, g("aten.relu.default", g.input("x", 64, 64)), 64)
    ir = g.output(g("aten.tanh.default", y)).ir()
    plan = partition(ir, npu=chip(gflops=gflops, overhead=0, link=40, launch=launch))
    check_composites(plan)
    assert plan.price is not None
    unit = next(unit for unit in plan.price.units if "aten.cumprod" in unit.ops)
    assert unit.on_device != is_whole and unit.device is not None
    assert ("cumprod" in plan.reasons) == is_whole
    if is_whole:
        assert plan.reasons["cumprod"].startswith("it does not pay: ")
        assert "cumprod" in unit.nodes and plan.price.seconds <= plan.price.host_alone
        assert any(gain.op == "aten.cumprod" and gain.is_assumed for gain in plan.price.gains())
    else:
        assert plan.reasons == {} and plan.price.host_alone > plan.price.seconds


def test_an_op_with_a_part_that_the_chip_lacks_is_whole_on_the_host() -> None:
    g = IRBuilder()
    ir = g.output(running_product(g, g.input("x", 64, 64), 64)).ir()
    plan = partition(ir, target=NPUTarget(chip('without = ["mul"]')))
    assert [node.name for node in plan.graph.nodes] == ["cumprod"]
    assert plan.reasons["cumprod"] == "its part 'mul': chip 'edge' lacks mul ([ops] without)"
    back = partition(plan.source, target=NPUTarget(chip()))
    assert back.reasons == {} and len(back.graph.nodes) == 30


def test_ops_kept_from_the_device_by_a_function_count_as_lacking() -> None:
    own = chip('without = ["tanh"]')

    def supported(op: str, attrs: Any) -> bool:
        return "gelu" not in op

    plan = partition(model(), supported, npu=own)
    assert plan.price is not None
    assert [gain.op for gain in find_gains(plan, own, supported)] == ["aten.gelu", "aten.tanh"]
    with_tanh = what_if(plan, own, ["aten.tanh"], supported)
    assert "gelu" in {node for unit in with_tanh.units if not unit.on_device for node in unit.nodes}


def test_bytes_are_counted_as_stored_and_once_per_value() -> None:
    """A value that two runs of the chip read crosses once, in 16 bits; so does an index, in 32."""
    g = IRBuilder()
    x, rows = g.input("x", 64, 64), g.input("rows", 64, dtype="int64")
    first = g("aten.linear.default", x, g.weight("a", 64, 64))
    late = g("aten.add.Tensor", g("aten.linear.default", g("aten.sinh.default", first), g.weight("b", 64, 64)), x)
    ir = g.output(g("aten.index_select.default", late, 0, rows)).ir()
    plan = partition(ir, lambda op: "sinh" not in op, compute_dtype="float16")
    sizes = Counter({(t.tensor, t.target): t.bytes for t in plan.transfers})
    assert len(sizes) == len(plan.transfers)
    assert sizes["x", "npu"] == 64 * 64 * 2 and sizes["rows", "npu"] == 64 * 4
    assert [part.device for part in plan.partitions] == ["npu", "cpu", "npu"]
    profiler = Profiler()
    executor = DAGExecutor(plan, NPUBackend(load_chip("edge")))
    executor.load_weights({name: np.eye(64, dtype=np.float32) for name in "ab"})
    inputs = {"x": np.ones((64, 64), np.float32), "rows": np.arange(64)}
    for _ in range(2):
        executor.execute(inputs, profiler)
    crossings = Counter(span.args["tensor"] for span in profiler.transfer_spans)
    assert crossings == {"x": 2, "linear": 2, "sinh": 2, "rows": 2, plan.graph.outputs[0]: 2}
    assert sum(entry.bytes for entry in profiler.transfers.values()) == 2 * sum(t.bytes for t in plan.transfers)


def test_the_timeline_holds_host_link_and_chip_without_overlaps(tmp_path: Path) -> None:
    own = chip('without = ["gelu"]')
    result = simulate_plan(partition(model(), npu=own), own, spans=True)
    path = tmp_path / "trace.json"
    result.timeline().save(path)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    ends = [event["ts"] + event["dur"] for event in events]
    assert max(ends) == pytest.approx(1e6 * result.seconds, rel=1e-3)
    names = {event["name"] for event in events}
    assert {"aten.gelu gelu", "x → npu", "linear → cpu", "gelu → npu", "launch of partition 0"} <= names
    stages = result.to_dict()["stages"]
    assert [stage["device"] for stage in stages] == ["npu", "cpu", "npu"]
    assert all(a["end_us"] == pytest.approx(b["start_us"]) for a, b in zip(stages, stages[1:], strict=False))
    parts = ("device_us", "host_us", "transfers_us", "launches_us")
    assert result.to_dict()["latency_us"] == pytest.approx(sum(result.to_dict()[part] for part in parts))


def test_a_plan_without_prices_is_not_simulated() -> None:
    plan = partition(model(), target=NPUTarget(chip('without = ["gelu"]')))
    with pytest.raises(InputError, match=r"the plan of 'test' has no prices; make it with partition\(ir, npu=chip\)"):
        simulate_plan(plan, chip())
