"""`NPUBuffer`: arrays to device memory and back, with the cast and padding that a spec asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import INT32_MAX, INT32_MIN, INT_DTYPES, dtype_name, numpy_dtype, saturating_cast
from npu_compiler.graph.model import TensorSpec
from npu_runtime.backend import Backend, DeviceBuffer, Shape

if TYPE_CHECKING:
    from npu_runtime.device import Device

_KINDS = {"f": "float", "V": "float", "i": "int", "u": "int", "b": "bool"}


class NPUBuffer:
    """Makes device buffers; see `DeviceBuffer` for what they offer."""

    @staticmethod
    def from_numpy(
        data: np.ndarray, device: Device | Backend, spec: TensorSpec | None = None, alloc_shape: Shape | None = None
    ) -> DeviceBuffer:
        """Upload an array.

        Args:
            spec: A program's input spec: the array is checked against its shape, kind of dtype and index bounds,
                cast to its storage dtype and padded to its `alloc_shape`.

        Raises:
            InputError: the array does not fit the spec.
        """
        return as_backend(device).allocate_buffer(np.asarray(data), alloc_shape, spec)

    @staticmethod
    def zeros(
        shape: Shape, device: Device | Backend, dtype: str = "float16", alloc_shape: Shape | None = None
    ) -> DeviceBuffer:
        """A zero-filled buffer of a storage dtype."""
        return as_backend(device).allocate_zeros(tuple(shape), dtype, alloc_shape)


def as_backend(device: Device | Backend) -> Backend:
    return device if isinstance(device, Backend) else device.backend


def pack_array(data: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Check an array against a spec, then cast and pad it to what the device stores.

    Raises:
        InputError: wrong shape, a float where integers are wanted, or an index out of bounds.
    """
    check_array(data, spec)
    stored = saturating_cast(np.asarray(data, order="C"), spec.storage or spec.dtype)
    if spec.alloc_shape is not None and spec.alloc_shape != spec.shape:
        if not _fits_in(spec.shape, spec.alloc_shape):
            raise InputError(f"'{spec.name}' of shape {list(spec.shape)} does not fit in {list(spec.alloc_shape)}")
        padded = np.zeros(spec.alloc_shape, dtype=stored.dtype)
        padded[tuple(slice(size) for size in spec.shape)] = stored
        stored = padded
    return np.asarray(stored, order="C")


def _fits_in(shape: Shape, alloc_shape: Shape) -> bool:
    return len(shape) == len(alloc_shape) and all(size <= room for size, room in zip(shape, alloc_shape, strict=True))


def check_array(data: np.ndarray, spec: TensorSpec) -> None:
    if tuple(data.shape) != spec.shape:
        raise InputError(f"'{spec.name}' has shape {list(data.shape)}, but the program wants {list(spec.shape)}")
    kind = _kind(data)
    wanted = "int" if spec.dtype in INT_DTYPES else "bool" if spec.dtype == "bool" else "float"
    if kind != wanted and not (kind in ("int", "bool") and wanted in ("float", "int")):
        raise InputError(f"'{spec.name}' has dtype {data.dtype}, but the program wants {spec.dtype}")
    if wanted == "int" and data.size:
        low, high = spec.bounds or (INT32_MIN, INT32_MAX)
        smallest, largest = int(data.min()), int(data.max())
        if smallest < low or largest > high:
            offender = smallest if smallest < low else largest
            raise InputError(f"'{spec.name}' holds {offender}, which is outside {low}..{high}")


def _kind(data: np.ndarray) -> str:
    if np.dtype(data.dtype) == numpy_dtype("bfloat16"):
        return "float"
    return _KINDS.get(np.dtype(data.dtype).kind, str(data.dtype))


def unpack_array(stored: np.ndarray, shape: Shape, spec: TensorSpec | None) -> np.ndarray:
    """The inverse of `pack_array`: without padding, and in the spec's dtype if there is one."""
    if stored.shape != shape:
        stored = stored[tuple(slice(size) for size in shape)]
    if spec is not None:
        wanted = numpy_dtype(spec.dtype)
        stored = stored.reshape(spec.shape)
        return np.asarray(stored.astype(wanted) if stored.dtype != wanted else stored, order="C")
    return np.asarray(stored, order="C")


def storage_name(data: np.ndarray) -> str:
    """The storage dtype of an array uploaded without a spec: wide integers become int32, float64 float32."""
    name = dtype_name(data.dtype)
    return {"int64": "int32", "int16": "int32", "int8": "int32", "uint8": "int32", "float64": "float32"}.get(name, name)
