"""Quantizing activations and weights: a float x becomes the integer rint(x / scale) + zero_point, clamped to limits.

These are the ops that PyTorch's PT2E quantization leaves in a graph, lowered to element-wise kernels. For a device that
multiplies integers, `fusions/integer.py` fuses the ops between them into integer kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from npu_compiler.graph.dtypes import INT_DTYPES, numpy_dtype
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import Args, ByteStorage, Range, Scalar, operand, register_op
from npu_compiler.program.elementwise import Elementwise, add_elementwise
from npu_compiler.program.views import View, numel

_CODE = "rint(a * (1 / b)) + c"
add_elementwise(
    Elementwise(
        "quantize",
        ("input", "scale", "zero_point"),
        f"{_CODE} < low ? low : {_CODE} > high ? high : {_CODE}",
        None,
        "npu.quantize",
        {"low": -128.0, "high": 127.0},
        bytes=True,
    )
)
add_elementwise(
    Elementwise("dequantize", ("input", "scale", "zero_point"), "(a - c) * b", None, "npu.dequantize", bytes=True)
)


def limits(node: OpNode) -> Range:
    """The smallest and largest integer that a quantizing or dequantizing node allows.

    Raises:
        ValueError: there is none, or one that the integers' dtype does not hold.
    """
    args = Args(node)
    given = (args.attr(name) for name in ("dtype", "output_dtype", "input_dtype"))
    dtype = next((x for x in given if x is not None), None)
    if dtype not in INT_DTYPES:
        raise ValueError(f"it quantizes to {dtype}, which is no integer dtype")
    least, most = _held_by(dtype)
    low, high = int(args.attr("quant_min", least)), int(args.attr("quant_max", most))
    if not least <= low < high <= most:
        raise ValueError(f"its limits {low}..{high} are no range within {dtype}")
    return low, high


def _held_by(dtype: str) -> Range:
    info = numpy_dtype(dtype)
    bits = 8 * info.itemsize
    return (0, 2**bits - 1) if info.kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def check_parameters(scale: Scalar, zero_point: Scalar, low: int, high: int) -> None:
    """Raise `ValueError` unless the scale is finite and above 0, and the zero point an integer in low..high."""
    if not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale <= 0:
        raise ValueError(f"its scale is {scale}; a scale is a finite number above 0")
    if not isinstance(zero_point, int) or not low <= zero_point <= high:
        raise ValueError(f"its zero point {zero_point} is outside {low}..{high}")


def _unsupported(node: OpNode, graph: IRGraph) -> str | None:
    low, high = limits(node)
    args = Args(node)
    if args.tensor("scale") is None and args.tensor("scales") is None:
        check_parameters(node.attrs["scale"], node.attrs["zero_point"], low, high)
    if max(abs(low), abs(high)) > 2**24:
        return f"quantizing to {low}..{high}, of which float32 does not hold every integer"
    return None


def _range(node: OpNode, graph: IRGraph, ranges: object) -> Range:
    return limits(node)


_QUANTIZED_DECOMPOSED = "quantized_decomposed"
_PER_TENSOR = ("input", "scale", "zero_point")
_PER_CHANNEL = ("input", "scales", "zero_points")


def _emit(ctx: Lowering, node: OpNode, x: View, scale: View | Scalar, zero_point: View | Scalar, out: View) -> None:
    """Emit the element-wise call of a quantizing or dequantizing node; scale and zero point broadcast to x."""
    name = node.op_type.split(".")[1]
    if name.startswith("dequantize"):
        ctx.elementwise("dequantize", [x, scale, zero_point], out)  # type: ignore[list-item]
    else:
        low, high = limits(node)
        params = {"low": float(low), "high": float(high)}
        ctx.elementwise("quantize", [x, scale, zero_point], out, params)  # type: ignore[list-item]


def _names(*ops: str) -> str:
    return " ".join(f"{_QUANTIZED_DECOMPOSED}.{op}" for op in ops)


def _float(value: View | Scalar) -> View | Scalar:
    return value if isinstance(value, View) else float(value)


@register_op(
    _names("quantize_per_tensor.default", "quantize_per_tensor.tensor"),
    tensors=_PER_TENSOR,
    unsupported=_unsupported,
    integer_range=_range,
    byte_storage=ByteStorage.ALLOWED,
    saturates=True,
)
@register_op(
    _names("dequantize_per_tensor.default", "dequantize_per_tensor.tensor"),
    tensors=_PER_TENSOR,
    unsupported=_unsupported,
    byte_storage=ByteStorage.ALLOWED,
)
def lower_per_tensor(ctx: Lowering, node: OpNode) -> None:
    args = Args(node)
    x, scale, zero_point = (operand(ctx, args, name) for name in _PER_TENSOR)
    assert isinstance(x, View)
    _emit(ctx, node, x, _float(_single(scale)), _float(_single(zero_point)), ctx.output())


def _single(value: View | Scalar) -> View | Scalar:
    """A tensor of one element as one without dimensions, which broadcasts to any shape; a number as it is."""
    shaped = value.reshape(()) if isinstance(value, View) else value
    if shaped is None:
        raise ValueError("a scale or zero point of a whole tensor has more than one element")
    return shaped


@register_op(
    _names("quantize_per_channel.default"),
    tensors=_PER_CHANNEL,
    unsupported=_unsupported,
    integer_range=_range,
    byte_storage=ByteStorage.ALLOWED,
    saturates=True,
)
@register_op(
    _names("dequantize_per_channel.default"),
    tensors=_PER_CHANNEL,
    unsupported=_unsupported,
    byte_storage=ByteStorage.ALLOWED,
)
def lower_per_channel(ctx: Lowering, node: OpNode) -> None:
    args = Args(node)
    x = ctx.view(node.inputs[0])
    axis = x.dim(args.attr("axis"))

    def along_axis(name: str) -> View | Scalar:
        tensor = args.tensor(name)
        if tensor is None:
            return 0.0
        shaped = ctx.view(tensor).reshape(tuple(x.shape[axis] if dim == axis else 1 for dim in range(x.rank)))
        if shaped is None:
            raise ValueError(f"its {name} have shape {list(ctx.view(tensor).shape)}, not [{x.shape[axis]}]")
        return shaped

    _emit(ctx, node, x, along_axis("scales"), along_axis("zero_points"), ctx.output())


def _affine_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    shape, blocks = graph.tensors[node.inputs[0]].shape, node.attrs["block_size"]
    _split(shape, blocks)
    return _unsupported(node, graph)


def _split(shape: Sequence[int], blocks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Two shapes in which each dimension is two, (number of blocks, block size): of the tensor, and of its parameters.

    In the second, the block size is 1, so that each block has one parameter.
    """
    sizes = [size if block == -1 else block for size, block in zip(shape, blocks, strict=True)]
    if any(block < 1 or size % block for size, block in zip(shape, sizes, strict=True)):
        raise ValueError(f"blocks of {list(blocks)} do not divide the shape {list(shape)}")
    pairs = [(size // block, block) for size, block in zip(shape, sizes, strict=True)]
    return [x for pair in pairs for x in pair], [x for count, _ in pairs for x in (count, 1)]


@register_op(
    "torchao.quantize_affine.default",
    tensors=_PER_TENSOR,
    unsupported=_affine_unsupported,
    integer_range=_range,
    byte_storage=ByteStorage.ALLOWED,
    saturates=True,
)
@register_op(
    "torchao.dequantize_affine.default",
    tensors=_PER_TENSOR,
    unsupported=_affine_unsupported,
    byte_storage=ByteStorage.ALLOWED,
)
def lower_affine(ctx: Lowering, node: OpNode) -> None:
    """Lower quantization with a scale and a zero point for each block of a tensor.

    A block may have any size along each dimension.
    """
    args = Args(node)
    x = ctx.view(node.inputs[0])
    split, per_block = _split(x.shape, node.attrs["block_size"])
    kept = [dim for dim, size in enumerate(split) if size > 1]

    def blocks(view: View, sizes: Sequence[int]) -> View:
        return ctx.reshaped(view, tuple(sizes[dim] for dim in kept))

    def parameter(name: str) -> View | Scalar:
        tensor = args.tensor(name)
        if tensor is None:
            return 0.0
        if numel(ctx.view(tensor).shape) != numel(per_block):
            raise ValueError(f"its {name} has shape {list(ctx.view(tensor).shape)}, not one for each block")
        return blocks(ctx.view(tensor), per_block)

    out = ctx.output()
    _emit(ctx, node, blocks(x, split), parameter("scale"), parameter("zero_point"), blocks(out, split))
