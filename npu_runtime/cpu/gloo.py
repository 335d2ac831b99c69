"""Collectives between processes on CPUs, by gloo through torch.distributed."""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from typing import Any

import numpy as np

from npu_compiler.errors import DeviceError
from npu_runtime.collectives import HostCollectives, Share
from npu_runtime.pytorch import require_torch

ADDRESS = "NPU_SIM_RANK_ADDRESS"  # this machine's, where ranks are on several; default: its loopback interface
TIMEOUT = 60.0  # seconds after which a rank that does not take part counts as gone


class GlooCollectives(HostCollectives):
    """A group of processes that exchange arrays by gloo.

    Rank 0 opens a free port, and tells the others its address and a random prefix of the group's entries through
    `share`.

    Raises:
        DeviceError: PyTorch is missing or built without gloo, or the others cannot be reached.
    """

    def __init__(self, rank: int, size: int, share: Share, timeout: float = TIMEOUT) -> None:
        super().__init__(rank, size)
        require_torch("running a model on several CPU processes")
        import torch

        distributed: Any = torch.distributed
        if not distributed.is_available() or not distributed.is_gloo_available():
            raise DeviceError("this PyTorch is built without gloo, which CPU processes exchange tensors with")
        self._torch, patience = torch, timedelta(seconds=timeout)
        try:
            here, own = os.environ.get(ADDRESS, "127.0.0.1"), None
            if rank == 0:
                own = distributed.TCPStore(here, 0, size, True, patience, wait_for_workers=False)
            said = share(None if own is None else f"{here} {own.port} {secrets.token_hex(16)}".encode())
            host, port, prefix = said.decode().split()
            self._store = own or distributed.TCPStore(host, int(port), size, False, patience)
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=here)]
            options._timeout = patience
            keys = distributed.PrefixStore(prefix, self._store)
            self._group: Any = distributed.ProcessGroupGloo(keys, rank, size, options)
        except RuntimeError as error:
            raise DeviceError(f"the processes do not reach each other: {error}") from error

    def all_gather(self, part: np.ndarray, whole: np.ndarray) -> None:
        from_numpy = self._torch.from_numpy
        self._group._allgather_base(from_numpy(whole.reshape(-1)), from_numpy(part)).wait()

    def abort(self) -> None:
        """Do nothing: once a process has ended, the others' connections to it fail."""
