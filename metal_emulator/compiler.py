"""Compiles Metal source into a shared library, once per machine and source, and runs its kernels."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from metal_emulator.sources import RUNTIME, lines_marked_not_a_guard
from metal_emulator.translation import (
    Argument,
    FunctionConstant,
    Mutant,
    TranslationError,
    translate,
)
from npu_compiler.files import seal, unseal, working_folder, write_atomically

__all__ = [
    "Argument",
    "CompileError",
    "Function",
    "FunctionConstant",
    "KernelFault",
    "Library",
    "Mutant",
    "compile_source",
]

MAX_THREADS = 1024
REPORT_BYTES = 2048
PREDEFINED = {"__METAL_VERSION__": "310", "__METAL__": "1", "__HAVE_BFLOAT__": "1"}
_COMMON_FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-w")
_CHECK_FLAGS = ("-O1", "-DMETAL_CHECKS", "-fsanitize=bounds,integer-divide-by-zero")
_KERNEL_FLAGS = ("-nostdinc", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics")
_SYSTEM_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|import)[ \t]*<[^>\n]*>", re.MULTILINE)
_CONSTANT_TYPES = {
    "uint": ctypes.c_uint32,
    "int": ctypes.c_int32,
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "ushort": ctypes.c_uint16,
}


class CompileError(Exception):
    """An error for source that does not compile; the message quotes the source's own lines."""


class KernelFault(Exception):
    """An error for a check that failed while a kernel ran: which kernel, which check, where, and in which thread."""


class _Region(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("length", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("granule", ctypes.c_uint32),
        ("device_cells", ctypes.c_void_p),
        ("cells_start", ctypes.c_void_p),
        ("threadgroup_cells", ctypes.c_void_p),
    ]


class _Position(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("regions", ctypes.POINTER(_Region)),
        ("region_count", ctypes.c_uint32),
        ("checks", ctypes.c_uint32),
        ("groups", _Position),
        ("threads", _Position),
        ("grid", _Position),
        ("workers", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("report", ctypes.c_char_p),
        ("report_size", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Function:
    """A kernel of a library.

    Attributes:
        used_constants: Names of the function constants that it may use.
        threads_communicate: Whether it may use barriers, SIMD-group operations, atomics or threadgroup memory; if not,
            the order of its threads cannot change its result.
    """

    name: str
    arguments: tuple[Argument, ...]
    used_constants: frozenset[str]
    threads_communicate: bool
    library: Library = field(repr=False, compare=False)
    entry: int = field(repr=False, compare=False)

    def dispatch(
        self,
        groups: Sequence[int],
        threads: Sequence[int],
        buffers: Mapping[int, tuple[int, int]],
        constants: Mapping[str, int | float | bool],
        *,
        seed: int = 0,
        mutant: int = 0,
        grid_threads: Sequence[int] | None = None,
    ) -> None:
        """Run the kernel and wait for it.

        Args:
            groups: Threadgroups along x, y, z.
            threads: Threads of a threadgroup along x, y, z.
            buffers: Buffer index → (address, length in bytes).
            constants: Function constant → value.
            seed: Seed that shuffles threads and threadgroups; 0 means ascending order.
            mutant: Number of the mutant to switch on, in a library that was compiled with mutants; 0 for none.
            grid_threads: Threads of the whole grid along x, y, z, whose last threadgroups may be smaller; None if all
                threadgroups are full.

        Raises:
            KernelFault: A check failed; what the kernel had written until then stays.
            ValueError: The threadgroup has too few or too many threads, or a constant or the mutants do not exist.
        """
        self._check(threads, constants)
        regions = self._regions(buffers)
        report = ctypes.create_string_buffer(REPORT_BYTES)
        grid = grid_threads or [size * group for size, group in zip(threads, groups, strict=True)]
        launch = _Launch(
            self.name.encode(),
            self.entry,
            (_Region * len(regions))(*regions),
            len(regions),
            int(self.library.checks),
            _Position(*groups),
            _Position(*threads),
            _Position(*grid),
            _cores(),
            seed if self.library.checks else 0,
            ctypes.cast(report, ctypes.c_char_p),
            REPORT_BYTES,
        )
        with self.library.lock:
            self.library.configure(constants, mutant)
            faulted = _scheduler().metal_run(ctypes.byref(launch))
        if faulted:
            raise KernelFault(report.value.decode())

    def _check(self, threads: Sequence[int], constants: Mapping[str, int | float | bool]) -> None:
        """Refuse a launch with too few or too many threads, or with unknown function constants. Raises ValueError."""
        count = threads[0] * threads[1] * threads[2]
        if not 0 < count <= MAX_THREADS:
            raise ValueError(f"{self.name}: {count} threads in a threadgroup; it can have 1 to {MAX_THREADS}")
        unknown = set(constants) - set(self.library.constants)
        if unknown:
            raise ValueError(f"{self.name}: no function constant named {', '.join(sorted(unknown))}")

    def _regions(self, buffers: Mapping[int, tuple[int, int]]) -> list[_Region]:
        """The memory of each buffer argument, for the runtime's checks.

        `buffers` maps index → (address, length in bytes).
        """
        return [
            _Region(
                argument.name.encode(),
                *buffers.get(argument.index, (None, 0)),
                int(argument.address_space == "device" and not argument.is_const),
            )
            for argument in self.arguments
            if argument.kind == "buffer"
        ]


class Library:
    """The kernels of one compiled source.

    Attributes:
        checks: Whether accesses and synchronization are checked.
        mutants: The barriers and bounds guards that `Function.dispatch` can switch off.
    """

    def __init__(self, path: Path, checks: bool, has_mutants: bool) -> None:
        self.checks = checks
        self.lock = threading.Lock()
        self._library = ctypes.CDLL(str(path))
        self._has_mutants = has_mutants
        self._library.metal_attach.argtypes = (ctypes.c_void_p,)
        self._library.metal_attach(ctypes.addressof(ctypes.c_byte.in_dll(_scheduler(), "metal_scheduler")))
        self._library.metal_metadata.restype = ctypes.c_char_p
        metadata = json.loads(self._library.metal_metadata())
        constants = [FunctionConstant(**constant) for constant in metadata["constants"]]
        self.constants: Mapping[str, FunctionConstant] = {constant.name: constant for constant in constants}
        self.mutants = tuple(Mutant(**mutant) for mutant in metadata["mutants"]) if has_mutants else ()
        self.functions: Mapping[str, Function] = {
            kernel["name"]: Function(
                kernel["name"],
                tuple(Argument(**argument) for argument in kernel["arguments"]),
                frozenset(kernel["used_constants"]),
                kernel["threads_communicate"],
                self,
                ctypes.cast(getattr(self._library, f"metal_entry_{index}"), ctypes.c_void_p).value or 0,
            )
            for index, kernel in enumerate(metadata["kernels"])
        }
        self._setters = {}
        for constant in constants:
            setter = getattr(self._library, f"metal_set_{constant.name}")
            setter.argtypes = (_CONSTANT_TYPES[constant.type], ctypes.c_bool)
            self._setters[constant.name] = setter

    def configure(self, constants: Mapping[str, int | float | bool], mutant: int) -> None:
        """Set the function constants and the mutant for the launches that follow; the caller holds `lock`."""
        for name, setter in self._setters.items():
            setter(constants.get(name, 0), name in constants)
        self._library.metal_derive_constants()
        if mutant and not self._has_mutants:
            raise ValueError("this library was compiled without mutants")
        if self._has_mutants:
            self._library.metal_set_mutant(mutant)


def compile_source(source: str, macros: Mapping[str, str], *, checks: bool = True, mutants: bool = False) -> Library:
    """The library compiled from a source whose own #include lines have been resolved.

    Args:
        macros: Preprocessor macro → value.
        checks: Check every access and all synchronization; without, the kernels run several times faster.
        mutants: Compile every barrier and bounds guard such that it can be switched off.

    Raises:
        CompileError: Source that Metal's compiler would reject, or that the emulator does not support.
    """
    flags = [*_kernel_flags(checks), *(["-DMETAL_MUTANTS"] if mutants else [])]
    defined = {**PREDEFINED, **macros}
    digest = _digest(_toolchain(), _own_sources(), *flags, json.dumps(defined), source)
    path = _cached(f"kernels-{digest}.so", lambda: _translated(source, defined), [*flags, f"-I{RUNTIME}"])
    return _load(path, checks, mutants)


@functools.cache
def _load(path: Path, checks: bool, mutants: bool) -> Library:
    return Library(path, checks, mutants)


def preprocess(source: str, macros: Mapping[str, str]) -> str:
    """The source with its macros expanded and its system includes removed."""
    command = [_compiler(), "-x", "c++", "-std=c++17", "-E", "-undef", "-nostdinc", "-"]
    defines = "".join(f"#define {name} {' '.join(value.splitlines())}\n" for name, value in macros.items())
    text = f'{defines}#line 1 "program_source"\n{_SYSTEM_INCLUDE.sub("", source)}'
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise CompileError(result.stderr.strip())
    return result.stdout


def _translated(source: str, macros: Mapping[str, str]) -> str:
    try:
        translation = translate(preprocess(source, macros), lines_marked_not_a_guard(source))
    except TranslationError as error:
        raise CompileError(str(error)) from None
    metadata = json.dumps(translation.metadata())
    return (
        f'#include "metal_stdlib.h"\n{translation.source}'
        f'extern "C" const char *metal_metadata() {{ return {metadata}; }}\n'
    )


def _kernel_flags(checks: bool) -> list[str]:
    flags = [*_COMMON_FLAGS, *_KERNEL_FLAGS, *(_CHECK_FLAGS if checks else ["-O2"])]
    return flags + (["-march=native"] if platform.machine().lower() in ("x86_64", "amd64") else [])


@functools.cache
def _scheduler() -> ctypes.CDLL:
    """The library that runs the kernels' threads, which all kernel libraries share."""
    flags = [*_COMMON_FLAGS, "-O2", "-pthread"]
    name = f"scheduler-{_digest(_toolchain(), _own_sources(), *flags)}.so"
    return ctypes.CDLL(str(_cached(name, (RUNTIME / "scheduler.cpp").read_text, [*flags, f"-iquote{RUNTIME}"])))


def _cached(name: str, program: Callable[[], str], flags: Sequence[str]) -> Path:
    """The path of the library `name`, compiled if it is not in the cache yet.

    If the cache folder cannot be written, the library is in a temporary folder of this process.
    """
    try:
        return _made_in(_cache_folder(), name, program, flags)
    except OSError as error:
        return _made_in(_folder_instead(error.strerror or str(error)), name, program, flags)


def _made_in(folder: Path, name: str, program: Callable[[], str], flags: Sequence[str]) -> Path:
    path = folder / name
    with suppress(FileNotFoundError):
        if unseal(path.read_bytes(), path.name) is not None:
            return path
    folder.mkdir(parents=True, exist_ok=True)
    with working_folder(folder) as work:
        write_atomically(path, seal(_compile(program(), flags, work), path.name))
    return path


@functools.cache
def _folder_instead(reason: str) -> Path:
    """A folder that replaces the cache folder and is removed when the process ends; warns with the reason."""
    warnings.warn(
        f"cannot write to the cache folder '{_cache_folder()}' ({reason}): Metal sources are compiled at each start",
        stacklevel=4,
    )
    folder = tempfile.mkdtemp(prefix="metal-emulator-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _compile(program: str, flags: Sequence[str], work: Path) -> bytes:
    """Compile and link a program in an empty folder, and return the library's bytes."""
    compiler = _compiler()
    # Linked apart, without the flags that would add a sanitizer's library to it.
    commands = (
        [compiler, *flags, "-c", "-x", "c++", "-", "-o", f"{work}/program.o"],
        [compiler, "-shared", "-pthread", f"{work}/program.o", "-o", f"{work}/library"],
    )
    for command in commands:
        result = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise CompileError(result.stderr.strip())
    return (work / "library").read_bytes()


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise CompileError("the Metal emulator needs a C++ compiler: looked for $CXX, c++, g++ and clang++")


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "npu-simulation" / "metal-emulator"


def _cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _toolchain() -> str:
    """Return a text that identifies the compiler and the processor that it compiles for."""
    version = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=False).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return version + platform.machine() + platform.processor()
    return version + "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


@functools.cache
def _own_sources() -> str:
    folder = Path(__file__).parent
    paths = [*sorted(RUNTIME.iterdir()), *sorted((folder / "translation").glob("*.py")), folder / "compiler.py"]
    return "".join(path.read_text() for path in paths if path.is_file())


def _digest(*parts: str) -> str:
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()[:24]
