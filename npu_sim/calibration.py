"""A chip file for `npu_model` from what a device reaches, measured with its own kernels (`npu-sim calibrate`).

A measurement is a small program compiled for the device, run until the shortest runs agree: disturbances only slow
runs. Rates and costs come first. Then blocks of calls
(`npu_sim.probes`) are measured and simulated with these rates, and the factors between them are written down too.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import numpy as np

from npu_compiler import CompiledProgram, CompileOptions, compile
from npu_compiler.errors import ConstraintError, InputError
from npu_model.chip import Chip, parse_chip
from npu_model.measured import in_dtype
from npu_model.simulation import simulate
from npu_model.work import call_work
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from npu_runtime.cpu.native.threads import usable_threads
from npu_sim.probes import BETWEEN_PRODUCTS, LAUNCH, SMALL_PRODUCTS, Probe, probes

MATRIX_SIZE = 2048  # rows, columns and depth of the product that shows the matrix rate of a GPU
SMALL_MATRIX_SIZE = 1024  # the same of a CPU
READ_BYTES = 256 << 20  # of a weight that no cache holds
# Of weights that caches may hold. Other processes, and other virtual machines, take a part of the cache that no system
# tells.
CACHED_BYTES = tuple(part << power for power in range(21, 27) for part in (2, 3))
ELEMENTS = 1 << 16  # of an operand that caches hold
SAMPLE_SECONDS, SAMPLE_SECONDS_OF_A_GPU = 2e-4, 2e-2  # least length of what is timed: a GPU's host is ahead of it
FEWEST_SAMPLES, SOME_SECONDS, MOST_SECONDS = 5, 0.02, 0.15  # of each program
_AGREEMENT = 1.05  # the lower quartile of enough runs over the shortest
PASSES = 2  # over all blocks, since what disturbs one may go on for seconds
MOST_MACS, MOST_MACS_OF_A_GPU = 6 * 10**8, 10**11  # of a block
RATES = ("float32", "float16", "bfloat16")  # of large products
OF_TEXT = {"product", "attention", "norm", "elementwise"}  # kinds of calls that language models consist of
SHORT = 1e-4  # seconds; in a run this short a device may wait for the host
FEW_BLOCKS, MANY_BLOCKS = (2, 6), (16, 64)  # numbers of blocks in the two programs that are compared
_PATTERN = 1 << 20  # random numbers, which larger operands repeat
_WITHIN = 0.03  # a block that the description predicts so well needs no factor
_LEAST = 0.1  # factor
_HIDDEN = 0.1  # computing that is a smaller share of a block says nothing of its own rate
CLOCK_GHZ = 1.0  # of the chip that is written: its rates are per nanosecond


@dataclass(frozen=True)
class Shape:
    """Facts about a device that no measurement shows, as a chip file states them.

    Attributes:
        arrays: Cores or multiprocessors.
        rows, columns: Of the block of results in the inner loop of a product.
        held_folds: Number of such blocks that one pass over an operand in cache serves.
        sram: Bytes of cache; None for what was measured.
    """

    arrays: int
    rows: int
    columns: int
    held_folds: int
    sram: int | None


CPU_BLOCK = (6, 16, 64)  # gemm.h: 6 rows × 2 vectors of 8, and what a first-level cache holds
GPU_BLOCK = (64, 32, 16)  # a tensor core's smallest block, and what a multiprocessor's registers hold


@dataclass(frozen=True)
class Measured:
    """The measured rates of a device.

    Attributes:
        device: Name of the device.
        read_gb_s: 10^9 bytes per second of weights from memory.
        cached_gb_s: 10^9 bytes per second of weights that stay in caches.
        cache_bytes: The most that stays there.
        gmac_s: Dtype → 10^9 multiply-accumulates per second in a large product.
        element_gop_s: 10^9 element operations per second, in the operations that `npu_model` counts.
        launch_us: Microseconds that a kernel call takes besides its work.
        product_us: Microseconds that a product takes besides that.
        blocks: Blocks of the probes, those of the device's first dtype first.
    """

    device: str
    read_gb_s: float
    cached_gb_s: float
    cache_bytes: int
    gmac_s: dict[str, float]
    element_gop_s: float
    launch_us: float
    product_us: float
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Block:
    """The measured time of a block of a probe in a dtype, in seconds."""

    probe: Probe
    dtype: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.probe.kind, "shape": self.probe.shape, "dtype": self.dtype, "seconds": self.seconds}


def measure(device: Device, report: Callable[[int, int], object] = lambda done, total: None) -> Measured:
    """Measure a device with its own kernels; a minute or two.

    Args:
        report: Called with (measurements done, measurements).
    """
    is_cpu = device.name == "cpu"
    dtype, size = ("float32", SMALL_MATRIX_SIZE) if is_cpu else ("float16", MATRIX_SIZE)
    wanted = _measured_probes(device)
    done, total = itertools.count(1), 4 + len(RATES) + PASSES * len(wanted)
    rates = {}
    for each in RATES:
        with contextlib.suppress(ConstraintError):  # the device lacks the dtype
            rates[each] = size**3 / _least(_linear(size, size, size, each, device), device) / 1e9
        report(next(done), total)
    read = _read_rate(READ_BYTES, device)
    report(next(done), total)
    cached = {size: _read_rate(size, device) for size in CACHED_BYTES}
    report(next(done), total)
    alone, normed, small = (block_seconds(probe, dtype, device) for probe in (LAUNCH, BETWEEN_PRODUCTS, SMALL_PRODUCTS))
    launch = max(alone, normed - small / 2)
    report(next(done), total)
    program = _chain(16, (ELEMENTS // 256, 256), device)
    operations = sum(call.flops for call in program.kernels) / _least(program, device)
    report(next(done), total)
    passes: list[list[Times]] = [[] for _ in range(PASSES)]
    for times in passes:
        for probe, each in wanted:
            times.append(Times.of(probe, each, device))
            report(next(done), total)
    least = [reduce(Times.least, times) for times in zip(*passes, strict=True)]
    blocks = [Block(*one, found.seconds) for one, found in zip(wanted, least, strict=True)]
    costs = 1e6 * launch, 1e6 * max(0.0, small / 2 - launch)
    most = max(cached.values())
    kept = max((size for size, rate in cached.items() if rate >= math.sqrt(read * most)), default=min(cached))
    return Measured(device.name, read / 1e9, most / 1e9, kept, rates, operations / 1e9, *costs, tuple(blocks))


def _measured_probes(device: Device) -> list[tuple[Probe, str]]:
    """The probes, and the dtype that each is computed in: on a CPU, what language models consist of in a second one."""
    if device.name != "cpu":
        return [(probe, "float16") for probe in probes(MOST_MACS_OF_A_GPU)]
    found = list(probes(MOST_MACS))
    return [(probe, "float32") for probe in found] + [(probe, "bfloat16") for probe in found if probe.kind in OF_TEXT]


def block_seconds(probe: Probe, dtype: str, device: Device) -> float:
    """The seconds of a block among many."""
    return Times.of(probe, dtype, device).seconds


@dataclass(frozen=True)
class Times:
    """Seconds of two programs, of few blocks and of many; their difference leaves out what a run costs."""

    few: int
    many: int
    short: float
    long: float

    @classmethod
    def of(cls, probe: Probe, dtype: str, device: Device) -> Times:
        """Measured now."""
        for few, many in (FEW_BLOCKS, MANY_BLOCKS):
            programs = [
                compile(probe.ir(n), device.backend.target, CompileOptions(compute_dtype=dtype)) for n in (few, many)
            ]
            short, long = map(_typical, _samples(programs, device))
            if long >= SHORT:
                break
        return cls(few, many, short, long)

    @property
    def seconds(self) -> float:
        """Seconds per block."""
        return max((self.long - self.short) / (self.many - self.few), 1e-9)

    def least(self, other: Times) -> Times:
        """The lesser time of each program, of two measurements: disturbances only slow runs."""
        if self.many != other.many:
            return max(self, other, key=lambda times: times.many)
        return replace(self, short=min(self.short, other.short), long=min(self.long, other.long))


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
    """The chip file (TOML)."""
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


def factors(chip: Chip, blocks: Sequence[Block]) -> Mapping[str, tuple[tuple[float, ...], ...]]:
    """Factors by which computing takes longer than a chip's description says, for each call of the probes' kinds.

    The other calls of a block are simulated with the factors found before.

    Args:
        blocks: Measured blocks; those of the first dtype stand for the dtypes that have none.

    Returns:
        What `Chip.measured` holds.
    """
    found: dict[str, dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in blocks:
        kind = each.probe.kind
        known = found[kind if each.dtype == blocks[0].dtype else in_dtype(kind, each.dtype)]
        blocks_run = FEW_BLOCKS[1]
        program = compile(each.probe.ir(blocks_run), options=CompileOptions(compute_dtype=each.dtype))
        works = [call_work(call).operations for call in program.kernels]
        block = range(len(works) - len(works) // blocks_run, len(works))
        of_kind = [index for index in block if works[index].kind == kind]
        of_kind = [index for index in of_kind if works[index].sizes not in known] or of_kind
        shown = {works[index].sizes for index in of_kind}
        before = {sizes: known.pop(sizes, []) for sizes in shown}
        known.update({sizes: [1.0] for sizes in shown})
        result = simulate(program, replace(chip, measured=_table(found)))
        predicted = sum(chip.seconds(result.calls[index].cycles) for index in block)
        computing = sum(
            chip.seconds(result.calls[index].array_cycles + result.calls[index].vector_cycles) for index in of_kind
        )
        others = sum(chip.seconds(result.calls[index].cycles) for index in block if index not in of_kind)
        launches = 1e-6 * sum(
            chip.launch.cost_us + chip.launch.product_us * (result.calls[index].array_cycles > 0) for index in of_kind
        )
        if abs(each.seconds / predicted - 1) < _WITHIN or (
            each.seconds < predicted and computing < _HIDDEN * predicted
        ):
            factor = 1.0
        elif each.seconds > predicted:  # all the time is computing, which hides the transfers
            factor = max(1.0, (each.seconds - others - launches) / computing)
        else:
            factor = max(_LEAST, (computing + each.seconds - predicted) / computing)
        known.update({sizes: [*before[sizes], factor] for sizes in shown})
    return _table(found)


def _table(
    found: Mapping[str, Mapping[tuple[int, ...], Sequence[float]]],
) -> Mapping[str, tuple[tuple[float, ...], ...]]:
    """Each kind's rows of sizes and factor, the geometric mean of those found."""
    return {
        kind: tuple((*map(float, sizes), math.prod(each) ** (1 / len(each))) for sizes, each in rows.items())
        for kind, rows in found.items()
        if rows
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
    """A number with so many digits and a decimal point, as TOML wants it of a float."""
    return repr(float(f"{value:.{digits}g}"))


def _read_rate(size: int, device: Device) -> float:
    """Bytes per second of a weight that is multiplied with one row."""
    k = 2048
    return size / _least(_linear(1, size // 4 // k, k, "float32", device), device)


def _least(program: CompiledProgram, device: Device) -> float:
    """The least seconds of a run, for the rates that nothing may exceed."""
    return min(_samples([program], device)[0])


def _samples(programs: Sequence[CompiledProgram], device: Device) -> list[list[float]]:
    """The seconds of runs of each program, taken in turns, the shortest first.

    Disturbances only slow runs, so runs go on until a quarter of them is about as fast as the fastest.
    """
    runs = [_runner(program, device) for program in programs]
    sample = SAMPLE_SECONDS if device.name == "cpu" else SAMPLE_SECONDS_OF_A_GPU
    times = []
    for run in runs:
        run(2)
        times.append(max(1, math.ceil(sample / max(run(1), 1e-6))))
    samples: list[list[float]] = [[] for _ in runs]
    begin = time.perf_counter()

    def enough() -> bool:
        each = (time.perf_counter() - begin) / len(runs)
        if len(samples[0]) < FEWEST_SAMPLES or each < SOME_SECONDS:
            return False
        return each > MOST_SECONDS or all(_typical(seconds) < _AGREEMENT * seconds[0] for seconds in samples)

    while not enough():
        for run, count, seconds in zip(runs, times, samples, strict=True):
            bisect.insort(seconds, run(count) / count)
    return samples


def _typical(ordered: Sequence[float]) -> float:
    """The lower quartile: what a run takes that little disturbs."""
    return ordered[len(ordered) // 4]


@cache
def _pattern(size: int) -> np.ndarray:
    pattern = 0.05 * np.random.default_rng(0).standard_normal(min(size, _PATTERN), np.float32)
    return np.resize(pattern, size)


def _random(*shape: int) -> np.ndarray:
    """Random numbers; arrays of similar sizes share their memory."""
    size = math.prod(shape)
    return _pattern(1 << (size - 1).bit_length())[:size].reshape(shape)


def _runner(program: CompiledProgram, device: Device) -> Callable[[int], float]:
    """Runs a program with random weights so many times; the seconds."""
    shapes = {key: shape for spec in program.weight_specs.values() for key, shape in spec.source_shapes.items()}
    state = {key: _random(*shape) for key, shape in shapes.items()}
    executor, weights = Executor(program, device), load_weights(state, program, device)
    inputs = {spec.name: NPUBuffer.from_numpy(_random(*spec.shape), device, spec) for spec in program.input_specs}

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            executor.run(inputs, weights)
        device.backend.synchronize()
        return time.perf_counter() - start

    return run


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
    return compile(ir, device.backend.target, CompileOptions(compute_dtype=dtype))
