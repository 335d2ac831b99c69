"""Kernels on 8-bit integers, to which `fusions/integer.py` lowers convolutions and products of quantized tensors.

A tensor is stored in int8 or uint8 and stands for (x - zero_point) · scale. Images lie in memory with their channels
innermost. Sums are exact in int32; they become floats once, and are rounded once more if the result is quantized:

    y = act(sum · x_scale · scales[o] + bias[o] + residual)
    out = y, or rint(y / out_scale) + out_zero_point within low..high
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from npu_compiler.graph.model import OpNode
from npu_compiler.ops.conv import MAX_POOL, conv_window, max_pool_window
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import ByteStorage, register_op
from npu_compiler.ops.windows import convolution_products, fits_convolution, fits_pooling, reach_the_image
from npu_compiler.program.elementwise import ACTIVATION
from npu_compiler.program.kernels import Family, declare_kernel
from npu_compiler.program.products import Product
from npu_compiler.program.views import View

MOST_TERMS = 2**31 // 255**2  # of a sum that is certain to fit in int32
_CHANNELS_LAST = (0, 2, 3, 1)

# How a result is stored where it is stored in bytes, and what a residual in bytes stands for.
_RESULT: dict[str, Any] = {"out_scale": "f", "out_zero_point": "i", "low": "i", "high": "i"}
_RESIDUAL = {"residual_scale": "f", "residual_zero_point": "i"}
_PRODUCT: dict[str, Any] = {"x_scale": "f", "zero_point": "i", **_RESIDUAL, **_RESULT, "activation": ACTIVATION}


_HELD = {"int8": (-128, 127), "uint8": (0, 255)}


def _fits_bytes(call: SimpleNamespace) -> bool:
    """Whether the limits and zero points of a call lie within the ranges of the 8-bit dtypes of its operands."""
    least, most = _HELD.get(call.out.dtype, (-255, 255))
    first, last = _HELD.get(call.x.dtype, (-255, 255))
    return bool(
        first <= getattr(call, "zero_point", 0) <= last
        and least <= call.low <= call.high <= most
        and least <= call.out_zero_point <= most
    )


declare_kernel(
    "quantize_activation_kernel",
    Family.ELEMENTWISE,
    "x:f[*s] -> out:cu[*s]",
    where=_fits_bytes,
    **_RESULT,
)
declare_kernel(
    "dequantize_activation_kernel",
    Family.ELEMENTWISE,
    "x:cu[*s] -> out:f[*s]",
    x_scale="f",
    zero_point="i",
)
declare_kernel(
    "integer_conv2d_kernel",
    Family.CONV,
    "x:cu[n,c,h,w] weight:c[.o,i,kh,kw] scales:f[.o] weight_zeros?:i[.o] bias?:f[.o] residual?:fcu[n,o,p,q]"
    " -> out:fcu[n,o,p,q]",
    where=lambda call: (
        call.groups > 0
        and call.c == call.i * call.groups
        and call.o % call.groups == 0
        and call.i * call.kh * call.kw <= MOST_TERMS
        and fits_convolution(call)
        and _fits_bytes(call)
    ),
    products=convolution_products,
    stride="2I",
    padding="4i",
    dilation="2I",
    groups="I",
    **_PRODUCT,
)
declare_kernel(
    "integer_linear_kernel",
    Family.MATMUL,
    "x:cu[m,.k] weight:c[.n,k] scales:f[.n] weight_zeros?:i[.n] bias?:f[.n] residual?:fcu[m,n] -> out:fcu[m,n]",
    where=lambda call: call.k <= MOST_TERMS and _fits_bytes(call),
    products=lambda call: (Product(call.m, call.n, call.k),),
    **_PRODUCT,
)
declare_kernel(
    "integer_max_pool2d_kernel",
    Family.POOL,
    "x:cu[n,c,h,w] -> out:cu[n,c,p,q]",
    where=lambda call: call.x.dtype == call.out.dtype and fits_pooling(call) and reach_the_image(call),
    **MAX_POOL,
)
declare_kernel(
    "integer_mean_kernel",
    Family.POOL,
    "x:cu[n,c,h,w] -> out:fcu[n,c]",
    where=lambda call: call.h * call.w <= MOST_TERMS and call.h * call.w > 0 and _fits_bytes(call),
    x_scale="f",
    zero_point="i",
    **_RESULT,
)
declare_kernel(
    "integer_add_kernel",
    Family.ELEMENTWISE,
    "x:cu[*s] residual:cu[*s] -> out:fcu[*s]",
    where=_fits_bytes,
    **_PRODUCT,
)


def _packed_image(ctx: Lowering, view: View) -> View:
    """The view itself if its channels are innermost in memory without gaps, else a copy that is laid out so."""
    order = view.permute(_CHANNELS_LAST)
    if order.is_contiguous:
        return view
    temp = ctx.temp(order.shape, view.dtype)
    ctx.copy(order, temp)
    return temp.permute((0, 3, 1, 2))


def _image_output(ctx: Lowering) -> View:
    return ctx.output(order=_CHANNELS_LAST)


def _product_inputs(ctx: Lowering, node: OpNode) -> tuple[list[View], dict[str, Any]]:
    """The operands after x and the weight, and the parameters that all integer products have."""
    params = {name: node.attrs[name] for name in _PRODUCT}
    present = {name: int(bool(node.attrs[name])) for name in ("has_weight_zeros", "has_bias", "has_residual")}
    return [ctx.view(name) for name in node.inputs[2:]], {**params, **present}


@register_op("npu.quantize", tensors=("x",), byte_storage=ByteStorage.REQUIRED)
def lower_quantize(ctx: Lowering, node: OpNode) -> None:
    x = ctx.view(node.inputs[0])
    out = _image_output(ctx) if x.rank == 4 else ctx.output()
    ctx.emit("quantize_activation_kernel", [x], [out], {name: node.attrs[name] for name in _RESULT})


@register_op("npu.dequantize", tensors=("x",), byte_storage=ByteStorage.REQUIRED)
def lower_dequantize(ctx: Lowering, node: OpNode) -> None:
    params = {"x_scale": node.attrs["x_scale"], "zero_point": node.attrs["zero_point"]}
    ctx.emit("dequantize_activation_kernel", [ctx.view(node.inputs[0])], [ctx.output()], params)


@register_op(
    "npu.integer_conv2d",
    tensors=("x", "weight", "scales", "weight_zeros", "bias", "residual"),
    byte_storage=ByteStorage.REQUIRED,
    float32_parameters=True,
)
def lower_integer_conv2d(ctx: Lowering, node: OpNode) -> None:
    x, weight = ctx.view(node.inputs[0]), ctx.view(node.inputs[1])
    rest, params = _product_inputs(ctx, node)
    if params["has_residual"]:
        rest[-1] = _packed_image(ctx, rest[-1])
    out = _image_output(ctx)
    macs = out.numel * weight.shape[1] * weight.shape[2] * weight.shape[3]
    inputs = [_packed_image(ctx, x), ctx.contiguous(weight), *rest]
    ctx.emit("integer_conv2d_kernel", inputs, [out], {**params, **conv_window(node, weight.shape[2:])}, flops=2 * macs)


@register_op(
    "npu.integer_linear",
    tensors=("x", "weight", "scales", "weight_zeros", "bias", "residual"),
    byte_storage=ByteStorage.REQUIRED,
    float32_parameters=True,
)
def lower_integer_linear(ctx: Lowering, node: OpNode) -> None:
    x, weight = ctx.view(node.inputs[0]), ctx.view(node.inputs[1])
    rest, params = _product_inputs(ctx, node)

    def rows(view: View) -> View:
        return ctx.contiguous(ctx.reshaped(view, (view.numel // view.shape[-1], view.shape[-1])))

    if params["has_residual"]:
        rest[-1] = rows(rest[-1])
    out = ctx.output()
    flat = out.reshape((out.numel // out.shape[-1], out.shape[-1]))
    assert flat is not None
    inputs = [rows(x), ctx.contiguous(weight), *rest]
    ctx.emit("integer_linear_kernel", inputs, [flat], params, flops=2 * out.numel * weight.shape[1])


@register_op("npu.integer_max_pool2d", tensors=("x",), byte_storage=ByteStorage.REQUIRED)
def lower_integer_max_pool2d(ctx: Lowering, node: OpNode) -> None:
    params = max_pool_window(node)
    x, out = _packed_image(ctx, ctx.view(node.inputs[0])), _image_output(ctx)
    ctx.emit("integer_max_pool2d_kernel", [x], [out], params, flops=out.numel * math.prod(params["window"]))


@register_op("npu.integer_mean", tensors=("x",), byte_storage=ByteStorage.REQUIRED)
def lower_integer_mean(ctx: Lowering, node: OpNode) -> None:
    """Lower the mean of each channel's image; the result has the shape [n, c, …] with any number of dimensions of 1."""
    x, out = _packed_image(ctx, ctx.view(node.inputs[0])), ctx.output()
    flat = out.reshape(x.shape[:2])
    assert flat is not None
    params = {name: node.attrs[name] for name in ("x_scale", "zero_point", *_RESULT)}
    ctx.emit("integer_mean_kernel", [x], [flat], params, flops=x.numel)


@register_op("npu.integer_add", tensors=("x", "residual"), byte_storage=ByteStorage.REQUIRED)
def lower_integer_add(ctx: Lowering, node: OpNode) -> None:
    x, residual = (ctx.view(name) for name in node.inputs)
    out = _image_output(ctx) if x.rank == 4 else ctx.output()
    params = {name: node.attrs[name] for name in _PRODUCT}
    ctx.emit("integer_add_kernel", [x, residual], [out], params, flops=out.numel)
