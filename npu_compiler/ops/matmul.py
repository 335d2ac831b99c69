"""Matrix products: linear layers (epilogue included), batched products, and the einsums that reduce to them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from npu_compiler.graph.dtypes import is_int
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops import ranges
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.ranges import by_operands
from npu_compiler.ops.registry import Args, QuantizedRule, Range, register_op
from npu_compiler.ops.sharding import shard_linear
from npu_compiler.program.elementwise import ACTIVATION
from npu_compiler.program.kernels import Family, Grid, declare_kernel
from npu_compiler.program.products import Product
from npu_compiler.program.views import Shape, View, numel

for _name, _grid, _rows_of_x, _packed in (
    ("matmul_kernel", Grid.TILES, "m", 1),
    ("matmul_notrans_kernel", Grid.TILES, "m", 0),
    ("matmul_vec_kernel", Grid.COLUMNS, "1", 1),
    ("matmul_vec_notrans_kernel", Grid.COLUMN_BLOCKS, "1", 0),
):
    declare_kernel(
        _name,
        Family.MATMUL,
        f"x:f[{_rows_of_x},.k] weight:f[n,k] bias?:f[.n] residual?:f[m,.n] -> out:f[m,n]",
        source="matmul.metal",
        grid=_grid,
        where=lambda call, dim=_packed: call.weight.strides[dim] == 1 or call.weight.shape[dim] == 1,  # type: ignore[misc]
        products=lambda call: (Product(call.m, call.n, call.k),),
        m="I",
        n="I",
        k="I",
        activation=ACTIVATION,
    )
declare_kernel(
    "linear_epilogue_kernel",
    Family.MATMUL,
    "product:f[m,n] bias?:f[n] residual?:f[m,n] -> out:f[m,n]",
    source="matmul.metal",
    grid=Grid.PLANES,
    activation=ACTIVATION,
)
declare_kernel(
    "gated_matmul_vec_kernel",
    Family.MATMUL,
    "x:f[1,.k] weight:f[rows,.k] bias?:f[.rows] -> out:f[m,n]",
    source="matmul.metal",
    grid=Grid.COLUMNS,
    where=lambda call: call.m == 1 and call.rows == 2 * call.n,
    products=lambda call: (Product(1, call.rows, call.k),),
    m="I",
    n="I",
    k="I",
    activation=ACTIVATION,
)
declare_kernel(
    "batched_matmul_kernel",
    Family.MATMUL,
    "a:fi[*lead,m,k] b:fi[*lead,k,n] -> out:fi[*lead,m,n]",
    source="matmul.metal",
    grid=Grid.TILES,
    where=lambda call: call.batch == numel(call.lead),
    products=lambda call: (Product(call.m, call.n, call.k, call.batch),),
    m="I",
    n="I",
    k="I",
    batch="I",
    scale="f",
    transpose_b="?",
)


def packed_rows(ctx: Lowering, view: View) -> View:
    """A view […, K] as rows [M, K] that are contiguous along K; copies if necessary."""
    shape = (numel(view.shape[:-1]), view.shape[-1])
    return ctx.inner_contiguous(ctx.reshaped(view, shape))


def emit_linear(
    ctx: Lowering,
    x: View,
    weight: View,
    out: View,
    bias: View | None = None,
    residual: View | None = None,
    activation: str = "none",
) -> None:
    """Emit out[M, N] = act(x[M, K] · weight[N, K]ᵀ + bias) + residual; `weight` may be a transposed view."""
    if is_int(x.dtype) and activation in ("none", "relu"):  # PyTorch has no other activation of integers
        _emit_integer_linear(ctx, x, weight, out, bias, residual, activation)
        return
    rows, out_rows = packed_rows(ctx, x), out.reshape((numel(out.shape[:-1]), out.shape[-1]))
    assert out_rows is not None
    m, k = rows.shape
    n = weight.shape[0]
    transposed = weight.strides[1] == 1 or k == 1
    if not transposed and weight.strides[0] != 1:
        weight, transposed = ctx.contiguous(weight), True
    inputs = [rows, weight]
    if bias is not None:
        inputs.append(ctx.inner_contiguous(bias.expand((n,))) if bias.strides[-1:] != (0,) else ctx.contiguous(bias))
    if residual is not None:
        inputs.append(packed_rows(ctx, residual.expand(out.shape)))
    kernel, source = ctx.target.matmul_kernel(is_vec=m == 1, transpose_b=transposed)
    params = {
        "m": m,
        "n": n,
        "k": k,
        "has_bias": int(bias is not None),
        "has_residual": int(residual is not None),
        "activation": activation,
    }
    ctx.emit(kernel, inputs, [out_rows], params, flops=2 * m * n * k, source=source)


def _emit_integer_linear(
    ctx: Lowering, x: View, weight: View, out: View, bias: View | None, residual: View | None, activation: str
) -> None:
    """Emit a linear of integers by the batched kernel, as the linear kernels sum in float, inexact beyond 2^24."""
    steps: list[tuple[str, list[View]]] = [("add", [bias])] if bias is not None else []
    steps += [(activation, [])] if activation != "none" else []
    steps += [("add", [residual])] if residual is not None else []
    if not steps and out.dtype != x.dtype:
        steps = [("copy", [])]
    value = ctx.temp(out.shape, x.dtype) if steps else out
    emit_batched(ctx, x, weight.transpose(0, 1), value)
    for index, (op, addend) in enumerate(steps):
        result = out if index == len(steps) - 1 else ctx.temp(out.shape, x.dtype)
        ctx.elementwise(op, [value, *addend], result)
        value = result


def emit_batched(ctx: Lowering, a: View, b: View, out: View, scale: float = 1.0) -> None:
    """Emit out[…, M, N] = scale · a[…, M, K] · b[…, K, N] with broadcast batch dimensions; integers are exact."""
    batch = out.shape[:-2]
    (m, k), n = a.shape[-2:], b.shape[-1]
    a, b = a.expand((*batch, m, k)), b.expand((*batch, k, n))
    params = {
        "m": m,
        "n": n,
        "k": k,
        "batch": numel(batch),
        "transpose_b": int(b.strides[-2] == 1),
        "scale": scale,
    }
    ctx.emit("batched_matmul_kernel", [a, b], [out], params, flops=2 * numel(batch) * m * n * k)


def emit_matmul(ctx: Lowering, a: View, b: View, out: View, scale: float = 1.0) -> None:
    """Emit torch.matmul: vectors become matrices, and a product with a 2-D right side is one flat product."""
    if a.rank == 1:
        a, out = a.unsqueeze(0), out.unsqueeze(out.rank - (b.rank > 1))
    if b.rank == 1:
        b, out = b.unsqueeze(1), out.unsqueeze(out.rank)
    if b.rank == 2 and scale == 1.0 and out.reshape((numel(out.shape[:-1]), out.shape[-1])) is not None:
        emit_linear(ctx, a, b.transpose(0, 1), out)
    else:
        emit_batched(ctx, a, b, out, scale)


def _linear_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    shapes = [graph.tensors[name].shape for name in node.inputs[2:]]
    return f"linear with a bias of shape {list(shapes[0])}" if shapes and len(shapes[0]) > 1 else None


def _product_range(node: OpNode, graph: IRGraph, operand_ranges: Mapping[str, Range]) -> Range:
    """The integer range of a product of the first two inputs, plus the third one if there is one."""
    a, b, *bias = (operand_ranges[name] for name in node.inputs)
    products = ranges.total(ranges.mul(a, b), ranges.along(graph.tensors[node.inputs[0]].shape, -1))
    return ranges.add(products, bias[0]) if bias else products


@register_op(
    "aten.linear",
    tensors=("input", "weight", "bias"),
    unsupported=_linear_unsupported,
    integer_range=_product_range,
    channel_axis=lambda node: 0,
    one_dtype=True,
    quantized=QuantizedRule(1, "npu.quantized_linear"),
    shard=shard_linear,
)
def lower_linear(ctx: Lowering, node: OpNode) -> None:
    x, weight, *bias = (ctx.view(name) for name in node.inputs)
    if x.rank == 1 or weight.rank == 1:
        shape = ctx.spec(node.outputs[0]).shape
        out = ctx.output().reshape((*(shape if x.rank > 1 else (1, *shape)), *((1,) if weight.rank == 1 else ())))
        assert out is not None
        x = x.unsqueeze(0) if x.rank == 1 else x
        weight = weight.unsqueeze(0) if weight.rank == 1 else weight
    else:
        out = ctx.output()
    emit_linear(ctx, x, weight, out, bias[0] if bias else None)


@register_op(
    "npu.linear",
    tensors=("input", "weight", "bias", "residual"),
    quantized=QuantizedRule(1, "npu.quantized_linear"),
    shard=shard_linear,
)
def lower_fused_linear(ctx: Lowering, node: OpNode) -> None:
    """Lower a linear with its epilogue; attributes say which of bias and residual there are."""
    views = [ctx.view(name) for name in node.inputs]
    x, weight = views[:2]
    rest = views[2:]
    bias = rest.pop(0) if node.attrs.get("has_bias") else None
    residual = rest.pop(0) if node.attrs.get("has_residual") else None
    emit_linear(ctx, x, weight, ctx.output(), bias, residual, node.attrs.get("activation", "none"))


@register_op(
    "npu.gated_linear",
    tensors=("input", "weight", "bias"),
    quantized=QuantizedRule(1, "npu.quantized_gated_linear"),
)
def lower_gated_linear(ctx: Lowering, node: OpNode) -> None:
    """Lower act(x · gateᵀ) · (x · upᵀ) for one row x; the weight [2N, K] holds the rows of gate, then those of up."""
    x, weight, *bias = (ctx.view(name) for name in node.inputs)
    row, out = packed_rows(ctx, x), ctx.output()
    out_row = out.reshape((1, out.numel))
    assert out_row is not None
    n, k = out.numel, row.shape[1]
    params = {"m": 1, "n": n, "k": k, "has_bias": int(bool(bias)), "activation": node.attrs["activation"]}
    ctx.emit("gated_matmul_vec_kernel", [row, weight, *bias], [out_row], params, flops=4 * n * k)


@register_op(
    "aten.matmul aten.mm aten.bmm aten.mv aten.dot aten.vdot",
    tensors=("self", "other"),
    one_dtype=True,
    integer_range=_product_range,
)
def lower_matmul(ctx: Lowering, node: OpNode) -> None:
    a, b = (ctx.view(name) for name in node.inputs)
    emit_matmul(ctx, a, b, ctx.output())


def _addmm_range(node: OpNode, graph: IRGraph, operand_ranges: Mapping[str, Range]) -> Range:
    addend, a, b = (operand_ranges[name] for name in node.inputs)
    alpha, beta = (ranges.of_scalar(node.attrs.get(name, 1)) for name in ("alpha", "beta"))
    products = ranges.total(ranges.mul(a, b), ranges.along(graph.tensors[node.inputs[1]].shape, -1))
    return ranges.add(ranges.mul(products, alpha), addend, beta)


@register_op(
    "aten.addmm aten.baddbmm aten.addmv",
    tensors=("self", "mat1", "mat2"),
    one_dtype=True,
    integer_range=_addmm_range,
)
def lower_addmm(ctx: Lowering, node: OpNode) -> None:
    """Lower beta · self + alpha · (mat1 · mat2)."""
    args = Args(node)
    addend, a, b = (ctx.view(name) for name in node.inputs)
    out = ctx.output()
    whole = is_int(out.dtype)  # PyTorch cuts the factors of integers
    alpha, beta = (int(x) if whole else x + 0 for x in (args.attr("alpha", 1), args.attr("beta", 1)))
    if (alpha, beta) == (1, 1) and b.rank == 2 and addend.rank == 1:
        emit_linear(ctx, a, b.transpose(0, 1), out, addend)
        return
    product = ctx.temp(out.shape, _sum_dtype(out))
    emit_matmul(ctx, a, b, product)
    if beta == 0:
        ctx.elementwise("mul", [product, alpha], out)
        return
    if is_int(out.dtype):  # the factor of `add` is a float32, which does not hold every integer
        product, alpha = _scaled(ctx, product, alpha), 1
    ctx.elementwise("add", [_scaled(ctx, addend, beta), product], out, {"alpha": alpha})


def _scaled(ctx: Lowering, view: View, factor: float) -> View:
    if factor == 1:
        return view
    scaled = ctx.temp(view.shape, _sum_dtype(view))
    ctx.elementwise("mul", [view, factor], scaled)
    return scaled


def _sum_dtype(view: View) -> str:
    """The dtype in which elements are summed: float32 for floats, the integers' own dtype for integers."""
    return view.dtype if is_int(view.dtype) else "float32"


def parse_einsum(node: OpNode, graph: IRGraph) -> tuple[list[str], str] | None:
    """The index letters of each operand and of the output; None unless permute, multiply and sum can express it."""
    equation = str(node.attrs.get("equation", "")).replace(" ", "")
    if "->" in equation:
        left, result = equation.split("->")
    else:
        left = equation
        letters = left.replace(",", "").replace(".", "")
        result = "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    terms = left.split(",")
    if len(terms) != len(node.inputs) or len(terms) > 2:
        return None
    ranks = [len(graph.tensors[name].shape) for name in node.inputs]
    spare = "ZYXWVUTS"
    expanded = []
    for term, rank in zip(terms, ranks, strict=True):
        hidden = rank - len(term.replace("...", ""))
        if "..." in term:
            if hidden > len(spare):
                return None
            term = term.replace("...", spare[len(spare) - hidden :] if hidden else "")
        expanded.append(term)
    widest = max(
        (rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=True) if "..." in t), default=0
    )
    result = result.replace("...", spare[len(spare) - widest :] if widest else "")
    if any(len(set(term)) != len(term) or len(term) != rank for term, rank in zip(expanded, ranks, strict=True)):
        return None
    return expanded, result


def _einsum_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    if any(graph.tensors[name].dtype == "bool" for name in node.inputs):
        return "einsum of booleans"
    if parse_einsum(node, graph) is None:
        return f"einsum '{node.attrs.get('equation')}' has more than two operands or a repeated index"
    return None


def _einsum_range(node: OpNode, graph: IRGraph, operand_ranges: Mapping[str, Range]) -> Range:
    """The integer range of an einsum: a sum over the indices missing in the result, of products of one element each."""
    parsed = parse_einsum(node, graph)
    assert parsed is not None
    terms, result = parsed
    sizes = {x: 1 for term in terms for x in term if x not in result}
    for name, term in zip(node.inputs, terms, strict=True):
        for letter, size in zip(term, graph.tensors[name].shape, strict=True):
            if letter in sizes:
                sizes[letter] = max(sizes[letter], size)
    return ranges.total(
        functools.reduce(ranges.mul, (operand_ranges[x] for x in node.inputs)), math.prod(sizes.values())
    )


@register_op(
    "aten.einsum",
    tensors=("*tensors",),
    unsupported=_einsum_unsupported,
    one_dtype=True,
    integer_range=_einsum_range,
)
def lower_einsum(ctx: Lowering, node: OpNode) -> None:
    parsed = parse_einsum(node, ctx.graph)
    assert parsed is not None
    terms, result = parsed
    views = [ctx.view(name) for name in node.inputs]
    sizes: dict[str, int] = {}
    for term, view in zip(terms, views, strict=True):
        for letter, size in zip(term, view.shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    for index, term in enumerate(terms):
        others = [other for position, other in enumerate(terms) if position != index]
        lonely = [x for x in term if x not in result and not any(x in other for other in others)]
        if lonely and others:
            views[index], terms[index] = _sum_out(ctx, views[index], term, lonely)
    if len(terms) == 1:
        kept = "".join(x for x in terms[0] if x in result)
        view = views[0]
        if kept != terms[0]:
            view, _ = _sum_out(ctx, view, terms[0], [x for x in terms[0] if x not in result])
        ctx.finish(view.permute([kept.index(x) for x in result]))
        return
    a, b = terms
    batch = [x for x in result if x in a and x in b]
    free_a = [x for x in result if x in a and x not in b]
    free_b = [x for x in result if x in b and x not in a]
    contracted = [x for x in a if x in b and x not in result]

    def arrange(view: View, term: str, *groups: list[str]) -> View:
        letters = [x for group in groups for x in group]
        moved = view.permute([term.index(x) for x in letters]).expand([sizes[x] for x in letters])
        return ctx.reshaped(moved, tuple(math.prod(sizes[x] for x in group) for group in groups))

    left, right = arrange(views[0], a, batch, free_a, contracted), arrange(views[1], b, batch, contracted, free_b)
    order = [*batch, *free_a, *free_b]
    product = _permuted_output(ctx, order, result)
    flat = product.reshape((left.shape[0], left.shape[1], right.shape[2]))
    assert flat is not None
    emit_batched(ctx, left, right, flat)


def _permuted_output(ctx: Lowering, order: list[str], result: str) -> View:
    """The output as a view with dimensions in the product's `order`, in which it also lies in memory."""
    out = ctx.output(order=[result.index(x) for x in order])
    return out.permute([result.index(x) for x in order])


def _sum_out(ctx: Lowering, view: View, term: str, letters: list[str]) -> tuple[View, str]:
    from npu_compiler.ops.reductions import reduce

    kept = "".join(x for x in term if x not in letters)
    shape: Shape = tuple(view.shape[term.index(x)] for x in kept)
    total = ctx.temp(shape, _sum_dtype(view))
    reduce(ctx, "sum", view, [term.index(x) for x in letters], total)
    return total, kept


@register_op("aten.outer aten.ger", tensors=("self", "vec2"), integer_range=by_operands(ranges.mul))
def lower_outer(ctx: Lowering, node: OpNode) -> None:
    a, b = (ctx.view(name) for name in node.inputs)
    ctx.elementwise("mul", [a.unsqueeze(1), b.unsqueeze(0)], ctx.output())
