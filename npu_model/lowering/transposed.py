"""Transposed convolutions: computed as a convolution over the input with zeros inserted between rows and columns."""

from __future__ import annotations

from collections.abc import Iterator

from npu_model.chip import Chip
from npu_model.isa.instructions import ZERO, Affine, Axis, Role, Space
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.families import Operands, Tiling, divided, divisors, halvings, in_tiers, lowering, parts
from npu_model.lowering.products import need_matrix
from npu_model.lowering.vector_program import VectorProgram


def _tilings(o: Operands, chip: Chip) -> Iterator[Tiling | None]:
    need_matrix(chip, o.x.dtype)
    assert chip.matrix is not None
    sums = chip.matrix.accumulator_bytes // 4
    _, _, rows, columns = o.out.shape
    channels, outputs = o.x.shape[1] // o.groups, o.weight.shape[1]
    step = o.stride[0]

    def tiles(divisor: int) -> Iterator[Tiling]:
        for tc in divided(halvings(channels, 1)[:6], divisor) if o.groups == 1 else [channels]:
            for to in divided(halvings(outputs, 1)[:6], divisor) if o.groups == 1 else divisors(outputs):
                for count in divided(halvings(parts(rows, step), 1)[:8], divisor):
                    if to * count * step * columns <= sums:
                        yield {"c": tc, "o": to, "p": count * step}

    return in_tiers(tiles)


@lowering("conv_transpose2d_kernel", tilings=_tilings)
def conv_transpose2d(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[p] = Σ over taps k of x[i] · weight[k] + bias, where i · stride = p + padding − k · dilation."""
    images, _, rows, columns = o.out.shape
    channels, outputs = o.x.shape[1] // o.groups, o.weight.shape[1]
    tc, to, tp = tiling["c"], tiling["o"], tiling["p"]
    with e.loop(images) as image, e.loop(o.groups) as group, e.loop(parts(outputs, to)) as j:
        column = Axis(to, j * to, outputs)
        with e.loop(parts(rows, tp)) as i:
            down, right = Axis(tp, i * tp, rows), Axis(columns)
            sums = e.room((column, down, right), "float32", Space.ACCUMULATORS)
            with e.loop(parts(channels, tc)) as part:
                begins = None if tc == channels else (e.depth - 1,)
                first = group * channels + part * tc
                x = _spread(e, o, image, first, tc, i, tp, columns)
                kernel = [(ZERO, size) for size in o.weight.shape[2:]]
                w = e.load(o.weight, [(first, tc), (j * to, to), *kernel], queue=1)
                _, row, element = x.strides
                per_channel, per_output, per_row, per_column = w.strides
                taps = o.weight.shape[2:]
                back = sum((taps[d] - 1) * o.dilation[d] * stride for d, stride in enumerate((row, element)))
                e.multiply(
                    [
                        (Role.COLUMN, column),
                        (Role.ROW, down),
                        (Role.ROW, right),
                        (Role.WINDOW, Axis(taps[0])),
                        (Role.WINDOW, Axis(taps[1])),
                        (Role.SUM, Axis(tc, part * tc, channels)),
                    ],
                    (
                        x,
                        x.with_strides(
                            (0, row, element, -o.dilation[0] * row, -o.dilation[1] * element, x.strides[0]), back
                        ),
                    ),
                    (w, w.with_strides((per_output, 0, 0, per_row, per_column, per_channel))),
                    (sums, sums.tile(0, 1, 2, None, None, None)),
                    begins=begins,
                )
            channel_box = (group * outputs + j * to, to)
            bias = None if o.bias is None else e.load(o.bias, [channel_box], queue=1)
            box = [(image, 1), channel_box, (down.start, tp), (ZERO, columns)]
            out, is_stored = e.result(o.out, box)
            program = VectorProgram([column, down, right])
            value = program.input(sums, 0, 1, 2)
            added = None if bias is None else program.input(bias, 0, None, None)
            if added is not None:
                value = program.op("add", value, added)
            program.emit(e, [(value, out, (1, 2, 3))], e.output_engine)
            if is_stored:
                e.store(out, o.out, box)


def _spread(
    e: Emitter, o: Operands, image: Affine, channel: Affine, count: int, tile: Affine, tp: int, columns: int
) -> Piece:
    """Load the part of the input that a tile of output rows needs, with zeros inserted: [channels, rows, columns]."""
    starts, sizes, firsts, reaches = [], [], [], []
    for axis, size in enumerate((tp, columns)):
        stride, dilation, taps = o.stride[axis], o.dilation[axis], o.weight.shape[2 + axis]
        reach = size + (taps - 1) * dilation
        offset = o.padding[axis] - (taps - 1) * dilation
        least = -(-offset // stride)
        first = least * stride - offset
        starts.append((tile * (tp // stride) if axis == 0 else ZERO) + least)
        sizes.append(max(1, (reach - 1 - first) // stride + 1))
        firsts.append(first)
        reaches.append(max(reach, first + 1))
    spread = e.room((count, *reaches), o.x.dtype)
    zeros = VectorProgram([Axis(count), Axis(reaches[0]), Axis(reaches[1])])
    zeros.emit(e, [(zeros.op("copy", 0.0), spread, (0, 1, 2))])
    axes = (
        Axis(1, image, o.x.shape[0]),
        Axis(count, channel, o.x.shape[1]),
        Axis(sizes[0], starts[0], o.x.shape[2]),
        Axis(sizes[1], starts[1], o.x.shape[3]),
    )
    plane, row, element = spread.strides
    target = spread.reshaped(
        axes, (0, plane, row * o.stride[0], element * o.stride[1]), firsts[0] * row + firsts[1] * element
    )
    e.transfer(axes, e.whole(o.x, axes), target, queue=0)
    return spread
