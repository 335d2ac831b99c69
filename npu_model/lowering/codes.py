"""Element-wise kernels of quantized networks: floats to codes of 8 bits and back, and sums of codes."""

from __future__ import annotations

from npu_compiler.program.views import View
from npu_model.chip import Chip
from npu_model.lowering.emitter import Emitter
from npu_model.lowering.epilogues import dequantized, dequantized_residual, finished, quantized
from npu_model.lowering.families import Operands, Tiling, lowering
from npu_model.lowering.tiles import element_tilings, merged, tile_shape, tiled


def _tilings(o: Operands, chip: Chip) -> list[Tiling]:
    return element_tilings(o.out.numel)


def _round(e: Emitter, o: Operands, tiling: Tiling, *views: View) -> tuple[View, list[View], tuple[int, ...]]:
    target, *sources = merged(o.out, *views)
    return target, sources, tile_shape(target.shape, tiling["elements"])


@lowering("quantize_activation_kernel", tilings=_tilings)
def quantize_activation(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """The nearest code of each float."""
    target, sources, tile = _round(e, o, tiling, o.x)
    with tiled(e, target.shape, tile, sources) as turn:
        program = turn.program()
        (x,) = turn.inputs(program)
        turn.store(e, program, quantized(program, x, o), target)


@lowering("dequantize_activation_kernel", tilings=_tilings)
def dequantize_activation(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """The float that each code stands for."""
    target, sources, tile = _round(e, o, tiling, o.x)
    with tiled(e, target.shape, tile, sources) as turn:
        program = turn.program()
        (x,) = turn.inputs(program)
        turn.store(e, program, dequantized(program, x, o.x_scale, o.zero_point), target)


@lowering("integer_add_kernel", tilings=_tilings)
def integer_add(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """The sum of what two tensors of codes stand for, activated, as a float or as codes again."""
    target, sources, tile = _round(e, o, tiling, o.x, o.residual)
    with tiled(e, target.shape, tile, sources) as turn:
        program = turn.program()
        x, residual = turn.inputs(program)
        value = dequantized(program, x, o.x_scale, o.zero_point)
        value = program.op("add", value, dequantized_residual(program, residual, o.residual.dtype, o))
        value = program.activation(value, o.activation)
        turn.store(e, program, finished(program, value, o.out.dtype, o), target)


__all__ = ["dequantize_activation", "integer_add", "quantize_activation"]
