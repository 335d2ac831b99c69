"""Convolutions: tiles with halos, on the matrix engine or, if depthwise, also on the lanes of the vector engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from npu_model.chip import Chip
from npu_model.isa.instructions import ZERO, Affine, Axis, Role, Space, Tile
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.epilogues import dequantized_residual, finished, float_epilogue, integer_epilogue
from npu_model.lowering.families import (
    CannotLower,
    Operands,
    Tiling,
    divided,
    divisors,
    halvings,
    in_tiers,
    lowering,
    parts,
)
from npu_model.lowering.products import need_matrix
from npu_model.lowering.vector_program import VectorProgram

_MOST_TAPS_ON_LANES = 49


@dataclass(frozen=True)
class _Window:
    """The parameters of a convolution.

    Attributes:
        groups: Number of groups.
        channels, outputs: Input and output channels of a group.
        kernel, stride, dilation: Along rows and columns.
        top, left: Padding before the first row and column; negative where the input is cropped.
    """

    groups: int
    channels: int
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    top: int
    left: int

    def reach(self, axis: int, size: int) -> int:
        """Number of input rows (axis 0) or columns (axis 1) that `size` output ones need, including the halo."""
        return (size - 1) * self.stride[axis] + (self.kernel[axis] - 1) * self.dilation[axis] + 1


def _window(o: Operands) -> _Window:
    outputs, channels, *kernel = o.weight.shape
    return _Window(
        o.groups,
        channels,
        outputs // o.groups,
        (kernel[0], kernel[1]),
        tuple(o.stride),
        tuple(o.dilation),
        o.padding[0],
        o.padding[2],
    )


def _tilings(o: Operands, chip: Chip) -> Iterator[Tiling | None]:
    window, (_, _, rows, columns) = _window(o), o.out.shape
    is_integer = o.x.dtype in ("int8", "uint8")
    on_arrays = True
    try:
        need_matrix(chip, "int8" if is_integer else o.x.dtype)
    except CannotLower:
        if window.channels != 1 or window.outputs != 1:
            raise
        on_arrays = False

    def tiles(divisor: int) -> Iterator[Tiling]:
        engines = [_on_lanes(window, rows, columns, divisor)]
        if on_arrays:
            engines.append(_on_arrays(window, rows, columns, chip, divisor))
        for each in zip_longest(*engines):  # in turns, since the search looks at the first ones only
            yield from (tiling for tiling in each if tiling is not None)

    return in_tiers(tiles)


def _on_lanes(window: _Window, rows: int, columns: int, divisor: int) -> Iterator[Tiling]:
    if window.channels != 1 or window.outputs != 1 or math.prod(window.kernel) > _MOST_TAPS_ON_LANES:
        return
    for groups in divided(halvings(window.groups, 1)[:8], divisor):
        for tp in divided(halvings(rows, 1)[:5], divisor):
            yield {"groups": groups, "p": tp, "q": columns, "o": 1, "c": 1, "lanes": 1, "rows_outer": 0}


def _on_arrays(window: _Window, rows: int, columns: int, chip: Chip, divisor: int) -> Iterator[Tiling]:
    assert chip.matrix is not None
    sums, within = chip.matrix.accumulator_bytes // 4, _within_a_group(window, rows, columns, chip, divisor)
    if window.groups == 1:
        yield from within
        return
    whole = _whole_groups(window, rows, columns, sums, divisor)
    if window.channels <= chip.matrix.rows:  # then a part of a group's channels is of use only where nothing else fits
        yield from (*whole, *within)
        return
    for each in zip_longest(whole, within):
        yield from (tiling for tiling in each if tiling is not None)


def _whole_groups(window: _Window, rows: int, columns: int, sums: int, divisor: int) -> Iterator[Tiling]:
    """Tilings of several groups, or of some outputs of one group, with all input channels of these groups."""
    sizes = [(groups, window.outputs) for groups in divided(halvings(window.groups, 1)[:6], divisor)]
    sizes += [(1, outputs) for outputs in divisors(window.outputs)[1:5]]  # of one group at a time
    for groups, outputs in sizes:
        for tp in divided(halvings(rows, 1)[:6], divisor):
            for tq in divided(halvings(columns, 4)[:3], divisor):
                if groups * outputs * tp * tq <= sums:
                    yield {
                        "groups": groups, "p": tp, "q": tq, "o": outputs, "c": window.channels,
                        "lanes": 0, "rows_outer": 0,
                    }  # fmt: skip


def _within_a_group(window: _Window, rows: int, columns: int, chip: Chip, divisor: int) -> Iterator[Tiling]:
    """Tilings of one group, whose input channels may be summed in parts."""
    assert chip.matrix is not None
    sums, row_sizes, column_sizes = chip.matrix.accumulator_bytes // 4, halvings(rows, 1), halvings(columns, 4)

    def sizes(total: int, least: int) -> list[int]:
        """Sizes of parts of a group's channels; if there are several groups, only sizes that divide `total`."""
        parts = divided(halvings(total, 1, least)[:5], divisor, least)
        if window.groups == 1:
            return parts
        return list(dict.fromkeys(max(each for each in divisors(total) if each <= part) for part in parts))

    for tc in sizes(window.channels, chip.matrix.rows):
        for to in sizes(window.outputs, chip.matrix.columns):
            for tp in divided([tp for tp in row_sizes if to * tp * columns <= sums][:7] or [1], divisor):
                fitting = [tq for tq in column_sizes if to * tp * tq <= sums]
                for tq in divided(fitting[: 1 if tp > 1 and divisor == 1 else 4], divisor):
                    orders = (0, 1) if (to < window.outputs and (tp < rows or tq < columns)) else (0,)
                    for rows_outer in orders:
                        yield {
                            "groups": 1, "p": tp, "q": tq, "o": to, "c": tc, "lanes": 0, "rows_outer": rows_outer,
                        }  # fmt: skip


@dataclass(frozen=True)
class _Outer:
    """The box of an output tile: groups, outputs of a group, rows and columns."""

    image: Affine
    group: Affine
    groups: Axis
    output: Axis
    rows: Axis
    columns: Axis


@lowering("conv2d_kernel", tilings=_tilings)
def conv2d(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = act(conv(x, weight) + bias + residual)."""
    (_lanes if tiling["lanes"] else _arrays)(e, o, tiling, 0)


@lowering("integer_conv2d_kernel", tilings=_tilings)
def integer_conv2d(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """The convolution of integers: sums in int32, then scales, bias, residual, activation and requantization."""
    (_lanes if tiling["lanes"] else _arrays)(e, o, tiling, o.zero_point)


def _arrays(e: Emitter, o: Operands, tiling: Tiling, zero: int) -> None:
    window, (images, _, rows, columns) = _window(o), o.out.shape
    tg, to, tp, tq, tc = (tiling[name] for name in ("groups", "o", "p", "q", "c"))
    whole_weight = tc == window.channels
    with e.loop(images) as image, e.loop(parts(window.groups, tg)) as group:
        first, second = parts(window.outputs, to), parts(rows, tp)
        if tiling["rows_outer"]:
            first, second = second, first
        with e.loop(first) as outer:
            kept: Piece | None = None
            if whole_weight and not tiling["rows_outer"]:
                kept = _weight(e, o, window, group * tg, outer, ZERO, tiling)
            with e.loop(second) as inner, e.loop(parts(columns, tq)) as column:
                j, i = (inner, outer) if tiling["rows_outer"] else (outer, inner)
                box = _Outer(
                    image,
                    group * tg,
                    Axis(tg, group * tg, window.groups),
                    Axis(to, j * to, window.outputs),
                    Axis(tp, i * tp, rows),
                    Axis(tq, column * tq, columns),
                )
                sums = e.room(
                    (box.groups, box.output, box.rows, box.columns),
                    "int32" if zero is not None and o.x.dtype in ("int8", "uint8") else "float32",
                    Space.ACCUMULATORS,
                )
                with e.loop(parts(window.channels, tc)) as part:
                    begins = None if whole_weight else (e.depth - 1,)
                    x = _input(e, o, window, box, part, tiling, zero)
                    w = kept or _weight(e, o, window, group * tg, j, part, tiling)
                    _multiply(e, o, window, box, Axis(tc, part * tc, window.channels), x, w, sums, begins, zero)
                _finish(e, o, box, sums)


def _input(e: Emitter, o: Operands, window: _Window, box: _Outer, part: Affine, tiling: Tiling, zero: int) -> Piece:
    """Load the input rows and columns that an output tile needs, including its halo and padding.

    Args:
        part: Number of the part of a group's channels.
        zero: The input's zero point, which is the value of padding; 0 for floats.
    """
    channels = tiling["groups"] * tiling["c"]
    first = box.group * window.channels + part * tiling["c"]
    return e.load(
        o.x,
        [
            (box.image, 1),
            (first, channels),
            (box.rows.start * window.stride[0] + -window.top, window.reach(0, box.rows.size)),
            (box.columns.start * window.stride[1] + -window.left, window.reach(1, box.columns.size)),
        ],
        fill=zero,
        queue=0,
    )


def _weight(e: Emitter, o: Operands, window: _Window, group: Affine, j: Affine, part: Affine, tiling: Tiling) -> Piece:
    if window.groups > 1:
        outputs = (group * window.outputs + j * tiling["o"], tiling["groups"] * tiling["o"])
    else:
        outputs = (j * tiling["o"], tiling["o"])
    channels = (part * tiling["c"], tiling["c"])
    return e.load(o.weight, [outputs, channels, (ZERO, window.kernel[0]), (ZERO, window.kernel[1])], queue=1)


def _multiply(
    e: Emitter,
    o: Operands,
    window: _Window,
    box: _Outer,
    channels: Axis,
    x: Piece,
    w: Piece,
    sums: Piece,
    begins: tuple[int, ...] | None,
    zero: int,
) -> None:
    """sums[g, o, p, q] += Σ x[g, c, p·stride + kh·dilation, …] · w[g, o, c, kh, kw]."""
    _, plane, row, element = x.strides
    (down, right), (below, beside) = window.stride, window.dilation
    per_output, per_channel, per_row, per_column = w.strides
    axes = [
        (Role.BATCH, box.groups),
        (Role.COLUMN, box.output),
        (Role.ROW, box.rows),
        (Role.ROW, box.columns),
        (Role.WINDOW, Axis(window.kernel[0])),
        (Role.WINDOW, Axis(window.kernel[1])),
        (Role.SUM, channels),
    ]
    left = x.with_strides(
        (window.channels * plane, 0, down * row, right * element, below * row, beside * element, plane)
    )
    right_tile = w.with_strides((window.outputs * per_output, per_output, 0, 0, per_row, per_column, per_channel))
    zeros = None
    if getattr(o.names, "weight_zeros", None) is not None:
        size = (box.groups.size, box.output.size)
        piece = e.load(o.weight_zeros, [_outputs(box, o)], queue=1)
        zeros = (piece, piece.with_strides((piece.strides[0] * size[1], piece.strides[0], 0, 0, 0, 0, 0)))
    e.multiply(
        axes,
        (x, left),
        (w, right_tile),
        (sums, sums.tile(0, 1, 2, 3, None, None, None)),
        begins=begins,
        left_zero=zero,
        right_zeros=zeros,
    )


def _outputs(box: _Outer, o: Operands) -> tuple[Affine, int]:
    """The output channels of a tile: the first and their number."""
    per_group = box.output.total
    return box.group * per_group + box.output.start, box.groups.size * box.output.size


def _finish(e: Emitter, o: Operands, box: _Outer, sums: Piece) -> None:
    channels = _outputs(box, o)
    size = [(box.image, 1), channels, (box.rows.start, box.rows.size), (box.columns.start, box.columns.size)]
    axes = (box.groups, box.output, box.rows, box.columns)
    is_integer = sums.dtype == "int32"

    def by_channel(piece: Piece) -> tuple[Piece, Sequence[int | None]]:
        return _grouped(piece, 0, box), (0, 1, None, None)

    scales = by_channel(e.load(o.scales, [channels], queue=1)) if is_integer else None
    bias = None if o.bias is None else by_channel(e.load(o.bias, [channels], queue=1))
    residual = None
    if o.residual is not None:
        residual = _grouped(e.load(o.residual, size, queue=3), 1, box), (0, 1, 2, 3)
    out, is_stored = e.result(o.out, size)
    target = _grouped(out, 1, box), (0, 1, 2, 3)
    if scales is not None:
        integer_epilogue(e, o, axes, (sums, (0, 1, 2, 3)), scales, bias, residual, target)
    else:
        float_epilogue(e, o, axes, (sums, (0, 1, 2, 3)), bias, residual, target, residual_first=True)
    if is_stored:
        e.store(out, o.out, size)


def _grouped(piece: Piece, dim: int, box: _Outer) -> Piece:
    """Split an on-chip tile's channel dimension `dim` into groups and outputs of a group.

    Earlier dimensions are dropped.
    """
    per_channel = piece.strides[dim]
    axes = (box.groups, box.output, *piece.axes[dim + 1 :])
    return piece.reshaped(axes, (per_channel * box.output.size, per_channel, *piece.strides[dim + 1 :]))


def _lanes(e: Emitter, o: Operands, tiling: Tiling, zero: int) -> None:
    """Emit a depthwise convolution on the vector engine: one vector program for each tile.

    Args:
        zero: The input's zero point; 0 for floats.
    """
    window, (images, _, rows, columns) = _window(o), o.out.shape
    tg, tp = tiling["groups"], tiling["p"]
    is_integer = o.x.dtype in ("int8", "uint8")
    with e.loop(images) as image, e.loop(parts(window.groups, tg)) as group:
        weight = _weight(e, o, window, group * tg, ZERO, ZERO, tiling)
        channels = (group * tg, tg)
        scales = e.load(o.scales, [channels], queue=1) if is_integer else None
        zeros = None
        if getattr(o.names, "weight_zeros", None) is not None:
            zeros = e.load(o.weight_zeros, [channels], queue=1)
        bias = None if o.bias is None else e.load(o.bias, [channels], queue=1)
        with e.loop(parts(rows, tp)) as i:
            box = _Outer(
                image,
                group * tg,
                Axis(tg, group * tg, window.groups),
                Axis(1),
                Axis(tp, i * tp, rows),
                Axis(columns),
            )
            x = _input(e, o, window, box, ZERO, tiling, zero)
            size = [(image, 1), channels, (box.rows.start, tp), (ZERO, columns)]
            residual = None if o.residual is None else e.load(o.residual, size, queue=3)
            out, is_stored = e.result(o.out, size)
            program = VectorProgram([box.groups, box.rows, box.columns])
            taps = _taps(program, x, weight, window)
            scale = None if scales is None else program.input(scales, 0, None, None)
            offset = None if zeros is None else program.input(zeros, 0, None, None)
            added = None if bias is None else program.input(bias, 0, None, None)
            other = None if residual is None else program.input(residual, 1, 2, 3)
            value = _sum_of_taps(program, taps, float(zero), offset)
            if scale is not None:
                factor = program.op("mul", program.op("to_float", scale), float(o.x_scale))
                value = program.op("mul", program.op("to_float", value), factor)
            if added is not None:
                value = program.op("add", value, added)
            if other is not None:
                dtype = o.residual.dtype
                value = program.op(
                    "add", value, dequantized_residual(program, other, dtype, o) if is_integer else other
                )
            value = program.activation(value, o.activation)
            if is_integer:
                value = finished(program, value, o.out.dtype, o)
            program.emit(e, [(value, out, (1, 2, 3))])
            if is_stored:
                e.store(out, o.out, size)


def _taps(program: VectorProgram, x: Piece, weight: Piece, window: _Window) -> list[tuple[int, int]]:
    """Registers of the input under each position of the window, and of the weight there."""
    _, plane, row, element = x.strides
    per_output, _, per_row, per_column = weight.strides
    taps = []
    for down in range(window.kernel[0]):
        for right in range(window.kernel[1]):
            offset = down * window.dilation[0] * row + right * window.dilation[1] * element
            under: Tile = x.with_strides((plane, window.stride[0] * row, window.stride[1] * element), offset)
            factor = weight.with_strides((per_output, 0, 0), down * per_row + right * per_column)
            taps.append((program.input_tile(x, under), program.input_tile(weight, factor)))
    return taps


def _sum_of_taps(program: VectorProgram, taps: Sequence[tuple[int, int]], zero: float, offset: int | None) -> int:
    total: int | None = None
    for x, w in taps:
        value = program.op("sub", x, zero) if zero else x
        factor = program.op("sub", w, offset) if offset is not None else w
        product = program.op("mul", value, factor)
        total = product if total is None else program.op("add", total, product)
    assert total is not None
    return total
