"""PyTorch's own optimized kernels (MKL and oneDNN) as candidates, on weights that are prepared once per buffer.

They agree with the reference kernels: 16-bit operands are widened to float32, and the result is rounded once. 16-bit
kernels are only used if they accumulate in float32 and round nothing but the result, except for attention, whose
16-bit form also rounds the softmax's weights, as PyTorch does.

Bias and weight are read when a launch is prepared, the other operands whenever it runs. `out` may be the residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runtime.cpu.bound_call import ArrayCall, BoundCall, reporting
from npu_runtime.cpu.quantized_weights import stored_weight, weight_parts
from npu_runtime.cpu.torch_kernels.launches import on_tensors
from npu_runtime.cpu.torch_kernels.products import activated
from npu_runtime.cpu.torch_kernels.registry import TORCH_KERNELS, Params, Tensors
from npu_runtime.hardware import Launch
from npu_runtime.torch_arrays import tensor_to_numpy

TensorCall: TypeAlias = BoundCall[Tensor]
Maker: TypeAlias = Callable[[TensorCall], Launch | None]

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, *_HALVES)
# A weight is widened while that many times its size is free: a large model must not run out of memory for being faster.
_SPARE = 16
_FEWEST_PACKED_ROWS = 4  # for fewer, a packed weight is no faster than a plain one, and takes memory of its own
# Activations that oneDNN applies to a product or a convolution before it is stored: attribute, scalars, algorithm.
_FUSED: dict[str, tuple[str, list[float], str]] = {
    "none": ("none", [], ""),
    "relu": ("relu", [], ""),
    "relu6": ("hardtanh", [0.0, 6.0], ""),
    "hardswish": ("hardswish", [], ""),
    "silu": ("swish", [], ""),
    "sigmoid": ("sigmoid", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
}


def make(maker: Maker, call: ArrayCall) -> Launch | None:
    """The call prepared on one of the kernels below; None where that does not handle it."""
    if any(x.size == 0 for x in (*call.inputs, *call.outputs)):
        return None
    try:
        launch = maker(on_tensors(call))
    except RuntimeError:  # oneDNN cannot pack this weight on this processor
        return None
    return None if launch is None else reporting(call.call, launch)


@cache
def _has_onednn() -> bool:
    """Whether PyTorch was built with oneDNN and offers its kernels for packed weights."""
    packing = ("_reorder_linear_weight", "_linear_pointwise", "_reorder_convolution_weight", "_convolution_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in packing)


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of a 16-bit dtype on this processor, with sums in float32."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return _has_onednn() and hasattr(torch.ops.mkldnn, name) and bool(getattr(torch.ops.mkldnn, name)())


def _can_prepare(call: TensorCall, bias: int | None) -> bool:
    """Whether weight and bias are constant, all operands are floats, and there is memory for a float32 weight."""
    if any(t.dtype not in _FLOATS for t in (*call.inputs, call.out)):
        return False
    if not call.is_constant(1) or (bias is not None and not call.is_constant(bias)):
        return False
    return _SPARE * 4 * call.inputs[1].numel() <= _available_bytes()


def _available_bytes() -> float:
    """Memory that can be allocated without swapping; infinite if the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), math.inf)
    except (OSError, ValueError, IndexError):
        return math.inf


def _float_weight(call: TensorCall) -> Tensor:
    weight: Tensor = call.prepared(1, "float32", lambda w: w.float().contiguous())
    return weight


def _float_bias(call: TensorCall, position: int | None) -> Tensor | None:
    bias = call.at(position)
    return None if bias is None else bias.reshape(-1).float()


def _packed_linear_weight(call: TensorCall, dtype: torch.dtype) -> Tensor:
    rows = call.inputs[0].shape[0]
    pack = torch.ops.mkldnn._reorder_linear_weight
    weight: Tensor = call.prepared(1, f"onednn {dtype} {rows}", lambda w: pack(w.to(dtype).contiguous(), rows))
    return weight


def packed_linear(call: TensorCall) -> Launch | None:
    """A launch of a linear by oneDNN, which packs the weight once; None if oneDNN does not take the call."""
    bias, residual = call.optional(("has_bias", "has_residual"), 2)
    if not _has_onednn() or not _can_prepare(call, bias) or call.out.shape[0] < _FEWEST_PACKED_ROWS:
        return None
    weight, shift = _packed_linear_weight(call, torch.float32), _float_bias(call, bias)
    x, out, added = call.inputs[0], call.out, call.at(residual)
    fused = _FUSED.get(call.params["activation"], _FUSED["none"])
    rest = "none" if call.params["activation"] in _FUSED else call.params["activation"]
    product = torch.ops.mkldnn._linear_pointwise.default

    def launch() -> None:
        result = activated(product(x.float(), weight, shift, *fused), rest)
        out.copy_(result if added is None else result.add_(added))

    return launch


def plain_linear(call: TensorCall) -> Launch | None:
    """A launch of a linear by PyTorch's product in float32, with a copy of the weight, if `_can_prepare`; else None."""
    bias, residual = call.optional(("has_bias", "has_residual"), 2)
    if not _can_prepare(call, bias):
        return None
    weight, shift = _float_weight(call), _float_bias(call, bias)
    x, out, added, activation = call.inputs[0], call.out, call.at(residual), call.params["activation"]
    if out.dtype is torch.float32 and shift is None and added is None and activation == "none":
        transposed = weight.t()

        def multiply() -> None:
            torch.mm(x.float(), transposed, out=out)

        return multiply

    def launch() -> None:
        result = activated(F.linear(x.float(), weight, shift), activation)
        out.copy_(result if added is None else result.add_(added))

    return launch


def half_linear(call: TensorCall) -> Launch | None:
    """A launch of a linear in its 16-bit dtype, if that rounds nothing but the result; else None."""
    bias, residual = call.optional(("has_bias", "has_residual"), 2)
    x, weight, out, shift, added = call.inputs[0], call.inputs[1], call.out, call.at(bias), call.at(residual)
    dtype, activation = out.dtype, call.params["activation"]
    if dtype not in _HALVES or not _can_prepare(call, bias) or any(t.dtype != dtype for t in call.inputs):
        return None
    if x.shape[0] == 1 and shift is None and added is None and activation == "none":
        transposed = weight.t()

        def multiply() -> None:
            torch.mm(x, transposed, out=out)

        return multiply
    if not _multiplies(dtype) or activation not in _FUSED or (added is not None and activation != "none"):
        return None
    packed, fused = _packed_linear_weight(call, dtype), _FUSED[activation]
    product = torch.ops.mkldnn._linear_pointwise

    def launch() -> None:
        if added is None:
            out.copy_(product(x, packed, shift, *fused))
        else:
            out.copy_(product.binary(x, added, packed, shift, "add"))

    return launch


def gated_linear(call: TensorCall) -> Launch | None:
    """A launch of a gated linear as one product by a float32 copy of both weights, if `_can_prepare`; else None."""
    (bias,) = call.optional(("has_bias",), 2)
    if not _can_prepare(call, bias):
        return None
    weight, shift = _float_weight(call), _float_bias(call, bias)
    x, out, activation = call.inputs[0], call.out, call.params["activation"]

    def launch() -> None:
        gate, up = F.linear(x.float(), weight, shift).chunk(2, -1)
        out.copy_(activated(gate, activation) * up)

    return launch


def dequantized(parts: Tensors, params: Params) -> Tensor:
    """A quantized weight [n, k] in float32."""
    return torch.from_numpy(stored_weight([tensor_to_numpy(part) for part in parts], params).dequantize())


def _widened(maker: Maker) -> Maker:
    """A maker of launches for a quantized weight, from one for a float weight, which gets a float32 copy."""

    def make(call: TensorCall) -> Launch | None:
        parts, inputs = weight_parts(call.inputs, call.params, 1)
        part_operands, operands = weight_parts(call.operands, call.params, 1)
        elements = parts[0].shape[0] * call.params["k"]
        if not all(part.is_constant for part in part_operands) or _SPARE * 4 * elements > _available_bytes():
            return None
        others = range(2, 1 + len(parts))
        weight = call.prepared(1, "dequantized", lambda _: dequantized(parts, call.params), others)
        inputs.insert(1, weight)
        return maker(replace(call, inputs=inputs, operands=[operands[0], part_operands[0], *operands[1:]]))

    return make


widened_packed_linear = _widened(packed_linear)
widened_plain_linear = _widened(plain_linear)
widened_gated_linear = _widened(gated_linear)


def _padded(call: TensorCall) -> tuple[Callable[[], Tensor], list[int]]:
    """A function that returns the input in float32, and the padding that the convolution itself has to apply.

    Only padding that is equal on opposite sides is left to it.
    """
    x = call.inputs[0]
    top, bottom, left, right = call.params["padding"]
    if (top, left) == (bottom, right):
        return x.float, [top, left]
    return lambda: F.pad(x.float(), (left, right, top, bottom)), [0, 0]


def _conv_epilogue(call: TensorCall, activation: str, residual: int | None) -> Callable[[Tensor], object]:
    out, added = call.out, call.at(residual)
    return lambda result: out.copy_(activated(result if added is None else result.add_(added), activation))


def packed_conv(call: TensorCall) -> Launch | None:
    """A launch of a convolution by oneDNN, which packs the weight once; None if oneDNN does not take the call."""
    bias, residual = call.optional(("has_bias", "has_residual"), 2)
    if not _has_onednn() or not _can_prepare(call, bias):
        return None
    activation, groups = call.params["activation"], call.params["groups"]
    stride, dilation = list(call.params["stride"]), list(call.params["dilation"])
    source, padding = _padded(call)
    window: list[Any] = [padding, stride, dilation, groups]
    size = list(source().shape)
    pack = torch.ops.mkldnn._reorder_convolution_weight
    weight = call.prepared(1, f"onednn {window} {size}", lambda w: pack(w.float().contiguous(), *window, size))
    shift, added, out = _float_bias(call, bias), call.at(residual), call.out
    convolve = torch.ops.mkldnn._convolution_pointwise
    if added is not None and activation in ("none", "relu"):
        after = None if activation == "none" else activation

        def launch() -> None:
            out.copy_(convolve.binary(source(), added.float(), weight, shift, *window, "add", 1.0, after, [], None))

        return launch
    is_fused = added is None and activation in _FUSED
    fused = _FUSED[activation] if is_fused else _FUSED["none"]
    finish = _conv_epilogue(call, "none" if is_fused else activation, residual)
    return lambda: finish(convolve(source(), weight, shift, *window, *fused))  # type: ignore[return-value]


def plain_conv(call: TensorCall) -> Launch | None:
    """A launch of PyTorch's convolution in float32 with a copy of the weight, if `_can_prepare`; else None."""
    bias, residual = call.optional(("has_bias", "has_residual"), 2)
    if not _can_prepare(call, bias):
        return None
    weight, shift = _float_weight(call), _float_bias(call, bias)
    stride, dilation, groups = tuple(call.params["stride"]), tuple(call.params["dilation"]), call.params["groups"]
    source, padding = _padded(call)
    finish = _conv_epilogue(call, call.params["activation"], residual)

    def launch() -> None:
        finish(F.conv2d(source(), weight, shift, stride, tuple(padding), dilation, groups))

    return launch


def pointwise_conv(call: TensorCall) -> Launch | None:
    """A launch of a 1×1 convolution as a product of the weight and the images in their layout; None for any other."""
    bias, residual = call.optional(("has_bias", "has_residual"), 2)
    params, x = call.params, call.inputs[0]
    window = (tuple(call.inputs[1].shape[2:]), tuple(params["stride"]), tuple(params["padding"]), params["groups"])
    if window != ((1, 1), (1, 1), (0, 0, 0, 0), 1) or not _can_prepare(call, bias):
        return None
    weight, shift = _float_weight(call).flatten(1), _float_bias(call, bias)
    column = None if shift is None else shift[:, None]
    finish = _conv_epilogue(call, params["activation"], residual)
    shape = call.out.shape

    def launch() -> None:
        result = torch.matmul(weight, x.float().flatten(2))
        finish((result if column is None else result.add_(column)).view(shape))

    return launch


def unprepared(call: TensorCall) -> Launch | None:
    """A launch of the kernel in `TORCH_KERNELS` as it is, on the call's operands; never None."""
    return partial(TORCH_KERNELS[call.name], call.inputs, call.outputs, call.params)


def half_attention(call: TensorCall) -> Launch | None:
    q, k, v, *rest = call.inputs
    mask, out = (rest[0] if call.params["has_mask"] else None), call.out
    if any(t.dtype != q.dtype for t in (k, v, out)) or q.dtype not in _HALVES:
        return None
    if call.params["soft_cap"] or call.params["has_sinks"]:
        return None
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, q.dtype):
        return None
    attend = partial(
        F.scaled_dot_product_attention,
        is_causal=bool(call.params["causal"]),
        scale=call.params["scale"],
        enable_gqa=k.shape[1] != q.shape[1],
    )

    def launch() -> None:
        out.copy_(attend(q, k, v, mask))

    return launch
