"""Copies of convolutions' operands with channels innermost, padded to a multiple of what kernels read at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cuda_compiler.rules.channel_packs import channels_last, is_packed, least_pack
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.plan import BufferAllocation, BufferKind, ExecutionPlan
from npu_compiler.program.views import Shape, View, contiguous_strides, numel

IMAGES, DEPTHWISE_WEIGHTS = (0, 2, 3, 1), (2, 3, 1, 0)  # orders of dimensions in memory


@dataclass
class PackedOperands:
    """A plan under construction, with packed copies of the operands of its convolutions.

    Attributes:
        buffers: New buffers, and replacements of the plan's.
        prologue: Copies of constant operands, which run once when the program is loaded.
        calls: All other calls, and the copies of operands that change.
    """

    plan: ExecutionPlan
    buffers: dict[str, BufferAllocation] = field(default_factory=dict)
    prologue: list[KernelCall] = field(default_factory=list)
    calls: list[KernelCall] = field(default_factory=list)
    _weights: dict[tuple[View, Shape, str], View] = field(default_factory=dict)
    _inputs: dict[tuple[View, int], View] = field(default_factory=dict)

    def is_constant(self, view: View) -> bool:
        """Whether a view's content stays the same from run to run."""
        buffer = self.buffers.get(view.buffer) or self.plan.buffers[view.buffer]
        return buffer.is_constant

    def input(self, view: View, channels: int, node: str, aligned: bool = False) -> View:
        """An activation with contiguous channels, zero-padded to `channels` of them: the view itself, or a new copy.

        Args:
            aligned: Whether channels must be accessible as aligned vectors.
        """
        each = view.slice(0, 0, 1)  # images may lie anywhere, as heads do whose channels are side by side
        if view.shape[1] == channels and is_channels_last(each) and (not aligned or is_packed(view)):
            return view
        key = (view, channels)
        if key not in self._inputs:
            packed = self.buffer(f"{node}.x", (view.shape[0], channels, *view.shape[2:]), view.dtype, "arena")
            self.calls.append(packing(view, packed, node))
            owner = self.plan.buffers[view.buffer]
            if owner.kind != "input" or owner.donor is not None:
                return packed  # another call may write there before the next convolution reads it
            self._inputs[key] = packed
        return self._inputs[key]

    def fold(
        self, call: KernelCall, x: View, weight: View, dtype: str, factor: int, pack: int, fill: int = 0
    ) -> tuple[KernelCall, View, View]:
        """Space-to-depth: turn a strided convolution over few channels into one of stride 1 over many.

        Given:   x: [1, 3, 224, 224], weight: [64, 3, 7, 7], stride 2, padding 3
        Result:  x: [1, 16, 115, 115], weight: [64, 16, 4, 4], stride 1, no padding, with zeros where there was no
        element

        Args:
            dtype: Dtype of the new weight.
            factor: Edge of the squares of pixels whose channels become the channels of one pixel.
            pack: The new number of channels is a multiple of this.
            fill: Value of the padding around the image.

        Returns:
            The call, whose operands are still the old ones, and its new input and weight.
        """
        window = tuple(-(-size // factor) for size in weight.shape[2:])
        rows, columns = (size + covered - 1 for size, covered in zip(call.outputs[0].shape[2:], window, strict=True))
        channels = factor * factor * x.shape[1]
        channels += -channels % pack
        packed = self.buffer(f"{call.node}.x", (x.shape[0], channels, rows, columns), x.dtype, "arena")
        top, _, left, _ = call.params["padding"]
        self.calls.append(packing(x, packed, call.node, {"fold": factor, "top": top, "left": left, "fill": fill}))
        weight = self.weight(weight, (channels, *window), dtype, call.node, fold=factor)
        plain = {"stride": [1, 1], "padding": [0, 0, 0, 0]}
        return replace(call, params={**call.params, **plain}), packed, weight

    def weight(
        self, weight: View, shape: Shape, dtype: str, node: str, order: tuple[int, ...] = IMAGES, fold: int = 1
    ) -> View:
        """A weight with contiguous input channels (in a depthwise convolution, output channels), in a new buffer.

        Args:
            shape: Input channels, rows and columns of the result, zero-padded where they exceed the weight's.
            order: Order of the result's dimensions in memory.
            fold: Edge of the squares of taps that become channels.
        """
        key = (weight, shape, dtype)
        if key in self._weights:
            return self._weights[key]
        constant = self.is_constant(weight)
        kind: BufferKind = "persistent" if constant else "arena"
        packed = self.buffer(f"{node}.weight", (weight.shape[0], *shape), dtype, kind, order)
        call = packing(weight, packed, node, {"fold": fold, "top": 0, "left": 0, "fill": 0})
        if constant:
            self.prologue.append(call)
            self._weights[key] = packed
        else:
            self.calls.append(call)
        return packed

    def buffer(self, stem: str, shape: Shape, dtype: str, kind: BufferKind, order: tuple[int, ...] = IMAGES) -> View:
        """A view of shape `shape` over a new buffer, whose dimensions lie in memory in the order `order`.

        Args:
            stem: Beginning of the buffer's name.
            kind: Kind of the buffer, which tells how long it lives.
        """
        index = len(self.buffers)
        while (name := f"{stem}.last{index}") in self.plan.buffers or name in self.buffers:
            index += 1
        memory = tuple(shape[dim] for dim in order)
        steps = contiguous_strides(memory)
        strides = tuple(steps[order.index(dim)] for dim in range(len(shape)))
        self.buffers[name] = BufferAllocation(name, kind, memory, dtype)
        return View(name, shape, strides, 0, dtype)


def fold_factor(call: KernelCall, weight: View, pack: int) -> int:
    """The factor for `PackedOperands.fold` that leaves the fewest padding zeros to multiply; 1 if folding does not pay.

    Args:
        pack: Number of input channels that kernels read at a time.
    """
    (stride, across), dilation = call.params["stride"], call.params["dilation"]
    if stride != across or list(dilation) != [1, 1] or call.params["groups"] > 1:
        return 1
    channels, *window = weight.shape[1:]
    folded = numel([-(-size // stride) for size in window]) * -(-channels * stride * stride // pack)
    return stride if folded < numel(window) * -(-channels // pack) else 1


def is_channels_last(view: View) -> bool:
    """Whether an image [N, C, H, W] is channels-last in memory, without overlapping elements."""
    last = channels_last(view)
    steps = [(size, stride) for size, stride in zip(last.shape, last.strides, strict=True) if size > 1]
    packed = view.shape[1] == 1 or view.strides[1] == 1
    return packed and all(outer >= inner * size for (_, outer), (size, inner) in zip(steps, steps[1:], strict=False))


def in_order_of_memory(call: KernelCall) -> KernelCall:
    """The element-wise call with all operands' dimensions permuted to the order of its output in memory."""
    order = call.outputs[0].order_in_memory
    views = [tuple(view.permute(order) for view in side) for side in (call.inputs, call.outputs)]
    return replace(call, inputs=views[0], outputs=views[1])


_AS_IT_IS = {"fold": 1, "top": 0, "left": 0, "fill": 0}


def packing(source: View, target: View, node: str, params: Mapping[str, int] = _AS_IT_IS) -> KernelCall:
    """The call that copies an image to channels-last, padded to the target's size.

    Args:
        params: `fold`: edge of the squares of pixels that become channels; `top`, `left`: padding before the image;
            `fill`: value of the padding.
    """
    if target.shape[1] % least_pack(target.dtype) or target.strides[1] != 1:
        return copy(source, target, node)
    moved = distinct_bytes(source) + distinct_bytes(target)
    return KernelCall("to_channels_last", "", (source,), (target,), params, node, 0, moved)


def copy(source: View, target: View, node: str) -> KernelCall:
    params = {"scalars": [None]}
    moved = distinct_bytes(source) + distinct_bytes(target)
    call = KernelCall("copy_broadcast_kernel", "", (source,), (target,), params, node, source.numel, moved)
    return in_order_of_memory(call)
