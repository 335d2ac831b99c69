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
from dataclasses import dataclass, replace

import numpy as np

from cuda_compiler.op_classify import classify, is_elementwise
from cuda_compiler.passes.packed_operands import (
    DEPTHWISE_WEIGHTS,
    IMAGES,
    PackedOperands,
    copy,
    fold_factor,
    in_order_of_memory,
    is_channels_last,
)
from cuda_compiler.passes.padded_constants import PaddedConstants
from cuda_compiler.passes.transposed_convolutions import TRANSPOSED, as_convolution
from cuda_compiler.rules.channel_packs import PACK
from cuda_compiler.rules.conv import CONSTANT_WEIGHT
from npu_compiler.graph.dtypes import BYTE_DTYPES, HALF_DTYPES, is_float
from npu_compiler.ops.reductions import REDUCTIONS
from npu_compiler.program.kernels import KERNELS, Family, KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import Shape, View, contiguous_strides, numel

_CONVOLUTION = "conv2d_kernel"
_OVER_IMAGES = (Family.CONV, Family.POOL)
# Other kernels whose templates take operands of any strides.
_GROUP_NORM = "groupnorm_kernel"
_REDUCTION_KERNELS = tuple(f"{name}_kernel" for name in REDUCTIONS)
_FILL = "fill_kernel"
_IN_ONE_ORDER = ("pad_kernel", "flip_kernel", _GROUP_NORM)  # fastest where input and result lie in the same order
_OF_ANY_STRIDES = (*_REDUCTION_KERNELS, *_IN_ONE_ORDER, _FILL)


def lay_channels_last(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with convolutions over channels-last operands, and with copies where other calls need another layout.

    Transposed convolutions become convolutions where these are on tensor cores.
    """
    if not any(call.kernel in (_CONVOLUTION, TRANSPOSED) for call in plan.calls):
        return plan
    converted = _convertible(plan)
    operands = PackedOperands(plan)
    layout = _Relaid(converted, operands)
    for call in plan.calls:
        touched = {view.buffer for view in (*call.inputs, *call.outputs)}
        if touched.isdisjoint(converted) and call.kernel not in (_CONVOLUTION, TRANSPOSED):
            operands.calls.append(call)
            continue
        call = replace(call, inputs=layout.views(call.inputs), outputs=layout.views(call.outputs))
        if call.kernel == _CONVOLUTION:
            layout.convolve(call)
        elif call.kernel == TRANSPOSED:
            operands.calls += as_convolution(call, operands) or [call]
        elif is_elementwise(call) or call.kernel == _FILL:
            operands.calls.append(in_order_of_memory(call))
        elif call.kernel == _GROUP_NORM:
            layout.normalize(call)
        else:
            operands.calls.append(_as_pooling(call) if call.kernel == "mean_kernel" else call)
    return replace(
        plan,
        prologue=[*plan.prologue, *operands.prologue],
        calls=operands.calls,
        buffers={**plan.buffers, **operands.buffers},
    )


def _convertible(plan: ExecutionPlan) -> dict[str, BufferAllocation]:
    """The buffers to store channels-last, by name.

    These are arena buffers that image kernels touch, and buffers that element-wise calls, padding and group norms
    connect with them, if every view of the buffer can be expressed by strides in the new layout. Tokens [N, H * W, C]
    that are read as images are channels-last already.
    """
    candidates = {
        name: buffer
        for name, buffer in plan.buffers.items()
        if buffer.kind == "arena" and len(buffer.alloc_shape) in (3, 4, 5)
    }
    unfit = {view.buffer for view in plan.output_views.values()}
    for call in plan.calls:
        for view in (*call.inputs, *call.outputs):
            buffer = candidates.get(view.buffer)
            if buffer is not None and not (takes_strides(call) and _in_channels_last(view, buffer.alloc_shape)):
                unfit.add(view.buffer)
    candidates = {name: buffer for name, buffer in candidates.items() if name not in unfit}
    chosen = {
        view.buffer
        for call in plan.calls
        if classify(call) in _OVER_IMAGES and not _is_of_bytes(call)
        for view in (*call.inputs, *call.outputs)
        if not _lies_channels_last(view)
    }
    chosen &= candidates.keys()
    walking = [call for call in plan.calls if is_elementwise(call) or call.kernel in _IN_ONE_ORDER]
    while more := {name for call in walking for name in _following(call, candidates, chosen)}:
        chosen |= more
    return {name: buffer for name, buffer in candidates.items() if name in chosen}


def takes_strides(call: KernelCall) -> bool:
    """Whether a call's operands may have any strides."""
    of_images = classify(call) in _OVER_IMAGES and not _is_of_bytes(call)
    return of_images or classify(call) is Family.ELEMENTWISE or call.kernel in _OF_ANY_STRIDES


def _lies_channels_last(view: View) -> bool:
    """Whether an image of several channels and pixels is channels-last in memory."""
    return view.rank == 4 and view.shape[1] > 1 < numel(view.shape[2:]) and is_channels_last(view)


def _is_of_bytes(call: KernelCall) -> bool:
    """Whether a call's first input is of bytes: such images are channels-last already."""
    return call.inputs[0].dtype in BYTE_DTYPES


def _following(call: KernelCall, candidates: Mapping[str, BufferAllocation], chosen: set[str]) -> Iterator[str]:
    """The further buffers to convert so that a call walks all operands in the order of `chosen` ones."""
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
    """The view's dimensions from the outermost to the innermost in memory, without those of size 1 or stride 0."""
    stepping = [dim for dim in range(view.rank) if view.shape[dim] > 1 and view.strides[dim]]
    return sorted(stepping, key=lambda dim: -view.strides[dim])


def _agree(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether two orders list the dimensions that they share in the same sequence."""
    return [dim for dim in first if dim in second] == [dim for dim in second if dim in first]


def _in_channels_last(view: View, allocated: Shape) -> View | None:
    """The view after its row-major buffer [N, C, …] has become [N, …, C]; None if no strides express it.

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
    """The plan under construction, with `converted` buffers in channels-last layout.

    Attributes:
        converted: The buffers that become channels-last, by name.
        operands: The calls so far, and the copies that bring operands into the new layout.
    """

    converted: dict[str, BufferAllocation]
    operands: PackedOperands

    def __post_init__(self) -> None:
        for name, buffer in self.converted.items():
            images, channels, *pixels = buffer.alloc_shape
            self.operands.buffers[name] = replace(buffer, alloc_shape=(images, *pixels, channels))

    def views(self, views: Iterable[View]) -> tuple[View, ...]:
        return tuple(self._view(view) for view in views)

    def _view(self, view: View) -> View:
        if view.buffer not in self.converted:
            return view
        converted = _in_channels_last(view, self.converted[view.buffer].alloc_shape)
        assert converted is not None
        return converted

    def convolve(self, call: KernelCall) -> None:
        """Append a convolution over channels-last operands, with copies of the operands that have another layout."""
        operands = self.operands
        x, weight, bias, residual, out = KERNELS[_CONVOLUTION].bind(call)
        assert x is not None and weight is not None and out is not None
        if not all(is_float(view.dtype) for view in (x, weight, out)):
            operands.calls.append(call)
            return
        # Tensor cores take factors of one dtype, so a float32 weight, as folding batch normalization makes it, is
        # rounded; but not where the result is float32, nor in depthwise convolutions, which use no tensor cores.
        depthwise = _is_depthwise(call, weight)
        rounds = out.dtype == x.dtype and not depthwise
        dtype = x.dtype if rounds else weight.dtype
        constant = operands.is_constant(weight)
        on_tensor_cores = x.dtype in HALF_DTYPES and not depthwise
        is_copied = residual is None and not is_channels_last(out)
        are_constant = constant and (bias is None or operands.is_constant(bias))
        if on_tensor_cores and is_copied and are_constant and out.shape[1] % 2 and call.params["groups"] == 1:
            weight, bias = self._with_even_outputs(weight, bias)
        fold = fold_factor(call, weight, PACK) if on_tensor_cores else 1
        if fold > 1:
            call, x, weight = operands.fold(call, x, weight, dtype, fold, PACK)
        else:
            channels = weight.shape[1]
            if call.params["groups"] == 1 and on_tensor_cores:
                channels += -channels % PACK
            x = operands.input(x, channels if call.params["groups"] == 1 else x.shape[1], call.node)
            order = DEPTHWISE_WEIGHTS if depthwise else IMAGES
            weight = operands.weight(weight, (channels, *weight.shape[2:]), dtype, call.node, order)
        residual = operands.input(residual, residual.shape[1], call.node) if residual is not None else None
        result = out
        if not is_channels_last(out):
            shape = (out.shape[0], weight.shape[0], *out.shape[2:])
            result = operands.buffer(f"{call.node}.out", shape, out.dtype, "arena")
        inputs = tuple(view for view in (x, weight, bias, residual) if view is not None)
        params = {**call.params, CONSTANT_WEIGHT: constant}
        operands.calls.append(replace(call, inputs=inputs, outputs=(result,), params=params))
        if result is not out:
            operands.calls.append(copy(result.slice(1, 0, out.shape[1]), out, call.node))

    def _with_even_outputs(self, weight: View, bias: View | None) -> tuple[View, View | None]:
        """Weight and bias of a convolution with an output channel more, which the copy of its result leaves out.

        Kernels store pairs of channels at least, and one that keeps windows of the image takes no odd number.
        """
        constants = PaddedConstants(self.operands.buffers, self.operands.prologue)
        return constants.padded(weight, (1, 0, 0, 0)), None if bias is None else constants.padded(bias, (1,))

    def normalize(self, call: KernelCall) -> None:
        """Append a group norm; if its result is channels-last, its input is copied to channels-last too."""
        x, *affine = call.inputs
        if x.rank == 4 and is_channels_last(call.outputs[0]):
            x = self.operands.input(x, x.shape[1], call.node)
        self.operands.calls.append(replace(call, inputs=(x, *affine)))


def _is_depthwise(call: KernelCall, weight: View) -> bool:
    """Whether each input channel has a group of its own, as that of a convolution of one channel to one has."""
    return weight.shape[1] == 1 and (call.params["groups"] > 1 or weight.shape[0] == 1)


def _as_pooling(call: KernelCall) -> KernelCall:
    """A mean over all pixels of a channels-last image as global average pooling, which reads many channels at a time.

    Any other call is returned as it is.
    """
    x, out = call.inputs[0], call.outputs[0]
    if x.rank != 4 or call.params["reduce_dims"] != 2 or x.strides[1] != 1:
        return call
    pooled = replace(out, shape=(*x.shape[:2], 1, 1), strides=(*out.strides, 1, 1))
    return replace(call, kernel="adaptive_avg_pool2d_kernel", outputs=(pooled,), params={})
