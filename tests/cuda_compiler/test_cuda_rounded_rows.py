"""Products that round the rows of their activations, on CUDA: what they become, and that the GPU is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuda_gpu
import cuda_toolchain
import numpy as np
import pytest
from cuda_phases import Phases, run_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import kernel_launch_of, launch_of
from cuda_compiler.rules import linear_codes
from cuda_compiler.rules.rounded import RoundedForm, RowOrigin, round_rows
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.errors import ProgramFormatError
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.graph.quantization import (
    NAMED_FORMATS,
    NAMED_ROW_FORMATS,
    ROW_FORMATS,
    QuantizedFormat,
    dequantize_rows,
    quantize_rows,
)
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation
from npu_compiler.program.views import View
from npu_runtime import Backend, CPUBackend, Executor, load_weights

BYTES = [QuantizedFormat(codes, scales="bfloat16", activations=codes) for codes in ROW_FORMATS]
FORMATS = [
    *BYTES,
    QuantizedFormat("float8_e4m3", 32, activations="float8_e4m3"),
    QuantizedFormat("int8", 64, "float16", "zero_point", activations="int8"),
    QuantizedFormat("int4", 32, "float16", "zero_point", activations="int8"),
    QuantizedFormat("int4", 64, "bfloat16", "minimum", activations="float8_e4m3"),
    QuantizedFormat("int8", activations="float8_e4m3"),
]
NO_GPU = pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)


def block(rows: int, width: int, hidden: int, layers: int = 1, biased: bool = True) -> dict[str, Any]:
    """Gated layers of a transformer: x + down(silu(gate(y)) · up(y)), where y is the RMSNorm of x."""
    g = IRBuilder()
    x = g.input("x", rows, width)
    gain, gate, up = g.weight("gain", width), g.weight("gate", hidden, width), g.weight("up", hidden, width)
    down, bias = g.weight("down", width, hidden), [g.weight("bias", hidden)] if biased else []
    for _ in range(layers):
        y = g("aten.rms_norm.default", x, gain, normalized_shape=[width], eps=1e-5)
        opened = g("aten.silu.default", g("aten.linear.default", y, gate, *bias))
        inner = g("aten.mul.Tensor", opened, g("aten.linear.default", y, up))
        x = g("aten.add.Tensor", g("aten.linear.default", inner, down), x)
    g.output(x)
    return g.ir()


def linear(rows: int, n: int, k: int) -> dict[str, Any]:
    """relu(x · weightᵀ + bias)."""
    g = IRBuilder()
    y = g("aten.linear.default", g.input("x", rows, k), g.weight("up", n, k), g.weight("bias", n))
    g.output(g("aten.relu.default", y))
    return g.ir()


WEIGHTS = ("gate", "up", "down")


def compiled(
    target: npu_compiler.CodegenTarget | None, ir: dict[str, Any], format: QuantizedFormat, dtype: str = "bfloat16"
) -> npu_compiler.CompiledProgram:
    formats = dict.fromkeys(WEIGHTS, format)
    return npu_compiler.compile(
        ir, target or CUDACodegenTarget(), npu_compiler.CompileOptions(compute_dtype=dtype, quantization=formats)
    )


@pytest.mark.parametrize(
    ("format", "dtype", "rows", "kernels"),
    [
        (BYTES[1], "bfloat16", 40, "rounded_rows cublas_gemm rounded_rows cublas_gemm"),
        (BYTES[0], "float16", 40, "rounded_rows cublas_gemm linear_epilogue rounded_rows cublas_gemm linear_epilogue"),
        (BYTES[1], "bfloat16", 4, "rounded_rows quantized_matvec rounded_rows quantized_matvec"),
        (FORMATS[4], "bfloat16", 40, "rounded_rows quantized_tiles rounded_rows quantized_tiles"),
        (FORMATS[4], "float32", 40, "rounded_rows dequantize cublas_gemm rounded_rows dequantize cublas_gemm"),
    ],
)
def test_norms_and_gates_round_what_they_make(format: QuantizedFormat, dtype: str, rows: int, kernels: str) -> None:
    program = compiled(None, block(rows, 64, 128), format, dtype)
    assert " ".join(call.kernel for call in program.kernels) == kernels


def test_norms_scale_the_product_before_them() -> None:
    program = compiled(None, block(40, 64, 128, layers=2, biased=False), BYTES[1])
    assert [call.kernel for call in program.kernels] == ["rounded_rows", "cublas_gemm"] * 4
    product, norm, last = (program.kernels[index] for index in (3, 4, 7))
    sums, row_scales, *_ = norm.inputs
    assert sums == product.outputs[0] and sums.dtype == "float32"
    assert row_scales == program.kernels[2].outputs[1]
    # The sum with the residual is stored: the next layer's residual.
    assert norm.outputs[-1].dtype == "bfloat16" and norm.outputs[-1] in last.inputs


@pytest.mark.parametrize(
    ("format", "capability", "stored"), [(BYTES[0], 90, "int32"), (BYTES[1], 89, "bfloat16"), (BYTES[1], 90, None)]
)
def test_gates_scale_the_product_before_them_where_cublas_cannot(
    format: QuantizedFormat, capability: int, stored: str | None
) -> None:
    program = compiled(CUDACodegenTarget(GPU(capability=capability)), block(40, 64, 128, biased=False), format)
    rounding, product, gate = program.kernels[:3]
    assert gate.inputs[0].dtype == (stored or "bfloat16")
    if stored is None:
        assert len(gate.inputs) == 2 and len(product.inputs) == 4
        return
    first, row_scales, columns, second, beside = gate.inputs
    assert first.buffer == second.buffer == product.outputs[0].buffer
    assert (first.offset, second.offset) == (columns.offset, beside.offset) == (0, 128)
    assert row_scales == rounding.outputs[1]


@pytest.mark.parametrize("format", BYTES, ids=str)
def test_large_products_scale_and_gate_themselves(format: QuantizedFormat) -> None:
    program = compiled(None, block(4096, 256, 448, biased=False), format)
    rounding, product, gated, last = program.kernels
    assert [call.kernel for call in program.kernels] == ["rounded_rows", "linear_codes"] * 2
    assert product.outputs[0].shape == (4096, 448) and gated.inputs == product.outputs
    assert rounding.outputs[0] == product.inputs[0] and product.flops == 2 * 4096 * 256 * 896
    x, weight, out, residual = kernel_launch_of(last).maps
    assert (x.rows, x.width, x.stride, x.box_rows, x.operand) == (4096, 448, 448, 128, 0)
    assert (weight.rows, weight.width, weight.operand) == (256, 448, 1)
    assert (out.width, out.operand, residual.operand) == (512, len(last.inputs), len(last.inputs) - 1)
    assert kernel_launch_of(gated).maps == ()


@pytest.mark.parametrize("op", ["aten.remainder.Tensor", "aten.sub.Tensor"])
def test_gates_of_any_kind_compile(op: str) -> None:
    g = IRBuilder()
    x = g.input("x", 4096, 64)
    halves = [g("aten.linear.default", x, g.weight(name, 128, 64)) for name in ("gate", "up")]
    g.output(g("aten.linear.default", g(op, *halves), g.weight("down", 64, 128)))
    program = compiled(None, g.ir(), BYTES[1])
    gated = next(call for call in program.kernels if call.kernel == "linear_codes")
    assert gated.outputs[0].shape == (4096, 128)
    cuda_toolchain.compile_in_turn([program.plan.sources[gated.source]], 0)


def test_a_residual_of_one_row_for_all_is_left_to_others() -> None:
    g = IRBuilder()
    row = g("aten.expand.default", g.input("row", 1, 256), size=[4096, 256])
    g.output(g("aten.add.Tensor", g("aten.linear.default", g.input("x", 4096, 64), g.weight("up", 256, 64)), row))
    program = compiled(None, g.ir(), BYTES[0])
    for call in program.kernels:
        launch = kernel_launch_of(call) if call.kernel == "linear_codes" else None
        assert launch is None or all(each.stride >= each.width for each in launch.maps)


def test_maps_of_operands_that_a_call_does_not_have_are_refused() -> None:
    program = compiled(None, block(4096, 256, 448, biased=False), BYTES[1])
    call = program.kernels[1]
    wrong = replace(call, params={**call.params, "maps": [[9, 1, 1, 16, 1]]})
    with pytest.raises(ProgramFormatError, match="does not say how it is launched"):
        launch_of(wrong)


def test_products_with_few_tiles_or_little_shared_memory_are_those_of_cublas() -> None:
    for rows, target in ((512, CUDACodegenTarget()), (4096, CUDACodegenTarget(GPU(shared_memory=48 * 1024)))):
        program = compiled(target, linear(rows, 256, 448), BYTES[1])
        assert [call.kernel for call in program.kernels] == ["rounded_rows", "cublas_gemm"]


def test_rows_that_others_read_too_are_stored() -> None:
    g = IRBuilder()
    x = g.input("x", 40, 64)
    y = g("aten.silu.default", x, name="y")
    g.output(g("aten.linear.default", y, g.weight("up", 32, 64), name="out"), y)
    program = compiled(None, g.ir(), BYTES[1])
    assert [call.kernel for call in program.kernels] == ["silu_kernel", "rounded_rows", "cublas_gemm"]


@pytest.mark.parametrize(
    ("capability", "format", "dtype", "result"),
    [
        (90, BYTES[1], "bfloat16", "bfloat16"),
        (89, BYTES[1], "bfloat16", "float32"),  # no scales by row and column there
        (80, BYTES[1], "bfloat16", None),
        (90, BYTES[1], "float32", None),
        (80, BYTES[0], "float32", "int32"),
        (70, BYTES[0], "float32", None),
        (90, FORMATS[3], "bfloat16", None),
        (90, FORMATS[6], "bfloat16", None),
    ],
)
def test_which_gpus_multiply_bytes(capability: int, format: QuantizedFormat, dtype: str, result: str | None) -> None:
    program = compiled(CUDACodegenTarget(GPU(capability=capability)), linear(40, 128, 64), format, dtype)
    products = [call for call in program.kernels if call.kernel == "cublas_gemm" and call.inputs[0].dtype == "uint8"]
    assert [call.outputs[0].dtype for call in products] == ([] if result is None else [result])


def test_a_library_without_scales_by_row_leaves_them_to_a_kernel() -> None:
    older = CUDACodegenTarget(GPU(has_scaled_gemm=False))
    assert older.key != CUDACodegenTarget().key
    program = compiled(older, linear(40, 128, 64), BYTES[1])
    assert [call.kernel for call in program.kernels] == ["rounded_rows", "cublas_gemm", "linear_epilogue"]


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "format"), list(enumerate(FORMATS)))
def test_the_sources_compile(turn: int, format: QuantizedFormat) -> None:
    sources: dict[str, str] = {}
    for rows, dtype in ((1, "float32"), (3, "float16"), (40, "bfloat16"), (4096, "bfloat16")):
        sources |= compiled(None, block(rows, 64, 192), format, dtype).plan.sources
    cuda_toolchain.compile_in_turn(sources.values(), turn)


def rounding(x: View, form: RoundedForm) -> tuple[KernelCall, Specializer]:
    make = Specializer(buffers={"x": BufferAllocation("x", "input", x.shape, x.dtype)})
    call, _ = round_rows(make, KernelCall("none", "", (), (), {}, "node"), form, RowOrigin(x, x.dtype))
    return call, make


@pytest.mark.gpu
@NO_GPU
@settings(max_examples=15, deadline=None)
@given(
    codes=st.sampled_from(ROW_FORMATS),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    rows=st.integers(1, 70),
    width=st.sampled_from([1, 7, 64, 100, 1536, 8960, 40_000]),
    exponent=st.integers(-40, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_gpu_rounds_rows_bit_for_bit(
    codes: str, dtype: str, rows: int, width: int, exponent: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, width)) * 2.0 ** (exponent + random.integers(-12, 12, (rows, 1)))
    values[random.random((rows, width)) < 0.02] = -0.0
    values[0, :] *= random.random() < 0.5
    if rows > 2:
        values[1, random.integers(width)] = random.choice([np.nan, np.inf, -np.inf])
    if dtype == "float32":
        values[-1] *= 2.0**-110  # down to subnormal numbers
    phases = Phases(dtype, random)
    with np.errstate(over="ignore"):
        x = phases.operand("x", rows, width, values=values)
    call, make = rounding(x, RoundedForm(codes, "uint8"))
    found = run_calls([call], make, phases, cuda_gpu.cuda_backends()[0])
    wanted = quantize_rows(phases.data["x"].astype(np.float32), codes)
    for view, expected in zip(call.outputs, wanted, strict=True):
        np.testing.assert_array_equal(found[view.buffer], expected)
    call, make = rounding(x, RoundedForm(codes, dtype))
    found = run_calls([call], make, phases, cuda_gpu.cuda_backends()[0])
    with np.errstate(over="ignore"):
        floats = dequantize_rows(*wanted, codes).astype(numpy_dtype(dtype)).astype(np.float32)
    # In 16 bits, zeros lose their sign; in float8 subnormal numbers do too.
    np.testing.assert_array_equal(found[call.outputs[0].buffer].astype(np.float32), floats)


def run(backend: Backend, program: npu_compiler.CompiledProgram, state: dict[str, np.ndarray], **inputs: Any) -> Any:
    (out,) = Executor(program, backend).run(inputs, load_weights(state, program, backend)).values()
    return out.to_numpy().astype(np.float32)


CASES = [
    *((format, rows, dtype, 90) for format in FORMATS for rows, dtype in ((1, "float32"), (40, "bfloat16"))),
    *((format, rows, "bfloat16", 90) for format in BYTES for rows in (5, 16, 17, 300)),
    *((format, 40, "float16", capability) for format in BYTES for capability in (90, 89, 70)),
]
HIDDEN, WIDTH = 448, 256


def state_of(ir: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {weight["name"]: weight["shape"] for weight in ir["weights"]}
    return {name: rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def relative_error(
    ir: dict[str, Any], format: QuantizedFormat, dtype: str, capability: int, rng: np.random.Generator
) -> float:
    """‖GPU - CPU‖ / ‖CPU‖ on random rows."""
    state = state_of(ir, rng)
    shape = next(tensor["shape"] for tensor in ir["graph_inputs"] if tensor["name"] == "x")
    x = rng.standard_normal(shape).astype(numpy_dtype(dtype))
    gpu, host = cuda_gpu.cuda_backends()[0], CPUBackend()
    found = run(gpu, compiled(CUDACodegenTarget(GPU(capability=capability)), ir, format, dtype), state, x=x)
    expected = run(host, compiled(host.target, ir, format, dtype), state, x=x)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize(("format", "rows", "dtype", "capability"), CASES, ids=str)
def test_a_product_is_what_the_cpu_computes(
    format: QuantizedFormat, rows: int, dtype: str, capability: int, rng: np.random.Generator
) -> None:
    error = relative_error(linear(rows, HIDDEN, WIDTH), format, dtype, capability, rng)
    assert error < {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize(("format", "rows", "dtype", "capability"), CASES, ids=str)
def test_layers_are_what_the_cpu_computes(
    format: QuantizedFormat, rows: int, dtype: str, capability: int, rng: np.random.Generator
) -> None:
    ir = block(rows, WIDTH, HIDDEN, layers=2, biased=rows % 2 == 0)
    # Norms and gates differ in their last bits, so a code may be the neighbour of the other one: in float8, 1/16 of it.
    assert relative_error(ir, format, dtype, capability, rng) < (5e-3 if dtype == "float32" else 3e-2)


LARGE = [  # rows, columns, terms: parts of tiles, one tile for each block, several
    (17, 64, 128),
    (33, 64, 128),
    (129, 64, 128),
    (300, 272, 208),
    (256, 448, 2000),
    (1000, 1536, 512),
    (2048, 4096, 384),
]


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("format", BYTES, ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), LARGE, ids=str)
@pytest.mark.parametrize("behind", ["bias", "residual", "gate"])
def test_each_result_of_a_large_product_is_what_the_cpu_computes(
    format: QuantizedFormat,
    rows: int,
    n: int,
    k: int,
    behind: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_codes, "FEWEST_TILES", 1)
    ir = large(rows, n, k, behind)
    state = state_of(ir, rng)
    inputs = {
        tensor["name"]: rng.standard_normal(tensor["shape"]).astype(numpy_dtype("bfloat16"))
        for tensor in ir["graph_inputs"]
        if tensor["name"] in ("x", "other")
    }
    gpu, host = cuda_gpu.cuda_backends()[0], CPUBackend()
    program = compiled(CUDACodegenTarget(), ir, format)
    assert "linear_codes" in [call.kernel for call in program.kernels]
    found = run(gpu, program, state, **inputs)
    expected = run(host, compiled(host.target, ir, format), state, **inputs)
    np.testing.assert_allclose(
        found,
        expected,
        rtol=0.05 if behind == "gate" else 0.02,
        atol=(0.2 if behind == "gate" else 0.05) * expected.std(),
    )


def large(rows: int, n: int, k: int, behind: str) -> dict[str, Any]:
    """A product of many rows; behind it a bias and an activation, an addition, or a gate and a product."""
    g = IRBuilder()
    x = g.input("x", rows, k)
    if behind == "bias":
        g.output(g("aten.relu.default", g("aten.linear.default", x, g.weight("up", n, k), g.weight("bias", n))))
    elif behind == "residual":
        g.output(g("aten.add.Tensor", g("aten.linear.default", x, g.weight("up", n, k)), g.input("other", rows, n)))
    else:
        opened = g("aten.silu.default", g("aten.linear.default", x, g.weight("gate", n, k)))
        inner = g("aten.mul.Tensor", opened, g("aten.linear.default", x, g.weight("up", n, k)))
        g.output(g("aten.linear.default", inner, g.weight("down", 64, n)))
    return g.ir()


def test_every_name_of_a_format_compiles() -> None:
    for weights in NAMED_FORMATS:
        for activations in NAMED_ROW_FORMATS:
            program = npu_compiler.compile(
                block(20, 128, 128),
                CUDACodegenTarget(),
                npu_compiler.CompileOptions(quantization=f"{weights}+{activations}"),
            )
            assert program.kernels[0].kernel == "rounded_rows"
