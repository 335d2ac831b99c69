"""Rules of matrix products: our own kernels for few rows, cuBLASLt for many, a general kernel for the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from cuda_compiler.cuda_program import GemmLaunch, LaunchKind
from cuda_compiler.rules.batched_halves import batched_halves, suits_halves
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES, is_float, itemsize
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View, collapse, numel

CUBLAS_GEMM = LaunchKind.CUBLAS_GEMM.value  # as a kernel's name, for reports
VECTOR_ROWS = 8  # rows up to which a product is bound by the bandwidth of reading the weight
MATVEC_WARPS = 4  # of a block: small blocks leave few multiprocessors idle at the end
FILLING_WARPS = MULTIPROCESSORS * 16  # enough to saturate memory bandwidth
_LOADS = 8  # 16-byte loads of the weight in flight per thread
TILE = 64
_TILE_THREADS = 256
_FEW_TERMS = 64


def _linear(make: Specializer, call: KernelCall, gated: bool = False) -> list[KernelCall]:
    inputs = operands(call)
    x, weight = inputs["x"], inputs["weight"]
    assert x is not None and weight is not None
    if call.params["m"] <= VECTOR_ROWS:
        return [_matvec(make, call, inputs, x, weight, gated)]
    return many_rows(make, call, x, weight.transpose(0, 1), inputs["bias"], inputs["residual"])


def many_rows(
    make: Specializer, call: KernelCall, a: View, b: View, bias: View | None, residual: View | None
) -> list[KernelCall]:
    """The calls for act(a · b + bias) + residual by cuBLASLt, with a second kernel for an epilogue that cuBLASLt lacks.

    Between the two kernels the product is float32, so that the result is rounded once. Only if nothing but a 16-bit
    activation is missing is it rounded before it too, as PyTorch does, which saves most of the memory traffic.
    """
    out, activation = call.outputs[0], call.params["activation"]
    if gemm(call, a, b, out) is None:
        operands = {"left": a, "right": b.transpose(0, 1), "bias": bias, "residual": residual}
        return [_tiled(make, call, "tiled_linear", operands, out)]
    if activation == "none" or residual is None and cublas_activates(activation, out.dtype):
        product = gemm(call, a, b, out, bias=bias, residual=residual, activation=activation)
        if product is not None:
            return [product]
    if residual is None and out.dtype in HALF_DTYPES:
        product = gemm(call, a, b, out, bias=bias)
        if product is not None:
            return [product, epilogue(make, call, out, None, None, out)]
    between = out if out.dtype == "float32" else make.temporary(call.node, out.shape, "float32")
    product = gemm(call, a, b, between)
    assert product is not None
    return [product, epilogue(make, call, between, bias, residual, out)]


def cublas_activates(activation: str, dtype: str) -> bool:
    """Whether cuBLASLt's epilogue has an activation.

    The error of its tanh is about 1e-6, which only a 16-bit result hides.
    """
    return activation == "relu" or activation == "gelu_tanh" and dtype != "float32"


def operands(call: KernelCall) -> dict[str, View | None]:
    """A product's inputs by name; `residual` is None for a gated product, which has none."""
    inputs = KERNELS[call.kernel].inputs_of(call)
    return {**inputs, "residual": inputs.get("residual")}


def _matvec(
    make: Specializer, call: KernelCall, inputs: dict[str, View | None], x: View, weight: View, gated: bool
) -> KernelCall:
    n, k = call.params["n"], call.params["k"]
    outputs = {"out": call.outputs[0]}
    if weight.strides[1] == 1 or k <= 1:
        return _matvec_along_terms(make, call, inputs, x, weight, gated)
    weight = weight.transpose(0, 1)
    pack = min(vector_width(weight), 16 // itemsize(weight.dtype))
    while n % pack:
        pack //= 2
    lanes = min(8, _power_of_two(groups(n, pack)))
    threads = min(512, max(WARP, _power_of_two(groups(k, 4)) * lanes))
    constants = {"gated": gated, "pack": pack, "column_lanes": lanes}
    return make.kernel(
        call,
        "matmul/matvec.cu",
        function="matvec_notrans",
        inputs={**inputs, "weight": weight},
        outputs=outputs,
        grid=(groups(n, lanes * pack), 1, 1),
        block=(threads, 1, 1),
        constants=constants,
    )


def _matvec_along_terms(
    make: Specializer, call: KernelCall, inputs: dict[str, View | None], x: View, weight: View, gated: bool
) -> KernelCall:
    """The call of a kernel with one warp per output column, or several if one would not saturate memory bandwidth.

    Args:
        gated: Whether the weight holds the rows of a gate, then those of what it multiplies.
    """
    n, k = call.params["n"], call.params["k"]
    pack = min(vector_width(weight), vector_width(x), 16 // itemsize(weight.dtype))
    packs = groups(k, pack)
    terms = 2 if gated else 1
    columns = 2 if not gated and n >= 8 * FILLING_WARPS else 1
    splits = matvec_splits(n // columns, packs)
    steps_at_once = unrolled(max(1, k // (splits * WARP * pack)), max(1, _LOADS // (terms * columns)))
    constants = {"gated": gated, "pack": pack, "columns": columns, "splits": splits, "unrolled": steps_at_once}
    return make.kernel(
        call,
        "matmul/matvec.cu",
        function="matvec",
        inputs=inputs,
        outputs={"out": call.outputs[0]},
        grid=(groups(n, MATVEC_WARPS // splits * columns), 1, 1),
        block=(MATVEC_WARPS * WARP, 1, 1),
        constants=constants,
        min_blocks=8 if call.params["m"] == 1 else 4,
    )


def matvec_splits(teams: int, packs: int) -> int:
    """Number of warps that divide the terms of one result, so that there are enough warps to saturate memory bandwidth.

    Args:
        teams: Number of such groups of warps.
        packs: Vector accesses that the terms of a result take.
    """
    splits = 1
    while splits < MATVEC_WARPS and teams * splits < FILLING_WARPS and packs // (WARP * splits) >= 4:
        splits *= 2
    return splits


def unrolled(steps: int, most: int) -> int:
    """Factor to unroll a loop of `steps` steps by: their largest divisor from most / 2 + 1 to `most`, else `most`."""
    return max((count for count in range(most // 2 + 1, most + 1) if steps % count == 0), default=most)


def _power_of_two(count: int) -> int:
    """The greatest power of two that is not above `count`."""
    return 1 << (count.bit_length() - 1)


def _batched(make: Specializer, call: KernelCall) -> list[KernelCall]:
    (a, b), out = call.inputs, call.outputs[0]
    product = gemm(call, a, b, out, call.params["scale"])
    if product is not None:
        return [product]
    if has_few_rows(call):
        return [_few_rows(make, call)]
    if suits_halves(call):
        return [batched_halves(make, call)]
    return [_tiled(make, call, "tiled_batched", {"left": a, "right": b.transpose(-1, -2)}, out)]


def has_few_rows(call: KernelCall) -> bool:
    """Whether a batched product has so few rows and terms that reading the right matrices once is most of its work."""
    views = (*call.inputs, *call.outputs)
    few = 0 < call.outputs[0].shape[-2] <= VECTOR_ROWS and 0 < call.inputs[0].shape[-1] <= _FEW_TERMS
    return few and all(is_float(view.dtype) for view in views)


def _few_rows(make: Specializer, call: KernelCall) -> KernelCall:
    (a, b), (out,) = call.inputs, call.outputs
    along = b.strides[-2] == 1 and b.strides[-1] != 1
    side = b.transpose(-1, -2) if along else b
    pack = min(vector_width(side), 16 // itemsize(b.dtype))
    while side.shape[-1] % pack:
        pack //= 2
    return make.kernel(
        call,
        "matmul/few_rows.cu",
        function="few_rows",
        inputs={"left": a, "right": b},
        outputs={"out": out},
        grid=(groups(out.numel // (out.shape[-2] * (1 if along else pack)), _TILE_THREADS), 1, 1),
        block=(_TILE_THREADS, 1, 1),
        constants={"pack": pack, "along": along, "whole": vector_width(out) >= pack},
    )


def _tiled(make: Specializer, call: KernelCall, function: str, inputs: dict[str, View | None], out: View) -> KernelCall:
    *batch, m, n = out.shape
    blocks = numel(batch) * groups(m, TILE) * groups(n, TILE)
    return make.kernel(
        call,
        "matmul/matmul.cu",
        function=function,
        inputs=inputs,
        outputs={"out": out},
        grid=(blocks, 1, 1),
        block=(_TILE_THREADS, 1, 1),
    )


def _linear_epilogue(make: Specializer, call: KernelCall) -> list[KernelCall]:
    product, bias, residual, out = KERNELS[call.kernel].bind(call)
    assert product is not None and out is not None
    return [epilogue(make, call, product, bias, residual, out)]


def epilogue(
    make: Specializer,
    call: KernelCall,
    product: View,
    bias: View | None,
    residual: View | None,
    out: View,
    scales: tuple[View, View] | None = None,
) -> KernelCall:
    """The call of a kernel for out = act(product + bias) + residual.

    Args:
        scales: Float32 factors of the product's rows [m] and columns [n], applied first; None for none.
    """
    row_scales, column_scales = scales or (None, None)
    views = [view for view in (product, column_scales, bias, residual, out) if view is not None]
    pack = min(8, *(vector_width(view) for view in views))
    rows, columns = out.shape
    while columns % pack:
        pack //= 2
    inputs = {
        "product": product,
        "bias": bias,
        "residual": residual,
        "rows": row_scales,
        "columns": column_scales,
    }
    kernel = make.kernel(
        call,
        "matmul/matmul.cu",
        function="linear_epilogue",
        inputs=inputs,
        outputs={"out": out},
        grid=(groups(rows * columns // pack, 256), 1, 1),
        block=(256, 1, 1),
        constants={"pack": pack},
    )
    return replace(kernel, flops=0, bytes_moved=0) if call.kernel != "linear_epilogue_kernel" else kernel


def gemm(
    call: KernelCall,
    a: View,
    b: View,
    out: View,
    alpha: float = 1.0,
    bias: View | None = None,
    residual: View | None = None,
    activation: str = "none",
) -> KernelCall | None:
    """The cuBLASLt call for out[…, M, N] = act(alpha · a[…, M, K] · b[…, K, N] + residual[…, M, N] + bias[N]).

    None if cuBLASLt does not take the operands: rows or columns of a matrix must be contiguous and, if there is an
    epilogue, aligned and a whole number of vectors wide; bias and residual must have the result's dtype.
    """
    has_epilogue = bias is not None or residual is not None or activation != "none"
    beneath = out if residual is None else residual
    if not _fits_gemm(a, b, out, bias, residual) or has_epilogue and not _fits_epilogue(a, b, beneath, out):
        return None
    if _leading(out) is None:
        a, b = b.transpose(-1, -2), a.transpose(-1, -2)
        out, beneath = out.transpose(-1, -2), beneath.transpose(-1, -2)
    lead = out.shape[:-2]
    batch, strides = collapse(lead, *(view.strides[: len(lead)] for view in (a, b, beneath, out)))
    ldc, ldr = _leading(out), _leading(beneath)
    if ldc is None or ldr is None or len(batch) > 1:
        return None
    lda, ldb = (_leading(view) or _leading(view.transpose(-1, -2)) for view in (a, b))
    if lda is None or ldb is None:
        return None
    stride_a, stride_b, stride_r, stride_c = (step[0] if step else 0 for step in strides)
    launch = GemmLaunch(
        m=out.shape[-2],
        n=out.shape[-1],
        k=a.shape[-1],
        lda=lda,
        ldb=ldb,
        ldr=ldr,
        ldc=ldc,
        trans_a=_leading(a) is None,
        trans_b=_leading(b) is None,
        batch=numel(batch),
        stride_a=stride_a,
        stride_b=stride_b,
        stride_r=stride_r,
        stride_c=stride_c,
        alpha=alpha,
        activation=activation,
        has_bias=bias is not None,
        has_residual=residual is not None,
    )
    inputs = tuple(view for view in (a, b, bias, None if residual is None else beneath) if view is not None)
    return replace(call, kernel=CUBLAS_GEMM, source="", inputs=inputs, outputs=(out,), params=launch.params())


def _fits_gemm(a: View, b: View, out: View, bias: View | None, residual: View | None) -> bool:
    """Whether cuBLASLt takes the dtypes of a product's operands, and the bias is one value per column."""
    floats = a.dtype == b.dtype and is_float(a.dtype) and out.dtype in (a.dtype, "float32")
    addends = all(view is None or view.dtype == out.dtype for view in (bias, residual))
    along_rows = bias is None or (_leading(out) is not None and _leading(bias.unsqueeze(0)) is not None)
    return floats and addends and along_rows and 0 not in (*a.shape, *b.shape)


def _fits_epilogue(a: View, b: View, beneath: View, out: View) -> bool:
    """Whether cuBLASLt adds bias and residual before rounding: all rows of the operands are whole aligned vectors.

    Otherwise it rounds the product before it adds them.
    """
    whole = out.shape[-1] * itemsize(out.dtype) % 16 == 0
    return whole and all(is_aligned(view) for view in (a, b, beneath, out))


def is_aligned(matrix: View) -> bool:
    """Whether every row of a matrix, or every column, begins at a multiple of 16 bytes."""
    return max(map(vector_width, (matrix, matrix.transpose(-1, -2)))) * itemsize(matrix.dtype) >= 16


def _leading(matrix: View) -> int | None:
    """The leading dimension of a matrix with contiguous rows; None where they are not contiguous, or overlap."""
    (rows, columns), (step, inner) = matrix.shape[-2:], matrix.strides[-2:]
    if columns > 1 and inner != 1 or rows > 1 and step < columns:
        return None
    return max(1, step if rows > 1 else columns)


RULES: dict[str, Rule] = {
    "matmul_kernel": _linear,
    "matmul_vec_kernel": _linear,
    "matmul_notrans_kernel": _linear,
    "matmul_vec_notrans_kernel": _linear,
    "gated_matmul_vec_kernel": partial(_linear, gated=True),
    "batched_matmul_kernel": _batched,
    "linear_epilogue_kernel": _linear_epilogue,
}
