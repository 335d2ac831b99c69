"""Products whose rows are quantized first: of their codes, or of the floats that the codes stand for.

Codes are int8 or float8 numbers, one byte each, which tensor cores multiply as they are; each row has one scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from cuda_compiler.cuda_program import GemmLaunch
from cuda_compiler.rules.linear_codes import linear_codes, suits_linear_codes
from cuda_compiler.rules.matmul import CUBLAS_GEMM, VECTOR_ROWS, cublas_activates, epilogue, operands
from cuda_compiler.rules.quantized import linear
from cuda_compiler.rules.rows import held_packs, shared_pack, small_teams_for
from cuda_compiler.specialization.c_text import TYPES
from cuda_compiler.specialization.gpu import GPU
from cuda_compiler.specialization.sizes import Size3, groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from cuda_compiler.specialization.template_files import template_text
from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.views import View

_UNIT = 16  # bytes that rows of operands and of the result must be a multiple of
_FEWEST_ROWS = 17  # of a product of int8 by cuBLASLt


class RoundedForm(NamedTuple):
    """The form in which a product reads its quantized rows.

    Attributes:
        codes: Format of the quantized rows, one of `ROW_FORMATS`.
        dtype: `uint8` if the product reads the codes, with a scale for each row; else the dtype of the floats that the
            codes stand for.
    """

    codes: str
    dtype: str


class RoundedRows(NamedTuple):
    """Quantized rows [m, k]; and a scale for each row [m] if they are codes, else None."""

    rows: View
    scales: View | None


class UnscaledProduct(NamedTuple):
    """A product [m, n] of codes before it is multiplied by the scales of its rows [m] and its columns [n]."""

    out: View
    row_scales: View
    column_scales: View


@dataclass(frozen=True)
class RowOrigin:
    """The computation of the rows [m, k] that are to be quantized; its steps have the order of the attributes.

    Each step's result has the dtype `stored`.

    Attributes:
        x: The rows, or the operand that they are computed from.
        row_scales, column_scales: Scales of x if it is an unscaled product, else None. The row scales apply to `other`
            too.
        residual: Addend of an unscaled product x; None for none.
        total: The view in which that sum is stored; None if nothing else reads it.
        function: C definition of an element-wise `float made(float a, float b)` of x and `other`; empty for none.
        other, other_scales: The function's second operand and the scales of its columns; None for none.
        weight, eps, weight_offset: Parameters of the RMSNorm of the result; `eps` is None if there is no norm, `weight`
            if the norm has no gains.
    """

    x: View
    stored: str
    row_scales: View | None = None
    column_scales: View | None = None
    residual: View | None = None
    total: View | None = None
    function: str = ""
    other: View | None = None
    other_scales: View | None = None
    weight: View | None = None
    eps: float | None = None
    weight_offset: float = 0.0


def wanted_form(call: KernelCall, gpu: GPU) -> RoundedForm | None:
    """The form in which a product reads its quantized rows on this GPU; None if `call` quantizes no rows."""
    if call.kernel not in RULES:
        return None
    codes = call.params["activations"]
    if call.params["m"] <= VECTOR_ROWS:
        return RoundedForm(codes, "float32")
    return RoundedForm(codes, "uint8" if _multiplies_bytes(call, gpu) else call.inputs[0].dtype)


def _multiplies_bytes(call: KernelCall, gpu: GPU) -> bool:
    """Whether the GPU multiplies the codes as they are: x and weight have one format, and each weight row one scale."""
    params, inputs, out = call.params, operands(call), call.outputs[0]
    data, scales = inputs["data"], inputs["scales"]
    assert data is not None and scales is not None
    if params["codes"] != params["activations"] or params["offsets"] != "none" or params["groups"] != 1:
        return False
    if scales.dtype != "float32" or params["k"] % _UNIT or params["n"] % _UNIT or vector_width(data) < _UNIT:
        return False
    if not CODE_FORMATS[params["codes"]].is_float:
        return gpu.multiplies_int8 and params["m"] >= _FEWEST_ROWS
    return gpu.multiplies_float8 and out.dtype in HALF_DTYPES  # float32 results are to be exacter than its sums


def scales_products(make: Specializer, call: KernelCall) -> bool:
    """Whether cuBLASLt can multiply a product of codes by the scales of its rows and columns."""
    return CODE_FORMATS[call.params["codes"]].is_float and make.gpu.scales_products


def row_teams(origin: RowOrigin, out: View) -> tuple[dict[str, bool | int | float], tuple[Size3, Size3], bool]:
    """The division of rows among teams of threads (see `rows.py`), for the kernel that quantizes them to 8 bits.

    Args:
        origin: The computation of the rows.
        out: The view of the quantized rows.

    Returns:
        The constants of the kernel's template, its grid and block, and whether the registers of a team hold a whole
        row.
    """
    views = (origin.x, origin.other, origin.residual, origin.total, origin.weight, out)
    pack = shared_pack(view for view in views if view is not None)
    for scales in (origin.column_scales, origin.other_scales):
        pack = pack if scales is None else min(pack, vector_width(scales))
    rows, width = origin.x.shape
    constants, grid, block = small_teams_for(rows, groups(width, pack))
    held = held_packs(width // pack, block, constants["teams"])
    whole = width % pack == 0 and width // pack <= held * (block[0] // int(constants["teams"]))
    return {**constants, "pack": pack, "held_packs": held}, (grid, block), whole


def can_hold(rows: View) -> bool:
    """Whether the threads that quantize rows hold a whole row in registers, as a fused norm needs."""
    return row_teams(RowOrigin(rows, rows.dtype), replace(rows, dtype="uint8"))[2]


def round_rows(
    make: Specializer, call: KernelCall, form: RoundedForm, origin: RowOrigin
) -> tuple[KernelCall, RoundedRows]:
    """The call that computes rows and quantizes them, and the buffers in which it stores them.

    Args:
        call: The call that the new call replaces or belongs to, for reports.
        form: The format to quantize to, and whether codes or the floats that they stand for are stored.
        origin: The computation of the rows.
    """
    rows, width = origin.x.shape
    out = make.temporary(call.node, (rows, width), form.dtype)
    scales = make.temporary(call.node, (rows,), "float32") if form.dtype == "uint8" else None
    constants, (grid, block), _ = row_teams(origin, out)
    nothing = "__device__ __forceinline__ float made(float a, float) { return a; }"
    definitions = (f"using Stored = {TYPES[origin.stored]};", template_text("elementwise/elementwise.cuh"))
    rounding = make.kernel(
        replace(call, kernel="rounded_rows", params={}),
        "norms/rounded_rows.cu",
        inputs={
            "x": origin.x,
            "rows": origin.row_scales,
            "columns": origin.column_scales,
            "residual": origin.residual,
            "other": origin.other,
            "beside": origin.other_scales,
            "weight": origin.weight,
        },
        outputs={"out": out, "scales": scales, "total": origin.total},
        grid=grid,
        block=block,
        constants={
            **constants,
            "to_int8": not CODE_FORMATS[form.codes].is_float,
            "is_made": bool(origin.function),
            "is_normed": origin.eps is not None,
            "eps": float(origin.eps or 0.0),
            "weight_offset": float(origin.weight_offset),
        },
        definitions="\n".join((*definitions, origin.function or nothing, "")),
    )
    moved = sum(map(distinct_bytes, (*rounding.inputs, *rounding.outputs)))
    return replace(rounding, bytes_moved=moved), RoundedRows(out, scales)


def keep_rounded(make: Specializer, subject: View, form: RoundedForm, rounded: RoundedRows) -> None:
    """Cache quantized rows until `subject` is written, so that `_linear` finds those that are floats."""
    make.cache((subject, form), rounded.rows)


def _linear(make: Specializer, call: KernelCall, gated: bool = False) -> list[KernelCall]:
    """The calls of a product of floats whose rows are quantized and dequantized first, unless such rows are cached.

    Products of codes do not come here: `passes/rounded_rows.py` expands them, with all calls in sight.
    """
    inputs, form = operands(call), wanted_form(call, make.gpu)
    x = inputs["x"]
    assert x is not None and form is not None and form.dtype != "uint8"
    rows, calls = make.cached((x, form)), []
    if rows is None:
        rounding, (rows, _) = round_rows(make, call, form, RowOrigin(x, x.dtype))
        make.cache((x, form), rows)
        calls.append(replace(rounding, flops=0))
    return [*calls, *linear(make, call, {**inputs, "x": rows}, gated)]


def product_of_codes(make: Specializer, call: KernelCall, rounded: RoundedRows) -> list[KernelCall]:
    """The calls for act((rows · weightᵀ) · scales + bias) + residual, where rows and weight are codes.

    They are one kernel of ours, or cuBLASLt and an epilogue for what it lacks.
    """
    inputs, out, activation = operands(call), call.outputs[0], call.params["activation"]
    bias, residual = inputs["bias"], inputs["residual"]
    if suits_linear_codes(make, call):
        return [linear_codes(make, call, rounded.rows, _scales(call, rounded), inputs, out)]
    if not scales_products(make, call):
        product, (sums, *scales) = unscaled_product(make, call, rounded, "float32")
        return [product, epilogue(make, call, sums, bias, residual, out, (scales[0], scales[1]))]
    scales_of = _scales(call, rounded)
    by_cublas = activation == "none" or residual is None and cublas_activates(activation, out.dtype)
    if by_cublas and all(view is None or _fits(view, out) for view in (bias, residual, out)):
        return [_gemm(call, rounded.rows, out, scales_of, bias, residual, activation)]
    between = make.temporary(call.node, out.shape, "float32")
    product = _gemm(call, rounded.rows, between, scales_of)
    return [product, epilogue(make, call, between, bias, residual, out)]


def joined_product(make: Specializer, call: KernelCall, rounded: RoundedRows, function: str, out: View) -> KernelCall:
    """The call of a product of codes [m, n], fused with an element-wise function of its left and right halves.

    `suits_linear_codes` must hold for the call. The halves are, for example, the gate and up projections of an MLP.

    Args:
        function: C definition of `float made(float a, float b)`.
        out: The result [m, n / 2], in the product's dtype.
    """
    return linear_codes(make, call, rounded.rows, _scales(call, rounded), operands(call), out, function)


def unscaled_product(
    make: Specializer, call: KernelCall, rounded: RoundedRows, dtype: str
) -> tuple[KernelCall, UnscaledProduct]:
    """The call for rows · weightᵀ of codes, and its result in a new buffer: int32 for integers, else `dtype`."""
    kind = dtype if CODE_FORMATS[call.params["codes"]].is_float else "int32"
    out = make.temporary(call.node, call.outputs[0].shape, kind)
    return _gemm(call, rounded.rows, out), UnscaledProduct(out, *_scales(call, rounded))


def _scales(call: KernelCall, rounded: RoundedRows) -> tuple[View, View]:
    columns = operands(call)["scales"]
    assert rounded.scales is not None and columns is not None
    return rounded.scales, columns.select(1, 0)


def _fits(view: View, out: View) -> bool:
    """Whether cuBLASLt can add a view to the result, or write the result there: it is aligned and has that dtype."""
    return view.dtype == out.dtype and vector_width(view) * itemsize(view.dtype) >= _UNIT


def _gemm(
    call: KernelCall,
    rows: View,
    out: View,
    scales: tuple[View, ...] = (),
    bias: View | None = None,
    residual: View | None = None,
    activation: str = "none",
) -> KernelCall:
    data = operands(call)["data"]
    assert data is not None
    launch = GemmLaunch(
        m=out.shape[0],
        n=out.shape[1],
        k=rows.shape[1],
        lda=rows.strides[0],
        ldb=data.strides[0],
        ldr=out.strides[0] if residual is None else residual.strides[0],
        ldc=out.strides[0],
        trans_b=True,
        activation=activation,
        has_bias=bias is not None,
        has_residual=residual is not None,
        codes=call.params["codes"],
        has_scales=bool(scales),
        fast_sums=call.outputs[0].dtype == "bfloat16",
    )
    present = tuple(view for view in (rows, data.transpose(0, 1), bias, residual, *scales) if view is not None)
    return replace(call, kernel=CUBLAS_GEMM, source="", inputs=present, outputs=(out,), params=launch.params())


RULES: dict[str, Rule] = {
    "dynamic_quantized_matmul_kernel": _linear,
    "dynamic_quantized_gated_matmul_vec_kernel": partial(_linear, gated=True),
}
