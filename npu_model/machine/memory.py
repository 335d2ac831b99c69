"""Memories of the machine as bytes, with what was written where; and arrays of what instructions touch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_compiler.errors import DeviceError
from npu_compiler.graph.dtypes import itemsize, numpy_dtype

POISON = 0xA5


class MachineError(DeviceError):
    """A tile program did what no correct one does; the message names instruction, node and address."""


class Memory:
    """One memory: bytes, of which none has been written at first.

    Args:
        name: Name in messages.
        data: uint8 array; new and poisoned if it is a size.
        checked: Whether to keep track of what was written.
    """

    def __init__(self, name: str, data: np.ndarray | int, checked: bool) -> None:
        self.name = name
        self.data = np.full(data, POISON, np.uint8) if isinstance(data, int) else data
        self.written = np.zeros(data, bool) if checked and isinstance(data, int) else None

    def view(self, address: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> np.ndarray:
        """The array of a box; its elements are the memory's own bytes.

        Raises:
            MachineError: part of the box is outside the memory, or the address is not a multiple of the element size.
        """
        size = itemsize(dtype)
        if address % size:
            raise MachineError(f"address {address} in {self.name} is no multiple of {size} bytes, for {dtype}")
        try:
            return np.ndarray(tuple(shape), numpy_dtype(dtype), self.data.data, address, tuple(strides))
        except (ValueError, TypeError, OverflowError):
            reach = [stride * (n - 1) for stride, n in zip(strides, shape, strict=True)]
            first = address + sum(min(0, bytes_) for bytes_ in reach)
            end = address + sum(max(0, bytes_) for bytes_ in reach) + size
            raise MachineError(f"bytes {first} to {end} are outside of {self.name} of {len(self.data)} bytes") from None

    def check_written(self, address: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> None:
        """Raise `MachineError` if part of a box has never been written."""
        if self.written is None:
            return
        flags = self._flags(address, shape, strides, dtype)
        if not flags.all():
            place = np.unravel_index(int(np.argmin(flags)), flags.shape)
            where = address + sum(int(i) * stride for i, stride in zip(place, (*strides, 1), strict=True))
            raise MachineError(f"byte {where} of {self.name} is read and was never written")

    def mark_written(self, address: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> None:
        if self.written is not None:
            self._flags(address, shape, strides, dtype)[...] = True

    def _flags(self, address: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> np.ndarray:
        assert self.written is not None
        return np.ndarray((*shape, itemsize(dtype)), np.bool_, self.written.data, address, (*strides, 1))
