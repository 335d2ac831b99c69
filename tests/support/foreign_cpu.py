"""A pytest plugin that runs the native kernels' tests on another CPU: compiled for it, under qemu's user emulation.

    FOREIGN_CPU_LEVEL=aarch64 PYTHONPATH=tests/support pytest -p foreign_cpu tests/npu_runtime/test_native.py

The tests stay as they are. A library that stands in for the loaded one sends each launch, with the memory that it
points into, to a process of the other architecture (`foreign_runner.cpp`), and copies what the kernel wrote back.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_compiler.errors import DeviceError
from npu_runtime.cache_folder import cache_folder
from npu_runtime.cpu.arrays import address, memory_span
from npu_runtime.cpu.levels import Level, find_level, this_cpu
from npu_runtime.cpu.native import bindings, build
from npu_runtime.cpu.native.extents import arrays_in
from npu_runtime.cpu.native.threads import usable_threads

_RUNNER = Path(__file__).with_name("foreign_runner.cpp")
# Models that have what a level needs and nothing beyond it, so that an instruction of a higher level is a crash.
_EMULATED_CPUS = {"aarch64": "cortex-a53", "aarch64-bf16": "max", "x86-64-v2": "Nehalem", "x86-64-v3": "max"}


def missing_tool(level: Level) -> str | None:
    """Return the missing tool that is needed to build for a level or to run it, or None."""
    if _compiler(level) is None:
        return f"{level.machine}-linux-gnu-g++"
    if level not in this_cpu().levels() and (level.name not in _EMULATED_CPUS or _emulator(level) is None):
        return f"an emulator of {level.name} (qemu-user)"
    return None


def _compiler(level: Level) -> str | None:
    if level.machine == this_cpu().machine:
        return build.find_compiler()
    return shutil.which(f"{level.machine}-linux-gnu-g++")


def _library(compiler: str, level: Level) -> build.Library:
    """The library of a level: with FOREIGN_SHIPPED=1 the one that an unpacked wheel brings, else one compiled now."""
    if os.environ.get("FOREIGN_SHIPPED") != "1":
        return build.build(compiler, level)
    library = build.shipped_library(level)
    if library is None:
        raise RuntimeError(f"{Path(build.__file__).parent} brings no library for {level.name}")
    return library


def _emulator(level: Level) -> str | None:
    return shutil.which(f"qemu-{level.machine}") or shutil.which(f"qemu-{level.machine}-static")


class ForeignLibrary:
    """The kernels of a level in a process that can run them; it looks like the `ctypes.CDLL` that it replaces.

    Raises:
        RuntimeError: a needed tool is missing, or compiling failed.
    """

    def __init__(self, level: Level) -> None:
        missing = missing_tool(level)
        compiler = _compiler(level)
        if missing is not None or compiler is None:
            raise RuntimeError(f"{missing} is not installed")
        library = _library(compiler, level)
        runner = cache_folder().joinpath(f"runner-{level.machine}-{int(_RUNNER.stat().st_mtime)}")
        runner.parent.mkdir(parents=True, exist_ok=True)
        if not runner.exists():
            own = runner.with_name(f"{runner.name}-{os.getpid()}")
            subprocess.run([compiler, "-std=c++20", "-O1", str(_RUNNER), "-ldl", "-o", str(own)], check=True)
            own.replace(runner)
        command = [str(runner), str(library.path)]
        if level not in this_cpu().levels():
            command = [
                _emulator(level) or "",
                "-L",
                _system_root(compiler),
                "-cpu",
                _EMULATED_CPUS[level.name],
                *command,
            ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._turn = threading.RLock()
        self._ask("t", "npu_set_threads", lambda: None, struct.pack("<q", usable_threads()))

    def __getattr__(self, name: str) -> _Function:
        if not self._ask("f", name, lambda: self._numbers(1))[0]:
            raise AttributeError(f"the library has no {name}")
        return _Function(self, name)

    def number(self, name: str) -> int:
        """Call a function without parameters; return its result."""
        return self._ask("n", name, lambda: self._numbers(1))[0]

    def text(self, name: str) -> bytes:
        """The string that a function without parameters returns."""
        return self._ask("s", name, lambda: self._read(self._numbers(1)[0]))

    def launch(self, name: str, args: ctypes.Structure, kept: tuple[object, ...]) -> str | None:
        """Run a kernel on its argument block and the memory of its launch's arrays.

        All of it is one turn: what lies between the elements of an array may be another thread's.

        Returns:
            Why it failed; None if it did not.
        """
        with self._turn:
            regions, pointers = _regions(kept), []
            for offset, target in _pointers(args):
                region = next((i for i, (begin, end) in enumerate(regions) if begin <= target < end), None)
                if region is None:
                    raise AssertionError(f"{name} points, at offset {offset}, into no array that its launch keeps")
                pointers += [offset, region, target - regions[region][0]]
            parts = [struct.pack("<q", ctypes.sizeof(args)), bytes(args), struct.pack("<q", len(regions))]
            for begin, end in regions:
                parts += [struct.pack("<2q", end - begin, begin % 64), ctypes.string_at(begin, end - begin)]
            parts.append(struct.pack(f"<{1 + len(pointers)}q", len(pointers) // 3, *pointers))

            def copy_back() -> bool:
                (failed,) = self._numbers(1)
                for begin, end in regions:
                    ctypes.memmove(begin, self._read(end - begin), end - begin)
                return bool(failed)

            failed = self._ask("l", name, copy_back, b"".join(parts))
            return self.text("npu_failure").decode() if failed else None

    def _ask(self, kind: str, name: str, read_answer: Any, rest: bytes = b"") -> Any:
        assert self._process.stdin is not None
        with self._turn:
            try:
                self._process.stdin.write(struct.pack("<2q", ord(kind), len(name)) + name.encode() + rest)
                self._process.stdin.flush()
                return read_answer()
            except (BrokenPipeError, EOFError):
                raise RuntimeError(f"the process ended in {name}, with status {self._process.wait()}") from None

    def _numbers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}q", self._read(8 * count))

    def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(count)
        if len(data) < count:
            raise EOFError
        return data


class _Function:
    """A function of the foreign library; like those of ctypes, it takes a result type and argument types."""

    def __init__(self, library: ForeignLibrary, name: str) -> None:
        self.library, self.name = library, name
        self.restype: Any = ctypes.c_int
        self.argtypes: Any = None

    def __call__(self) -> int | bytes:
        return self.library.text(self.name) if self.restype is ctypes.c_char_p else self.library.number(self.name)


def _regions(kept: object) -> list[tuple[int, int]]:
    """The first address and the end of the memory of all kept arrays; what overlaps is one region."""
    regions: list[tuple[int, int]] = []
    for begin, end in sorted(map(_span, arrays_in(kept))):
        if regions and begin < regions[-1][1]:
            begin, last = regions.pop()
            end = max(end, last)
        if begin < end:
            regions.append((begin, end))
    return regions


def _span(array: np.ndarray) -> tuple[int, int]:
    begin, end = memory_span(array)
    return address(array) + begin, address(array) + end


def _pointers(block: Any, at: int = 0) -> Iterator[tuple[int, int]]:
    """Offset and value of each pointer of an argument block that is not null."""
    if isinstance(block, ctypes.Structure):
        for name, kind, *_ in type(block)._fields_:
            offset = at + getattr(type(block), name).offset
            value = getattr(block, name)
            if kind is ctypes.c_void_p and value:
                yield offset, value
            elif issubclass(kind, (ctypes.Structure, ctypes.Array)):
                yield from _pointers(value, offset)
    elif issubclass(block._type_, (ctypes.Structure, ctypes.c_void_p)):
        size = ctypes.sizeof(block._type_)
        for i, item in enumerate(block):
            if isinstance(item, int):
                yield at + i * size, item
            elif item is not None:
                yield from _pointers(item, at + i * size)


def _system_root(compiler: str) -> str:
    """Return the folder of the cross compiler's libc: the emulated program's `/`."""
    asked = subprocess.run([compiler, "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True)
    return str(Path(asked.stdout.strip()).resolve().parents[1])


def install(level: Level) -> None:
    """Lets this process's native kernels run on the other CPU from now on."""
    foreign = ForeignLibrary(level)
    # `library` is imported by name into the modules that ask the kernels something.
    for name, module in list(sys.modules.items()):
        if name.startswith("npu_runtime.cpu.native") and hasattr(module, "library"):
            module.library = lambda: foreign  # type: ignore[attr-defined]
    launch, sequence = bindings.NativeLaunch, bindings.NativeSequence

    def run(self: bindings.NativeLaunch) -> None:
        reason = foreign.launch(f"npu_{self.name}", self.args, self._keep)
        if reason is not None:
            raise DeviceError(f"{reason} in kernel {self.name}{self.origin}")

    launch.__call__ = run  # type: ignore[method-assign]
    launch.addresses = lambda self: (0, 0)  # type: ignore[method-assign]
    sequence.__call__ = lambda self: [one() for one in self.launches] and None  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Install the foreign level before any test file asks whether there are native kernels."""
    install(find_level(os.environ["FOREIGN_CPU_LEVEL"]))
