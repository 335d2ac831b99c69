"""Collectives: ops by which the ranks of a group sum their tensors, or gather parts of one.

Every rank of a program runs these calls in the same order.
"""

from __future__ import annotations

from types import SimpleNamespace

from npu_compiler.graph.model import OpNode
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import register_op
from npu_compiler.program.kernels import Family, declare_kernel


def _is_group(call: SimpleNamespace) -> bool:
    return bool(call.ranks > 1 and call.x.dtype == call.out.dtype)


declare_kernel(
    "all_reduce_kernel",
    Family.COLLECTIVE,
    "x:f[.n] -> out:f[.n]",
    where=_is_group,
    ranks="I",
)
declare_kernel(
    "all_gather_kernel",
    Family.COLLECTIVE,
    "x:fi[.n] -> out:fi[ranks,.n]",
    where=_is_group,
    ranks="I",
)


@register_op("npu.all_reduce")
def lower_all_reduce(ctx: Lowering, node: OpNode) -> None:
    """The sum of all ranks' tensors, added in float32 and rounded once; the same bits on every rank."""
    x = ctx.contiguous(ctx.view(node.inputs[0]))
    flat = (x.numel,)
    out = ctx.output().reshape(flat)
    source = x.reshape(flat)
    assert out is not None and source is not None
    ctx.emit("all_reduce_kernel", [source], [out], {"ranks": node.attrs["ranks"]}, flops=x.numel * node.attrs["ranks"])


@register_op("npu.all_gather", moves=True)
def lower_all_gather(ctx: Lowering, node: OpNode) -> None:
    """All ranks' tensors [..., n], joined along the last dimension in the order of the ranks.

    What exceeds the output's last dimension, which may be no multiple of n, is left out.
    """
    x, ranks = ctx.contiguous(ctx.view(node.inputs[0])), node.attrs["ranks"]
    *lead, width = x.shape
    source = x.reshape((x.numel,))
    gathered = ctx.temp((ranks, x.numel), x.dtype)
    assert source is not None
    ctx.emit("all_gather_kernel", [source], [gathered], {"ranks": ranks})
    parts = gathered.reshape((ranks, *lead, width))
    assert parts is not None
    joined = ctx.reshaped(parts.permute([*range(1, parts.rank - 1), 0, parts.rank - 1]), (*lead, ranks * width))
    ctx.finish(joined.slice(joined.rank - 1, 0, ctx.spec(node.outputs[0]).shape[-1]))
