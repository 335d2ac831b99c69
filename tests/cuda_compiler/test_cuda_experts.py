"""Products by experts on CUDA: their sources compile, for dense weights and for those in few bits."""

from __future__ import annotations

import cuda_toolchain
import pytest
from ir_builder import IRBuilder

from cuda_compiler import CUDACodegenTarget
from npu_compiler import CompiledProgram, CompileOptions, compile
from npu_compiler.graph.quantization import QuantizedFormat

FORMATS = [
    None,
    QuantizedFormat("int4", 32, "float16", "zero_point"),
    QuantizedFormat("int4", 0, "float32", "minimum"),
    QuantizedFormat("int8"),
    QuantizedFormat("float8_e4m3"),
    QuantizedFormat("float4_e2m1", 32, "bfloat16"),
    QuantizedFormat("iq4_nl", 32, "float16"),
]


def compiled(format: QuantizedFormat | None, dtype: str, width: int) -> CompiledProgram:
    g = IRBuilder()
    x, experts = g.input("x", 3, width), g.input("experts", 6, dtype="int64")
    weight, bias = g.weight("weight", 4 * 10, width), g.weight("bias", 4, 10)
    g.output(g("npu.expert_linear.default", x, weight, experts, bias, out=((6, 10), "float32")))
    quantization = None if format is None else {"weight": format}
    return compile(g.ir(), CUDACodegenTarget(), CompileOptions(dtype, quantization))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_products_by_experts_are_one_kernel(format: QuantizedFormat | None) -> None:
    program = compiled(format, "bfloat16", 64)
    name = "expert_matmul_kernel" if format is None else "quantized_expert_matmul_kernel"
    assert [call.kernel for call in program.kernels if "expert" in call.kernel] == [name]


@pytest.mark.parametrize(("turn", "format"), list(enumerate(FORMATS)))
def test_the_sources_compile(turn: int, format: QuantizedFormat | None) -> None:
    cuda_toolchain.architectures()
    sources: dict[str, str] = {}
    for dtype, width in (("float32", 32), ("bfloat16", 64), ("float16", 96)):
        sources |= compiled(format, dtype, width).plan.sources
    cuda_toolchain.compile_in_turn(sources.values(), turn)
