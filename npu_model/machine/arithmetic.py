"""Meaning of instructions in NumPy: transfers, products and vector programs on the machine's memories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

import npu_compiler.ops  # noqa: F401  (fills the table of element-wise ops)
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.ops.numpy_functions import FLOAT_FUNCTIONS, INTEGER_FUNCTIONS
from npu_compiler.program.elementwise import ELEMENTWISE, Elementwise, as_float32
from npu_compiler.program.expression import parse
from npu_model.isa.instructions import Axis, Compute, Instruction, Multiply, Role, Step, Tile, Transfer
from npu_model.machine.memory import MachineError, Memory

Memories = Callable[[Tile], Memory]

_EXACT_TERMS = 2**24 // 2**17  # products of two bytes less their zero points, of which float32 holds any sum


def execute(instruction: Instruction, counters: Sequence[int], memories: Memories) -> None:
    """Do what an instruction says in one round of its loops.

    Raises:
        MachineError: it reads or writes outside of a memory, reads what was never written, or an index is out of range.
    """
    if isinstance(instruction, Transfer):
        _transfer(instruction, counters, memories)
    elif isinstance(instruction, Multiply):
        _multiply(instruction, counters, memories)
    elif isinstance(instruction, Compute):
        _compute(instruction, counters, memories)


def _box(
    tile: Tile, ranges: Sequence[tuple[int, int]], counters: Sequence[int], memories: Memories, reads: bool
) -> np.ndarray:
    """The existing part of an operand; axes that it does not have are of size 1."""
    address = tile.place(counters)
    shape = []
    for (first, end), stride in zip(ranges, tile.strides, strict=True):
        address += first * stride
        shape.append(max(0, end - first) if stride else min(1, max(0, end - first)))
    memory = memories(tile)
    if 0 in shape:
        return np.empty(shape, numpy_dtype(tile.dtype))
    array = memory.view(address, shape, tile.strides, tile.dtype)
    if reads:
        memory.check_written(address, shape, tile.strides, tile.dtype)
    else:
        memory.mark_written(address, shape, tile.strides, tile.dtype)
    return array


def _transfer(instruction: Transfer, counters: Sequence[int], memories: Memories) -> None:
    ranges = [axis.inside(counters) for axis in instruction.box]
    if instruction.fill is not None:
        everywhere = [(0, axis.size) for axis in instruction.box]
        if ranges != everywhere:
            _box(instruction.target, everywhere, counters, memories, False)[...] = instruction.fill
    if any(end <= first for first, end in ranges):
        return
    if instruction.index is None:
        target = _box(instruction.target, ranges, counters, memories, False)
        target[...] = _box(instruction.source, ranges, counters, memories, True)
        return
    places = _box(instruction.index, ranges, counters, memories, True).astype(np.int64)
    if places.min() < 0 or places.max() >= instruction.index_limit:
        wrong = places.min() if places.min() < 0 else places.max()
        raise IndexError(f"index {wrong} is out of range for {instruction.index_limit} rows")
    reach = [(0, instruction.index_limit), *ranges[1:]]
    if instruction.scatters:
        whole = _indexed(instruction.target, reach, counters, memories, np.unique(places))
        rows = _box(instruction.source, ranges, counters, memories, True)
        rows_of = np.broadcast_to(places, [end - first for first, end in ranges])
        np.put_along_axis(whole, rows_of, np.broadcast_to(rows, rows_of.shape), 0)
    else:
        whole = _indexed(instruction.source, reach, counters, memories)
        target = _box(instruction.target, ranges, counters, memories, False)
        target[...] = np.take_along_axis(whole, np.broadcast_to(places, [places.shape[0], *whole.shape[1:]]), 0)


def _indexed(
    tile: Tile,
    ranges: Sequence[tuple[int, int]],
    counters: Sequence[int],
    memories: Memories,
    written: np.ndarray | None = None,
) -> np.ndarray:
    """The whole operand that an index chooses from, which is read, or the rows `written` of which are written."""
    address = tile.place(counters) + sum(first * s for (first, _), s in zip(ranges, tile.strides, strict=True))
    memory = memories(tile)
    shape = [end - first for first, end in ranges]
    whole = memory.view(address, shape, tile.strides, tile.dtype)
    if written is None:
        memory.check_written(address, shape, tile.strides, tile.dtype)
    else:
        for row in written:
            place = address + int(row) * tile.strides[0]
            memory.mark_written(place, [1, *shape[1:]], tile.strides, tile.dtype)
    return whole


def _multiply(instruction: Multiply, counters: Sequence[int], memories: Memories) -> None:
    ranges = [axis.inside(counters) for axis in instruction.box]
    if any(end <= first for first, end in ranges):
        return
    order = sorted(range(len(ranges)), key=lambda i: "bmnwk".index(instruction.roles[i].value))
    roles = [instruction.roles[i] for i in order]
    left, right = (
        _box(tile, ranges, counters, memories, True).transpose(order) for tile in (instruction.left, instruction.right)
    )
    sizes = [ranges[i][1] - ranges[i][0] for i in order]
    integer = instruction.left.dtype in ("int8", "uint8", "int32")
    k = int(np.prod([size for size, role in zip(sizes, roles, strict=True) if role in (Role.SUM, Role.WINDOW)]))
    kind: Any = np.float32
    if integer and k > _EXACT_TERMS:
        kind = np.float64
    left, right = left.astype(kind), right.astype(kind)
    if instruction.left_zero:
        left -= kind(instruction.left_zero)
    if instruction.right_zeros is not None:
        right = right - _box(instruction.right_zeros, ranges, counters, memories, True).transpose(order).astype(kind)
    product = _matrices(left, right, roles, sizes)
    fresh = instruction.starts(counters)
    sums = _box(instruction.sums, ranges, counters, memories, not fresh)
    if fresh:
        _box(instruction.sums, ranges, counters, memories, False)
    product = product.transpose(np.argsort(order)).reshape(sums.shape)
    if integer:
        total = product.astype(np.int64)
        if not fresh:
            total += sums
        if total.size and (total.max() > 2**31 - 1 or total.min() < -(2**31)):
            raise MachineError("a sum in the accumulators leaves the range of int32")
        sums[...] = total
    elif fresh:
        sums[...] = product
    else:
        sums[...] += product


def _matrices(left: np.ndarray, right: np.ndarray, roles: Sequence[Role], sizes: Sequence[int]) -> np.ndarray:
    """The sums of products as one array; the axes, in the order b, m, n, w, k, stay, summed ones with size 1."""

    def of(*wanted: Role) -> list[int]:
        return [size for size, role in zip(sizes, roles, strict=True) if role in wanted]

    batch, rows, columns, summed = of(Role.BATCH), of(Role.ROW), of(Role.COLUMN), of(Role.WINDOW, Role.SUM)
    b, m, n, k = (int(np.prod(each)) for each in (batch, rows, columns, summed))
    full_left = np.broadcast_to(left, [*batch, *rows, *[1] * len(columns), *summed]).reshape(b, m, k)
    full_right = np.broadcast_to(right, [*batch, *[1] * len(rows), *columns, *summed]).reshape(b, n, k)
    product: np.ndarray = full_left @ full_right.swapaxes(1, 2)
    return product.reshape([*batch, *rows, *columns, *[1] * len(summed)])


# Vector programs


def _to_dtype(dtype: str) -> Callable[..., Any]:
    return lambda x: np.asarray(x).astype(numpy_dtype(dtype)).astype(np.float32)


def _reduced(function: Any) -> Callable[..., Any]:
    return lambda x, *axes: function(x, axis=tuple(int(axis) for axis in axes), keepdims=True)


def _to_float8(x: Any) -> Any:
    return np.asarray(x, np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _from_float8(x: Any) -> Any:
    return np.asarray(x).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _float8_bits(x: Any) -> Any:
    return np.asarray(x, np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.int32)


def _bits(x: Any, shift: float, mask: float) -> Any:
    return (np.asarray(x).astype(np.int32) >> int(shift)) & int(mask)


def _running_sum(x: Any, axis: int) -> Any:
    return np.cumsum(x, axis, dtype=np.float32 if x.dtype.kind == "f" else np.int32)


# Reductions along axes: name → function of an operand and the axes.
REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": _reduced(np.sum),
    "max": _reduced(np.max),
    "min": _reduced(np.min),
    "product": _reduced(np.prod),
}

COORDINATE = "coordinate"  # the operation that gives the coordinates of the box's elements along an axis, as int32

RUNNING_SUM = "running_sum"
ALONG_AXES = frozenset({*REDUCTIONS, RUNNING_SUM})  # the operations whose attributes are axes of their operand

# Operations besides the element-wise ops and `COORDINATE`: name → function of operands and attributes.
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **REDUCTIONS,
    RUNNING_SUM: _running_sum,
    "to_float16": _to_dtype("float16"),
    "to_bfloat16": _to_dtype("bfloat16"),
    "to_float": lambda x: np.asarray(x).astype(np.float32),
    "to_int": lambda x: np.asarray(x).astype(np.int32),
    "bits": _bits,
    "signed_byte": lambda x: np.asarray(x).astype(np.uint8).view(np.int8).astype(np.int32),
    "to_float8": _to_float8,
    "from_float8": _from_float8,
    "float8_bits": _float8_bits,
}


def _compute(instruction: Compute, counters: Sequence[int], memories: Memories) -> None:
    ranges = [axis.inside(counters) for axis in instruction.box]
    if any(end <= first for first, end in ranges):
        return
    first = dict(instruction.carried) if instruction.begin(counters) else {}
    registers: list[Any] = []
    for number, tile in enumerate(instruction.inputs):
        if number in first:
            is_integer = numpy_dtype(tile.dtype).kind in "iub"
            kind = np.int32 if is_integer else np.float32
            registers.append(np.full([1] * len(ranges), first[number], kind))
            continue
        registers.append(_register(_box(tile, ranges, counters, memories, True)))
    with np.errstate(all="ignore"):
        for step in instruction.steps:
            operands = [registers[x] if isinstance(x, int) else _Constant(x) for x in step.operands]
            registers.append(
                _coordinates(instruction.box, int(step.attrs[0]), counters)
                if step.op == COORDINATE
                else _result(step, operands, ranges)
            )
        for register, tile in instruction.stores:
            target = _box(tile, ranges, counters, memories, False)
            _stored(registers[register], target)


class _Constant(float):
    """A constant operand, which is an integer among integers."""


def _register(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind in "iub":
        return array.astype(np.int32)
    if array.dtype == np.float32:
        return array.copy()
    if array.dtype == numpy_dtype("bfloat16"):
        return (np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _coordinates(box: Sequence[Axis], axis: int, counters: Sequence[int]) -> np.ndarray:
    start = box[axis].start.at(counters)
    first, end = box[axis].inside(counters)
    shape = [end - first if position == axis else 1 for position in range(len(box))]
    return np.arange(start + first, start + end, dtype=np.int32).reshape(shape)


def _result(step: Step, operands: Sequence[Any], ranges: Sequence[tuple[int, int]]) -> Any:
    function = OPERATIONS.get(step.op)
    if function is not None:
        values = [np.float32(x) if isinstance(x, _Constant) else x for x in operands]
        if step.op in ALONG_AXES:
            axes = set(map(int, step.attrs))
            shape = [end - first if axis in axes else 1 for axis, (first, end) in enumerate(ranges)]
            values[0] = np.broadcast_to(values[0], np.broadcast_shapes(np.shape(values[0]), shape))
        return function(*values, *step.attrs)
    op = ELEMENTWISE[step.op]
    is_float = any(not isinstance(x, _Constant) and np.asarray(x).dtype.kind == "f" for x in operands)
    return _evaluated(op, operands, step.attrs, is_float or op.integer is None)


def _evaluated(op: Elementwise, operands: Sequence[Any], attrs: Sequence[float], floats: bool) -> Any:
    if op.name == "copy":
        return operands[0]
    scalar: Any = (lambda x: np.float32(as_float32(x))) if floats else np.int32
    names = dict(_functions(floats))
    names.update({name: np.float32(value) for name, value in zip(op.attrs, attrs, strict=True)})
    for name, value in zip("abc", operands, strict=False):
        if isinstance(value, _Constant):
            names[name] = scalar(value)
        else:
            names[name] = np.asarray(value).astype(np.float32, copy=False) if floats else value
    return parse(op.expr if floats else op.integer or "")(names)


@cache
def _functions(floats: bool) -> Mapping[str, Any]:
    return FLOAT_FUNCTIONS if floats else INTEGER_FUNCTIONS


def _stored(value: Any, target: np.ndarray) -> None:
    target[...] = np.asarray(value).astype(target.dtype, copy=False)


__all__ = ["ALONG_AXES", "COORDINATE", "OPERATIONS", "REDUCTIONS", "RUNNING_SUM", "execute"]
