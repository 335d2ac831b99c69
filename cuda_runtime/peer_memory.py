"""Memory of the GPUs of a group that the others reach directly, for kernels that exchange values themselves.

GPUs that are joined by NVLink, or by a bus that lets them, map each other's memory (CUDA's interprocess communication).
NVLink's multicast is not used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from cuda_runtime.cuda_device import CUDADevice, load_driver
from npu_compiler.errors import DeviceError

Gather: TypeAlias = Callable[[bytes], list[bytes]]
"""Hands every rank all ranks' bytes, of one length, in their order."""

_BYTES = 16 << 20
_ALIGNMENT = 256
_OFFSET_BYTES = 8
_LAZY_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class PeerMemory:
    """This GPU's memory for the others, zeroed, and theirs for it.

    Args:
        handle: Handle of this rank, as `own_handle` made it; with `base`, the memory.
        handles: Handles of all ranks in order.
        gather: Exchanges what ranks have to know of each other.

    Raises:
        Exception: CUDA's, if this GPU cannot reach another one's memory.
    """

    def __init__(self, device: CUDADevice, rank: int, base: int, handles: list[bytes], gather: Gather) -> None:
        self._device, self._rank, self._gather = device, rank, gather
        self._opened: dict[bytes, int] = {handles[rank]: base}
        self._bases = [self._open(handle) for handle in handles]
        self._gone_memory, self._gone = device.allocate_visible(4)
        self._used = 0
        self._regions: dict[int, tuple[Any, int]] = {}

    def table(self, size: int, memory: Any, read: int | None) -> np.ndarray:
        """The content of an operand that tells a kernel where memory is (`PeerExchange.peers`), uint64.

        Kernels have parts of the memory of their own, since tags of different ones are alike. All ranks prepare the
        same kernels in the same order, so a kernel's part is at the same place everywhere.

        Args:
            size: Bytes that the others write.
            memory: The operand's: a kernel that is prepared again for it keeps its part.
            read: The address of what the others read, if they do. All ranks call this together then.

        Raises:
            DeviceError: there is not so much memory, or what the others have to read cannot be reached.
        """
        if id(memory) not in self._regions:
            size = -(-size // _ALIGNMENT) * _ALIGNMENT
            if self._used + size > _BYTES:
                raise DeviceError(f"the programs exchange more values between GPUs than {_BYTES >> 20} MiB hold")
            self._regions[id(memory)] = memory, self._used
            self._used += size
        _, start = self._regions[id(memory)]
        places = [base + start for base in self._bases]
        others = self._addresses(read) if read is not None else []
        return np.array([*places, self._rank, int(self._gone_memory.data.ptr), *others], np.uint64)

    def abort(self) -> None:
        """Release kernels that wait for other GPUs; their results are wrong. Callable from any thread."""
        self._gone[:] = 1

    def _addresses(self, own: int) -> list[int]:
        """The addresses at which this GPU finds what all ranks have at an address of theirs."""
        with self._device.active("cannot share memory"):
            base = _allocation(own)
            handle = bytes(self._device.runtime.ipcGetMemHandle(base))
        told = self._gather(handle + (own - base).to_bytes(_OFFSET_BYTES))
        self._opened[handle] = base
        with self._device.active("cannot reach the other GPUs' memory"):
            return [self._open(each[:-_OFFSET_BYTES]) + int.from_bytes(each[-_OFFSET_BYTES:]) for each in told]

    def _open(self, handle: bytes) -> int:
        """The address of an allocation of any rank; each is mapped once."""
        if handle not in self._opened:
            self._opened[handle] = self._device.runtime.ipcOpenMemHandle(handle, _LAZY_ACCESS)
        return self._opened[handle]


def own_handle(device: CUDADevice) -> tuple[int, bytes]:
    """New memory for the others, zeroed: its address, and the handle by which other processes open it."""
    base: int = device.runtime.malloc(_BYTES)
    device.runtime.memset(base, 0, _BYTES)
    device.runtime.deviceSynchronize()
    return base, bytes(device.runtime.ipcGetMemHandle(base))


def _allocation(address: int) -> int:
    """The beginning of the allocation that contains an address on a GPU, which is what handles are made for."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    status = load_driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if status:
        raise DeviceError(f"memory cannot be shared with other GPUs: the CUDA driver reports error {status}")
    return base.value
