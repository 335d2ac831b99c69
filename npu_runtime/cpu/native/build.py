"""Compiles the C++ kernels of this folder into one shared library, once per machine, CPU level and source version."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from npu_compiler.errors import DeviceError
from npu_runtime.cache_folder import cache_folder
from npu_runtime.cpu.levels import VARIABLE, Level, forced_level, this_cpu
from npu_runtime.cpu.native.threads import usable_threads

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
# Files that are compiled as one, each group in about the same time: a compiler needs up to two seconds for the standard
# headers alone. Any other file is compiled by itself.
_UNITS = (
    ("pool2d", "conv_depthwise", "pointwise"),
    ("conv_winograd", "gemm", "pool", "runtime"),
    ("linear", "norm", "conv", "conv_epilogue", "matmul"),
    ("attention", "rope", "movement"),
)
_UNFINISHED = "unfinished-"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """The compiled kernels.

    Attributes:
        path: The shared library.
        level: What it was compiled for.
        compiler: The path of the compiler.
        seconds: How long compiling took, or None where the library was in the cache.
    """

    path: Path
    level: Level
    compiler: str
    seconds: float | None


class CompilerError(RuntimeError):
    """The compiler could not build the kernels; the message has its last words."""


def library_path() -> Path | None:
    """The compiled library, built now if it is not cached; None when it cannot be had (see `failure_reason`)."""
    library = compiled_library()
    return None if library is None else library.path


def failure_reason() -> str | None:
    """Why `library_path` returned None, or None when it did not."""
    outcome = _outcome()
    return None if isinstance(outcome, Library) else outcome


def compiled_library() -> Library | None:
    """The library of `library_path`, and how it was made.

    Raises:
        InputError: `NPU_SIM_CPU_LEVEL` names no level.
        DeviceError: it names one that this machine cannot run or its compiler cannot build.
    """
    outcome = _outcome()
    return outcome if isinstance(outcome, Library) else None


@functools.cache
def _outcome() -> Library | str:
    """The library, or why there is none."""
    if os.environ.get("NPU_SIM_NATIVE") == "0":
        return "disabled by NPU_SIM_NATIVE=0"
    forced, compiler = forced_level(), find_compiler()
    if compiler is None:
        return "no C++ compiler found (looked for $CXX, c++, g++ and clang++)"
    try:
        return build(compiler, forced) if forced else _build_best(compiler)
    except (OSError, RuntimeError) as error:
        if forced:
            raise DeviceError(f"CPU level {forced.name}, which {VARIABLE} asks for, cannot be built: {error}") from None
        return str(error)


def find_compiler() -> str | None:
    """The path of the C++ compiler to use: $CXX, else the first usual name on PATH."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    return None


def _build_best(compiler: str) -> Library:
    """The library for the highest level that this machine runs and the compiler can build; errors as of `build`."""
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


def build(compiler: str, level: Level) -> Library:
    """The library for that level, which need not be one that this machine runs; from the cache if it is there.

    Raises:
        CompilerError: the compiler fails.
        OSError: it cannot be started, or there is no folder to write to.
    """
    flags = [*FLAGS, *level.flags]
    if level.flags and level in this_cpu().levels():
        flags.append("-mtune=native")
    target = "\n".join((_run([compiler, "--version"]), *flags))
    headers = b"".join(path.read_bytes() for path in sorted(SOURCE_FOLDER.glob("*.h")))
    objects = {
        unit: f"{unit[0].stem}-{_digest(target.encode(), headers, *(path.read_bytes() for path in unit))}.o"
        for unit in _units()
    }
    name = f"kernels-{level.name}-{_digest(*(path.encode() for path in objects.values()))}.so"
    if (cache_folder() / name).exists():
        return Library(cache_folder() / name, level, compiler, None)
    folder = _writable_folder()
    path = folder / name
    with _alone_in(folder):
        if path.exists():  # another process has just built it, or the cache folder is read-only
            return Library(path, level, compiler, None)
        _log.info("compiling the CPU kernels for %s, once on this machine", level.name)
        start = time.perf_counter()
        pool = ThreadPoolExecutor(usable_threads())
        try:
            jobs = [
                pool.submit(_make, folder / file, [compiler, *flags, "-x", "c++", "-c", "-"], _source(unit))
                for unit, file in objects.items()
            ]
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(cancel_futures=True)
        for job in jobs:
            if not job.cancelled():
                job.result()
        _make(path, [compiler, "-shared", "-pthread", *(str(folder / file) for file in objects.values())])
    return Library(path, level, compiler, time.perf_counter() - start)


def _units() -> list[tuple[Path, ...]]:
    """The source files, in the groups that are compiled as one."""
    files = {path.stem: path for path in sorted(SOURCE_FOLDER.glob("*.cpp"))}
    grouped = [tuple(files.pop(name) for name in unit if name in files) for unit in _UNITS]
    return [unit for unit in grouped if unit] + [(path,) for path in files.values()]


def _source(unit: tuple[Path, ...]) -> str:
    return "".join(f'#include "{path}"\n' for path in unit)


def _writable_folder() -> Path:
    """The cache folder or, where that is read-only, one of the user's own among the temporary files."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return folder
    except OSError:
        instead = Path(tempfile.gettempdir()) / f"npu-simulation-{os.getuid()}"
        instead.mkdir(mode=0o700, exist_ok=True)
        owner = instead.lstat()
        # Whoever can write there can make this process run their code.
        if owner.st_uid != os.getuid() or owner.st_mode & 0o022 or instead.is_symlink():
            raise
        return instead


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keeps other processes from building in the folder meanwhile; removes what interrupted ones left there."""
    with (folder / "kernels.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # some network folders have no locks: the work may then be done twice
            yield
            return
        for leftover in folder.glob(f"{_UNFINISHED}*"):
            leftover.unlink(missing_ok=True)
        yield


def _make(path: Path, command: list[str], source: str = "") -> None:
    """Runs `command -o path`, unless the file is there, such that other processes see the whole file or none.

    Args:
        source: What the command reads from its standard input.
    """
    if path.exists():
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED, suffix=path.suffix)
    os.close(handle)
    try:
        _run([*command, "-o", temporary], source)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run(command: list[str], source: str = "") -> str:
    result = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise CompilerError(f"{' '.join(command)} failed with status {result.returncode}:\n{result.stderr[-4000:]}")
    return result.stdout


def _digest(*parts: bytes) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()[:20]
