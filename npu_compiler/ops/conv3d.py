"""Convolutions of volumes: each window becomes a row, and the product with the weight is a linear layer."""

from __future__ import annotations

from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.matmul import emit_linear
from npu_compiler.ops.registry import register_op
from npu_compiler.program.views import View, numel

MOST_UNFOLDED = 2**26  # elements of all windows


def _per_axis(node: OpNode, name: str, default: int) -> list[int]:
    value = node.attrs.get(name, default)
    listed = [value] if isinstance(value, int) else list(value)
    return listed * 3 if len(listed) == 1 else listed


def _unsupported(node: OpNode, graph: IRGraph) -> str | None:
    x, weight = (graph.tensors[name].shape for name in node.inputs[:2])
    out = graph.tensors[node.outputs[0]].shape
    if len(x) != 5 or node.attrs.get("groups", 1) != 1 or isinstance(node.attrs.get("padding"), str):
        return "a convolution of volumes that is grouped, has no batch, or names its padding"
    unfolded = numel(out) // max(weight[0], 1) * numel(weight[1:])
    return f"a convolution of volumes whose windows hold {unfolded} elements" if unfolded > MOST_UNFOLDED else None


@register_op("aten.conv3d", tensors=("input", "weight", "bias"), unsupported=_unsupported, one_dtype=True)
def lower_conv3d(ctx: Lowering, node: OpNode) -> None:
    x, weight, *biases = (ctx.view(name) for name in node.inputs)
    out = ctx.output(order=(0, 2, 3, 4, 1))
    windows = _windows(ctx, _padded(ctx, x, _per_axis(node, "padding", 0)), node, weight, out)
    rows = ctx.reshaped(windows, (numel(windows.shape[:4]), numel(windows.shape[4:])))
    flat = ctx.reshaped(weight, (weight.shape[0], rows.shape[1]))
    emit_linear(ctx, rows, flat, out.permute([0, 2, 3, 4, 1]), biases[0] if biases else None)


def _padded(ctx: Lowering, x: View, padding: list[int]) -> View:
    """A copy with zeros around it."""
    if not any(padding):
        return x
    shape = (*x.shape[:2], *(size + 2 * pad for size, pad in zip(x.shape[2:], padding, strict=True)))
    padded = ctx.temp(shape, x.dtype)
    pads = [pad for each in reversed(padding) for pad in (each, each)]
    params = {"mode": "constant", "pads": pads + [0] * (12 - len(pads)), "value": 0.0, "int_value": 0}
    ctx.emit("pad_kernel", [x], [padded], params)
    return padded


def _windows(ctx: Lowering, x: View, node: OpNode, weight: View, out: View) -> View:
    """[batch, *places, channels, *taps]: a view in which windows overlap."""
    stride, dilation = _per_axis(node, "stride", 1), _per_axis(node, "dilation", 1)
    batch, channel, *axes = x.strides
    steps = [size * step for size, step in zip(axes, stride, strict=True)]
    taps = [size * gap for size, gap in zip(axes, dilation, strict=True)]
    shape = (x.shape[0], *out.shape[2:], *weight.shape[1:])
    return View(x.buffer, shape, (batch, *steps, channel, *taps), x.offset, x.dtype)
