"""The layout of a network's images in the arena: channels innermost, where all calls that touch an image take that.

A program's images are planar: [N, C, H, W] in that order. Native kernels are faster where a vector holds channels of
one pixel: a pointwise convolution is then a matrix product whose rows are the image's pixels, where they are. The
layout is a matter of strides alone: the buffers, their places in the arena and the calls stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, numel
from npu_runtime.cpu.native.convolutions.channels_last import MOST_PLANES

_POOLING = ("max_pool2d_kernel", "avg_pool2d_kernel", "adaptive_avg_pool2d_kernel", "mean_kernel")
_ROWS = ("matmul_kernel", "matmul_notrans_kernel", "layernorm_kernel", "rmsnorm_kernel", "softmax_kernel")
# Share of a network's operations in convolutions that Winograd's transform shortens, from which planar images,
# which it takes, are the faster layout.
_MOST_TRANSFORMED = 0.25
# Number of output channels of a group, of several, from which they fill vectors well enough.
_FEWEST_OUTPUTS = 12


def channels_last(plan: ExecutionPlan, pairs: bool) -> ExecutionPlan:
    """The plan with images stored with their channels innermost, where that is faster.

    Given:  conv2d x[1, 3, 8, 8] w → y[1, 16, 8, 8]:[1024, 64, 8, 1];  conv2d y v → z[1, 16, 8, 8]:[1024, 64, 8, 1]
    Result: conv2d x[1, 3, 8, 8] w → y[1, 16, 8, 8]:[1024, 1, 128, 16]; conv2d y v → z[1, 16, 8, 8]:[1024, 1, 128, 16]

    Args:
        pairs: Whether the native kernels multiply pairs of bfloat16.
    """
    images = _images(plan)
    for call in plan.prologue:
        _drop(images, call)
    for view in plan.output_views.values():
        images.pop(view.buffer, None)
    dropped = True
    while dropped:
        before = len(images)
        for call in plan.calls:
            if not _takes(call, images, plan.buffers):
                _drop(images, call)
        dropped = len(images) < before
    convolutions = [call for call in plan.calls if call.kernel == "conv2d_kernel" and call.outputs[0].buffer in images]
    if not convolutions or _saves_by_transform(convolutions, pairs):
        return plan
    return replace(plan, calls=[_laid_out(call, images) for call in plan.calls])


@dataclass(frozen=True)
class Image:
    """A buffer that holds one tensor [N, C, H, W], or volumes [N, C, D, H, W]."""

    buffer: BufferAllocation

    @cached_property
    def _units(self) -> tuple[tuple[int, int, int], ...]:
        """Size, planar stride and new stride of the dimensions N and C, and of all pixels."""
        batch, channels, *sizes = self.buffer.alloc_shape
        pixels = numel(sizes)
        return (batch, channels * pixels, channels * pixels), (channels, pixels, 1), (pixels, 1, channels)

    def laid_out(self, view: View) -> View | None:
        """The view of the same elements once the image's channels are innermost; None if no strides express it."""
        if view.dtype != self.buffer.dtype:
            return None
        offset, rest, reach = 0, view.offset, []  # the last index of each dimension that the view reaches
        for _, planar, new in self._units:
            offset += rest // planar * new
            reach.append(rest // planar)
            rest %= planar
        strides = [self._stride(size, step, reach) for size, step in zip(view.shape, view.strides, strict=True)]
        fitting = tuple(stride for stride in strides if stride is not None)
        return replace(view, strides=fitting, offset=offset) if len(fitting) == len(strides) else None

    def _stride(self, size: int, step: int, reach: list[int]) -> int | None:
        """The new stride of a view's dimension, whose last index is added to `reach`; None if it crosses dimensions."""
        if size == 1 or step == 0:
            return 0
        for dim, (length, planar, new) in enumerate(self._units):
            last = reach[dim] + (size - 1) * (step // planar)
            if step % planar == 0 and last < length:
                reach[dim] = last
                return step // planar * new
        return None


Images = Mapping[str, Image]


def _images(plan: ExecutionPlan) -> dict[str, Image]:
    """The buffers that hold images whose layout matters: those of convolutions, and of element-wise calls on these."""

    def images(views: Iterable[View]) -> set[str]:
        buffers = [plan.buffers[view.buffer] for view in views]
        return {buffer.name for buffer in buffers if buffer.kind == "arena" and _has_pixels(buffer.alloc_shape)}

    names: set[str] = set()
    elementwise = []
    for call in plan.calls:
        operands = images((*call.inputs, *call.outputs))
        if call.kernel == "conv2d_kernel":
            names |= operands
        elif elementwise_kernel(call) is not None:
            elementwise.append(operands)
    reached = -1
    while reached < len(names):
        reached = len(names)
        names = names.union(*(operands for operands in elementwise if operands & names))
    return {name: Image(plan.buffers[name]) for name in names}


def _has_pixels(shape: Sequence[int]) -> bool:
    return len(shape) in (4, 5) and shape[1] > 1 and numel(shape[2:]) > 1


def _drop(images: dict[str, Image], call: KernelCall) -> None:
    for view in (*call.inputs, *call.outputs):
        images.pop(view.buffer, None)


def _new_view(view: View, images: Images) -> View | None:
    return images[view.buffer].laid_out(view) if view.buffer in images else view


def _takes(call: KernelCall, images: Images, buffers: Mapping[str, BufferAllocation]) -> bool:
    """Whether the call is as fast as before, or faster, with these images' channels innermost."""
    if not any(view.buffer in images for view in (*call.inputs, *call.outputs)):
        return True
    inputs, outputs = ([_new_view(view, images) for view in views] for views in (call.inputs, call.outputs))
    views = [view for view in (*inputs, *outputs) if view is not None]
    if len(views) < len(inputs) + len(outputs) or not _agree_in_place(inputs, outputs, buffers):
        return False
    if call.kernel == "conv2d_kernel":
        return _convolution_takes(call, views)
    if call.kernel in _POOLING:
        return _pooling_takes(call, *views)
    if elementwise_kernel(call) is not None:
        planar = _disorder(call.inputs, call.outputs[0])
        return _disorder(views[: len(inputs)], views[-1]) <= planar
    return call.kernel in _ROWS and all(view.strides[-1] == 1 or view.shape[-1] == 1 for view in views)


def _agree_in_place(
    inputs: Sequence[View | None], outputs: Sequence[View | None], buffers: Mapping[str, BufferAllocation]
) -> bool:
    """Whether each output that overwrites an input has its elements in the same places."""

    def overlap(one: BufferAllocation, other: BufferAllocation) -> bool:
        apart = one.offset + one.size_bytes <= other.offset or other.offset + other.size_bytes <= one.offset
        return one.kind == other.kind == "arena" and not apart

    return all(
        (x.shape, x.strides) == (out.shape, out.strides)
        for x in inputs
        for out in outputs
        if x is not None and out is not None and overlap(buffers[x.buffer], buffers[out.buffer])
    )


def _is_ready(view: View) -> bool:
    """Whether a tensor [N, C, ...] has its channels innermost, or only one pixel or channel."""
    return view.strides[1] == 1 or view.shape[1] == 1 or numel(view.shape[2:]) == 1


def _convolution_takes(call: KernelCall, views: Sequence[View]) -> bool:
    x, weight, *_, out = views
    groups, residual = call.params["groups"], views[-2:-1] if call.params["has_residual"] else []
    if not all(map(_is_ready, (out, *residual))):
        return False
    if weight.shape[1] == 1 and weight.shape[0] == groups > 1:
        return _is_ready(x)
    if x.dtype != weight.dtype:
        return False
    if groups > 1:
        return _is_ready(x) and weight.shape[0] // groups >= _FEWEST_OUTPUTS
    return _is_ready(x) or x.shape[1] <= MOST_PLANES


def _pooling_takes(call: KernelCall, x: View, out: View) -> bool:
    if x.rank != 4 or x.dtype != out.dtype or not all(map(_is_ready, (x, out))) or call.params.get("ceil_mode"):
        return call.kernel == "max_pool2d_kernel" and x.dtype == out.dtype and all(map(_is_ready, (x, out)))
    return call.kernel in ("max_pool2d_kernel", "avg_pool2d_kernel") or numel(x.shape[:2]) == out.numel


def _disorder(inputs: Iterable[View], out: View) -> int:
    """The number of operands of an element-wise call whose elements are in another order than the output's."""

    def order(view: View) -> list[int]:
        dims = [dim for dim, size in enumerate(view.shape) if size > 1 and view.strides[dim]]
        return sorted(dims, key=lambda dim: -view.strides[dim])

    whole = order(out)
    return sum(len(own) == len(whole) and own != whole for own in map(order, inputs))


def _saves_by_transform(convolutions: Sequence[KernelCall], pairs: bool) -> bool:
    """Whether planar convolutions by Winograd's transform save more than the layout does."""

    def is_transformed(call: KernelCall) -> bool:
        weight = call.inputs[1]
        if pairs and weight.dtype == "bfloat16":
            return False
        dense = call.params["groups"] == 1 and weight.shape[2:] == (3, 3) and min(weight.shape[:2]) >= 16
        return dense and (*call.params["stride"], *call.params["dilation"]) == (1, 1, 1, 1)

    all_flops = sum(call.flops for call in convolutions)
    return sum(call.flops for call in convolutions if is_transformed(call)) > _MOST_TRANSFORMED * all_flops


def _laid_out(call: KernelCall, images: Images) -> KernelCall:
    inputs, outputs = (
        tuple(_new_view(view, images) or view for view in views) for views in (call.inputs, call.outputs)
    )
    return replace(call, inputs=inputs, outputs=outputs)
