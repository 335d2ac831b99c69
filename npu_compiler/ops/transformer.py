"""The ops of transformers: norms over rows, rotary embedding, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

from npu_compiler.graph.dtypes import is_float, is_int
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import Args, Layout, register_op
from npu_compiler.ops.sharding import shard_attention, shard_paged_attention
from npu_compiler.program.kernels import Family, Grid, declare_kernel, distinct_bytes
from npu_compiler.program.products import Product
from npu_compiler.program.views import Shape, View, numel


def attention_products(call: SimpleNamespace) -> tuple[Product, ...]:
    """The two matrix products of attention, scores and results.

    A row is a query of one of the heads that share keys.
    """
    rows, batch = call.t * (call.h // call.shared), call.b * call.shared
    return (Product(rows, call.keys, call.d, batch), Product(rows, call.e, call.keys, batch))


declare_kernel(
    "rmsnorm_kernel",
    Family.NORM,
    "x:f[rows,.width] weight?:f[.width] -> out:f[rows,width]",
    source="rmsnorm.metal",
    grid=Grid.ROWS,
    rows="I",
    width="I",
    eps="f",
    weight_offset="f",
)
declare_kernel(
    "layernorm_kernel",
    Family.NORM,
    "x:f[rows,.width] weight?:f[.width] bias?:f[.width] -> out:f[rows,width]",
    source="layernorm.metal",
    grid=Grid.ROWS,
    rows="I",
    width="I",
    eps="f",
)
declare_kernel(
    "groupnorm_kernel",
    Family.NORM,
    "x:f[n,c,*s] weight?:f[c] bias?:f[c] -> out:f[n,c,*s]",
    source="layernorm.metal",
    grid=Grid.CHANNEL_GROUPS,
    where=lambda call: call.groups > 0 and call.c % call.groups == 0,
    groups="I",
    eps="f",
)
declare_kernel(
    "rope_kernel",
    Family.ROPE,
    "x:f[*s,.width] cos:f[*s,width] sin:f[*s,width] -> out:f[*s,width]",
    source="rope.metal",
    grid=Grid.ROTATIONS,
    where=lambda call: call.rotary_dim == call.width and call.width % 2 == 0,
    rotary_dim="I",
)
declare_kernel(
    "attention_kernel",
    Family.ATTENTION,
    "q:f[b,h,t,.d] k:f[b,shared,keys,.d] v:f[b,shared,keys,.e] mask?:fb[b,h,t,keys] sinks?:f[.h] -> out:f[b,h,t,e]",
    source="fused_decode_attention.metal",
    grid=Grid.QUERIES,
    where=lambda call: call.shared > 0 and call.h % call.shared == 0,
    products=attention_products,
    scale="f",
    causal="?",
    soft_cap="f",
)


def _paged_products(call: SimpleNamespace) -> tuple[Product, ...]:
    """The matrix products of paged attention, as if each token attended to all keys of its window, or of its table."""
    rows, keys, batch = call.h // call.shared, call.t * call.block_size, call.n * call.shared
    keys = min(keys, call.window or keys)
    return (Product(rows, keys, call.d, batch), Product(rows, call.e, keys, batch))


declare_kernel(
    "paged_attention_kernel",
    Family.ATTENTION,
    "q:f[n,h,.d] k:f[rows,shared,.d] v:f[rows,shared,.e] tables:i[s,.t] sequences:i[.n] positions:i[.n]"
    " sinks?:f[.h] -> out:f[n,h,.e]",
    source="paged_attention.metal",
    grid=Grid.TOKENS,
    where=lambda call: (
        min(call.shared, call.s, call.t, call.d) > 0
        and call.h % call.shared == 0
        and 0 < call.block_size <= call.rows
        and call.rows % call.block_size == 0
        and call.k.dtype == call.v.dtype
    ),
    products=_paged_products,
    scale="f",
    block_size="I",
    window="I",
    soft_cap="f",
)


def _rows(ctx: Lowering, x: View, width: int) -> View:
    return ctx.inner_contiguous(ctx.reshaped(x, (x.numel // width if width else 0, width)))


def _as_float(ctx: Lowering, weight: View) -> View:
    """A float weight as it is, or a float32 copy of an integer or boolean one, which PyTorch promotes."""
    if is_float(weight.dtype):
        return weight
    copy = ctx.temp(weight.shape, "float32")
    ctx.elementwise("copy", [weight], copy)
    return copy


@register_op("aten.rms_norm npu.rms_norm", tensors=("input", "weight"), one_dtype=True)
def lower_rms_norm(ctx: Lowering, node: OpNode) -> None:
    """Lower x · rsqrt(mean(x²) + eps) · (weight + weight_offset) over the trailing dimensions."""
    x, *weight = (ctx.view(name) for name in node.inputs)
    shape = node.attrs.get("normalized_shape") or [x.shape[-1]]
    width = numel(shape)
    eps = node.attrs.get("eps")
    out = ctx.output()
    rows = _rows(ctx, x, width)
    flat = out.reshape(rows.shape)
    assert flat is not None
    params = {
        "rows": rows.shape[0],
        "width": width,
        "eps": 1.1920928955078125e-07 if eps is None else float(eps),
        "weight_offset": float(node.attrs.get("weight_offset", 0.0)),
        "has_weight": int(bool(weight)),
    }
    weights = [ctx.contiguous(ctx.reshaped(_as_float(ctx, w), (width,))) for w in weight]
    ctx.emit("rmsnorm_kernel", [rows, *weights], [flat], params, flops=4 * x.numel)


def unclear_affine(node: OpNode, graph: IRGraph) -> str | None:
    """The reason why a norm's parameters are ambiguous; None if they are not.

    The IR does not record omitted optional tensors. One tensor of a layer norm is its weight
    (`nn.LayerNorm(bias=False)`), and two of an instance norm are its weight and bias, unless their names say otherwise.
    """
    if node.tensor_names is not None:
        return None
    op, first = node.base.removeprefix("aten."), (*node.inputs[1:], "")[0]
    if op in ("group_norm", "native_group_norm", "instance_norm") and len(node.inputs) == 2:
        return f"{op} with one affine tensor: the IR does not record whether it is the weight or the bias"
    if op in ("layer_norm", "native_layer_norm") and len(node.inputs) == 2 and is_named(first, graph, "bias"):
        return f"{op} with '{first}' but no second affine tensor: the IR does not record that it is not the weight"
    if op == "instance_norm" and node.attrs.get("use_input_stats") and is_named(first, graph, "running_mean"):
        return f"instance_norm with '{first}': the IR does not record that it is not the weight"
    return None


def is_named(name: str, graph: IRGraph, ending: str) -> bool:
    """Whether a tensor's name, or its key in the checkpoint, ends with `ending`."""
    keys = graph.weights[name].keys() if name in graph.weights else ()
    return any(key.endswith(ending) for key in (name, *keys))


def _layer_norm_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    return "layer_norm that returns its statistics" if len(node.outputs) > 1 else unclear_affine(node, graph)


@register_op(
    "aten.layer_norm aten.native_layer_norm npu.layer_norm",
    tensors=("input", "weight", "bias"),
    unsupported=_layer_norm_unsupported,
    one_dtype=True,
)
def lower_layer_norm(ctx: Lowering, node: OpNode) -> None:
    """Lower (x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, those of `normalized_shape`."""
    x, *affine = (ctx.view(name) for name in node.inputs)
    width = numel(node.attrs.get("normalized_shape") or [x.shape[-1]])
    out, rows = ctx.output(), _rows(ctx, x, width)
    flat = out.reshape(rows.shape)
    assert flat is not None
    params = {
        "rows": rows.shape[0],
        "width": width,
        "eps": float(node.attrs.get("eps", 1e-5)),
        "has_weight": int(len(affine) > 0),
        "has_bias": int(len(affine) > 1),
    }
    vectors = [ctx.contiguous(ctx.reshaped(v, (width,))) for v in affine]
    ctx.emit("layernorm_kernel", [rows, *vectors], [flat], params, flops=8 * x.numel)


def _group_norm(ctx: Lowering, x: View, affine: list[View], groups: int, eps: float) -> None:
    params = {"groups": groups, "eps": eps, "has_weight": int(len(affine) > 0), "has_bias": int(len(affine) > 1)}
    ctx.emit("groupnorm_kernel", [x, *affine], [ctx.output()], params, flops=8 * x.numel)


@register_op(
    "aten.group_norm",
    tensors=("input", "weight", "bias"),
    unsupported=unclear_affine,
    layout=Layout.IMAGE,
    one_dtype=True,
)
def lower_group_norm(ctx: Lowering, node: OpNode) -> None:
    x, *affine = (ctx.view(name) for name in node.inputs)
    _group_norm(ctx, x, affine, node.attrs["num_groups"], float(node.attrs.get("eps", 1e-5)))


def _instance_norm_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    if not node.attrs.get("use_input_stats", True):
        return "instance normalization with running statistics"
    if len(node.inputs) > 3:
        return "instance normalization with running statistics"
    return unclear_affine(node, graph)


@register_op(
    "aten.instance_norm", tensors=("input", "weight", "bias"), unsupported=_instance_norm_unsupported, one_dtype=True
)
def lower_instance_norm(ctx: Lowering, node: OpNode) -> None:
    x, *affine = (ctx.view(name) for name in node.inputs)
    _group_norm(ctx, x, affine, x.shape[1], float(node.attrs.get("eps", 1e-5)))


@register_op("npu.rope", tensors=("x", "cos", "sin"))
def lower_rope(ctx: Lowering, node: OpNode) -> None:
    """Lower x · cos + rotate_half(x) · sin over the last dimension of [B, H, T, D]."""
    x, cos, sin = (ctx.view(name) for name in node.inputs)
    x = ctx.inner_contiguous(x)
    lead = x.shape[:-1]
    cos, sin = (v.expand((*lead, v.shape[-1])) for v in (cos, sin))
    ctx.emit("rope_kernel", [x, cos, sin], [ctx.output()], {"rotary_dim": cos.shape[-1]}, flops=3 * x.numel)


@register_op("npu.rope_pairs", tensors=("x", "cos", "sin"))
def lower_rope_pairs(ctx: Lowering, node: OpNode) -> None:
    """Lower x · cos + turned · sin, where turned has −b, a for each pair a, b of neighbours of x's last dimension."""
    out = ctx.output()
    x, cos, sin = (ctx.view(name).expand(out.shape) for name in node.inputs)

    def side(view: View, odd: int) -> View:
        return view.slice(out.rank - 1, odd, out.shape[-1], 2)

    for odd, sign in ((0, -1.0), (1, 1.0)):
        kept = ctx.temp(side(out, odd).shape, "float32")
        ctx.elementwise("mul", [side(x, odd), side(cos, odd)], kept)
        ctx.elementwise("addcmul", [kept, side(x, 1 - odd), side(sin, odd)], side(out, odd), {"value": sign})


def _attention_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    if node.attrs.get("dropout_p"):
        return "attention with dropout"
    if not 0 <= (soft_cap := node.attrs.get("soft_cap", 0.0)) < math.inf:
        return f"attention with a soft cap of {soft_cap}"
    shapes = [graph.tensors[name].shape for name in node.inputs[:3]]
    if any(len(shape) < 2 for shape in shapes) or len({len(shape) for shape in shapes}) > 1:
        return f"attention over shapes {[list(shape) for shape in shapes]}"
    if shapes[0][-1] == 0:
        return "attention over heads of width 0"
    query, key, value = shapes
    if key[:-1] != value[:-1]:
        return "attention whose keys and values have other batch shapes"
    if len(query) >= 4 and (query[:-3] != key[:-3] or key[-3] == 0 or query[-3] % key[-3]):
        return "attention whose batches broadcast"
    if len(query) == 3 and query[0] != key[0]:
        return "attention whose batches broadcast"
    if name := Args(node).tensor("attn_mask"):
        mask, scores = graph.tensors[name].shape, (*query[:-1], key[-2])
        pairs = zip(reversed(mask), reversed(scores), strict=False)
        per_batch = len(scores) > 4 and any(size > 1 for size in mask[:-3])
        if len(mask) > len(scores) or per_batch or any(size not in (1, whole) for size, whole in pairs):
            return f"an attention mask {list(mask)} over scores {list(scores)}"
    if name := Args(node).tensor("sinks"):
        sinks = graph.tensors[name].shape
        if len(query) != 4 or sinks != query[1:2]:
            return f"attention of queries {list(query)} with sinks {list(sinks)}"
    return None


def _with_rows(ctx: Lowering, mask: View) -> View:
    """A mask with contiguous or constant rows, which kernels read as vectors; copied if it has other strides.

    The copy does not repeat elements along broadcast dimensions.
    """
    if mask.rank == 0 or mask.shape[-1] == 1 or mask.strides[-1] in (0, 1):
        return mask
    once = tuple(1 if stride == 0 else size for size, stride in zip(mask.shape, mask.strides, strict=True))
    return ctx.inner_contiguous(replace(mask, shape=once)).expand(mask.shape)


def _four_dims(view: View, heads: int) -> Shape:
    """The shape [B, H, T, D] of a tensor [..., T, D] whose dimension `heads` is H and whose others are the batch."""
    batch = numel(view.shape[:-2]) // max(view.shape[heads], 1)
    return (batch, view.shape[heads], *view.shape[-2:])


def _merge(views: Sequence[View], heads: int) -> bool:
    """Whether the dimensions before the last two, except `heads`, are one dimension in memory of all views."""
    others = [dim for dim in range(views[0].rank - 2) if dim != heads]
    order = [*others, heads, views[0].rank - 2, views[0].rank - 1]
    return all(view.permute(order).reshape(_four_dims(view, heads)) is not None for view in views)


@register_op(
    "aten.scaled_dot_product_attention npu.attention",
    tensors=("query", "key", "value", "attn_mask", "sinks"),
    unsupported=_attention_unsupported,
    by_name=True,
    one_dtype=True,
    shard=shard_attention,
)
def lower_attention(ctx: Lowering, node: OpNode) -> None:
    """Lower softmax(scale · q·kᵀ + mask) · v over [B, H, T, D]; query heads share KV heads in order if these are fewer.

    The output is laid out [B, T, H, D] in memory, which makes the transpose and reshape that follow free. Of more than
    four dimensions, all but one of those before the tokens are the batch.

    With a `soft_cap` c above 0, a scaled score s becomes c · tanh(s / c) before the mask is added. With `sinks` [H],
    the softmax of each head of queries [B, H, T, D] has one more score, which is neither scaled nor capped and belongs
    to no key: it takes its share of the weights.
    """
    args = Args(node)
    q, k, v = (ctx.inner_contiguous(ctx.view(name)) for name in node.inputs[:3])
    mask_name = args.tensor("attn_mask")
    mask = _with_rows(ctx, ctx.view(mask_name)) if mask_name else None
    rank = q.rank
    spec = ctx.spec(node.outputs[0])
    if rank <= 4:
        out = ctx.output(order=[0, 2, 1, 3] if rank == 4 else None)
    else:
        alike = mask is None and q.shape[-3] == k.shape[-3]
        heads = next((dim for dim in range(rank - 3, -1, -1) if alike and _merge((q, k, v), dim)), rank - 3)
        others = [dim for dim in range(rank - 2) if dim != heads]
        out = ctx.output(order=[*others, rank - 2, heads, rank - 1])
        order = [*others, heads, rank - 2, rank - 1]
        q, k, v, out = (ctx.reshaped(view.permute(order), _four_dims(view, heads)) for view in (q, k, v, out))
    while mask is not None and mask.rank > 4:
        mask = mask.select(0, 0)
    rank = min(rank, 4)
    while q.rank < 4:
        q, k, v, out = (view.unsqueeze(0) for view in (q, k, v, out))
    inputs = [q, k, v]
    if mask is not None:
        while mask.rank < rank:
            mask = mask.unsqueeze(0)
        while mask.rank < 4:
            mask = mask.unsqueeze(0)
        inputs.append(mask.expand((*q.shape[:3], k.shape[2])))
    if sinks := args.tensor("sinks"):
        inputs.append(ctx.inner_contiguous(ctx.view(sinks)))
    flops = 2 * spec.numel * k.shape[2] + 2 * q.numel * k.shape[2]
    ctx.emit("attention_kernel", inputs, [out], attention_params(node, q), flops=flops)


def attention_params(node: OpNode, query: View) -> dict[str, float | int]:
    """The parameters of an attention kernel; the scale is 1 / sqrt(head size) unless given, the soft cap 0."""
    args, scale = Args(node), node.attrs.get("scale")
    return {
        "scale": 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        "causal": int(bool(node.attrs.get("is_causal"))),
        "soft_cap": float(node.attrs.get("soft_cap", 0.0)),
        "has_mask": int(args.tensor("attn_mask") is not None),
        "has_sinks": int(args.tensor("sinks") is not None),
    }


def _paged_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    shapes = [graph.tensors[name].shape for name in node.inputs]
    (query, keys, values, tables, sequences, positions, *sinks), block = shapes, node.attrs["block_size"]
    if [len(shape) for shape in shapes] != [3, 3, 3, 2, 1, 1, *(1 for _ in sinks)]:
        return f"paged attention over shapes {[list(shape) for shape in shapes]}"
    if keys[:2] != values[:2] or keys[2] != query[2] or keys[1] == 0 or query[1] % keys[1]:
        return f"paged attention of queries {list(query)} over keys {list(keys)} and values {list(values)}"
    if not sequences == positions == query[:1] or 0 in (*tables, query[2]):
        return f"paged attention of queries {list(query)} over tables {list(tables)}"
    if any(shape != query[1:2] for shape in sinks):
        return f"paged attention of queries {list(query)} with sinks {list(sinks[0])}"
    if block < 1 or keys[0] < block or keys[0] % block:
        return f"paged attention over {keys[0]} rows in blocks of {block}"
    window, soft_cap = node.attrs.get("window", 0), node.attrs.get("soft_cap", 0.0)
    if window < 0 or not 0 <= soft_cap < math.inf:
        return f"paged attention with a window of {window} keys and a soft cap of {soft_cap}"
    if graph.tensors[node.inputs[1]].storage != graph.tensors[node.inputs[2]].storage:
        return "paged attention whose keys and values are stored in different dtypes"
    if not all(is_int(graph.tensors[name].dtype) for name in node.inputs[3:6]):
        return "paged attention whose tables, sequences or positions are not integers"
    return None


@register_op(
    "npu.paged_attention",
    tensors=("query", "keys", "values", "tables", "sequences", "positions", "sinks"),
    unsupported=_paged_unsupported,
    one_dtype=True,
    shard=shard_paged_attention,
)
def lower_paged_attention(ctx: Lowering, node: OpNode) -> None:
    """Lower softmax(scale · q·kᵀ) · v for tokens of many sequences, whose keys and values lie in blocks of one pool.

    Query [N, H, D], keys and values [rows, KV, D], tables [S, T], sequences and positions [N] → [N, H, D]. Token n
    attends to positions 0..positions[n] of sequence sequences[n]; the key at position p is row
    tables[sequence, p // block_size] * block_size + p % block_size. An entry that is out of range counts as the nearest
    valid one: a sequence among S, a position among T * block_size, a block among rows / block_size.

    With a `window` above 0 it attends to the last `window` of these positions alone; what the rows of earlier ones and
    their entries in the table hold does not matter. With a `soft_cap` c above 0, a scaled score s becomes c · tanh(s /
    c) before the softmax. With `sinks` [H], the softmax of each head has one more score, which is neither scaled nor
    capped and belongs to no key: it takes its share of the weights.
    """
    q, k, v, *others = (ctx.inner_contiguous(ctx.view(name)) for name in node.inputs)
    tables, _, _, *sinks = others
    out = ctx.output()
    block = int(node.attrs["block_size"])
    window, soft_cap = int(node.attrs.get("window", 0)), float(node.attrs.get("soft_cap", 0.0))
    keys = tables.shape[1] * block
    keys = min(keys, window) if window else keys
    pool_rows = min(k.shape[0], tables.shape[0] * keys)
    read = sum(distinct_bytes(view) * pool_rows // view.shape[0] for view in (k, v))
    params = {"scale": float(node.attrs["scale"]), "block_size": block, "window": window, "soft_cap": soft_cap}
    ctx.emit(
        "paged_attention_kernel",
        [q, k, v, *others],
        [out],
        {**params, "has_sinks": int(bool(sinks))},
        flops=2 * (q.numel + out.numel) * keys,
        bytes_moved=read + sum(distinct_bytes(view) for view in (q, *others, out)),
    )
