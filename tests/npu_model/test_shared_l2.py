"""A shared L2 between scratchpads and DRAM, and chips without DRAM."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from on_chips import linear_layers

from npu_compiler import CompiledProgram, CompileOptions, ConstraintError
from npu_compiler import compile as compile_ir
from npu_compiler.errors import ProgramFormatError
from npu_model import Chip, NPUBackend, NPUTarget, load_chip, parse_chip, simulate
from npu_model.analysis.simulation import lowered
from npu_model.analysis.tenants import Sharing, share
from npu_model.chip import HostLink, SharedL2
from npu_model.chip.description import Cores, Network
from npu_model.isa.assembler import assemble
from npu_model.isa.assembly import disassemble
from npu_model.isa.instructions import Affine, Axis, Section, Space, Tile, TileProgram, Transfer
from npu_model.isa.verifier import verify
from npu_model.lowering.l2 import _lowest_free, _Value
from npu_model.prices import ChipPrices
from npu_runtime import CPUBackend, Executor, load_weights
from npu_sim.commands.simulation_text import result_lines
from npu_sim.report.simulated import simulated_facts

ROWS, WIDTH, LAYERS = 64, 512, 4
F16 = CompileOptions(compute_dtype="float16")
BYTES_IN = BYTES_OUT = ROWS * WIDTH * 2
WEIGHTS = LAYERS * WIDTH * WIDTH * 2


def chip_with(sram: int, l2: int | None = None, *, dram: bool = True, cores: int = 1) -> Chip:
    """`edge` with another scratchpad, and an L2 of 64 bytes a cycle."""
    chip = load_chip("edge")
    return dataclasses.replace(
        chip,
        sram=dataclasses.replace(chip.sram, size=sram),
        l2=None if l2 is None else SharedL2(l2, 64, 20.0),
        dram=chip.dram if dram else None,
        link=HostLink(4.0, 1.0),
        cores=None if cores == 1 else Cores(count=cores, network=Network(50.0)),
        energy=dataclasses.replace(chip.energy, pj_per_l2_byte=2.0),
    )


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return compile_ir(linear_layers(ROWS, WIDTH, LAYERS), options=F16)


@pytest.mark.parametrize("cores", drawn([1, 2], 1 / 2))
def test_what_lies_in_the_l2_does_not_go_to_dram(program: CompiledProgram, cores: int) -> None:
    without, with_l2 = (simulate(program, chip_with(64 << 10, l2, cores=cores)) for l2 in (None, 4 << 20))
    assert without.dram_bytes >= WEIGHTS + BYTES_IN + BYTES_OUT and without.l2_bytes == 0
    assert with_l2.kept_weight_bytes == WEIGHTS
    assert BYTES_IN + BYTES_OUT <= with_l2.dram_bytes < without.dram_bytes - WEIGHTS
    assert with_l2.l2_bytes >= WEIGHTS + 2 * (LAYERS - 1) * BYTES_IN
    assert with_l2.cycles < without.cycles / 2
    assert with_l2.energy.l2 == pytest.approx(2e-12 * with_l2.l2_bytes)
    assert with_l2.to_dict()["l2_bytes"] == with_l2.l2_bytes and "l2_bytes" not in without.to_dict()


def test_twice_the_l2_is_never_slower_beyond_the_bound(program: CompiledProgram) -> None:
    sizes = [None, *(1 << power for power in range(14, 23))]
    cycles = [simulate(program, chip_with(64 << 10, size)).cycles for size in sizes]
    assert all(more <= less * 1.05 for less, more in zip(cycles, cycles[1:], strict=False))


@pytest.mark.parametrize(
    ("l2", "dram", "cores"), [(300_000, True, 1), (2 << 20, False, 1), (300_000, True, 2), (2 << 20, False, 2)]
)
def test_a_checked_run_through_the_l2_gives_the_numbers_and_counts(l2: int, dram: bool, cores: int) -> None:
    chip = chip_with(64 << 10, l2, dram=dram, cores=cores)
    graph, rng = linear_layers(ROWS, 128, LAYERS), np.random.default_rng(0)
    program, device = compile_ir(graph, NPUTarget(chip), F16), NPUBackend(chip, checked=True)
    state = {f"w{i}": rng.standard_normal((128, 128)).astype(np.float32) / 8 for i in range(LAYERS)}
    x = rng.standard_normal((ROWS, 128), np.float32)
    timed = device.timing(program)
    (y,) = Executor(program, device).run({"x": x}, load_weights(state, program, device)).values()
    assert device.timing(program) == timed
    on_cpu = compile_ir(graph, options=F16)
    cpu = CPUBackend()
    (expected,) = Executor(on_cpu, cpu).run({"x": x}, load_weights(state, on_cpu, cpu)).values()
    np.testing.assert_allclose(y, expected, rtol=0.02, atol=0.02)
    result = simulate(program, chip)
    assert result.l2_bytes > 0
    if not dram:
        assert result.dram_bytes >= 2 * ROWS * 128 * 2


def test_a_chip_without_dram_moves_inputs_and_outputs_over_the_link_only(program: CompiledProgram) -> None:
    result = simulate(program, chip_with(4 << 20, dram=False))
    data = result.to_dict()
    assert data["link_bytes"] == data["compulsory_link_bytes"] == BYTES_IN + BYTES_OUT and "dram_bytes" not in data
    assert result.kept_weight_bytes == WEIGHTS
    slower = dataclasses.replace(chip_with(4 << 20, dram=False), link=HostLink(0.4, 1.0))
    assert simulate(program, slower).cycles >= (BYTES_IN + BYTES_OUT) / 0.4 > result.cycles


@pytest.mark.parametrize("cores", [1, 2])
def test_what_does_not_fit_a_chip_without_dram_is_refused_in_a_sentence(program: CompiledProgram, cores: int) -> None:
    with pytest.raises(ConstraintError) as raised:
        simulate(program, chip_with(64 << 10, dram=False, cores=cores))
    (sentence,) = raised.value.violations
    assert sentence.startswith("chip 'edge' has no DRAM, and 2.") and "the scratchpad of 64.0 KiB beside" in sentence
    with pytest.raises(ConstraintError, match="the scratchpad of 64.0 KiB and the L2 of 1.0 MiB beside the rest"):
        simulate(program, chip_with(64 << 10, 1 << 20, dram=False, cores=cores))


def test_a_program_for_a_chip_without_dram_depends_on_its_link() -> None:
    chip = chip_with(1 << 20, dram=False)
    other = dataclasses.replace(chip, link=HostLink(8.0, 1.0))
    assert NPUTarget(chip).key != NPUTarget(other).key
    beside_dram = chip_with(1 << 20)
    assert NPUTarget(beside_dram).key == NPUTarget(dataclasses.replace(beside_dram, link=HostLink(8.0))).key


def test_transfers_to_a_chip_without_dram_are_priced_in_its_runs_alone() -> None:
    target = NPUTarget(chip_with(1 << 20, dram=False))
    assert isinstance(target.prices, ChipPrices) and target.prices.link.seconds(1 << 20) == 0.0
    assert NPUTarget(chip_with(1 << 20)).prices.link.seconds(1 << 20) > 0.0


def test_the_text_and_the_report_have_the_levels(program: CompiledProgram) -> None:
    chip = chip_with(64 << 10, 4 << 20, dram=False)
    text = "\n".join(result_lines(simulate(program, chip), full=False))
    assert "link bandwidth" in text and "\n  L2       " in text and "DRAM" not in text and "link latency" in text
    facts = simulated_facts(program, chip)
    assert list(facts["traffic"]) == ["link, read", "link, written", "L2, read", "L2, written", "scratchpad"]
    assert facts["outside"] == "link" and facts["traffic"]["L2, read"] > WEIGHTS
    assert facts["energy"]["l2"] > 0 and "shared l2" in facts["stalls"]


def test_a_program_in_the_l2_is_read_back_from_its_text(program: CompiledProgram) -> None:
    chip = chip_with(64 << 10, 4 << 20, cores=2)
    tiles = lowered(program, chip)
    text = disassemble(tiles)
    assert "l2[" in text and "bytes read from the L2" in text
    assert assemble(text) == tiles
    verify(tiles, chip)


@pytest.mark.parametrize(
    ("size", "first", "message"), [(None, 0, "the chip has no L2"), (1024, 512, "are outside of the L2 of 1024")]
)
def test_a_transfer_outside_of_the_l2_is_refused(size: int | None, first: int, message: str) -> None:
    chip = chip_with(64 << 10, size)
    move = Transfer(
        engine="dma0",
        box=(Axis(1024),),
        source=Tile(Space.L2, "uint8", Affine(first), (1,)),
        target=Tile(Space.SCRATCHPAD, "uint8", Affine(0), (1,)),
    )
    program = TileProgram("edge", "", (), (), (Section("node", "copy", "", (move,)),))
    with pytest.raises(ProgramFormatError, match=message):
        verify(program, chip)


@pytest.mark.parametrize("sharing", drawn(Sharing, 1 / 2))
def test_tenants_have_parts_of_the_l2(program: CompiledProgram, sharing: Sharing) -> None:
    other = compile_ir(linear_layers(ROWS, 256, LAYERS), options=F16)
    chip = dataclasses.replace(
        chip_with(256 << 10, 4 << 20, cores=2), control=dataclasses.replace(chip_with(1024).control, tokens=4096)
    )
    run = share([program, other], chip, sharing)
    assert all(tenant.shared.l2_bytes > 0 for tenant in run.tenants)


values = st.builds(
    lambda number, size, first, life: _Value(f"v{number}", 64 * size, first, first + life, ()),
    st.integers(0, 99), st.integers(1, 20), st.integers(0, 9), st.integers(0, 5),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(values, max_size=20), st.integers(1, 64))
def test_values_that_live_at_once_do_not_overlap(values_of_a_run: list[_Value], blocks: int) -> None:
    placed: list[tuple[_Value, int]] = []
    for value in values_of_a_run:
        address = _lowest_free(value, placed, 64 * blocks)
        if address is not None:
            assert 0 <= address <= 64 * blocks - value.size
            for other, first in placed:
                apart = other.last < value.first or value.last < other.first
                assert apart or first + other.size <= address or address + value.size <= first
            placed.append((value, address))
        else:
            assert any(o.first <= value.last and value.first <= o.last for o, _ in placed) or value.size > 64 * blocks


def test_the_keys_of_the_l2_are_read() -> None:
    text = """
    [chip]
    name = "small"
    clock_ghz = 1.0
    [vector]
    lanes = 8
    rates = { float32 = 1.0 }
    [sram]
    size = 65536
    banks = 8
    ports = 1
    bytes_per_cycle = 16
    [l2]
    size = 131072
    bytes_per_cycle = 32
    [link]
    bandwidth_gb_s = 2
    latency_us = 3
    [dma]
    channels = 2
    """
    chip = parse_chip(text, "small.toml")
    assert chip.l2 == SharedL2(131072, 32, 0.0) and chip.dram is None
    assert (chip.dram_bytes_per_cycle, chip.dram_latency_cycles, chip.outside_name) == (2.0, 3000.0, "link")
