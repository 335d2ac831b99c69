"""What code generation makes: kernel declarations, kernel calls, buffers, and the target that names the kernels."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from npu_compiler.dtypes import itemsize
from npu_compiler.ir_reader import TensorSpec
from npu_compiler.target_config import METAL_GPU, TargetConfig
from npu_compiler.views import View
from npu_compiler.weight_recipe import WeightTransformRecipe

BufferKind = Literal["input", "weight", "constant", "persistent", "arena", "output"]


@dataclass(frozen=True)
class Operand:
    """A declared operand of a kernel; an optional one may be absent from a call."""

    name: str
    optional: bool


@dataclass(frozen=True)
class KernelDecl:
    """A kernel's name, source file, operands and parameters, declared once beside its lowering.

    Attributes:
        inputs: The operands it reads, in the order of a call's inputs.
        outputs: The operands it writes.
        fields: Parameter name → format. A `struct` format (`I`, `i`, `f`, `4I`, …) is a member of the parameter struct,
            in order. `?` is a flag and `s a b c` one of the named variants: both choose code, so a device that
            specializes kernels compiles them in; they are not in the struct.
    """

    name: str
    source: str
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[Operand, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)

    def pack(self, params: Mapping[str, Any]) -> bytes:
        """The parameter struct as the device reads it: 4-byte members, little endian."""
        packed = b""
        for name, fmt in self.struct_fields():
            value = params[name]
            packed += struct.pack(f"<{fmt}", *value if isinstance(value, (list, tuple)) else (value,))
        return packed

    def struct_fields(self) -> list[tuple[str, str]]:
        """(name, `struct` format) of the members of the parameter struct, in order."""
        return [(name, fmt) for name, fmt in self.fields.items() if fmt[0] not in "?s"]

    def variant(self, params: Mapping[str, Any]) -> dict[str, int]:
        """Flag or variant name → its value (a variant's is its position in the declaration)."""
        chosen = {}
        for name, fmt in self.fields.items():
            if fmt == "?":
                chosen[name] = int(bool(params.get(name)))
            elif fmt[0] == "s":
                chosen[name] = fmt.split()[1:].index(params[name])
        return chosen

    def bind(self, call: KernelCall) -> list[View | None]:
        """A call's views by declared operand, inputs then outputs; None where an optional operand is absent.

        An optional operand is present if the call's parameter `has_<name>` says so; without such a parameter, if there
        are inputs left for it.
        """
        remaining = list(call.inputs)
        bound: list[View | None] = []
        for operand in self.inputs:
            present = not operand.optional or bool(call.params.get(f"has_{operand.name}", bool(remaining)))
            bound.append(remaining.pop(0) if present else None)
        return [*bound, *call.outputs]


@dataclass(frozen=True)
class KernelCall:
    """One launch: a kernel, the views it reads and writes, and its parameters.

    Attributes:
        node: The IR node it came from, for reports.
        flops: Floating-point operations (a multiply-add is two).
        bytes_moved: Bytes read and written, each distinct element once: the floor of its memory traffic.
    """

    kernel: str
    source: str
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    params: Mapping[str, Any]
    node: str
    flops: int = 0
    bytes_moved: int = 0


def distinct_bytes(view: View) -> int:
    """Bytes of a view's elements, those that a stride of 0 repeats counted once."""
    return _distinct_elements(view) * itemsize(view.dtype)


def _distinct_elements(view: View) -> int:
    count = 1
    for size, stride in zip(view.shape, view.strides, strict=True):
        if stride != 0:
            count *= size
    return 0 if 0 in view.shape else count


@dataclass(frozen=True)
class BufferAllocation:
    """Where a buffer lives and how long.

    Attributes:
        alloc_shape: Shape in memory, channel padding included.
        offset: Byte offset in the arena (kind `arena` only).
        first_use, last_use: Index of the first and last kernel call that touches it (-1: before the first).
        donor: For an output that is an input updated in place: the input's name.
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
        """Whether no call of a run writes it."""
        return self.kind in ("weight", "constant", "persistent")

    @property
    def size_bytes(self) -> int:
        count = 1
        for size in self.alloc_shape:
            count *= size
        return count * itemsize(self.dtype)


@dataclass(frozen=True)
class WeightSpec:
    """A weight of the program: its spec in device memory and how it is made from the checkpoint."""

    spec: TensorSpec
    recipe: WeightTransformRecipe
    source_shapes: Mapping[str, tuple[int, ...]]


@dataclass
class ExecutionPlan:
    """Everything that codegen and the memory planner decided, before it is sealed into a program.

    Attributes:
        prologue: Calls that read only weights and constants: run once per set of weights.
        calls: The calls of every run, in order.
        donations: Output name → the input whose buffer it updates in place.
        unused_weights: `state_dict` keys that the model has but the program does not need.
        sources: Source text by the name that calls give as their `source`, for targets that generate kernels.
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


class CodegenTarget(ABC):
    """Maps kernel families to a target's kernel names and source files. Nothing else differs between targets."""

    config: TargetConfig

    @property
    def key(self) -> str:
        """What tells apart targets whose programs differ, for caches."""
        return self.config.name

    @abstractmethod
    def elementwise_kernel(self, kernel_name: str) -> tuple[str, str]:
        """(kernel, source file) of an element-wise kernel."""

    @abstractmethod
    def matmul_kernel(self, is_vec: bool, transpose_b: bool) -> tuple[str, str]:
        """(kernel, source file) of a matrix product; `is_vec` when it has one row."""

    @abstractmethod
    def fused_kernel(self, kernel_type: str) -> tuple[str, str]:
        """(kernel, source file) of any other kernel, fused ones included."""

    @abstractmethod
    def shader_source(self, filename: str) -> str:
        """The path or package resource of a source file."""

    def finish(self, plan: ExecutionPlan) -> ExecutionPlan:
        """What this target does with the calls before memory is planned: fuse them, generate their sources."""
        return plan


class MetalCodegenTarget(CodegenTarget):
    """The op-level target that Metal and the CPU device share."""

    config = METAL_GPU

    def elementwise_kernel(self, kernel_name: str) -> tuple[str, str]:
        if kernel_name.endswith("_broadcast_kernel"):
            return kernel_name, "elementwise_broadcast.metal"
        if kernel_name == "add_relu_kernel":
            return kernel_name, "add_relu.metal"
        basic = kernel_name in ("add_kernel", "relu_kernel", "copy_kernel")
        return kernel_name, "elementwise.metal" if basic else "elementwise_extended.metal"

    def matmul_kernel(self, is_vec: bool, transpose_b: bool) -> tuple[str, str]:
        stem = "matmul_vec" if is_vec else "matmul"
        return f"{stem}_kernel" if transpose_b else f"{stem}_notrans_kernel", "matmul.metal"

    def fused_kernel(self, kernel_type: str) -> tuple[str, str]:
        return kernel_type, KERNELS[kernel_type].source

    def shader_source(self, filename: str) -> str:
        return f"metal_kernels/{filename}"


KERNELS: dict[str, KernelDecl] = {}


def declare_kernel(name: str, source: str, operands: str, **fields: str) -> KernelDecl:
    """Register a kernel's declaration; the one place where its operands and parameters are named.

    Args:
        operands: `"x weight bias? -> out"`; a `?` marks an operand that a call may lack.
    """
    inputs, outputs = (
        tuple(Operand(word.rstrip("?"), word.endswith("?")) for word in side.split()) for side in operands.split("->")
    )
    decl = KernelDecl(name, source, inputs, outputs, fields)
    if name in KERNELS:
        raise ValueError(f"kernel '{name}' is declared twice")
    KERNELS[name] = decl
    return decl
