"""Native kernels on 8-bit integers: packs weights, checks operands, and prepares launches of the C++ kernels.

The functions return None for what the kernels do not handle: images whose channels are not innermost in memory, or
operands that are read when a launch is prepared (weights, scales, biases) and not constant.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from npu_runtime.cpu.arrays import address, host_memory, strides_of
from npu_runtime.cpu.bound_call import ArrayCall, Params
from npu_runtime.cpu.native.bindings import NativeLaunch, layout
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, floats, item_size, packed
from npu_runtime.cpu.native.numbers import ACTIVATIONS, DTYPES, STORED_DTYPES

_CHANNELS_LAST = (0, 2, 3, 1)
_TILE_STEPS = 16  # kTileSteps in vec.h
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


class _Args(ArgumentBlock):
    """Args in integer_args.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "scales", "bias", "offsets", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("x_type", "residual_type", "out_type", "activation")),
        *((name, ctypes.c_float) for name in ("x_scale", "residual_scale", "inverse_out_scale")),
        *((name, ctypes.c_int32) for name in ("zero_point", "residual_zero_point", "out_zero_point", "low", "high")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("batch", "groups", "in_channels", "out_channels", "in_h", "in_w", "out_h", "out_w"),
                *("kernel_h", "kernel_w", "stride_h", "stride_w", "dilation_h", "dilation_w", "pad_top", "pad_left"),
                "weight_group_stride",
            )
        ),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        if kernel.startswith("integer_conv2d"):
            yield from self._convolution(kernel.removeprefix("integer_conv2d").removeprefix("_"))
            return
        maps = self.batch * self.groups
        size = maps * self.in_h * self.in_w
        results = {"integer_max_pool2d": maps * self.out_h * self.out_w, "integer_mean": maps}.get(kernel, size)
        yield packed("x", self.x, size * item_size(self.x_type))
        yield packed("residual", self.residual, size * item_size(self.residual_type))
        yield packed("out", self.out, results * item_size(self.out_type))

    def _convolution(self, algorithm: str) -> Iterator[Extent]:
        """Extents of a convolution, which reads whole vectors of scales, biases and offsets, and whole panels."""
        features, pixels = self.groups * self.out_channels, self.batch * self.out_h * self.out_w
        yield packed("x", self.x, self.batch * self.groups * self.in_channels * self.in_h * self.in_w)
        yield packed("residual", self.residual, pixels * features * item_size(self.residual_type))
        yield packed("out", self.out, pixels * features * item_size(self.out_type))
        panel, lanes, taps = layout().panel, layout().lanes, self.kernel_h * self.kernel_w
        if algorithm == "columns":
            width, quads = (4 * lanes, True) if layout().has_byte_quads else (lanes, False)
            read = -(-features // width) * width
            steps = self.kernel_w * -(-self.kernel_h // (4 if quads else 2))
            weight = read * steps * 4
        elif algorithm == "depthwise":
            read, weight = -(-features // lanes) * lanes, -(-taps // 2) * 2 * features * 2
        else:
            read = features - self.out_channels + -(-self.out_channels // panel) * panel
            last = -(-self.out_channels // panel) * panel
            if algorithm.startswith("winograd"):
                weight = last * self.in_channels * taps
            else:
                step, multiple, size = {"bytes": (4, 1, 1), "tiles": (4, _TILE_STEPS, 1)}.get(algorithm, (2, 1, 2))
                steps = -(-(taps * self.in_channels) // (step * multiple)) * step * multiple
                weight = ((self.groups - 1) * self.weight_group_stride + last * steps) * size
        yield packed("weight", self.weight, weight)
        for name in ("scales", "bias", "offsets"):
            yield floats(name, getattr(self, name), read)


def _is_packed(array: np.ndarray) -> bool:
    """Whether the array is row-major without gaps."""
    expected = 1
    for size, stride in zip(reversed(array.shape), reversed(strides_of(array)), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return array.size > 0


def _is_image(array: np.ndarray) -> bool:
    return array.ndim == 4 and _is_packed(array.transpose(_CHANNELS_LAST))


def _base(x: np.ndarray, residual: np.ndarray | None, out: np.ndarray, params: Params) -> _Args:
    """The argument block without shapes."""
    scale = np.float32(params.get("out_scale", 1.0))
    args = _Args(
        x=address(x),
        out=address(out),
        x_type=STORED_DTYPES[x.dtype],
        out_type=STORED_DTYPES[out.dtype],
        activation=ACTIVATIONS[params.get("activation", "none")],
        inverse_out_scale=np.float32(1) / scale,
        **{name: params[name] for name in ("x_scale", "zero_point", "out_zero_point", "low", "high") if name in params},
    )
    if residual is not None:
        args.residual, args.residual_type = address(residual), STORED_DTYPES[residual.dtype]
        args.residual_scale, args.residual_zero_point = params["residual_scale"], params["residual_zero_point"]
    return args


def _set(args: _Args, **fields: int) -> None:
    for name, value in fields.items():
        setattr(args, name, value)


def _set_window(args: _Args, params: Params, kernel: tuple[int, ...], padding: tuple[int, int]) -> None:
    for name, pair in (("kernel", kernel), ("stride", params["stride"]), ("dilation", params["dilation"])):
        _set(args, **{f"{name}_h": pair[0], f"{name}_w": pair[1]})
    _set(args, pad_top=padding[0], pad_left=padding[1])


@dataclass(frozen=True)
class _Packed:
    """A weight as a kernel reads it, a row for each group; and the sum of each output channel.

    Attributes:
        order: The output channel of each element in the arrays of scales, biases and offsets.
    """

    data: np.ndarray
    sums: np.ndarray
    order: np.ndarray


def _centred(weight: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """A weight [o, ...] counted from its zero points, int16."""
    wide = weight.astype(np.int16)
    if zeros is not None:
        wide -= zeros.astype(np.int16).reshape(-1, *[1] * (weight.ndim - 1))
    return wide


def _stored(rows: np.ndarray, wide: np.ndarray) -> _Packed:
    memory = host_memory(rows.size, rows.dtype).reshape(rows.shape)
    memory[...] = rows
    return _Packed(memory, wide.reshape(len(wide), -1).sum(axis=1, dtype=np.int32), np.arange(len(wide)))


def pack_panels(weight: np.ndarray, zeros: np.ndarray | None, groups: int) -> _Packed:
    """A weight [o, i, kh, kw] or [o, i] in panels of int16 (integer_gemm.h), the channels of its window innermost."""
    wide = _centred(weight, zeros)
    return _stored(_panels(wide, groups, 2), wide)


def pack_byte_panels(weight: np.ndarray, groups: int, multiple: int = 1) -> _Packed:
    """A weight in panels of int8, for weights without zero points.

    Args:
        multiple: The number of steps of a panel is a multiple of this.
    """
    return _stored(_panels(weight, groups, 4, multiple), weight)


def _panels(weight: np.ndarray, groups: int, step: int, multiple: int = 1) -> np.ndarray:
    panel = layout().panel
    order = (0, 2, 3, 1) if weight.ndim == 4 else (0, 1)
    flat = weight.transpose(order).reshape(groups, len(weight) // groups, -1)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % panel), (0, -flat.shape[2] % (step * multiple))))
    steps = flat.reshape(groups, -1, panel, flat.shape[2] // step, step).transpose(0, 1, 3, 2, 4)
    return steps.reshape(groups, -1)


def pack_windows(weight: np.ndarray) -> _Packed:
    """A weight [o, i, 3, 3] without zero points in panels: taps of pairs of inputs (conv_integer_winograd.cpp)."""
    panel, (out, channels) = layout().panel, weight.shape[:2]
    padded = np.pad(weight, ((0, -out % panel), (0, 0), (0, 0), (0, 0)))
    pairs = padded.reshape(-1, panel, channels // 2, 2, 9).transpose(0, 2, 4, 1, 3)
    return _stored(pairs.reshape(1, -1), weight)


def _signed_sums(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the positive and of the negative elements of each output channel of a weight [o, ...]: int64 [o] each."""
    rows = weight.reshape(len(weight), -1)
    return np.maximum(rows, 0).sum(axis=1, dtype=np.int64), np.minimum(rows, 0).sum(axis=1, dtype=np.int64)


def pack_taps(weight: np.ndarray, zeros: np.ndarray | None) -> _Packed:
    """A weight [o, 1, kh, kw] as pairs of taps for each channel (conv_integer_depthwise.cpp)."""
    wide = _centred(weight, zeros)
    flat = wide.reshape(len(wide), -1)
    flat = np.pad(flat, ((0, 0), (0, flat.shape[1] % 2)))
    return _stored(flat.reshape(len(wide), -1, 2).transpose(1, 0, 2).reshape(1, -1), wide)


def pack_columns(weight: np.ndarray, zeros: np.ndarray | None) -> _Packed:
    """A weight [o, 1, k, k] as quads or pairs of taps for each column and channel (conv_integer_columns.cpp)."""
    quads, lanes, taps = layout().has_byte_quads, layout().lanes, weight.shape[-1]
    block, step = (4 * lanes, 4) if quads else (lanes, 2)
    within = np.arange(block)
    if quads:
        within = within.reshape(-1, 4, 4).transpose(1, 0, 2).reshape(-1)  # interleave_quads
    starts = np.minimum(np.arange(0, len(weight), block), max(0, len(weight) - block))
    order = (starts[:, None] + within) % len(weight)  # of which there may be less than a block
    wide = _centred(weight, zeros)
    columns = wide.astype(np.int8 if quads else np.int16).reshape(-1, taps, taps).transpose(0, 2, 1)
    parts = np.pad(columns, ((0, 0), (0, 0), (0, -taps % step))).reshape(len(weight), taps, -1, step)[order]
    packed = _stored(parts.transpose(0, 2, 3, 1, 4).reshape(1, -1), wide)
    return replace(packed, order=order.reshape(-1))


def _product(call: ArrayCall, algorithm: str, groups: int) -> tuple[_Args, tuple[object, ...]] | None:
    """The argument block of a product without its shapes, and what the launch must keep alive."""
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
        multiple = _TILE_STEPS if algorithm == "tiles" else 1
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
    args = _base(call.inputs[0], other, call.out, params)
    args.weight, args.scales, args.bias = address(weight.data), address(scales), address(biases)
    args.offsets, args.weight_group_stride = address(offsets), weight.data.shape[1]
    return args, (call.inputs[0], weight, scales, biases, offsets, other, call.out)


def conv2d(call: ArrayCall, algorithm: str | None = None) -> NativeLaunch | None:
    """Prepares an integer_conv2d_kernel; `algorithm` overrides the choice made by shape: one of `_KERNELS`."""
    x, weight = call.inputs[:2]
    _, _, residual = call.optional(("has_weight_zeros", "has_bias", "has_residual"), 3)
    images = [x, call.out, *([] if residual is None else [call.inputs[residual]])]
    if not all(map(_is_image, images)):
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
    _set(args, batch=x.shape[0], groups=groups, in_channels=weight.shape[1], out_channels=len(weight) // groups)
    _set(args, in_h=x.shape[2], in_w=x.shape[3], out_h=call.out.shape[2], out_w=call.out.shape[3])
    _set_window(args, call.params, weight.shape[2:], (top, left))
    return NativeLaunch(_KERNELS[algorithm], args, keep)


def _choose(call: ArrayCall) -> str:
    """The algorithm for a convolution."""
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
    """Whether the weight has zero points that are not 0."""
    (zeros,) = call.optional(("has_weight_zeros",), 3)
    return zeros is not None and bool(call.inputs[zeros].any())


def _may_be_columns(call: ArrayCall) -> bool:
    params, strides = call.params, call.params["stride"]
    window = call.inputs[1].shape[2:] in ((3, 3), (5, 5)) and set(params["dilation"]) == {1} and strides[1] <= 2
    plain = not params["has_residual"] and params["activation"] in ("none", "relu", "relu6")
    fits = _may_be_bytes(call) or not layout().has_byte_quads  # then they are pairs, which hold any weight
    return window and plain and call.out.dtype.itemsize == 1 and fits


def _winograd(call: ArrayCall) -> list[str]:
    """The algorithms of Winograd's kind that are exact for a convolution, the one that should be fastest first."""
    x, weight, params = call.inputs[0], call.inputs[1], call.params
    steps = (*params["stride"], *params["dilation"], params["groups"])
    zero, limits = params["zero_point"], np.iinfo(x.dtype)
    whole = weight.shape[1] % (2 * layout().lanes) == 0
    if weight.shape[2:] != (3, 3) or set(steps) != {1} or not whole or not call.is_constant(1) or _has_zeros(call):
        return []
    above, below = call.prepared(1, "integer signed sums", _signed_sums)
    low, high = limits.min - zero, limits.max - zero
    largest = int(np.maximum(above * high + below * low, -above * low - below * high).max())
    return [name for name, times in _WINOGRAD.items() if times * largest < 2**31]


def alternatives(call: ArrayCall) -> list[str]:
    """The other values of `conv2d`'s `algorithm` for a call, besides the one that it chooses itself."""
    chosen = _choose(call)
    if chosen in ("depthwise", "columns"):
        return []
    if _may_be_bytes(call) and layout().has_tiles:
        others = ["tiles", "bytes"]
    else:
        others = ["bytes" if _may_be_bytes(call) else "direct", *_winograd(call)[:1]]
    return [name for name in others if name != chosen]


def linear(call: ArrayCall) -> NativeLaunch | None:
    """Prepares an integer_linear_kernel: a convolution of images of one pixel."""
    x, weight = call.inputs[:2]
    _, _, residual = call.optional(("has_weight_zeros", "has_bias", "has_residual"), 3)
    rows = [x, call.out, *([] if residual is None else [call.inputs[residual]])]
    if not all(map(_is_packed, rows)):
        return None
    algorithm = "direct"
    if _may_be_bytes(call):
        algorithm = "tiles" if layout().has_tiles and len(x) >= _FEWEST_TILE_ROWS else "bytes"
    product = _product(call, algorithm, 1)
    if product is None:
        return None
    args, keep = product
    _set(args, batch=1, groups=1, in_channels=weight.shape[1], out_channels=len(weight))
    _set(args, in_h=1, in_w=len(x), out_h=1, out_w=len(x))
    _set_window(args, {"stride": (1, 1), "dilation": (1, 1)}, (1, 1), (0, 0))
    return NativeLaunch(_KERNELS[algorithm], args, keep)


def _same_order(x: np.ndarray, out: np.ndarray) -> bool:
    """Whether both hold the same elements at the same places, without gaps."""
    if x.shape != out.shape:
        return False
    orders = (tuple(range(x.ndim)), _CHANNELS_LAST) if x.ndim == 4 else (tuple(range(x.ndim)),)
    return any(_is_packed(x.transpose(order)) and _is_packed(out.transpose(order)) for order in orders)


def quantize(call: ArrayCall) -> NativeLaunch | None:
    """Prepares a quantize_activation_kernel, also from channels that lie apart to channels that are innermost."""
    (x,), out = call.inputs, call.out
    if x.dtype not in DTYPES:
        return None
    args = _base(x, None, out, call.params)
    if _same_order(x, out):
        _set(args, batch=1, groups=x.size, in_h=1, in_w=1)
    elif x.ndim == 4 and _is_packed(x) and _is_image(out):
        _set(args, batch=x.shape[0], groups=x.shape[1], in_h=x.shape[2], in_w=x.shape[3], kernel_h=1)
    else:
        return None
    return NativeLaunch("integer_quantize", args, (x, out))


def dequantize(call: ArrayCall) -> NativeLaunch | None:
    """Prepares a dequantize_activation_kernel."""
    (x,), out = call.inputs, call.out
    if not _same_order(x, out):
        return None
    args = _base(x, None, out, call.params)
    _set(args, batch=1, groups=x.size, in_h=1, in_w=1)
    return NativeLaunch("integer_dequantize", args, (x, out))


def add(call: ArrayCall) -> NativeLaunch | None:
    """Prepares an integer_add_kernel."""
    (x, residual), out = call.inputs, call.out
    if not (_same_order(x, out) and _same_order(residual, out)):
        return None
    args = _base(x, residual, out, call.params)
    _set(args, batch=1, groups=x.size, in_h=1, in_w=1)
    return NativeLaunch("integer_add", args, (x, residual, out))


def max_pool2d(call: ArrayCall) -> NativeLaunch | None:
    """Prepares an integer_max_pool2d_kernel."""
    (x,), out, params = call.inputs, call.out, call.params
    if not (_is_image(x) and _is_image(out)):
        return None
    args = _base(x, None, out, params)
    _set(args, batch=x.shape[0], groups=x.shape[1], in_h=x.shape[2], in_w=x.shape[3])
    _set(args, out_h=out.shape[2], out_w=out.shape[3])
    _set_window(args, params, tuple(params["window"]), tuple(params["padding"]))
    return NativeLaunch("integer_max_pool2d", args, (x, out))


def mean(call: ArrayCall) -> NativeLaunch | None:
    """Prepares an integer_mean_kernel."""
    (x,), out = call.inputs, call.out
    if not (_is_image(x) and _is_packed(out)):
        return None
    scale = np.float32(call.params["x_scale"]) / np.float32(x[0, 0].size)
    args = _base(x, None, out, {**call.params, "x_scale": scale})
    _set(args, batch=x.shape[0], groups=x.shape[1], in_h=x.shape[2], in_w=x.shape[3])
    return NativeLaunch("integer_mean", args, (x, out))
