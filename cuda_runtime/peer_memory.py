"""GPU memory that the other GPUs of a group reach directly, for kernels that exchange values themselves.

GPUs that are joined by NVLink, or by a bus that supports it, map each other's memory (CUDA's interprocess
communication). NVLink's multicast is not used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from cuda_runtime.cuda_device import CUDADevice, load_driver
from npu_compiler.errors import DeviceError

Gather: TypeAlias = Callable[[bytes], list[bytes]]
"""A function that every rank calls with bytes of one length, and that returns all ranks' bytes in order."""

_BYTES = 16 << 20
_ALIGNMENT = 256
_OFFSET_BYTES = 8
_LAZY_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class PeerMemory:
    """Zeroed memory of this GPU that the other GPUs can access, and access to the memory that they offer.

    Args:
        base, handle: Address and handle of this rank's memory, from `own_handle`.
        handles: Handles of all ranks in order.
        gather: Exchanges bytes between all ranks.

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
        """The addresses by which a kernel finds each rank's memory: the contents of `PeerExchange.peers`, as uint64.

        Each kernel gets a part of the memory for itself, since the tags of different kernels are alike. All ranks
        prepare the same kernels in the same order, so the part is at the same offset on every rank.

        Args:
            size: Bytes that the other ranks write for the kernel.
            memory: Memory of the `peers` operand: a kernel that is prepared again for it keeps its part.
            read: The address of the operand that other ranks read, for which all ranks must call this together; None
                for none.

        Raises:
            DeviceError: there is not so much memory, or the operand of another rank cannot be reached.
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
        """Release kernels that wait for other GPUs; their results are wrong. May be called from any thread."""
        self._gone[:] = 1

    def _addresses(self, own: int) -> list[int]:
        """Exchange memory with the other ranks: return, in their order, where each one's memory lies for this GPU.

        All ranks of the group call this together.

        Args:
            own: Address of this rank's memory on its own GPU.
        """
        with self._device.active("cannot share memory"):
            base = _allocation(own)
            handle = bytes(self._device.runtime.ipcGetMemHandle(base))
        told = self._gather(handle + (own - base).to_bytes(_OFFSET_BYTES))
        self._opened[handle] = base
        with self._device.active("cannot reach the other GPUs' memory"):
            return [self._open(each[:-_OFFSET_BYTES]) + int.from_bytes(each[-_OFFSET_BYTES:]) for each in told]

    def _open(self, handle: bytes) -> int:
        """The mapped address of an allocation of any rank, by its handle; an allocation is mapped only once."""
        if handle not in self._opened:
            self._opened[handle] = self._device.runtime.ipcOpenMemHandle(handle, _LAZY_ACCESS)
        return self._opened[handle]


def own_handle(device: CUDADevice) -> tuple[int, bytes]:
    """Allocate zeroed memory for other GPUs to access: its address, and the handle by which other processes open it."""
    base: int = device.runtime.malloc(_BYTES)
    device.runtime.memset(base, 0, _BYTES)
    device.runtime.deviceSynchronize()
    return base, bytes(device.runtime.ipcGetMemHandle(base))


def _allocation(address: int) -> int:
    """The first address of the allocation that contains an address on a GPU.

    Handles exist for whole allocations only.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    status = load_driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if status:
        raise DeviceError(f"memory cannot be shared with other GPUs: the CUDA driver reports error {status}")
    return base.value
