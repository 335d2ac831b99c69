"""Kernel declarations and kernel calls.

A declaration holds all that is known of a kernel besides its code: what it reads and writes, its parameters, what kind
of work it does, and how that work divides among threads. Devices ask the declaration; none takes a kernel's name apart.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.views import View


class Family(Enum):
    """What kind of work a kernel does."""

    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    NORM = "norm"
    SOFTMAX = "softmax"
    MATMUL = "matmul"
    ATTENTION = "attention"
    ROPE = "rope"
    INDEXING = "indexing"
    TENSOR = "tensor"
    CONV = "conv"
    POOL = "pool"


class Grid(Enum):
    """How a kernel's work divides among threads, for devices that launch a grid of threadgroups per call."""

    ELEMENTS = "a thread per output element"
    QUADS = "a thread per four consecutive output elements"
    PLANES = "a thread per output element: columns along x, rows along y, everything else along z"
    SOURCE_ELEMENTS = "a thread per element of the second input"
    TABLE_ROWS = "a thread per four columns of a table along x; indices along y"
    ROWS = "a threadgroup per row (the last dimension), a thread for every four elements"
    ROW_ELEMENTS = "a threadgroup per row (the last dimension), a thread for every element"
    REDUCTIONS = "a threadgroup per output element, a thread for every four elements that are reduced"
    SHORT_REDUCTIONS = "a SIMD group per output element"
    CHANNEL_GROUPS = "a threadgroup per image and group of channels"
    TILES = "a threadgroup per tile of a matrix product; batches along z"
    COLUMNS = "a threadgroup per few columns of a product with one row, whose weight is transposed"
    COLUMN_BLOCKS = "a threadgroup per block of columns of a product with one row, whose weight is as it is"
    PIXELS = "pixels along x, channels along y, images along z"
    ROTATIONS = "a thread per four pairs of a rotated row along x; rows along y"
    QUERIES = "queries along x, heads along y, batches along z"


@dataclass(frozen=True)
class Operand:
    """A declared operand of a kernel; an optional one may be absent from a call."""

    name: str
    optional: bool


@dataclass(frozen=True)
class KernelDecl:
    """A kernel's name, operands and parameters, declared once beside its lowering.

    Attributes:
        source: The shader file in `metal_kernels`.
        inputs: The operands it reads, in the order of a call's inputs.
        outputs: The operands it writes.
        fields: Parameter name → format. A `struct` format (`I`, `i`, `f`, `4I`, …) is a member of the parameter struct,
            in order. `?` is a flag and `s a b c` one of the named variants: both choose code, so a device that
            specializes kernels compiles them in; they are not in the struct.
    """

    name: str
    family: Family
    source: str = ""
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[Operand, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    grid: Grid = Grid.ELEMENTS

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


KERNELS: dict[str, KernelDecl] = {}


def declare_kernel(
    name: str, family: Family, operands: str, *, source: str, grid: Grid = Grid.ELEMENTS, **fields: str
) -> KernelDecl:
    """Register a kernel's declaration; the one place where its operands and parameters are named.

    Args:
        operands: `"x weight bias? -> out"`; a `?` marks an operand that a call may lack.
        source: The shader file in `metal_kernels`.
        fields: Parameter name → format, as `KernelDecl.fields` has them.
    """
    inputs, outputs = (
        tuple(Operand(word.rstrip("?"), word.endswith("?")) for word in side.split()) for side in operands.split("->")
    )
    if name in KERNELS:
        raise ValueError(f"kernel '{name}' is declared twice")
    KERNELS[name] = KernelDecl(name, family, source, inputs, outputs, fields, grid)
    return KERNELS[name]
