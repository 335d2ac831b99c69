"""Device memory: `DeviceBuffer` (also called `NPUBuffer`), `StagedInputs`, and `DeviceMemory`, which allocates both."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np

from npu_compiler.errors import DeviceError, InputError
from npu_compiler.graph.dtypes import STORED_DTYPES, itemsize, numpy_dtype
from npu_compiler.graph.model import TensorSpec
from npu_compiler.program.views import numel
from npu_runtime.packing import pack_array, storage_name, unpack_array

Shape: TypeAlias = tuple[int, ...]
BufferT = TypeVar("BufferT", bound="DeviceBuffer")
MemoryT = TypeVar("MemoryT", bound="DeviceMemory")
MemoryT_co = TypeVar("MemoryT_co", bound="DeviceMemory", covariant=True)


class DeviceBuffer(ABC):
    """Memory on a device, dense in `alloc_shape`; `shape` is the part that holds data.

    Attributes:
        dtype: Storage dtype name.
        native_handle: The device's own object; two buffers with the same handle are the same memory.
        prepared: The content in other layouts, for buffers that stay constant; filled in by the backend.
        dlpack_copies: Whether `__dlpack__` returns a copy instead of the memory itself.
    """

    dlpack_copies: ClassVar[bool] = False

    def __init__(self, shape: Shape, alloc_shape: Shape | None, dtype: str, native_handle: Any) -> None:
        self.shape = tuple(shape)
        self.alloc_shape = tuple(alloc_shape) if alloc_shape is not None else self.shape
        self.dtype = dtype
        self.native_handle = native_handle
        self.prepared: dict[Any, Any] = {}
        self._writes = [0]  # a list, so that all handles share it
        self._is_current: Callable[[], bool] | None = None

    @staticmethod
    def from_numpy(
        data: np.ndarray,
        device: DeviceMemory | Opened[DeviceMemory],
        spec: TensorSpec | None = None,
        alloc_shape: Shape | None = None,
    ) -> DeviceBuffer:
        """Upload an array to a `Device` or backend; see `DeviceMemory.allocate_buffer`."""
        return as_backend(device).allocate_buffer(data, alloc_shape, spec)

    @staticmethod
    def zeros(
        shape: Shape,
        device: DeviceMemory | Opened[DeviceMemory],
        dtype: str = "float16",
        alloc_shape: Shape | None = None,
    ) -> DeviceBuffer:
        """A zero-filled buffer of a storage dtype."""
        return as_backend(device).allocate_zeros(tuple(shape), dtype, alloc_shape)

    @property
    def size_bytes(self) -> int:
        """Bytes in the device's memory, padding included."""
        return numel(self.alloc_shape) * itemsize(self.dtype)

    def guarded(self: BufferT, is_current: Callable[[], bool]) -> BufferT:
        """A handle to the same memory that refuses to be read once `is_current()` is false."""
        handle = copy.copy(self)
        handle._is_current = is_current
        return handle

    def check_current(self) -> None:
        """Raise a `DeviceError` if a later run has overwritten the output that this handle stands for."""
        if self._is_current is not None and not self._is_current():
            raise DeviceError(
                "this output was overwritten by a later run(); read it, or copy() it, before running again"
            )

    def copy(self) -> DeviceBuffer:
        """A new buffer with the same content, which later runs do not overwrite."""
        self.check_current()
        with reporting_shortage(self.dtype, self.alloc_shape):
            return self._clone()

    def to_numpy(self, spec: TensorSpec | None = None) -> np.ndarray:
        """Download, without channel padding.

        Args:
            spec: A spec whose (PyTorch) dtype the result has; None for the storage dtype.
        """
        self.check_current()
        return unpack_array(self._download(), self.shape, spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Download the buffer into an array, always a copy (the protocol of `np.asarray`)."""
        if copy is False:
            raise ValueError("a device buffer cannot become an array without a copy")
        return np.asarray(self.to_numpy(), dtype)

    def write(self, data: np.ndarray, spec: TensorSpec | None = None) -> None:
        """Overwrite the content in place, with the checks, cast and padding of `DeviceMemory.allocate_buffer`."""
        spec = spec or TensorSpec("buffer", self.shape, self.dtype, self.dtype, self.alloc_shape)
        self._upload(pack_array(data, spec))
        self.mark_written()

    def copy_from(self, other: DeviceBuffer) -> None:
        """Overwrite the content in place with that of another buffer of the same layout, on the device.

        Raises:
            InputError: the other buffer has another layout.
        """
        if (other.alloc_shape, other.dtype) != (self.alloc_shape, self.dtype):
            raise InputError(
                f"a buffer of {other.dtype}{list(other.alloc_shape)} cannot be copied into one of "
                f"{self.dtype}{list(self.alloc_shape)}"
            )
        other.check_current()
        self._copy_from(other)
        self.mark_written()

    def mark_written(self) -> None:
        """Discard the prepared forms of the old content, which has been replaced."""
        self.prepared.clear()
        self._writes[0] += 1

    @property
    def version(self) -> int:
        """Number of times that `write` or `copy_from` has replaced the content, through any handle."""
        return self._writes[0]

    @abstractmethod
    def _download(self) -> np.ndarray:
        """The whole memory as an array of `alloc_shape` in the storage dtype."""

    @abstractmethod
    def _upload(self, data: np.ndarray) -> None:
        """Overwrite the whole memory from an array of `alloc_shape` in the storage dtype."""

    @abstractmethod
    def _clone(self) -> DeviceBuffer:
        """New memory with the same content.

        Raises `MemoryError`, with the device's reason, if there is not enough memory.
        """

    def _copy_from(self, other: DeviceBuffer) -> None:
        """Overwrite the whole memory from a buffer of the same layout; devices that can do so copy without the host."""
        self._upload(other._download())

    def _clear(self) -> None:
        """Overwrite the whole memory with zeros."""
        self._upload(np.zeros(self.alloc_shape, numpy_dtype(self.dtype)))


NPUBuffer = DeviceBuffer


class StagedInputs:
    """Input buffers that the host fills together, with one copy if the device supports that.

    The arrays may be changed again as soon as `upload` returns; runs that were launched before are not affected.

    Args:
        copy: Copies all arrays to their buffers, in order after the work that has been launched.

    Attributes:
        buffers: Name → buffer, zero-filled at first.
        arrays: Name → array on the host, of the buffer's dtype and its spec's `alloc_shape`.
    """

    def __init__(
        self, buffers: Mapping[str, DeviceBuffer], arrays: Mapping[str, np.ndarray], copy: Callable[[], None]
    ) -> None:
        self.buffers, self.arrays = dict(buffers), dict(arrays)
        self._copy = copy

    def upload(self) -> None:
        """Copy all arrays to the device."""
        self._copy()
        for buffer in self.buffers.values():
            buffer.mark_written()


class DeviceMemory:
    """Allocator of a device's buffers: the part of a backend that is about memory.

    Attributes:
        stored: Names of the dtypes that the device can store.
    """

    stored: frozenset[str] = STORED_DTYPES

    def allocate(self, shape: Shape, dtype: str, alloc_shape: Shape | None = None) -> DeviceBuffer:
        """A buffer with undefined content; every device has to define this for the methods below.

        Raises:
            MemoryError: there is not enough memory; with the device's reason.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no allocate(), which makes its buffers")

    def allocate_buffer(
        self, data: np.ndarray, alloc_shape: Shape | None = None, spec: TensorSpec | None = None
    ) -> DeviceBuffer:
        """Upload an array.

        Args:
            alloc_shape: Shape in memory, if that is larger and there is no spec; None for the array's shape.
            spec: A program's input spec: the array is checked against its shape, kind of dtype and index bounds, cast
                to its storage dtype and padded to its `alloc_shape`. None keeps the array's dtype, except that integers
                become int32 and float64 becomes float32.

        Raises:
            InputError: the array does not fit the spec.
            DeviceError: the device does not store the dtype, or is out of memory.
        """
        data = np.asarray(data)
        if spec is None:
            spec = TensorSpec("buffer", data.shape, str(data.dtype), storage_name(data), alloc_shape)
        stored = pack_array(data, spec)
        buffer = self._allocate_checked(spec.shape, spec.storage or spec.dtype, spec.alloc_shape)
        buffer._upload(stored)
        return buffer

    def allocate_joined(self, parts: Sequence[np.ndarray], spec: TensorSpec) -> DeviceBuffer:
        """Upload arrays to one buffer that joins them along the first dimension, as the spec describes it."""
        return self.allocate_buffer(parts[0] if len(parts) == 1 else np.concatenate(parts), spec=spec)

    def adopt(self, parts: Sequence[Any], spec: TensorSpec) -> DeviceBuffer | None:
        """A buffer that joins tensors of another library, which are on the device already, along the first dimension.

        Returns:
            The buffer; None if they are elsewhere, or are not stored as the spec says.
        """
        return None

    def from_dlpack(self, value: Any) -> DeviceBuffer | None:
        """A buffer with a copy of another library's array that is on this device.

        Args:
            value: An object that supports DLPack. Its integers and float64 become int32 and float32, as in
                `allocate_buffer`.

        Returns:
            The buffer; None if the array is elsewhere, or has a dtype that cannot be exchanged.
        """
        return None

    def allocate_zeros(self, shape: Shape, dtype: str, alloc_shape: Shape | None = None) -> DeviceBuffer:
        """A zero-filled buffer of a storage dtype.

        Raises:
            DeviceError: the device does not store the dtype, or is out of memory.
        """
        buffer = self._allocate_checked(shape, dtype, alloc_shape)
        buffer._clear()
        return buffer

    def allocate_arena(self, size: int) -> DeviceBuffer:
        """A zero-filled buffer of `size` bytes for the intermediate values of programs.

        Raises:
            DeviceError: the device is out of memory.
        """
        return self.allocate_zeros((size,), "uint8")

    def allocate_visible(self, shape: Shape, dtype: str) -> tuple[DeviceBuffer, Callable[[], np.ndarray]]:
        """A zero-filled buffer for small results, and a function by which the host reads it at any time.

        Reading does not wait. A run's results are certain to be there once the host has waited for a `marker` made
        after the run was launched.
        """
        buffer = self.allocate_zeros(shape, dtype)
        return buffer, buffer.to_numpy

    def allocate_staged(self, specs: Iterable[TensorSpec]) -> StagedInputs:
        """Zero-filled buffers for a program's inputs, which the host fills together."""
        buffers = {
            spec.name: self.allocate_zeros(spec.shape, spec.storage or spec.dtype, spec.alloc_shape) for spec in specs
        }
        arrays = {name: np.zeros(x.alloc_shape, numpy_dtype(x.dtype)) for name, x in buffers.items()}

        def copy_all() -> None:
            for name, buffer in buffers.items():
                buffer._upload(arrays[name])

        return StagedInputs(buffers, arrays, copy_all)

    def _allocate_checked(self, shape: Shape, dtype: str, alloc_shape: Shape | None) -> DeviceBuffer:
        if dtype not in self.stored:
            raise DeviceError(f"the device does not store {dtype}; it stores {', '.join(sorted(self.stored))}")
        with reporting_shortage(dtype, shape if alloc_shape is None else alloc_shape):
            return self.allocate(shape, dtype, alloc_shape)


class Opened(Protocol[MemoryT_co]):
    """An object that has a backend: a `Device`."""

    @property
    def backend(self) -> MemoryT_co: ...


def as_backend(device: MemoryT | Opened[MemoryT]) -> MemoryT:
    """The backend of a `Device`; a backend is returned as it is."""
    return device if isinstance(device, DeviceMemory) else device.backend


@contextmanager
def reporting_shortage(dtype: str, alloc_shape: Shape) -> Iterator[None]:
    """Context that turns a `MemoryError` into a `DeviceError` with the size of the allocation that failed."""
    try:
        yield
    except MemoryError as error:
        raise DeviceError(f"out of memory: cannot allocate {dtype}{list(alloc_shape)}: {error}") from error
