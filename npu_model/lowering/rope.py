"""Rotary position embeddings: both halves of each row in one vector program."""

from __future__ import annotations

from collections.abc import Iterable

from npu_model.chip import Chip
from npu_model.lowering.emitter import Emitter
from npu_model.lowering.families import Operands, Tiling, lowering
from npu_model.lowering.tiles import as_float, element_tilings, merged, tile_shape, tiled


def _tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    return element_tilings(-(-o.out.numel // 2))


@lowering("rope_kernel", tilings=_tilings)
def rope(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = x · cos + rotated · sin, where `rotated` is x's second half, negated, followed by its first half."""
    if not o.out.numel:
        return
    half = o.rotary_dim // 2
    halves = [view.slice(-1, first, first + half) for view in (o.out, o.x, o.cos, o.sin) for first in (0, half)]
    first_out, second_out, *operands = merged(*halves)
    with tiled(e, first_out.shape, tile_shape(first_out.shape, tiling["elements"]), operands) as turn:
        program = turn.program()
        registers = turn.inputs(program)
        first, second, *angles = [
            as_float(program, register, view.dtype) for register, view in zip(registers, operands, strict=True)
        ]
        first_cos, second_cos, first_sin, second_sin = angles
        results = (
            program.op("sub", program.op("mul", first, first_cos), program.op("mul", second, first_sin)),
            program.op("add", program.op("mul", second, second_cos), program.op("mul", first, second_sin)),
        )
        targets = [e.result(view, turn.box) for view in (first_out, second_out)]
        program.emit(e, [(value, piece, turn.axes) for value, (piece, _) in zip(results, targets, strict=True)])
        for (piece, is_stored), view in zip(targets, (first_out, second_out), strict=True):
            if is_stored:
                e.store(piece, view, turn.box)
