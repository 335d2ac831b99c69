"""Finds the library of native kernels: the one in the package (from a wheel), else a cached one, else compiled now.

A library that is compiled here is compiled once per machine, CPU level and source version.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from npu_compiler.errors import DeviceError, NPUError
from npu_compiler.files import working_folder
from npu_runtime.background import background_work
from npu_runtime.cache_folder import cache_folder, read_entry, users_temporary_folder, warn_of_cache, write_entry
from npu_runtime.cpu.levels import VARIABLE, Level, forced_level, this_cpu
from npu_runtime.cpu.native.threads import usable_threads
from npu_runtime.forks import free_lock

SOURCE_FOLDER = Path(__file__).parent
# Contraction to fused multiply-adds is wanted; the rest of -ffast-math is not: masks rely on infinities. The kernels
# are written for complete unrolling and for inlined lambdas: with these of -O3's choices, code by -O2 is as fast as by
# -O3, and compiled in three quarters of the time. They are vectors already, and leave no loop to -ftree-vectorize.
# The compiler would spend a fifth of its time on collecting garbage; without that it gets by with 300 MB.
FLAGS = (
    "-std=c++20",
    "-O2",
    "-fpeel-loops",
    "-funswitch-loops",
    "-fno-tree-vectorize",
    *("--param", "max-inline-insns-single=200"),
    *("--param", "max-inline-insns-auto=30"),
    *("--param", "inline-min-speedup=15"),
    *("--param", "ggc-min-expand=1000"),
    *("--param", "ggc-min-heapsize=1000000"),
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
# What $NPU_SIM_SANITIZE may name, for `make sanitize`. Such a library loads only into a process that has preloaded the
# sanitizer's own. Vectors are loaded from addresses that are no multiples of their size.
_SANITIZERS = {
    "thread": ("-fsanitize=thread",),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize=alignment", "-fno-sanitize-recover=undefined"),
}
_FOR_REPORTS = ("-O1", "-g1", "-fno-omit-frame-pointer")
# Files that are compiled as one, each group in about the same time: a compiler needs up to two seconds for the standard
# headers alone. Any other file is compiled by itself.
_UNITS = (
    ("pool2d", "conv_depthwise", "pointwise"),
    ("conv_winograd", "gemm", "pool", "runtime"),
    ("linear", "norm", "conv", "conv_epilogue", "matmul"),
    ("attention", "rope", "movement", "kv_cache", "order", "sums"),
    ("conv_integer", "conv_integer_depthwise", "integer_finish", "integer_maps"),
    ("conv_integer_winograd", "conv_integer_columns", "integer_gemm"),
    ("quantized", "quantized_panels", "quantized_bytes"),
)
_SHIPPED = SOURCE_FOLDER / "shipped"  # a wheel's folder of libraries, see release/wheels.py
_ROOM = 32 * 2**20  # bytes that a folder must have left for a build
_NICENESS = 10  # of compilers beside a program, added to its own
_one_at_a_time = free_lock()
_running: set[subprocess.Popen[str]] = set()
_compiling, _yielding = threading.Event(), threading.Event()

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """The compiled kernels.

    Attributes:
        path: The shared library.
        level: CPU level that it was compiled for.
        compiler: The path of the compiler; None for a library that came with the package.
        seconds: Seconds that compiling took; None if nothing was compiled.
    """

    path: Path
    level: Level
    compiler: str | None = None
    seconds: float | None = None


class CompilerError(RuntimeError):
    """The compiler could not build the kernels; the message begins with a line that says why."""


def library_path() -> Path | None:
    """The path of the library, compiled now if there is none yet; None if that is impossible (see `failure_reason`)."""
    library = compiled_library()
    return None if library is None else library.path


def failure_reason() -> str | None:
    """The reason why `library_path` returns None; None if it does not."""
    outcome = _outcome()
    return None if isinstance(outcome, Library) else outcome


def compiled_library() -> Library | None:
    """The library of `library_path`, with how it was compiled; None if there is none (see `failure_reason`).

    Raises:
        InputError: `NPU_SIM_CPU_LEVEL` names no level.
        DeviceError: it names one that this machine does not support or its compiler cannot build.
    """
    outcome = _outcome()
    return outcome if isinstance(outcome, Library) else None


def is_compiling() -> bool:
    """Whether a library is being compiled, by this process or by another one that this process waits for."""
    return _compiling.is_set()


def yield_to_programs() -> None:
    """Give compilers from now on a lower priority than this process, which has other work meanwhile."""
    _yielding.set()
    for process in tuple(_running):
        _lower_priority(process)


def _lower_priority(process: subprocess.Popen[str]) -> None:
    with suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PGRP, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)


def _outcome() -> Library | str:
    """The library, or the reason why there is none.

    The first caller builds it; other threads wait for that and get the same result.
    """
    with _one_at_a_time:
        outcome = _find()
    if isinstance(outcome, NPUError):
        raise outcome.with_traceback(None)
    return outcome


@functools.cache
def _find() -> Library | str | NPUError:
    if os.environ.get("NPU_SIM_NATIVE") == "0":
        return "disabled by NPU_SIM_NATIVE=0"
    try:
        forced, compiler = forced_level(), find_compiler()
    except NPUError as error:
        return error
    levels = (forced,) if forced else this_cpu().levels()
    for level in reversed(levels if compiler is None else levels[-1:]):
        library = shipped_library(level)
        if library is not None:
            return library
    if compiler is None:
        return "no C++ compiler found (looked for $CXX, c++, g++ and clang++)"
    try:
        return build(compiler, forced) if forced else _build_best(compiler)
    except (OSError, RuntimeError) as error:
        if forced:
            return DeviceError(f"CPU level {forced.name}, which {VARIABLE} asks for, cannot be built: {error}")
        return str(error)


def shipped_library(level: Level) -> Library | None:
    """The library for a level that came with the package; None if there is none for these sources.

    `NPU_SIM_NATIVE=compile` and `NPU_SIM_SANITIZE` ignore it.
    """
    if os.environ.get("NPU_SIM_NATIVE") == "compile" or os.environ.get("NPU_SIM_SANITIZE") or not _SHIPPED.is_dir():
        return None
    path = _SHIPPED / shipped_name(level)
    return Library(path, level) if path.is_file() else None


def shipped_name(level: Level) -> str:
    """The file name of a level's library in a wheel, which contains a hash of its compiler options and sources."""
    sources = sorted(path for path in SOURCE_FOLDER.rglob("*") if path.suffix in {".cpp", ".h"})
    options = "\n".join((*FLAGS, *level.flags))
    return f"kernels-{level.name}-{_digest(options.encode(), *(path.read_bytes() for path in sources))}.so"


def find_compiler() -> str | None:
    """The path of the C++ compiler to use: $CXX, else the first usual name on PATH; None if there is none."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    return None


def _build_best(compiler: str) -> Library:
    """Build the library for the highest level that this machine supports and the compiler can build.

    Errors are those of `build`.
    """
    failures: list[tuple[Level, CompilerError]] = []
    for level in reversed(this_cpu().levels()):
        try:
            library = build(compiler, level)
        except CompilerError as error:
            failures.append((level, error))
            continue
        if failures:
            names = " and ".join(failed.name for failed, _ in failures)
            warnings.warn(
                f"{compiler} cannot build the native kernels for CPU level {names}, so they are built for the slower "
                f"{level.name}; a newer compiler (in $CXX) may help. {failures[0][1]}",
                stacklevel=2,
            )
        return library
    raise failures[0][1]


def build(compiler: str, level: Level, tuning: str | None = "-mtune=native") -> Library:
    """The library for a level, which this machine need not support; from the cache if it is there.

    If the cache folder cannot be written, it goes to a temporary folder of the user's.

    Args:
        compiler: Path of the compiler.
        level: The level to compile for.
        tuning: A compiler option that chooses among equivalent instructions, for levels that this machine supports;
            None for none.

    Raises:
        CompilerError: the compiler fails.
        OSError: it cannot be started, or there is no folder to write to.
    """
    flags = [*FLAGS, *level.flags, *_sanitizer_flags()]
    if tuning and level.flags and level in this_cpu().levels():
        flags.append(tuning)
    target = "\n".join((_run([compiler, "--version"]), *flags))
    headers = b"".join(path.read_bytes() for path in sorted(SOURCE_FOLDER.rglob("*.h")))
    objects = {
        unit: f"{unit[0].stem}-{_digest(target.encode(), headers, *(path.read_bytes() for path in unit))}.o"
        for unit in _units()
    }
    name = f"kernels-{level.name}-{_digest(*(path.encode() for path in objects.values()))}.so"
    path = cache_folder() / name
    if read_entry(path) is not None:
        return Library(path, level, compiler, None)
    command = [compiler, *flags, "-I", str(SOURCE_FOLDER), "-x", "c++", "-c", "-"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        seconds = _make(path, level, objects, command)
    except OSError as error:
        warn_of_cache(path.parent, error)
        path = users_temporary_folder() / name
        seconds = _make(path, level, objects, command)
    return Library(path, level, compiler, seconds)


def _sanitizer_flags() -> tuple[str, ...]:
    name = os.environ.get("NPU_SIM_SANITIZE")
    if not name:
        return ()
    if name not in _SANITIZERS:
        raise CompilerError(f"NPU_SIM_SANITIZE names no sanitizer: '{name}'; choose one of {', '.join(_SANITIZERS)}")
    return (*_SANITIZERS[name], *_FOR_REPORTS)


def _make(path: Path, level: Level, objects: Mapping[tuple[Path, ...], str], command: list[str]) -> float | None:
    """Compile the library at `path`, which other processes only see once it is whole.

    Args:
        objects: Unit → name of its object file, which goes into the same folder.
        command: The compiler with its options, which reads a source from its standard input.

    Returns:
        Seconds that compiling took; None if another process has just compiled it.
    """
    folder = path.parent
    compiling = "compiling the CPU kernels, once on this machine"
    with _announced(), background_work(compiling) as say, _alone_in(folder, say):
        if read_entry(path) is not None:
            return None
        with working_folder(folder) as work:
            _check_room(work)
            _log.info("compiling the CPU kernels for %s, once on this machine", level.name)
            say(f"{compiling}: 0 of {len(objects)}")
            start = time.perf_counter()
            files: list[Path] = []
            for file in _objects([(folder / name, unit) for unit, name in objects.items()], work, command):
                files.append(file)
                left = (time.perf_counter() - start) * (len(objects) / len(files) - 1)
                say(f"{compiling}: {len(files)} of {len(objects)}, about {left:.0f} s left")
            library = work / path.name
            _run([command[0], "-shared", "-pthread", *map(str, files), "-o", str(library)])
            write_entry(path, library.read_bytes())
            return time.perf_counter() - start


@contextmanager
def _announced() -> Iterator[None]:
    """Context in which `is_compiling` returns True."""
    _compiling.set()
    try:
        yield
    finally:
        _compiling.clear()


def _objects(units: list[tuple[Path, tuple[Path, ...]]], work: Path, command: list[str]) -> Iterator[Path]:
    """The object files of units, as they become ready; several threads compile them.

    The threads are daemons, unlike a pool's: a process that ends does not wait for them, but ends its compilers.

    Args:
        units: For each object file its place in the cache, and the sources.
    """
    todo, ready = list(reversed(units)), SimpleQueue[Path | BaseException]()

    def compile_units() -> None:
        while True:
            try:
                path, unit = todo.pop()
            except IndexError:
                return
            try:
                ready.put(_object(path, work, command, unit))
            except BaseException as error:
                ready.put(error)
                return

    threads = [threading.Thread(target=compile_units, daemon=True) for _ in range(usable_threads())]
    for thread in threads:
        thread.start()
    try:
        for _ in units:
            outcome = ready.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome
    finally:  # after Ctrl-C too: nobody waits for half a minute
        todo.clear()
        while any(thread.is_alive() for thread in threads):
            _stop_compilers()
            threads[0].join(0.02)
            threads.sort(key=threading.Thread.is_alive, reverse=True)


def _object(path: Path, work: Path, command: list[str], unit: tuple[Path, ...]) -> Path:
    """The object file of a group of sources in the folder `work`, compiled unless it is in the cache at `path`."""
    result = work / path.name
    content = read_entry(path)
    if content is not None:
        result.write_bytes(content)
    else:
        _run([*command, "-o", str(result)], _source(unit))
        write_entry(path, result.read_bytes())
    return result


def _check_room(folder: Path) -> None:
    """Raise `OSError` if the disk has no room for a build, rather than after minutes of compiling."""
    trial = folder / "room"
    trial.write_bytes(bytes(_ROOM))
    trial.unlink()


def _units() -> list[tuple[Path, ...]]:
    """The source files, in the groups that are compiled together."""
    files = {path.stem: path for path in sorted(SOURCE_FOLDER.rglob("*.cpp"))}
    grouped = [tuple(files.pop(name) for name in unit if name in files) for unit in _UNITS]
    return [unit for unit in grouped if unit] + [(path,) for path in files.values()]


def _source(unit: tuple[Path, ...]) -> str:
    return "".join(f'#include "{path}"\n' for path in unit)


@contextmanager
def _alone_in(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Context that keeps other processes from building in the folder.

    If it has to wait for one, it says so by `say`.
    """
    with (folder / "kernels.lock").open("w") as lock:
        with suppress(OSError):  # some network folders have no locks: the work may then be done twice
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another process that compiles the CPU kernels")
                fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):  # a forked child, which has the file too, would keep the lock
                fcntl.flock(lock, fcntl.LOCK_UN)


def _run(command: list[str], source: str = "") -> str:
    pipe = subprocess.PIPE
    # A group of its own gets no Ctrl-C from the terminal. In a session of its own a priority would have no effect, as
    # Linux shares the processors out among sessions first.
    with subprocess.Popen(command, text=True, process_group=0, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        _running.add(process)
        if _yielding.is_set():
            _lower_priority(process)
        try:
            output, errors = process.communicate(source)
        finally:
            _running.discard(process)
    if process.returncode != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        words = next((line for line in lines if "error" in line), lines[-1] if lines else "no words")
        reason = f"{command[0]} failed with status {process.returncode}: {words}"
        raise CompilerError("\n".join((reason, " ".join(command), errors[-4000:])))
    return output


@atexit.register
def _stop_compilers() -> None:
    """Kill the compilers that are running, with the processes that they have started."""
    for process in tuple(_running):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _digest(*parts: bytes) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()[:20]
