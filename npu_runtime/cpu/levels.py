"""CPU levels: the instruction sets that native kernels can be compiled for, and those that this machine supports.

The levels of x86-64 are those of its psABI, with four more for products of bytes and of bfloat16. The best one is used,
unless `NPU_SIM_CPU_LEVEL` (the command's `--cpu-level`) names another when the kernels are first needed.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from npu_compiler.errors import DeviceError, InputError

VARIABLE = "NPU_SIM_CPU_LEVEL"
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Level:
    """An instruction set to compile for.

    Attributes:
        name: Name in `NPU_SIM_CPU_LEVEL` and in reports.
        machine: The architecture: "x86_64" or "aarch64"; empty for any.
        flags: The compiler's options.
        features: Features that the CPU must have, by their names in Linux's /proc/cpuinfo.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]


def _ascending(machine: str, *levels: tuple[str, str, str]) -> tuple[Level, ...]:
    """Levels from (name, compiler options, features that the level before lacks)."""
    features: frozenset[str] = frozenset()
    result = []
    for name, flags, added in levels:
        features |= frozenset(added.split())
        result.append(Level(name, machine, tuple(flags.split()), features))
    return tuple(result)


_X86 = _ascending(
    "x86_64",
    ("x86-64-v2", "-march=x86-64-v2", "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3"),
    ("x86-64-v3", "-march=x86-64-v3", "abm avx avx2 bmi1 bmi2 f16c fma movbe"),
    ("x86-64-v4", "-march=x86-64-v4", "avx512bw avx512cd avx512dq avx512f avx512vl"),
    ("avx512-vnni", "-march=x86-64-v4 -mavx512vnni", "avx512_vnni"),
    ("avx512-bf16", "-march=x86-64-v4 -mavx512vnni -mavx512bf16", "avx512_bf16"),
    (
        "amx",
        "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8",
        "amx_bf16 amx_int8 amx_tile",
    ),
)
# Of CPUs without AVX-512 that multiply bytes in vectors of AVX2.
_AVX_VNNI = Level("avx-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _X86[1].features | {"avx_vnni"})
# In ascending order within an architecture.
LEVELS = (
    *_X86[:2],
    _AVX_VNNI,
    *_X86[2:],
    *_ascending(
        "aarch64",
        ("aarch64", "-march=armv8-a", "asimd"),
        ("aarch64-bf16", "-march=armv8.2-a+dotprod+i8mm+bf16+fp16", "asimddp asimdhp bf16 i8mm"),
    ),
)
# What a compiler assumes without options: for CPUs that have none of the levels.
PORTABLE = Level("portable", "", (), frozenset())

# macOS has no /proc/cpuinfo; these are the names under which sysctl lists the same features.
_SYSCTL_FEATURES = {
    "hw.optional.AdvSIMD": "asimd",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
}


@dataclass(frozen=True)
class CPU:
    """A machine's processor: architecture, model and features, with Linux's names."""

    machine: str
    model: str
    features: frozenset[str]

    def levels(self) -> tuple[Level, ...]:
        """The levels that the CPU supports, in ascending order; at least `PORTABLE`."""
        return PORTABLE, *(x for x in LEVELS if x.machine == self.machine and x.features <= self.features)


def find_level(name: str) -> Level:
    """The level of that name; `v3` is short for `x86-64-v3`. Raises `InputError` if there is none."""
    for level in LEVELS:
        if name in (level.name, level.name.removeprefix("x86-64-")):
            return level
    raise InputError(f"unknown CPU level '{name}'; choose one of {', '.join(level.name for level in LEVELS)}")


def detected_level() -> Level:
    """The highest level that this machine supports."""
    return this_cpu().levels()[-1]


def forced_level() -> Level | None:
    """The level that `NPU_SIM_CPU_LEVEL` names; None if it is not set.

    Raises:
        InputError: there is no such level.
        DeviceError: this machine does not support it.
    """
    name = os.environ.get(VARIABLE)
    return forced_on(this_cpu(), name) if name else None


def forced_on(cpu: CPU, name: str) -> Level:
    """The level `name`, checked against what that CPU supports. Errors as in `forced_level`."""
    level, runs = find_level(name), cpu.levels()
    if level in runs:
        return level
    if level.machine != cpu.machine:
        reason = f"it is a {cpu.machine} CPU"
    else:
        reason = f"it lacks {', '.join(sorted(level.features - cpu.features))}"
    usable = ", ".join(x.name for x in runs[1:]) or "none of the levels"
    raise DeviceError(f"this machine cannot run CPU level {level.name}: {reason}; it runs {usable}")


def cpu_identity() -> str:
    """The CPU's model and the level in use, as a key of measurements on this machine: "AMD EPYC, x86-64-v3".

    Errors as in `forced_level`.
    """
    return f"{this_cpu().model}, {(forced_level() or detected_level()).name}"


def this_cpu() -> CPU:
    """This machine's CPU."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if _CPUINFO.exists():
        return from_cpuinfo(machine, _CPUINFO.read_text(errors="replace"))
    if platform.system() == "Darwin":
        settings = _run("sysctl", "hw.optional")
        return from_sysctl(machine, settings, _run("sysctl", "-n", "machdep.cpu.brand_string").strip())
    return CPU(machine, platform.processor() or machine, frozenset())


def from_cpuinfo(machine: str, text: str) -> CPU:
    """A CPU from the text of Linux's /proc/cpuinfo. If its cores differ, it has the features that all cores have."""
    fields: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), []).append(value.strip())
    cores = [frozenset(value.split()) for value in fields.get("flags") or fields.get("Features") or [""]]
    # AArch64 names no model; the implementer and the part, by their numbers, are the same thing.
    numbers = (f"{name} {value}" for name in ("CPU implementer", "CPU part") for value in _distinct(fields.get(name)))
    model = ", ".join(_distinct(fields.get("model name"))) or ", ".join(numbers) or machine
    return CPU(machine, model, frozenset.intersection(*cores))


def from_sysctl(machine: str, settings: str, model: str) -> CPU:
    """A CPU from the output of macOS's `sysctl hw.optional`: a line "name: value" for each feature."""
    present = {name for name, _, value in (line.partition(": ") for line in settings.splitlines()) if value == "1"}
    return CPU(machine, model or machine, frozenset(_SYSCTL_FEATURES[name] for name in present & set(_SYSCTL_FEATURES)))


def _distinct(values: Iterable[str] | None) -> list[str]:
    return sorted(set(values or ()))


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
