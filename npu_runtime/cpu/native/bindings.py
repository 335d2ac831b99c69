"""Loads the compiled library of native kernels, and wraps kernels as prepared launches."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npu_compiler.errors import DeviceError
from npu_runtime.cpu.arrays import address, strides_of
from npu_runtime.cpu.native.build import library_path
from npu_runtime.cpu.native.extents import ArgumentBlock, View, check_extents
from npu_runtime.cpu.native.numbers import DTYPES
from npu_runtime.cpu.native.threads import usable_threads


class _Launch(ctypes.Structure):
    _fields_ = [("fn", ctypes.c_void_p), ("args", ctypes.c_void_p)]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library of kernels; None if it cannot be built (`build.failure_reason` says why).

    Raises:
        DeviceError: the system refuses to load it, for example as its folder does not allow execution.
    """
    path = library_path()
    if path is None:
        return None
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(f"cannot load the native CPU kernels (NPU_SIM_NATIVE=0 does without): {error}") from error
    loaded.npu_run.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    loaded.npu_run.restype = ctypes.c_int64
    loaded.npu_failure.restype = ctypes.c_char_p
    loaded.npu_set_threads.argtypes = [ctypes.c_int64]
    loaded.npu_set_threads.restype = None
    loaded.npu_set_threads(usable_threads())
    return loaded


@dataclass(frozen=True)
class Layout:
    """The sizes by which operands are packed, which depend on the instruction set that the library was compiled for.

    Attributes:
        lanes: Floats in a vector.
        max_rows: Rows that the product of gemm.h handles at once.
        has_pairs: Whether bfloat16 is multiplied in pairs.
        has_byte_quads: Whether there is an instruction for products of unsigned with signed bytes.
        has_tiles: Whether there is a matrix unit for bfloat16 and bytes that this process may use.
    """

    lanes: int
    max_rows: int
    has_pairs: bool
    has_byte_quads: bool
    has_tiles: bool

    @property
    def panel(self) -> int:
        """Number of columns of a panel (kPanel in gemm.h)."""
        return 2 * self.lanes


@functools.cache
def layout() -> Layout:
    """The layout of the loaded library."""
    loaded = library()
    if loaded is None:
        raise RuntimeError("there are no native kernels in this process")
    lanes, max_rows = _integer(loaded, "npu_lanes"), _integer(loaded, "npu_max_rows")
    features = ("npu_has_pairs", "npu_has_byte_quads", "npu_has_tiles")
    return Layout(lanes, max_rows, *(bool(_integer(loaded, name)) for name in features))


def _integer(loaded: ctypes.CDLL, name: str) -> int:
    function = getattr(loaded, name)
    function.restype = ctypes.c_int64
    value: int = function()
    return value


def available() -> bool:
    """Whether native kernels can be prepared in this process."""
    return library() is not None


@functools.cache
def _kernel(name: str, args_type: type[ArgumentBlock]) -> Any:
    loaded = library()
    if loaded is None or _integer(loaded, f"npu_{name}_args_size") != ctypes.sizeof(args_type):
        raise TypeError(f"{args_type.__name__} does not match the argument block of kernel {name!r}")
    function = getattr(loaded, f"npu_{name}")
    function.argtypes = [ctypes.c_void_p]
    function.restype = ctypes.c_int64
    return function


def _failure(launch: NativeLaunch) -> DeviceError:
    """The error for the latest kernel of this thread that failed, with the reason that the library reports."""
    loaded = library()
    reason = loaded.npu_failure().decode() if loaded is not None else "no native kernels"
    return DeviceError(f"{reason} in kernel {launch.name}{launch.origin}")


def operand(array: np.ndarray | None) -> View:
    """The C description of an array of up to four dimensions; the array's memory must not move."""
    if array is None:
        return View()
    missing = 4 - array.ndim
    if missing < 0:
        raise ValueError(f"operands have at most four dimensions, not {array.ndim}")
    size = (1,) * missing + array.shape
    stride = (0,) * missing + strides_of(array)
    return View(address(array), DTYPES.get(array.dtype, -1), size, stride)


class NativeLaunch:
    """A kernel with its argument block; calling it runs the kernel on the current contents of its operands.

    A function that prepares one runs nothing. It returns None instead if there are no native kernels, or none for such
    dtypes, strides or numbers of dimensions.

    The block points into the arrays' memory, so the launch keeps them alive. Calling it raises `DeviceError` if
    there is no memory for the kernel's own work.

    Attributes:
        origin: Text that follows the kernel's name in an error: the call that it was prepared for.

    Raises:
        DeviceError: the kernel would touch memory beyond an operand.
    """

    __slots__ = ("name", "args", "origin", "_keep", "_function", "_args_address")

    def __init__(self, name: str, args: ArgumentBlock, keep: Sequence[object] = ()) -> None:
        check_extents(name, args.extents(name), keep)
        self.name = name
        self.args = args
        self.origin = ""
        self._keep = tuple(keep)
        self._function = _kernel(name, type(args))
        self._args_address = ctypes.addressof(args)

    def __call__(self) -> None:
        if self._function(self._args_address):
            raise _failure(self)

    def addresses(self) -> tuple[int, int]:
        """The addresses of the kernel's function and of its argument block."""
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0, self._args_address


def pointers(args: ctypes.Structure, start: int, size: int) -> list[tuple[ctypes.c_uint64, int]]:
    """The fields of an argument block that point into `size` bytes from `start`, each with its offset from `start`."""
    fields = []
    for name, kind, *_ in args._fields_:
        place = ctypes.addressof(args) + getattr(type(args), name).offset
        if issubclass(kind, ctypes.Structure):
            fields += pointers(kind.from_address(place), start, size)
        elif kind is ctypes.c_void_p:
            field = ctypes.c_uint64.from_address(place)
            if start <= field.value < start + size:
                fields.append((field, field.value - start))
    return fields


class NativeSequence:
    """Launches that run one after the other within a single foreign call; it ends at one that fails (`DeviceError`)."""

    __slots__ = ("launches", "_table", "_run", "_table_address", "_count")

    def __init__(self, launches: Iterable[NativeLaunch]) -> None:
        self.launches = tuple(launches)
        self._table = (_Launch * len(self.launches))(*(_Launch(*launch.addresses()) for launch in self.launches))
        self._table_address = ctypes.addressof(self._table)
        self._count = len(self.launches)
        self._run: Any = getattr(library(), "npu_run", None)

    def __len__(self) -> int:
        return self._count

    def __call__(self) -> None:
        if self._count:
            failed: int = self._run(self._table_address, self._count)
            if failed:
                raise _failure(self.launches[failed - 1])


def launch(name: str, args: ArgumentBlock, *keep: object) -> NativeLaunch:
    """Prepare kernel `name` with the arguments `args`, which point into the arrays in `keep`."""
    return NativeLaunch(name, args, keep)
