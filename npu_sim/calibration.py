"""A chip file for `npu_model` from what a device reaches, measured with its own kernels (`npu-sim calibrate`).

A measurement is a small program compiled for the device, run often enough to fill a tenth of a second; the best of
several rounds counts, as disturbances only slow runs. Rates and costs come first. Then blocks of calls
(`npu_sim.probes`) are measured and simulated with these rates, and the factors between them are written down too.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler import CompiledProgram, compile
from npu_compiler.errors import ConstraintError, InputError
from npu_model.chip import Chip, parse_chip
from npu_model.simulation import simulate
from npu_model.work import call_work
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from npu_runtime.cpu.native.threads import usable_threads
from npu_sim.probes import BETWEEN_PRODUCTS, LAUNCH, SMALL_PRODUCTS, Probe, probes

MATRIX_SIZE = 2048  # rows, columns and depth of the product that shows the matrix rate of a GPU
SMALL_MATRIX_SIZE = 1024  # the same of a CPU
READ_BYTES = 256 << 20  # of a weight that no cache holds
CACHED_BYTES = 2 << 20  # of a weight that the last level of caches holds
ELEMENTS = 1 << 16  # of an operand that caches hold
ROUNDS, ROUND_SECONDS = 7, 0.1
BLOCK_ROUNDS, BLOCK_SECONDS = 5, 0.02  # of the two programs of a block
MOST_MACS, MOST_MACS_OF_A_GPU = 4 * 10**8, 10**11  # of a block
SHORT = 1e-4  # seconds; in a run this short a device may wait for the host
_PATTERN = 1 << 20  # random numbers, which larger operands repeat
_WITHIN = 0.03  # a block that the description predicts so well needs no factor
_LEAST = 0.5  # factor
_HIDDEN = 0.1  # computing that is a smaller share of a block says nothing of its own rate
CLOCK_GHZ = 1.0  # of the chip that is written: its rates are per nanosecond


@dataclass(frozen=True)
class Shape:
    """What no measurement shows of a device, and how it is described as a chip.

    Attributes:
        arrays: Cores or multiprocessors.
        rows, columns: Of the block of results in the inner loop of a product.
        held_folds: Such blocks that one pass over an operand in cache serves.
        sram: Bytes of cache, or of the part of a shared cache that the arrays get.
    """

    arrays: int
    rows: int
    columns: int
    held_folds: int
    sram: int


CPU_BLOCK = (6, 16, 64)  # gemm.h: 6 rows × 2 vectors of 8, and what a first-level cache holds
GPU_BLOCK = (64, 32, 16)  # a tensor core's smallest block, and what a multiprocessor's registers hold
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Measured:
    """What a device reaches.

    Attributes:
        device: Its name.
        read_gb_s: 10^9 bytes per second of weights from memory.
        cached_gb_s: 10^9 bytes per second of weights that stay in caches.
        gmac_s: Dtype → 10^9 multiply-accumulates per second in a large product.
        element_gop_s: 10^9 element operations per second, in the operations that `npu_model` counts.
        launch_us: Microseconds that a kernel call takes besides its work.
        product_us: Microseconds that a product takes besides that.
        blocks: The probes, and the seconds that a block of each takes.
    """

    device: str
    read_gb_s: float
    cached_gb_s: float
    gmac_s: dict[str, float]
    element_gop_s: float
    launch_us: float
    product_us: float
    blocks: tuple[tuple[Probe, float], ...]


def measure(device: Device, report: Callable[[str], object] = lambda text: None) -> Measured:
    """Measure a device with its own kernels; a minute or two.

    Args:
        report: Is told what is measured next.
    """
    size = SMALL_MATRIX_SIZE if device.name == "cpu" else MATRIX_SIZE
    rates = {}
    for dtype in ("float32", "float16", "bfloat16"):
        report(f"multiplying {dtype} matrices")
        try:
            rates[dtype] = size**3 / _seconds(_linear(size, size, size, dtype, device), device) / 1e9
        except ConstraintError:  # a device that lacks the dtype
            continue
    report("reading memory")
    read = _read_rate(READ_BYTES, device)
    report("reading caches")
    cached = _read_rate(CACHED_BYTES, device)
    report("launching kernels")
    alone, between, small = (block_seconds(probe, device) for probe in (LAUNCH, BETWEEN_PRODUCTS, SMALL_PRODUCTS))
    launch = max(alone, between - small / 2)
    report("computing elements")
    program = _chain(16, (ELEMENTS // 256, 256), device)
    each = _seconds(program, device)
    operations = sum(call.flops for call in program.kernels)
    blocks = []
    for probe in probes(MOST_MACS if device.name == "cpu" else MOST_MACS_OF_A_GPU):
        report(f"{probe.kind} calls on {'×'.join(map(str, probe.shape))}")
        blocks.append((probe, block_seconds(probe, device)))
    costs = 1e6 * launch, 1e6 * max(0.0, small / 2 - launch)
    return Measured(device.name, read / 1e9, cached / 1e9, rates, operations / each / 1e9, *costs, tuple(blocks))


def block_seconds(probe: Probe, device: Device) -> float:
    """The seconds of a block among many: the difference of two programs, so that what a run costs is left out."""
    dtype, few, many = _block_dtype(device), 2, 6
    long = _probe_seconds(probe.ir(many), dtype, device)
    if long < SHORT:
        few, many = 16, 64
        long = _probe_seconds(probe.ir(many), dtype, device)
    return max((long - _probe_seconds(probe.ir(few), dtype, device)) / (many - few), 1e-9)


def _probe_seconds(ir: dict[str, Any], dtype: str, device: Device) -> float:
    program = compile(ir, device.backend.target, compute_dtype=dtype)
    return _seconds(program, device, BLOCK_ROUNDS, BLOCK_SECONDS)


def _block_dtype(device: Device) -> str:
    return "float32" if device.name == "cpu" else "float16"


def shape_of(device: Device, arrays: int | None = None, sram: int | None = None) -> Shape:
    """A device's shape; `arrays` and `sram` where the caller knows better, or where nothing here tells.

    Raises:
        InputError: `arrays` or `sram` is needed.
    """
    is_cpu = device.name == "cpu"
    if arrays is None and is_cpu:
        arrays = usable_threads()
    if sram is None and is_cpu and arrays is not None:
        sram = cache_share(_CACHES, arrays)
    if arrays is None:
        raise InputError(f"give the number of multiprocessors of {device.name} (--arrays)")
    if sram is None:
        raise InputError(f"nothing here tells the cache size of {device.name}: give it in bytes (--sram)")
    return Shape(arrays, *(CPU_BLOCK if is_cpu else GPU_BLOCK), sram)


def cache_share(folder: Path, cores: int) -> int | None:
    """Bytes of the largest cache that so many of the cores which share it get; None where Linux does not tell."""
    found = []
    for entry in folder.glob("index*"):
        try:
            size, shared = (entry / "size").read_text().strip(), (entry / "shared_cpu_list").read_text().strip()
        except OSError:
            continue
        bounds = [part.split("-") for part in shared.split(",")]
        sharing = sum(int(part[-1]) - int(part[0]) + 1 for part in bounds)
        whole = int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}[size[-1]]
        found.append((whole, whole * min(cores, sharing) // sharing))
    return max(found)[1] if found else None


def chip_text(measured: Measured, shape: Shape, name: str) -> str:
    """The chip file (TOML)."""
    described = _described(measured, shape, name)
    dtype = "float32" if measured.device == "cpu" else "float16"
    table = factors(parse_chip(described, name), measured.blocks, dtype)
    lines = [f"{kind} = [\n{''.join(map(_row, rows))}]\n" for kind, rows in table.items()]
    return described + ("\n[measured]\n" + "".join(lines) if lines else "")


def _row(row: Sequence[float]) -> str:
    return f"    [{', '.join([*(str(round(size)) for size in row[:-1]), _digits(row[-1], 3)])}],\n"


def factors(
    chip: Chip, blocks: Sequence[tuple[Probe, float]], dtype: str
) -> Mapping[str, tuple[tuple[float, ...], ...]]:
    """By what factor computing takes longer than a chip's description says, for each call of the probes' kinds.

    The other calls of a block are simulated with the factors found before.

    Args:
        blocks: Probes, and the measured seconds of a block of each.

    Returns:
        What `Chip.measured` holds.
    """
    found: dict[str, dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for probe, seconds in blocks:
        program = compile(probe.ir(2), compute_dtype=dtype)
        works = [call_work(call).operations for call in program.kernels]
        block = range(len(works) // 2, len(works))
        of_kind = [index for index in block if works[index].kind == probe.kind]
        of_kind = [index for index in of_kind if works[index].sizes not in found[probe.kind]] or of_kind
        shown = {works[index].sizes for index in of_kind}
        table = _table({**found, probe.kind: {**found[probe.kind], **dict.fromkeys(shown, (1.0,))}})
        result = simulate(program, replace(chip, measured=table))
        predicted = sum(chip.seconds(result.calls[index].cycles) for index in block)
        computing = sum(
            chip.seconds(result.calls[index].array_cycles + result.calls[index].vector_cycles) for index in of_kind
        )
        others = sum(chip.seconds(result.calls[index].cycles) for index in block if index not in of_kind)
        launches = 1e-6 * sum(
            chip.launch.cost_us + chip.launch.product_us * (result.calls[index].array_cycles > 0) for index in of_kind
        )
        if abs(seconds / predicted - 1) < _WITHIN or (seconds < predicted and computing < _HIDDEN * predicted):
            factor = 1.0
        elif seconds > predicted:  # all the time is computing, which hides the transfers
            factor = max(1.0, (seconds - others - launches) / computing)
        else:
            factor = max(_LEAST, (computing + seconds - predicted) / computing)
        for sizes in shown:
            found[probe.kind][sizes].append(factor)
    return _table(found)


def _table(
    found: Mapping[str, Mapping[tuple[int, ...], Sequence[float]]],
) -> Mapping[str, tuple[tuple[float, ...], ...]]:
    """Each kind's rows of sizes and factor, the geometric mean of those found."""
    return {
        kind: tuple((*map(float, sizes), math.prod(each) ** (1 / len(each))) for sizes, each in rows.items())
        for kind, rows in found.items()
    }


def _described(measured: Measured, shape: Shape, name: str) -> str:
    """The chip file without measured calls."""
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
size = {shape.sram}
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
    """So many digits, never without a decimal point, as TOML wants it of a float."""
    return repr(float(f"{value:.{digits}g}"))


def _read_rate(size: int, device: Device) -> float:
    """Bytes per second of a weight that is multiplied with one row."""
    k = 2048
    return size / _seconds(_linear(1, size // 4 // k, k, "float32", device), device)


def _seconds(
    program: CompiledProgram, device: Device, rounds: int | None = None, round_seconds: float | None = None
) -> float:
    """The least seconds of a run, of several rounds."""
    pattern = 0.05 * np.random.default_rng(0).standard_normal(_PATTERN, np.float32)
    shapes = {key: shape for spec in program.weight_specs.values() for key, shape in spec.source_shapes.items()}
    state = {key: np.resize(pattern, shape) for key, shape in shapes.items()}
    executor, weights = Executor(program, device), load_weights(state, program, device)
    inputs = {
        spec.name: NPUBuffer.from_numpy(np.resize(pattern, spec.shape), device, spec) for spec in program.input_specs
    }

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            executor.run(inputs, weights)
        device.backend.synchronize()
        return time.perf_counter() - start

    run(2)
    times = max(1, int((round_seconds or ROUND_SECONDS) / max(run(1), 1e-6)))
    return min(run(times) for _ in range(rounds or ROUNDS)) / times


def _linear(m: int, n: int, k: int, dtype: str, device: Device) -> CompiledProgram:
    x, weight, y = ("x", [m, k]), ("p_weight", [n, k]), ("y", [m, n])
    node = _node("y", "aten.linear.default", [x, weight], y)
    return _compile([x], {"p_weight": ("weight", [n, k])}, [node], dtype, device)


def _chain(count: int, shape: tuple[int, int], device: Device) -> CompiledProgram:
    """Softmax after softmax: calls that wait for each other and that no fusion joins."""
    tensors = [("x", list(shape))] + [(f"y{index}", list(shape)) for index in range(count)]
    nodes = [
        _node(after[0], "aten.softmax.int", [before], after, dim=-1)
        for before, after in zip(tensors, tensors[1:], strict=False)
    ]
    return _compile([tensors[0]], {}, nodes, "float32", device)


def _node(
    name: str, op: str, inputs: list[tuple[str, list[int]]], output: tuple[str, list[int]], **attrs: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "op_type": op,
        "inputs": [_meta(*tensor) for tensor in inputs],
        "outputs": [_bare(*output)],
        "attrs": attrs,
    }


def _bare(name: str, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "shape": shape, "dtype": "float32"}


def _meta(name: str, shape: list[int]) -> dict[str, Any]:
    producer = None if name.startswith("p_") else name
    made = {} if producer is None else {"producer_node": producer, "producer_output_idx": 0}
    return {**_bare(name, shape), **made}


def _compile(
    inputs: list[tuple[str, list[int]]],
    weights: dict[str, tuple[str, list[int]]],
    nodes: list[dict[str, Any]],
    dtype: str,
    device: Device,
) -> CompiledProgram:
    last = nodes[-1]["outputs"][0]
    ir = {
        "model_name": "calibration",
        "graph_inputs": [_bare(*tensor) for tensor in inputs],
        "graph_outputs": [_meta(last["name"], last["shape"])],
        "weights": [_bare(key, shape) for key, shape in weights.values()],
        "weight_name_mapping": {name: key for name, (key, _) in weights.items()},
        "constants": {},
        "nodes": nodes,
    }
    return compile(ir, device.backend.target, compute_dtype=dtype)
