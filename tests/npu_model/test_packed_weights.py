"""Weights that lie in DRAM in a form of their own, and are decoded on their way."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_chips import linear_layers

from npu_compiler import CompiledProgram, CompileOptions
from npu_compiler import compile as compile_ir
from npu_compiler.errors import ProgramFormatError
from npu_model import Chip, NPUBackend, NPUTarget, load_chip, simulate
from npu_model.analysis.simulation import lowered, most_cycles
from npu_model.chip import PackedWeights, SharedL2
from npu_model.chip.description import Cores, Network
from npu_model.isa.assembler import assemble
from npu_model.isa.assembly import disassemble
from npu_model.isa.verifier import verify
from npu_model.machine.machine import Run
from npu_runtime import Executor, load_weights

ROWS, WIDTH = 8, 512
WEIGHT = WIDTH * WIDTH * 2
DATA = 2 * ROWS * WIDTH * 2
LAWS = settings(max_examples=8, deadline=None)


def chip_with(weights: PackedWeights | None, cores: int = 1, l2: int | None = None) -> Chip:
    """`edge` with 64 KiB, so that weights come from DRAM in each run."""
    chip = load_chip("edge")
    return dataclasses.replace(
        chip,
        sram=dataclasses.replace(chip.sram, size=64 << 10),
        weights=weights,
        cores=None if cores == 1 else Cores(count=cores, network=Network(50.0)),
        l2=None if l2 is None else SharedL2(l2, 64),
    )


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return compile_ir(linear_layers(ROWS, WIDTH, 2), options=CompileOptions(compute_dtype="float16"))


@pytest.mark.parametrize("cores", [1, 2])
def test_stored_bytes_of_weights_are_what_dram_moves(program: CompiledProgram, cores: int) -> None:
    whole, packed = (simulate(program, chip_with(each, cores)) for each in (None, PackedWeights(0.5625, 4096)))
    saved = whole.dram_bytes - packed.dram_bytes
    assert saved == pytest.approx(2 * WEIGHT * (1 - 0.5625), rel=0.02)
    assert packed.compulsory_bytes == DATA + math.floor(WEIGHT * 0.5625) * 2 <= packed.dram_bytes
    assert packed.cycles < 0.7 * whole.cycles
    assert packed.energy.dram == pytest.approx(packed.dram_bytes * 40e-12)


def test_a_slow_decoder_holds_transfers_up(program: CompiledProgram) -> None:
    fast, slow = (simulate(program, chip_with(PackedWeights(0.5, rate))) for rate in (4096, 4))
    assert fast.dram_bytes == slow.dram_bytes
    assert fast.cycles < 2 * WEIGHT / 4 <= slow.cycles


def test_weights_that_are_kept_are_decoded_once(program: CompiledProgram) -> None:
    result = simulate(program, chip_with(PackedWeights(0.5, 64), l2=4 << 20))
    assert result.kept_weight_bytes == WEIGHT and result.l2_bytes >= 2 * WEIGHT
    assert result.dram_bytes < WEIGHT


@LAWS
@given(st.floats(0.01, 1), st.integers(1, 512), st.integers(1, 3), st.integers(1, 90), st.none() | st.just(300_000))
def test_a_run_on_data_gives_the_numbers_of_weights_as_they_are(
    ratio: float, rate: int, cores: int, width: int, l2: int | None
) -> None:
    graph, results = linear_layers(ROWS, width, 2), []
    for weights in (None, PackedWeights(ratio, rate)):
        chip = chip_with(weights, cores, l2)
        device = NPUBackend(chip, checked=True)
        program = compile_ir(graph, NPUTarget(chip), CompileOptions(compute_dtype="float16"))
        timed, rng = device.timing(program), np.random.default_rng(0)
        state = {f"w{n}": rng.standard_normal((width, width)).astype(np.float32) for n in range(2)}
        x = {"x": rng.standard_normal((ROWS, width), np.float32)}
        (y,) = Executor(program, device).run(x, load_weights(state, program, device)).values()
        results.append(y.to_numpy().copy())
        on_data: Run = device.timing(program)
        assert on_data == timed
        result = simulate(program, chip)
        assert result.cycles >= result.roofline_cycles * (1 - 1e-9) and result.dram_bytes >= result.compulsory_bytes
    np.testing.assert_array_equal(*results)


@LAWS
@given(st.floats(0.01, 1), st.floats(0.01, 1), st.integers(1, 512), st.integers(1, 200))
def test_smaller_weights_are_not_slower(first: float, second: float, rate: int, width: int) -> None:
    program = compile_ir(linear_layers(ROWS, width, 2), options=CompileOptions(compute_dtype="float16"))
    small, large = (simulate(program, chip_with(PackedWeights(ratio, rate))) for ratio in sorted((first, second)))
    assert small.dram_bytes <= large.dram_bytes
    assert small.cycles <= most_cycles(large)


def test_a_program_with_packed_weights_is_read_back_from_its_text(program: CompiledProgram) -> None:
    chip = chip_with(PackedWeights(0.5, 64))
    tiles = lowered(program, chip)
    text = disassemble(tiles)
    assert "<- packed p_w0[" in text and "bytes decoded of weights" in text
    assert assemble(text) == tiles
    with pytest.raises(ProgramFormatError, match="buffer 'p_w0' is compressed, but the chip has no decoder"):
        verify(tiles, chip_with(None))
    with pytest.raises(ProgramFormatError, match="buffer 'relu_1' has no form of its own that could be decoded"):
        verify(assemble(text.replace("store   relu_1[", "store   packed relu_1[")), chip)
