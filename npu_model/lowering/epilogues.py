"""Epilogues of matrix products: scales, bias, activation, residual, requantization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from npu_model.isa.instructions import ZERO, Affine, Axis
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.families import Operands
from npu_model.lowering.vector_program import VectorProgram

Box = Sequence[tuple[Affine, int]]
Factors: TypeAlias = Sequence[tuple[Piece, Sequence[int | None]]]
"""On-chip tiles of operands, each with its dimension along each axis of the result, or None to broadcast."""


def float_epilogue(
    e: Emitter,
    o: Operands,
    axes: Sequence[Axis],
    sums: tuple[Piece, Sequence[int | None]],
    bias: tuple[Piece, Sequence[int | None]] | None,
    residual: tuple[Piece, Sequence[int | None]] | None,
    out: tuple[Piece, Sequence[int | None]],
    *,
    residual_first: bool,
    factors: Factors = (),
) -> None:
    """out = act(sums + bias) + residual; or act(sums + bias + residual) with `residual_first`.

    Args:
        factors: Scales that the sums are multiplied by first; given only for sums of integers.
    """
    program = VectorProgram(axes)
    value = program.input(sums[0], *sums[1])
    scales = [program.input(piece, *dims) for piece, dims in factors]
    added = None if bias is None else program.input(bias[0], *bias[1])
    other = None if residual is None else program.input(residual[0], *residual[1])
    value = scaled(program, value, scales)
    if added is not None:
        value = program.op("add", value, added)
    if other is not None and residual_first:
        value = program.op("add", value, other)
    value = program.activation(value, o.activation)
    if other is not None and not residual_first:
        value = program.op("add", value, other)
    program.emit(e, [(value, out[0], out[1])], e.output_engine)


def scaled(program: VectorProgram, value: int, scales: Sequence[int]) -> int:
    """Convert integer sums to float32 and multiply them by their scales.

    Without scales, the sums are returned unchanged.
    """
    value = program.op("to_float", value) if scales else value
    for scale in scales:
        value = program.op("mul", value, program.op("to_float", scale))
    return value


def integer_epilogue(
    e: Emitter,
    o: Operands,
    axes: Sequence[Axis],
    sums: tuple[Piece, Sequence[int | None]],
    scales: tuple[Piece, Sequence[int | None]],
    bias: tuple[Piece, Sequence[int | None]] | None,
    residual: tuple[Piece, Sequence[int | None]] | None,
    out: tuple[Piece, Sequence[int | None]],
) -> None:
    """out = act(sums · (scales · x_scale) + bias + residual), requantized if the result is int8 or uint8.

    The order of operations is that of the CPU device, so that results are bit-identical.
    """
    program = VectorProgram(axes)
    total = program.input(sums[0], *sums[1])
    scale = program.input(scales[0], *scales[1])
    added = None if bias is None else program.input(bias[0], *bias[1])
    other = None if residual is None else program.input(residual[0], *residual[1])
    value = program.op(
        "mul", program.op("to_float", total), program.op("mul", program.op("to_float", scale), float(o.x_scale))
    )
    if added is not None:
        value = program.op("add", value, added)
    if other is not None:
        value = program.op("add", value, dequantized_residual(program, other, residual[0].dtype, o))  # type: ignore[index]
    value = program.activation(value, o.activation)
    program.emit(e, [(finished(program, value, out[0].dtype, o), out[0], out[1])], e.output_engine)


def dequantized_residual(program: VectorProgram, register: int, dtype: str, o: Operands) -> int:
    """The residual as a float, dequantized by its scale and zero point if it is int8 or uint8."""
    if dtype not in ("int8", "uint8"):
        return register
    return dequantized(program, register, o.residual_scale, o.residual_zero_point)


def dequantized(program: VectorProgram, register: int, scale: float, zero_point: int) -> int:
    """(codes − zero point) · scale, in float32."""
    value = program.op("to_float", register)
    if zero_point:
        value = program.op("sub", value, float(zero_point))
    return program.op("mul", value, float(scale))


def finished(program: VectorProgram, value: int, dtype: str, o: Operands) -> int:
    """Quantize a float if the dtype of the result is int8 or uint8; otherwise return it unchanged."""
    return quantized(program, value, o) if dtype in ("int8", "uint8") else value


def quantized(program: VectorProgram, value: int, o: Operands) -> int:
    """Quantize a float: round(value · (1 / scale)) + zero point, clamped to the format's limits."""
    inverse = float(np.float32(1) / np.float32(o.out_scale))
    codes = program.op("round", program.op("mul", value, inverse))
    if o.out_zero_point:
        codes = program.op("add", codes, float(o.out_zero_point))
    return program.op("minimum", program.op("maximum", codes, float(o.low)), float(o.high))


def first_rows(o: Operands) -> tuple[int, int]:
    """The first rows of the gate and of the factor that it multiplies (up), in the weight of a gated product.

    In a whole weight they are 0 and `n`; in a part of a divided product, the rows between its two halves are skipped.
    """
    return 0, o.call.inputs[1].shape[0] - o.n


def gated_epilogue(
    e: Emitter, o: Operands, columns: Axis, halves: list[Piece], factors: Sequence[Factors] = ((), ())
) -> None:
    """out = act(gate + bias) · (up + bias); each half of the sums is multiplied by its factors first."""
    biases = []
    if o.bias is not None:
        biases = [e.load(o.bias, [(columns.start + first, columns.size)], queue=1) for first in first_rows(o)]
    program = VectorProgram([Axis(1), columns])
    gate, up = (program.input(half, 0, 1) for half in halves)
    scales = [[program.input(piece, *dims) for piece, dims in own] for own in factors]
    added = [program.input(bias, None, 0) for bias in biases]
    gate, up = scaled(program, gate, scales[0]), scaled(program, up, scales[1])
    if added:
        gate, up = program.op("add", gate, added[0]), program.op("add", up, added[1])
    value = program.op("mul", program.activation(gate, o.activation), up)
    box = [(ZERO, 1), (columns.start, columns.size)]
    out, is_stored = e.result(o.out, box)
    program.emit(e, [(value, out, (0, 1))], e.output_engine)
    if is_stored:
        e.store(out, o.out, box)
