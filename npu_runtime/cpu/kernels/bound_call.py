"""`BoundCall`: a kernel call on tensors, which is what implementations of a kernel are prepared from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npu_compiler.ops import elementwise_kernel
from npu_compiler.program.kernels import KernelCall
from npu_runtime.cpu.kernels.registry import Params, Tensors
from npu_runtime.hardware import Launch, Operand


@dataclass(frozen=True)
class BoundCall:
    """A call with its operands as tensors.

    Attributes:
        operands: Tell which of the inputs are constant.
    """

    call: KernelCall
    inputs: Tensors
    outputs: Tensors
    operands: Sequence[Operand]

    @property
    def name(self) -> str:
        """Of the kernel, or of the element-wise op."""
        elementwise = elementwise_kernel(self.call)
        return self.call.kernel if elementwise is None else elementwise.op.name

    @property
    def params(self) -> Params:
        return self.call.params

    @property
    def out(self) -> torch.Tensor:
        return self.outputs[0]

    def is_constant(self, index: int) -> bool:
        return self.operands[index].is_constant

    def prepared(self, index: int, kind: str, make: Callable[[torch.Tensor], Any]) -> Any:
        """A constant input in a kernel's own layout, made once per buffer and view, however many calls share it."""
        operand = self.operands[index]
        view = operand.view
        key = (kind, view.shape, view.strides, view.offset)
        cache = operand.memory.prepared
        if key not in cache:
            cache[key] = make(self.inputs[index])
        return cache[key]

    def optional(self, flags: Sequence[str], first: int) -> list[int | None]:
        """Input positions of optional operands, which follow the fixed ones in order when their flag is set."""
        positions: list[int | None] = []
        for flag in flags:
            positions.append(first if self.params[flag] else None)
            first += bool(self.params[flag])
        return positions

    def at(self, position: int | None) -> torch.Tensor | None:
        return None if position is None else self.inputs[position]


@dataclass(frozen=True)
class Candidate:
    """One implementation of a kernel.

    Attributes:
        name: Stands for it in the table of choices, so it must not change its meaning.
        make: Prepares it for a call; None where it does not handle the call.
        variant_of: Name of the candidate that it is a variant of; where that one is far behind, it is not tried.
        uses_pytorch: Whether it runs on PyTorch's threads instead of the native kernels' own.
    """

    name: str
    make: Callable[[BoundCall], Launch | None]
    variant_of: str = ""
    uses_pytorch: bool = False
