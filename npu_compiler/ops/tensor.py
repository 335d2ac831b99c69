"""Ops that assemble or fill tensors: cat, stack, pad, repeat, roll, scatter, fill."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from npu_compiler.graph.dtypes import as_int32, saturate
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops import ranges
from npu_compiler.ops.aliases import diagonal_view, slice_bounds
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.ranges import by_operands
from npu_compiler.ops.registry import Args, Range, register_op
from npu_compiler.ops.sharding import shard_along_others
from npu_compiler.program.kernels import Family, declare_kernel
from npu_compiler.program.views import Shape, View


def _pads_fit(sizes: Shape, padded: Shape, pads: list[int], mode: str) -> bool:
    """Whether `pads`, (before, after) for each dimension from the last one on, legally extend `sizes` to `padded`."""
    pairs = list(zip(pads[::2], pads[1::2], strict=True))
    if min(pads) < 0 or len(sizes) != len(padded) or len(sizes) > len(pairs) or any(map(any, pairs[len(sizes) :])):
        return False
    for size, out, (before, after) in zip(reversed(sizes), reversed(padded), pairs, strict=False):
        most = {"constant": max(before, after), "reflect": size - 1, "circular": size}.get(mode, out if size else 0)
        if out != before + size + after or max(before, after) > most:
            return False
    return True


declare_kernel("fill_kernel", Family.TENSOR, "-> out", source="tensor_ops.metal", value="f", int_value="i")
declare_kernel(
    "arange_kernel",
    Family.TENSOR,
    "-> out[n]",
    source="tensor_ops.metal",
    start="f",
    step="f",
    int_start="i",
    int_step="i",
)
declare_kernel(
    "pad_kernel",
    Family.TENSOR,
    "x[*sizes] -> out[*padded]",
    source="tensor_ops.metal",
    where=lambda call: _pads_fit(call.sizes, call.padded, call.pads, call.mode),
    mode="s constant reflect replicate circular",
    pads="12i",
    value="f",
    int_value="i",
)
declare_kernel(
    "triangle_kernel",
    Family.TENSOR,
    "x[*s,rows,columns] -> out[*s,rows,columns]",
    source="tensor_ops.metal",
    upper="?",
    diagonal="i",
)
declare_kernel(
    "flip_kernel",
    Family.TENSOR,
    "x[*s] -> out[*s]",
    source="tensor_ops.metal",
    where=lambda call: max(call.dims) <= 1 and not any(call.dims[len(call.s) :]),
    dims="8I",
)


@register_op("aten.cat aten.concat aten.concatenate", tensors=("*tensors",), moves=True, shard=shard_along_others)
def lower_cat(ctx: Lowering, node: OpNode) -> None:
    out = ctx.output()
    attrs = node.attrs
    dim = out.dim(attrs["axis"] if "axis" in attrs else attrs.get("dim", 0))
    start = 0
    for name in node.inputs:
        piece = ctx.view(name)
        if piece.shape == (0,):
            continue
        ctx.copy(piece, out.slice(dim, start, start + piece.shape[dim]))
        start += piece.shape[dim]


@register_op("aten.stack", tensors=("*tensors",), moves=True)
def lower_stack(ctx: Lowering, node: OpNode) -> None:
    out = ctx.output()
    for index, name in enumerate(node.inputs):
        ctx.copy(ctx.view(name), out.select(node.attrs.get("dim", 0), index))


@register_op("aten.repeat aten.tile", moves=True)
def lower_repeat(ctx: Lowering, node: OpNode) -> None:
    view, out = ctx.view(node.inputs[0]), ctx.output()
    lead = out.rank - view.rank
    padded = view.expand((*([1] * lead), *view.shape))
    tiled_shape = tuple(
        x for size, total in zip(padded.shape, out.shape, strict=True) for x in (total // size if size else 0, size)
    )
    source = padded
    for dim in range(out.rank):
        source = source.unsqueeze(2 * dim)
    target = out.reshape(tiled_shape)
    assert target is not None
    ctx.copy(source.expand(tiled_shape), target)


def _repeat_interleave_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    return None if isinstance(node.attrs.get("repeats"), int) else "repeat_interleave with a tensor of counts"


@register_op("aten.repeat_interleave", unsupported=_repeat_interleave_unsupported, moves=True)
def lower_repeat_interleave(ctx: Lowering, node: OpNode) -> None:
    view, out = ctx.view(node.inputs[0]), ctx.output()
    if node.attrs.get("dim") is None:
        view = ctx.reshaped(view, (view.numel,))
    dim, repeats = view.dim(node.attrs.get("dim") or 0), node.attrs["repeats"]
    shape = (*view.shape[: dim + 1], repeats, *view.shape[dim + 1 :])
    target = out.reshape(shape)
    assert target is not None
    ctx.copy(view.unsqueeze(dim + 1).expand(shape), target)


@register_op("aten.roll", moves=True)
def lower_roll(ctx: Lowering, node: OpNode) -> None:
    view, out = ctx.view(node.inputs[0]), ctx.output()
    shifts, dims = node.attrs["shifts"], node.attrs.get("dims") or []
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    if not dims:
        view, flat = ctx.reshaped(view, (view.numel,)), out.reshape((out.numel,))
        assert flat is not None
        out, dims = flat, [0]
    total: dict[int, int] = {}
    for dim, shift in zip((view.dim(d) for d in dims), shifts, strict=True):
        total[dim] = total.get(dim, 0) + shift
    pieces = []
    for dim, shift in total.items():
        size = view.shape[dim]
        cut = shift % size if size else 0
        pieces.append([(dim, 0, size - cut, cut), (dim, size - cut, size, -(size - cut))])
    for combination in itertools.product(*pieces):
        source, target = view, out
        for dim, start, stop, move in combination:
            source = source.slice(dim, start, stop)
            target = target.slice(dim, start + move, stop + move)
        ctx.copy(source, target)


@register_op("aten.flip", moves=True)
def lower_flip(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    if view.rank == 0:
        ctx.finish(view)
        return
    flags = [0] * 8
    for dim in node.attrs["dims"]:
        flags[view.dim(dim)] = 1
    ctx.emit("flip_kernel", [view], [ctx.output()], {"dims": flags})


PAD_MODES = ("constant", "reflect", "replicate", "circular")


def _pad_mode(node: OpNode) -> str:
    fixed = {"reflection": "reflect", "replication": "replicate"}
    own = next((mode for name, mode in fixed.items() if name in node.base), None)
    return own or str(node.attrs.get("mode", "constant"))


def _pad_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    mode = _pad_mode(node)
    if mode not in PAD_MODES:
        return f"padding mode '{mode}'"
    pads = node.attrs.get("pad", node.attrs.get("padding"))
    if not isinstance(pads, list) or len(pads) > 12:
        return "padding that is not a list of at most 12 sizes"
    if mode != "constant" and min(pads) < 0:
        return f"negative {mode} padding"
    return None


@register_op(
    "aten.pad aten.constant_pad_nd aten.reflection_pad1d aten.reflection_pad2d aten.replication_pad1d "
    "aten.replication_pad2d",
    unsupported=_pad_unsupported,
    moves=True,
    integer_range=lambda node, graph, operands: ranges.hull(
        operands[node.inputs[0]], ranges.of_scalar(node.attrs.get("value") or 0)
    ),
)
def lower_pad(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    pads = list(node.attrs["pad"] if "pad" in node.attrs else node.attrs["padding"])
    mode = _pad_mode(node)
    for index in range(0, len(pads), 2):
        dim, (low, high) = view.rank - 1 - index // 2, pads[index : index + 2]
        view = view.slice(dim, max(-low, 0), view.shape[dim] - max(-high, 0))
        pads[index : index + 2] = [max(low, 0), max(high, 0)]
    if not any(pads):
        ctx.finish(view)
        return
    out = ctx.output()
    value = saturate(float(node.attrs.get("value") or 0.0), out.dtype)
    params = {"mode": mode, "pads": pads + [0] * (12 - len(pads)), "value": value, "int_value": as_int32(value)}
    ctx.emit("pad_kernel", [view], [out], params)


@register_op("aten.slice_scatter", tensors=("self", "src"), moves=True, one_dtype=True)
def lower_slice_scatter(ctx: Lowering, node: OpNode) -> None:
    base, source = (ctx.view(name) for name in node.inputs)
    out = ctx.output()
    dim = out.dim(node.attrs.get("dim", 0))
    start, end = slice_bounds(out.shape[dim], node.attrs.get("start"), node.attrs.get("end"))
    window = out.slice(dim, start, end, node.attrs.get("step", 1))
    if window.shape != out.shape:
        ctx.copy(base, out)
    ctx.copy(source, window)


@register_op("aten.select_scatter", tensors=("self", "src"), moves=True)
def lower_select_scatter(ctx: Lowering, node: OpNode) -> None:
    base, source = (ctx.view(name) for name in node.inputs)
    out = ctx.output()
    ctx.copy(base, out)
    ctx.copy(source, out.select(node.attrs["dim"], node.attrs["index"]))


@register_op("aten.diagonal_scatter", tensors=("self", "src"), moves=True)
def lower_diagonal_scatter(ctx: Lowering, node: OpNode) -> None:
    base, source = (ctx.view(name) for name in node.inputs)
    out = ctx.output()
    ctx.copy(base, out)
    ctx.copy(source, diagonal_view(out, node))


def _fill(ctx: Lowering, node: OpNode, value: float | int | bool) -> None:
    out = ctx.output()
    params = {"value": saturate(float(value), out.dtype), "int_value": as_int32(value)}
    ctx.emit("fill_kernel", [], [out], params)


@register_op(
    "aten.zeros aten.zeros_like aten.new_zeros aten.zero aten.empty aten.empty_like aten.new_empty aten.empty_permuted",
    integer_range=ranges.constant(0),
    saturates=True,
)
def lower_zeros(ctx: Lowering, node: OpNode) -> None:
    _fill(ctx, node, 0)


@register_op("aten.ones aten.ones_like aten.new_ones", integer_range=ranges.constant(1), saturates=True)
def lower_ones(ctx: Lowering, node: OpNode) -> None:
    _fill(ctx, node, 1)


def _fill_value(node: OpNode) -> Any:
    return node.attrs.get("fill_value", node.attrs.get("value", node.attrs.get("s")))


def _fill_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    value = _fill_value(node)
    return None if isinstance(value, (bool, int, float)) else "fill value is not a number"


@register_op(
    "aten.full aten.full_like aten.new_full aten.fill.Scalar aten.scalar_tensor",
    unsupported=_fill_unsupported,
    integer_range=lambda node, graph, operands: ranges.of_scalar(_fill_value(node)),
)
def lower_full(ctx: Lowering, node: OpNode) -> None:
    _fill(ctx, node, _fill_value(node))


@register_op("aten.fill.Tensor", tensors=("self", "value"), integer_range=by_operands(ranges.second))
def lower_fill_tensor(ctx: Lowering, node: OpNode) -> None:
    ctx.copy(ctx.view(node.inputs[1]).expand(ctx.spec(node.outputs[0]).shape), ctx.output())


def _arange_range(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> Range:
    start, step = node.attrs.get("start", 0), node.attrs.get("step", 1)
    last = start + step * max(graph.tensors[node.outputs[0]].numel - 1, 0)
    return ranges.hull(ranges.of_scalar(start), ranges.of_scalar(last))


@register_op("aten.arange", integer_range=_arange_range)
def lower_arange(ctx: Lowering, node: OpNode) -> None:
    emit_arange(ctx, ctx.output(), node.attrs.get("start", 0), node.attrs.get("step", 1))


def emit_arange(ctx: Lowering, out: View, start: float, step: float) -> None:
    """Emit a call that fills a vector with start, start + step and so on."""
    params = {"start": start, "step": step, "int_start": as_int32(start), "int_step": as_int32(step)}
    ctx.emit("arange_kernel", [], [out], params)


@register_op("aten.eye", integer_range=lambda node, graph, operands: (0, 1))
def lower_eye(ctx: Lowering, node: OpNode) -> None:
    out = ctx.output()
    rows, columns = (ctx.temp((size,), "int32") for size in out.shape)
    for numbers in (rows, columns):
        emit_arange(ctx, numbers, 0, 1)
    flags = ctx.temp(out.shape, "bool")
    ctx.elementwise("eq", [rows.unsqueeze(1), columns], flags)
    ctx.copy(flags, out)


@register_op(
    "aten.linspace",
    unsupported=lambda node, graph: "linspace between tensors" if node.inputs else None,
    integer_range=lambda node, graph, operands: ranges.hull(
        ranges.of_scalar(node.attrs["start"]), ranges.of_scalar(node.attrs["end"])
    ),
)
def lower_linspace(ctx: Lowering, node: OpNode) -> None:
    start, steps = node.attrs["start"], node.attrs["steps"]
    step = (node.attrs["end"] - start) / (steps - 1) if steps > 1 else 0.0
    emit_arange(ctx, ctx.output(), start, step)


@register_op(
    "aten.tril aten.triu", integer_range=lambda node, graph, operands: ranges.hull(operands[node.inputs[0]], (0, 0))
)
def lower_triangle(ctx: Lowering, node: OpNode) -> None:
    params = {"upper": int("triu" in node.base), "diagonal": node.attrs.get("diagonal", 0)}
    ctx.emit("triangle_kernel", [ctx.view(node.inputs[0])], [ctx.output()], params)


def _difference_range(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> Range:
    joined = ranges.hull(*(operands[name] for name in node.inputs))
    return ranges.sub(joined, joined)


@register_op(
    "aten.diff",
    tensors=("self", "prepend", "append"),
    unsupported=lambda node, graph: None if node.attrs.get("n", 1) == 1 else "diff of higher order",
    by_name=True,
    integer_range=_difference_range,
)
def lower_diff(ctx: Lowering, node: OpNode) -> None:
    """Lower torch.diff.

    If the IR does not name a tensor to join, it is taken for `prepend`, as language model masks use it.
    """
    view, out, args = ctx.view(node.inputs[0]), ctx.output(), Args(node)
    dim = view.dim(node.attrs.get("dim", -1))
    ends = [args.tensor(name) for name in ("prepend", "append")]
    parts = [x for x in (ends[0] and ctx.view(ends[0]), view, ends[1] and ctx.view(ends[1])) if x]
    size = sum(part.shape[dim] for part in parts)
    if len(parts) > 1:
        joined, start = ctx.temp((*view.shape[:dim], size, *view.shape[dim + 1 :]), out.dtype), 0
        for part in parts:
            ctx.copy(part, joined.slice(dim, start, start + part.shape[dim]))
            start += part.shape[dim]
        view = joined
    later, earlier = view.slice(dim, 1, size), view.slice(dim, 0, size - 1)
    ctx.elementwise("ne" if view.dtype == "bool" else "sub", [later, earlier], out)


@register_op("aten.meshgrid", tensors=("*tensors",), integer_range=ranges.each)
def lower_meshgrid(ctx: Lowering, node: OpNode) -> None:
    views = [ctx.view(name) for name in node.inputs]
    swap = node.attrs.get("indexing", "ij") == "xy" and len(views) >= 2
    for index, view in enumerate(views):
        axis = 1 - index if swap and index < 2 else index
        shape = ctx.spec(node.outputs[index]).shape
        line = view if view.rank else view.unsqueeze(0)
        trailing: View = line
        for _ in range(len(shape) - 1 - axis):
            trailing = trailing.unsqueeze(trailing.rank)
        ctx.finish(trailing.expand(shape), index)
