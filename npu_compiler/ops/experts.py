"""Products in groups: each row with the matrix of the group that it belongs to, as in a mixture of experts.

Each row's matrix is picked and multiplied, which costs a copy of the matrices in use: little for the tokens of a decode
step, too much for a long prompt, which is refused.
"""

from __future__ import annotations

from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.matmul import emit_batched
from npu_compiler.ops.reductions import reduce
from npu_compiler.ops.registry import Args, register_op
from npu_compiler.ops.tensor import emit_arange
from npu_compiler.program.views import View

MOST_PICKED = 2**26  # elements of the matrices that are picked


def _unsupported(node: OpNode, graph: IRGraph) -> str | None:
    shapes = [graph.tensors[name].shape for name in node.inputs]
    if [len(shape) for shape in shapes] != [2, 3, 1] or node.attrs.get("out_dtype"):
        return "a grouped product other than of rows with a matrix for each group"
    (rows, width), (_, _, columns), _ = shapes
    picked = rows * width * columns
    return f"a grouped product of {rows} rows with {width} × {columns} matrices" if picked > MOST_PICKED else None


@register_op(
    "transformers.grouped_mm_fallback.default aten._grouped_mm",
    tensors=("input", "weight", "offs"),
    unsupported=_unsupported,
    one_dtype=True,
)
def lower_grouped_product(ctx: Lowering, node: OpNode) -> None:
    """Rows below `offs[0]` are of the first group, and so on; those from the last offset on are 0."""
    args = Args(node)
    names = [args.tensor(name) for name in ("input", "weight", "offs")]
    rows, weight, ends = (ctx.view(name) for name in names if name is not None)
    (count, width), (groups, _, columns) = rows.shape, weight.shape
    place = ctx.temp((count,), "int32")
    emit_arange(ctx, place, 0, 1)
    ended, group, one = ctx.temp((count, groups), "bool"), ctx.temp((count,), "int32"), ctx.temp((count,), "int32")
    ctx.elementwise("le", [ends.unsqueeze(0).expand(ended.shape), place.unsqueeze(1).expand(ended.shape)], ended)
    reduce(ctx, "sum", ctx.cast(ended, "int32"), -1, group)
    ctx.elementwise("minimum", [group, groups - 1], one)
    picked = ctx.temp((count, width, columns), weight.dtype)
    ctx.emit("index_select_kernel", [weight, one], [picked], {"dim": 0})
    out = ctx.output()
    product = ctx.temp(out.shape, out.dtype)
    emit_batched(ctx, rows.unsqueeze(1), picked, product.unsqueeze(1))
    _zero_where_no_group(ctx, group, groups, product, out)


def _zero_where_no_group(ctx: Lowering, group: View, groups: int, product: View, out: View) -> None:
    has_group = ctx.temp(group.shape, "bool")
    ctx.elementwise("lt", [group, groups], has_group)
    ctx.elementwise("where", [has_group.unsqueeze(1), product, 0.0], out)
