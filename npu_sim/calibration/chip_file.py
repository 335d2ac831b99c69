"""The chip file (TOML) of a measured device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from npu_compiler.errors import InputError
from npu_model.chip import parse_chip
from npu_runtime import Device
from npu_runtime.cpu.native.threads import usable_threads
from npu_sim.calibration.factors import factors
from npu_sim.calibration.measuring import Measured

CPU_BLOCK = (6, 16, 64)  # gemm.h: 6 rows × 2 vectors of 8, and what a first-level cache holds
GPU_BLOCK = (64, 32, 16)  # a tensor core's smallest block, and what a multiprocessor's registers hold
CLOCK_GHZ = 1.0  # of the chip that is written: its rates are per nanosecond


@dataclass(frozen=True)
class Shape:
    """Numbers of a chip's description that no measurement of the device shows.

    Attributes:
        arrays: Cores or multiprocessors.
        rows, columns: Size of the block of results in the inner loop of a product.
        held_folds: Number of such blocks that one pass over an operand in cache serves.
        sram: Bytes of cache; None for what was measured.
    """

    arrays: int
    rows: int
    columns: int
    held_folds: int
    sram: int | None


def shape_of(device: Device, arrays: int | None = None, sram: int | None = None) -> Shape:
    """A device's shape; `arrays` and `sram` where the caller knows better, or where nothing here tells.

    Raises:
        InputError: `arrays` or `sram` is needed.
    """
    is_cpu = device.name == "cpu"
    if arrays is None and is_cpu:
        arrays = usable_threads()
    if arrays is None:
        raise InputError(f"give the number of multiprocessors of {device.name} (--arrays)")
    if sram is None and not is_cpu:
        raise InputError(f"nothing here tells the cache size of {device.name}: give it in bytes (--sram)")
    return Shape(arrays, *(CPU_BLOCK if is_cpu else GPU_BLOCK), sram)


def chip_text(measured: Measured, shape: Shape, name: str) -> str:
    """Text of the chip file (TOML)."""
    described = _described(measured, shape, name)
    table = factors(parse_chip(described, name), measured.blocks)
    tables: dict[str, list[str]] = {}
    for key, rows in table.items():
        *dtype, kind = key.split(".")
        lines = tables.setdefault(".".join(["measured", *dtype]), [])
        lines.append(f"{kind} = [\n{''.join(map(_row, rows))}]\n")
    return described + "".join(f"\n[{name}]\n{''.join(lines)}" for name, lines in tables.items())


def _row(row: Sequence[float]) -> str:
    return f"    [{', '.join([*(str(round(size)) for size in row[:-1]), _digits(row[-1], 3)])}],\n"


def _described(measured: Measured, shape: Shape, name: str) -> str:
    """Text of the chip file without measured calls."""
    elements = shape.arrays * shape.rows * shape.columns
    rates = ", ".join(f"{dtype} = {_digits(rate / elements / CLOCK_GHZ)}" for dtype, rate in measured.gmac_s.items())
    operations = _digits(measured.element_gop_s / shape.arrays / CLOCK_GHZ)
    each = ", ".join(f"{dtype} = {operations}" for dtype in measured.gmac_s)
    return f"""\
# Measured by `npu-sim calibrate` on {measured.device}, with its own kernels: {measured.read_gb_s:.4g} GB/s from memory,
# {measured.cached_gb_s:.4g} GB/s from caches, {max(measured.gmac_s.values()):.4g} GMAC/s in products, \
{measured.element_gop_s:.4g} G element operations/s, {measured.launch_us:.3g} us a call.
# The clock stands for none of the device's: rates are per nanosecond.

[chip]
name = {json.dumps(name)}
clock_ghz = {CLOCK_GHZ}

[matrix]
arrays = {shape.arrays}
rows = {shape.rows}
columns = {shape.columns}
dataflow = "output"
overlapped_folds = true
held_folds = {shape.held_folds}
rates = {{ {rates} }}

[vector]
lanes = {shape.arrays}
rates = {{ {each} }}

[sram]
size = {shape.sram or measured.cache_bytes}
banks = {shape.arrays}
ports = 1
bytes_per_cycle = {max(1, round(measured.cached_gb_s / shape.arrays / CLOCK_GHZ))}

[dram]
bandwidth_gb_s = {_digits(measured.read_gb_s)}
latency_ns = 0

[dma]
channels = 8

[launch]
cost_us = {_digits(measured.launch_us)}
product_us = {_digits(measured.product_us)}
overlapped = false
"""


def _digits(value: float, digits: int = 4) -> str:
    """The value in `digits` significant digits, with a decimal point, which TOML wants of a float."""
    return repr(float(f"{value:.{digits}g}"))
