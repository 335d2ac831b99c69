"""Banks of the scratchpad: engines that access one bank at once wait for each other, by the rule and its laws."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder

from npu_compiler import CompileOptions, InputError
from npu_compiler import compile as compile_ir
from npu_model import Chip, NPUTarget, load_chip, parse_chip, simulate
from npu_model.isa.assembler import assemble
from npu_model.isa.encoding import decode
from npu_model.lowering.program import chip_digest
from npu_model.machine.machine import Cause, Machine

LAWS = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOML = """
[chip]
name = "banked"
clock_ghz = 1.0
[vector]
lanes = 16
rates = { float32 = 1.0 }
[sram]
size = 16384
banks = 4
ports = 1
bytes_per_cycle = 8
bank_bytes = 4096
[dram]
bandwidth_gb_s = 800
latency_ns = 0
[dma]
channels = 2
"""


def with_banks(chip: Chip, **values: int | None) -> Chip:
    return dataclasses.replace(chip, sram=dataclasses.replace(chip.sram, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "size", "cycles"),
    [
        (0, 4096, 800, 200),  # two banks side by side: 800 bytes in and 800 out at 8 a cycle
        (0, 1024, 800, 400),  # one bank for both
        (0, 1024 + 3696, 800, 200),  # the second lies in another bank
        (3696, 8192, 800, 200),  # halves of the first lie in two banks, and so are moved side by side
    ],
)
def test_copies_within_a_bank_take_turns(first: int, second: int, size: int, cycles: int) -> None:
    chip = parse_chip(TOML, "banked")
    lines = [
        f"dma{queue} copy sram[{address}] uint8 <- sram[{address}] uint8 [{size}]"
        for queue, address in enumerate((first, second))
    ]
    program = assemble(f'chip banked "{chip_digest(chip)}"\nsection a b ""\n  ' + "\n  ".join(lines) + "\n")
    assert Machine(chip, program).run().cycles == cycles


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, object]:
    g = IRBuilder("random")
    if draw(st.booleans()):
        channels, size = draw(st.integers(1, 24)), draw(st.integers(4, 16))
        x = g.input("x", 1, channels, size, size)
        args = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        y = g("aten.convolution.default", x, g.weight("w", draw(st.integers(1, 48)), channels, 3, 3), None, *args)
        g.output(g("aten.relu.default", y))
        return g.ir()
    y = g.input("x", draw(st.integers(1, 48)), draw(st.integers(1, 96)))
    for layer in range(draw(st.integers(1, 3))):
        y = g("aten.relu.default", g("aten.linear.default", y, g.weight(f"w{layer}", 64, g.shape(y)[-1])))
    g.output(y)
    return g.ir()


@LAWS
@given(graphs(), st.sampled_from((64, 1024, 32768)), st.sampled_from((2, 4, 16)), st.sampled_from((2, 4)))
def test_more_banks_or_ports_make_a_program_no_slower(
    ir: dict[str, object], bank_bytes: int, banks: int, times: int
) -> None:
    chip = with_banks(load_chip("edge"), banks=banks, bank_bytes=bank_bytes)
    tiles = decode(compile_ir(ir, NPUTarget(chip), CompileOptions(compute_dtype="float16")).plan.machine_code)
    cycles = Machine(chip, tiles).run().cycles
    for more in (with_banks(chip, banks=banks * times), with_banks(chip, ports=times)):
        assert Machine(more, tiles).run().cycles <= cycles * 1.02
    assert Machine(with_banks(chip, bank_bytes=None), tiles).run().cycles <= cycles


def test_waiting_for_banks_is_counted_as_a_stall() -> None:
    g = IRBuilder("chain")
    y = g("aten.linear.default", g.input("x", 64, 512), g.weight("w", 512, 512))
    g.output(g("aten.relu.default", y))
    free = with_banks(load_chip("edge"), banks=2, bytes_per_cycle=64)
    banked = with_banks(free, bank_bytes=512 << 10)
    apart, together = (simulate(compile_ir(g.ir(), NPUTarget(chip)), chip) for chip in (free, banked))
    assert together.stalls[Cause.SRAM_PORTS] > apart.stalls[Cause.SRAM_PORTS]
    assert together.cycles > apart.cycles
    assert sum(call.cycles for call in together.calls) == together.cycles


def test_a_wrong_size_of_what_lies_in_a_bank_is_named() -> None:
    with pytest.raises(InputError, match=r"'sram.bank_bytes' is 2; it must be a whole number of at least 4"):
        parse_chip(TOML.replace("bank_bytes = 4096", "bank_bytes = 2"), "banked")
