"""Rates, costs and times of blocks that a device reaches."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from npu_compiler import CompiledProgram, CompileOptions, compile
from npu_compiler.errors import ConstraintError
from npu_runtime import Device
from npu_sim.calibration.probes import (
    BETWEEN_PRODUCTS,
    LAUNCH,
    SMALL_PRODUCTS,
    Probe,
    probes,
    product_probe,
    softmax_probe,
)
from npu_sim.calibration.timing import least_seconds, samples_of, typical

MATRIX_SIZE = 2048  # rows, columns and depth of the product that shows the matrix rate of a GPU
SMALL_MATRIX_SIZE = 1024  # the same of a CPU
READ_BYTES = 256 << 20  # of a weight that no cache holds
# Of weights that caches may hold. Other processes, and other virtual machines, take a part of the cache that no system
# tells.
CACHED_BYTES = tuple(part << power for power in range(21, 27) for part in (2, 3))
ELEMENTS = 1 << 16  # of an operand that caches hold
PASSES = 2  # over all blocks, since what disturbs one may go on for seconds
MOST_MACS, MOST_MACS_OF_A_GPU = 6 * 10**8, 10**11  # of a block
RATES = ("float32", "float16", "bfloat16")  # of large products
OF_TEXT = {"product", "attention", "norm", "elementwise"}  # kinds of calls that language models consist of
SHORT = 1e-4  # seconds; in a run this short a device may wait for the host
FEW_BLOCKS, MANY_BLOCKS = (2, 6), (16, 64)  # numbers of blocks in the two programs that are compared


@dataclass(frozen=True)
class Measured:
    """Rates and costs that were measured on a device.

    Attributes:
        device: Name of the device.
        read_gb_s: 10^9 bytes per second of weights from memory.
        cached_gb_s: 10^9 bytes per second of weights that stay in caches.
        cache_bytes: Largest size that stays there.
        gmac_s: Dtype → 10^9 multiply-accumulates per second in a large product.
        element_gop_s: 10^9 element operations per second, in the operations that `npu_model` counts.
        launch_us: Microseconds that a kernel call takes besides its work.
        product_us: Further microseconds of a product.
        blocks: Times of the probes' blocks, those in the device's first dtype first.
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
    """Seconds of a probe's block, computed in a dtype."""

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
    rates, square = {}, product_probe(size, size, size)
    for each in RATES:
        with contextlib.suppress(ConstraintError):  # the device lacks the dtype
            rates[each] = size**3 / least_seconds(_program(square, each, device), device) / 1e9
        report(next(done), total)
    read = _read_rate(READ_BYTES, device)
    report(next(done), total)
    cached = {size: _read_rate(size, device) for size in CACHED_BYTES}
    report(next(done), total)
    alone, normed, small = (block_seconds(probe, dtype, device) for probe in (LAUNCH, BETWEEN_PRODUCTS, SMALL_PRODUCTS))
    launch = max(alone, normed - small / 2)
    report(next(done), total)
    program = _program(softmax_probe((ELEMENTS // 256, 256)), "float32", device, 16)
    operations = sum(call.flops for call in program.kernels) / least_seconds(program, device)
    report(next(done), total)
    passes: list[list[Times]] = [[] for _ in range(PASSES)]
    for times in passes:
        for probe, each in wanted:
            times.append(Times.of(probe, each, device))
            report(next(done), total)
    least = [reduce(Times.least, times) for times in zip(*passes, strict=True)]
    blocks = [Block(*one, block.seconds) for one, block in zip(wanted, least, strict=True)]
    costs = 1e6 * launch, 1e6 * max(0.0, small / 2 - launch)
    most = max(cached.values())
    kept = max((size for size, rate in cached.items() if rate >= math.sqrt(read * most)), default=min(cached))
    return Measured(device.name, read / 1e9, most / 1e9, kept, rates, operations / 1e9, *costs, tuple(blocks))


def _measured_probes(device: Device) -> list[tuple[Probe, str]]:
    """The probes, and the dtype that each is computed in: on a CPU, what language models consist of in a second one."""
    if device.name != "cpu":
        return [(probe, "float16") for probe in probes(MOST_MACS_OF_A_GPU)]
    every = list(probes(MOST_MACS))
    return [(probe, "float32") for probe in every] + [(probe, "bfloat16") for probe in every if probe.kind in OF_TEXT]


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
        """Measure a probe on a device."""
        for few, many in (FEW_BLOCKS, MANY_BLOCKS):
            programs = [_program(probe, dtype, device, count) for count in (few, many)]
            short, long = map(typical, samples_of(programs, device))
            if long >= SHORT:
                break
        return cls(few, many, short, long)

    @property
    def seconds(self) -> float:
        """Seconds of one block."""
        return max((self.long - self.short) / (self.many - self.few), 1e-9)

    def least(self, other: Times) -> Times:
        """The lesser time of each program, of two measurements: disturbances only slow runs."""
        if self.many != other.many:
            return max(self, other, key=lambda times: times.many)
        return replace(self, short=min(self.short, other.short), long=min(self.long, other.long))


def _read_rate(size: int, device: Device) -> float:
    """Bytes per second of a weight that is multiplied with one row."""
    k = 2048
    return size / least_seconds(_program(product_probe(1, size // 4 // k, k), "float32", device), device)


def _program(probe: Probe, dtype: str, device: Device, count: int = 1) -> CompiledProgram:
    """A program of `count` blocks of a probe, computed in a dtype."""
    return compile(probe.ir(count), device.backend.target, CompileOptions(compute_dtype=dtype))
