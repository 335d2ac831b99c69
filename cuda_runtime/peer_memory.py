"""Memory of each GPU of a group that the others write directly, for kernels that exchange values themselves.

GPUs that are joined by NVLink, or by a bus that lets them, map each other's memory (CUDA's interprocess communication).
NVLink's multicast is not used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_runtime.cuda_device import CUDADevice
from npu_compiler.errors import DeviceError
from npu_compiler.program.kernels import KernelCall

_BYTES = 16 << 20
_ALIGNMENT = 256
_LAZY_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class PeerMemory:
    """This GPU's memory for the others, zeroed, and theirs for it.

    Args:
        handle: Of this rank, as `own_handle` made it; with `base`, the memory.
        handles: Those of all ranks in order.

    Raises:
        Exception: CUDA's, if this GPU cannot reach another one's memory.
    """

    def __init__(self, device: CUDADevice, rank: int, base: int, handles: list[bytes]) -> None:
        self._device, self._rank = device, rank
        runtime = device.runtime
        self._bases = [
            base if other == rank else runtime.ipcOpenMemHandle(handle, _LAZY_ACCESS)
            for other, handle in enumerate(handles)
        ]
        self._gone_memory, self._gone = device.allocate_visible(4)
        self._used = 0
        self._regions: dict[int, tuple[Any, int]] = {}

    def table(self, call: KernelCall, memory: Any) -> np.ndarray:
        """What a resident kernel's `peers` operand holds (see `resident/exchanges.py`), uint64 [ranks + 2].

        Kernels have regions of their own, since tags of different ones are alike. All ranks prepare the same kernels
        in the same order, so a kernel's region is at the same place everywhere.

        Args:
            memory: The operand's: a kernel that is prepared again for it keeps its region.
        """
        if id(memory) not in self._regions:
            size = -(-call.params["exchange_bytes"] // _ALIGNMENT) * _ALIGNMENT
            if self._used + size > _BYTES:
                raise DeviceError(f"the programs exchange more values between GPUs than {_BYTES >> 20} MiB hold")
            self._regions[id(memory)] = memory, self._used
            self._used += size
        _, start = self._regions[id(memory)]
        places = [base + start for base in self._bases]
        return np.array([*places, self._rank, int(self._gone_memory.data.ptr)], np.uint64)

    def abort(self) -> None:
        """Have kernels that wait for other GPUs go on, with wrong results. Callable from any thread."""
        self._gone[:] = 1


def own_handle(device: CUDADevice) -> tuple[int, bytes]:
    """New memory for the others, zeroed: its address, and the handle by which other processes open it."""
    base: int = device.runtime.malloc(_BYTES)
    device.runtime.memset(base, 0, _BYTES)
    device.runtime.deviceSynchronize()
    return base, bytes(device.runtime.ipcGetMemHandle(base))
