"""Memories of the machine as bytes, with what was written where; and the parts of them that instructions touch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from npu_compiler.errors import DeviceError
from npu_compiler.graph.dtypes import numpy_dtype
from npu_model.isa.instructions import Tile

POISON = 0xA5

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""For each axis of a box, the first existing element and the one behind the last."""


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

    def view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The array of a box; its elements are the memory's own bytes.

        Raises:
            MachineError: part of the box is outside the memory, or the address is not a multiple of the element size.
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
        """Raise `MachineError` if part of a box of elements of so many bytes has never been written."""
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
        """The flags of a box, those of an element as one integer."""
        assert self.written is not None
        return np.ndarray(shape, f"u{size}", self.written.data, address, strides)


Memories: TypeAlias = Callable[[Tile], Memory]
"""The memory that an operand is in."""

_WRITTEN = {size: int.from_bytes(b"\1" * size, "little") for size in (1, 2, 4, 8)}


class Part:
    """The existing part of an operand in its memory; axes that the operand does not have are of size 1.

    Args:
        ranges: The elements of the instruction's box that exist; at least one along each axis.
    """

    def __init__(self, tile: Tile, ranges: Ranges, memories: Memories) -> None:
        self.memory, self.dtype, self.strides = memories(tile), numpy_dtype(tile.dtype), tile.strides
        self.shape = tuple(
            end - first if stride else 1 for (first, end), stride in zip(ranges, self.strides, strict=True)
        )
        self._place = tile.place
        self._offset = sum(first * stride for (first, _), stride in zip(ranges, self.strides, strict=True))

    def read(self, counters: Sequence[int]) -> np.ndarray:
        """What it holds in a round of the loops. Raises `MachineError` where something was never written."""
        address, memory = self._address(counters), self.memory
        array = memory.view(address, self.shape, self.strides, self.dtype)
        if memory.written is not None:
            memory.check_written(address, self.shape, self.strides, self.dtype.itemsize)
        return array

    def write(self, counters: Sequence[int], rows: Sequence[int] | None = None) -> np.ndarray:
        """The array to write into in a round of the loops.

        Args:
            rows: The rows that will be written. Default: all.
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
