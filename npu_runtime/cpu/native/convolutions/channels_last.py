"""Convolution and pooling of images with their channels innermost, as `npu_runtime.cpu.channels_last` lays them out.

The functions return None for operands that the kernels do not handle, as those of `conv` do. Bias and weight are read
when a launch is prepared; the other operands whenever it runs. `out` may be the residual, but not x.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from npu_compiler.program.views import numel
from npu_runtime.cpu.arrays import address, strides_of, with_strides
from npu_runtime.cpu.native.bindings import NativeLaunch, available, operand
from npu_runtime.cpu.native.bindings import launch as prepare
from npu_runtime.cpu.native.convolutions.arguments import MOST_TAPS, WINDOW_FIELDS, Window
from npu_runtime.cpu.native.convolutions.weights import PackedConv, planar_dtype
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, floats, item_size, packed, strided
from npu_runtime.cpu.native.numbers import ACTIVATIONS, DTYPES
from npu_runtime.cpu.native.products.linear import LinearArgs, float_vector, linear_args, packed_size
from npu_runtime.cpu.native.shapes import has_contiguous_rows

MOST_PLANES = 4
"""Maximum number of channels of a planar image, such as a network's input, that a convolution reads as it is."""


class ChannelsLastArgs(ArgumentBlock):
    """The C struct ChannelsLastArgs in channels_last.h."""

    _fields_ = [
        ("linear", LinearArgs),
        ("taps", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in (
                "batch",
                "groups",
                "channels",
                *WINDOW_FIELDS,
                "x_batch_stride",
                "x_row_stride",
                "x_pixel_stride",
                "x_channel_stride",
            )
        ),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        linear, outs = self.linear, self.groups * self.linear.n
        sizes = (self.batch, self.in_h, self.in_w, self.groups * self.channels)
        strides = (self.x_batch_stride, self.x_row_stride, self.x_pixel_stride, self.x_channel_stride)
        yield strided("x", linear.x.data, item_size(linear.x.dtype), sizes, strides)
        result = (1, 1, self.batch * self.out_h * self.out_w, outs)
        yield linear.residual.extent("residual", result)
        yield linear.out.extent("out", result)
        yield packed("bias", linear.bias.data, 4 * outs)
        taps = self.kernel_h * self.kernel_w
        if kernel == "conv2d_channels_last":
            size = self.groups * packed_size(linear.n, linear.k, linear.x.dtype)
            yield packed("weight", linear.weight, size)
        elif kernel == "conv2d_planes":
            yield packed("weight", linear.weight, packed_size(linear.n, linear.k, planar_dtype(linear.x.dtype)))
        elif kernel == "conv2d_depthwise_channels_last":
            yield floats("taps", self.taps, (taps + 1) * self.channels)
        elif kernel == "avg_pool2d_channels_last":
            yield floats("taps", self.taps, self.out_h * self.out_w)


def is_channels_last(image: np.ndarray) -> bool:
    """Whether an image [N, C, H, W] has its channels innermost; its pixels and rows may be any distance apart."""
    return image.ndim == 4 and image.dtype in DTYPES and image.size > 0 and has_contiguous_rows(image.swapaxes(1, 3))


def pixel_rows(image: np.ndarray) -> np.ndarray | None:
    """The image [N, C, H, W] as a matrix of its pixels' channels.

    None if its channels are not innermost, or its pixels not at equal distances.
    """
    if not is_channels_last(image):
        return None
    batch, channels, height, width = image.shape
    strides = strides_of(image)
    step = next((s for s, size in zip((3, 2, 0), (width, height, batch), strict=True) if size > 1), None)
    pixel = channels if step is None else strides[step]
    expected = (height * width * pixel, 1, width * pixel, pixel)
    own = zip(image.shape, strides, expected, strict=True)
    if pixel < channels or any(size > 1 and stride != wanted for size, stride, wanted in own):
        return None
    return with_strides(image, (batch * height * width, channels), (pixel, 1))


def conv2d(
    x: np.ndarray,
    packed_weight: PackedConv,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    activation: str,
    window: Window,
    groups: int,
    out: np.ndarray,
    residual_before_activation: bool,
) -> NativeLaunch | None:
    """Prepare out = activation(conv(x, weight) + bias + residual), or with the residual added last.

    Arithmetic is float32, rounded once to out's dtype; if x and the weight are both bfloat16, their exact products are
    summed in float32. None if there is no native kernel for the operands: those are images with their channels
    innermost, except for an x of up to `MOST_PLANES` channels.

    Args:
        window: Kernel size, which is the weight's, with stride, padding and dilation; it has to be valid.
        residual_before_activation: Whether the activation applies to the residual too.
    """
    weight = packed_weight.weight
    if not available() or groups != packed_weight.groups:
        return None
    if out.shape != (x.shape[0], weight.shape[0], *window.output_size(*x.shape[2:])):
        raise ValueError(f"the output {out.shape} does not fit x {x.shape} and the weight {weight.shape}")
    rows, added = pixel_rows(out), None if residual is None else pixel_rows(residual)
    if rows is None or (residual is not None and added is None):
        return None
    window = window.simplified(out)
    bias = float_vector(bias)
    if weight.shape[1] == 1 and weight.shape[0] == groups > 1:
        taps = packed_weight.taps
        if not is_channels_last(x) or numel(window.kernel) > MOST_TAPS:
            return None
        args = _arguments(x, bias, added, rows, out, window)
        args.taps = address(taps)
        kept: tuple[object, ...] = (x, taps, bias, residual, out)
        name = "conv2d_depthwise_channels_last"
    elif x.dtype == weight.dtype:
        matrix = packed_weight.matrix
        pixels = pixel_rows(x)
        if groups == 1 and window.is_pointwise(x, out) and pixels is not None and matrix.k == x.shape[1]:
            product = linear_args(pixels, matrix, bias, added, activation, rows)
            if product is None:
                return None
            product.residual_first = residual_before_activation
            return prepare("linear", product, x, matrix, bias, residual, out)
        name = "conv2d_channels_last"
        if not is_channels_last(x):
            if groups > 1 or x.shape[1] > MOST_PLANES or x.dtype not in DTYPES:
                return None
            name, matrix = "conv2d_planes", packed_weight.planar_matrix
        args = _arguments(x, bias, added, rows, out, window)
        args.groups, args.channels, args.linear.n = groups, weight.shape[1], weight.shape[0] // groups
        args.linear.weight, args.linear.k = address(matrix.data), matrix.k
        args.linear.x.size[3] = args.linear.x.stride[2] = matrix.k
        kept = (x, matrix, bias, residual, out)
    else:
        return None
    args.linear.activation = ACTIVATIONS[activation]
    args.linear.residual_first = residual_before_activation
    return NativeLaunch(name, args, kept)


def pool(name: str, x: np.ndarray, window: Window, scale: np.ndarray | None, out: np.ndarray) -> NativeLaunch | None:
    """Prepare the pooling kernel `name`; None if there is no native kernel for the operands.

    Args:
        scale: Reciprocal of the divisor of each output pixel of an average, float32.
    """
    rows = pixel_rows(out)
    if rows is None or not is_channels_last(x) or x.dtype != out.dtype:
        return None
    args = _arguments(x, None, None, rows, out, window)
    if scale is not None:
        args.taps = address(scale)
    return NativeLaunch(f"{name}_channels_last", args, (x, scale, out))


def _arguments(
    x: np.ndarray,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    rows: np.ndarray,
    out: np.ndarray,
    window: Window,
) -> ChannelsLastArgs:
    """The argument block with the fields that all kernels have; `residual` and `rows` are matrices of pixels."""
    args = ChannelsLastArgs(batch=x.shape[0], groups=1, channels=x.shape[1], **window.fields())
    args.linear = LinearArgs(operand(None), operand(bias), operand(residual), operand(rows))
    args.linear.n = out.shape[1]
    args.linear.x.data, args.linear.x.dtype = address(x), DTYPES[x.dtype]
    args.in_h, args.in_w, args.out_h, args.out_w = *x.shape[2:], *out.shape[2:]
    strides = strides_of(x)
    args.x_batch_stride, args.x_channel_stride, args.x_row_stride, args.x_pixel_stride = strides
    return args
