"""`Prices`: what nodes take on a device and on its host, and what passes between the two takes."""

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
    """The way between the memories of a device and its host.

    Attributes:
        bytes_per_second: Bandwidth in either direction.
        latency: Seconds of a transfer besides.
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
    """Time of a node on a device that does not have its op.

    Attributes:
        is_assumed: Whether no kernel computes the op, so that the time is that of its bytes and elements alone.
    """

    seconds: float
    is_assumed: bool


class Prices(ABC):
    """The times by which a graph is divided between a device and its host, all in seconds.

    Attributes:
        device: The device in words.
    """

    device: str
    link: Link

    @abstractmethod
    def calls(self, program: CompiledProgram) -> Sequence[float]:
        """Time of each kernel call of a program on the device; together that of a run."""

    @abstractmethod
    def if_supported(self, node: OpNode, graph: IRGraph, compute_dtype: str) -> Estimate:
        """Time that a node by itself would take on the device if that had its op."""

    @abstractmethod
    def host(self, node: OpNode, graph: IRGraph) -> float:
        """Time of a node on the host."""


@singledispatch
def priced_target(npu: object) -> tuple[CodegenTarget, Prices]:
    """The target and the prices that a description of a device stands for.

    Raises:
        InputError: it is no description of a device, or says too little for prices.
    """
    raise InputError(f"no prices are known for a {type(npu).__name__}; give a chip, as npu_model.load_chip returns it")


@singledispatch
def prices_of(target: CodegenTarget) -> Prices | None:
    """The prices of a target's device; None where nothing is known of its host."""
    return None


__all__ = ["Estimate", "Link", "Prices", "priced_target", "prices_of"]
