"""Collective operations of the ranks (devices) that run a program together: the interface, and a form for host memory.

Every rank of a group runs the same program, so all of them come to the same calls in the same order. A backend joins a
group once (`Hardware.join`); kernels of the family `Family.COLLECTIVE` then use `Hardware.collectives`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from npu_compiler.errors import DeviceError
from npu_compiler.program.kernels import KernelCall

Share: TypeAlias = Callable[[bytes | None], bytes]
"""A function that returns on all ranks the bytes that rank 0 passes; the other ranks pass None."""


class Collectives(ABC):
    """One rank's connection to a group.

    Attributes:
        rank: This rank, from 0.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def check(self, call: KernelCall) -> None:
        """Refuse a call that was compiled for another number of ranks. Raises DeviceError."""
        if call.params["ranks"] != self.size:
            raise DeviceError(
                f"the program was divided among {call.params['ranks']} devices, but this group has {self.size}"
            )

    @abstractmethod
    def abort(self) -> None:
        """End the operation that runs on this rank with an error, as another rank has failed.

        May be called from any thread.
        """


class HostCollectives(Collectives):
    """Collectives over arrays in host memory. A subclass defines `all_gather`; sums are computed from that."""

    @abstractmethod
    def all_gather(self, part: np.ndarray, whole: np.ndarray) -> None:
        """Copy all ranks' bytes to every rank.

        Args:
            part: uint8 [n], this rank's bytes.
            whole: uint8 [ranks, n], written.

        Raises:
            RuntimeError: another rank did not take part.
        """

    def all_reduce(self, summand: np.ndarray, total: np.ndarray) -> None:
        """Write the sum of all ranks' summands [n] to `total`, added in float32 in the order of ranks and rounded once.

        So all ranks have the same bits. It costs each rank n · ranks elements: it is meant for few ranks.
        """
        whole = np.empty((self.size, summand.nbytes), np.uint8)
        self.all_gather(np.ascontiguousarray(summand).view(np.uint8), whole)
        total[...] = whole.view(summand.dtype).astype(np.float32).sum(axis=0)


def no_group(call: KernelCall) -> DeviceError:
    """The error for one rank's part of a program on a device that has joined no group."""
    return DeviceError(
        f"the program was divided among {call.params['ranks']} devices; run it with that many, as "
        "LanguageModel(…, tensor_parallel=…) does"
    )
