"""Rules of mixture-of-experts products, whose tokens choose their weights."""

from __future__ import annotations

from cuda_compiler.rules.quantized import code_pack
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.program.kernels import KernelCall

_WARPS = 8
_WIDEST = 16  # bytes of one access
_MOST_STAGED = 2**14  # elements of x that a block keeps as integers
_FILLING_WARPS = 16 * MULTIPROCESSORS
_FEWEST_STEPS = 4  # of a warp, so that enough of its codes are on their way


def _dense(make: Specializer, call: KernelCall) -> list[KernelCall]:
    x, weight = call.inputs[:2]
    pack = min(min(vector_width(view), _WIDEST // itemsize(view.dtype)) for view in (x, weight))
    while call.params["k"] % pack:
        pack //= 2
    return _per_warp(make, call, pack)


def _quantized(make: Specializer, call: KernelCall) -> list[KernelCall]:
    if _suits_tiles(make, call):
        return [_tiles(make, call)]
    return _per_warp(make, call, code_pack(call))


def _span(call: KernelCall) -> int:
    """Number of elements of 16 bytes of codes."""
    return _WIDEST * CODE_FORMATS[call.params["codes"]].per_byte


def _suits_tiles(make: Specializer, call: KernelCall) -> bool:
    """Whether tensor cores multiply the codes as integers: x has 16 bits, and scales are those of whole spans."""
    x, data = call.inputs[:2]
    span, k = _span(call), call.params["k"]
    return (
        not CODE_FORMATS[call.params["codes"]].is_float
        and make.gpu.multiplies_bfloat16
        and x.dtype in HALF_DTYPES
        and vector_width(x) >= 8
        and vector_width(data) >= _WIDEST
        and k % span == 0
        and k // call.params["groups"] % span == 0
        and k <= _MOST_STAGED
    )


def _tiles(make: Specializer, call: KernelCall) -> KernelCall:
    """The call of a kernel in which a warp makes 16 results, or several share their terms to fill the GPU."""
    rows, columns = call.outputs[0].shape
    tiles, steps, splits = groups(columns, 16), groups(call.params["k"] // _span(call), 4), 1
    while splits < _WARPS and rows * tiles * splits < _FILLING_WARPS and steps // (2 * splits) >= _FEWEST_STEPS:
        splits *= 2
    own = groups(steps, splits)
    unrolled = min((4, 3, 2), key=lambda count: groups(own, count) * count)
    return make.kernel(
        call,
        "matmul/experts.cu",
        function="quantized_expert_tiles",
        grid=(rows * groups(columns, 16 * (_WARPS // splits)), 1, 1),
        block=(_WARPS * WARP, 1, 1),
        constants={"splits": splits, "unrolled": unrolled},
    )


def _per_warp(make: Specializer, call: KernelCall, pack: int) -> list[KernelCall]:
    grid = (groups(call.outputs[0].numel, _WARPS), 1, 1)
    return [make.kernel(call, "matmul/experts.cu", grid=grid, block=(_WARPS * WARP, 1, 1), constants={"pack": pack})]


RULES: dict[str, Rule] = {"expert_matmul_kernel": _dense, "quantized_expert_matmul_kernel": _quantized}
