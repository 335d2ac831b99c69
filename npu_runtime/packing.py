"""Conversion of arrays to the form that a device stores, and back, with the checks that a spec asks for."""

from __future__ import annotations

from typing import Any

import numpy as np

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import (
    FLOAT_MAX,
    INT32_MAX,
    INT32_MIN,
    INT_DTYPES,
    dtype_name,
    misfit,
    numpy_dtype,
    saturating_cast,
)
from npu_compiler.graph.model import TensorSpec
from npu_compiler.graph.quantization import QuantizedArray

_KINDS = {"f": "float", "V": "float", "i": "int", "u": "int", "b": "bool"}


def to_numpy(value: Any) -> np.ndarray:
    """A NumPy array from an array, a torch tensor or a quantized matrix; bfloat16 becomes ml_dtypes.bfloat16."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, QuantizedArray):
        return value.dequantize()
    if hasattr(value, "detach"):
        from npu_runtime.torch_arrays import tensor_to_numpy

        return tensor_to_numpy(value.cpu())
    return np.asarray(value)


def as_array(value: Any, what: str) -> np.ndarray:
    """An array from a value that a user may give: an array, a torch tensor, a number, or a nested list of numbers.

    Args:
        what: Name of the value, for the message.

    Raises:
        InputError: it is none of these.
    """
    problem = f"{what} is a {type(value).__name__}; give a device buffer, an array, a torch tensor or a list of numbers"
    try:
        array = to_numpy(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{problem} ({error})") from error
    if isinstance(value, np.ndarray) or hasattr(value, "detach"):
        return array
    if array.dtype.kind not in _KINDS:
        raise InputError(problem)
    return array.astype(np.float32) if isinstance(value, (float, list, tuple)) and array.dtype.kind == "f" else array


def pack_array(data: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Check an array against a spec, then cast and pad it to the form that the device stores.

    Raises:
        InputError: wrong shape, a float where integers are wanted, an index out of bounds, or a value that is too large
            for the dtype it is stored in.
    """
    check_array(data, spec)
    storage = spec.storage or spec.dtype
    if (lost := misfit(data, storage)) is not None:
        problem = f"'{spec.name}' holds {beyond_range(lost, storage)}"
        raise InputError(f"{problem}; compile the program for compute dtype bfloat16 or float32")
    stored = saturating_cast(np.asarray(data, order="C"), storage)
    if spec.alloc_shape is not None and spec.alloc_shape != spec.shape:
        if not _fits_in(spec.shape, spec.alloc_shape):
            raise InputError(f"'{spec.name}' of shape {list(spec.shape)} does not fit in {list(spec.alloc_shape)}")
        padded = np.zeros(spec.alloc_shape, dtype=stored.dtype)
        padded[tuple(slice(size) for size in spec.shape)] = stored
        stored = padded
    return np.asarray(stored, order="C")


def _fits_in(shape: tuple[int, ...], alloc_shape: tuple[int, ...]) -> bool:
    return len(shape) == len(alloc_shape) and all(size <= room for size, room in zip(shape, alloc_shape, strict=True))


def check_array(data: np.ndarray, spec: TensorSpec) -> None:
    if tuple(data.shape) != spec.shape:
        raise InputError(f"'{spec.name}' has shape {list(data.shape)}, but the program expects {list(spec.shape)}")
    kind = _kind(data)
    wanted = "int" if spec.dtype in INT_DTYPES else "bool" if spec.dtype == "bool" else "float"
    if kind != wanted and not (kind in ("int", "bool") and wanted in ("float", "int")):
        raise InputError(f"'{spec.name}' has dtype {data.dtype}, but the program expects {spec.dtype}")
    if wanted == "int" and data.size:
        low, high = spec.bounds or (INT32_MIN, INT32_MAX)
        if (problem := out_of_bounds(data, low, high)) is not None:
            raise InputError(f"'{spec.name}' {problem}")


def beyond_range(value: float, dtype: str) -> str:
    """The end of a message about a value that exceeds a float dtype: "1e+06, which float16 cannot hold (at most …)"."""
    return f"{value:.6g}, which {dtype} cannot hold (at most {FLOAT_MAX[dtype]:.6g})"


def out_of_bounds(data: np.ndarray, low: int, high: int) -> str | None:
    """A text that says which integers exceed their bounds; None if none does.

    An index has bounds 0..n-1 or -n..n-1.
    """
    smallest, largest = int(data.min()), int(data.max())
    if low <= smallest and largest <= high:
        return None
    problem = f"holds {smallest if smallest < low else largest}, which is outside {low}..{high}"
    if low in (0, -high - 1):
        return problem
    return (
        f"{problem}: integer arithmetic in 32 bits could overflow; partition() with that op on the CPU computes in 64"
    )


def _kind(data: np.ndarray) -> str:
    if np.dtype(data.dtype) == numpy_dtype("bfloat16"):
        return "float"
    return _KINDS.get(np.dtype(data.dtype).kind, str(data.dtype))


def unpack_array(stored: np.ndarray, shape: tuple[int, ...], spec: TensorSpec | None) -> np.ndarray:
    """The data of a stored array, the inverse of `pack_array`: without padding, and in the spec's dtype.

    Args:
        spec: None to keep the storage dtype.
    """
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
