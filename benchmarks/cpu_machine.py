"""What a CPU benchmark says about the machine: the CPU, its instruction sets, its measured peak rates, all versions."""

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
class Rates:
    """Measured peak rates: bytes read per second by PyTorch's sum, FLOP/s of its float32 matrix product."""

    bandwidth: float
    matrix: float


def limit_threads(threads: int) -> None:
    """Restrict this process, and those that it starts, to the first `threads` of the cores that it may use.

    Raises:
        ValueError: there are fewer cores.
    """
    usable = sorted(os.sched_getaffinity(0))
    if not 0 < threads <= len(usable):
        raise ValueError(f"cannot use {threads} threads: this process may use {len(usable)} cores")
    os.sched_setaffinity(0, usable[:threads])


def measure_rates(threads: int) -> Rates:
    import torch

    from benchmarks.timing import matrix_rate, read_bandwidth

    torch.set_num_threads(threads)
    return Rates(read_bandwidth(), matrix_rate())


def level(flags: set[str]) -> str:
    """The name of the highest instruction-set level that a CPU with these flags has."""
    return next((name for name, needed in LEVELS.items() if flags.issuperset(needed)), "baseline")


def describe(threads: int, rates: Rates) -> dict[str, Any]:
    facts = _cpu_facts()
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    return {
        "cpu": facts.get("model name") or platform.processor() or platform.machine(),
        "level": level(flags),
        "threads": threads,
        "read_gb_per_s": rates.bandwidth / 1e9,
        "float32_gflop_per_s": rates.matrix / 1e9,
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "date": date.today().isoformat(),
    }


def _cpu_facts() -> dict[str, str]:
    """The fields of the first CPU in /proc/cpuinfo, with its family and model where the name says little."""
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
