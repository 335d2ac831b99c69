"""Evaluation of vector programs in NumPy: each step becomes a function of the registers, built once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

import npu_compiler.ops  # noqa: F401  (fills the table of element-wise ops)
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.ops.numpy_functions import FLOAT_FUNCTIONS, INTEGER_FUNCTIONS
from npu_compiler.program.elementwise import ELEMENTWISE, as_float32
from npu_compiler.program.expression import parse
from npu_model.isa.instructions import Axis, Step, Value

_Function: TypeAlias = Callable[[Sequence[Any], Sequence[int]], Any]
"""A step as a function of the registers and the loop counters."""


def _to_dtype(dtype: str) -> Callable[..., Any]:
    return lambda x: np.asarray(x).astype(numpy_dtype(dtype)).astype(np.float32)


def _reduced(function: np.ufunc) -> Callable[..., Any]:
    return lambda x, *axes: function.reduce(x, axis=tuple(map(int, axes)), keepdims=True)


def _to_float8(x: Any) -> Any:
    return np.asarray(x, np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _from_float8(x: Any) -> Any:
    return np.asarray(x).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _float8_bits(x: Any) -> Any:
    return np.asarray(x, np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.int32)


def _bits(x: Any, shift: float, mask: float) -> Any:
    return (np.asarray(x).astype(np.int32, copy=False) >> int(shift)) & int(mask)


def _running_sum(x: Any, axis: int) -> Any:
    return np.cumsum(x, axis, dtype=np.float32 if x.dtype.kind == "f" else np.int32)


# Reductions along axes: name → function of an operand and the axes.
REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": _reduced(np.add),
    "max": _reduced(np.maximum),
    "min": _reduced(np.minimum),
    "product": _reduced(np.multiply),
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
    "to_float": lambda x: np.asarray(x).astype(np.float32, copy=False),
    "to_int": lambda x: np.asarray(x).astype(np.int32, copy=False),
    "bits": _bits,
    "signed_byte": lambda x: np.asarray(x).astype(np.uint8).view(np.int8).astype(np.int32),
    "to_float8": _to_float8,
    "from_float8": _from_float8,
    "float8_bits": _float8_bits,
}


class VectorProgram:
    """The steps of a vector program, evaluated on the elements of its box that exist (`Axis.total`).

    Whether a step computes with floats or integers depends on the dtypes of its operands, which are the same in all
    iterations, so it is decided in the first one.

    Args:
        ranges: For each axis, the first existing element and one past the last.
    """

    def __init__(self, steps: Sequence[Step], box: Sequence[Axis], ranges: Sequence[tuple[int, int]]) -> None:
        self._steps, self._box, self._ranges = steps, box, ranges
        self._functions: list[_Function] = []

    def run(self, registers: list[Any], counters: Sequence[int]) -> list[Any]:
        """Append the results of all steps to `registers`, which hold the inputs, and return them."""
        functions = self._functions
        for number, step in enumerate(self._steps):
            if number == len(functions):
                functions.append(self._function(step, registers))
            registers.append(functions[number](registers, counters))
        return registers

    def _function(self, step: Step, registers: Sequence[Any]) -> _Function:
        if step.op == COORDINATE:
            return self._coordinates(int(step.attrs[0]))
        if step.op in OPERATIONS:
            return self._operation(step)
        return _elementwise(step, registers)

    def _coordinates(self, axis: int) -> _Function:
        start, (first, end) = self._box[axis].start, self._ranges[axis]
        shape = [end - first if position == axis else 1 for position in range(len(self._box))]

        def coordinates(registers: Sequence[Any], counters: Sequence[int]) -> np.ndarray:
            begin = start.at(counters)
            return np.arange(begin + first, begin + end, dtype=np.int32).reshape(shape)

        return coordinates

    def _operation(self, step: Step) -> _Function:
        operation, attrs = OPERATIONS[step.op], step.attrs
        operands = [_operand(value) for value in step.operands]
        if step.op not in ALONG_AXES:
            return lambda registers, counters: operation(*[operand(registers) for operand in operands], *attrs)
        (operand,) = operands
        axes = set(map(int, attrs))
        shape = [end - first if axis in axes else 1 for axis, (first, end) in enumerate(self._ranges)]

        def along_axes(registers: Sequence[Any], counters: Sequence[int]) -> Any:
            value = operand(registers)
            return operation(np.broadcast_to(value, np.broadcast_shapes(np.shape(value), shape)), *attrs)

        return along_axes


def register(array: np.ndarray) -> np.ndarray:
    """The elements of an array as a register holds them: float32 or int32."""
    if array.dtype.kind in "iub":
        return array.astype(np.int32)
    if array.dtype == _BFLOAT16:
        return array.astype(np.float32, order="C")
    return array.astype(np.float32)


_BFLOAT16 = numpy_dtype("bfloat16")


def _operand(value: Value) -> Callable[[Sequence[Any]], Any]:
    """A function that returns a register's value, or a constant as float32."""
    if isinstance(value, int):
        return lambda registers: registers[value]
    constant = np.float32(value)
    return lambda registers: constant


def _elementwise(step: Step, registers: Sequence[Any]) -> _Function:
    """Build the function of an element-wise step, for registers of the dtypes of `registers`."""
    op = ELEMENTWISE[step.op]
    if op.name == "copy":
        operand = _operand(step.operands[0])
        return lambda registers, counters: operand(registers)
    numbers = [(name, x) for name, x in zip("abc", step.operands, strict=False) if isinstance(x, int)]
    dtypes = {name: np.asarray(registers[x]).dtype for name, x in numbers}
    floats = op.integer is None or any(dtype.kind == "f" for dtype in dtypes.values())
    converted = [name for name, dtype in dtypes.items() if floats and dtype != np.float32]
    names = dict(FLOAT_FUNCTIONS if floats else INTEGER_FUNCTIONS)
    names |= {name: np.float32(value) for name, value in zip(op.attrs, step.attrs, strict=True)}
    for name, x in zip("abc", step.operands, strict=False):
        if name not in dtypes:
            names[name] = np.float32(as_float32(x)) if floats else np.int32(x)
    evaluate = parse(op.expr if floats else op.integer or "")

    def elementwise(registers: Sequence[Any], counters: Sequence[int]) -> Any:
        for name, number in numbers:
            names[name] = registers[number]
        for name in converted:
            names[name] = names[name].astype(np.float32)
        return evaluate(names)

    return elementwise


__all__ = ["ALONG_AXES", "COORDINATE", "OPERATIONS", "REDUCTIONS", "RUNNING_SUM", "VectorProgram", "register"]
