"""Memories of the machine as bytes, with a record of which were written, and views of the operands in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from npu_compiler.errors import DeviceError
from npu_compiler.graph.dtypes import numpy_dtype
from npu_model.isa.instructions import Tile

POISON = 0xA5

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""The first element inside the tensor and one past the last, for each axis of a box."""


class MachineError(DeviceError):
    """A tile program did something that no correct program does.

    The message says what, and where known, the instruction.
    """


class Memory:
    """A memory: an array of bytes, none of which counts as written at first.

    Args:
        name: Name in messages.
        data: The bytes, as a uint8 array; or their number, for a new memory filled with a fixed pattern.
        checked: Whether to record which bytes of a new memory have been written.
    """

    def __init__(self, name: str, data: np.ndarray | int, checked: bool) -> None:
        self.name = name
        self.data = np.full(data, POISON, np.uint8) if isinstance(data, int) else data
        self.written = np.zeros(data, bool) if checked and isinstance(data, int) else None

    def view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A strided view of the memory as an array.

        Raises:
            MachineError: part of the array is outside the memory, or the address is not a multiple of the element size.
        """
        if address % dtype.itemsize:
            raise MachineError(
                f"address {address} in {self.name} is no multiple of {dtype.itemsize} bytes, for {dtype.name}"
            )
        try:
            return np.ndarray(shape, dtype, self.data.data, address, strides)
        except (ValueError, TypeError, OverflowError):
            reach = [stride * (n - 1) for stride, n in zip(strides, shape, strict=True)]
            first = address + sum(min(0, bytes_) for bytes_ in reach)
            end = address + sum(max(0, bytes_) for bytes_ in reach) + dtype.itemsize
            raise MachineError(f"bytes {first} to {end} are outside of {self.name} of {len(self.data)} bytes") from None

    def check_written(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> None:
        """Raise `MachineError` if some byte of an array with elements of `size` bytes has never been written."""
        if self.written is None:
            return
        if not (self._flags(address, shape, strides, size) == _WRITTEN[size]).all():
            flags = np.ndarray((*shape, size), np.bool_, self.written.data, address, (*strides, 1))
            place = np.unravel_index(int(np.argmin(flags)), flags.shape)
            where = address + sum(int(i) * stride for i, stride in zip(place, (*strides, 1), strict=True))
            raise MachineError(f"byte {where} of {self.name} is read and was never written")

    def mark_written(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> None:
        if self.written is not None:
            self._flags(address, shape, strides, size)[...] = _WRITTEN[size]

    def _flags(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> np.ndarray:
        """A view of the array's written-flags, in which the flags of an element's bytes are one integer."""
        assert self.written is not None
        return np.ndarray(shape, f"u{size}", self.written.data, address, strides)


Memories: TypeAlias = Callable[[Tile], Memory]
"""A function that returns the memory in which an operand lies."""

_WRITTEN = {size: int.from_bytes(b"\1" * size, "little") for size in (1, 2, 4, 8)}


class Part:
    """The existing elements of an operand as an array in its memory; axes that the operand lacks are of size 1.

    Args:
        ranges: For each axis of the instruction's box, the first element inside the tensor and one past the last; none
            is empty.
    """

    def __init__(self, tile: Tile, ranges: Ranges, memories: Memories) -> None:
        self.memory, self.dtype, self.strides = memories(tile), numpy_dtype(tile.dtype), tile.strides
        self.shape = tuple(
            end - first if stride else 1 for (first, end), stride in zip(ranges, self.strides, strict=True)
        )
        self._place = tile.place
        self._offset = sum(first * stride for (first, _), stride in zip(ranges, self.strides, strict=True))

    def read(self, counters: Sequence[int]) -> np.ndarray:
        """The elements in the iteration with these loop counters.

        Raises `MachineError` if some byte was never written.
        """
        address, memory = self._address(counters), self.memory
        array = memory.view(address, self.shape, self.strides, self.dtype)
        if memory.written is not None:
            memory.check_written(address, self.shape, self.strides, self.dtype.itemsize)
        return array

    def write(self, counters: Sequence[int], rows: Sequence[int] | None = None) -> np.ndarray:
        """The array to write into in the iteration with these loop counters; its bytes count as written from then on.

        Args:
            rows: The indices along the first axis that will be written. None: all.
        """
        address, memory = self._address(counters), self.memory
        array = memory.view(address, self.shape, self.strides, self.dtype)
        if memory.written is not None:
            if rows is None:
                memory.mark_written(address, self.shape, self.strides, self.dtype.itemsize)
            for row in rows or ():
                place, shape = address + row * self.strides[0], (1, *self.shape[1:])
                memory.mark_written(place, shape, self.strides, self.dtype.itemsize)
        return array

    def _address(self, counters: Sequence[int]) -> int:
        return self._place(counters) + self._offset
