"""Rules of weights in few bits: kernels of our own for few rows, widened weights and cuBLASLt for many."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from cuda_compiler.rules.matmul import FILLING_WARPS, MATVEC_WARPS, VECTOR_ROWS, many_rows, operands
from cuda_compiler.specialization.gpu import WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.quantization import CODES
from npu_compiler.program.kernels import KERNELS, KernelCall, distinct_bytes
from npu_compiler.program.views import View

_FILE = "matmul/quantized.cu"
_BLOCK = 256
_PARTS = ("data", "scales", "offset")


def _linear(make: Specializer, call: KernelCall, gated: bool = False) -> list[KernelCall]:
    inputs = operands(call)
    x = inputs["x"]
    assert x is not None
    if call.params["m"] <= VECTOR_ROWS:
        return [_matvec(make, call, inputs, gated)]
    weight = make.temporary(call.node, (call.params["n"], call.params["k"]), x.dtype)
    widened = _dequantize(make, call, {name: inputs[name] for name in _PARTS}, weight)
    product = many_rows(make, call, x, weight.transpose(0, 1), inputs["bias"], inputs["residual"])
    return [widened, *product]


def _matvec(make: Specializer, call: KernelCall, inputs: dict[str, View | None], gated: bool) -> KernelCall:
    """One warp per result, or several where that would not saturate memory bandwidth."""
    n, k = call.params["n"], call.params["k"]
    pack = _pack(call)
    splits = 1
    while splits < MATVEC_WARPS and n * splits < FILLING_WARPS and k // (pack * WARP * splits) >= 4:
        splits *= 2
    return make.kernel(
        call,
        _FILE,
        function="quantized_matvec",
        inputs=inputs,
        outputs={"out": call.outputs[0]},
        grid=(groups(n, MATVEC_WARPS // splits), 1, 1),
        block=(MATVEC_WARPS * WARP, 1, 1),
        constants={"gated": gated, "pack": pack, "splits": splits, "unrolled": 1 if gated else 2},
    )


def _dequantize(make: Specializer, call: KernelCall, parts: dict[str, View | None], out: View) -> KernelCall:
    pack = _pack(call)
    made = make.kernel(
        call,
        _FILE,
        function="dequantize",
        inputs=parts,
        outputs={"out": out},
        grid=(groups(out.numel // pack, _BLOCK), 1, 1),
        block=(_BLOCK, 1, 1),
        constants={"pack": pack},
    )
    return replace(made, flops=0, bytes_moved=sum(map(distinct_bytes, (*made.inputs, out))))


def _embedding(make: Specializer, call: KernelCall) -> list[KernelCall]:
    decl = KERNELS[call.kernel]
    *_, ids, _ = decl.bind(call)
    assert ids is not None
    pack = min(8, _pack(call))
    threads = ids.numel * call.params["k"] // pack
    block = min(_BLOCK, WARP * groups(threads, WARP))
    grid = (groups(threads, block), 1, 1)
    return [make.kernel(call, _FILE, grid=grid, block=(block, 1, 1), constants={"pack": pack})]


def _pack(call: KernelCall) -> int:
    """Elements that a lane takes at a time: up to 16 bytes of codes, and within a group where those of a byte are."""
    data = next(view for view in call.inputs if view.dtype == "uint8")
    codes_per_byte = 8 // CODES[call.params["codes"]]
    pack = vector_width(data) * codes_per_byte
    while pack > codes_per_byte and call.params["k"] // call.params["groups"] % pack:
        pack //= 2
    return pack


RULES: dict[str, Rule] = {
    "quantized_matmul_kernel": _linear,
    "quantized_matmul_vec_kernel": _linear,
    "quantized_gated_matmul_vec_kernel": partial(_linear, gated=True),
    "quantized_embedding_kernel": _embedding,
}
