"""Kernel declarations and kernel calls.

A declaration holds everything known of a kernel besides its code: its operands, its parameters, its kind of work, and
how that work divides among threads. Devices ask the declaration; none takes a kernel's name apart.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypeAlias

from npu_compiler.graph.dtypes import INT32_MAX, INT32_MIN, itemsize
from npu_compiler.program.operands import Operand, Sizes, parse_operands
from npu_compiler.program.products import Product
from npu_compiler.program.views import MAX_RANK, View


class Family(Enum):
    """The kind of a kernel's work, such as element-wise or convolution."""

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
    COLLECTIVE = "collective"


class Grid(Enum):
    """The division of a kernel's work among threads, for devices that launch a grid of threadgroups per call."""

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
    CODE_COLUMNS = "a threadgroup per few columns of such a product, a thread for every 16 bytes of the weight's codes"
    COLUMN_BLOCKS = "a threadgroup per block of columns of a product with one row, whose weight is as it is"
    PIXELS = "pixels along x, channels along y, images along z"
    ROTATIONS = "a thread per four pairs of a rotated row along x; rows along y"
    QUERIES = "queries along x, heads along y, batches along z"
    TOKENS = "tokens along x, heads along y"
    SEQUENCES = "a threadgroup per sequence of a batch along x; directions along y; a thread per few hidden elements"


Condition: TypeAlias = Callable[[SimpleNamespace], bool]
"""A function of a call that checks a condition; sizes, parameters and views are attributes of its argument."""

Products: TypeAlias = Callable[[SimpleNamespace], tuple[Product, ...]]
"""A function that returns a call's matrix products; sizes, parameters and views are attributes of its argument."""


@dataclass(frozen=True)
class KernelDecl:
    """A kernel's name, operands and parameters, declared once beside its lowering.

    Attributes:
        source: The shader file in `metal_kernels`; empty for a kernel that Metal does not have.
        inputs: The operands it reads, in the order of a call's inputs.
        outputs: The operands it writes.
        fields: Parameter name → format. A `struct` format (`I`, `i`, `f`, `4I`, …) is a member of the parameter struct,
            in order. `?` is a flag and `s a b c` one of the named variants: both choose code, so a device that
            specializes kernels compiles them in; they are not in the struct.
        where: Further condition on a call, beyond its operands' shapes and dtypes and its parameters' formats; None for
            none.
        index_limit: Function that returns the number of rows that the index chooses among, for a kernel whose flag
            `checked` makes it skip its own check of the index; None for other kernels.
        products: Function that returns the matrix products of a call, each of which reads the result of the one before;
            the first input holds the rows. None for a kernel that multiplies no matrices.
        counted: Whether the number of a call's inputs tells which optional operands are present; otherwise its
            parameters `has_<name>` do.
    """

    name: str
    family: Family
    source: str = ""
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[Operand, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    grid: Grid = Grid.ELEMENTS
    where: Condition | None = None
    index_limit: Callable[[SimpleNamespace], int] | None = None
    products: Products | None = None
    counted: bool = False

    def __str__(self) -> str:
        """The declaration as text: the kernel's name, operands and parameters, as `declare_kernel` takes them."""
        inputs, outputs = (" ".join(map(str, operands)) for operands in (self.inputs, self.outputs))
        fields = "".join(f", {name}={fmt!r}" for name, fmt in self.fields.items())
        return f"{self.name}: {inputs} -> {outputs}{fields}"

    def problem(self, call: KernelCall) -> str | None:
        """The reason why a call does not fit this declaration, in words; None if it does.

        A call that fits touches nothing outside its views, on any device.
        """
        matched = self.parameter_problem(call) or self._match(call)
        if isinstance(matched, str):
            return matched
        if self._walked_rank(call) > MAX_RANK:
            return f"an operand has more than {MAX_RANK} dimensions"
        if self.where is not None and not self.where(matched):
            shapes = ", ".join(str(list(view.shape)) for view in (*call.inputs, *call.outputs))
            return f"its sizes and parameters contradict each other: {shapes}; {dict(call.params)!r:.300}"
        return None

    def checked_index(self, call: KernelCall) -> tuple[View, int] | None:
        """The index that a valid call assumes to be checked already, and the limit of its values.

        None if it assumes that of no index.
        """
        if self.index_limit is None or not call.params["checked"]:
            return None
        index = next(operand.name for operand in self.inputs if operand.dtypes == {"int32"})
        matched = self._match(call)
        assert not isinstance(matched, str)
        return getattr(matched, index), self.index_limit(matched)

    def matrix_products(self, call: KernelCall) -> tuple[Product, ...]:
        """The matrix products of a valid call; none if nothing is multiplied."""
        if self.products is None or any(0 in view.shape for view in (*call.inputs, *call.outputs)):
            return ()
        matched = self._match(call)
        assert not isinstance(matched, str)
        return self.products(matched)

    def parameter_problem(self, call: KernelCall) -> str | None:
        """The defect of a call's parameters by themselves, in words; None if there is none."""
        present = [f"has_{operand.name}" for operand in self.inputs if operand.optional and not self.counted]
        for name in (*self.fields, *present):
            if name not in call.params:
                return f"it lacks parameter '{name}'"
        for name, fmt in self.fields.items():
            if not _fits(fmt, call.params[name]):
                return f"parameter '{name}' is {call.params[name]!r:.80}, which is no '{fmt}'"
        for name in call.params.keys() - self.fields.keys():
            if name not in present or not _fits("?", call.params[name]):
                return f"parameter '{name}' is {call.params[name]!r:.80}, which it does not take"
        return None

    def _match(self, call: KernelCall) -> SimpleNamespace | str:
        """A call's views, sizes and parameters by their declared names; or, if they do not fit, the reason in words."""
        optional = [operand for operand in self.inputs if operand.optional]
        needed = len(self.inputs) - len(optional)
        flagged = needed + sum(bool(call.params.get(f"has_{operand.name}")) for operand in optional)
        allowed = range(needed, len(self.inputs) + 1) if self.counted else {flagged}
        if len(call.inputs) not in allowed or len(call.outputs) != len(self.outputs):
            return f"it has {len(call.inputs)} inputs and {len(call.outputs)} outputs"
        sizes: Sizes = {name: call.params[name] for name, fmt in self.fields.items() if fmt == "I"}
        by_name = self.operands_of(call)
        for operand in (*self.inputs, *self.outputs):
            view = by_name[operand.name]
            if view is not None and (wrong := operand.problem(view, sizes)):
                return wrong
        return SimpleNamespace(**{**by_name, **sizes, **call.params})

    def _walked_rank(self, call: KernelCall) -> int:
        """The number of dimensions that the kernel iterates over, for a call that fits the declaration."""
        return max(view.rank for view in (*call.inputs, *call.outputs))

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
        """Flag or variant parameter → its value; that of a variant is its position in the declaration."""
        chosen = {}
        for name, fmt in self.fields.items():
            if fmt == "?":
                chosen[name] = int(bool(params.get(name)))
            elif fmt[0] == "s":
                chosen[name] = fmt.split()[1:].index(params[name])
        return chosen

    def bind(self, call: KernelCall) -> list[View | None]:
        """A call's views by declared operand, inputs then outputs; None where an optional operand is absent.

        An optional operand is present if the call's parameter `has_<name>` says so; without such a parameter, for a
        kernel whose operands are counted, if there are inputs left for it.
        """
        remaining = list(call.inputs)
        bound: list[View | None] = []
        for operand in self.inputs:
            flag = call.params.get(f"has_{operand.name}", self.counted and bool(remaining))
            present = not operand.optional or bool(flag)
            bound.append(remaining.pop(0) if present else None)
        return [*bound, *call.outputs]

    def operands_of(self, call: KernelCall) -> dict[str, View | None]:
        """A call's views by the operands' names, inputs then outputs; None where an optional operand is absent."""
        names = (operand.name for operand in (*self.inputs, *self.outputs))
        return dict(zip(names, self.bind(call), strict=True))

    def inputs_of(self, call: KernelCall) -> dict[str, View | None]:
        """A call's inputs by the operands' names; None where an optional operand is absent."""
        views = self.operands_of(call)
        return {operand.name: views[operand.name] for operand in self.inputs}


_RANGES = {"I": (0, INT32_MAX), "i": (INT32_MIN, INT32_MAX)}


def _fits(fmt: str, value: Any) -> bool:
    """Whether a parameter has a format of `KernelDecl.fields`, such as `I`, `4i`, `?` or `s a b`.

    Unsigned integers are at most 2^31 - 1, which all devices support.
    """
    if fmt[0] == "s":
        return isinstance(value, str) and value in fmt.split()[1:]
    if fmt == "?":
        return value in (0, 1) and isinstance(value, int)
    if len(fmt) > 1:
        is_list = isinstance(value, (list, tuple)) and len(value) == int(fmt[:-1])
        return is_list and all(_fits(fmt[-1], item) for item in value)
    if fmt == "f":
        return isinstance(value, (int, float))
    low, high = _RANGES[fmt]
    return isinstance(value, int) and low <= value <= high


@dataclass(frozen=True)
class KernelCall:
    """One launch of a kernel: the views it reads and writes, and its parameters.

    Attributes:
        node: The IR node it was generated from, for reports.
        flops: Floating-point operations (a multiply-add is two).
        bytes_moved: Bytes read and written, each distinct element once: the minimum of its memory traffic.
    """

    kernel: str
    source: str
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    params: Mapping[str, Any]
    node: str
    flops: int = 0
    bytes_moved: int = 0


def readers_and_writers(calls: Iterable[KernelCall]) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Return buffer → the indices of the calls that read it, and buffer → those of the calls that write it."""
    reads: dict[str, set[int]] = {}
    writes: dict[str, set[int]] = {}
    for index, call in enumerate(calls):
        for views, touching in ((call.inputs, reads), (call.outputs, writes)):
            for view in views:
                touching.setdefault(view.buffer, set()).add(index)
    return reads, writes


def distinct_bytes(view: View) -> int:
    """Bytes of a view's elements; elements that a stride of 0 repeats count once."""
    return _distinct_elements(view) * itemsize(view.dtype)


def _distinct_elements(view: View) -> int:
    count = 1
    for size, stride in zip(view.shape, view.strides, strict=True):
        if stride != 0:
            count *= size
    return 0 if 0 in view.shape else count


KERNELS: dict[str, KernelDecl] = {}


def declare_kernel(
    name: str,
    family: Family,
    operands: str,
    *,
    source: str = "",
    grid: Grid = Grid.ELEMENTS,
    where: Condition | None = None,
    index_limit: Callable[[SimpleNamespace], int] | None = None,
    products: Products | None = None,
    counted: bool = False,
    **fields: str,
) -> KernelDecl:
    """Register a kernel's declaration; the one place where its operands and parameters are named.

    Args:
        operands: `"x[m,.k] weight[n,k] bias?[n] -> out[m,n]"`, as `operands` explains.
        source: The shader file in `metal_kernels`, for a kernel that Metal has.
        where, index_limit, products, counted: As in `KernelDecl`: `lambda call: call.n % call.groups == 0`.
        fields: Parameter name → format, as in `KernelDecl.fields`.
    """
    if name in KERNELS:
        raise ValueError(f"kernel '{name}' is declared twice")
    operand_lists = parse_operands(operands)
    KERNELS[name] = KernelDecl(
        name, family, source, *operand_lists, fields, grid, where, index_limit, products, counted
    )
    return KERNELS[name]
