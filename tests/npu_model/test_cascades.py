"""Chains of calls in stripes compute what the calls compute, and are taken where they cost less."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder
from on_chips import Outcome, assert_close, chip

import npu_compiler
from npu_compiler.program.plan import ExecutionPlan
from npu_model import NPUBackend, NPUTarget, load_chip, simulate
from npu_model.chip import Chip
from npu_model.isa.encoding import encode
from npu_model.lowering.cascades import Cascade, arrange, stripes_of, with_cascades
from npu_model.lowering.mapper import Mapper
from npu_model.lowering.program import link_program, trimmed
from npu_model.machine.machine import Machine
from npu_runtime import CPUBackend, Executor, load_weights

OPTIONS = npu_compiler.CompileOptions(compute_dtype="float16")


class Striped(NPUTarget):
    """A chip's target that takes one cascade, whatever it costs."""

    def __init__(self, chip: Chip, cascade: Cascade) -> None:
        super().__init__(chip)
        self.cascade = cascade

    def assemble(self, plan: ExecutionPlan) -> ExecutionPlan:
        arrangement = with_cascades(plan, [self.cascade], self.chip, Mapper(self.chip))
        assume(arrangement is not None)
        assert arrangement is not None
        return dataclasses.replace(arrangement.plan, machine_code=encode(trimmed(arrangement.program, self.chip)))


def images(calls: int, size: int = 23, stride: int = 1, width: int = 6, pools: bool = False) -> tuple[IRBuilder, Any]:
    """Convolutions one behind the other, the last with a residual; or one and a pooling. And their weights."""
    g, rng = IRBuilder("images"), np.random.default_rng(0)
    y, weights = g.input("x", 1, 4, size, size), {}
    for layer in range(calls):
        weights[f"w{layer}"] = rng.standard_normal((width, g.shape(y)[1], 3, 3), np.float32) / 6
        y = g("aten.conv2d.default", y, g.weight(f"w{layer}", *weights[f"w{layer}"].shape), None, [stride] * 2, [1, 1])
        y = g("aten.relu.default", y)
    if pools:
        y = g("aten.max_pool2d.default", y, [3, 3], [2, 2], [1, 1])
    g.output(y)
    return g, weights


def products(rows: int) -> tuple[IRBuilder, Any]:
    """Linear, activation, linear."""
    g, rng = IRBuilder("products"), np.random.default_rng(0)
    weights = {
        "up": rng.standard_normal((96, 24), np.float32) / 5,
        "down": rng.standard_normal((24, 96), np.float32) / 9,
    }
    y = g("aten.relu.default", g("aten.linear.default", g.input("x", rows, 24), g.weight("up", 96, 24)))
    g.output(g("aten.linear.default", y, g.weight("down", 24, 96)))
    return g, weights


def run_striped(name: str, graph: IRBuilder, weights: Any, cascade: Cascade) -> Outcome:
    """Run a graph in a cascade on a chip, every access checked, and on the CPU device."""
    ir, npu = graph.ir(), NPUBackend(chip(name), checked=True)
    results = []
    for backend, target in (
        (npu, Striped(chip(name), cascade)),
        (CPUBackend(native=False, pytorch=False), None),
    ):
        program = npu_compiler.compile(ir, target or backend.target, OPTIONS)
        (spec,) = program.input_specs
        x = np.random.default_rng(1).standard_normal(spec.shape, np.float32).astype(np.float16)
        outputs = Executor(program, backend).run({"x": x}, load_weights(weights, program, backend))
        results.append({spec.name: outputs[spec.name].to_numpy(spec).copy() for spec in program.output_specs})
        if backend is npu:
            empty = [not section.body for section in npu._load(program.plan).tiles.sections]
            assert empty == [*[True] * (len(empty) - 1), False]
            run = npu.timing(program)
    return Outcome(results[0], results[1], run)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(("edge", "odd")),
    st.integers(2, 9),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
    st.integers(2, 3),
    st.booleans(),
)
def test_stripes_of_images_compute_what_the_calls_compute(
    name: str, stripes: int, keeps_halo: bool, stages_weights: bool, stride: int, calls: int, pools: bool
) -> None:
    graph, weights = images(calls, stride=stride, pools=pools)
    cascade = Cascade(0, calls + pools, stripes, keeps_halo, stages_weights)
    assert_close(run_striped(name, graph, weights, cascade), 2e-3)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(("edge", "odd")), st.integers(4, 40), st.integers(2, 5), st.booleans())
def test_stripes_of_products_compute_what_the_calls_compute(
    name: str, rows: int, stripes: int, stages_weights: bool
) -> None:
    graph, weights = products(rows)
    assert_close(run_striped(name, graph, weights, Cascade(0, 2, stripes, False, stages_weights)), 2e-3)


def plan_of(graph: IRBuilder) -> ExecutionPlan:
    return npu_compiler.compile(graph.ir(), options=OPTIONS).plan


def test_a_halo_is_computed_again_or_copied() -> None:
    plan = plan_of(images(2)[0])
    again, kept = (stripes_of(plan, Cascade(0, 2, 4, keeps_halo, False)) for keeps_halo in (False, True))
    assert again is not None and kept is not None
    rows = [call.outputs[0].shape[2] for call in again.calls if call.kernel == "conv2d_kernel"]
    assert rows == [7, 6, 8, 6, 8, 6, 6, 5]
    rows = [call.outputs[0].shape[2] for call in kept.calls if call.kernel == "conv2d_kernel"]
    assert rows == [7, 6, 6, 6, 6, 6, 4, 5]
    assert [call.outputs[0].shape[2] for call in kept.calls if call.kernel == "copy_kernel"] == [2, 2, 2]


def test_weights_are_brought_into_buffers_once() -> None:
    stripes = stripes_of(plan_of(images(2, width=24)[0]), Cascade(0, 2, 4, False, True))
    assert stripes is not None
    assert [call.kernel for call in stripes.staging] == ["copy_kernel", "copy_kernel"]
    read = {call.inputs[1].buffer for call in stripes.calls if call.kernel == "conv2d_kernel"}
    assert read == {call.outputs[0].buffer for call in stripes.staging}


def small(kib: int) -> Chip:
    """`edge` with a smaller scratchpad and a slower DRAM, for which programs wait."""
    chip = load_chip("edge")
    sram, dram = dataclasses.replace(chip.sram, size=kib << 10), dataclasses.replace(chip.dram, bandwidth_gb_s=1.6)
    return dataclasses.replace(chip, sram=sram, dram=dram)


@pytest.mark.parametrize("kib", [96, 160, 256])
def test_a_cascade_takes_fewer_cycles_and_no_more_dram_than_its_parts(kib: int) -> None:
    chip = small(kib)
    plan = plan_of(images(2, size=96, width=24)[0])
    arrangement = arrange(plan, chip, Mapper(chip))
    striped = Machine(chip, arrangement.program).run()
    parts = Machine(chip, link_program(plan, chip, Mapper(chip))).run()
    assert [not section.body for section in arrangement.program.sections] == [True, False]
    assert striped.cycles < 0.95 * parts.cycles

    def moved(run: Any) -> int:
        return sum(counts.dram_read + counts.dram_written for counts in run.sections)

    assert moved(striped) < 0.8 * moved(parts)


def test_a_value_that_fits_the_scratchpad_needs_no_cascade() -> None:
    chip = load_chip("edge")
    program = arrange(plan_of(images(2)[0]), chip, Mapper(chip)).program
    assert all(section.body for section in program.sections)


def test_a_simulation_takes_the_cascades_of_a_compiled_program() -> None:
    chip, ir = small(160), images(2, size=96, width=24)[0].ir()
    compiled, op_level = (npu_compiler.compile(ir, target, OPTIONS) for target in (NPUTarget(chip), None))
    assert simulate(compiled, chip).to_dict() == simulate(op_level, chip).to_dict()
