"""2-d convolution: chooses an algorithm, checks operands, and prepares launches of the C++ kernels.

The functions return None for operands that the kernels do not handle, and the caller then uses another kernel: other
dtypes than float32, bfloat16 and float16, planes that are not dense, or a machine without the compiled library. Bias
and weight are read when a launch is prepared; the other operands whenever it runs. `out` may be the residual, but not
x.
"""

from __future__ import annotations

import numpy as np

from npu_compiler.program.views import numel
from npu_runtime.cpu.arrays import BFLOAT16
from npu_runtime.cpu.native.bindings import NativeLaunch, layout
from npu_runtime.cpu.native.convolutions import channels_last
from npu_runtime.cpu.native.convolutions.arguments import (
    KERNELS,
    MOST_TAPS,
    TILE_ROWS,
    Window,
    all_handled,
    conv_args,
    is_bounded,
)
from npu_runtime.cpu.native.convolutions.weights import PackedConv
from npu_runtime.cpu.native.numbers import ACTIVATIONS

_MOST_COLUMNS = 2**28  # bytes of gathered columns that are worth having at once


def conv2d(
    x: np.ndarray,
    packed: PackedConv,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    activation: str,
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    groups: int,
    out: np.ndarray,
    residual_before_activation: bool = True,
    algorithm: str | None = None,
) -> NativeLaunch | None:
    """Prepare out = activation(conv(x, weight) + bias + residual), or with the residual added last.

    Padding is (top, bottom, left, right). Arithmetic is float32, rounded once to out's dtype; if x and the weight are
    both bfloat16, their exact products are summed in float32. None if there is no native kernel for the operands.

    Args:
        residual_before_activation: Whether the activation applies to the residual too.
        algorithm: "pixels", "channels", "tiles" (bfloat16, on a machine that has them), "winograd2", "winograd4" or
            "depthwise"; None means a choice by shape.
    """
    weight = packed.weight
    kernel_h, kernel_w = weight.shape[2:]
    window = Window((kernel_h, kernel_w), stride, padding, dilation)
    if not window.is_valid:
        return None
    if not all_handled(x, residual, out):
        return channels_last.conv2d(
            x, packed, bias, residual, activation, window, groups, out, residual_before_activation
        )
    expected = (x.shape[0], weight.shape[0], *window.output_size(*x.shape[2:]))
    if out.shape != expected or (residual is not None and residual.shape != out.shape):
        raise ValueError(f"the output is {expected}, not {out.shape} or the residual's shape")
    if groups != packed.groups or x.shape[1] != weight.shape[1] * groups:
        raise ValueError(f"weight {weight.shape} of {packed.groups} groups does not fit x {x.shape}")
    window = window.simplified(out)
    if not is_bounded(window, x, out):
        return None
    # A float32 weight (that of a folded batch norm, say) keeps its precision.
    pairs = _multiplies_pairs(x, weight)
    if algorithm is None:
        algorithm = _choose(weight, window, groups, out, pairs)
    if algorithm == "tiles" and not (pairs and layout().has_tiles):
        return None
    if algorithm == "depthwise" and kernel_h * kernel_w > MOST_TAPS:
        return None

    pairs = pairs and algorithm in ("pixels", "channels", "tiles")
    packed_weight = packed.layout(algorithm, pairs)
    bias = np.zeros(weight.shape[0], np.float32) if bias is None else bias.astype(np.float32)
    args = conv_args(x, packed_weight, bias, residual, out, window)
    args.activation = ACTIVATIONS[activation]
    args.residual_before_activation = residual_before_activation
    args.groups, args.in_channels, args.out_channels = groups, weight.shape[1], weight.shape[0] // groups
    name, args.variant = KERNELS[algorithm]
    args.weight_group_stride, args.pairs = packed_weight.shape[1], pairs
    if window.is_pointwise(x, out):  # rows may then run together
        args.in_h, args.in_w = args.out_h, args.out_w = 1, args.in_h * args.in_w
    return NativeLaunch(name, args, (x, packed_weight, bias, residual, out))


def _choose(weight: np.ndarray, window: Window, groups: int, out: np.ndarray, pairs: bool) -> str:
    """The fastest algorithm for a convolution, by measurements on a Zen 4 (16 lanes) and a Zen 3 (8 lanes).

    Args:
        pairs: Whether the kernel multiplies pairs of bfloat16 numbers.
    """
    out_channels, in_channels = weight.shape[:2]
    pixels = out.shape[2] * out.shape[3]
    if in_channels == 1:
        return "depthwise"
    if pairs and layout().has_tiles and out_channels // groups >= TILE_ROWS:
        return "tiles"
    if groups > 1:
        return "pixels"
    if window.kernel == (3, 3) and window.stride == window.dilation == (1, 1) and min(in_channels, out_channels) >= 16:
        # On small maps larger tiles would mostly hold padding, and their transformed weights, of up to eight times the
        # bytes of bfloat16 pairs, come from memory.
        if pairs:
            return "winograd4" if pixels > 200 else "channels"
        return "winograd4" if pixels > 64 else "winograd2"
    # Long vectors leave more lanes idle at the end of a map.
    is_large = pixels >= (784 if layout().lanes == 16 else 196) or _column_bytes(weight, out) > _MOST_COLUMNS
    return "pixels" if is_large else "channels"


def _column_bytes(weight: np.ndarray, out: np.ndarray) -> int:
    """Maximum bytes of columns (windows of pixels) that the algorithm "channels" gathers for one batch item."""
    return 4 * numel(out.shape[2:]) * numel(weight.shape[1:])


def alternatives(
    x: np.ndarray,
    weight: np.ndarray,
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    groups: int,
    out: np.ndarray,
) -> list[str]:
    """The algorithms that `conv2d` could use for these operands, besides the one that it chooses itself."""
    if not all_handled(x, None, out):
        return []
    window = Window((weight.shape[2], weight.shape[3]), stride, padding, dilation).simplified(out)
    pairs = _multiplies_pairs(x, weight)
    chosen = _choose(weight, window, groups, out, pairs)
    if chosen == "depthwise":  # a matrix product with one input channel wastes most of a tile
        return []
    channels = ["channels"] if _column_bytes(weight, out) <= _MOST_COLUMNS else []
    valid = ["pixels", *channels, *(["tiles"] if pairs and layout().has_tiles else [])]
    if groups == 1 and window.kernel == (3, 3) and window.stride == window.dilation == (1, 1):
        valid += ["winograd2", "winograd4"]
    return [name for name in valid if name != chosen]


def _multiplies_pairs(x: np.ndarray, weight: np.ndarray) -> bool:
    """Whether the convolution multiplies pairs of bfloat16 at once."""
    return x.dtype == weight.dtype == BFLOAT16 and layout().has_pairs
