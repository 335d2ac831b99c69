"""Products by experts on CUDA: their kernels, for dense weights and for those in few bits, and that these compile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cuda_toolchain
import pytest
from cuda_on_cpu import EmulatedBackend
from drawn import drawn
from ir_builder import IRBuilder
from metal_cases import experts as expert_cases
from metal_cases.quantized import FORMATS as STORED
from metal_harness import Case, run_case

from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import kernel_launch_of
from npu_compiler import CompiledProgram, CompileOptions, compile
from npu_compiler.graph.quantization import QuantizedFormat

FORMATS = [
    None,
    QuantizedFormat("int4", 32, "float16", "zero_point"),
    QuantizedFormat("int4", 0, "float32", "minimum"),
    QuantizedFormat("int8"),
    QuantizedFormat("float8_e4m3"),
    QuantizedFormat("float4_e2m1", 32, "bfloat16"),
    QuantizedFormat("float4_e2m1", 16, "float32"),
    QuantizedFormat("iq4_nl", 32, "float16"),
]


def compiled(
    format: QuantizedFormat | None, dtype: str, width: int, tokens: int = 3, target: CUDACodegenTarget | None = None
) -> CompiledProgram:
    g = IRBuilder()
    x, experts = g.input("x", tokens, width), g.input("experts", 2 * tokens, dtype="int64")
    weight, bias = g.weight("weight", 4 * 10, width), g.weight("bias", 4, 10)
    g.output(g("npu.expert_linear.default", x, weight, experts, bias, out=((2 * tokens, 10), "float32")))
    quantization = None if format is None else {"weight": format}
    return compile(g.ir(), target or CUDACodegenTarget(), CompileOptions(dtype, quantization))


def kernels(program: CompiledProgram) -> list[str]:
    return [call.kernel for call in program.kernels if "expert" in call.kernel]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_products_by_experts_are_one_kernel_by_tensor_cores(format: QuantizedFormat | None) -> None:
    program = compiled(format, "bfloat16", 64)
    assert kernels(program) == ["expert_tiles" if format is None else "quantized_expert_tiles"]


@pytest.mark.parametrize(
    ("format", "dtype", "width", "target"),
    [
        (None, "float32", 64, CUDACodegenTarget()),
        (None, "bfloat16", 60, CUDACodegenTarget()),
        (None, "float16", 64, CUDACodegenTarget(GPU(capability=75))),
        (QuantizedFormat("int8"), "float32", 64, CUDACodegenTarget()),
        (QuantizedFormat("int8"), "bfloat16", 56, CUDACodegenTarget()),
        (QuantizedFormat("int4", 16, "float16", "minimum"), "float16", 64, CUDACodegenTarget()),
        (QuantizedFormat("float4_e2m1", 32, "bfloat16"), "bfloat16", 2**16, CUDACodegenTarget()),
    ],
)
def test_a_warp_for_each_result_computes_what_tensor_cores_do_not_take(
    format: QuantizedFormat | None, dtype: str, width: int, target: CUDACodegenTarget
) -> None:
    program = compiled(format, dtype, width, target=target)
    assert kernels(program) == ["expert_matmul_kernel" if format is None else "quantized_expert_matmul_kernel"]


@pytest.mark.parametrize(("tokens", "jobs"), [(1, 2), (2, 4), (3, 5), (5000, 5)])
@pytest.mark.parametrize("format", [None, QuantizedFormat("int8")], ids=str)
def test_an_expert_with_several_rows_has_the_blocks_of_one(
    format: QuantizedFormat | None, tokens: int, jobs: int
) -> None:
    """Four experts have one tile of ten columns each; the fifth job is that of rows without an expert."""
    (call,) = (x for x in compiled(format, "bfloat16", 64, tokens).kernels if "expert" in x.kernel)
    assert kernel_launch_of(call).grid == (jobs, 1, 1)


# Rows of experts of their own, of none, and more of one than a block holds. The emulator has no float8 on tensor cores,
# and takes half a minute for shared rows of weights in few bits.
TILED = [format for format in STORED if format[0] != "float8_e4m3"]
CASES = [
    expert_cases.dense("own", 1, 2, 4, 20, 64),
    expert_cases.dense("shared", 6, 2, 3, 18, 40, bias="compute"),
    expert_cases.dense("many", 20, 1, 2, 5, 32, bias="float32"),
    *(expert_cases.quantized("tiles-own", 1, 2, 4, 18, 128, 64, format) for format in TILED),
    *(expert_cases.quantized("tiles-small-groups", 2, 2, 3, 18, 64, 16, format) for format in STORED[-2:]),
]
SHARED = [expert_cases.quantized("tiles-shared", 9, 2, 3, 18, 64, 64, format, bias="compute") for format in TILED]
SLOW = [pytest.param(case, id=case.id, marks=pytest.mark.slow) for case in SHARED]


@pytest.mark.parametrize("case", drawn(CASES, 1 / 20, lambda case: case.id) + SLOW)
def test_products_are_those_of_the_reference(case: Case, tmp_path: Path) -> None:
    """x becomes integers of 15 bits for codes, which is less exact than the reference."""
    run_case(replace(case, atol=2.0**-12), EmulatedBackend(tmp_path), "bfloat16", 1)


@pytest.mark.parametrize("format", drawn(FORMATS, 1 / 4))
def test_the_sources_compile(format: QuantizedFormat | None) -> None:
    cuda_toolchain.architectures()
    sources: dict[str, str] = {}
    for dtype, width, tokens in (("float32", 32, 3), ("bfloat16", 64, 3), ("float16", 96, 1), ("bfloat16", 2880, 40)):
        sources |= compiled(format, dtype, width, tokens).plan.sources
    cuda_toolchain.compile_in_turn(sources.values(), FORMATS.index(format))
