"""Template rules of matrix products: our own kernels for few rows, cuBLAS for many, a general kernel for the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cuda_compiler.cuda_templates import WARP, Specializer, groups, template_rule, vector_width
from npu_compiler.codegen_core import KERNELS, KernelCall
from npu_compiler.dtypes import is_float, itemsize
from npu_compiler.views import View, collapse, numel

VECTOR_ROWS = 8  # up to so many rows a product is bound by the bandwidth of reading the weight
_WARPS = 4  # of a block: small blocks leave few multiprocessors idle at the end
_FILLING_WARPS = 132 * 16  # enough to keep the memory of a large GPU busy
_LOADS = 8  # 16-byte loads of the weight that a thread has on their way
_TILE = 64
_TILE_THREADS = 256


@template_rule("matmul_kernel", "matmul_vec_kernel", "matmul_notrans_kernel", "matmul_vec_notrans_kernel",
               "gated_matmul_vec_kernel")  # fmt: skip
def _linear(make: Specializer, call: KernelCall) -> list[KernelCall]:
    inputs = _operands(call)
    x, weight = inputs["x"], inputs["weight"]
    assert x is not None and weight is not None
    if call.params["m"] <= VECTOR_ROWS:
        return [_matvec(make, call, inputs, x, weight)]
    out = call.outputs[0]
    product = gemm(call, x, weight.transpose(0, 1), out)
    if product is None:
        operands = {"left": x, "right": weight, "bias": inputs["bias"], "residual": inputs["residual"]}
        return [_tiled(make, call, "tiled_linear", operands, out)]
    return _with_epilogue(make, call, product, inputs["bias"], inputs["residual"])


def _operands(call: KernelCall) -> dict[str, View | None]:
    """The inputs by name; a gated product has no residual."""
    decl = KERNELS[call.kernel]
    bound = dict(zip((operand.name for operand in decl.inputs), decl.bind(call), strict=False))
    return {name: bound.get(name) for name in ("x", "weight", "bias", "residual")}


def _matvec(make: Specializer, call: KernelCall, inputs: dict[str, View | None], x: View, weight: View) -> KernelCall:
    n, k = call.params["n"], call.params["k"]
    gated = call.kernel == "gated_matmul_vec_kernel"
    outputs = {"out": call.outputs[0]}
    if weight.strides[1] == 1 or k <= 1:
        return _matvec_along_terms(make, call, inputs, x, weight)
    weight = weight.transpose(0, 1)
    pack = min(vector_width(weight), 16 // itemsize(weight.dtype))
    while n % pack:
        pack //= 2
    lanes = min(8, _power_of_two(groups(n, pack)))
    threads = min(512, max(WARP, _power_of_two(groups(k, 4)) * lanes))
    constants = {"gated": gated, "pack": pack, "column_lanes": lanes}
    return make.kernel(call, "matvec.cu", function="matvec_notrans", inputs={**inputs, "weight": weight},
                       outputs=outputs, grid=(groups(n, lanes * pack), 1, 1), block=(threads, 1, 1),
                       constants=constants)  # fmt: skip


def _matvec_along_terms(
    make: Specializer, call: KernelCall, inputs: dict[str, View | None], x: View, weight: View
) -> KernelCall:
    """A warp per column of the output, or several where that would leave the memory idle."""
    n, k = call.params["n"], call.params["k"]
    gated = call.kernel == "gated_matmul_vec_kernel"
    pack = min(vector_width(weight), vector_width(x), 16 // itemsize(weight.dtype))
    packs = groups(k, pack)
    terms = 2 if gated else 1
    columns = 2 if not gated and n >= 8 * _FILLING_WARPS else 1
    splits = 1
    while splits < _WARPS and n // columns * splits < _FILLING_WARPS and packs // (WARP * splits) >= 4:
        splits *= 2
    unrolled = _unrolled(max(1, k // (splits * WARP * pack)), max(1, _LOADS // (terms * columns)))
    constants = {"gated": gated, "pack": pack, "columns": columns, "splits": splits, "unrolled": unrolled}
    return make.kernel(call, "matvec.cu", function="matvec", inputs=inputs, outputs={"out": call.outputs[0]},
                       grid=(groups(n, _WARPS // splits * columns), 1, 1), block=(_WARPS * WARP, 1, 1),
                       constants=constants, resident=8 if call.params["m"] == 1 else 4)  # fmt: skip


def _unrolled(steps: int, most: int) -> int:
    """How many of a loop's steps to make at a time: a divisor, where there is a large one."""
    return max((count for count in range(most // 2 + 1, most + 1) if steps % count == 0), default=most)


def _power_of_two(count: int) -> int:
    """The greatest power of two that is not above `count`."""
    return 1 << (count.bit_length() - 1)


@template_rule("batched_matmul_kernel")
def _batched(make: Specializer, call: KernelCall) -> list[KernelCall]:
    (a, b), out = call.inputs, call.outputs[0]
    product = gemm(call, a, b, out, call.params["scale"])
    if product is not None:
        return [product]
    return [_tiled(make, call, "tiled_batched", {"left": a, "right": b.transpose(-1, -2)}, out)]


def _tiled(make: Specializer, call: KernelCall, function: str, inputs: dict[str, View | None], out: View) -> KernelCall:
    *batch, m, n = out.shape
    blocks = numel(batch) * groups(m, _TILE) * groups(n, _TILE)
    return make.kernel(call, "matmul.cu", function=function, inputs=inputs, outputs={"out": out},
                       grid=(blocks, 1, 1), block=(_TILE_THREADS, 1, 1))  # fmt: skip


@template_rule("linear_epilogue_kernel")
def _linear_epilogue(make: Specializer, call: KernelCall) -> list[KernelCall]:
    product, bias, residual, out = KERNELS[call.kernel].bind(call)
    assert out is not None
    return [_epilogue(make, call, product, bias, residual, out)]


def _with_epilogue(
    make: Specializer, call: KernelCall, product: KernelCall, bias: View | None, residual: View | None
) -> list[KernelCall]:
    """A cuBLAS product with bias, activation and residual.

    One addend of the result's dtype is what the product is added to, exactly. Otherwise the product stays in float32
    until all is added, so that the result is rounded once.
    """
    out = call.outputs[0]
    addends = [view for view in (bias, residual) if view is not None]
    activated = call.params["activation"] != "none"
    if not addends and not activated:
        return [product]
    if len(addends) == 1 and not activated and out.dtype in ("float32", addends[0].dtype):
        beneath = _epilogue(make, call, None, bias, residual, out)
        return [beneath, replace(product, params={**product.params, "beta": 1.0})]
    between = out if out.dtype == "float32" else make.temporary(call.node, out.shape, "float32")
    params = {**product.params, "ldc": max(1, between.strides[0] if between.shape[0] > 1 else between.shape[1])}
    product = replace(product, outputs=(between,), params=params)
    return [product, _epilogue(make, call, between, bias, residual, out)]


def _epilogue(
    make: Specializer, call: KernelCall, product: View | None, bias: View | None, residual: View | None, out: View
) -> KernelCall:
    views = [view for view in (product, bias, residual, out) if view is not None]
    pack = min(8, *(vector_width(view) for view in views))
    rows, columns = out.shape
    while columns % pack:
        pack //= 2
    inputs = {"product": product, "bias": bias, "residual": residual}
    made = make.kernel(call, "matmul.cu", function="linear_epilogue", inputs=inputs, outputs={"out": out},
                       grid=(groups(rows * columns // pack, 256), 1, 1), block=(256, 1, 1),
                       constants={"pack": pack})  # fmt: skip
    return replace(made, flops=0, bytes_moved=0) if call.kernel != "linear_epilogue_kernel" else made


def gemm(call: KernelCall, a: View, b: View, out: View, alpha: float = 1.0) -> KernelCall | None:
    """out[…, M, N] = alpha · a[…, M, K] · b[…, K, N] as a cuBLAS call; None where cuBLAS does not take the operands."""
    if a.dtype != b.dtype or not is_float(a.dtype) or out.dtype not in (a.dtype, "float32") or 0 in a.shape:
        return None
    if _leading(out) is None:
        a, b, out = b.transpose(-1, -2), a.transpose(-1, -2), out.transpose(-1, -2)
    batch, strides = collapse(out.shape[:-2], a.strides[:-2], b.strides[:-2], out.strides[:-2])
    ldc = _leading(out)
    if ldc is None or len(batch) > 1:
        return None
    sides: dict[str, Any] = {}
    for name, view in (("a", a), ("b", b)):
        plain, turned = _leading(view), _leading(view.transpose(-1, -2))
        leading = turned if plain is None else plain
        if leading is None:
            return None
        sides |= {f"trans_{name}": plain is None, f"ld{name}": leading}
    steps = {f"stride_{name}": step[0] if step else 0 for name, step in zip("abc", strides, strict=True)}
    params = {
        "m": out.shape[-2], "n": out.shape[-1], "k": a.shape[-1], "ldc": ldc, "batch": numel(batch), "alpha": alpha,
        "beta": 0.0, **sides, **steps,
    }  # fmt: skip
    return replace(call, kernel="cublas_gemm", source="", inputs=(a, b), outputs=(out,), params=params)


def _leading(matrix: View) -> int | None:
    """Elements from row to row of a matrix whose rows are packed; None where they are not, or overlap."""
    (rows, columns), (step, inner) = matrix.shape[-2:], matrix.strides[-2:]
    if columns > 1 and inner != 1 or rows > 1 and step < columns:
        return None
    return max(1, step if rows > 1 else columns)
