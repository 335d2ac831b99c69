"""Description of the machine of a CPU benchmark: CPU, instruction sets, measured peak rates, versions."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("npu-simulation", "torch", "onnxruntime", "openvino", "xllamacpp", "transformers")
LEVELS = {  # the most capable first; a level has all of its flags
    "amx": ("amx_tile", "amx_bf16"),
    "avx512_bf16": ("avx512_bf16",),
    "avx512f": ("avx512f", "avx512bw", "avx512vl"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon, bf16": ("asimd", "bf16"),
    "neon, dotprod": ("asimd", "asimddp"),
    "neon": ("asimd",),
}


@dataclass(frozen=True)
class Floor:
    """A lower bound of a time.

    Attributes:
        seconds: The bound.
        says: Its derivation in words.
    """

    seconds: float
    says: str


@dataclass(frozen=True)
class Rates:
    """Measured peak rates.

    Attributes:
        bandwidth: Bytes per second that PyTorch's sum reads.
        matrix: FLOP/s of PyTorch's float32 matrix product.
    """

    bandwidth: float
    matrix: float

    def reading(self, size: int) -> Floor:
        """Return the lower bound for a step that must read `size` bytes of weights."""
        return Floor(size / self.bandwidth, f"{size / 1e6:.0f} MB of weights at {self.bandwidth / 1e9:.1f} GB/s")

    def multiplying(self, flops: int) -> Floor:
        """Return the lower bound for a step that must do `flops` operations."""
        return Floor(flops / self.matrix, f"{flops / 1e9:.1f} GFLOP at {self.matrix / 1e9:.0f} GFLOP/s")


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_threads(threads: int) -> None:
    """Restrict this process, and those that it starts, to the first `threads` of the cores that it may use.

    Raises:
        ValueError: there are fewer cores, or this system cannot restrict a process to some of them.
    """
    cores = usable_cores()
    if not 0 < threads <= cores:
        raise ValueError(f"cannot use {threads} threads: this process may use {cores} cores")
    if threads < cores:
        if not hasattr(os, "sched_setaffinity"):
            raise ValueError("this system cannot restrict a process to some cores; leave --threads out")
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def level(flags: set[str]) -> str:
    """Return the name of the highest instruction-set level that a CPU with these flags has."""
    return next((name for name, needed in LEVELS.items() if flags.issuperset(needed)), "baseline")


def has_bfloat16_products() -> bool:
    """Whether this CPU has instructions for products of bfloat16 numbers."""
    return "bf16" in _level_here() or _level_here() == "amx"


def _level_here() -> str:
    facts = _cpu_facts()
    return level(set((facts.get("flags") or facts.get("Features") or "").split()))


def describe(threads: int, rates: Rates) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "level": _level_here(),
        "threads": threads,
        "read_gb_per_s": rates.bandwidth / 1e9,
        "float32_gflop_per_s": rates.matrix / 1e9,
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "date": date.today().isoformat(),
    }


def cpu_name() -> str:
    """Return the name of the CPU."""
    return _cpu_facts().get("model name") or platform.processor() or platform.machine()


def _cpu_facts() -> dict[str, str]:
    """Return the fields of the first CPU in /proc/cpuinfo; empty if there is no such file.

    The CPU's family and model are added to its name, which often says little.
    """
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" in fields and "cpu family" in fields:
        fields["model name"] += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return fields


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
