"""Gives integer kernels operands that tensor cores can read, and makes element-wise calls of those that only round.

Given:   q = quantize_activation(x: float16[1, 3, 224, 224]);  y = integer_conv2d(q, w: int8[64, 3, 7, 7]), stride 2
Result:  prologue: w' = to_channels_last(w), int8[64, 16, 4, 4];  s = weight_sums(w'), int32[64]
         q = quantize_to_channels_last(x), uint8[1, 16, 115, 115];  y = tiled_integer_conv2d(q, w', s)

Tensor cores sum q as it is stored; with `s`, the kernel subtracts the part that q's zero point adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from cuda_compiler.passes.packed_operands import (
    DEPTHWISE_WEIGHTS,
    PackedOperands,
    fold_factor,
    in_order_of_memory,
)
from cuda_compiler.rules.channel_packs import BYTE_PACKS, is_packed, single_pixels, single_taps
from cuda_compiler.rules.conv import CONSTANT_WEIGHT
from npu_compiler.program.elementwise import elementwise_kernel_name
from npu_compiler.program.kernels import KERNELS, KernelCall, distinct_bytes
from npu_compiler.program.plan import BufferKind, ExecutionPlan
from npu_compiler.program.views import View

CONVOLUTION, LINEAR = "integer_conv2d_kernel", "integer_linear_kernel"
QUANTIZE = "quantize_activation_kernel"
TILED, WEIGHT_SUMS, QUANTIZED_COPY = "tiled_integer_conv2d", "weight_sums", "quantize_to_channels_last"
# A kernel that rounds whole tensors by itself: the element-wise op, and the parameters that are its operands.
_ROUNDING = {
    QUANTIZE: ("quantize", ("out_scale", "out_zero_point")),
    "dequantize_activation_kernel": ("dequantize", ("x_scale", "zero_point")),
}
_SCALES = ("x_scale", "residual_scale", "out_scale")
_LEAST_PACK, _WIDEST_PACK = min(BYTE_PACKS), max(BYTE_PACKS)


def lay_integers(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with integer convolutions and products over packed operands, which tensor cores can read."""
    operands = PackedOperands(plan)
    layout = _Integers(operands)
    for call in plan.calls:
        if call.kernel == LINEAR:
            layout.convolve(as_convolution(call))
        elif call.kernel == CONVOLUTION:
            layout.convolve(call)
        else:
            operands.calls.append(call)
    kept = {view.buffer for view in plan.output_views.values()}
    return replace(
        plan,
        prologue=[*map(_rounding_as_elementwise, plan.prologue), *operands.prologue],
        calls=[*map(_rounding_as_elementwise, _quantize_while_packing(operands.calls, kept))],
        buffers={**plan.buffers, **operands.buffers},
        constants={**plan.constants, **layout.constants},
    )


def as_convolution(call: KernelCall) -> KernelCall:
    """An integer matrix product as a 1 × 1 convolution, whose images are single pixels."""
    x, weight, scales, zeros, bias, residual, out = KERNELS[LINEAR].bind(call)
    assert x is not None and weight is not None and out is not None
    operands = (single_pixels(x), single_taps(weight), scales, zeros, bias, residual and single_pixels(residual))
    params = {**call.params, "stride": [1, 1], "padding": [0, 0, 0, 0], "dilation": [1, 1], "groups": 1}
    return replace(
        call,
        kernel=CONVOLUTION,
        inputs=tuple(view for view in operands if view is not None),
        outputs=(single_pixels(out),),
        params=params,
    )


def _quantize_while_packing(calls: Sequence[KernelCall], kept: Collection[str]) -> list[KernelCall]:
    """The calls, with each quantization whose only reader copies to channels-last fused with that copy.

    Args:
        kept: Buffers that the caller reads.
    """
    reads = Counter(view.buffer for call in calls for view in call.inputs)
    joined: list[KernelCall] = []
    for call in calls:
        before = joined[-1] if joined else None
        if (
            call.kernel == "to_channels_last"
            and before is not None
            and before.kernel == QUANTIZE
            and before.outputs == call.inputs
            and reads[call.inputs[0].buffer] == 1
            and call.inputs[0].buffer not in kept
        ):
            params = {**call.params, **before.params}
            call = replace(call, kernel=QUANTIZED_COPY, inputs=before.inputs, params=params, flops=before.flops)
            joined.pop()
        joined.append(call)
    return joined


def _rounding_as_elementwise(call: KernelCall) -> KernelCall:
    if call.kernel not in _ROUNDING:
        return call
    op, operands = _ROUNDING[call.kernel]
    scale, zero_point = (float(call.params[name]) for name in operands)
    limits = {name: float(call.params[name]) for name in ("low", "high") if op == "quantize"}
    kernel = elementwise_kernel_name(op, has_scalars=True, is_strided=True)
    return in_order_of_memory(replace(call, kernel=kernel, params={"scalars": [None, scale, zero_point], **limits}))


class _Integers:
    """A plan under construction, in which integer convolutions have packed operands.

    Attributes:
        constants: New constants, by the name of their buffer.
    """

    def __init__(self, operands: PackedOperands) -> None:
        self._operands = operands
        self._sums: dict[View, View] = {}
        self.constants: dict[str, np.ndarray] = {}

    def convolve(self, call: KernelCall) -> None:
        """Append an integer convolution, with the copies that pack its operands."""
        x, weight, scales, zeros, bias, residual, _ = KERNELS[CONVOLUTION].bind(call)
        assert x is not None and weight is not None
        operands = self._operands
        params = {**call.params, CONSTANT_WEIGHT: operands.plan.buffers[weight.buffer].is_constant}
        call = replace(call, params=params)
        if zeros is not None or call.params["groups"] > 1:
            if call.params["groups"] == x.shape[1] and weight.shape[1] == 1:
                packed = operands.weight(weight, weight.shape[1:], weight.dtype, call.node, DEPTHWISE_WEIGHTS)
                call = replace(call, inputs=(x, packed, *call.inputs[2:]))
            operands.calls.append(call)
            return
        call, x, weight = self._packed(call, x, weight)
        weight_sums = self._weight_sums(weight, call) if call.params["zero_point"] else None
        factors = self._factors(call)
        inputs = tuple(view for view in (x, weight, scales, factors, weight_sums, bias, residual) if view is not None)
        params = {**call.params, **dict.fromkeys(_SCALES, 1.0), "has_weight_sums": int(weight_sums is not None)}
        operands.calls.append(replace(call, kernel=TILED, inputs=inputs, params=params))

    def _packed(self, call: KernelCall, x: View, weight: View) -> tuple[KernelCall, View, View]:
        """Append copies of the operands, where needed, with channels innermost and padded with zeros to whole packs.

        A pack is `_LEAST_PACK` channels, the fewest that a thread reads at a time. If that pays, squares of pixels are
        folded into channels instead (`PackedOperands.fold`).

        Returns:
            The call, whose operands are still the old ones, and its new input and weight.
        """
        operands, zero_point = self._operands, call.params["zero_point"]
        factor = fold_factor(call, weight, _WIDEST_PACK)
        if factor > 1:
            return operands.fold(call, x, weight, weight.dtype, factor, _WIDEST_PACK, zero_point)
        channels = x.shape[1] + -x.shape[1] % _LEAST_PACK
        if not is_packed(x, _LEAST_PACK):
            x = operands.input(x, channels, call.node)
        if channels != weight.shape[1] or not is_packed(weight, _LEAST_PACK) or not _has_terms_in_order(weight):
            weight = operands.weight(weight, (channels, *weight.shape[2:]), weight.dtype, call.node)
        return call, x, weight

    def _factors(self, call: KernelCall) -> View:
        """A constant with a call's scales, the result's inverted, so that layers of one shape share a kernel."""
        x, residual, out = (np.float32(call.params[name]) for name in _SCALES)
        view = self._operands.buffer(f"{call.node}.factors", (len(_SCALES),), "float32", "constant", (0,))
        self.constants[view.buffer] = np.array([x, residual, 1 / out], np.float32)
        return view

    def _weight_sums(self, weight: View, call: KernelCall) -> View:
        """A view of the sum of each output channel's weights, as int32."""
        if weight in self._sums:
            return self._sums[weight]
        operands = self._operands
        constant = bool(call.params[CONSTANT_WEIGHT])
        kind: BufferKind = "persistent" if constant else "arena"
        sums = operands.buffer(f"{call.node}.sums", weight.shape[:1], "int32", kind, (0,))
        adding = KernelCall(WEIGHT_SUMS, "", (weight,), (sums,), {}, call.node, weight.numel, distinct_bytes(weight))
        if constant:
            operands.prologue.append(adding)
            self._sums[weight] = sums
        else:
            operands.calls.append(adding)
        return sums


def _has_terms_in_order(weight: View) -> bool:
    """Whether each output channel's weights are contiguous, ordered by tap, then by input channel."""
    return weight.permute((0, 2, 3, 1)).is_contiguous
