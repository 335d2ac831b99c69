"""Reductions over any dimensions, running sums, softmax, and norms over dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from npu_compiler.graph.dtypes import as_int32, is_float, saturate
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops import ranges
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import Range, register_op
from npu_compiler.ops.sharding import shard_along_others
from npu_compiler.program.kernels import Family, Grid, declare_kernel
from npu_compiler.program.views import View

REDUCTIONS = ("sum", "mean", "max", "min", "prod", "var", "std", "any", "all", "argmax", "argmin", "norm", "logsumexp")
for _name in REDUCTIONS:
    declare_kernel(
        f"{_name}_kernel",
        Family.REDUCTION,
        "x[*whole] -> out[*kept]",
        source="reduce.metal",
        grid=Grid.REDUCTIONS,
        where=lambda call: (
            call.reduce_dims <= len(call.whole) and call.kept == call.whole[: len(call.whole) - call.reduce_dims]
        ),
        reduce_dims="I",
        correction="f",
        order="f",
    )
declare_kernel("cumsum_kernel", Family.REDUCTION, "x[*s,n] -> out[*s,n]", source="cumsum.metal", grid=Grid.ROW_ELEMENTS)
for _name in ("softmax_kernel", "log_softmax_kernel"):
    declare_kernel(_name, Family.SOFTMAX, "x[*s,n] -> out[*s,n]", source="softmax.metal", grid=Grid.ROWS, scale="f")
declare_kernel(
    "masked_softmax_kernel",
    Family.SOFTMAX,
    "x[*s,n] mask[*s,n] -> out[*s,n]",
    source="softmax.metal",
    grid=Grid.ROWS,
    scale="f",
)


def _reduced_dims(view: View, dims: object) -> list[int]:
    """The reduced dimensions, ascending; `dims` of None or an empty list means all."""
    if dims is None or dims == []:
        return list(range(view.rank))
    listed = [dims] if isinstance(dims, int) else list(dims)  # type: ignore[call-overload]
    return sorted({view.dim(d) for d in listed}) if view.rank else []


def reduce(ctx: Lowering, op: str, view: View, dims: object, out: View, **params: float) -> None:
    """Emit a reduction of `view` over `dims` into `out`, whose shape may keep the reduced dimensions as 1.

    Args:
        op: Name of the reduction, as in the kernel `{op}_kernel`.
        params: Parameters of the kernel, if they differ from the usual ones (`correction` 0, `order` 2).
    """
    reduced = _reduced_dims(view, dims)
    kept = [d for d in range(view.rank) if d not in reduced]
    kept_shape = tuple(view.shape[d] for d in kept)
    target = out.reshape(kept_shape)
    assert target is not None
    if view.numel == 0 and op in OF_NOTHING:
        value = saturate(OF_NOTHING[op], out.dtype)
        ctx.emit("fill_kernel", [], [target], {"value": value, "int_value": as_int32(value)})
        return
    merged = {"reduce_dims": len(reduced), "correction": 0.0, "order": 2.0, **params}
    ctx.emit(f"{op}_kernel", [view.permute([*kept, *reduced])], [target], merged, flops=view.numel)


OF_NOTHING = {
    "sum": 0.0,
    "mean": math.nan,
    "prod": 1.0,
    "var": math.nan,
    "std": math.nan,
    "any": 0.0,
    "all": 1.0,
    "norm": 0.0,
    "logsumexp": -math.inf,
}
"""Reduction → its result over no elements; reductions without such a result are missing."""


def _extreme_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    """The reason to refuse a maximum or minimum of no elements; None for any other node."""
    x, out = graph.tensors[node.inputs[0]], graph.tensors[node.outputs[0]]
    return "an extreme of no elements" if x.numel == 0 and out.numel else None


def _reduction_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    name = node.base.removeprefix("aten.")
    return None if name in OF_NOTHING else _extreme_unsupported(node, graph)


def _vector_norm_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    order = node.attrs.get("ord", node.attrs.get("p", 2))
    has_value = order is None or 0 <= float(order) < math.inf
    return None if has_value else _extreme_unsupported(node, graph)


def _reduction_range(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> Range:
    """The range of a reduction of integers; maximum and minimum have that of the elements."""
    elements = operands[node.inputs[0]]
    count = graph.tensors[node.inputs[0]].numel // max(graph.tensors[node.outputs[0]].numel, 1)
    combine = {"aten.sum": ranges.total, "aten.prod": ranges.product}.get(node.base)
    return elements if combine is None else combine(elements, count)


def _value_and_index_range(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> tuple[Range, ...]:
    size = ranges.along(graph.tensors[node.inputs[0]].shape, node.attrs["dim"])
    return operands[node.inputs[0]], ranges.index_below(size)


def _index_range(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> Range:
    return ranges.index_below(ranges.along(graph.tensors[node.inputs[0]].shape, node.attrs.get("dim")))


def _running_sum_range(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> Range:
    elements = operands[node.inputs[0]]
    return ranges.hull(
        elements, ranges.total(elements, ranges.along(graph.tensors[node.inputs[0]].shape, node.attrs["dim"]))
    )


@register_op(
    "aten.sum aten.mean aten.amax aten.amin aten.any aten.all aten.prod aten.max.default "
    "aten.min.default aten.logsumexp",
    unsupported=_reduction_unsupported,
    integer_range=_reduction_range,
    shard=shard_along_others,
)
def lower_reduction(ctx: Lowering, node: OpNode) -> None:
    name = node.base.removeprefix("aten.")
    op = {"amax": "max", "amin": "min"}.get(name, name)
    out = ctx.output()
    reduce(ctx, op, _as_dtype_says(ctx, node, out), node.attrs.get("dim"), out)


def _as_dtype_says(ctx: Lowering, node: OpNode, out: View) -> View:
    """The input, converted first if the `dtype` attribute makes floats of integers or integers of floats."""
    view = ctx.view(node.inputs[0])
    if not node.attrs.get("dtype") or is_float(view.dtype) == is_float(out.dtype):
        return view
    return ctx.cast(view, "float32" if is_float(out.dtype) else out.dtype)


@register_op("aten.var aten.std")
def lower_variance(ctx: Lowering, node: OpNode) -> None:
    correction = node.attrs.get("correction")
    unbiased = node.attrs.get("unbiased", True)
    value = float(correction) if correction is not None else float(bool(unbiased))
    op = node.base.removeprefix("aten.")
    reduce(ctx, op, ctx.view(node.inputs[0]), node.attrs.get("dim"), ctx.output(), correction=value)


@register_op("aten.var_mean")
def lower_var_mean(ctx: Lowering, node: OpNode) -> None:
    view, dims = ctx.view(node.inputs[0]), node.attrs.get("dim")
    correction = node.attrs.get("correction")
    value = float(correction) if correction is not None else float(bool(node.attrs.get("unbiased", True)))
    reduce(ctx, "var", view, dims, ctx.output(0), correction=value)
    out = ctx.output(1)
    if view.numel == out.numel:
        reduce(ctx, "mean", view, dims, out)
        return
    mean = ctx.temp(out.shape, "float32")
    reduce(ctx, "mean", view, dims, mean)
    # PyTorch's running mean is no number once it is infinite: it goes on by the distance of the next element from it.
    ctx.elementwise("add", [mean, mean], out, {"alpha": 0})


@register_op("aten.max.dim aten.min.dim", unsupported=_extreme_unsupported, integer_range=_value_and_index_range)
def lower_max_with_index(ctx: Lowering, node: OpNode) -> None:
    """Lower values, indices = the greatest (for `min`: the least) elements along `dim`, and their positions."""
    view, op = ctx.view(node.inputs[0]), node.base.removeprefix("aten.")
    reduce(ctx, op, view, node.attrs["dim"], ctx.output(0))
    reduce(ctx, f"arg{op}", view, node.attrs["dim"], ctx.output(1))


@register_op("aten.argmax aten.argmin", unsupported=_extreme_unsupported, integer_range=_index_range)
def lower_argmax(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    if node.attrs.get("dim") is None:
        view = ctx.reshaped(view, (view.numel,))
    reduce(ctx, node.base.removeprefix("aten."), view, node.attrs.get("dim"), ctx.output())


@register_op("aten.linalg_vector_norm aten.norm.ScalarOpt_dim aten.norm.Scalar", unsupported=_vector_norm_unsupported)
def lower_vector_norm(ctx: Lowering, node: OpNode) -> None:
    order = node.attrs.get("ord", node.attrs.get("p", 2))
    order = 2.0 if order is None else float(order)
    reduce(ctx, "norm", ctx.view(node.inputs[0]), node.attrs.get("dim"), ctx.output(), order=order)


def _norm_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    order, dims = node.attrs.get("ord"), node.attrs.get("dim")
    rank = len(graph.tensors[node.inputs[0]].shape) if dims is None else 1 if isinstance(dims, int) else len(dims)
    if order is not None and (isinstance(order, str) or rank != 1):
        return "the norm of a matrix"
    return _vector_norm_unsupported(node, graph)


register_op("aten.linalg_norm", unsupported=_norm_unsupported)(lower_vector_norm)


def _weight_norm_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    shape, dim = graph.tensors[node.inputs[0]].shape, node.attrs.get("dim", 0)
    kept = None if dim == -1 else dim % max(len(shape), 1)
    wanted = tuple(size if d == kept else 1 for d, size in enumerate(shape))
    scale = graph.tensors[node.inputs[1]].shape
    return None if scale == wanted else f"weight normalization by a scale of shape {list(scale)}"


@register_op("aten._weight_norm", tensors=("v", "g"), unsupported=_weight_norm_unsupported)
def lower_weight_norm(ctx: Lowering, node: OpNode) -> None:
    """Lower v · g / ‖v‖, with the norm over every dimension but `dim`."""
    v, g = (ctx.view(name) for name in node.inputs)
    dim = node.attrs.get("dim", 0)
    norm = ctx.temp(g.shape, "float32")
    reduced = [d for d in range(v.rank) if dim == -1 or d != v.dim(dim)]
    if reduced:
        reduce(ctx, "norm", v, reduced, norm)
    else:
        ctx.elementwise("abs", [v], norm)
    scale = ctx.temp(g.shape, "float32")
    ctx.elementwise("true_divide", [g, norm], scale)
    ctx.elementwise("mul", [v, scale], ctx.output())


@register_op("aten.cumsum", integer_range=_running_sum_range)
def lower_cumsum(ctx: Lowering, node: OpNode) -> None:
    """Lower a running sum along `dim`, which a transposed view makes the last dimension."""
    out = ctx.output()
    view = _as_dtype_says(ctx, node, out)
    if view.rank == 0:
        ctx.copy(view, out)
        return
    dim, last = view.dim(node.attrs["dim"]), view.rank - 1
    ctx.emit("cumsum_kernel", [view.transpose(dim, last)], [out.transpose(dim, last)])


@register_op("aten.softmax aten._softmax aten.log_softmax aten._log_softmax aten.special_softmax")
def lower_softmax(ctx: Lowering, node: OpNode) -> None:
    kernel = "log_softmax_kernel" if "log_softmax" in node.base else "softmax_kernel"
    view = ctx.view(node.inputs[0])
    softmax(ctx, kernel, [view], node.attrs["dim"])


def softmax(ctx: Lowering, kernel: str, inputs: list[View], dim: int, scale: float = 1.0) -> None:
    """Emit a softmax along `dim`, which a transposed view makes the last dimension for the kernel."""
    view, out = inputs[0], ctx.output()
    if view.rank == 0:
        inputs, out, dim = [x.unsqueeze(0) for x in inputs], out.unsqueeze(0), 0
    last, dim = inputs[0].rank - 1, inputs[0].dim(dim)
    ctx.emit(
        kernel,
        [x.transpose(dim, last) for x in inputs],
        [out.transpose(dim, last)],
        {"scale": scale},
        flops=5 * out.numel,
    )


@register_op("npu.masked_softmax", tensors=("self", "mask"))
def lower_masked_softmax(ctx: Lowering, node: OpNode) -> None:
    """Lower softmax(self + mask) along the last dimension."""
    scores = ctx.view(node.inputs[0])
    mask = ctx.view(node.inputs[1]).expand(scores.shape)
    softmax(ctx, "masked_softmax_kernel", [scores, mask], -1, node.attrs.get("scale", 1.0))
