"""Compiles generated CUDA sources without a GPU, with NVRTC (`pip install nvidia-cuda-nvrtc-cu12`)."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

from cuda_runtime.source_check import check_source

ARCHITECTURES = (70, 80, 90)
# What a source asks for that only compute capability 9.0 has; sources for it are made for no other GPU.
HOPPER_ONLY = "__CUDA_ARCH_FEAT_SM90_ALL"
# An empty file for each source, architecture and compiler with which it compiled; `make clean` removes them.
COMPILED = Path(__file__).parents[2] / "build" / "compiled"


@cache
def _nvrtc() -> ctypes.CDLL | None:
    candidates = []
    for package in ("nvidia.cuda_nvrtc", "nvidia.cu13"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            candidates += [str(path) for path in sorted(Path(folder, "lib").glob("libnvrtc.so.*"))]
    candidates += [name for name in [ctypes.util.find_library("nvrtc")] if name]
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    return None


def _version() -> str:
    assert (library := _nvrtc()) is not None
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    return f"{major.value}.{minor.value} {library._name}"


def architectures() -> tuple[int, ...]:
    """Return those of `ARCHITECTURES` that the installed compiler supports; skip the test where there is none."""
    if (library := _nvrtc()) is not None:
        count = ctypes.c_int()
        assert library.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
        known = (ctypes.c_int * count.value)()
        assert library.nvrtcGetSupportedArchs(known) == 0
        return tuple(arch for arch in ARCHITECTURES if arch in set(known))
    pytest.skip("needs NVRTC (pip install nvidia-cuda-nvrtc-cu12)")


def compile_sources(sources: Iterable[str]) -> None:
    """Compile every source to machine code for every architecture that it is made for.

    Raises:
        AssertionError: one does not compile; with the compiler's log.
    """
    _compile([(text, arch) for text in sources for arch in architectures() if _is_for(text, arch)])


def compile_in_turn(sources: Iterable[str], start: int = 0) -> None:
    """Compile every source for one of the architectures that it is made for, the next source for the next one.

    Args:
        start: Index of the first architecture, so that several calls with alike sources differ.

    Raises:
        AssertionError: one does not compile; with the compiler's log.
    """
    jobs = []
    for turn, text in enumerate(sources, start):
        archs = [arch for arch in architectures() if _is_for(text, arch)]
        jobs += [(text, archs[turn % len(archs)])] if archs else []
    _compile(jobs)


def _is_for(text: str, arch: int) -> bool:
    return arch == 90 or HOPPER_ONLY not in text


def _compile(jobs: Sequence[tuple[str, int]]) -> None:
    for text, _ in jobs:
        check_source("of a test", text)
    failed = [log for job in jobs if (log := _log_once(*job))]  # in one thread, as pytest's workers share the cores
    assert not failed, f"{len(failed)} of {len(jobs)} do not compile, the first:\n{failed[0]}"


def _log_once(text: str, arch: int) -> str:
    """Return `compile_log`, but leave out what the same compiler has compiled before, in any process or run."""
    mark = COMPILED / hashlib.sha256(f"{_version()} {arch} {text}".encode()).hexdigest()
    if mark.exists():
        return ""
    if not (log := compile_log(text, arch)):
        COMPILED.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return log


def compile_log(text: str, arch: int) -> str:
    """Return the compiler's errors for a source and an architecture; empty where it compiles."""
    library = _nvrtc()
    assert library is not None
    program, name = ctypes.c_void_p(), "sm_90a" if arch == 90 else f"sm_{arch}"
    assert library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={name}".encode())
    try:
        if library.nvrtcCompileProgram(program, 1, options) == 0:
            return ""
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        return f"{name}: {log.value.decode(errors='replace')}\n{text}"
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
