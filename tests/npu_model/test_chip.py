"""Chip files: those that come with the package, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_compiler.errors import InputError
from npu_model import Dataflow, load_chip, parse_chip, shipped_chips

CHIP = """
[chip]
name = "small"
clock_ghz = 1.0
[matrix]
arrays = 1
rows = 8
columns = 8
dataflow = "output"
rates = { int8 = 1.0, float16 = 0.5 }
[vector]
lanes = 8
rates = { float32 = 1.0 }
[sram]
size = 65536
banks = 8
ports = 1
bytes_per_cycle = 16
[dram]
bandwidth_gb_s = 8
latency_ns = 100
[dma]
channels = 2
"""


def test_a_chip_is_read_with_its_defaults() -> None:
    chip = parse_chip(CHIP, "small.toml")
    assert chip.name == "small" and chip.sram.bandwidth == 128
    assert chip.matrix is not None and chip.matrix.dataflow is Dataflow.OUTPUT
    assert chip.launch.overlapped and chip.energy.pj_per_dram_byte == 0.0


def test_a_chip_multiplies_the_dtypes_that_it_lists() -> None:
    chip = parse_chip(CHIP, "small.toml")
    assert (chip.peak_macs("int8"), chip.peak_macs("float16"), chip.peak_macs("float32")) == (64.0, 32.0, 0.0)


def test_the_edge_chip_has_4_tops_and_a_mebibyte() -> None:
    chip = load_chip("edge")
    tops = 2 * chip.peak_macs("int8") * chip.clock_ghz / 1000
    assert tops == pytest.approx(4.0, rel=0.03) and chip.sram.size == 2**20


@pytest.mark.parametrize("name", shipped_chips())
def test_every_chip_that_comes_with_the_package_is_well_formed(name: str) -> None:
    assert load_chip(name).name == name


MALFORMED = [
    ("clock_ghz = 1.0", "clock_ghz = 0", "'clock_ghz' is 0; it must be a number above 0"),
    ("clock_ghz = 1.0", "clock_ghz = nan", "'clock_ghz' is nan; write a number above 0"),
    ("clock_ghz = 1.0", "clock_ghz = inf", "'clock_ghz' is inf; it must be a number above 0 and at most 1000"),
    ("clock_ghz = 1.0", "", "lacks the key 'chip.clock_ghz'"),
    ("clock_ghz = 1.0", 'clock_ghz = "fast"', "'clock_ghz' is 'fast'; write a number above 0"),
    ('name = "small"', "name = 7", "'name' is 7; write a name in quotes"),
    ("rows = 8", "rows = -8", "'matrix.rows' is -8; it must be a whole number of at least 1"),
    ("rows = 8", "rows = 8.5", "'matrix.rows' is 8.5; write a whole number of at least 1"),
    ("rows = 8", "rows = true", "'matrix.rows' is True; write a whole number"),
    ("rows = 8", "rows = 10_000_000", "'matrix.rows' is 10000000; it must be a whole number of at least 1 and at most"),
    ("rows = 8", "rows = 8\nrow = 8", "unknown key 'matrix.row'; known are arrays, rows"),
    ('dataflow = "output"', 'dataflow = "row"', "'matrix.dataflow' is 'row'; choose one of weight, output, input"),
    ("int8 = 1.0", "int7 = 1.0", "'matrix.rates' has no dtype 'int7'; known are int4, int8"),
    ("int8 = 1.0", "int8 = 0", "'matrix.rates.int8' is 0; it must be a number above 0"),
    ("{ float32 = 1.0 }", "{}", "'vector.rates' is empty"),
    ("{ float32 = 1.0 }", "1.0", "'vector.rates' is no table"),
    ("size = 65536", "size = 0", "'sram.size' is 0; it must be a whole number of at least 1024"),
    ("[dma]\nchannels = 2", "", "lacks the table [dma]"),
    ("[dma]", "[dmas]", "unknown key 'dmas'"),
    ("[chip]", "[chips]", "lacks the table [chip]"),
    ("latency_ns = 100", "latency_ns = -1", "'dram.latency_ns' is -1; it must be a number of at least 0"),
    ("[dma]", "[launch]\noverlapped = 1\n[dma]", "'launch.overlapped' is 1; write true or false"),
    ("[dma]", "[measured]\nproduct = []\n[dma]", "unknown key 'measured'; known are name, clock_ghz"),
    (
        "[dram]\nbandwidth_gb_s = 8\nlatency_ns = 100",
        "",
        "has neither [dram] nor [link]; give it the one that its inputs",
    ),
    ("[dma]", "[l2]\nbytes_per_cycle = 8\n[dma]", "lacks the key 'l2.size'"),
    (
        "[dma]",
        "[l2]\nsize = 8\nbytes_per_cycle = 8\n[dma]",
        "'l2.size' is 8; it must be a whole number of at least 1024",
    ),
    ("[dma]", "[l2]\nsize = 8192\nbytes_per_cycle = 0\n[dma]", "'l2.bytes_per_cycle' is 0; it must be a whole number"),
    ("[dma]", "[l2]\nsize = 8192\nbytes_per_cycle = 8\nlatency_ns = nan\n[dma]", "'l2.latency_ns' is nan; write a"),
    (
        "[dma]",
        "[weights]\nratio = 1.5\ndecoder_bytes_per_cycle = 8\n[dma]",
        "'weights.ratio' is 1.5; it must be a number above 0",
    ),
    (
        "[dma]",
        "[weights]\nratio = 0\ndecoder_bytes_per_cycle = 8\n[dma]",
        "'weights.ratio' is 0; it must be a number above 0",
    ),
    ("[dma]", "[weights]\nratio = 0.5\n[dma]", "lacks the key 'weights.decoder_bytes_per_cycle'"),
    ("[chip]", "[chip", "is not TOML"),
    ("rows = 8", f"rows = {'9' * 5000}", "is not TOML: Exceeds the limit"),
    ("rows = 8", f"rows = 0x{'f' * 20000}", "'matrix.rows' is inf; write a whole number of at least 1"),
    ("clock_ghz = 1.0", f"clock_ghz = 0x{'f' * 20000}", "'clock_ghz' is inf; it must be a number above 0"),
    ('name = "small"', f"name = 0x{'f' * 20000}", "'name' is an int; write a name in quotes"),
    ('dataflow = "output"', f"dataflow = [[0x{'f' * 20000}]]", "'matrix.dataflow' is a list; choose one of"),
    ("latency_ns = 100", f"latency_ns = {'[' * 5000}", "is not TOML"),
]


@pytest.mark.parametrize(
    ("old", "new", "message"), MALFORMED, ids=[new[:60] or f"no {old}" for old, new, _ in MALFORMED]
)
def test_a_malformed_chip_is_refused_with_its_file_and_key(old: str, new: str, message: str) -> None:
    assert old in CHIP
    with pytest.raises(InputError) as raised:
        parse_chip(CHIP.replace(old, new, 1), "small.toml")
    assert message in str(raised.value) and "chip 'small.toml'" in str(raised.value)


def test_a_chip_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown chip 'nope'; give a .toml file or one of .*edge"):
        load_chip("nope")
    with pytest.raises(InputError, match="cannot read chip .*absent.toml': No such file"):
        load_chip(tmp_path / "absent.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not UTF-8 text: byte 0 is 0xff"):
        load_chip(tmp_path / "bytes.toml")
