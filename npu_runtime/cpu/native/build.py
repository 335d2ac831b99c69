"""Compiles the C++ kernels of this folder into one shared library, once per machine and source version."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from npu_runtime.cache_folder import cache_folder

SOURCE_FOLDER = Path(__file__).parent
# Contraction to fused multiply-adds is wanted; the rest of -ffast-math is not: masks rely on infinities.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fPIC",
    "-pthread",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
    "-Wno-maybe-uninitialized",
)

_failure: str | None = None


def failure_reason() -> str | None:
    """Why `library_path` returned None, or None when it did not."""
    return _failure


@functools.cache
def library_path() -> Path | None:
    """The compiled library, built now if it is not cached; None when it cannot be had (see `failure_reason`)."""
    global _failure
    try:
        return _build()
    except (OSError, RuntimeError) as error:
        _failure = str(error)
        return None


def find_compiler() -> str | None:
    """The path of the C++ compiler to use: $CXX, else the first usual name on PATH."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    return None


def _build() -> Path:
    if os.environ.get("NPU_SIM_NATIVE") == "0":
        raise RuntimeError("disabled by NPU_SIM_NATIVE=0")
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler found (looked for $CXX, c++, g++ and clang++)")
    target = "\n".join((_run([compiler, "--version"]), cpu_description(), *FLAGS))
    headers = b"".join(path.read_bytes() for path in sorted(SOURCE_FOLDER.glob("*.h")))
    objects = {
        source: _digest(target.encode(), headers, source.name.encode(), source.read_bytes())
        for source in sorted(SOURCE_FOLDER.glob("*.cpp"))
    }
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"kernels-{_digest(*(digest.encode() for digest in objects.values()))}.so"
    if library.exists():
        return library

    def compile_object(item: tuple[Path, str]) -> Path:
        source, digest = item
        path = folder / f"{source.stem}-{digest}.o"
        if not path.exists():
            _write_atomically(path, [compiler, *FLAGS, "-c", str(source)])
        return path

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = list(pool.map(compile_object, objects.items()))
    _write_atomically(library, [compiler, "-shared", "-pthread", *map(str, paths)])
    return library


def _write_atomically(path: Path, command: list[str]) -> None:
    """Runs `command -o path` such that other processes see the whole file or none."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        _run([*command, "-o", temporary])
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with status {result.returncode}:\n{result.stderr[-4000:]}")
    return result.stdout


def cpu_description() -> str:
    """What -march=native depends on: a cache on a shared home folder may serve several kinds of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = ("flags", "Features", "model name", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(fields)}))


def _digest(*parts: bytes) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()[:20]
