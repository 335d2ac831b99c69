"""Chips of several cores: how calls are divided, what crosses the network, and laws of time, energy and results."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, CompileOptions, InputError, ProgramFormatError
from npu_compiler import compile as compile_ir
from npu_model import Chip, NPUBackend, NPUTarget, load_chip, parse_chip, simulate
from npu_model.analysis.simulation import lowered
from npu_model.analysis.trace import timeline
from npu_model.chip.description import SPLITS, Cores, Network
from npu_model.isa.assembler import assemble
from npu_model.isa.assembly import disassemble
from npu_model.isa.encoding import decode, encode
from npu_model.isa.instructions import core_of
from npu_model.isa.verifier import verify
from npu_model.lowering.division import Way, batch_of, divided, pieces_of_batch
from npu_model.lowering.pipelines import pipelined
from npu_model.lowering.program import chip_digest
from npu_model.machine.machine import Machine, engines_of
from npu_model.machine.memory import Memory
from npu_runtime import Executor, load_weights

LAWS = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOML = """
[chip]
name = "two"
clock_ghz = 1.0
[vector]
lanes = 16
rates = { float32 = 1.0, float16 = 1.0 }
[sram]
size = 16384
banks = 4
ports = 1
bytes_per_cycle = 16
[dram]
bandwidth_gb_s = 8
latency_ns = 50
[dma]
channels = 2
[cores]
count = 4
[cores.network]
bandwidth_gb_s = 4
latency_ns = 7
topology = "ring"
"""


def with_cores(chip: Chip, count: int = 2, split: str = "auto", **network: Any) -> Chip:
    """A chip's numbers for each of several cores."""
    own = Network(**{"bandwidth_gb_s": 64.0, "latency_ns": 5.0, **network})
    return dataclasses.replace(chip, cores=Cores(count=count, network=own, split=split))


def linear_chain(rows: int, *widths: int) -> dict[str, Any]:
    """Linear layers, each behind the one before, with ReLU."""
    g = IRBuilder("chain")
    y = g.input("x", rows, widths[0])
    for layer, width in enumerate(widths[1:]):
        y = g("aten.relu.default", g("aten.linear.default", y, g.weight(f"w{layer}", width, g.shape(y)[-1])))
    g.output(y)
    return g.ir()


def gated(width: int, inner: int) -> dict[str, Any]:
    """A feed-forward layer with a gate, for one token."""
    g = IRBuilder("gated")
    x = g.input("x", 1, width)
    gate, up = (g("aten.linear.default", x, g.weight(name, inner, width)) for name in ("gate", "up"))
    y = g("aten.mul.Tensor", g("aten.silu.default", gate), up)
    g.output(g("aten.linear.default", y, g.weight("down", width, inner)))
    return g.ir()


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """Linear layers, gated or not, convolutions with a residual and a pooling, or attention of few heads."""
    g = IRBuilder("random")
    kind = draw(st.sampled_from(("linear", "gated", "conv", "attention")))
    if kind == "gated":
        return gated(draw(st.integers(1, 60)), draw(st.integers(1, 90)))
    if kind == "linear":
        return linear_chain(draw(st.integers(1, 40)), *draw(st.lists(st.integers(1, 90), min_size=2, max_size=4)))
    if kind == "attention":
        heads, shared = draw(st.sampled_from(((4, 2), (3, 1), (6, 6))))
        batch, length = draw(st.integers(1, 8)), draw(st.integers(1, 20))
        q = g.input("q", batch, heads, length, 8)
        k, v = (g.input(name, batch, shared, length, 8) for name in "kv")
        attention = "aten.scaled_dot_product_attention.default"
        g.output(g("aten.relu.default", g(attention, q, k, v, None, 0.0, False, scale=None, enable_gqa=True)))
        return g.ir()
    groups = draw(st.sampled_from((1, 1, 2, 5)))
    channels, size, kernel = groups * draw(st.integers(1, 6)), draw(st.integers(4, 14)), draw(st.sampled_from((1, 3)))
    y = x = g.input("x", draw(st.integers(1, 2)), channels, size, size)
    for layer in range(draw(st.integers(1, 3))):
        w = g.weight(f"w{layer}", channels, channels // groups, kernel, kernel)
        args = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
        y = g("aten.relu.default", g("aten.convolution.default", y, w, None, *args))
    y = g("aten.add.Tensor", y, x)
    g.output(g("aten.max_pool2d.default", y, [2, 2], [2, 2]) if draw(st.booleans()) else y)
    return g.ir()


def chips(count: st.SearchStrategy[int] | None = None) -> st.SearchStrategy[Chip]:
    """Shipped chips with small scratchpads and several cores."""
    return st.builds(
        lambda name, size, cores, split, bandwidth, latency, topology, multicast: with_cores(
            dataclasses.replace(load_chip(name), sram=dataclasses.replace(load_chip(name).sram, size=size)),
            cores, split, bandwidth_gb_s=bandwidth, latency_ns=latency, topology=topology, multicast=multicast,
        ),
        st.sampled_from(("edge", "datacenter")), st.sampled_from((64 << 10, 1 << 20)), count or st.integers(2, 5),
        st.sampled_from(SPLITS), st.floats(0.5, 500), st.floats(0, 300), st.sampled_from(("crossbar", "ring", "mesh")),
        st.booleans(),
    )  # fmt: skip


def one_core(chip: Chip) -> Chip:
    return dataclasses.replace(chip, cores=None)


def outputs(ir: dict[str, Any], chip: Chip, dtype: str = "float32") -> list[np.ndarray]:
    """Results of a program on a chip, checked for races and reads of what was never written."""
    backend = NPUBackend(chip, checked=True)
    program = compile_ir(ir, NPUTarget(chip), CompileOptions(compute_dtype=dtype))
    rng = np.random.default_rng(3)
    shapes = {key: shape for spec in program.weight_specs.values() for key, shape in spec.source_shapes.items()}
    state = {key: rng.standard_normal(shape, np.float32) / 8 for key, shape in sorted(shapes.items())}
    inputs = {spec.name: rng.standard_normal(spec.shape, np.float32) for spec in program.input_specs}
    results = Executor(program, backend).run(inputs, load_weights(state, program, backend))
    return [value.to_numpy().astype(np.float32) for value in results.values()]


def compiled(ir: dict[str, Any], chip: Chip, dtype: str = "float16") -> CompiledProgram:
    return compile_ir(ir, NPUTarget(chip), CompileOptions(compute_dtype=dtype))


@LAWS
@given(graphs(), chips())
def test_several_cores_compute_what_one_computes(ir: dict[str, Any], chip: Chip) -> None:
    for own, alone in zip(outputs(ir, chip), outputs(ir, one_core(chip)), strict=True):
        np.testing.assert_allclose(own, alone, rtol=1e-5, atol=1e-5)


@LAWS
@given(graphs(), chips())
def test_cores_are_never_slower_than_one_where_the_chip_chooses(ir: dict[str, Any], chip: Chip) -> None:
    auto = dataclasses.replace(chip, cores=dataclasses.replace(chip.cores, split="auto"))
    alone = one_core(chip)
    assert simulate(compiled(ir, auto), auto).cycles <= simulate(compiled(ir, alone), alone).cycles


@LAWS
@given(graphs(), chips())
def test_work_and_energy_of_cores_add_up(ir: dict[str, Any], chip: Chip) -> None:
    chip = dataclasses.replace(chip, energy=dataclasses.replace(chip.energy, pj_per_network_byte=3.0))
    alone = one_core(chip)
    result, one = simulate(compiled(ir, chip), chip), simulate(compiled(ir, alone), alone)
    assert result.macs == one.macs
    assert result.energy.macs == pytest.approx(one.energy.macs)
    assert result.energy.network == pytest.approx(3e-12 * result.network_bytes)
    assert sum(call.joules for call in result.calls) + result.energy.static == pytest.approx(result.energy.total)
    assert sum(call.cycles for call in result.calls) == result.cycles
    assert result.cycles >= max(result.roofline_cycles, *result.busy.values()) * (1 - 1e-9)


@LAWS
@given(graphs(), chips(), st.integers(2, 9))
def test_a_faster_network_makes_a_program_no_slower(ir: dict[str, Any], chip: Chip, times: int) -> None:
    assert chip.cores is not None
    network = chip.cores.network
    faster = dataclasses.replace(
        network, bandwidth_gb_s=network.bandwidth_gb_s * times, latency_ns=network.latency_ns / times
    )
    tiles = decode(compiled(ir, chip).plan.machine_code)
    quick = dataclasses.replace(chip, cores=dataclasses.replace(chip.cores, network=faster))
    slow, fast = (Machine(each, tiles).run().cycles for each in (chip, quick))
    assert fast <= slow * 1.05 + 2 * chip.dram_latency_cycles


def test_a_product_by_columns_takes_half_of_the_time_on_two_cores() -> None:
    chip, ir = load_chip("edge"), linear_chain(128, 512, 512)
    alone = simulate(compiled(ir, chip), chip)
    two = with_cores(chip, split="columns")
    result = simulate(compiled(ir, two), two)
    busy = result.busy
    assert busy["core0.matrix"] == busy["core1.matrix"] == alone.busy["matrix"] / 2
    assert result.cycles < 0.6 * alone.cycles
    assert result.to_dict()["busy_us"]["core1.matrix"] > 0


def test_a_gated_product_of_one_token_is_divided_among_cores() -> None:
    ir, chip = gated(256, 512), load_chip("edge")
    alone, two = (simulate(compiled(ir, each), each) for each in (chip, with_cores(chip, 2, "columns")))
    gate = two.calls[0]
    assert gate.kernel == "gated_matmul_vec_kernel" and min(gate.busy(f"core{n}.matrix") for n in (0, 1)) > 0
    assert sum(gate.counts.macs.values()) == alone.calls[0].macs
    assert two.busy["core0.matrix"] < 0.6 * alone.busy["matrix"]


def test_what_a_core_makes_for_the_other_crosses_the_network_and_not_dram() -> None:
    chip, ir = with_cores(load_chip("edge"), split="columns"), linear_chain(64, 256, 256, 256)
    result = simulate(compiled(ir, chip), chip)
    between = 64 * 256 * 2  # bytes of the value between the layers, of which each core sends its half
    assert result.network_bytes == between
    slow = with_cores(load_chip("edge"), split="columns", bandwidth_gb_s=0.01)
    by_dram = simulate(compiled(ir, slow), slow)
    assert by_dram.network_bytes == 0
    assert by_dram.dram_bytes == result.dram_bytes + 3 * between  # written once, and read by either core


def test_a_core_keeps_only_its_part_of_a_weight() -> None:
    chip = load_chip("edge")
    ir = linear_chain(8, 768, 768)  # a weight of 1.2 MB, more than a scratchpad
    assert simulate(compiled(ir, chip), chip).kept_weight_bytes == 0
    two = with_cores(chip, split="columns")
    assert simulate(compiled(ir, two), two).kept_weight_bytes == 768 * 768 * 2


def test_layers_lie_on_the_cores_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_model.lowering.cores.pipelined", lambda *_: [])
    chip = with_cores(load_chip("edge"), 3, "layers")
    tiles = decode(compiled(linear_chain(16, 64, 64, 64, 64), chip).plan.machine_code)
    cores = [sorted({core_of(engine) for engine in engines_of(section.body)}) for section in tiles.sections]
    assert cores[0] == ["core0"] and cores[-1] == ["core2"] and sorted(cores) == cores


def batch_of_images(batch: int, layers: int = 4) -> dict[str, Any]:
    """Convolutions with ReLU and a pooling."""
    g = IRBuilder("batch")
    y = g.input("x", batch, 16, 24, 24)
    for layer in range(layers):
        w = g.weight(f"w{layer}", 16, 16, 3, 3)
        y = g("aten.relu.default", g("aten.conv2d.default", y, w, None, [1, 1], [1, 1]))
    g.output(g("aten.max_pool2d.default", y, [2, 2], [2, 2]))
    return g.ir()


@pytest.mark.parametrize("ir", [batch_of_images(8), linear_chain(512, *[256] * 5)], ids=["images", "rows"])
def test_layers_of_a_batch_pass_through_the_cores_in_pieces(
    ir: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = with_cores(load_chip("edge"), 2, "layers", bandwidth_gb_s=16.0)
    program = compile_ir(ir, options=CompileOptions(compute_dtype="float16"))
    tiles, result = lowered(program, chip), simulate(program, chip)
    verify(tiles, chip)
    assert " in micro-batches of " in tiles.sections[-1].comment
    for own, alone in zip(outputs(ir, chip), outputs(ir, one_core(chip)), strict=True):
        np.testing.assert_allclose(own, alone, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("npu_model.lowering.cores.pipelined", lambda *_: [])
    whole = simulate(program, chip)
    assert result.macs == whole.macs
    assert result.cycles < 0.7 * whole.cycles  # where one core waits for the other


def test_a_network_that_mixes_its_batch_is_not_divided_along_it() -> None:
    g = IRBuilder("mixing")
    y = g("aten.linear.default", g.input("x", 8, 8), g.weight("a", 8, 8))
    g.output(g("aten.linear.default", g("aten.t.default", y), g.weight("b", 8, 8)))
    plans = [compile_ir(ir, options=CompileOptions()).plan for ir in (g.ir(), linear_chain(8, 8, 8, 8))]
    mixed, apart = (list(pipelined(plan, [0] * (len(plan.calls) - 1) + [1], 2)) for plan in plans)
    assert not mixed and len(apart) == 2
    assert [len(way.groups) for way in apart] == [5, 9]  # one for each piece, and one to fill and empty the cores


@LAWS
@given(graphs(), st.integers(2, 4))
def test_pieces_of_a_batch_are_a_calls_result_divided(ir: dict[str, Any], count: int) -> None:
    for call in compile_ir(ir, options=CompileOptions(compute_dtype="float32")).plan.calls:
        parts = pieces_of_batch(call, count)
        assert parts is None or [part.outputs[0].shape[0] * count for part in parts] == [batch_of(call)] * count
        assert parts is None or sum(part.flops for part in parts) == pytest.approx(call.flops, abs=count)


def test_the_timeline_has_a_track_for_each_engine_of_each_core() -> None:
    chip = with_cores(load_chip("edge"), split="rows")
    trace = timeline(simulate(compiled(linear_chain(64, 128, 128), chip), chip, spans=True))
    names = {event["args"]["name"] for event in trace.events() if event["name"] == "thread_name"}
    assert {"core0.matrix", "core1.matrix", "core1.dma0"} <= names


@pytest.mark.parametrize(
    ("topology", "count", "hops"),
    [("crossbar", 6, (1, 1, 1)), ("ring", 6, (1, 3, 1)), ("mesh", 6, (1, 1, 3)), ("mesh", 5, (1, 3, 4))],
)
def test_hops_are_those_of_the_topology(topology: str, count: int, hops: tuple[int, int, int]) -> None:
    cores = Cores(count=count, network=Network(bandwidth_gb_s=1.0, topology=topology))
    assert (cores.hops(0, 1), cores.hops(0, 3), cores.hops(0, count - 1)) == hops
    assert all(cores.hops(a, b) == cores.hops(b, a) for a in range(count) for b in range(count))


COPY = """
buffer x 800
section a move ""
  core0.dma0 load core0.sram[0] uint8 <- x[0] uint8 [800] signal core0.dma0.1
  core0.dma1 copy core2.sram[64] uint8 <- core0.sram[0] uint8 [800] wait core0.dma0.1 >= 1 signal core0.dma1.1
  core1.dma0 copy core2.sram[1024] uint8 <- core1.sram[0] uint8 [400]
  core2.vector fence wait core0.dma1.1 >= 1 signal core2.vector.1
  core2.dma0 store x[0] uint8 <- core2.sram[64] uint8 [800] wait core2.vector.1 >= 1
"""


def test_a_copy_between_cores_takes_its_bytes_its_hops_and_its_turn() -> None:
    chip = parse_chip(TOML, "two")
    program = assemble(f'chip two "{chip_digest(chip)}"\n{COPY}')
    verify(program, chip)
    assert assemble(disassemble(program)) == program
    data = np.arange(800).astype(np.uint8)
    machine = Machine(chip, program, {"x": Memory("x", data.copy(), False)})
    spans = {(span.engine, span.name): span for span in machine.run(spans=True).spans}
    assert (spans["core0.dma0", "transfer"].start, spans["core0.dma0", "transfer"].end) == (0, 100)
    # DRAM's latency, then 4 bytes a cycle; the link into core 2 is free again: core 1's 400 bytes were first.
    assert (spans["core0.dma1", "transfer"].start, spans["core0.dma1", "transfer"].end) == (150, 350)
    assert spans["core1.dma0", "transfer"].end == 100
    # Two hops for the data, and two for the token.
    assert spans["core2.dma0", "transfer"].start == 350 + 14 + 14
    assert machine.memory is not None and (machine.memory["x"].data == data).all()
    assert machine.run().sections[0].network_bytes == 1200


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("core4.vector fence", "the chip has no such engine"),
        ("vector fence", "the chip has no such engine"),
        ("core0.dma0 load core9.sram[0] uint8 <- x[0] uint8 [8]", "the chip has no core 'core9' with such a memory"),
        ("core0.dma0 load core1.sram[0] uint8 <- x[0] uint8 [8]", "it moves nothing from or to core0"),
        ("core0.dma0 copy core1.sram[0] uint8 <- core2.sram[0] uint8 [8]", "it moves nothing from or to core0"),
    ],
)
def test_programs_that_reach_into_other_cores_are_refused(line: str, problem: str) -> None:
    chip = parse_chip(TOML, "two")
    program = assemble(f'chip two "{chip_digest(chip)}"\nbuffer x 800\nsection a move ""\n  {line}\n')
    with pytest.raises(ProgramFormatError, match=problem):
        verify(program, chip)


def test_an_engine_computes_with_its_own_memory_only() -> None:
    chip = parse_chip(TOML, "two")
    compute = "core0.vector compute [4]\n    r0 = core1.sram[0] float32\n    core0.sram[0] float32 <- r0"
    program = assemble(f'chip two "{chip_digest(chip)}"\nsection a move ""\n  {compute}\n')
    with pytest.raises(ProgramFormatError, match="an engine of core0 computes with the memory of core1"):
        verify(program, chip)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count = 4", "count = 1", "'cores.count' is 1; it must be a whole number of at least 2 and at most 64"),
        ("count = 4", 'count = 4\nsplit = "depth"', "'cores.split' is 'depth'; choose one of auto, rows, columns"),
        ('topology = "ring"', 'topology = "star"', "'cores.network.topology' is 'star'; choose one of crossbar, ring"),
        ("bandwidth_gb_s = 4\nl", "l", "lacks the key 'cores.network.bandwidth_gb_s'"),
    ],
)
def test_wrong_keys_of_cores_are_named(old: str, new: str, message: str) -> None:
    assert old in TOML
    with pytest.raises(InputError, match=message):
        parse_chip(TOML.replace(old, new), "two")


@pytest.mark.parametrize("way", Way)
@LAWS
@given(graphs(), st.integers(2, 5))
def test_parts_of_a_call_are_its_result_divided(way: Way, ir: dict[str, Any], count: int) -> None:
    for call in compile_ir(ir, options=CompileOptions(compute_dtype="float32")).plan.calls:
        parts = divided(call, way, count)
        assert 1 <= len(parts) <= count
        assert sum(part.outputs[0].numel for part in parts) == call.outputs[0].numel
        assert sum(part.flops for part in parts) == pytest.approx(call.flops, abs=len(parts))


@pytest.mark.parametrize("count", [2, 3])
def test_cores_compute_chains_in_stripes_of_their_own(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g = IRBuilder("images")
    y = g.input("x", 1, 16, 72, 72)
    for layer in range(3):
        y = g("aten.conv2d.default", y, g.weight(f"w{layer}", 16, 16, 3, 3), None, [1, 1], [1, 1])
        y = g("aten.relu.default", y)
    g.output(y)
    chip = load_chip("edge")
    memory = dataclasses.replace(chip.sram, size=64 << 10), dataclasses.replace(chip.dram, bandwidth_gb_s=2.5)
    chip = with_cores(dataclasses.replace(chip, sram=memory[0], dram=memory[1]), count)
    program = compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16"))
    comments = [section.comment for section in lowered(program, chip).sections]
    assert comments[-1].endswith("steps") and comments[-2].endswith("in a cascade")
    result = simulate(program, chip)
    assert {core_of(engine) for engine, cycles in result.busy.items() if cycles} == {f"core{n}" for n in range(count)}
    for own, alone in zip(outputs(g.ir(), chip), outputs(g.ir(), one_core(chip)), strict=True):
        np.testing.assert_allclose(own, alone, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("npu_model.lowering.cores.striped", lambda *_: [])
    without = simulate(program, chip)
    assert result.cycles < without.cycles and result.dram_bytes < without.dram_bytes


def multicasting(multicast: bool = True) -> Chip:
    """Four cores over a slow network and a slower DRAM."""
    chip = load_chip("edge")
    chip = dataclasses.replace(chip, dram=dataclasses.replace(chip.dram, bandwidth_gb_s=2.0))
    return with_cores(chip, 4, "columns", bandwidth_gb_s=1.0, multicast=multicast)


def test_a_multicast_takes_the_link_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_model.lowering.cores.common_operands", lambda *_: [])
    ir = linear_chain(64, 256, 256, 256)
    program = compile_ir(ir, options=CompileOptions(compute_dtype="float16"))
    several, single = (simulate(program, multicasting(own)) for own in (True, False))
    assert several.network_bytes == single.network_bytes > 0
    busy = [sum(n for engine, n in own.busy.items() if engine.endswith("dma3")) for own in (several, single)]
    assert busy[1] > 2.5 * busy[0]
    assert several.cycles < single.cycles
    tiles = lowered(program, multicasting())
    text = disassemble(tiles)
    assert " and core2.sram[" in text and assemble(text) == tiles == decode(encode(tiles))
    for own, alone in zip(outputs(ir, multicasting()), outputs(ir, one_core(multicasting())), strict=True):
        np.testing.assert_allclose(own, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("and core3.sram", "and core2.sram", "a multicast goes to one core twice"),
        ("and core3.sram[", "and x[", "a multicast is to scratchpads"),
        ("and core3.sram[", "and core3.sram[9999998 + ", "outside of the scratchpad"),
    ],
)
def test_wrong_multicasts_are_refused(old: str, new: str, message: str) -> None:
    program = compile_ir(linear_chain(64, 256, 256, 256), options=CompileOptions(compute_dtype="float16"))
    tiles = lowered(program, multicasting())
    verify(tiles, multicasting())
    with pytest.raises(ProgramFormatError, match="the chip's network has no multicast"):
        verify(tiles, multicasting(False))
    line = next(line for line in disassemble(tiles).splitlines() if old in line)
    with pytest.raises(ProgramFormatError, match=message):
        verify(assemble(disassemble(tiles).replace(line, line.replace(old, new))), multicasting())


BRING = """
buffer x 800
buffer y 800
section a move ""
  core0.dma0 load core0.sram[0] and core2.sram[64] uint8 <- x[0] uint8 [800] signal core0.dma0.1
  core1.dma0 load core1.sram[0] uint8 <- x[0] uint8 [400]
  core2.vector fence wait core0.dma0.1 >= 1 signal core2.vector.1
  core2.dma0 store y[0] uint8 <- core2.sram[64] uint8 [800] wait core2.vector.1 >= 1
"""


def test_a_read_for_several_cores_takes_dram_and_the_links_once() -> None:
    chip = parse_chip(TOML + "multicast = true\n", "two")
    program = assemble(f'chip two "{chip_digest(chip)}"\n{BRING.replace("sram[0] and", "sram[0] uint8 and")}')
    verify(program, chip)
    assert assemble(disassemble(program)) == program == decode(encode(program))
    data = np.arange(800).astype(np.uint8)
    memory = {"x": Memory("x", data, True), "y": Memory("y", np.zeros(800, np.uint8), True)}
    machine = Machine(chip, program, memory, checked=True)
    run = machine.run(spans=True)
    spans = {(span.engine, span.name): span for span in run.spans}
    # 8 bytes of DRAM a cycle, but 4 of a link; DRAM is held as long, and core 1's read waits for it or comes first.
    first, second = spans["core0.dma0", "transfer"], spans["core1.dma0", "transfer"]
    assert (first.start, first.end, second.start, second.end) == (0, 200, 200, 250)
    # DRAM's latency, two hops for the data and two for the token.
    assert spans["core2.dma0", "transfer"].start == 200 + 50 + 14 + 14
    assert (memory["y"].data == data).all()
    assert (run.sections[0].dram_read, run.sections[0].network_bytes) == (1200, 800)
    with pytest.raises(ProgramFormatError, match="the chip's network has no multicast"):
        verify(program, parse_chip(TOML, "two"))
    twice = assemble(disassemble(program).replace("core2.sram[64] uint8 <- x", "core0.sram[900] uint8 <- x"))
    with pytest.raises(ProgramFormatError, match="a multicast goes to one core twice"):
        verify(twice, chip)


@pytest.mark.parametrize("split", ["rows", "columns"])
def test_one_core_reads_for_all_what_they_need_alike(split: str) -> None:
    """All cores read each weight where work is split by rows, and the input where it is split by columns."""
    ir = linear_chain(256, *[128] * 5) if split == "rows" else linear_chain(16, 1024, 64)
    several, apart = (_narrow(split, multicast) for multicast in (True, False))
    program = compile_ir(ir, options=CompileOptions(compute_dtype="float16"))
    once, each = simulate(program, several), simulate(program, apart)
    if split == "columns":
        common = 16 * 1024 * 2
        assert (once.network_bytes, once.dram_bytes) == (3 * common, each.dram_bytes - 3 * common)
    else:  # where each reads for itself, it keeps some weights from run to run
        assert once.network_bytes >= 3 * 3 * 128 * 128 * 2 and once.dram_bytes < 0.6 * each.dram_bytes
    assert once.cycles < 0.7 * each.cycles
    tiles = lowered(program, several)
    verify(tiles, several)
    text = disassemble(tiles)
    assert " and core3.sram[" in text and assemble(text) == tiles == decode(encode(tiles))
    for own, alone in zip(outputs(ir, several), outputs(ir, one_core(several)), strict=True):
        np.testing.assert_allclose(own, alone, rtol=1e-5, atol=1e-5)


def _narrow(split: str, multicast: bool) -> Chip:
    """Four cores with small scratchpads, a fast network and a slow DRAM."""
    chip = load_chip("edge")
    memory = dataclasses.replace(chip.sram, size=96 << 10), dataclasses.replace(chip.dram, bandwidth_gb_s=2.0)
    chip = dataclasses.replace(chip, sram=memory[0], dram=memory[1])
    return with_cores(chip, 4, split, bandwidth_gb_s=16.0, multicast=multicast)
