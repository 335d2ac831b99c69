"""The calls of convolutions of images, which those of signals and of volumes become too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_compiler.ops.lowering import Lowering
from npu_compiler.program.views import View, numel

# Output channels a group needs before a convolution is better made as a matrix product than pixel by pixel.
_MATRIX_CHANNELS = 8


def emit_convolution(
    ctx: Lowering,
    x: View,
    weight: View,
    bias: View | None,
    out: View,
    settings: Mapping[str, Any],
    residual: View | None = None,
    activation: str = "none",
) -> None:
    """Emit out = activation(conv(x, weight) + bias + residual) of images [N, C, H, W].

    Args:
        settings: `stride`, `padding` (top, bottom, left, right), `dilation` and `groups`.
    """
    params = {
        **settings,
        "has_bias": int(bias is not None),
        "has_residual": int(residual is not None),
        "activation": activation,
        "direct": int(out.shape[1] // settings["groups"] < _MATRIX_CHANNELS),
    }
    inputs = [ctx.inner_contiguous(x, 3), ctx.contiguous(weight)]
    inputs += [ctx.contiguous(bias)] if bias is not None else []
    inputs += [residual] if residual is not None else []
    ctx.emit("conv2d_kernel", inputs, [out], params, flops=2 * out.numel * numel(weight.shape[1:]))


def emit_transposed_convolution(
    ctx: Lowering, x: View, weight: View, bias: View | None, out: View, settings: Mapping[str, Any]
) -> None:
    """Emit out = transposed conv(x, weight) + bias of images [N, C, H, W].

    Args:
        settings: `stride`, `padding`, `output_padding` and `dilation`, each of height and width, and `groups`.
    """
    inputs = [ctx.contiguous(x), ctx.contiguous(weight), *([] if bias is None else [ctx.contiguous(bias)])]
    params = {**settings, "has_bias": int(bias is not None)}
    ctx.emit("conv_transpose2d_kernel", inputs, [out], params, flops=2 * x.numel * numel(weight.shape[1:]))
