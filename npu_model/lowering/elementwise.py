"""Element-wise kernels: each op is one step of a vector program, over tiles of any shape."""

from __future__ import annotations

import re
from collections.abc import Iterable

import npu_compiler.ops  # noqa: F401  (fills the table of element-wise ops)
from npu_compiler.graph.dtypes import as_int32
from npu_compiler.program.elementwise import ACTIVATIONS, ELEMENTWISE, ELEMENTWISE_KERNELS, Elementwise
from npu_compiler.program.views import View
from npu_model.chip import Chip
from npu_model.isa.instructions import Space, Value
from npu_model.lowering.emitter import Emitter
from npu_model.lowering.families import CannotLower, Operands, Tiling, lowering
from npu_model.lowering.tiles import element_tilings, merged, spread, tile_shape, tiled
from npu_model.lowering.vector_program import VectorProgram, attributes

STORES = 2  # the queue of a section's stores, all of which one engine does in their order
_CALL = re.compile(r"([a-z_]\w*)\(")


def need_functions(chip: Chip, op: Elementwise, over_floats: bool) -> None:
    """Raise `CannotLower` if an op calls a function that the chip's vector engine does not compute.

    Args:
        over_floats: Whether the operands are floats; the op may have another expression over integers.
    """
    expression = op.expr if over_floats else op.integer or op.expr
    missing = sorted(set(_CALL.findall(expression)) - {"int", *chip.vector.functions})
    if missing:
        raise CannotLower(f"its vector engine does not compute {missing[0]}() of '{op.name}'; see [vector] functions")


def _over_floats(o: Operands) -> bool:
    op = ELEMENTWISE_KERNELS[o.call.kernel].op
    is_float = any("float" in view.dtype for view in o.call.inputs)
    return op.integer is None or is_float or any(isinstance(x, float) for x in o.call.params["scalars"])


def _tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    need_functions(chip, ELEMENTWISE_KERNELS[o.call.kernel].op, _over_floats(o))
    return element_tilings(o.out.numel)


@lowering(*ELEMENTWISE_KERNELS, tilings=_tilings)
def elementwise(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = op(operands…), on tensors and scalars: in float32, or in int32 if no operand is a float."""
    op = ELEMENTWISE_KERNELS[o.call.kernel].op
    out: View = o.out
    if not out.numel:
        return
    if op.name == "copy" and o.call.inputs:
        copy(e, o.call.inputs[0], out, tiling["elements"])
        return
    target, *sources = merged(out, *o.call.inputs)
    tile = tile_shape(target.shape, tiling["elements"])
    with tiled(e, target.shape, tile, sources) as turn:
        program = turn.program()
        registers = turn.inputs(program)
        values = _values(program, op, o, registers)
        result = program.op(op.name, *values, attrs=attributes(op.name, o.call.params))
        turn.store(e, program, result, target)


def _values(program: VectorProgram, op: Elementwise, o: Operands, registers: list[int]) -> list[Value]:
    """The operands of the op: registers of tensors, and constants.

    If the op is over floats but all tensors are integers, the first is converted.
    """
    scalars = o.call.params["scalars"]
    over_floats = _over_floats(o) or op.name == "copy"
    remaining = iter(registers)
    values: list[Value] = [
        next(remaining) if x is None else float(x) if over_floats else float(as_int32(x)) for x in scalars
    ]
    holds_float = any("float" in view.dtype for view in o.call.inputs)
    if over_floats and not holds_float and op.integer is not None and op.name != "copy":
        values[0] = program.op("to_float", values[0])
    return values


def copy(e: Emitter, source: View, target: View, elements: int) -> None:
    """target = source, of equal shapes. If their dtypes are equal, DMA engines copy without the vector engine."""
    if not target.numel:
        return
    target, source = merged(target, source)
    tile = tile_shape(target.shape, elements)
    if source.dtype == target.dtype and e.places[target.buffer].space is Space.SCRATCHPAD:
        with tiled(e, target.shape, tile, []) as turn:
            axes = tuple(turn.axis(d) for d in range(len(tile)))
            e.transfer(axes, e.whole(source, axes), e.whole(target, axes), queue=STORES)
        return
    with tiled(e, target.shape, tile, [source]) as turn:
        if source.dtype == target.dtype:
            e.store(turn.pieces[0], target, turn.box)
            return
        program = turn.program()
        turn.store(e, program, program.op("copy", *turn.inputs(program)), target)


def _epilogue_tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    if o.activation != "none":
        need_functions(chip, ELEMENTWISE[ACTIVATIONS[o.activation]], True)
    return element_tilings(o.out.numel)


@lowering("linear_epilogue_kernel", tilings=_epilogue_tilings)
def linear_epilogue(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = act(product + bias) + residual."""
    if not o.out.numel:
        return
    bias = [] if o.bias is None else [spread(o.bias, o.out.shape, [1])]
    residual = [] if o.residual is None else [o.residual]
    target, *sources = merged(o.out, o.product, *bias, *residual)
    with tiled(e, target.shape, tile_shape(target.shape, tiling["elements"]), sources) as turn:
        program = turn.program()
        product, *others = turn.inputs(program)
        value = program.op("add", product, others[0] if bias else 0.0)
        value = program.activation(value, o.activation)
        turn.store(e, program, program.op("add", value, others[-1]) if residual else value, target)
