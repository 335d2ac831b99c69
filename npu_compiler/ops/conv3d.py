"""Convolutions of volumes, as matrix products with a row for each window; im2col and col2im."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from npu_compiler.graph.dtypes import FLOAT_DTYPES
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.elementwise import per_channel
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.matmul import emit_batched, emit_linear
from npu_compiler.ops.reductions import reduce
from npu_compiler.ops.registry import register_op
from npu_compiler.program.views import MAX_RANK, Shape, View, numel

MOST_UNFOLDED = 2**26  # elements of all windows


def _per_axis(node: OpNode, name: str, default: int, spatial: int = 3) -> list[int]:
    value = node.attrs.get(name, default)
    listed = [value] if isinstance(value, int) else list(value)
    return listed * spatial if len(listed) == 1 else listed or [default] * spatial


def _settings(node: OpNode, spatial: int) -> list[list[int]]:
    """Stride, padding and dilation along each axis of a sliding window."""
    return [_per_axis(node, name, int(name != "padding"), spatial) for name in ("stride", "padding", "dilation")]


def volumes_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    """The reason why a convolution by a weight of five dimensions cannot run on the device; None if it can."""
    if any(graph.tensors[name].dtype not in FLOAT_DTYPES for name in node.inputs):
        return "convolution of integers"
    x, weight = (graph.tensors[name].shape for name in node.inputs[:2])
    out = graph.tensors[node.outputs[0]].shape
    if len(x) not in (4, 5) or len(weight) != 5 or 0 in weight:
        return f"a convolution of volumes of shape {list(x)} with a weight of shape {list(weight)}"
    groups = node.attrs.get("groups", 1)
    if groups < 1:
        return f"convolution in {groups} groups"
    is_plain = node.base == "aten.convolution" and not node.attrs.get("transposed")
    if is_plain and any(node.attrs.get("output_padding") or []):
        return "output_padding on a convolution that is not transposed"
    unfolded = numel(out) * numel(weight[2:])  # what a transposed convolution sums up
    if not is_transposed(node):
        unfolded = unfolded // max(out[-4], 1) * groups * weight[1]
    return f"a convolution of volumes whose windows hold {unfolded} elements" if unfolded > MOST_UNFOLDED else None


def is_transposed(node: OpNode) -> bool:
    return bool(node.attrs.get("transposed")) or "transpose" in node.base


@register_op("aten.conv3d", tensors=("input", "weight", "bias"), unsupported=volumes_unsupported, one_dtype=True)
def lower_conv3d(ctx: Lowering, node: OpNode) -> None:
    if is_transposed(node):
        lower_conv_transpose3d(ctx, node)
        return
    x, weight, *biases = (ctx.view(name) for name in node.inputs)
    out = ctx.output(order=(0, 2, 3, 4, 1) if x.rank == 5 else (1, 2, 3, 0))
    x, out = (view.unsqueeze(0) if view.rank == 4 else view for view in (x, out))
    groups, dilation = node.attrs.get("groups", 1), _per_axis(node, "dilation", 1)
    spans = [gap * (taps - 1) for gap, taps in zip(dilation, weight.shape[2:], strict=True)]
    padded = _padded(ctx, x, _paddings(node, spans))
    windows = _windows(padded, out.shape[2:], weight.shape[2:], _per_axis(node, "stride", 1), dilation)
    if groups == 1:
        rows = ctx.reshaped(windows, (numel(windows.shape[:4]), numel(windows.shape[4:])))
        flat = ctx.reshaped(weight, (weight.shape[0], rows.shape[1]))
        emit_linear(ctx, rows, flat, out.permute([0, 2, 3, 4, 1]), biases[0] if biases else None)
        return
    _emit_grouped(ctx, windows, weight, out.permute([0, 2, 3, 4, 1]), biases, groups)


@register_op(
    "aten.conv_transpose3d", tensors=("input", "weight", "bias"), unsupported=volumes_unsupported, one_dtype=True
)
def lower_conv_transpose3d(ctx: Lowering, node: OpNode) -> None:
    """Lower a transposed convolution: one product per tap of the weight, summed where the taps put the results."""
    x, weight, *biases = (ctx.view(name) for name in node.inputs)
    out = ctx.output()
    x, out = (view.unsqueeze(0) if view.rank == 4 else view for view in (x, out))
    groups, (batch, channels, *sizes) = node.attrs.get("groups", 1), x.shape
    outputs, taps = weight.shape[1], numel(weight.shape[2:])
    split = ctx.reshaped(x, (batch, groups, channels // groups, *sizes)).permute([1, 0, 3, 4, 5, 2])
    rows = ctx.reshaped(split, (groups, batch * numel(sizes), channels // groups))
    product = ctx.temp((groups, rows.shape[1], outputs * taps), "float32")
    emit_batched(ctx, rows, ctx.reshaped(weight, (groups, rows.shape[2], outputs * taps)), product)
    scatter = _Scatter.of(node, out.shape[2:], weight.shape[2:], tuple(sizes))
    places = ctx.reshaped(product, (groups * batch, *sizes, outputs * taps))
    places = _padded(ctx, places, scatter.around, first=1)
    by_tap = places.reshape((groups, batch, *places.shape[1:4], outputs, *weight.shape[2:]))
    total = ctx.temp(out.shape, "float32") if biases else out
    target = total.reshape((batch, groups, outputs, *out.shape[2:]))
    assert by_tap is not None and target is not None
    scatter.sum(ctx, by_tap.permute([1, 0, 5, 6, 7, 8, 2, 3, 4]), target)
    if biases:
        ctx.elementwise("add", [total, per_channel(biases[0], total.rank)], out)


@dataclass(frozen=True)
class _Phase:
    """Outputs of an axis that are `stride` apart, so that the same taps of a sliding window reach all of them.

    Attributes:
        start: The first of them.
        count: Number of them.
        taps: The taps that reach them, evenly spaced.
        places: For each of these taps, the place of the window that reaches the first output. The places after it reach
            the others.
    """

    start: int
    count: int
    taps: tuple[int, ...]
    places: tuple[int, ...]


def _phases(size: int, taps: int, stride: int, padding: int, dilation: int) -> list[_Phase]:
    """The phases of an axis of `size` outputs: a window's tap reaches place · stride + tap · dilation - padding."""
    phases = []
    for start in range(min(stride, size)):
        reach = {tap: start + padding - tap * dilation for tap in range(taps)}
        own = {tap: first // stride for tap, first in reach.items() if first % stride == 0}
        phases.append(_Phase(start, -((start - size) // stride), tuple(own), tuple(own.values())))
    return phases


@dataclass(frozen=True)
class _Scatter:
    """The phases of each axis along which the taps of a sliding window put their values.

    Attributes:
        around: For each axis, the places before the first and after the last one that outputs ask for: they hold zeros.
    """

    phases: tuple[tuple[_Phase, ...], ...]
    around: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, node: OpNode, sizes: Shape, window: Shape, places: Shape) -> _Scatter:
        """The scatter of a node that makes axes of these sizes by a window's taps at some places."""
        phases = tuple(tuple(_phases(*axis)) for axis in zip(sizes, window, *_settings(node, len(window)), strict=True))
        around = []
        for axis, count in zip(phases, places, strict=True):
            asked = [first for phase in axis for place in phase.places for first in (place, place + phase.count - 1)]
            around.append((max(-min(asked, default=0), 0), max(max(asked, default=0) - count + 1, 0)))
        return cls(phases, tuple(around))

    def sum(self, ctx: Lowering, values: View, out: View) -> None:
        """Fill `out` with the sums of the values that are put there.

        Args:
            values: The values [*lead, *taps, *places], the places around included.
            out: The sums [*lead, *axes].
        """
        lead, axes = out.rank - len(self.phases), range(len(self.phases))
        for phases in itertools.product(*self.phases):
            target, offset = out, values.offset
            taps, tap_steps = list[int](), list[int]()
            for axis, phase in zip(axes, phases, strict=True):
                target = target.slice(lead + axis, phase.start, out.shape[lead + axis], len(self.phases[axis]))
                tap_step, step = values.strides[lead + axis], values.strides[lead + len(axes) + axis]
                reached = [
                    tap * tap_step + (place + self.around[axis][0]) * step
                    for tap, place in zip(phase.taps, phase.places, strict=True)
                ]
                taps.append(len(reached))
                tap_steps.append(abs(reached[1] - reached[0]) if len(reached) > 1 else 0)
                offset += min(reached, default=0)
            if 0 in taps:
                ctx.emit("fill_kernel", [], [target], {"value": 0.0, "int_value": 0})
                continue
            strides = (*tap_steps, *values.strides[:lead], *values.strides[lead + len(axes) :])
            reached_values = replace(values, shape=(*taps, *target.shape), strides=strides, offset=offset)
            _sum_first(ctx, reached_values, len(axes), target)


def _sum_first(ctx: Lowering, x: View, dims: int, out: View) -> None:
    """Emit the sum of `x` over its first dimensions; slice by slice if the others are too many for a kernel."""
    if all(count == 1 for count in x.shape[:dims]):
        for _ in range(dims):
            x = x.select(0, 0)
        ctx.copy(x, out)
        return
    kept = [dim for dim in range(x.rank) if dim < dims or x.shape[dim] > 1]
    if len(kept) > MAX_RANK:
        slices = out.shape.index(min(size for size in out.shape if size > 1))
        for index in range(out.shape[slices]):
            _sum_first(ctx, x.select(dims + slices, index), dims, out.select(slices, index))
        return
    target = out.reshape(tuple(size for size in out.shape if size > 1))
    assert target is not None
    shape, strides = (tuple(which[dim] for dim in kept) for which in (x.shape, x.strides))
    reduce(ctx, "sum", replace(x, shape=shape, strides=strides), list(range(dims)), target)


def _emit_grouped(ctx: Lowering, windows: View, weight: View, out: View, biases: list[View], groups: int) -> None:
    """Emit one matrix product per group of channels: that group's part of the windows by its part of the weight."""
    places, channels, taps = windows.shape[:4], windows.shape[4] // groups, windows.shape[5:]
    split = windows.reshape((*places, groups, channels, *taps))
    packed = ctx.temp((groups, *places, channels, *taps), windows.dtype)
    if split is None:
        for group in range(groups):
            ctx.copy(windows.slice(4, group * channels, (group + 1) * channels), packed.select(0, group))
    else:
        ctx.copy(split.permute([4, 0, 1, 2, 3, *range(5, split.rank)]), packed)
    rows = ctx.reshaped(packed, (groups, numel(places), channels * numel(taps)))
    flat = ctx.reshaped(weight, (groups, weight.shape[0] // groups, rows.shape[2]))
    product = ctx.temp((groups, numel(places), flat.shape[1]), "float32" if biases else out.dtype)
    emit_batched(ctx, rows, flat.transpose(1, 2), product)
    merged = ctx.reshaped(product.permute([1, 0, 2]), out.shape)
    if biases:
        ctx.elementwise("add", [merged, biases[0]], out)
    else:
        ctx.copy(merged, out)


def _paddings(node: OpNode, spans: list[int]) -> list[tuple[int, int]]:
    """The padding (before, after) along each axis; for 'same', an odd element is at the end, as in PyTorch."""
    padding = node.attrs.get("padding", 0)
    if padding == "same":
        return [(span // 2, span - span // 2) for span in spans]
    return [(pad, pad) for pad in ([0, 0, 0] if padding == "valid" else _per_axis(node, "padding", 0))]


def _padded(ctx: Lowering, x: View, paddings: Sequence[tuple[int, int]], first: int = 2) -> View:
    """A copy of a view with zeros around its axes, from dimension `first` on; the view itself without padding."""
    if not any(map(any, paddings)):
        return x
    around = [*[(0, 0)] * first, *paddings, *[(0, 0)] * (x.rank - first - len(paddings))]
    padded = ctx.temp(tuple(size + sum(pair) for size, pair in zip(x.shape, around, strict=True)), x.dtype)
    pads = [pad for pair in reversed(around) for pad in pair]
    params = {"mode": "constant", "pads": pads + [0] * (12 - len(pads)), "value": 0.0, "int_value": 0}
    ctx.emit("pad_kernel", [x], [padded], params)
    return padded


def _windows(x: View, places: Shape, window: Shape, stride: list[int], dilation: list[int]) -> View:
    """An overlapping view of a volume [batch, channels, *axes]: its windows [batch, *places, channels, *taps]."""
    batch, channel, *axes = x.strides
    steps = [size * step for size, step in zip(axes, stride, strict=True)]
    taps = [size * gap for size, gap in zip(axes, dilation, strict=True)]
    shape = (x.shape[0], *places, x.shape[1], *window)
    return View(x.buffer, shape, (batch, *steps, channel, *taps), x.offset, x.dtype)


def _im2col_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    x = graph.tensors[node.inputs[0]]
    if x.dtype not in FLOAT_DTYPES:
        return "im2col of integers"
    return None if x.numel else "im2col of an empty tensor"


@register_op("aten.im2col", unsupported=_im2col_unsupported)
def lower_im2col(ctx: Lowering, node: OpNode) -> None:
    """Write the contents of each window: [batch, channels · taps, places]."""
    x, out = ctx.view(node.inputs[0]), ctx.output()
    x, out = (view.unsqueeze(0) if view.rank == rank else view for view, rank in ((x, 3), (out, 2)))
    window, stride, dilation = (_per_axis(node, name, 1, 2) for name in ("kernel_size", "stride", "dilation"))
    paddings = [(pad, pad) for pad in _per_axis(node, "padding", 0, 2)]
    padded = _padded(ctx, x, paddings)
    places = tuple(
        (size - gap * (taps - 1) - 1) // step + 1
        for size, gap, taps, step in zip(padded.shape[2:], dilation, window, stride, strict=True)
    )
    windows = _windows(padded, places, tuple(window), stride, dilation)
    target = out.reshape((x.shape[0], x.shape[1], *window, *places))
    assert target is not None
    ctx.copy(windows.permute([0, 3, 4, 5, 1, 2]), target)


def _col2im_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    x, out = graph.tensors[node.inputs[0]], graph.tensors[node.outputs[0]]
    if x.dtype not in FLOAT_DTYPES:
        return "col2im of integers"
    summands = numel(tuple(_per_axis(node, "kernel_size", 1, 2))) * out.numel
    return f"col2im that sums up {summands} elements" if summands > MOST_UNFOLDED else None


@register_op("aten.col2im", unsupported=_col2im_unsupported)
def lower_col2im(ctx: Lowering, node: OpNode) -> None:
    """Sum windows [batch, channels · taps, places] into an image [batch, channels, height, width]."""
    x, out = ctx.view(node.inputs[0]), ctx.output()
    x, out = (view.unsqueeze(0) if view.rank == rank else view for view, rank in ((x, 2), (out, 3)))
    window = tuple(_per_axis(node, "kernel_size", 1, 2))
    stride, padding, dilation = _settings(node, 2)
    places = tuple(
        (size + 2 * pad - gap * (taps - 1) - 1) // step + 1
        for size, pad, gap, taps, step in zip(out.shape[2:], padding, dilation, window, stride, strict=True)
    )
    scatter = _Scatter.of(node, out.shape[2:], window, places)
    maps = ctx.reshaped(x, (x.shape[0], out.shape[1] * numel(window), *places))
    maps = _padded(ctx, maps, scatter.around)
    by_tap = maps.reshape((x.shape[0], out.shape[1], *window, *maps.shape[2:]))
    assert by_tap is not None
    scatter.sum(ctx, by_tap, out)
