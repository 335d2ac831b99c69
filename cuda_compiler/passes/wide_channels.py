"""Stores images with a multiple of eight channels, which is how many the kernels of convolutions read at a time.

Given:   y = conv2d(x: [1, 64, 8, 8], w: [18, 64, 3, 3], b);  z = conv2d(y: [1, 18, 8, 8], v: [18, 18, 3, 3])
Result:  prologue: w' = pad(w): [24, 64, 3, 3];  b' = pad(b): [24];  v' = pad(v): [24, 24, 3, 3]
         y' = conv2d(x, w', b'): [1, 24, 8, 8];  z' = conv2d(y', v'): [1, 24, 8, 8]

Without this, each convolution first copies its input. The channels behind an image's own are finite and depend on no
input: there, weights and biases are zeros, and the element-wise ops that may follow make finite numbers of finite ones.
A convolution multiplies them by zeros, and calls that do not treat all channels alike do not read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from cuda_compiler.op_classify import classify
from cuda_compiler.passes.channels_last import takes_strides
from cuda_compiler.passes.padded_constants import PaddedConstants
from cuda_compiler.rules.channel_packs import PACK
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.elementwise import elementwise_kernel, elementwise_kernel_name
from npu_compiler.program.kernels import KERNELS, Family, KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, numel

_CONVOLUTION = "conv2d_kernel"
# Element-wise ops whose results are finite where their operands are.
_FINITE = frozenset(
    "add add_relu clamp_max clamp_min copy elu gelu_erf gelu_tanh hardsigmoid hardswish hardtanh leaky_relu maximum "
    "minimum mish mul neg prelu relu relu6 rsub scale_shift selu sigmoid silu softplus square sub tanh".split()
)
_MOST_GROWTH = 1.5  # factor by which an image of several pixels may grow

Images = Mapping[str, BufferAllocation]


def widen_channels(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with a multiple of eight channels in images that convolutions read, where the calls around allow it."""
    wide = _candidates(plan)
    while unfit := {name for call in plan.calls for name in _unfit(call, wide, plan.buffers)}:
        wide = {name: buffer for name, buffer in wide.items() if name not in unfit}
    widened = _Widened(plan, _read_by_convolutions(plan, wide))
    calls = [widened.call(call) for call in plan.calls]
    return replace(
        plan,
        prologue=[*plan.prologue, *widened.constants.prologue],
        calls=calls,
        buffers={**plan.buffers, **widened.constants.buffers},
    )


def _candidates(plan: ExecutionPlan) -> dict[str, BufferAllocation]:
    """The images [N, C, …] of 16-bit floats with channels to add; those of more than one pixel grow little."""
    fixed = {view.buffer for view in plan.output_views.values()}

    def grows(buffer: BufferAllocation) -> bool:
        if buffer.kind != "arena" or buffer.dtype not in HALF_DTYPES or len(buffer.alloc_shape) not in (3, 4):
            return False
        channels, pixels = buffer.alloc_shape[1], numel(buffer.alloc_shape[2:])
        few = pixels == 1 or channels + _spare(buffer) <= _MOST_GROWTH * channels
        return channels > 1 and numel(buffer.alloc_shape) > 0 < _spare(buffer) and few

    return {name: buffer for name, buffer in plan.buffers.items() if name not in fixed and grows(buffer)}


def _spare(buffer: BufferAllocation) -> int:
    """Number of channels that make those of an image whole packs."""
    return -buffer.alloc_shape[1] % PACK


@dataclass(frozen=True)
class _Covered:
    """The part of an image that a view covers.

    Attributes:
        dim: The view's dimension of channels; None if it covers a single one.
        reaches_end: Whether the last channel is among them.
        whole: Whether it covers each element once.
    """

    dim: int | None
    reaches_end: bool
    whole: bool


def _covered(view: View, buffer: BufferAllocation) -> _Covered | None:
    """The part of an image [N, C, …] that a view covers; None if it does not step through channels by themselves."""
    channels, plane = buffer.alloc_shape[1], numel(buffer.alloc_shape[2:])
    dim, last = None, view.offset % plane
    for index, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        if size == 1 or stride % (channels * plane) == 0:
            continue
        if stride == plane and dim is None:
            dim = index
        elif stride < plane:
            last += (size - 1) * stride
        else:
            return None
    end = view.offset // plane % channels + (1 if dim is None else view.shape[dim])
    if last >= plane or end > channels:
        return None
    repeats = any(size > 1 and stride == 0 for size, stride in zip(view.shape, view.strides, strict=True))
    return _Covered(dim, end == channels, not repeats and view.numel == numel(buffer.alloc_shape))


def _is_whole(view: View, wide: Images) -> bool:
    """Whether a view [N, C, …] covers a wide image once."""
    covered = _covered(view, wide[view.buffer]) if view.buffer in wide else None
    return covered is not None and covered.dim == 1 and covered.whole


def _dim_to_last_channel(view: View, wide: Images) -> int | None:
    """The dimension of channels of a view that covers the last of a wide image's channels and more; else None."""
    covered = _covered(view, wide[view.buffer]) if view.buffer in wide else None
    return covered.dim if covered is not None and covered.reaches_end else None


def _together(call: KernelCall, wide: Images, buffers: Images) -> list[View]:
    """The views of a call that become wider together, if at all; its output is the last one."""
    out = call.outputs[0]
    if call.kernel == _CONVOLUTION:
        x, weight, bias, residual, _ = KERNELS[_CONVOLUTION].bind(call)
        assert x is not None and weight is not None
        dense, depthwise = call.params["groups"] == 1, _is_depthwise(call)
        if not all(buffers[view.buffer].is_constant for view in (weight, bias) if view is not None):
            return []
        beside = [view for view in (x if depthwise else None, residual) if view is not None]
        return [*beside, out] if dense or depthwise else []
    dim = _dim_to_last_channel(out, wide)
    if dim is None:
        return []
    if classify(call) is Family.POOL or _is_mean_of_pixels(call):
        return [call.inputs[0], out]
    kernel = elementwise_kernel(call)
    if kernel is None or kernel.op.name not in _FINITE:
        return []
    return [*(view for view in call.inputs if view.strides[dim] and not _can_be_padded(view, dim, buffers)), out]


def _is_depthwise(call: KernelCall) -> bool:
    """Whether a convolution has a group for each channel of its input and of its output."""
    groups: int = call.params["groups"]
    return 1 < groups == call.inputs[0].shape[1] == call.outputs[0].shape[1]


def _is_mean_of_pixels(call: KernelCall) -> bool:
    return call.kernel == "mean_kernel" and call.inputs[0].rank == 4 and call.params["reduce_dims"] == 2


def _can_be_padded(view: View, dim: int, buffers: Images) -> bool:
    """Whether an operand is a constant for each channel, which the prologue can pad."""
    others = [stride for at, stride in enumerate(view.strides) if at != dim and view.shape[at] > 1]
    return buffers[view.buffer].is_constant and not any(others)


def _unfit(call: KernelCall, wide: Images, buffers: Images) -> Iterator[str]:
    """The images among `wide` that cannot become wider because of a call."""
    views = [view for view in (*call.inputs, *call.outputs) if view.buffer in wide]
    if not views:
        return
    fits = takes_strides(call)
    yield from (view.buffer for view in views if not fits or _covered(view, wide[view.buffer]) is None)
    together = _together(call, wide, buffers)
    is_elementwise = elementwise_kernel(call) is not None
    dim = _dim_to_last_channel(together[-1], wide) if together else None
    alike = [
        view
        for view in together
        if _is_whole(view, wide) or (is_elementwise and _dim_to_last_channel(view, wide) == dim)
    ]
    # An element-wise call of whole images that read one without its new channels could not join the call that makes it.
    joins = is_elementwise and all(view.numel >= numel(buffers[view.buffer].alloc_shape) for view in call.inputs)
    spare = [_spare(wide[view.buffer]) for view in alike]
    if len(alike) < len(together) or any(own < spare[-1] for own in spare):
        yield from (view.buffer for view in (together if joins else call.outputs) if view.buffer in wide)
    joins = joins and call.outputs[0].buffer not in wide
    alone = [view for view in (views if joins else call.outputs) if view not in together]
    covered = [(view.buffer, _covered(view, wide[view.buffer])) for view in alone if view.buffer in wide]
    yield from (name for name, part in covered if part is not None and part.reaches_end)


def _read_by_convolutions(plan: ExecutionPlan, wide: Images) -> Images:
    """The wide images that convolutions read, and those that become wider together with them."""
    found = {call.inputs[0].buffer for call in plan.calls if call.kernel == _CONVOLUTION}
    ties = [{view.buffer for view in _together(call, wide, plan.buffers)} for call in plan.calls]
    while more := {name for tie in ties if not tie.isdisjoint(found) for name in tie} - found:
        found |= more
    return {name: buffer for name, buffer in wide.items() if name in found}


@dataclass
class _Widened:
    """The plan under construction.

    Attributes:
        plan: The plan before.
        wide: The images that become wider, as they were.
        constants: The padded constants; its buffers are these and the images with more channels.
    """

    plan: ExecutionPlan
    wide: Images
    constants: PaddedConstants = field(default_factory=PaddedConstants)

    def __post_init__(self) -> None:
        for name, buffer in self.wide.items():
            images, channels, *pixels = buffer.alloc_shape
            self.constants.buffers[name] = replace(buffer, alloc_shape=(images, channels + _spare(buffer), *pixels))

    def call(self, call: KernelCall) -> KernelCall:
        """The call over the images as they are now."""
        if all(view.buffer not in self.wide for view in (*call.inputs, *call.outputs)):
            return call
        together = _together(call, self.wide, self.plan.buffers)
        is_wider = bool(together) and all(view.buffer in self.wide for view in together)
        more = _spare(self.wide[together[-1].buffer]) if is_wider else 0
        if call.kernel == _CONVOLUTION:
            return self._convolution(call, more)
        kernel = elementwise_kernel(call)
        if kernel is None:
            inputs, outputs = (
                tuple(self._view(view, 1, more) for view in side) for side in (call.inputs, call.outputs)
            )
            return replace(call, inputs=inputs, outputs=outputs)
        dim = _dim_to_last_channel(call.outputs[0], self.wide) or 0
        inputs, outputs = (tuple(self._view(view, dim, more) for view in side) for side in (call.inputs, call.outputs))
        name = call.kernel
        if not all(view.is_contiguous for view in (*inputs, *outputs)):
            has_scalars = any(number is not None for number in call.params["scalars"])
            name = elementwise_kernel_name(kernel.op.name, has_scalars=has_scalars, is_strided=True)
        return replace(call, kernel=name, inputs=inputs, outputs=outputs)

    def _view(self, view: View, dim: int, more: int) -> View:
        """A view of an image as it is now, or of a constant, with `more` channels in dimension `dim`."""
        if view.buffer in self.wide:
            view = self._restrided(view)
        elif more and view.strides[dim]:
            channels = replace(view, shape=(view.shape[dim],), strides=(view.strides[dim],))
            padded = self.constants.padded(channels, (more,))
            strides = tuple(padded.strides[0] * (at == dim) for at in range(view.rank))
            view = replace(view, buffer=padded.buffer, strides=strides, offset=0)
        return replace(view, shape=tuple(size + more * (at == dim) for at, size in enumerate(view.shape)))

    def _restrided(self, view: View) -> View:
        """A view of the same elements of a wide image as it is now."""
        images = self.wide[view.buffer].alloc_shape[1:], self.constants.buffers[view.buffer].alloc_shape[1:]
        before, now = map(numel, images)
        strides = tuple(step // before * now if step % before == 0 else step for step in view.strides)
        return replace(view, strides=strides, offset=view.offset // before * now + view.offset % before)

    def _convolution(self, call: KernelCall, more: int) -> KernelCall:
        x, weight, bias, residual, out = KERNELS[_CONVOLUTION].bind(call)
        assert x is not None and weight is not None and out is not None
        depthwise = _is_depthwise(call)
        spare = _spare(self.wide[x.buffer]) if _is_whole(x, self.wide) and call.params["groups"] == 1 else 0
        if more or spare:
            weight = self.constants.padded(weight, (more, spare, 0, 0))
        if more and bias is not None:
            bias = self.constants.padded(bias, (more,))
        x = self._view(x, 1, more if depthwise else spare)
        residual = None if residual is None else self._view(residual, 1, more)
        inputs = tuple(view for view in (x, weight, bias, residual) if view is not None)
        params = {**call.params, "groups": call.params["groups"] + more} if depthwise else call.params
        return replace(call, inputs=inputs, outputs=(self._view(out, 1, more),), params=params)


__all__ = ["widen_channels"]
