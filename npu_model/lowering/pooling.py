"""Pooling and interpolation of images: windows are read by overlapping strides from a tile loaded with its halo."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from npu_compiler.graph.dtypes import is_float, numpy_dtype
from npu_compiler.program.views import View
from npu_model.chip import Chip
from npu_model.isa.instructions import Axis
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.families import Operands, Tiling, lowering
from npu_model.lowering.tiles import MOST_AXES, Round, as_float, element_tilings, grouped, tile_shape, tiled
from npu_model.lowering.vector_program import VectorProgram

_NO_PLACE = float(2**31 - 1)


def _tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    return element_tilings(o.out.numel, 8)


@dataclass(frozen=True)
class _Image:
    """An image and the result of a kernel on it, with dimensions in the order in which the image lies in memory.

    Attributes:
        height, width: Numbers of these dimensions.
    """

    x: View
    out: View
    height: int
    width: int


def _image(o: Operands) -> _Image:
    planes = sorted((0, 1), key=lambda d: -abs(o.x.strides[d]))
    merged, (count, _, _) = grouped([planes, [2], [3]], *_same_pixels(o.x, o.out))
    x, out = (
        replace(
            each,
            shape=(*each.shape[:count], *view.shape[2:]),
            strides=(*each.strides[:count], *view.strides[2:]),
        )
        for each, view in zip(merged, (o.x, o.out), strict=True)
    )
    order = sorted(range(count + 2), key=lambda d: -abs(x.strides[d]))
    return _Image(x.permute(order), out.permute(order), order.index(count), order.index(count + 1))


def _same_pixels(x: View, out: View) -> tuple[View, View]:
    """The views reduced to one pixel: equal shapes, so that their image and channel dimensions can be merged."""
    return replace(x, shape=(*x.shape[:2], 1, 1)), replace(out, shape=(*x.shape[:2], 1, 1))


@dataclass(frozen=True)
class _Windows:
    """A tile of a pooling's result, with a vector program whose last two axes iterate over the window.

    Attributes:
        image: The image and the result.
        turn: The tile.
        program: The vector program.
        value: Register that holds the elements of the windows.
    """

    image: _Image
    turn: Round
    program: VectorProgram
    value: int

    @property
    def axes(self) -> tuple[int, int]:
        """Numbers of the window's two axes."""
        rank = len(self.turn.box)
        return rank, rank + 1

    def op(self, name: str, *operands: int | float) -> int:
        return self.program.op(name, *operands)

    def reduce(self, name: str, register: int) -> int:
        return self.program.op(name, register, attrs=self.axes)

    def coordinate(self, axis: int) -> int:
        return self.program.op("coordinate", attrs=(axis,))

    def store(self, e: Emitter, register: int) -> None:
        """Emit the program and store a register, which has been reduced over the window."""
        out, is_stored = e.result(self.image.out, self.turn.box)
        self.program.emit(e, [(register, out, (*range(len(self.turn.box)), None, None))])
        if is_stored:
            e.store(out, self.image.out, self.turn.box)


@contextmanager
def _windows(
    e: Emitter,
    o: Operands,
    elements: int,
    fill: float | int,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
) -> Iterator[_Windows]:
    """Context that loops over tiles of a pooling's result; elements of windows outside of the image are `fill`."""
    image = _image(o)
    tile = tile_shape(image.out.shape, elements)
    spatial = {d: i for i, d in enumerate((image.height, image.width))}
    with tiled(e, image.out.shape, tile, []) as turn:
        box = list(turn.box)
        for d, i in spatial.items():
            start, size = box[d]
            box[d] = (start * stride[i] + -padding[i], (size - 1) * stride[i] + (window[i] - 1) * dilation[i] + 1)
        piece = e.load(image.x, box, fill)
        program = VectorProgram([*(turn.axis(d) for d in range(len(tile))), *map(Axis, window)])
        steps = [piece.strides[d] * (stride[spatial[d]] if d in spatial else 1) for d in range(len(tile))]
        steps += [piece.strides[d] * dilation[i] for d, i in spatial.items()]
        value = program.input_tile(piece, piece.with_strides(tuple(steps)))
        yield _Windows(image, turn, program, value)


def _least(dtype: str) -> float | int:
    return -math.inf if is_float(dtype) else int(np.iinfo(numpy_dtype(dtype)).min)


@lowering("max_pool2d_kernel", "integer_max_pool2d_kernel", tilings=_tilings)
def max_pool(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = maximum of each window."""
    if not o.out.numel:
        return
    elements = tiling["elements"]
    with _windows(e, o, elements, _least(o.x.dtype), o.window, o.stride, o.padding, o.dilation) as windows:
        windows.store(e, windows.reduce("max", windows.value))


@lowering("max_pool2d_index_kernel", tilings=_tilings)
def max_pool_index(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = index within the plane of each window's first maximum, or of its last NaN."""
    if not o.out.numel:
        return
    height, width = o.x.shape[2:]
    with _windows(e, o, tiling["elements"], -math.inf, o.window, o.stride, o.padding, o.dilation) as w:
        row, column = (
            w.op(
                "add",
                w.op("sub", w.op("mul", w.coordinate(d), float(o.stride[i])), float(o.padding[i])),
                w.op("mul", w.coordinate(w.axes[i]), float(o.dilation[i])),
            )
            for i, d in enumerate((w.image.height, w.image.width))
        )
        exists = w.op(
            "logical_and",
            w.op("logical_and", w.op("ge", row, 0.0), w.op("lt", row, float(height))),
            w.op("logical_and", w.op("ge", column, 0.0), w.op("lt", column, float(width))),
        )
        place = w.op("add", w.op("mul", row, float(width)), column)
        is_best = w.op("logical_and", exists, w.op("eq", w.value, w.reduce("max", w.value)))
        is_nan = w.op("logical_and", exists, w.op("ne", w.value, w.value))
        first = w.reduce("min", w.op("where", is_best, place, _NO_PLACE))
        nan = w.reduce("max", w.op("where", is_nan, place, -1.0))
        greatest = w.op("where", w.op("eq", first, _NO_PLACE), -1.0, first)
        w.store(e, w.op("where", w.op("ge", nan, 0.0), nan, greatest))


@lowering("avg_pool2d_kernel", tilings=_tilings)
def avg_pool(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = sum of each window, divided by `divisor` or by the number of its elements."""
    if not o.out.numel:
        return
    with _windows(e, o, tiling["elements"], 0.0, o.window, o.stride, o.padding) as w:
        total = w.reduce("sum", as_float(w.program, w.value, o.x.dtype))
        w.store(e, w.op("true_divide", total, float(o.divisor) if o.divisor else _held(o, w)))


def _held(o: Operands, w: _Windows) -> int | float:
    """Number of elements of each window, as a constant or a register; padding counts if `count_include_pad` is set."""
    counts: list[int | float] = []
    for i, d in enumerate((w.image.height, w.image.width)):
        size, pad, taps, step = o.x.shape[2 + i], o.padding[i], o.window[i], o.stride[i]
        low, high = (-pad, size + pad) if o.count_include_pad else (0, size)
        ends = [
            (max(start, low), min(start + taps, high)) for start in (0 - pad, (o.out.shape[2 + i] - 1) * step - pad)
        ]
        if all(end - start == taps for start, end in ends):
            counts.append(float(taps))
            continue
        start = w.op("sub", w.op("mul", w.coordinate(d), float(step)), float(pad))
        end = w.op("minimum", w.op("add", start, float(taps)), float(high))
        counts.append(w.op("to_float", w.op("sub", end, w.op("maximum", start, float(low)))))
    rows, columns = counts
    if isinstance(rows, float) and isinstance(columns, float):
        return rows * columns
    return w.op("mul", rows, columns)


@lowering("adaptive_avg_pool2d_kernel", tilings=_tilings)
def adaptive_avg_pool(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = mean of each of p × q bins: windows if the image divides evenly, else an instruction for each bin."""
    if not o.out.numel:
        return
    (height, width), (rows, columns) = o.x.shape[2:], o.out.shape[2:]
    if height % rows == 0 and width % columns == 0:
        window = (height // rows, width // columns)
        with _windows(e, o, tiling["elements"], 0.0, window, window) as w:
            w.store(e, w.op("true_divide", w.reduce("sum", w.value), float(window[0] * window[1])))
        return
    image = _image(o)
    spatial = (image.height, image.width)
    planes = [d for d in range(len(image.x.shape)) if d not in spatial]
    part = tile_shape([image.out.shape[d] for d in planes], -(-tiling["elements"] // (rows * columns)))
    tile = list(image.out.shape)
    for d, size in zip(planes, part, strict=True):
        tile[d] = size
    with tiled(e, image.out.shape, tile, []) as turn:
        box = list(turn.box)
        for d in spatial:
            box[d] = (box[d][0], image.x.shape[d])
        piece = e.load(image.x, box)
        out, is_stored = e.result(image.out, turn.box)
        for i, (top, bottom) in enumerate(_bins(height, rows)):
            for j, (left, right) in enumerate(_bins(width, columns)):
                program = VectorProgram([*(turn.axis(d) for d in planes), Axis(bottom - top), Axis(right - left)])
                steps = tuple(piece.strides[d] for d in (*planes, *spatial))
                first = top * piece.strides[spatial[0]] + left * piece.strides[spatial[1]]
                value = program.input_tile(piece, piece.with_strides(steps, first))
                total = program.op("sum", value, attrs=(len(planes), len(planes) + 1))
                mean = program.op("true_divide", total, float((bottom - top) * (right - left)))
                place = i * out.strides[spatial[0]] + j * out.strides[spatial[1]]
                target = out.with_strides((*(out.strides[d] for d in planes), 0, 0), place)
                program.emit_tiles(e, [(mean, out, target)])
        if is_stored:
            e.store(out, image.out, turn.box)


def _bins(size: int, count: int) -> list[tuple[int, int]]:
    return [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


# Interpolation


@dataclass(frozen=True)
class _Neighbours:
    """The two input positions to interpolate between, for each output position along an axis.

    Attributes:
        first, second: Indices of the two, int32.
        share: Weight of the second, float32.
    """

    first: Piece
    second: Piece
    share: Piece


def _neighbours(e: Emitter, axis: Axis, size: int, scale: float, align_corners: bool) -> _Neighbours:
    program = VectorProgram([axis])
    place = program.op("to_float", program.op("coordinate", attrs=(0,)))
    if align_corners:
        ratio = (size - 1) / (axis.total - 1) if axis.total > 1 else 0.0
        place = program.op("mul", place, ratio)
    else:
        place = program.op("sub", program.op("mul", program.op("add", place, 0.5), float(scale)), 0.5)
        place = program.op("maximum", place, 0.0)
    first = program.op("minimum", program.op("to_int", place), float(size - 1))
    second = program.op("minimum", program.op("add", first, 1.0), float(size - 1))
    share = program.op("sub", place, program.op("to_float", first))
    result = _Neighbours(e.room([axis], "int32"), e.room([axis], "int32"), e.room([axis], "float32"))
    pieces = (result.first, result.second, result.share)
    program.emit(e, [(value, piece, (0,)) for value, piece in zip((first, second, share), pieces, strict=True)])
    return result


def _between(program: VectorProgram, values: Sequence[int], share: int) -> int:
    first, second = values
    rest = program.op("sub", 1.0, share)
    return program.op("add", program.op("mul", first, rest), program.op("mul", second, share))


@lowering("upsample_bilinear_kernel", tilings=_tilings)
def upsample_bilinear(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = x interpolated between rows, then between columns; transfers gather the neighbours by indices."""
    if not o.out.numel:
        return
    image = _image(o)
    planes = [d for d in range(len(image.x.shape)) if d not in (image.height, image.width)]
    x, out = (view.permute([image.height, *planes, image.width]) for view in (image.x, image.out))
    (height, *_, width), (_, *_, columns) = x.shape, out.shape
    last = len(out.shape) - 1
    part = tile_shape([*out.shape[1:last], out.shape[0]], -(-tiling["elements"] // columns), MOST_AXES - 1)
    tile = (part[-1], *part[:-1], columns)
    across = _neighbours(e, Axis(columns), width, o.scale[1], bool(o.align_corners))
    with tiled(e, out.shape, tile, []) as turn:
        down = _neighbours(e, turn.axis(0), height, o.scale[0], bool(o.align_corners))
        outer = [turn.axis(d) for d in range(last)]
        source = e.whole(x, (Axis(outer[0].size), *outer[1:], Axis(width)))
        wide = [*outer, Axis(width)]
        rows = [
            _picked(e, tuple(wide), source, index, height, queue)
            for queue, index in enumerate((down.first, down.second))
        ]
        program = VectorProgram(wide)
        values = [as_float(program, program.input(row, *range(last + 1)), x.dtype) for row in rows]
        share = program.input(down.share, 0, *[None] * last)
        between = e.room(wide, "float32")
        program.emit(e, [(_between(program, values, share), between, range(last + 1))])
        turned = between.reshaped((Axis(columns), *outer), (between.strides[last], *between.strides[:last]))
        narrow = (Axis(columns), *outer)
        sides = [_picked(e, narrow, turned, index, width, 3) for index in (across.first, across.second)]
        program = turn.program()
        dims = [0 if d == last else d + 1 for d in turn.axes]
        values = [program.input(side, *dims) for side in sides]
        share = program.input(across.share, *(0 if d == last else None for d in turn.axes))
        turn.store(e, program, _between(program, values, share), out)


def _picked(e: Emitter, axes: tuple[Axis, ...], source: Piece, index: Piece, limit: int, queue: int) -> Piece:
    target = e.room(axes, source.dtype)
    e.transfer(axes, source, target, queue=queue, index=index, index_limit=limit)
    return target
