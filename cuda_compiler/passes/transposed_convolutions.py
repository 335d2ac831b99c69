"""Turns transposed convolutions into convolutions, which tensor cores compute.

Given:   y = conv_transpose2d(x: [1, 64, 7, 7], w: [64, 32, 4, 4], stride 2, padding 1), which is [1, 32, 14, 14]
Result:  prologue: f = flip(w);  w' = copy(f), which is [4 * 32, 64, 2, 2]
         y = conv2d(x, w', padding 1), each of whose 8 × 8 windows makes 2 × 2 pixels of y

An output pixel meets only every second tap here, and the pixels within one stride meet different taps of the same
window. So each of these pixels has channels of its own, and the kernel stores them where the pixel lies. Windows at the
edges make some pixels outside of y, which are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cuda_compiler.passes.packed_operands import PackedOperands, copy
from cuda_compiler.rules.channel_packs import PACK, is_packed
from cuda_compiler.rules.conv import CONSTANT_WEIGHT
from npu_compiler.graph.dtypes import HALF_DTYPES, is_float
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import BufferKind
from npu_compiler.program.views import View, numel

TRANSPOSED = "conv_transpose2d_kernel"


@dataclass(frozen=True)
class _Axis:
    """The windows of a transposed convolution along one axis.

    Attributes:
        step: Pixels that a window makes.
        taps: Taps of a window.
        before, beyond: Padding of the input; `beyond` may be negative.
        crop: Pixels of the first window that lie before the first output pixel.
        windows: Number of windows.
    """

    step: int
    taps: int
    before: int
    beyond: int
    crop: int
    windows: int

    @staticmethod
    def of(taps: int, step: int, padding: int, gap: int, size: int, made: int) -> _Axis | None:
        """The windows for a weight of `taps` taps, `gap` apart, from `size` to `made` pixels; None if there are none.

        There are none if some output pixels meet no tap or only padding, or if taps lie apart between strides.
        """
        if step > 1 and (gap > 1 or taps < step):
            return None
        of_window = -(-taps // step)
        first, crop = divmod(padding, step)
        windows, before = -(-(made + crop) // step), gap * (of_window - 1) - first
        beyond = windows + first - size
        return _Axis(step, of_window, before, beyond, crop, windows) if before >= 0 else None


def as_convolution(call: KernelCall, operands: PackedOperands) -> list[KernelCall] | None:
    """The calls of a `conv2d_kernel` over packed operands instead of a transposed convolution.

    The convolution has further parameters: `spread`, rows and columns of the pixels that a window makes; `crop`, how
    many of these lie before the first row and column of the output; and `windows`, rows and columns of windows.

    Args:
        operands: The plan under construction, which the copies of the operands are added to.

    Returns:
        None if tensor cores do not take it: operands that are not 16-bit, or groups of a number of input channels that
        is not whole packs, as in depthwise convolutions.
    """
    x, weight, bias, out = KERNELS[TRANSPOSED].bind(call)
    assert x is not None and weight is not None and out is not None
    parts, gaps = call.params["groups"], call.params["dilation"]
    of_halves = x.dtype == out.dtype and x.dtype in HALF_DTYPES and is_float(weight.dtype)
    in_packs = parts == 1 or x.shape[1] // parts % PACK == 0
    if not (of_halves and in_packs):
        return None
    sizes = (weight.shape[2:], call.params["stride"], call.params["padding"], gaps, x.shape[2:], out.shape[2:])
    rows, columns = (_Axis.of(*along) for along in zip(*sizes, strict=True))
    if rows is None or columns is None:
        return None
    x = operands.input(x, x.shape[1] + -x.shape[1] % PACK, call.node, aligned=True)
    arranged = _arranged(weight, x, parts, (rows, columns), call.node, operands)
    result = out if is_packed(out, 1) else operands.buffer(f"{call.node}.out", out.shape, out.dtype, "arena")
    params = {
        "stride": [1, 1],
        "padding": [rows.before, rows.beyond, columns.before, columns.beyond],
        "dilation": list(gaps),
        "groups": parts,
        "activation": "none",
        "direct": False,
        "has_bias": int(bias is not None),
        "has_residual": 0,
        CONSTANT_WEIGHT: operands.is_constant(weight),
        "spread": [rows.step, columns.step],
        "crop": [rows.crop, columns.crop],
        "windows": [rows.windows, columns.windows],
    }
    inputs = tuple(view for view in (x, arranged, bias) if view is not None)
    convolution = replace(call, kernel="conv2d_kernel", inputs=inputs, outputs=(result,), params=params)
    return [convolution, *([copy(result, out, call.node)] if result is not out else [])]


def _arranged(weight: View, x: View, parts: int, axes: Sequence[_Axis], node: str, operands: PackedOperands) -> View:
    """The weight of the convolution, in memory [O', kh', kw', I / parts], by new calls.

    These are of the prologue if the weight is constant.

    Its channels O' are those of each group, for each pixel of a window, the last one first.

    Args:
        weight: [I, O / parts, kh, kw], whose taps are padded to whole strides and whose input channels to those of x.
    """
    rows, columns = axes
    inputs, made = x.shape[1], weight.shape[1]
    shape = (inputs, made, rows.taps * rows.step, columns.taps * columns.step)
    order = (0, 1, 2, 3)
    constant = operands.is_constant(weight)
    kind: BufferKind = "persistent" if constant else "arena"
    calls = operands.prologue if constant else operands.calls
    if weight.shape != shape:
        pads = [pad for size, whole in zip(weight.shape[::-1], shape[::-1], strict=True) for pad in (0, whole - size)]
        padded = operands.buffer(f"{node}.padded", shape, weight.dtype, kind, order)
        params = {"mode": "constant", "pads": [*pads, 0, 0, 0, 0], "value": 0.0, "int_value": 0}
        calls.append(KernelCall("pad_kernel", "", (weight,), (padded,), params, node))
        weight = padded
    if numel(shape[2:]) > 1:
        flipped = operands.buffer(f"{node}.flipped", shape, weight.dtype, kind, order)
        params = {"dims": [0, 0, 1, 1, 0, 0, 0, 0]}
        calls.append(KernelCall("flip_kernel", "", (weight,), (flipped,), params, node))
        weight = flipped
    channels = parts * rows.step * columns.step * made
    window = (rows.taps, columns.taps)
    result = operands.buffer(f"{node}.weight", (channels, inputs // parts, *window), x.dtype, kind)
    taps = (rows.taps, rows.step, columns.taps, columns.step)
    by_pixel = weight.reshape((parts, inputs // parts, made, *taps))
    assert by_pixel is not None
    memory = (parts, rows.step, columns.step, made, *window, inputs // parts)
    target = result.permute((0, 2, 3, 1)).reshape(memory)
    assert target is not None
    calls.append(copy(by_pixel.permute((0, 4, 6, 2, 3, 5, 1)), target, node))
    return result
