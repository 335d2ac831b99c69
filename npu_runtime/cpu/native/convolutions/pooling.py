"""Maximum and average pooling: checks operands and prepares launches of the C++ kernels.

The functions return None for operands that the kernels do not handle, as those of `conv` do.
"""

from __future__ import annotations

import numpy as np

from npu_runtime.cpu.native.bindings import NativeLaunch, available, layout
from npu_runtime.cpu.native.convolutions import channels_last
from npu_runtime.cpu.native.convolutions.arguments import MOST_TAPS, Window, all_handled, conv_args, is_bounded
from npu_runtime.cpu.window_lengths import window_lengths


def max_pool2d(
    x: np.ndarray,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    out: np.ndarray,
) -> NativeLaunch | None:
    """Prepare a maximum pooling; None if there is no native kernel for the operands.

    The size of `out` decides about windows that reach beyond the padded input (ceil_mode).
    """
    return _pool("max_pool2d", x, Window(kernel, stride, padding, dilation), None, out)


def avg_pool2d(
    x: np.ndarray,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    out: np.ndarray,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> NativeLaunch | None:
    """Prepare an average pooling; None if there is no native kernel for the operands.

    The size of `out` decides about windows that reach beyond the padded input (ceil_mode).
    """
    if not available():
        return None
    window = Window(kernel, stride, padding)
    if divisor_override is not None:
        divisor = np.full(out.shape[2:], divisor_override, np.float32)
    else:
        rows, columns = (
            window_lengths(
                x.shape[2 + axis],
                out.shape[2 + axis],
                kernel[axis],
                stride[axis],
                padding[2 * axis],
                padding[2 * axis + 1],
                count_include_pad,
            )
            for axis in (0, 1)
        )
        divisor = rows[:, None] * columns
    # The kernel reads whole vectors.
    scale = np.pad(1 / divisor.reshape(-1), (0, layout().lanes))
    return _pool("avg_pool2d", x, window, scale, out)


def global_avg_pool2d(x: np.ndarray, out: np.ndarray) -> NativeLaunch | None:
    """Prepare the average of each channel's image into out[N, C, 1, 1]; None if there is no native kernel for it."""
    height, width = x.shape[2:]
    return avg_pool2d(x, (height, width), (1, 1), (0, 0, 0, 0), out)


def _pool(name: str, x: np.ndarray, window: Window, scale: np.ndarray | None, out: np.ndarray) -> NativeLaunch | None:
    if not window.is_valid or not available():
        return None
    window = window.simplified(out)
    if x.ndim != 4 or out.ndim != 4:
        return None
    is_whole = scale is not None and window.kernel == x.shape[2:] and not any(window.padding)
    has_many_taps = window.kernel[0] * window.kernel[1] > MOST_TAPS
    if has_many_taps and not (is_whole and out.shape[2:] == (1, 1)) or not is_bounded(window, x, out):
        return None
    if x.shape[:2] != out.shape[:2]:
        raise ValueError(f"pooling keeps batch and channels: {x.shape}, {out.shape}")
    if not window.begins_inside(x, out):
        raise ValueError(f"a window of {out.shape} begins behind the padded map of {x.shape}")
    if not all_handled(x, None, out):
        return channels_last.pool(name, x, window, scale, out)
    no_bias = np.zeros(x.shape[1], np.float32)
    args = conv_args(x, scale, no_bias, None, out, window)
    args.groups, args.in_channels, args.out_channels = x.shape[1], 1, 1
    return NativeLaunch(name, args, (x, scale, no_bias, out))
