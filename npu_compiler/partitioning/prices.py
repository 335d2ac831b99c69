"""`Prices`: the time of nodes on a device and on its host, and of transfers between the two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.program.target import CodegenTarget


@dataclass(frozen=True)
class Link:
    """The connection between the memories of a device and its host.

    Attributes:
        bytes_per_second: Bandwidth in either direction.
        latency: Seconds of a transfer besides those of its bytes.
        launch: Seconds to begin a run of the device and to learn that it has ended.
    """

    bytes_per_second: float
    latency: float
    launch: float

    def seconds(self, size: int) -> float:
        """Time of a transfer of `size` bytes."""
        return self.latency + size / self.bytes_per_second


@dataclass(frozen=True)
class Estimate:
    """The estimated time of a node on a device that does not support its op.

    Attributes:
        is_assumed: Whether no kernel exists for the op, so that the time is computed from bytes and elements alone.
    """

    seconds: float
    is_assumed: bool


class Prices(ABC):
    """The times by which a graph is divided between a device and its host, all in seconds.

    Attributes:
        device: A text that describes the device.
    """

    device: str
    link: Link

    @abstractmethod
    def calls(self, program: CompiledProgram) -> Sequence[float]:
        """Time of each kernel call of a program on the device; their sum is the time of a run."""

    @abstractmethod
    def if_supported(self, node: OpNode, graph: IRGraph, compute_dtype: str) -> Estimate:
        """Estimated time of a node by itself on the device if that supported its op."""

    @abstractmethod
    def host(self, node: OpNode, graph: IRGraph) -> float:
        """Time of a node on the host."""


@singledispatch
def priced_target(npu: object) -> tuple[CodegenTarget, Prices]:
    """The target and the prices for a description of a device.

    Raises:
        InputError: `npu` is no description of a device, or says too little for prices.
    """
    raise InputError(f"no prices are known for a {type(npu).__name__}; give a chip, as npu_model.load_chip returns it")


@singledispatch
def prices_of(target: CodegenTarget) -> Prices | None:
    """The prices of a target's device; None if its host's times are unknown."""
    return None


__all__ = ["Estimate", "Link", "Prices", "priced_target", "prices_of"]
