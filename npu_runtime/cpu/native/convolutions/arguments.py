"""The argument block of convolutions and pooling, and checks whether their kernels take the operands."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from npu_compiler.program.views import numel
from npu_runtime.cpu.arrays import address, strides_of
from npu_runtime.cpu.native.bindings import available, layout
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, floats, item_size, strided
from npu_runtime.cpu.native.numbers import DTYPES

TILE_ROWS, TILE_PAIRS = 32, 16  # kTileRows and kTileSteps in vec.h
MOST_TAPS = 1024  # kMostTaps in taps.h
_SMALL_MAP = 4096  # elements of a padded map that is never too large
KERNELS = {  # algorithm → kernel, and its variant
    "pixels": ("conv2d", 0),
    "channels": ("conv2d", 1),
    "tiles": ("conv2d", 2),
    "winograd2": ("conv2d_winograd", 2),
    "winograd4": ("conv2d_winograd", 4),
    "depthwise": ("conv2d_depthwise", 0),
}
# Fields of the C structs of convolutions and pooling: the sizes of both images, and the window.
WINDOW_FIELDS = (
    "in_h",
    "in_w",
    "out_h",
    "out_w",
    "kernel_h",
    "kernel_w",
    "stride_h",
    "stride_w",
    "dilation_h",
    "dilation_w",
    "pad_top",
    "pad_left",
)


class ConvArgs(ArgumentBlock):
    """The C struct ConvArgs in conv_args.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "weight", "bias", "residual", "out")] + [
        (name, ctypes.c_int64)
        for name in (
            "x_type",
            "residual_type",
            "out_type",
            "activation",
            "residual_before_activation",
            "x_batch_stride",
            "residual_batch_stride",
            "out_batch_stride",
            "batch",
            "groups",
            "in_channels",
            "out_channels",
            *WINDOW_FIELDS,
            "weight_group_stride",
            "variant",
            "pairs",
        )
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        features = self.groups * self.out_channels
        image, result = self.groups * self.in_channels * self.in_h * self.in_w, features * self.out_h * self.out_w
        for name, size in (("x", image), ("residual", result), ("out", result)):
            start, stride = getattr(self, name), getattr(self, f"{name}_batch_stride")
            yield strided(name, start, item_size(getattr(self, f"{name}_type")), (self.batch, size), (stride, 1))
        yield floats("bias", self.bias, features)
        yield floats("weight", self.weight, self._weight_size(kernel))

    def _weight_size(self, kernel: str) -> int:
        """Number of 4-byte elements (floats, or pairs of bfloat16) of the packed weight that a kernel reads."""
        taps, outs = self.kernel_h * self.kernel_w, self.out_channels
        if kernel == "avg_pool2d":  # divisors, and a vector behind them
            return int(self.out_h * self.out_w + layout().lanes)
        if kernel == "conv2d_depthwise":
            return int(self.groups * outs * taps)
        if kernel == "conv2d_winograd":
            size = (self.variant + 2) ** 2 * outs * self.in_channels
        else:
            depth, multiple = -(-self.in_channels * taps // (2 if self.pairs else 1)), 1
            if self.variant == KERNELS["channels"][1]:
                multiple = layout().panel
            elif self.variant == KERNELS["tiles"][1]:
                multiple, depth = TILE_ROWS, -(-depth // TILE_PAIRS) * TILE_PAIRS
            size = -(-outs // multiple) * multiple * depth
        return int((self.groups - 1) * self.weight_group_stride + size)


class Window(NamedTuple):
    """A sliding window over an image; pairs are (vertical, horizontal), padding is (top, bottom, left, right)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int] = (1, 1)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        top, bottom, left, right = self.padding
        padded = (height + top + bottom, width + left + right)
        spans = [(size - 1) * step + 1 for size, step in zip(self.kernel, self.dilation, strict=True)]
        rows, columns = [(p - s) // step + 1 for p, s, step in zip(padded, spans, self.stride, strict=True)]
        return rows, columns

    def is_pointwise(self, x: np.ndarray, out: np.ndarray) -> bool:
        """Whether each output pixel reads exactly the input pixel at its own position."""
        unmoved = self.kernel == (1, 1) and self.stride == (1, 1) and not any(self.padding)
        return unmoved and x.shape[2:] == out.shape[2:]  # a window with one position has a stride of 1 on any map

    @property
    def is_valid(self) -> bool:
        return min(self.stride + self.dilation + self.kernel) > 0 and min(self.padding) >= 0

    def simplified(self, out: np.ndarray) -> Window:
        """The window with a stride of 1 along axes on which it has only one position."""
        rows, columns = (step if size > 1 else 1 for step, size in zip(self.stride, out.shape[2:], strict=True))
        return self._replace(stride=(rows, columns))

    def begins_inside(self, x: np.ndarray, out: np.ndarray) -> bool:
        """Whether each position of the window begins within the padded image; with ceil_mode it may end beyond it."""
        before, behind = self.padding[::2], self.padding[1::2]
        axes = zip(x.shape[2:], out.shape[2:], self.stride, before, behind, strict=True)
        return all((count - 1) * step < size + first + last for size, count, step, first, last in axes)

    def padded_size(self, out: np.ndarray) -> int:
        """Number of pixels that the window's positions span, padding included."""
        axes = zip(out.shape[2:], self.stride, self.kernel, self.dilation, strict=True)
        height, width = ((count - 1) * step + (size - 1) * apart + 1 for count, step, size, apart in axes)
        span: int = height * width
        return span

    def fields(self) -> dict[str, int]:
        """The fields of the argument block that describe the window."""
        pairs = {"kernel": self.kernel, "stride": self.stride, "dilation": self.dilation}
        sizes = {f"{name}_{axis}": size for name, pair in pairs.items() for axis, size in zip("hw", pair, strict=True)}
        return sizes | {"pad_top": self.padding[0], "pad_left": self.padding[2]}


def conv_args(
    x: np.ndarray,
    weight: np.ndarray | None,
    bias: np.ndarray,
    residual: np.ndarray | None,
    out: np.ndarray,
    window: Window,
) -> ConvArgs:
    """The argument block with the fields that all convolution kernels have."""
    args = ConvArgs(
        x=address(x),
        bias=address(bias),
        out=address(out),
        x_type=DTYPES[x.dtype],
        out_type=DTYPES[out.dtype],
        x_batch_stride=strides_of(x)[0],
        out_batch_stride=strides_of(out)[0],
        batch=x.shape[0],
        in_h=x.shape[2],
        in_w=x.shape[3],
        out_h=out.shape[2],
        out_w=out.shape[3],
        **window.fields(),
    )
    if weight is not None:
        args.weight = address(weight)
    if residual is not None:
        args.residual, args.residual_type = address(residual), DTYPES[residual.dtype]
        args.residual_batch_stride = strides_of(residual)[0]
    return args


def all_handled(x: np.ndarray, residual: np.ndarray | None, out: np.ndarray) -> bool:
    arrays = [x, out] if residual is None else [x, out, residual]
    return available() and all(map(_is_handled, arrays))


def is_bounded(window: Window, x: np.ndarray, out: np.ndarray) -> bool:
    """Whether a padded image, which kernels copy, is not much larger than the input and output images."""
    return window.padded_size(out) <= _SMALL_MAP + 4 * (numel(x.shape[2:]) + numel(out.shape[2:]))


def _is_handled(array: np.ndarray) -> bool:
    """Whether the kernels can read an array: its dtype is known, and it is NCHW with dense, adjacent planes."""
    if array.ndim != 4 or array.dtype not in DTYPES or array.size == 0:
        return False
    dense = (array.shape[2] * array.shape[3], array.shape[3], 1)
    steps = zip(array.shape[1:], strides_of(array)[1:], dense, strict=True)
    return all(size == 1 or step == expected for size, step, expected in steps)
