"""DRAM with channels, banks and rows: against a simulation burst by burst, and its laws."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder

from npu_compiler import CompileOptions
from npu_compiler import compile as compile_ir
from npu_compiler.errors import InputError
from npu_model import Chip, NPUTarget, load_chip, parse_chip, simulate
from npu_model.chip.description import DRAM_KINDS, DramBanks
from npu_model.machine.dram import Banks, runs

EXACT = settings(max_examples=150, deadline=None)


def with_banks(name: str = "edge", burst: int = 64, **keys: Any) -> Chip:
    """A shipped chip whose DRAM has banks of a kind, with some keys changed."""
    chip = load_chip(name)
    kind = keys.pop("kind", "lpddr5")
    values: dict[str, Any] = {**DRAM_KINDS[kind], "channels": 4, **keys}
    banks = DramBanks(kind=kind, **values)
    return dataclasses.replace(chip, dram=dataclasses.replace(chip.dram, burst_bytes=burst, banks=banks))


def burst_by_burst(chip: Chip, starts: list[int], length: int) -> float:
    """Cycles of a transfer of these runs: every burst by itself goes to its channel, bank and row."""
    banks, burst = chip.dram.banks, chip.dram.burst_bytes
    assert banks is not None
    rate = chip.dram.bandwidth_gb_s * chip.dram.efficiency / banks.channels
    opening = banks.trp_ns + banks.trcd_ns
    now = [0.0] * banks.channels
    open_row: dict[tuple[int, int], int] = {}
    ended: dict[tuple[int, int], float] = {}
    for start in starts:
        touched: dict[int, list[int]] = {}
        for address in range(start, start + length):
            block, within = divmod(address, banks.interleave_bytes)
            local = block // banks.channels * banks.interleave_bytes + within
            touched.setdefault(block % banks.channels, []).append(local)
        for channel, locals_ in touched.items():
            for number in dict.fromkeys(local // burst for local in locals_):
                row = number * burst // banks.row_bytes
                bank = (channel, row % (banks.banks * banks.ranks))
                if bank in open_row and open_row[bank] != row:
                    now[channel] = max(now[channel], ended[bank] + opening)
                open_row[bank] = row
                now[channel] += burst / rate
                ended[bank] = now[channel]
    return max(now) * chip.clock_ghz / (1 - banks.trfc_ns / banks.trefi_ns)


def timing(chip: Chip) -> Banks:
    return Banks(chip.outside, chip.clock_ghz)


@st.composite
def organisations(draw: st.DrawFn) -> Chip:
    """Chips of few small banks, so that transfers come back to them."""
    burst = draw(st.sampled_from((16, 32)))
    interleave = burst * draw(st.sampled_from((1, 2, 4)))
    return with_banks(
        burst=burst,
        channels=draw(st.integers(1, 4)),
        ranks=draw(st.integers(1, 2)),
        banks=draw(st.integers(1, 4)),
        interleave_bytes=interleave,
        row_bytes=interleave * draw(st.sampled_from((1, 2, 4))),
        trcd_ns=draw(st.floats(0, 40)),
        trp_ns=draw(st.floats(0, 40)),
    )


@EXACT
@given(
    organisations(),
    st.integers(0, 3000),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 700)), min_size=1, max_size=3),
    st.sampled_from((1, 2, 4)),
)
def test_time_equals_a_simulation_of_every_burst(
    chip: Chip, address: int, axes: list[tuple[int, int]], size: int
) -> None:
    extents, strides = [extent for extent, _ in axes], [stride for _, stride in axes]
    starts, length = runs(address, strides, extents, size)
    expected = burst_by_burst(chip, starts.tolist(), length)
    assert timing(chip).cycles(address, strides, extents, size) == pytest.approx(expected, rel=1e-9)


@EXACT
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-50, 50)), min_size=1, max_size=3), st.sampled_from((1, 2, 4)))
def test_runs_are_the_bytes_of_the_box(axes: list[tuple[int, int]], size: int) -> None:
    extents, strides = [extent for extent, _ in axes], [abs(stride) for _, stride in axes]
    starts, length = runs(100, strides, extents, size)
    got = sorted(byte for start in starts.tolist() for byte in range(start, start + length))
    places = (sum(map(int.__mul__, at, strides)) for at in itertools.product(*map(range, extents)))
    assert got == sorted(100 + place + byte for place in places for byte in range(size))


@EXACT
@given(organisations(), st.integers(0, 3000), st.integers(1, 40), st.integers(1, 900))
def test_nothing_is_faster_than_the_bandwidth_or_slower_with_more_banks(
    chip: Chip, address: int, rows: int, stride: int
) -> None:
    cycles = timing(chip).cycles(address, [stride, 1], [rows, 8], 1)
    assert cycles >= 8 * rows / chip.dram_bytes_per_cycle * (1 - 1e-9)
    assert cycles == pytest.approx(timing(chip).cycles(address + timing(chip).period, [stride, 1], [rows, 8], 1))
    assert chip.dram.banks is not None
    ranks = dataclasses.replace(chip.dram.banks, ranks=1, banks=1)
    single = dataclasses.replace(chip, dram=dataclasses.replace(chip.dram, banks=ranks))
    assert cycles <= timing(single).cycles(address, [stride, 1], [rows, 8], 1) * (1 + 1e-9)


def test_a_long_run_takes_the_bandwidth_and_the_share_of_refresh() -> None:
    chip = with_banks(kind="lpddr5")
    refresh = 1 - 210 / 3906
    cycles = timing(chip).cycles(0, [1], [1 << 22], 1)
    assert cycles == pytest.approx((1 << 22) / chip.dram_bytes_per_cycle / refresh)


def test_a_column_of_one_bank_opens_a_row_for_each_element() -> None:
    chip = with_banks(kind="ddr5", channels=1)
    one_bank = 32 * 4096
    assert timing(chip).cycles(0, [one_bank], [100], 2) > 10 * timing(chip).cycles(0, [one_bank + 4096], [100], 2) / 2


def linear(rows: int, width: int) -> dict[str, Any]:
    g = IRBuilder("linear")
    return g.output(g("aten.linear.default", g.input("x", rows, width), g.weight("w", width, width))).ir()


@pytest.mark.parametrize("kind", DRAM_KINDS)
def test_a_program_takes_longer_than_with_flat_bandwidth_and_is_the_same_for_data(kind: str) -> None:
    banked = with_banks(kind=kind)
    flat = dataclasses.replace(banked, dram=dataclasses.replace(banked.dram, banks=None))
    ir, options = linear(256, 1024), CompileOptions(compute_dtype="float16")
    slow, fast = (simulate(compile_ir(ir, NPUTarget(chip), options), chip) for chip in (banked, flat))
    assert fast.cycles < slow.cycles < 3 * fast.cycles
    assert slow.cycles >= slow.dram_bytes / banked.dram_bytes_per_cycle


TABLE = """
chip = {{ name = "c", clock_ghz = 1.0 }}
vector = {{ lanes = 8, rates = {{ float32 = 1.0 }} }}
sram = {{ size = 65536, banks = 8, ports = 1, bytes_per_cycle = 16 }}
dma = {{ channels = 2 }}
[dram]
bandwidth_gb_s = 8
latency_ns = 100
burst_bytes = 64
[dram.banks]
{}
"""


def test_a_kind_gives_what_the_file_does_not() -> None:
    banks = parse_chip(TABLE.format('kind = "hbm3"\nchannels = 16\nrow_bytes = 2048'), "c").dram.banks
    assert banks is not None
    assert (banks.banks, banks.row_bytes, banks.trcd_ns, banks.interleave_bytes) == (16, 2048, 14, 256)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("channels = 2", "chip 'c' lacks the key 'dram.banks.banks'"),
        ('kind = "ddr9"\nchannels = 2', "'dram.banks.kind' is 'ddr9'; choose one of custom, lpddr4"),
        ('kind = "ddr5"', "chip 'c' lacks the key 'dram.banks.channels'"),
        ('kind = "ddr5"\nchannels = 0', "'dram.banks.channels' is 0"),
        ('kind = "ddr5"\nchannels = 1e99', "'dram.banks.channels' is 1e+99"),
        ('kind = "ddr5"\nchannels = 2\ninterleave_bytes = 96', "it must divide the 4096 bytes of a row"),
        ('kind = "ddr5"\nchannels = 2\ntrfc_ns = 3900', "it must be less than 'trefi_ns'"),
        ('kind = "ddr5"\nchannels = 2\ninterleave_bytes = 32', "'dram.burst_bytes' is 64; it must divide 32"),
        ('kind = "ddr5"\nchannels = 2\ntrp_ns = -1', "'dram.banks.trp_ns' is -1"),
    ],
)
def test_malformed_banks_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_chip(TABLE.format(text), "c")
    assert message in str(error.value)


# The first layers of ResNet-18 as products, rows × columns × summed, on SCALE-Sim's configuration of the first TPU (an
# array of 256 × 256, 14 MiB) with one channel of DDR4-2400. Weight stationary, it writes the sums of each fold along
# what is summed to memory. (R. Raj et al., "SCALE-Sim v3", arXiv:2504.15377: 21 % fewer cycles of computing than output
# stationary, and with DRAM the other one is 30 % faster.)
RESNET18 = [(12544, 64, 147), *[(3136, 64, 576)] * 4, (784, 128, 576)]
TPU = """
chip = {{ name = "tpu", clock_ghz = 1.0 }}
matrix = {{ arrays = 1, rows = 256, columns = 256, dataflow = "{}", rates = {{ float16 = 1 }},
           accumulator_bytes = 67108864 }}
output = {{ lanes = 4096 }}
vector = {{ lanes = 4096, rates = {{ float16 = 1, float32 = 1 }} }}
sram = {{ size = 14680064, banks = 1024, ports = 1, bytes_per_cycle = 1024 }}
dma = {{ channels = 4 }}
[dram]
bandwidth_gb_s = {}
latency_ns = 20
burst_bytes = 64
"""
DDR4 = """[dram.banks]
channels = 1
banks = 16
row_bytes = 8192
trcd_ns = 13.3
trp_ns = 13.3
tcl_ns = 13.3
trfc_ns = 350
trefi_ns = 7800
"""


def folded(rows: int, columns: int, summed: int, dataflow: str) -> dict[str, Any]:
    """A product whose sums, weight stationary, go to memory behind each fold of 256, and come back."""
    g, total = IRBuilder("folded"), ""
    each = 256 if dataflow == "weight" else summed
    for first in range(0, summed, each):
        size = min(each, summed - first)
        part = g("aten.linear.default", g.input(f"x{first}", rows, size), g.input(f"w{first}", columns, size))
        total = g("aten.add.Tensor", part, total) if total else part
        g.output(total)
    return g.ir()


def cycles_of(dataflow: str, bandwidth: float, banks: str) -> tuple[int, int]:
    """Cycles of the layers in all, and of the matrix engine."""
    text = TPU.format(dataflow, bandwidth).replace("\n           ", " ")
    chip = parse_chip(text + banks, "tpu")
    options = CompileOptions(compute_dtype="float16")
    results = [simulate(compile_ir(folded(*layer, dataflow), NPUTarget(chip), options), chip) for layer in RESNET18]
    return sum(each.cycles for each in results), sum(each.busy["matrix"] for each in results)


def test_weight_stationary_computes_in_fewer_cycles_and_loses_with_dram() -> None:
    (fast, computing), (slow, computing_too) = cycles_of("weight", 1e6, ""), cycles_of("output", 1e6, "")
    assert computing < 0.8 * computing_too and fast < 0.8 * slow
    with_memory, other = cycles_of("weight", 19.2, DDR4)[0], cycles_of("output", 19.2, DDR4)[0]
    assert 1.2 < with_memory / other < 1.45
