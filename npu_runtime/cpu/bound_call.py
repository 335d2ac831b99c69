"""`BoundCall`: a kernel call with memory for its operands, from which implementations are prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from npu_compiler.errors import DeviceError
from npu_compiler.ops import elementwise_kernel
from npu_compiler.program.kernels import KernelCall
from npu_runtime.hardware import Launch, Operand

ArrayT = TypeVar("ArrayT")
Params: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class BoundCall(Generic[ArrayT]):
    """A call with its operands as strided NumPy arrays, or as torch tensors over the same memory.

    Attributes:
        operands: The operands with their views, which tell which of the inputs are constant.
    """

    call: KernelCall
    inputs: Sequence[ArrayT]
    outputs: Sequence[ArrayT]
    operands: Sequence[Operand]

    @property
    def name(self) -> str:
        """Name of the kernel, or of the element-wise op."""
        elementwise = elementwise_kernel(self.call)
        return self.call.kernel if elementwise is None else elementwise.op.name

    @property
    def params(self) -> Params:
        return self.call.params

    @property
    def out(self) -> ArrayT:
        return self.outputs[0]

    def is_constant(self, index: int) -> bool:
        return self.operands[index].is_constant

    def prepared(self, index: int, kind: str, make: Callable[[ArrayT], Any], others: Sequence[int] = ()) -> Any:
        """A constant input in a kernel's own layout, computed once per buffer and view, and shared by all calls.

        Args:
            kind: Name of the layout.
            make: Function that computes it from the input.
            others: Further constant inputs that it is computed from.
        """
        cache = self.operands[index].memory.prepared
        others_memory = [self.operands[other].memory for other in others]
        views = (self.operands[i].view for i in (index, *others))
        key = (
            kind,
            *((view.shape, view.strides, view.offset) for view in views),
            *((id(memory.native_handle), memory.version) for memory in others_memory),
        )
        if key not in cache:  # with the others' memory, whose identity then stays what the key says
            cache[key] = make(self.inputs[index]), [memory.native_handle for memory in others_memory]
        return cache[key][0]

    def optional(self, flags: Sequence[str], first: int) -> list[int | None]:
        """Input positions of optional operands; None for each whose flag is not set.

        They follow the fixed operands, from position `first` on, in order.
        """
        positions: list[int | None] = []
        for flag in flags:
            positions.append(first if self.params[flag] else None)
            first += bool(self.params[flag])
        return positions

    def at(self, position: int | None) -> ArrayT | None:
        return None if position is None else self.inputs[position]


ArrayCall: TypeAlias = BoundCall[np.ndarray]


@dataclass(frozen=True)
class Candidate:
    """One implementation of a kernel.

    Attributes:
        name: Name in the table of choices, which must not change its meaning.
        make: Function that prepares it for a call; returns None if it does not handle the call.
        variant_of: Name of the candidate that this is a variant of, which is not tried if that one is far behind; empty
            for none.
        uses_pytorch: Whether it is one of PyTorch's kernels.
        leaves_threads: Whether it wakes threads of PyTorch's, which spin beside the kernels that follow.
    """

    name: str
    make: Callable[[ArrayCall], Launch | None]
    variant_of: str = ""
    uses_pytorch: bool = False
    leaves_threads: bool = False


def reporting(call: KernelCall, run: Launch) -> Launch:
    """A launch that turns errors of `run` into a `DeviceError` that names the call."""
    name, node = call.kernel, call.node

    def launch() -> None:
        try:
            run()
        except (RuntimeError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise DeviceError(f"kernel '{name}' (node '{node}') failed: {error}") from error

    return launch
