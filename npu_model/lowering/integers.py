"""Quantize, dequantize and integer kernels (scale and zero point), with the same float32 steps as on every device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from npu_compiler.program.views import View, numel
from npu_model.chip import Chip
from npu_model.lowering.emitter import Emitter
from npu_model.lowering.families import Operands, Tiling, lowering
from npu_model.lowering.rows import Fold, Row, RowKernel, row_tilings
from npu_model.lowering.tiles import as_float, element_tilings, grouped, merged, spread, tile_shape, tiled
from npu_model.lowering.vector_program import VectorProgram


def dequantized(program: VectorProgram, register: int, scale: float, zero_point: int) -> int:
    """(x − zero_point) · scale, in float32."""
    shifted = program.op("sub", program.op("to_float", register), float(zero_point))
    return program.op("mul", shifted, float(scale))


def finished(program: VectorProgram, register: int, out: View, o: Operands) -> int:
    """Quantize a float with the result's scale and zero point; unchanged if the result is a float."""
    if "float" in out.dtype:
        return register
    inverse = float(np.float32(1) / np.float32(o.out_scale))
    codes = program.op("add", program.op("round", program.op("mul", register, inverse)), float(o.out_zero_point))
    return program.op("clamp_max", program.op("clamp_min", codes, float(o.low)), float(o.high))


def _tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    return element_tilings(o.out.numel)


@lowering("quantize_activation_kernel", "dequantize_activation_kernel", "integer_add_kernel", tilings=_tilings)
def integer_elements(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = quantize(x), dequantize(x), or quantize(act(dequantize(x) + dequantize(residual)))."""
    if not o.out.numel:
        return
    out, *sources = merged(o.out, *o.call.inputs)
    with tiled(e, out.shape, tile_shape(out.shape, tiling["elements"]), sources) as turn:
        program = turn.program()
        registers = turn.inputs(program)
        if o.call.kernel == "quantize_activation_kernel":
            value = as_float(program, registers[0], o.x.dtype)
        else:
            value = dequantized(program, registers[0], o.x_scale, o.zero_point)
        if o.call.kernel == "integer_add_kernel":
            residual = dequantized(program, registers[1], o.residual_scale, o.residual_zero_point)
            value = program.activation(program.op("add", value, residual), o.activation)
        turn.store(e, program, finished(program, value, out, o), out)


def _mean_rows(o: Operands) -> tuple[View, View, int]:
    planes, pixels = (sorted(dims, key=lambda d: -abs(o.x.strides[d])) for dims in ((0, 1), (2, 3)))
    (x, out), (kept, _) = grouped([planes, pixels], o.x, spread(o.out, o.x.shape, (0, 1)))
    return x, out, kept


def _mean_tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    return row_tilings(o.out.numel, numel(o.x.shape[2:]))


@lowering("integer_mean_kernel", tilings=_mean_tilings)
def integer_mean(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = mean of each plane of integers, with an exact sum, requantized unless the result is a float."""
    if not o.out.numel:
        return
    x, out, kept = _mean_rows(o)
    factor = float(np.float32(o.x_scale) / np.float32(numel(o.x.shape[2:])))

    def shifted(row: Row) -> int:
        return row.op("sub", row.inputs[0], float(o.zero_point))

    def result(row: Row) -> int:
        mean = row.op("mul", row.op("to_float", row.folds[0][0]), factor)
        return finished(row.program, mean, out, o)

    RowKernel([x], out, kept, [Fold("sum", shifted, dtype="int32")], result).emit(e, tiling)
