"""KV caches with one byte per element: the update, which quantizes the new rows, and attention that reads codes."""

from __future__ import annotations

from typing import Any

from npu_compiler.graph.model import OpNode
from npu_compiler.graph.quantization import ROW_FORMATS
from npu_compiler.ops.indexing import is_checked_index
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import Args, ByteStorage, register_op
from npu_compiler.ops.transformer import attention_params, attention_products
from npu_compiler.program.kernels import Family, declare_kernel, distinct_bytes
from npu_compiler.program.views import View

_FORMAT: dict[str, Any] = {"format": f"s {' '.join(ROW_FORMATS)}"}

declare_kernel(
    "quantized_index_copy_kernel",
    Family.INDEXING,
    "index:i[n] source:f[b,h,n,.d] -> codes:u[b,h,rows,.d] scales:f[b,h,.rows]",
    where=lambda call: call.d > 0 and call.scales.dtype == "float32",
    index_limit=lambda call: call.rows,
    **_FORMAT,
    checked="?",
)
declare_kernel(
    "quantized_attention_kernel",
    Family.ATTENTION,
    "q:f[b,h,t,.d] k:u[b,shared,keys,.d] k_scales:f[b,shared,.keys] v:u[b,shared,keys,.e] v_scales:f[b,shared,.keys]"
    " mask?:fb[b,h,t,keys] sinks?:f[.h] -> out:f[b,h,t,e]",
    where=lambda call: (
        call.shared > 0 and call.h % call.shared == 0 and call.k_scales.dtype == call.v_scales.dtype == "float32"
    ),
    products=attention_products,
    **_FORMAT,
    scale="f",
    causal="?",
    soft_cap="f",
)


@register_op(
    "npu.quantized_index_copy", tensors=("codes", "index", "source", "scales"), byte_storage=ByteStorage.REQUIRED
)
def lower_quantized_index_copy(ctx: Lowering, node: OpNode) -> None:
    """Lower the update that quantizes rows of `source` [B, H, N, D] (`quantize_rows`) and stores codes and scales.

    The codes are those of a cache [B, H, S, D], the scales [B, H, S].
    """
    codes, index, source, scales = node.inputs
    outputs: list[View] = []
    for position, name in enumerate((codes, scales)):
        if ctx.donate(name, node.outputs[position]):
            outputs.append(ctx.view(name))
        else:
            outputs.append(ctx.output(position))
            ctx.copy(ctx.view(name), outputs[-1])
    rows = ctx.inner_contiguous(ctx.view(source))
    written = rows.numel + 4 * rows.numel // rows.shape[-1]
    ctx.emit(
        "quantized_index_copy_kernel",
        [ctx.view(index), rows],
        outputs,
        {"format": node.attrs["format"], "checked": is_checked_index(ctx, index)},
        bytes_moved=distinct_bytes(ctx.view(index)) + distinct_bytes(rows) + written,
    )


@register_op(
    "npu.quantized_attention",
    tensors=("query", "key", "key_scales", "value", "value_scales", "attn_mask", "sinks"),
    by_name=True,
    byte_storage=ByteStorage.REQUIRED,
)
def lower_quantized_attention(ctx: Lowering, node: OpNode) -> None:
    """Lower attention over [B, H, T, D] whose keys and values are codes and scales from `quantize_rows`."""
    q, *cache = (ctx.inner_contiguous(ctx.view(name)) for name in node.inputs[:5])
    args, keys = Args(node), cache[0].shape[2]
    mask_name, sinks = args.tensor("attn_mask"), args.tensor("sinks")
    masks = [] if mask_name is None else [ctx.view(mask_name)]
    while masks and masks[0].rank < 4:
        masks = [masks[0].unsqueeze(0)]
    out = ctx.output(order=[0, 2, 1, 3])
    params = {"format": node.attrs["format"], **attention_params(node, q)}
    flops = 2 * (out.numel + q.numel) * keys
    inputs = [q, *cache, *(mask.expand((*q.shape[:3], keys)) for mask in masks)]
    inputs += [] if sinks is None else [ctx.inner_contiguous(ctx.view(sinks))]
    ctx.emit("quantized_attention_kernel", inputs, [out], params, flops=flops)
