"""Converts the activations of convolutions to channels-last (NHWC), the layout that tensor cores read.

Given:   y = conv2d(x: [1, 3, 8, 8], w: [16, 3, 3, 3]);  z = max_pool2d(y);  out = copy(z)
Result:  prologue: w' = copy(w), in memory as [16, 3, 3, 8] with zeros beyond the third input channel
         x' = to_channels_last(x), in memory as [1, 8, 8, 8];  y = conv2d(x', w');  z = max_pool2d(y);  out = copy(z)
         with y in memory as [1, 8, 8, 16]

Views carry strides, so a buffer's layout changes by changing its views. That is done for every buffer of the arena that
a kernel over images touches, and for those that element-wise calls connect with them, as long as strides can express
each of its views. Elsewhere, as at the program's inputs and outputs, a copy converts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cuda_compiler.op_classify import classify, is_elementwise
from cuda_compiler.rules.channel_packs import PACK, channels_last
from cuda_compiler.rules.conv import CONSTANT_WEIGHT
from npu_compiler.graph.dtypes import HALF_DTYPES, is_float
from npu_compiler.program.kernels import KERNELS, Family, KernelCall, distinct_bytes
from npu_compiler.program.plan import BufferAllocation, BufferKind, ExecutionPlan
from npu_compiler.program.views import Shape, View, contiguous_strides, numel

_CONVOLUTION = "conv2d_kernel"
_OVER_IMAGES = (Family.CONV, Family.POOL)
# Other kernels whose templates take operands of any strides.
_GROUP_NORM = "groupnorm_kernel"
_OF_ANY_STRIDES = ("mean_kernel", "sum_kernel", "max_kernel", "min_kernel", "pad_kernel", "flip_kernel", _GROUP_NORM)


def lay_channels_last(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with its convolutions over channels-last operands."""
    if not any(call.kernel == _CONVOLUTION for call in plan.calls):
        return plan
    converted = _convertible(plan)
    layout = _Relaid(plan, converted)
    for call in plan.calls:
        touched = {view.buffer for view in (*call.inputs, *call.outputs)}
        if touched.isdisjoint(converted) and call.kernel != _CONVOLUTION:
            layout.calls.append(call)
            continue
        call = replace(call, inputs=layout.views(call.inputs), outputs=layout.views(call.outputs))
        if call.kernel == _CONVOLUTION:
            layout.convolve(call)
        elif is_elementwise(call):
            layout.calls.append(_in_order_of_memory(call))
        elif call.kernel == _GROUP_NORM:
            layout.normalize(call)
        else:
            layout.calls.append(_as_pooling(call) if call.kernel == "mean_kernel" else call)
    return replace(
        plan,
        prologue=[*plan.prologue, *layout.prologue],
        calls=layout.calls,
        buffers={**plan.buffers, **layout.buffers},
    )


def _convertible(plan: ExecutionPlan) -> dict[str, BufferAllocation]:
    """The buffers to convert, by name."""
    candidates = {
        name: buffer
        for name, buffer in plan.buffers.items()
        if buffer.kind == "arena" and len(buffer.alloc_shape) in (3, 4)
    }
    unfit = {view.buffer for view in plan.output_views.values()}
    for call in plan.calls:
        fits = classify(call) in (Family.ELEMENTWISE, *_OVER_IMAGES) or call.kernel in _OF_ANY_STRIDES
        for view in (*call.inputs, *call.outputs):
            buffer = candidates.get(view.buffer)
            if buffer is not None and not (fits and _in_channels_last(view, buffer.alloc_shape)):
                unfit.add(view.buffer)
    candidates = {name: buffer for name, buffer in candidates.items() if name not in unfit}
    chosen = {
        view.buffer for call in plan.calls if classify(call) in _OVER_IMAGES for view in (*call.inputs, *call.outputs)
    }
    chosen &= candidates.keys()
    elementwise = [call for call in plan.calls if is_elementwise(call)]
    while more := {name for call in elementwise for name in _following(call, candidates, chosen)}:
        chosen |= more
    return {name: buffer for name, buffer in candidates.items() if name in chosen}


def _following(call: KernelCall, candidates: Mapping[str, BufferAllocation], chosen: set[str]) -> Iterator[str]:
    """The buffers that have to be converted so that an element-wise call walks them in the order of those chosen."""
    views = (*call.inputs, *call.outputs)
    leading = [
        _order(converted)
        for view in views
        if view.buffer in chosen
        and (converted := _in_channels_last(view, candidates[view.buffer].alloc_shape)) is not None
    ]
    for view in views if leading else ():
        if view.buffer in chosen or view.buffer not in candidates:
            continue
        converted = _in_channels_last(view, candidates[view.buffer].alloc_shape)
        if converted is None or any(_agree(_order(view), order) for order in leading):
            continue
        if any(_agree(_order(converted), order) for order in leading):
            yield view.buffer


def _order(view: View) -> list[int]:
    """The view's dimensions in the order in which they lie in memory, without those that do not step."""
    stepping = [dim for dim in range(view.rank) if view.shape[dim] > 1 and view.strides[dim]]
    return sorted(stepping, key=lambda dim: -view.strides[dim])


def _agree(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether two orders have the dimensions that are in both in the same order."""
    return [dim for dim in first if dim in second] == [dim for dim in second if dim in first]


def _in_channels_last(view: View, allocated: Shape) -> View | None:
    """The view once its row-major buffer [N, C, …] is stored as [N, …, C]; None where no strides express it.

    Each dimension of the view must step through the buffer's coordinates independently of the others, and at a constant
    stride in the new layout too.
    """
    if 0 in view.shape:
        return view
    order = (0, *range(2, len(allocated)), 1)
    packed = contiguous_strides([allocated[dim] for dim in order])
    steps = np.array([packed[order.index(dim)] for dim in range(len(allocated))])
    if view.offset >= numel(allocated):
        return None
    start = np.array(np.unravel_index(view.offset, allocated))
    reach = start.copy()
    strides = []
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size == 1 or stride == 0:
            strides.append(stride)
            continue
        places = stride * np.arange(size)
        if places[-1] >= numel(allocated):
            return None
        coordinates = np.array(np.unravel_index(places, allocated))
        reach += coordinates.max(axis=1)
        walked = steps @ coordinates
        if np.any(np.diff(walked) != walked[1]) or walked[1] <= 0:
            return None
        strides.append(int(walked[1]))
    if np.any(reach >= allocated):
        return None
    return replace(view, strides=tuple(strides), offset=int(steps @ start))


@dataclass
class _Relaid:
    """The plan in its new layout, as it is being made.

    Attributes:
        converted: The buffers that become channels-last.
        buffers: New buffers, and replacements of the plan's.
    """

    plan: ExecutionPlan
    converted: dict[str, BufferAllocation]
    buffers: dict[str, BufferAllocation] = field(default_factory=dict)
    prologue: list[KernelCall] = field(default_factory=list)
    calls: list[KernelCall] = field(default_factory=list)
    _weights: dict[tuple[View, Shape, str], View] = field(default_factory=dict)
    _inputs: dict[tuple[View, int], View] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, buffer in self.converted.items():
            images, channels, *pixels = buffer.alloc_shape
            self.buffers[name] = replace(buffer, alloc_shape=(images, *pixels, channels))

    def views(self, views: Iterable[View]) -> tuple[View, ...]:
        return tuple(self._view(view) for view in views)

    def _view(self, view: View) -> View:
        if view.buffer not in self.converted:
            return view
        converted = _in_channels_last(view, self.converted[view.buffer].alloc_shape)
        assert converted is not None
        return converted

    def convolve(self, call: KernelCall) -> None:
        """Append a convolution over channels-last operands, with the copies that it takes."""
        x, weight, bias, residual, out = KERNELS[_CONVOLUTION].bind(call)
        assert x is not None and weight is not None and out is not None
        if not all(is_float(view.dtype) for view in (x, weight, out)):
            self.calls.append(call)
            return
        # Tensor cores take factors of one dtype, so a float32 weight, as folding batch normalization makes it, is
        # rounded; but not where the result is float32, nor in depthwise convolutions, which use no tensor cores.
        rounds = out.dtype == x.dtype and not _is_depthwise(call, weight)
        dtype = x.dtype if rounds else weight.dtype
        constant = self.plan.buffers[weight.buffer].is_constant
        fold = _fold(call, x, weight)
        if fold > 1:
            call, x, weight = self._folded(call, x, weight, out, dtype, fold)
        else:
            channels = weight.shape[1]
            if call.params["groups"] == 1 and x.dtype in HALF_DTYPES:
                channels += -channels % PACK
            x = self._packed_input(x, channels if call.params["groups"] == 1 else x.shape[1], call)
            weight = self._packed_weight(weight, (channels, *weight.shape[2:]), dtype, call)
        residual = self._packed_input(residual, residual.shape[1], call) if residual is not None else None
        made = out
        if not _is_channels_last(out):
            made = self._buffer(f"{call.node}.out", out.shape, out.dtype, "arena")
        inputs = tuple(view for view in (x, weight, bias, residual) if view is not None)
        params = {**call.params, CONSTANT_WEIGHT: constant}
        self.calls.append(replace(call, inputs=inputs, outputs=(made,), params=params))
        if made is not out:
            self.calls.append(_copy(made, out, call.node))

    def normalize(self, call: KernelCall) -> None:
        """Append a group norm; where its result is channels-last, so is what it reads."""
        x, *affine = call.inputs
        if x.rank == 4 and _is_channels_last(call.outputs[0]):
            x = self._packed_input(x, x.shape[1], call)
        self.calls.append(replace(call, inputs=(x, *affine)))

    def _folded(
        self, call: KernelCall, x: View, weight: View, out: View, dtype: str, fold: int
    ) -> tuple[KernelCall, View, View]:
        """Space-to-depth: a strided convolution over few channels as one of stride 1 over many.

        Given:   x: [1, 3, 224, 224], weight: [64, 3, 7, 7], stride 2, padding 3
        Result:  x: [1, 16, 115, 115], weight: [64, 16, 4, 4], no stride, no padding, with zeros for what is missing
        """
        window = [-(-size // fold) for size in weight.shape[2:]]
        sizes = [size + covered - 1 for size, covered in zip(out.shape[2:], window, strict=True)]
        channels = fold * fold * x.shape[1]
        channels += -channels % PACK
        top, _, left, _ = call.params["padding"]
        padding = {"fold": fold, "top": top, "left": left}
        packed = self._buffer(f"{call.node}.x", (x.shape[0], channels, *sizes), x.dtype, "arena")
        self.calls.append(_packing(x, packed, call.node, padding))
        weight = self._packed_weight(weight, (channels, *window), dtype, call, fold)
        plain = {"stride": [1, 1], "padding": [0, 0, 0, 0]}
        return replace(call, params={**call.params, **plain}), packed, weight

    def _packed_input(self, view: View, channels: int, call: KernelCall) -> View:
        """An activation with contiguous channels, zero-padded to the wanted number of them."""
        if view.shape[1] == channels and _is_channels_last(view):
            return view
        key = (view, channels)
        if key not in self._inputs:
            packed = self._buffer(f"{call.node}.x", (view.shape[0], channels, *view.shape[2:]), view.dtype, "arena")
            self.calls.append(_packing(view, packed, call.node))
            owner = self.plan.buffers[view.buffer]
            if owner.kind != "input" or owner.donor is not None:
                return packed  # another call may write there before the next convolution reads it
            self._inputs[key] = packed
        return self._inputs[key]

    def _packed_weight(self, weight: View, shape: Shape, dtype: str, call: KernelCall, fold: int = 1) -> View:
        """A weight with contiguous input channels (of a depthwise convolution: output channels).

        Args:
            shape: Input channels, rows and columns that it is to have, zero-padded where that is more than it has.
            fold: Edge of the squares of taps that become channels.
        """
        key = (weight, shape, dtype)
        if key in self._weights:
            return self._weights[key]
        constant = self.plan.buffers[weight.buffer].is_constant
        order = (2, 3, 1, 0) if _is_depthwise(call, weight) else (0, 2, 3, 1)
        kind: BufferKind = "persistent" if constant else "arena"
        packed = self._buffer(f"{call.node}.weight", (weight.shape[0], *shape), dtype, kind, order)
        packing = _packing(weight, packed, call.node, {"fold": fold, "top": 0, "left": 0})
        if constant:
            self.prologue.append(packing)
            self._weights[key] = packed
        else:
            self.calls.append(packing)
        return packed

    def _buffer(
        self, stem: str, shape: Shape, dtype: str, kind: BufferKind, order: tuple[int, ...] = (0, 2, 3, 1)
    ) -> View:
        """The view [N, C, H, W] of a new buffer whose dimensions lie in another order in memory."""
        index = len(self.buffers)
        while (name := f"{stem}.last{index}") in self.plan.buffers or name in self.buffers:
            index += 1
        memory = tuple(shape[dim] for dim in order)
        steps = contiguous_strides(memory)
        strides = tuple(steps[order.index(dim)] for dim in range(4))
        self.buffers[name] = BufferAllocation(name, kind, memory, dtype)
        return View(name, shape, strides, 0, dtype)


def _is_depthwise(call: KernelCall, weight: View) -> bool:
    return call.params["groups"] > 1 and weight.shape[1] == 1


def _fold(call: KernelCall, x: View, weight: View) -> int:
    """The space-to-depth factor that leaves the fewest padding zeros to multiply; 1 for none."""
    (stride, across), dilation = call.params["stride"], call.params["dilation"]
    if stride != across or list(dilation) != [1, 1] or call.params["groups"] > 1 or x.dtype not in HALF_DTYPES:
        return 1
    channels, *window = weight.shape[1:]
    folded = numel([-(-size // stride) for size in window]) * -(-channels * stride * stride // PACK)
    return stride if folded < numel(window) * -(-channels // PACK) else 1


def _is_channels_last(view: View) -> bool:
    """Whether [N, C, H, W] is channels-last in memory, without overlapping elements."""
    last = channels_last(view)
    steps = [(size, stride) for size, stride in zip(last.shape, last.strides, strict=True) if size > 1]
    packed = view.shape[1] == 1 or view.strides[1] == 1
    return packed and all(outer >= inner * size for (_, outer), (size, inner) in zip(steps, steps[1:], strict=False))


def _in_order_of_memory(call: KernelCall) -> KernelCall:
    """An element-wise call whose dimensions are in the order in which its output lies in memory."""
    out = call.outputs[0]
    order = sorted(range(out.rank), key=lambda dim: -out.strides[dim])
    views = [tuple(view.permute(order) for view in side) for side in (call.inputs, call.outputs)]
    return replace(call, inputs=views[0], outputs=views[1])


def _as_pooling(call: KernelCall) -> KernelCall:
    """A mean over all pixels as global average pooling, whose kernel reads many channels at a time."""
    x, out = call.inputs[0], call.outputs[0]
    if x.rank != 4 or call.params["reduce_dims"] != 2 or x.strides[1] != 1:
        return call
    pooled = replace(out, shape=(*x.shape[:2], 1, 1), strides=(*out.strides, 1, 1))
    return replace(call, kernel="adaptive_avg_pool2d_kernel", outputs=(pooled,), params={})


_AS_IT_IS = {"fold": 1, "top": 0, "left": 0}


def _packing(source: View, target: View, node: str, params: Mapping[str, int] = _AS_IT_IS) -> KernelCall:
    """A copy to channels-last, zero-padded to the target's size.

    Args:
        params: `fold`: edge of the squares of pixels that become channels; `top`, `left`: padding before the image.
    """
    if target.shape[1] % PACK or target.strides[1] != 1:
        return _copy(source, target, node)
    moved = distinct_bytes(source) + distinct_bytes(target)
    return KernelCall("to_channels_last", "", (source,), (target,), params, node, 0, moved)


def _copy(source: View, target: View, node: str) -> KernelCall:
    params = {"scalars": [None]}
    moved = distinct_bytes(source) + distinct_bytes(target)
    call = KernelCall("copy_broadcast_kernel", "", (source,), (target,), params, node, source.numel, moved)
    return _in_order_of_memory(call)
