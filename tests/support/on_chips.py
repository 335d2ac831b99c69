"""Programs on simulated chips beside the CPU device: those that ship, and two of odd sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from ir_builder import IRBuilder

import npu_compiler
from npu_model.chip import Chip, load_chip, parse_chip
from npu_model.device import NPUBackend
from npu_model.machine.machine import Run
from npu_runtime import CPUBackend, Executor, load_weights

ODD = """
[chip]
name = "odd"
clock_ghz = 0.7
[matrix]
arrays = 1
rows = 7
columns = 13
dataflow = "output"
rates = { int8 = 1.0, float16 = 0.5, bfloat16 = 0.5, float32 = 0.25 }
accumulator_bytes = 4096
windows = "columns"
[vector]
lanes = 5
rates = { int8 = 1.0, float16 = 1.0, bfloat16 = 1.0, float32 = 1.0 }
[sram]
size = 102_400
banks = 3
ports = 1
bytes_per_cycle = 8
alignment = 16
[dram]
bandwidth_gb_s = 1.7
latency_ns = 33
[dma]
channels = 1
"""

UNEVEN = """
[chip]
name = "uneven"
clock_ghz = 1.3
[matrix]
arrays = 3
rows = 24
columns = 10
dataflow = "input"
overlapped_folds = true
rates = { int8 = 1.0, float16 = 0.5, bfloat16 = 0.5, float32 = 0.25 }
accumulator_bytes = 6_000
[output]
lanes = 11
[vector]
lanes = 23
rates = { int8 = 2.0, float16 = 1.0, bfloat16 = 1.0, float32 = 0.5 }
[sram]
size = 60_000
banks = 5
ports = 2
bytes_per_cycle = 12
alignment = 32
[dram]
bandwidth_gb_s = 3.3
latency_ns = 77
burst_bytes = 48
[dma]
channels = 2
[control]
tokens = 17
[launch]
cost_us = 0.3
overlapped = false
"""
CORES = """
[cores]
count = {count}
split = "{split}"
[cores.network]
bandwidth_gb_s = 3.1
latency_ns = 9.3
topology = "ring"
"""
OWN = {
    "odd": ODD,
    "uneven": UNEVEN,
    "rows": UNEVEN + CORES.format(count=3, split="rows"),
    "columns": ODD + CORES.format(count=3, split="columns"),
    "heads": ODD + CORES.format(count=2, split="heads"),
    "layers": UNEVEN + CORES.format(count=2, split="layers"),
}


@cache
def chip(name: str) -> Chip:
    """A chip that ships, or one of odd sizes.

    `odd` has a 7 × 13 array, 100 KB, one DMA engine and no output stage; `uneven` three arrays of 24 × 10 in which the
    inputs stay, 60 KB, and launches that are not hidden. `rows`, `columns`, `heads` and `layers` have several cores,
    each like one of these, and divide programs so.
    """
    return parse_chip(OWN[name], name) if name in OWN else load_chip(name)


@dataclass
class Outcome:
    """Results by name: of the chip, of the CPU device; and the run on the chip."""

    ours: dict[str, np.ndarray]
    reference: dict[str, np.ndarray]
    run: Run


def run_on(
    name: str,
    graph: IRBuilder,
    inputs: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray] | None = None,
    compute_dtype: str = "float16",
    **options: Any,
) -> Outcome:
    """Run a graph on a chip, every access checked, and on the CPU device's NumPy kernels."""
    ir = graph.ir()
    npu = NPUBackend(chip(name), checked=True)
    results = []
    for backend in (npu, CPUBackend(native=False, pytorch=False)):
        program = npu_compiler.compile(
            ir, backend.target, npu_compiler.CompileOptions(compute_dtype=compute_dtype, **options)
        )
        loaded = load_weights(weights or {}, program, backend)
        outputs = Executor(program, backend).run(inputs, loaded)
        results.append({spec.name: outputs[spec.name].to_numpy(spec).copy() for spec in program.output_specs})
        if backend is npu:
            run = npu.timing(program)
    return Outcome(results[0], results[1], run)


def rounding_of_sums(terms: int, magnitudes: np.ndarray) -> np.ndarray:
    """Largest difference of two float32 sums of the same products, each added up in an order of its own.

    A sum of n products is off by at most n units in the last place of the sum of their magnitudes in any order, and by
    more than 3 √n of them practically never (Higham and Mary, A new approach to probabilistic rounding error analysis,
    2019). Where terms cancel each other, that is far more than a unit of the result.

    Args:
        terms: Number of products of a sum, with those that are added to it.
        magnitudes: For each element of the result, the sum of the magnitudes of its terms.
    """
    return 2 * min(terms, 3 * terms**0.5) * np.finfo(np.float32).epsneg * magnitudes


def assert_close(
    outcome: Outcome, tolerance: float, scale: float = 1e-6, *, rounding: np.ndarray | float = 0.0
) -> None:
    """Check that results agree within a share of the largest value; integers agree exactly.

    Args:
        scale: The largest value, where that is higher than what an output holds: its terms may cancel each other.
        rounding: Further difference of each element of the one output, as from `rounding_of_sums`.
    """
    for name, expected in outcome.reference.items():
        ours = outcome.ours[name]
        if expected.dtype.kind in "iub":
            np.testing.assert_array_equal(ours, expected, err_msg=name)
            continue
        expected, ours = expected.astype(np.float32), ours.astype(np.float32)
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(expected), err_msg=name)
        finite = np.isfinite(expected)
        largest = np.abs(expected[finite]).max(initial=scale)
        allowed = np.broadcast_to(tolerance * largest + rounding, expected.shape)
        worst = np.abs(ours[finite] - expected[finite]) - allowed[finite]
        assert worst.max(initial=0.0) <= 0, f"{name}: {worst.argmax()} is off by {worst.max():g} more than allowed"


def linear_layers(rows: int, width: int, count: int) -> dict[str, Any]:
    """The IR of linear layers [width, width] with a ReLU after each, for an input `x` [rows, width]."""
    g = IRBuilder("layers")
    y = g.input("x", rows, width)
    for layer in range(count):
        y = g("aten.relu.default", g("aten.linear.default", y, g.weight(f"w{layer}", width, width)))
    g.output(y)
    return g.ir()
