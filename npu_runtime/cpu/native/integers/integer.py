"""Native kernels on 8-bit integers: packs weights, checks operands, and prepares launches of the C++ kernels.

The functions return None for calls that the kernels do not handle: images whose channels are not innermost in memory,
or operands that are read when a launch is prepared (weights, scales, biases) but are not constant.
"""

from __future__ import annotations

import numpy as np

from npu_runtime.cpu.arrays import address
from npu_runtime.cpu.bound_call import ArrayCall
from npu_runtime.cpu.native.bindings import NativeLaunch, layout
from npu_runtime.cpu.native.integers.arguments import (
    CHANNELS_LAST,
    TILE_STEPS,
    IntegerArgs,
    base_args,
    is_image,
    is_packed,
    set_fields,
    set_window,
)
from npu_runtime.cpu.native.integers.weights import (
    pack_byte_panels,
    pack_columns,
    pack_panels,
    pack_taps,
    pack_windows,
    signed_sums,
)
from npu_runtime.cpu.native.numbers import DTYPES

_FEWEST_TILE_ROWS, _FEWEST_TILE_TERMS = 8, 48  # with fewer, a matrix unit mostly multiplies what does not count
_KERNELS = {
    "tiles": "integer_conv2d_tiles",
    "bytes": "integer_conv2d_bytes",
    "direct": "integer_conv2d",
    "columns": "integer_conv2d_columns",
    "depthwise": "integer_conv2d_depthwise",
    "winograd2": "integer_conv2d_winograd2",
    "winograd4": "integer_conv2d_winograd4",
}
# Winograd's algorithms (conv_integer_winograd.cpp), the faster one first; as many times a result must fit in int32.
_WINOGRAD = {"winograd4": 64, "winograd2": 4}
_FEWEST_WINOGRAD_TILES = 12  # of 4 x 4 results; with fewer, products of bytes are faster than transforming weights


def _product(call: ArrayCall, algorithm: str, groups: int) -> tuple[IntegerArgs, tuple[object, ...]] | None:
    """The argument block of a product without its shapes, and the objects that the launch must keep alive.

    None if the weight, its scales or zero points, or the bias are not constant.
    """
    zeros, bias, residual = call.optional(("has_weight_zeros", "has_bias", "has_residual"), 3)
    read = [1, 2, *(index for index in (zeros, bias) if index is not None)]
    params = call.params
    if not all(map(call.is_constant, read)):
        return None
    # Zero points become part of the packed weight.
    constant_zeros, baked = call.at(zeros), [] if zeros is None else [zeros]
    if algorithm == "depthwise":
        weight = call.prepared(1, "integer taps", lambda w: pack_taps(w, constant_zeros), baked)
    elif algorithm in _WINOGRAD:
        weight = call.prepared(1, "integer windows", pack_windows)
    elif algorithm == "columns":
        weight = call.prepared(1, "integer columns", lambda w: pack_columns(w, constant_zeros), baked)
    elif algorithm in ("bytes", "tiles"):
        multiple = TILE_STEPS if algorithm == "tiles" else 1
        name = f"integer byte panels {groups} {multiple}"
        weight = call.prepared(1, name, lambda w: pack_byte_panels(w, groups, multiple))
    else:
        weight = call.prepared(1, f"integer panels {groups}", lambda w: pack_panels(w, constant_zeros, groups), baked)
    added, spare = call.at(bias), (0, layout().panel)
    # The least code of x is 0 for the kernels on bytes.
    on_bytes = algorithm in ("bytes", "tiles") or algorithm == "columns" and layout().has_byte_quads
    moved = on_bytes and call.inputs[0].dtype == np.int8
    zero_point = params["zero_point"] + (128 if moved else 0)
    scales = np.pad(call.inputs[2].astype(np.float32)[weight.order] * np.float32(params["x_scale"]), spare)
    biases = np.zeros(len(scales), np.float32)
    if added is not None:
        biases = np.pad(added.astype(np.float32)[weight.order], spare)
    offsets = np.pad(-zero_point * weight.sums[weight.order], spare)
    other = call.at(residual)
    args = base_args(call.inputs[0], other, call.out, params)
    args.weight, args.scales, args.bias = address(weight.data), address(scales), address(biases)
    args.offsets, args.weight_group_stride = address(offsets), weight.data.shape[1]
    return args, (call.inputs[0], weight, scales, biases, offsets, other, call.out)


def _activations(call: ArrayCall) -> list[np.ndarray]:
    """The operands of a product other than its weight: x, the result and, if there is one, the residual."""
    _, _, residual = call.optional(("has_weight_zeros", "has_bias", "has_residual"), 3)
    return [call.inputs[0], call.out, *([] if residual is None else [call.inputs[residual]])]


def conv2d(call: ArrayCall, algorithm: str | None = None) -> NativeLaunch | None:
    """Prepare an `integer_conv2d_kernel` call.

    None if its images are not channels-last, its padding is negative, its weight, scales or bias are not constant, or
    this CPU lacks the algorithm.

    Args:
        algorithm: One of `_KERNELS`; None means a choice by shape.
    """
    x, weight = call.inputs[:2]
    if not all(map(is_image, _activations(call))):
        return None
    groups, (top, bottom, left, right) = call.params["groups"], call.params["padding"]
    if min(top, bottom, left, right) < 0:
        return None
    algorithm = _choose(call) if algorithm is None else algorithm
    if algorithm == "tiles" and not layout().has_tiles:
        return None
    product = _product(call, algorithm, groups)
    if product is None:
        return None
    args, keep = product
    set_fields(args, batch=x.shape[0], groups=groups, in_channels=weight.shape[1], out_channels=len(weight) // groups)
    set_fields(args, in_h=x.shape[2], in_w=x.shape[3], out_h=call.out.shape[2], out_w=call.out.shape[3])
    set_window(args, call.params, weight.shape[2:], (top, left))
    return NativeLaunch(_KERNELS[algorithm], args, keep)


def _choose(call: ArrayCall) -> str:
    """The algorithm for a convolution, chosen by its shape and the CPU's instructions."""
    weight = call.inputs[1]
    if weight.shape[1] == 1 and call.params["groups"] == len(weight) and len(weight) % layout().lanes == 0:
        return "columns" if _may_be_columns(call) else "depthwise"
    if not _may_be_bytes(call):
        return next(iter(_winograd(call)), "direct")
    if layout().has_tiles and weight[0].size >= _FEWEST_TILE_TERMS:
        return "tiles"
    (height, width), batch = call.out.shape[2:], len(call.out)
    many = batch * -(-height // 4) * -(-width // 4) >= _FEWEST_WINOGRAD_TILES
    measured = layout().lanes == 16  # on AVX-512 it is faster; elsewhere a trial finds out
    return "winograd4" if many and measured and "winograd4" in _winograd(call) else "bytes"


def _may_be_bytes(call: ArrayCall) -> bool:
    return layout().has_byte_quads and not _has_zeros(call)


def _has_zeros(call: ArrayCall) -> bool:
    """Whether the weight has zero points other than 0."""
    (zeros,) = call.optional(("has_weight_zeros",), 3)
    return zeros is not None and bool(call.inputs[zeros].any())


def _may_be_columns(call: ArrayCall) -> bool:
    params, strides = call.params, call.params["stride"]
    window = call.inputs[1].shape[2:] in ((3, 3), (5, 5)) and set(params["dilation"]) == {1} and strides[1] <= 2
    plain = not params["has_residual"] and params["activation"] in ("none", "relu", "relu6")
    fits = _may_be_bytes(call) or not layout().has_byte_quads  # then they are pairs, which hold any weight
    return window and plain and call.out.dtype.itemsize == 1 and fits


def _winograd(call: ArrayCall) -> list[str]:
    """The Winograd algorithms that are exact for a convolution, the one expected to be the fastest first."""
    x, weight, params = call.inputs[0], call.inputs[1], call.params
    steps = (*params["stride"], *params["dilation"], params["groups"])
    zero, limits = params["zero_point"], np.iinfo(x.dtype)
    whole = weight.shape[1] % (2 * layout().lanes) == 0
    if weight.shape[2:] != (3, 3) or set(steps) != {1} or not whole or not call.is_constant(1) or _has_zeros(call):
        return []
    above, below = call.prepared(1, "integer signed sums", signed_sums)
    low, high = limits.min - zero, limits.max - zero
    largest = int(np.maximum(above * high + below * low, -above * low - below * high).max())
    return [name for name, times in _WINOGRAD.items() if times * largest < 2**31]


def alternatives(call: ArrayCall) -> list[str]:
    """The algorithms that `conv2d` could use for a call, besides the one that it chooses itself."""
    chosen = _choose(call)
    if chosen in ("depthwise", "columns"):
        return []
    if _may_be_bytes(call) and layout().has_tiles:
        others = ["tiles", "bytes"]
    else:
        others = ["bytes" if _may_be_bytes(call) else "direct", *_winograd(call)[:1]]
    return [name for name in others if name != chosen]


def linear(call: ArrayCall) -> NativeLaunch | None:
    """Prepare an `integer_linear_kernel` call, as a convolution of images of one pixel; None as for `conv2d`."""
    x, weight = call.inputs[:2]
    if not all(map(is_packed, _activations(call))):
        return None
    algorithm = "direct"
    if _may_be_bytes(call):
        algorithm = "tiles" if layout().has_tiles and len(x) >= _FEWEST_TILE_ROWS else "bytes"
    product = _product(call, algorithm, 1)
    if product is None:
        return None
    args, keep = product
    set_fields(args, batch=1, groups=1, in_channels=weight.shape[1], out_channels=len(weight))
    set_fields(args, in_h=1, in_w=len(x), out_h=1, out_w=len(x))
    set_window(args, {"stride": (1, 1), "dilation": (1, 1)}, (1, 1), (0, 0))
    return NativeLaunch(_KERNELS[algorithm], args, keep)


def _same_order(x: np.ndarray, out: np.ndarray) -> bool:
    """Whether two arrays of one shape have their elements in the same order in memory, without gaps."""
    if x.shape != out.shape:
        return False
    orders = (tuple(range(x.ndim)), CHANNELS_LAST) if x.ndim == 4 else (tuple(range(x.ndim)),)
    return any(is_packed(x.transpose(order)) and is_packed(out.transpose(order)) for order in orders)


def quantize(call: ArrayCall) -> NativeLaunch | None:
    """Prepare a `quantize_activation_kernel` call, which may also change the layout to channels innermost.

    None if the kernel does not handle the layouts.
    """
    (x,), out = call.inputs, call.out
    if x.dtype not in DTYPES:
        return None
    args = base_args(x, None, out, call.params)
    if _same_order(x, out):
        set_fields(args, batch=1, groups=x.size, in_h=1, in_w=1)
    elif x.ndim == 4 and is_packed(x) and is_image(out):
        set_fields(args, batch=x.shape[0], groups=x.shape[1], in_h=x.shape[2], in_w=x.shape[3], kernel_h=1)
    else:
        return None
    return NativeLaunch("integer_quantize", args, (x, out))


def dequantize(call: ArrayCall) -> NativeLaunch | None:
    """Prepare a `dequantize_activation_kernel` call; None if operand and result differ in layout."""
    (x,), out = call.inputs, call.out
    if not _same_order(x, out):
        return None
    args = base_args(x, None, out, call.params)
    set_fields(args, batch=1, groups=x.size, in_h=1, in_w=1)
    return NativeLaunch("integer_dequantize", args, (x, out))


def add(call: ArrayCall) -> NativeLaunch | None:
    """Prepare an `integer_add_kernel` call; None if operands and result differ in layout."""
    (x, residual), out = call.inputs, call.out
    if not (_same_order(x, out) and _same_order(residual, out)):
        return None
    args = base_args(x, residual, out, call.params)
    set_fields(args, batch=1, groups=x.size, in_h=1, in_w=1)
    return NativeLaunch("integer_add", args, (x, residual, out))


def max_pool2d(call: ArrayCall) -> NativeLaunch | None:
    """Prepare an `integer_max_pool2d_kernel` call; None if images are not channels-last."""
    (x,), out, params = call.inputs, call.out, call.params
    if not (is_image(x) and is_image(out)):
        return None
    args = base_args(x, None, out, params)
    set_fields(args, batch=x.shape[0], groups=x.shape[1], in_h=x.shape[2], in_w=x.shape[3])
    set_fields(args, out_h=out.shape[2], out_w=out.shape[3])
    set_window(args, params, tuple(params["window"]), tuple(params["padding"]))
    return NativeLaunch("integer_max_pool2d", args, (x, out))


def mean(call: ArrayCall) -> NativeLaunch | None:
    """Prepare an `integer_mean_kernel` call; None if the image is not channels-last, or the result not contiguous."""
    (x,), out = call.inputs, call.out
    if not (is_image(x) and is_packed(out)):
        return None
    scale = np.float32(call.params["x_scale"]) / np.float32(x[0, 0].size)
    args = base_args(x, None, out, {**call.params, "x_scale": scale})
    set_fields(args, batch=x.shape[0], groups=x.shape[1], in_h=x.shape[2], in_w=x.shape[3])
    return NativeLaunch("integer_mean", args, (x, out))
