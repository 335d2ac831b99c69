"""Products and lookups with quantized weights, whose codes the kernels unpack in registers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.graph.model import OpNode
from npu_compiler.graph.quantization import OFFSETS, ROW_FORMATS, QuantizedFormat
from npu_compiler.ops.indexing import is_checked_index
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.matmul import packed_rows
from npu_compiler.ops.registry import register_op
from npu_compiler.program.elementwise import ACTIVATION
from npu_compiler.program.kernels import Family, Grid, KernelCall, declare_kernel, distinct_bytes
from npu_compiler.program.products import Product
from npu_compiler.program.views import View
from npu_compiler.target_config import KERNEL_CODES

QUANTIZED_FIELDS: dict[str, Any] = {
    "k": "I",
    "groups": "I",
    "codes": f"s {' '.join(KERNEL_CODES)}",
    "offsets": f"s {' '.join(OFFSETS)}",
}
QUANTIZED_WEIGHT = "data:u[{rows},.bytes] scales:f[{rows},.groups] offset?:fu[{rows},.groups]"


def stores_rows(call: SimpleNamespace) -> bool:
    """Whether the codes, scales and offsets of a call fit each other, as parts of rows of k elements."""
    dtype = None if call.offset is None else call.offset.dtype
    wanted = {"none": None, "minimum": call.scales.dtype, "zero_point": "uint8"}[call.offsets]
    divides = call.groups > 0 and call.k % call.groups == 0
    return bool(divides and dtype == wanted and call.bytes * 8 == call.k * CODE_FORMATS[call.codes].bits)


def _holds_gated_rows(call: SimpleNamespace) -> bool:
    """Whether a call has one row of x, and a quantized weight with the rows of a gate and of what it multiplies."""
    return call.m == 1 and call.rows == 2 * call.n and stores_rows(call)


def _products(call: SimpleNamespace) -> tuple[Product, ...]:
    return (Product(call.m, call.n, call.k),)


def _gated_products(call: SimpleNamespace) -> tuple[Product, ...]:
    return (Product(call.m, call.rows, call.k),)


for _name, _grid, _rows_of_x in (
    ("quantized_matmul_kernel", Grid.TILES, "m"),
    ("quantized_matmul_vec_kernel", Grid.CODE_COLUMNS, "1"),
):
    declare_kernel(
        _name,
        Family.MATMUL,
        f"x:f[{_rows_of_x},.k] {QUANTIZED_WEIGHT.format(rows='n')} bias?:f[.n] residual?:f[m,.n] -> out:f[m,n]",
        source="quantized.metal",
        grid=_grid,
        where=stores_rows,
        products=_products,
        m="I",
        n="I",
        **QUANTIZED_FIELDS,
        activation=ACTIVATION,
    )
declare_kernel(
    "quantized_gated_matmul_vec_kernel",
    Family.MATMUL,
    f"x:f[1,.k] {QUANTIZED_WEIGHT.format(rows='rows')} bias?:f[.rows] -> out:f[m,n]",
    source="quantized.metal",
    grid=Grid.CODE_COLUMNS,
    where=_holds_gated_rows,
    products=_gated_products,
    m="I",
    n="I",
    **QUANTIZED_FIELDS,
    activation=ACTIVATION,
)
# The same products with the rows of x rounded first (`quantize_rows`); the sums of integers within a group are exact.
for _name, _sizes, _operands in (
    ("dynamic_quantized_matmul_kernel", "m", f"{QUANTIZED_WEIGHT.format(rows='n')} bias?:f[.n] residual?:f[m,.n]"),
    ("dynamic_quantized_gated_matmul_vec_kernel", "1", f"{QUANTIZED_WEIGHT.format(rows='rows')} bias?:f[.rows]"),
):
    declare_kernel(
        _name,
        Family.MATMUL,
        f"x:f[{_sizes},.k] {_operands} -> out:f[m,n]",
        where=stores_rows if _sizes == "m" else _holds_gated_rows,
        products=_products if _sizes == "m" else _gated_products,
        m="I",
        n="I",
        **QUANTIZED_FIELDS,
        activation=ACTIVATION,
        activations=f"s {' '.join(ROW_FORMATS)}",
    )
declare_kernel(
    "quantized_embedding_kernel",
    Family.INDEXING,
    f"{QUANTIZED_WEIGHT.format(rows='rows')} ids:i[*s] -> out:f[*s,k]",
    source="quantized.metal",
    grid=Grid.TABLE_ROWS,
    where=stores_rows,
    index_limit=lambda call: call.rows,
    rows="I",
    **QUANTIZED_FIELDS,
    checked="?",
)


def is_quantized(call: KernelCall) -> bool:
    """Whether a kernel call reads a quantized weight."""
    return "codes" in call.params


def quantized_parts(ctx: Lowering, node: OpNode, first: int) -> tuple[list[View], list[View], dict[str, int | str]]:
    """The parts of a quantized weight, from input `first` on; the inputs after them; and the kernel's parameters."""
    format: QuantizedFormat = node.attrs["format"]
    views = [ctx.view(name) for name in node.inputs[first:]]
    count = 2 if format.offsets == "none" else 3
    data, scales = views[:2]
    params: dict[str, int | str] = {
        "k": data.shape[1] * 8 // format.bits,
        "groups": scales.shape[1],
        "codes": format.codes,
        "offsets": format.offsets,
        "has_offset": int(count == 3),
    }
    return views[:count], views[count:], params


@register_op("npu.quantized_linear", tensors=("input", "codes", "scales", "offsets", "bias", "residual"))
def lower_quantized_linear(ctx: Lowering, node: OpNode) -> None:
    """Lower act(x · weightᵀ + bias) + residual; attributes are those of `npu.linear`, and the weight's format."""
    weight, rest, params = quantized_parts(ctx, node, 1)
    rows, out = packed_rows(ctx, ctx.view(node.inputs[0])), ctx.output()
    has_residual = bool(node.attrs.get("has_residual"))
    m, n = rows.shape[0], weight[0].shape[0]
    residual = packed_rows(ctx, rest.pop().expand(out.shape)) if has_residual else None
    bias = ctx.inner_contiguous(rest.pop()) if rest else None
    out_rows = out.reshape((m, n))
    assert out_rows is not None
    params |= {
        "m": m,
        "n": n,
        "has_bias": int(bias is not None),
        "has_residual": int(has_residual),
        "activation": node.attrs.get("activation", "none"),
    }
    inputs = [rows, *weight, *(view for view in (bias, residual) if view is not None)]
    kernel = "quantized_matmul_vec_kernel" if m == 1 else "quantized_matmul_kernel"
    if (activations := node.attrs["format"].activations) != "none":
        kernel = "dynamic_quantized_matmul_kernel"
        params["activations"] = activations
    ctx.emit(kernel, inputs, [out_rows], params, flops=2 * m * n * rows.shape[1])


@register_op("npu.quantized_gated_linear", tensors=("input", "codes", "scales", "offsets", "bias"))
def lower_quantized_gated_linear(ctx: Lowering, node: OpNode) -> None:
    """Lower act(x · gateᵀ) · (x · upᵀ) for one row x; the weight [2N, K] holds the rows of gate, then those of up."""
    weight, bias, params = quantized_parts(ctx, node, 1)
    row, out = packed_rows(ctx, ctx.view(node.inputs[0])), ctx.output()
    out_row = out.reshape((1, out.numel))
    assert out_row is not None
    params |= {"m": 1, "n": out.numel, "has_bias": int(bool(bias)), "activation": node.attrs["activation"]}
    flops = 4 * out.numel * row.shape[1]
    kernel = "quantized_gated_matmul_vec_kernel"
    if (activations := node.attrs["format"].activations) != "none":
        kernel = "dynamic_quantized_gated_matmul_vec_kernel"
        params["activations"] = activations
    ctx.emit(kernel, [row, *weight, *bias], [out_row], params, flops=flops)


@register_op("npu.quantized_embedding", tensors=("codes", "scales", "offsets", "indices"))
def lower_quantized_embedding(ctx: Lowering, node: OpNode) -> None:
    weight, (ids,), params = quantized_parts(ctx, node, 0)
    params |= {"rows": weight[0].shape[0], "checked": is_checked_index(ctx, node.inputs[-1])}
    out = ctx.output()
    stored = sum(distinct_bytes(part) for part in weight) // weight[0].shape[0]
    touched = distinct_bytes(ids) + ids.numel * stored + distinct_bytes(out)
    ctx.emit("quantized_embedding_kernel", [*weight, ids], [out], params, bytes_moved=touched)
