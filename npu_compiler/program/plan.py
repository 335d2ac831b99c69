"""`ExecutionPlan`: the calls, buffers and weights that code generation produces and a program contains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.graph.model import TensorSpec
from npu_compiler.graph.weight_recipe import WeightTransformRecipe
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View

BufferKind = Literal["input", "weight", "constant", "persistent", "arena", "output"]


@dataclass(frozen=True)
class BufferAllocation:
    """The place and the lifetime of a buffer.

    Attributes:
        alloc_shape: Shape in memory, channel padding included.
        offset: Byte offset in the arena (kind `arena` only).
        first_use, last_use: Index of the first and last kernel call that touches it (-1: before the first).
        donor: Name of the output that is computed in this input's memory; None for any other buffer.
    """

    name: str
    kind: BufferKind
    alloc_shape: tuple[int, ...]
    dtype: str
    offset: int = 0
    first_use: int = -1
    last_use: int = -1
    donor: str | None = None

    @property
    def is_constant(self) -> bool:
        """Whether the content stays the same from run to run: weights, constants and results of the prologue."""
        return self.kind in ("weight", "constant", "persistent")

    @property
    def size_bytes(self) -> int:
        count = 1
        for size in self.alloc_shape:
            count *= size
        return count * itemsize(self.dtype)


@dataclass(frozen=True)
class WeightSpec:
    """A weight of the program: its spec in device memory, and the recipe that computes it from the checkpoint."""

    spec: TensorSpec
    recipe: WeightTransformRecipe
    source_shapes: Mapping[str, tuple[int, ...]]


@dataclass
class ExecutionPlan:
    """Everything that code generation and the memory planner decide, before it becomes a program.

    Attributes:
        prologue: Calls that read only weights and constants: run once per set of weights.
        calls: The calls of every run, in order.
        donations: Output name → the input whose buffer it updates in place.
        unused_weights: `state_dict` keys that the model has but the program does not need.
        sources: Source text by the name that calls give as their `source`, for targets that generate kernels.
        machine_code: The instructions for a target that runs no kernels by name, in its own encoding.
    """

    prologue: list[KernelCall]
    calls: list[KernelCall]
    buffers: dict[str, BufferAllocation]
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    output_views: dict[str, View]
    weights: dict[str, WeightSpec]
    constants: dict[str, np.ndarray]
    donations: dict[str, str]
    arena_bytes: int = 0
    unused_weights: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)
    machine_code: bytes = b""

    def count_readers(self) -> Counter[str]:
        """Buffer → how many operands of calls and program outputs read it."""
        readers = Counter(view.buffer for call in self.calls for view in call.inputs)
        readers.update(view.buffer for view in self.output_views.values())
        return readers
