"""Collectives between GPUs, by NCCL through CuPy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from cuda_compiler.cuda_program import CollectiveLaunch
from cuda_runtime.cuda_device import CUDADevice
from cuda_runtime.peer_memory import PeerMemory, own_handle
from npu_compiler.errors import DeviceError
from npu_runtime.collectives import Collectives, Share

_log = logging.getLogger(__name__)
_HANDLE_BYTES = 64
_TYPES = {"float32": "NCCL_FLOAT32", "float16": "NCCL_FLOAT16", "bfloat16": "NCCL_BFLOAT16", "int32": "NCCL_INT32"}


class NCCLCollectives(Collectives):
    """A group of GPUs, one per process, that exchange values through NCCL.

    Attributes:
        peers: Memory through which kernels exchange values themselves; None if the GPUs cannot reach each other's
            memory, or with `NPU_SIM_PEERS=0`, which leaves all exchanges to NCCL.

    Raises:
        DeviceError: CuPy has no NCCL, or the GPUs do not reach each other.
    """

    def __init__(self, device: CUDADevice, rank: int, size: int, share: Share) -> None:
        super().__init__(rank, size)
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            raise DeviceError(f"CuPy finds no NCCL, which GPUs exchange tensors with: {error}") from error
        if not getattr(nccl, "available", True):
            raise DeviceError("CuPy finds no NCCL, which GPUs exchange tensors with: pip install nvidia-nccl-cu13")
        self._device, self._nccl = device, nccl
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast can harm others on the host
        own = nccl.get_unique_id() if rank == 0 else None
        identifier = share(own if own is None else _as_bytes(own))
        try:
            with device.active("the GPUs do not reach each other"):
                self._group = _communicator(nccl, size, identifier, rank)
        except nccl.NcclError as error:
            raise DeviceError(f"the GPUs do not reach each other: {error}") from error
        self.peers = self._connected_peers()

    def _connected_peers(self) -> PeerMemory | None:
        """Memory that all GPUs of the group can write directly.

        None if one of them cannot, or with `NPU_SIM_PEERS=0`.
        """
        device, peers = self._device, None
        base, handle = 0, bytes(_HANDLE_BYTES)
        try:
            if os.environ.get("NPU_SIM_PEERS", "1") != "0":
                with device.active("cannot share memory"):
                    base, handle = own_handle(device)
        except DeviceError as error:
            _log.warning("rank %d exchanges values through NCCL only: %s", self.rank, error)
        handles = self._gathered(handle)
        try:
            if all(map(any, handles)):
                with device.active("cannot reach the other GPUs' memory"):
                    peers = PeerMemory(device, self.rank, base, handles, self._gathered)
        except DeviceError as error:
            _log.warning("rank %d exchanges values through NCCL only: %s", self.rank, error)
        return peers if all(map(int.from_bytes, self._gathered(bytes([peers is not None])))) else None

    def _gathered(self, own: bytes) -> list[bytes]:
        """The bytes `own` of every rank, in the order of ranks."""
        cupy, device = self._device.cupy, self._device
        with device.active("cannot exchange bytes"):
            part = cupy.asarray(np.frombuffer(own, np.uint8))
            whole = cupy.empty((self.size, len(own)), np.uint8)
            kind = self._nccl.NCCL_UINT8
            self._group.allGather(part.data.ptr, whole.data.ptr, len(own), kind, device.stream.ptr)
            device.stream.synchronize()
            return [row.tobytes() for row in whole.get()]

    def launch(self, what: CollectiveLaunch, dtype: str, addresses: Sequence[int]) -> Callable[[], Any]:
        """A function that enqueues a collective operation on operands at these addresses on the device's stream."""
        source, target = addresses
        kind = getattr(self._nccl, _TYPES[dtype])
        stream = self._device.stream.ptr
        if what.operation == "all_gather":
            return partial(self._group.allGather, source, target, what.elements, kind, stream)
        return partial(self._group.allReduce, source, target, what.elements, kind, self._nccl.NCCL_SUM, stream)

    def abort(self) -> None:
        if self.peers is not None:
            self.peers.abort()
        self._group.abort()


def _as_bytes(identifier: bytes | Sequence[int]) -> bytes:
    """NCCL's identifier of a group as bytes; before CuPy 14 it is a sequence of numbers from -128 to 127."""
    return identifier if isinstance(identifier, bytes) else bytes(number & 0xFF for number in identifier)


def _communicator(nccl: Any, size: int, identifier: bytes, rank: int) -> Any:
    try:
        return nccl.NcclCommunicator(size, identifier, rank)
    except TypeError:  # before CuPy 14
        return nccl.NcclCommunicator(size, tuple(byte - 256 if byte > 127 else byte for byte in identifier), rank)
