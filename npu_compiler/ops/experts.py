"""Mixture-of-experts products: each row is multiplied with the matrix of the expert that it is routed to.

The CPU device sorts the rows by expert, so that it reads the matrix of each expert once, and none of an expert without
rows. GPU kernels compute some rows of an expert together, or read a matrix for each row.
"""

from __future__ import annotations

from types import SimpleNamespace

from npu_compiler.graph.dtypes import is_int
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.matmul import packed_rows
from npu_compiler.ops.quantized import QUANTIZED_FIELDS, QUANTIZED_WEIGHT, quantized_parts, stores_rows
from npu_compiler.ops.reductions import reduce
from npu_compiler.ops.registry import Args, QuantizedRule, register_op
from npu_compiler.ops.tensor import emit_arange
from npu_compiler.program.kernels import Family, Grid, declare_kernel, distinct_bytes
from npu_compiler.program.products import Product
from npu_compiler.program.views import View


def _shares_rows(call: SimpleNamespace) -> bool:
    """Whether the number of output rows is a multiple of the rows of x, each of which then serves several of them."""
    return bool(call.r > 0 and call.m % call.r == 0)


def _shares_quantized_rows(call: SimpleNamespace) -> bool:
    return _shares_rows(call) and bool(call.n > 0 and call.rows == call.e * call.n) and stores_rows(call)


def _products(call: SimpleNamespace) -> tuple[Product, ...]:
    return (Product(call.m, call.n, call.k),)


declare_kernel(
    "expert_matmul_kernel",
    Family.MATMUL,
    "x:f[r,.k] weight:f[e,n,k] experts:i[.m] bias?:f[e,.n] -> out:f[m,n]",
    source="experts.metal",
    grid=Grid.PLANES,
    where=_shares_rows,
    products=_products,
    e="I",
    k="I",
)
declare_kernel(
    "quantized_expert_matmul_kernel",
    Family.MATMUL,
    f"x:f[r,.k] {QUANTIZED_WEIGHT.format(rows='rows')} experts:i[.m] bias?:f[e,.n] -> out:f[m,n]",
    source="quantized.metal",
    grid=Grid.PLANES,
    where=_shares_quantized_rows,
    products=_products,
    e="I",
    **QUANTIZED_FIELDS,
)


def _unsupported(node: OpNode, graph: IRGraph) -> str | None:
    shapes = [graph.tensors[name].shape for name in node.inputs]
    (rows, *_), weight, (pairs, *_), *bias = shapes
    columns = graph.tensors[node.outputs[0]].shape[-1]
    ranks = [len(shape) for shape in shapes]
    if ranks[1] not in (2, 3) or [ranks[0], *ranks[2:]] != [2, 1, *[2] * len(bias)] or not rows or pairs % rows:
        return f"a product by experts of {rows} rows for {pairs} outputs"
    if not columns or not weight[0] or (weight[1] != columns if ranks[1] == 3 else weight[0] % columns):
        return f"a product by experts whose weight {list(weight)} holds no whole matrices of {columns} rows"
    if not is_int(graph.tensors[node.inputs[2]].dtype):
        return "a product by experts that are not integers"
    return None


@register_op(
    "npu.expert_linear",
    tensors=("input", "weight", "experts", "bias"),
    unsupported=_unsupported,
    one_dtype=True,
    quantized=QuantizedRule(1, "npu.quantized_expert_linear"),
)
def lower_expert_linear(ctx: Lowering, node: OpNode) -> None:
    """Lower out[m] = input[m · R // M] · weight[experts[m]]ᵀ + bias[experts[m]].

    Input [R, K], weight [E · N, K] or [E, N, K], experts [M], bias [E, N] → [M, N]. A row whose expert is not in
    0..E - 1 is 0.
    """
    x, weight, experts, *bias = (ctx.view(name) for name in node.inputs)
    n = ctx.output().shape[1]
    matrices = weight if weight.rank == 3 else weight.reshape((weight.shape[0] // n, n, weight.shape[1]))
    assert matrices is not None
    _emit(ctx, x, matrices, experts, bias, ctx.output())


def _emit(ctx: Lowering, x: View, weight: View, experts: View, bias: list[View], out: View) -> None:
    """Emit the product of rows with dense expert matrices [E, N, K]."""
    rows = packed_rows(ctx, x)
    inputs = [rows, weight, ctx.inner_contiguous(experts), *map(ctx.inner_contiguous, bias)]
    count, k = weight.shape[0], rows.shape[1]
    params = {"e": count, "k": k, "has_bias": int(bool(bias))}
    read = distinct_bytes(weight) * min(count, out.shape[0]) // max(count, 1)
    others = sum(distinct_bytes(view) for view in (rows, *inputs[2:], out))
    ctx.emit("expert_matmul_kernel", inputs, [out], params, flops=2 * out.numel * k, bytes_moved=read + others)


@register_op("npu.quantized_expert_linear", tensors=("input", "codes", "scales", "offsets", "experts", "bias"))
def lower_quantized_expert_linear(ctx: Lowering, node: OpNode) -> None:
    """Lower `npu.expert_linear` with a quantized weight."""
    parts, (experts, *bias), params = quantized_parts(ctx, node, 1)
    rows, out = packed_rows(ctx, ctx.view(node.inputs[0])), ctx.output()
    inputs = [rows, *parts, ctx.inner_contiguous(experts), *map(ctx.inner_contiguous, bias)]
    count = parts[0].shape[0] // out.shape[1]
    params |= {"e": count, "has_bias": int(bool(bias))}
    read = sum(map(distinct_bytes, parts)) * min(count, out.shape[0]) // count
    others = sum(distinct_bytes(view) for view in (rows, *inputs[1 + len(parts) :], out))
    flops = 2 * out.numel * rows.shape[1]
    ctx.emit("quantized_expert_matmul_kernel", inputs, [out], params, flops=flops, bytes_moved=read + others)


def _grouped_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    shapes = [graph.tensors[name].shape for name in node.inputs]
    if [len(shape) for shape in shapes] != [2, 3, 1] or node.attrs.get("out_dtype"):
        return "a grouped product other than of rows with a matrix for each group"
    return None


@register_op(
    "transformers.grouped_mm_fallback.default aten._grouped_mm",
    tensors=("input", "weight", "offs"),
    unsupported=_grouped_unsupported,
    one_dtype=True,
)
def lower_grouped_product(ctx: Lowering, node: OpNode) -> None:
    """Lower a product of row groups with one matrix each; group i ends before row `offs[i]`.

    Rows after the last group are 0.
    """
    args = Args(node)
    names = [args.tensor(name) for name in ("input", "weight", "offs")]
    rows, weight, ends = (ctx.view(name) for name in names if name is not None)
    count, groups = rows.shape[0], weight.shape[0]
    place, group = ctx.temp((count,), "int32"), ctx.temp((count,), "int32")
    emit_arange(ctx, place, 0, 1)
    ended = ctx.temp((count, groups), "bool")
    ctx.elementwise("le", [ends.unsqueeze(0).expand(ended.shape), place.unsqueeze(1).expand(ended.shape)], ended)
    reduce(ctx, "sum", ctx.cast(ended, "int32"), -1, group)
    _emit(ctx, rows, weight.transpose(1, 2), group, [], ctx.output())
