"""Convolutions of volumes, as convolutions of their planes or, transposed, as products; im2col and col2im."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from npu_compiler.graph.dtypes import FLOAT_DTYPES
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.elementwise import per_channel
from npu_compiler.ops.image_convolutions import emit_convolution, emit_transposed_convolution
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.matmul import emit_batched
from npu_compiler.ops.reductions import reduce
from npu_compiler.ops.registry import register_op
from npu_compiler.program.views import MAX_RANK, Shape, View, numel

MOST_UNFOLDED = 2**26  # elements of all windows of a transposed convolution
MOST_GATHERED = 2**27  # elements of planes that are copied for one convolution of planes; more are copied in parts


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
    if is_transposed(node) and not _puts_planes_apart(node, weight):
        unfolded = numel(out) * numel(weight[2:])  # what is summed up
        return f"a convolution of volumes whose windows hold {unfolded} elements" if unfolded > MOST_UNFOLDED else None
    return None


def is_transposed(node: OpNode) -> bool:
    return bool(node.attrs.get("transposed")) or "transpose" in node.base


@register_op(
    "aten.conv3d",
    tensors=("input", "weight", "bias"),
    unsupported=volumes_unsupported,
    channel_axis=lambda node: 0,
    one_dtype=True,
)
def lower_conv3d(ctx: Lowering, node: OpNode) -> None:
    """Lower a convolution of volumes as one of planes, whose channels are those of all planes in a window's depth.

    Where windows have one pixel of each plane, the pixels of a plane become the width of an image whose height is the
    depth. The result lies in memory as these images or planes do.
    """
    if is_transposed(node):
        lower_conv_transpose3d(ctx, node)
        return
    x, weight, *biases = (ctx.view(name) for name in node.inputs)
    x, shape = _with_batch(ctx, node, x)
    bias, groups = biases[0] if biases else None, node.attrs.get("groups", 1)
    stride, dilation = _per_axis(node, "stride", 1), _per_axis(node, "dilation", 1)
    spans = [gap * (taps - 1) for gap, taps in zip(dilation, weight.shape[2:], strict=True)]
    around = _paddings(node, spans)
    batch, channels, depth, *sizes = shape
    pointwise = weight.shape[3:] == (1, 1) and stride[1:] == [1, 1] and not any(map(any, around[1:]))
    storage = ctx.spec(node.outputs[0]).storage
    if pointwise and weight.shape[2] > 1:
        image = ctx.reshaped(x, (*x.shape[:3], numel(x.shape[3:])))
        out = ctx.temp((batch, channels, depth, numel(sizes)), storage)
        settings = {"stride": [stride[0], 1], "padding": [*around[0], 0, 0], "dilation": [dilation[0], 1]}
        emit_convolution(ctx, image, weight.squeeze(4), bias, out, {**settings, "groups": groups})
        volumes = ctx.reshaped(out, shape)
    else:
        taps = _Taps(depth, weight.shape[2], stride[0], dilation[0], around[0][0])
        images = ctx.temp((batch * depth, channels, *sizes), storage)
        planes = ctx.reshaped(images, (batch, depth, channels, *sizes))
        padding = [pad for pair in around[1:] for pad in pair]
        settings = {"stride": stride[1:], "padding": padding, "dilation": dilation[1:]}
        _emit_planes(ctx, x, weight, bias, taps, {**settings, "groups": groups}, planes)
        volumes = planes.permute([0, 2, 1, 3, 4])
    _finish(ctx, node, volumes)


def _with_batch(ctx: Lowering, node: OpNode, x: View) -> tuple[View, Shape]:
    """The volumes of a node's input and the shape of its output, both with a batch dimension, which may be missing."""
    shape = ctx.spec(node.outputs[0]).shape
    return (x.unsqueeze(0), (1, *shape)) if x.rank == 4 else (x, shape)


def _finish(ctx: Lowering, node: OpNode, volumes: View) -> None:
    """Make volumes with a batch dimension the node's output, which may lack it."""
    ctx.finish(volumes.select(0, 0) if len(ctx.spec(node.outputs[0]).shape) == 4 else volumes)


@dataclass(frozen=True)
class _Taps:
    """The planes that each of a number of windows along the depth covers.

    Attributes:
        windows: Number of windows.
        count: Number of planes in each.
        stride: Planes from one window to the next.
        dilation: Planes from one tap of a window to the next.
        before: Planes of zeros before the first one.
    """

    windows: int
    count: int
    stride: int
    dilation: int
    before: int

    def part(self, begin: int, end: int) -> _Taps:
        """The windows from `begin` to `end`."""
        return replace(self, windows=end - begin, before=self.before - begin * self.stride)

    def plane(self, window: int, tap: int) -> int:
        """The number of the plane that a window's tap covers; planes of zeros are before 0 and behind the last one."""
        return window * self.stride + tap * self.dilation - self.before

    def inside(self, tap: int, depth: int) -> tuple[int, int]:
        """The first of the windows whose tap is one of `depth` planes, and the one behind the last."""
        inside = [window for window in range(self.windows) if 0 <= self.plane(window, tap) < depth]
        return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _emit_planes(
    ctx: Lowering, x: View, weight: View, bias: View | None, taps: _Taps, settings: Mapping[str, Any], out: View
) -> None:
    """Emit the convolution of volumes [N, C, depth, H, W] into planes [N, windows, outputs, H, W].

    Args:
        settings: Those of the convolution within planes.
    """
    gathered = taps.count * taps.windows * (x.numel // max(x.shape[2], 1)) if taps.count > 1 else 0
    dim = 0 if x.shape[0] > 1 else 1
    if gathered > MOST_GATHERED and (count := out.shape[dim]) > 1:
        for begin, end in ((0, count // 2), (count // 2, count)):
            items, windows = (x.slice(0, begin, end), taps) if dim == 0 else (x, taps.part(begin, end))
            _emit_planes(ctx, items, weight, bias, windows, settings, out.slice(dim, begin, end))
        return
    planes = _planes_of_windows(ctx, x, taps, settings["groups"])
    by_plane = weight.permute([0, 2, 1, 3, 4])
    of_planes = ctx.reshaped(by_plane, (out.shape[2], numel(by_plane.shape[1:3]), *weight.shape[3:]))
    images = out.reshape((planes.shape[0], *out.shape[2:]))
    assert images is not None
    emit_convolution(ctx, planes, of_planes, bias, images, settings)


def _planes_of_windows(ctx: Lowering, x: View, taps: _Taps, groups: int) -> View:
    """The planes that windows along the depth of volumes cover: [batch · windows, groups · taps · channels, H, W].

    Args:
        x: The volumes [batch, groups · channels, depth, H, W].
        groups: Number of groups of channels; each has all taps of its own channels.
    """
    batch, channels, depth, *sizes = x.shape
    frames = x.permute([0, 2, 1, 3, 4])
    if taps.count == 1 and taps.inside(0, depth) == (0, taps.windows):
        first = taps.plane(0, 0)
        covered = frames.slice(1, first, taps.plane(taps.windows - 1, 0) + 1, taps.stride)
        return ctx.reshaped(covered, (batch * taps.windows, channels, *sizes))
    of_group = channels // groups
    images = ctx.temp((batch * taps.windows, groups * taps.count * of_group, *sizes), x.dtype)
    gathered = ctx.reshaped(images, (batch, taps.windows, groups, taps.count, of_group, *sizes))
    for tap in range(taps.count):
        target = gathered.select(3, tap)
        begin, end = taps.inside(tap, depth)
        if begin == end:
            ctx.emit("fill_kernel", [], [target], {"value": 0.0, "int_value": 0})
            continue
        first, last = taps.plane(begin, tap), taps.plane(end - 1, tap)
        source = frames.slice(1, first, last + 1, taps.stride)
        split = source.reshape((batch, end - begin, groups, of_group, *sizes))
        assert split is not None
        if end - begin == taps.windows:
            ctx.copy(split, target)
        else:
            _pad(ctx, split, target, [(0, 0), (begin, taps.windows - end)])
    return images


@register_op(
    "aten.conv_transpose3d", tensors=("input", "weight", "bias"), unsupported=volumes_unsupported, one_dtype=True
)
def lower_conv_transpose3d(ctx: Lowering, node: OpNode) -> None:
    """Lower a transposed convolution: one product per tap of the weight, summed where the taps put the results."""
    x, weight, *biases = (ctx.view(name) for name in node.inputs)
    if _puts_planes_apart(node, weight.shape):
        _emit_planes_apart(ctx, node, x, weight, biases[0] if biases else None)
        return
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


def _puts_planes_apart(node: OpNode, weight: Shape) -> bool:
    """Whether each tap along the depth puts its planes of a transposed convolution's result where no other one does.

    Args:
        weight: The weight's shape.
    """
    stride, padding, dilation = (setting[0] for setting in _settings(node, 3))
    ends = padding == 0 == _per_axis(node, "output_padding", 0)[0]
    return weight[2] == stride and ends and (dilation == 1 or weight[2] == 1)


def _emit_planes_apart(ctx: Lowering, node: OpNode, x: View, weight: View, bias: View | None) -> None:
    """Emit a transposed convolution of planes for each tap along the depth, which makes every `taps`-th plane."""
    groups, taps = node.attrs.get("groups", 1), weight.shape[2]
    x, shape = _with_batch(ctx, node, x)
    batch, channels, depth, *sizes = shape
    planes = ctx.contiguous(_planes_of_windows(ctx, x, _Taps(x.shape[2], 1, 1, 1, 0), groups))
    out = ctx.temp((batch * depth, channels, *sizes), ctx.spec(node.outputs[0]).storage)
    by_tap = ctx.reshaped(out, (planes.shape[0], taps, channels, *sizes))
    stride, padding, dilation = (values[1:] for values in _settings(node, 3))
    spare = _per_axis(node, "output_padding", 0)[1:]
    settings = {"stride": stride, "padding": padding, "output_padding": spare, "dilation": dilation, "groups": groups}
    for tap in range(taps):
        emit_transposed_convolution(ctx, planes, weight.select(2, tap), bias, by_tap.select(1, tap), settings)
    _finish(ctx, node, ctx.reshaped(out, (batch, depth, channels, *sizes)).permute([0, 2, 1, 3, 4]))


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
    _pad(ctx, x, padded, around)
    return padded


def _pad(ctx: Lowering, x: View, out: View, around: Sequence[tuple[int, int]]) -> None:
    """Emit the copy of a view with zeros around its first dimensions."""
    pads = [pad for pair in reversed([*around, *[(0, 0)] * (x.rank - len(around))]) for pad in pair]
    params = {"mode": "constant", "pads": pads + [0] * (12 - len(pads)), "value": 0.0, "int_value": 0}
    ctx.emit("pad_kernel", [x], [out], params)


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
