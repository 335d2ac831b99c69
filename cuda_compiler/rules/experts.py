"""Rules of mixture-of-experts products, whose tokens choose their weights."""

from __future__ import annotations

from cuda_compiler.rules.quantized import code_pack
from cuda_compiler.specialization.gpu import WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall

_WARPS = 8
_WIDEST = 16  # bytes of one access


def _dense(make: Specializer, call: KernelCall) -> list[KernelCall]:
    x, weight = call.inputs[:2]
    pack = min(min(vector_width(view), _WIDEST // itemsize(view.dtype)) for view in (x, weight))
    while call.params["k"] % pack:
        pack //= 2
    return _per_warp(make, call, pack)


def _quantized(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return _per_warp(make, call, code_pack(call))


def _per_warp(make: Specializer, call: KernelCall, pack: int) -> list[KernelCall]:
    grid = (groups(call.outputs[0].numel, _WARPS), 1, 1)
    return [make.kernel(call, "matmul/experts.cu", grid=grid, block=(_WARPS * WARP, 1, 1), constants={"pack": pack})]


RULES: dict[str, Rule] = {"expert_matmul_kernel": _dense, "quantized_expert_matmul_kernel": _quantized}
