"""Converters of convolutions and transposed convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_sim.onnx.rows import Call, Refusal, converts

_CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def spatial_function(table: dict[int, Any], axes: int) -> Any:
    """Return the function for this number of spatial axes. Raises `Refusal` if there is none."""
    if axes not in table:
        raise Refusal(f"has {axes} spatial axes; known are {', '.join(map(str, table))}")
    return table[axes]


def window_pads(
    call: Call, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the padding before and after each spatial axis, from the attributes `pads` or `auto_pad`."""
    axes, auto = len(sizes), call.attr("auto_pad", "NOTSET")
    if auto in ("NOTSET", ""):
        pads = call.attr("pads", [0] * 2 * axes)
        return list(pads[:axes]), list(pads[axes:])
    if auto == "VALID":
        return [0] * axes, [0] * axes
    if auto not in ("SAME_UPPER", "SAME_LOWER"):
        raise Refusal(f"pads by auto_pad '{auto}'")
    before, after = [], []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        less, more = total // 2, total - total // 2
        before.append(more if auto == "SAME_LOWER" else less)
        after.append(less if auto == "SAME_LOWER" else more)
    return before, after


def padded(x: Tensor, before: Sequence[int], after: Sequence[int], value: float = 0) -> Tensor:
    """Return the tensor with its last axes padded."""
    pairs = zip(reversed(before), reversed(after), strict=True)
    return F.pad(x, [amount for pair in pairs for amount in pair], value=value)


def ones(call: Call, name: str, axes: int) -> list[int]:
    """Return an attribute that holds one number for each spatial axis; all are 1 if it is left out."""
    return list(call.attr(name, [1] * axes))


@converts("Conv")
def convolve(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the convolution of `x`, with the padding, strides, dilations and groups of the node."""
    axes = x.ndim - 2
    strides, dilations = ones(call, "strides", axes), ones(call, "dilations", axes)
    before, after = window_pads(call, x.shape[2:], weight.shape[2:], strides, dilations)
    function = spatial_function(_CONVOLUTIONS, axes)
    if before != after:
        x, before = padded(x, before, after), [0] * axes
    result: Tensor = function(x, weight, bias, strides, before, dilations, call.attr("group", 1))
    return result


@converts("ConvTranspose")
def _conv_transpose(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    axes = x.ndim - 2
    strides, dilations = ones(call, "strides", axes), ones(call, "dilations", axes)
    extra = list(call.attr("output_padding", [0] * axes))
    sizes, kernel = x.shape[2:], weight.shape[2:]
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    full = [(n - 1) * s + span + e for n, s, span, e in zip(sizes, strides, spans, extra, strict=True)]
    wanted = call.attr("output_shape")
    auto = call.attr("auto_pad", "NOTSET")
    if wanted is None and auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(sizes, strides, strict=True)]
    if wanted is None:
        pads = call.attr("pads", [0] * 2 * axes)
        before, after = list(pads[:axes]), list(pads[axes:])
    else:
        totals = [whole - size for whole, size in zip(full, wanted[-axes:], strict=True)]
        halves = [total // 2 if auto == "SAME_UPPER" else total - total // 2 for total in totals]
        before, after = halves, [total - half for total, half in zip(totals, halves, strict=True)]
    function, group = spatial_function(_TRANSPOSED, axes), call.attr("group", 1)
    fits = all(e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True))
    if before == after and min(before) >= 0 and fits:
        result: Tensor = function(x, weight, bias, strides, before, extra, group, dilations)
        return result
    whole = padded(function(x, weight, bias, strides, 0, 0, group, dilations), [0] * axes, extra)
    if bias is not None and any(extra):
        raise Refusal("adds a bias to an output padding that is as wide as its strides")
    return padded(whole, [-amount for amount in before], [-amount for amount in after])


@converts("CausalConvWithState")
def _causal_conv(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    width = weight.shape[-1] - 1
    before = torch.zeros_like(x[..., :1]).expand(*x.shape[:-1], width) if state is None else state.to(x.dtype)
    whole = torch.cat((before, x), -1)
    result = F.conv1d(whole, weight, bias, groups=x.shape[1])
    if (activation := call.attr("activation", "none")) in ("silu", "swish"):
        result = F.silu(result)
    elif activation not in ("none", ""):
        raise Refusal(f"has the activation '{activation}'")
    return result, whole.narrow(-1, whole.shape[-1] - width, width)
