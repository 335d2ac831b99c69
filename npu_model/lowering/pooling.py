"""Pooling and resampling of images on the vector engine: windows tap by tap, bins by reductions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from npu_compiler.graph.dtypes import numpy_dtype
from npu_model.chip import Chip
from npu_model.isa.instructions import ZERO, Affine, Axis
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.epilogues import finished
from npu_model.lowering.families import CannotLower, Operands, Tiling, halvings, lowering, parts
from npu_model.lowering.vector_program import VectorProgram

_MOST_TAPS = 25  # of one vector program; a larger window is reduced along one axis after the other


def _tilings(o: Operands, chip: Chip) -> Iterator[Tiling]:
    _, channels, rows, _ = o.out.shape
    for tc in halvings(channels, 1)[:8]:
        for tp in halvings(rows, 1)[:6]:
            yield {"c": tc, "p": tp}


@lowering("max_pool2d_kernel", "integer_max_pool2d_kernel", tilings=_tilings)
def max_pool2d(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """The largest element of each window; what is outside of the image is less than all."""
    dtype = numpy_dtype(o.x.dtype)
    least = -math.inf if "float" in o.x.dtype else 0 if dtype == bool else int(np.iinfo(dtype).min)
    for turn in _turns(e, o, tiling, tuple(o.dilation), least):
        x, rows, columns, channels, box = turn
        down, right = o.window
        if down * right <= _MOST_TAPS:
            program = VectorProgram([channels, rows, columns])
            value = _largest(program, _taps(program, x, o, tuple(o.dilation), range(down), range(right)))
        else:
            x = _reduced_columns(e, o, x, channels, rows, columns)
            program = VectorProgram([channels, rows, columns])
            value = _largest(program, _taps(program, x, o, tuple(o.dilation), range(down), range(1), 1))
        _store(e, o, program, value, box)


@lowering("avg_pool2d_kernel", tilings=_tilings)
def avg_pool2d(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """The mean of each window; the padding counts as zeros, or not at all."""
    if math.prod(o.window) > _MOST_TAPS**2:
        raise CannotLower(f"its vector engine averages windows of at most {_MOST_TAPS**2} elements")
    for x, rows, columns, channels, box in _turns(e, o, tiling, (1, 1), 0.0):
        program = VectorProgram([channels, rows, columns])
        taps = _taps(program, x, o, (1, 1), range(o.window[0]), range(o.window[1]))
        total = taps[0]
        for tap in taps[1:]:
            total = program.op("add", total, tap)
        if o.divisor:
            value = program.op("true_divide", total, float(o.divisor))
        else:
            count = program.op("mul", _length(program, o, 0, 1), _length(program, o, 1, 2))
            value = program.op("true_divide", total, count)
        _store(e, o, program, value, box)


def _length(program: VectorProgram, o: Operands, axis: int, dim: int) -> int:
    """Number of elements along an axis that a window averages, as `npu_runtime.cpu.window_lengths` counts them."""
    size, stride, pad, taps = o.x.shape[2 + axis], o.stride[axis], o.padding[axis], o.window[axis]
    place = program.op("to_float", program.op("coordinate", attrs=(dim,)))
    start = program.op("sub", program.op("mul", place, float(stride)), float(pad))
    end = program.op("minimum", program.op("add", start, float(taps)), float(size + pad))
    if not o.count_include_pad:
        start, end = program.op("maximum", start, 0.0), program.op("minimum", end, float(size))
    return program.op("sub", end, start)


_Turn = tuple[Piece, Axis, Axis, Axis, list[tuple[Affine, int]]]


def _turns(
    e: Emitter, o: Operands, tiling: Tiling, dilation: tuple[int, int], fill: float | int
) -> Iterator[_Turn]:
    """A round of the loops over tiles: the input with its surroundings; rows, columns and channels; the result's box."""
    images, channels, rows, columns = o.out.shape
    tc, tp = tiling["c"], tiling["p"]
    reach = [
        (size - 1) * stride + (taps - 1) * apart + 1
        for size, stride, taps, apart in zip((tp, columns), o.stride, o.window, dilation, strict=True)
    ]
    with e.loop(images) as image, e.loop(parts(channels, tc)) as j, e.loop(parts(rows, tp)) as i:
        x = e.load(
            o.x,
            [
                (image, 1),
                (j * tc, tc),
                (i * (tp * o.stride[0]) + -o.padding[0], reach[0]),
                (Affine(-o.padding[1]), reach[1]),
            ],
            fill=fill,
        )
        row, column, channel = Axis(tp, i * tp, rows), Axis(columns), Axis(tc, j * tc, channels)
        yield x, row, column, channel, [(image, 1), (j * tc, tc), (i * tp, tp), (ZERO, columns)]


def _taps(
    program: VectorProgram,
    x: Piece,
    o: Operands,
    dilation: tuple[int, int],
    rows: Sequence[int],
    columns: Sequence[int],
    right: int = 0,
) -> list[int]:
    """Registers of the input under each position of the window; `right` replaces the stride along columns."""
    _, plane, row, element = x.strides
    strides = (plane, o.stride[0] * row, (right or o.stride[1]) * element)
    places = [down * dilation[0] * row + beside * dilation[1] * element for down in rows for beside in columns]
    return [program.input_tile(x, x.with_strides(strides, place)) for place in places]


def _largest(program: VectorProgram, taps: Sequence[int]) -> int:
    value = taps[0]
    for tap in taps[1:]:
        value = program.op("maximum", value, tap)
    return value


def _reduced_columns(e: Emitter, o: Operands, x: Piece, channels: Axis, rows: Axis, columns: Axis) -> Piece:
    """The largest elements along the window's columns, for all rows of a tile's input."""
    height = Axis(x.axes[2].size)
    program = VectorProgram([channels, height, columns])
    _, plane, row, element = x.strides
    strides = (plane, row, o.stride[1] * element)
    taps = [
        program.input_tile(x, x.with_strides(strides, beside * o.dilation[1] * element)) for beside in range(o.window[1])
    ]
    result = e.room((Axis(1), channels, height, columns), o.x.dtype)
    program.emit(e, [(_largest(program, taps), result, (1, 2, 3))])
    return result


def _store(e: Emitter, o: Operands, program: VectorProgram, value: int, box: list[tuple[Affine, int]]) -> None:
    out, is_stored = e.result(o.out, box)
    program.emit(e, [(value, out, (1, 2, 3))])
    if is_stored:
        e.store(out, o.out, box)


def _channel_tilings(o: Operands, chip: Chip) -> Iterator[Tiling]:
    for tc in halvings(o.x.shape[1], 1)[:12]:
        yield {"c": tc}


@lowering("adaptive_avg_pool2d_kernel", tilings=_channel_tilings)
def adaptive_avg_pool2d(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """The means of bins that divide the image as evenly as whole rows and columns do."""
    images, channels, rows, columns = o.out.shape
    height, width = o.x.shape[2:]
    tc = tiling["c"]
    with e.loop(images) as image, e.loop(parts(channels, tc)) as j:
        whole = [(image, 1), (j * tc, tc)]
        x = e.load(o.x, [*whole, (ZERO, height), (ZERO, width)])
        box = [*whole, (ZERO, rows), (ZERO, columns)]
        out, is_stored = e.result(o.out, box)
        channel = Axis(tc, j * tc, channels)
        for p, (top, bottom) in enumerate(_bins(height, rows)):
            for q, (left, right) in enumerate(_bins(width, columns)):
                program = VectorProgram([channel, Axis(bottom - top), Axis(right - left)])
                _, plane, row, element = x.strides
                bin_ = x.with_strides((plane, row, element), top * row + left * element)
                value = program.op("sum", program.input_tile(x, bin_), attrs=(1, 2))
                value = program.op("true_divide", value, float((bottom - top) * (right - left)))
                _, out_plane, out_row, out_element = out.strides
                target = out.with_strides((out_plane, 0, 0), p * out_row + q * out_element)
                program.emit_tiles(e, [(value, out, target)])
        if is_stored:
            e.store(out, o.out, box)


def _bins(size: int, count: int) -> list[tuple[int, int]]:
    return [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


@lowering("integer_mean_kernel", tilings=_channel_tilings)
def integer_mean(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """The mean of each image of codes, as a float or as codes again."""
    images, channels, height, width = o.x.shape
    tc = tiling["c"]
    with e.loop(images) as image, e.loop(parts(channels, tc)) as j:
        x = e.load(o.x, [(image, 1), (j * tc, tc), (ZERO, height), (ZERO, width)])
        program = VectorProgram([Axis(tc, j * tc, channels), Axis(height), Axis(width)])
        value = program.input(x, 1, 2, 3)
        if o.zero_point:
            value = program.op("sub", value, float(o.zero_point))
        total = program.op("to_float", program.op("sum", value, attrs=(1, 2)))
        factor = np.float32(o.x_scale) / np.float32(height * width)
        value = finished(program, program.op("mul", total, float(factor)), o.out.dtype, o)
        box = [(image, 1), (j * tc, tc)]
        out, is_stored = e.result(o.out, box)
        program.emit(e, [(value, out, (1, None, None))])
        if is_stored:
            e.store(out, o.out, box)


def _bilinear_tilings(o: Operands, chip: Chip) -> Iterator[Tiling]:
    for size, result in zip(o.x.shape[2:], o.out.shape[2:], strict=True):
        if o.align_corners and size != result or result % size:
            raise CannotLower("its DMA engines enlarge images by whole factors, without aligned corners")
    for step, size, result in zip(o.scale, o.x.shape[2:], o.out.shape[2:], strict=True):
        if abs(step * result - size) > 1e-3:
            raise CannotLower(f"an image of {size} is enlarged to {result} by {1 / step:g}")
    yield from _channel_tilings(o, chip)


@lowering("upsample_bilinear_kernel", tilings=_bilinear_tilings)
def upsample_bilinear(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """An image enlarged by whole factors: for each phase of the factors, a mean of four neighbours with fixed weights.

    The neighbours of pixels at the border are the border's own pixels, which are loaded twice.
    """
    images, channels, height, width = o.x.shape
    factors = [result // size for result, size in zip(o.out.shape[2:], (height, width), strict=True)]
    tc = tiling["c"]
    with e.loop(images) as image, e.loop(parts(channels, tc)) as j:
        channel = Axis(tc, j * tc, channels)
        x = _bordered(e, o, image, j * tc, channel)
        box = [(image, 1), (j * tc, tc), (ZERO, o.out.shape[2]), (ZERO, o.out.shape[3])]
        out, is_stored = e.result(o.out, box)
        plane, row, element = x.strides
        _, out_plane, out_row, out_element = out.strides
        for down in range(factors[0]):
            for right in range(factors[1]):
                program = VectorProgram([channel, Axis(height), Axis(width)])
                (top, lower), (left, beside) = _neighbours(down, factors[0]), _neighbours(right, factors[1])
                corners = [
                    program.input_tile(
                        x, x.with_strides((plane, row, element), (1 + top + i) * row + (1 + left + k) * element)
                    )
                    for i in range(2)
                    for k in range(2)
                ]
                above, below = (
                    program.op(
                        "add",
                        program.op("mul", program.op("to_float", corners[first]), 1 - beside),
                        program.op("mul", program.op("to_float", corners[first + 1]), beside),
                    )
                    for first in (0, 2)
                )
                value = program.op("add", program.op("mul", above, 1 - lower), program.op("mul", below, lower))
                strides = (out_plane, factors[0] * out_row, factors[1] * out_element)
                target = out.with_strides(strides, down * out_row + right * out_element)
                program.emit_tiles(e, [(value, out, target)])
        if is_stored:
            e.store(out, o.out, box)


def _neighbours(phase: int, factor: int) -> tuple[int, float]:
    """The first of the two pixels between which a phase lies, from the pixel on, and the share of the second."""
    place = (phase + 0.5) / factor - 0.5
    first = math.floor(place)
    return first, float(np.float32(place - first))


def _bordered(e: Emitter, o: Operands, image: Affine, first: Affine, channel: Axis) -> Piece:
    """Channels of an image with one pixel more on each side, equal to its neighbour."""
    height, width = o.x.shape[2:]
    count = channel.size
    piece = e.room((channel, Axis(height + 2), Axis(width + 2)), o.x.dtype)
    plane, row, element = piece.strides
    for rows, size, to in ((0, height, 1), (0, 1, 0), (height - 1, 1, height + 1)):
        for columns, length, place in ((0, width, 1), (0, 1, 0), (width - 1, 1, width + 1)):
            axes = (
                Axis(1, image, o.x.shape[0]),
                Axis(count, first, o.x.shape[1]),
                Axis(size, Affine(rows), height),
                Axis(length, Affine(columns), width),
            )
            target = piece.reshaped(axes, (0, plane, row, element), to * row + place * element)
            e.transfer(axes, e.whole(o.x, axes), target)
    return piece
