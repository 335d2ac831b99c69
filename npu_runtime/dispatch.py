"""`DispatchStrategy`: how a device that launches threadgroups divides a kernel call among them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

from npu_compiler.program.kernels import KernelCall

Size3: TypeAlias = tuple[int, int, int]


class DispatchStrategy(ABC):
    """A function from kernel calls to their grids, for devices that launch threadgroups (blocks, workgroups)."""

    @abstractmethod
    def compute_dispatch(self, call: KernelCall, pipeline: Any) -> tuple[Size3, Size3] | None:
        """(threadgroups, threads per threadgroup), each along x, y and z; None for a call that launches none.

        Args:
            pipeline: The device's compiled kernel, which may limit its threads.
        """
