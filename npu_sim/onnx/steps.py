"""The steps of a graph during conversion: tensors with and without values, and calls of converters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import onnx_ir as ir
import torch

from npu_compiler.errors import IRError
from npu_sim.onnx.rows import Call, Row


class NeedsValue(IRError):
    """Raised when a node's input must be a constant, but depends on inputs of the graph.

    Attributes:
        sources: Names of those inputs.
    """

    def __init__(self, message: str, sources: frozenset[str]) -> None:
        super().__init__(message)
        self.sources = sources


@dataclass(eq=False)
class Slot:
    """A tensor of the module under construction.

    Attributes:
        index: The slot's number.
        fake: A tensor with its shape and dtype, and no values.
        value: The tensor's value. None: it is not a constant.
        sources: Names of the graph inputs that the tensor depends on.
        key: Name of the initializer that the tensor is. None: it is not an initializer.
    """

    index: int
    fake: torch.Tensor
    value: torch.Tensor | None = None
    sources: frozenset[str] = frozenset()
    key: str | None = None

    @property
    def other_key(self) -> str:
        """The tensor's name in a state dict if the initializer's own name cannot be one."""
        return f"initializer_{self.index}"


@dataclass(frozen=True)
class Constant:
    """An argument of a step that is a plain number or list instead of a tensor."""

    value: Any


@dataclass(frozen=True)
class Step:
    """A call of a converter in the module's `forward`.

    Attributes:
        convert: The converter.
        call: The facts about the node.
        args: Numbers of slots, constants, or None for inputs left out.
        results: Numbers of the slots that the call fills.
    """

    convert: Callable[..., Any]
    call: Call
    args: tuple[int | Constant | None, ...]
    results: tuple[int, ...]


@dataclass
class Steps:
    """The steps of a graph.

    Attributes:
        inputs: Name → slot of each graph input, in order.
        tensors: Number → slot of each initializer or constant that the steps read.
        steps: The calls, in order.
        outputs: Name and slot number of each graph output, in order.
    """

    inputs: dict[str, Slot] = field(default_factory=dict)
    tensors: dict[int, Slot] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    outputs: list[tuple[str, int]] = field(default_factory=list)


Env = dict[ir.Value, Slot]
Attributes = Mapping[str, Any]


class Reader(Protocol):
    """The methods of `Importer` that the conversion of control flow uses."""

    def slot(self, value: torch.Tensor, known: bool) -> Slot: ...

    def constant(self, slot: Slot, what: str, where: str) -> torch.Tensor: ...

    def tensor(self, tensor: ir.TensorProtocol, what: str) -> torch.Tensor: ...

    def read(self, value: ir.Value, env: Env, where: str) -> Slot: ...

    def apply(self, row: Row, call: Call, inputs: Sequence[Slot | None], where: str) -> list[Slot] | None: ...

    def attributes(self, node: ir.Node, attrs: Attributes, where: str) -> dict[str, Any]: ...

    def run_nodes(self, graph: Iterable[ir.Node], env: Env, opsets: Mapping[str, int], attrs: Attributes) -> None: ...
