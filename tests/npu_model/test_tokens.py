"""Waits that others imply and tokens that nobody waits for are left out, and nothing else is."""

from __future__ import annotations

import numpy as np
from tile_programs import arrays_of, chip, emitted_program, memories

from npu_model.isa.assembler import assemble
from npu_model.isa.assembly import disassemble
from npu_model.isa.instructions import TileProgram, instructions
from npu_model.lowering.implied_waits import without_implied_waits
from npu_model.lowering.tokens import without_idle_tokens
from npu_model.machine.machine import Machine

PROGRAM = """
chip edge d
buffer x 64
buffer y 64

section a b ""
  dma0    load    sram[0] int32 <- x[0] int32 [4]   signal dma0.1
  dma0    load    sram[64] int32 <- x[16] int32 [4]   signal dma0.2, dma0.3
  vector  compute [4]   wait dma0.1 >= 1, dma0.2 >= 1, dma0.3 >= 1
          r0 = sram[0] int32
          r1 = sram[64] int32
          r2 = add(r0, r1; 1.0)
          sram[128] int32 <- r2
  vector  fence   signal vector.1
  dma1    store   y[0] int32 <- sram[128] int32 [4]   wait dma0.1 >= 1, vector.1 >= 1   signal dma1.1
  dma1    fence   signal dma1.0
"""


def trimmed(program: TileProgram) -> TileProgram:
    return without_idle_tokens(without_implied_waits(program, chip()))


def waits(program: TileProgram) -> int:
    return sum(len(node.waits) for section in program.sections for node, _ in instructions(section.body))


def results(program: TileProgram) -> dict[str, np.ndarray]:
    arrays = arrays_of(program)
    Machine(chip(), program, memories(arrays), checked=True).run()
    return arrays


def test_a_later_token_of_an_engine_and_another_engines_wait_imply_others() -> None:
    text = disassemble(trimmed(assemble(PROGRAM)))
    assert [line.split("wait ")[1] for line in text.splitlines() if "wait " in line] == ["dma0.2 >= 1", "vector.1 >= 1"]
    assert [line.split("signal ")[1] for line in text.splitlines() if "signal " in line] == ["dma0.2", "vector.1"]
    assert text.count("fence") == 1


def test_a_wait_that_one_round_needs_stays() -> None:
    text = (
        'chip edge d\nbuffer x 64\nsection a b ""\n'
        "  loop t0 in 3:\n"
        "    dma0    load    sram[64*t0] int32 <- x[16*t0] int32 [4]   signal dma0.1\n"
        "  loop t0 in 3:\n"
        "    vector  compute [4]   wait dma0.1 >= t0 + 1\n"
        "            r0 = sram[64*t0] int32\n"
        "            sram[256 + 64*t0] int32 <- r0\n"
    )
    assert trimmed(assemble(text)) == assemble(text)
    assert waits(trimmed(assemble(text.replace("wait dma0.1 >= t0 + 1", "wait dma0.1 >= 3")))) == 1


def test_a_wait_for_sums_stays_beside_one_for_a_load_that_waits_for_the_operands() -> None:
    text = (
        'chip edge d\nbuffer x 128\nsection a b ""\n'
        "  dma0    load    sram[0] int8 <- x[0] int8 [64]   signal dma0.1\n"
        "  matrix  matmul  acc[0] int32 (4, 0) = sram[0] int8 (0, 1) * sram[0] int8 (0, 1) [m 1, k 64]"
        "   wait dma0.1 >= 1   signal matrix.1\n"
        "  dma0    load    sram[0] int8 <- x[64] int8 [64]   wait matrix.1 >= 1   signal dma0.2\n"
        "  vector  compute [1]   wait matrix.1 >= 1, dma0.2 >= 1\n"
        "          r0 = acc[0] int32\n"
        "          r1 = sram[0] int8\n"
        "          r2 = add(r0, r1; 1.0)\n"
        "          sram[128] int32 <- r2\n"
    )
    assert trimmed(assemble(text)) == assemble(text)
    fence = "  matrix  fence   wait dma0.2 >= 1   signal matrix.2\n"
    behind = text.replace("  vector  ", fence + "  vector  ").replace(", dma0.2 >= 1\n", ", matrix.2 >= 1\n")
    assert (waits(assemble(behind)), waits(trimmed(assemble(behind)))) == (5, 4)  # the product ends before the fence


def test_drawn_programs_compute_the_same_with_fewer_waits(seed: int) -> None:
    fewer = 0
    for number in range(60):
        program = emitted_program(seed + number)
        short = trimmed(program)
        fewer += waits(program) - waits(short)
        assert trimmed(short) == short
        before, after = results(program), results(short)
        assert all(np.array_equal(before[name], after[name]) for name in before)
        timed, again = (Machine(chip(), each).run() for each in (program, short))
        assert again.cycles <= timed.cycles + round(chip().dram_latency_cycles)
    assert fewer > 0
