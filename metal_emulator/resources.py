"""Buffers, and the memory behind them."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import TYPE_CHECKING

from metal_emulator.emulator import Emulator
from metal_emulator.objc import NSSTRING, RANGE, Labelled, MetalUsageError, NSRange, selector

if TYPE_CHECKING:
    from metal_emulator.device import MTLDevice

POISON = 0xFF  # NaN in every float type, -1 in every integer one
STORAGE_MODES = {0: "shared", 1: "managed", 2: "private"}


class Storage:
    """A buffer's memory, initialized to zeros if `clean`, else to poison.

    It lives as long as its buffer or a command that uses it.
    """

    def __init__(self, emulator: Emulator, length: int, *, clean: bool) -> None:
        self.emulator = emulator
        self.length = length
        self.label: str | None = None
        self.memory = mmap.mmap(-1, length)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if not clean:
            ctypes.memset(self.address, POISON, length)
        emulator.allocated += length

    def __str__(self) -> str:
        return f"the buffer {self.label!r} of {self.length} bytes" if self.label else f"a buffer of {self.length} bytes"

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self.emulator.reclaim(self.memory, str(self))


class VarList:
    """A stand-in for pyobjc's object for a `void *` of unknown length. It does not keep the buffer alive."""

    __slots__ = ("_storage",)

    def __init__(self, storage: Storage) -> None:
        self._storage = weakref.ref(storage)

    def as_buffer(self, count: int) -> memoryview:
        """A writable view of the first `count` bytes.

        Raises:
            MetalUsageError: The buffer has been released, or is shorter.
        """
        storage = self._storage()
        if storage is None:
            raise MetalUsageError("contents().as_buffer(): the buffer is gone")
        if not isinstance(count, int) or not 0 < count <= storage.length:
            raise MetalUsageError(f"contents().as_buffer({count!r}): {storage} was given")
        return memoryview(storage.memory)[:count]


class MTLBuffer(Labelled):
    """A range of memory that the CPU and the GPU share."""

    __slots__ = ("_mode", "_storage")

    def __init__(self, device: MTLDevice, storage: Storage, mode: int) -> None:
        super().__init__(device)
        self._storage: Storage | None = storage
        self._mode = mode

    def _dealloc(self) -> None:
        self._storage = None

    @property
    def _memory(self) -> Storage:
        """The memory of a buffer that has not been released."""
        assert self._storage is not None
        return self._storage

    @selector(NSSTRING)
    def setLabel_(self, label: str) -> None:
        self._label = self._memory.label = label

    @selector()
    def length(self) -> int:
        return self._memory.length

    @selector()
    def allocatedSize(self) -> int:
        return self._memory.length

    @selector()
    def gpuAddress(self) -> int:
        return self._memory.address

    @selector()
    def storageMode(self) -> int:
        return self._mode

    @selector()
    def contents(self) -> VarList:
        self._check(STORAGE_MODES[self._mode] != "private", "contents", "the CPU does not see a private buffer")
        return VarList(self._memory)

    @selector(RANGE)
    def didModifyRange_(self, modified: NSRange) -> None:
        mode = STORAGE_MODES[self._mode]
        self._check(mode == "managed", "didModifyRange_", f"for managed buffers only, and this one is {mode}")
        problem = outside(self._memory, modified.location, modified.length)
        self._check(not problem, "didModifyRange_", problem)


def outside(storage: Storage, offset: int, size: int) -> str:
    """An error message if a range is empty or not within the buffer, else an empty string."""
    if size and offset + size <= storage.length:
        return ""
    return f"{size} bytes from offset {offset} do not lie in {storage}"
