"""Weights in few bits on CUDA: what calls become, that sources compile, that the GPU computes what the CPU does."""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda_gpu
import cuda_toolchain
import numpy as np
import pytest
import torch
from cuda_phases import Phases, run_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_ir import extract_ir

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.resident.kernel import find_runs
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.quantization import QuantizedFormat
from npu_runtime import Backend, CPUBackend, Executor, load_weights

FORMATS = [
    QuantizedFormat("int4", 128, "float16", "zero_point"),
    QuantizedFormat("int4", 32, "float32", "minimum"),
    QuantizedFormat("int4", 3, "bfloat16"),
    QuantizedFormat("int8"),
    QuantizedFormat("int8", 24, "float16", "zero_point"),
    QuantizedFormat("float8_e4m3", 64, "float32"),
    QuantizedFormat("int8", 24, "bfloat16", "minimum"),
    QuantizedFormat("float4_e2m1", 32, "bfloat16"),
    QuantizedFormat("iq4_nl", 3, "float16"),
]
WIDTH, TOKENS = 384, 1000


class Model(nn.Module):
    """An embedding, a linear with a bias and an activation, and one that adds its input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.second(torch.relu(self.first(x))) + x


@cache
def graph(rows: int) -> dict[str, Any]:
    with torch.device("meta"):
        ir = extract_ir(Model().eval(), (torch.zeros(1, rows, dtype=torch.int64),), model_name="few bits")
    result: dict[str, Any] = ir.to_dict()
    return result


def compiled(backend: Backend | None, rows: int, format: QuantizedFormat, dtype: str) -> npu_compiler.CompiledProgram:
    target = CUDACodegenTarget() if backend is None else backend.target
    formats = {f"{name}.weight": format for name in ("table", "first", "second")}
    return npu_compiler.compile(
        graph(rows), target, npu_compiler.CompileOptions(compute_dtype=dtype, quantization=formats)
    )


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [
        (1, ["quantized_embedding_kernel", "resident"]),
        (8, ["quantized_embedding_kernel", "streamed", "streamed"]),
        (40, ["quantized_embedding_kernel", "quantized_tiles", "quantized_tiles"]),
        (64, ["quantized_embedding_kernel", "quantized_tiles", "quantized_tiles"]),
        (65, ["quantized_embedding_kernel", "dequantize", "cublas_gemm", "dequantize", "cublas_gemm"]),
    ],
)
def test_few_rows_read_the_codes_and_more_rows_widened_weights(rows: int, kernels: list[str]) -> None:
    assert [call.kernel for call in compiled(None, rows, FORMATS[0], "bfloat16").plan.calls] == kernels


@pytest.mark.parametrize(
    ("format", "dtype", "capability"),
    [
        (FORMATS[0], "float32", 90),
        (FORMATS[0], "bfloat16", 75),
        (FORMATS[4], "bfloat16", 90),
        (FORMATS[6], "bfloat16", 90),
    ],
)
def test_what_tiles_do_not_read_is_widened(format: QuantizedFormat, dtype: str, capability: int) -> None:
    ir, formats = graph(40), {f"{name}.weight": format for name in ("table", "first", "second")}
    target = CUDACodegenTarget(GPU(capability=capability))
    kernels = [
        call.kernel
        for call in npu_compiler.compile(
            ir, target, npu_compiler.CompileOptions(compute_dtype=dtype, quantization=formats)
        ).kernels
    ]
    assert kernels[:2] == ["quantized_embedding_kernel", "dequantize"]


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "format"), list(enumerate(FORMATS)))
def test_the_sources_compile(turn: int, format: QuantizedFormat) -> None:
    sources: dict[str, str] = {}
    for rows, dtype in ((1, "float32"), (3, "float16"), (40, "bfloat16")):
        sources |= compiled(None, rows, format, dtype).plan.sources
    cuda_toolchain.compile_in_turn(sources.values(), turn)


def phases_of(format: QuantizedFormat, rows: int, n: int, k: int) -> list[Any]:
    phases = Phases("bfloat16", np.random.default_rng(0))
    phases.product(phases.operand("x", rows, k), "out", n, format=format)
    return [phase for run in find_runs(phases.plan) for phase in run.phases]


@pytest.mark.parametrize(
    ("format", "k", "streamed"),
    [
        (QuantizedFormat("int4", 128, "float16", "zero_point"), 384, ("data", "scales", "offset")),
        (QuantizedFormat("int8"), 400, ("data", "scales")),
        (QuantizedFormat("float8_e4m3"), 80, ("data", "scales")),
        (QuantizedFormat("int4", 16, "float16"), 384, None),  # a group that is less than the 16 bytes of a lane
        (QuantizedFormat("int8", 24, "float16"), 384, None),
        (QuantizedFormat("int8"), 392, None),  # rows that are no multiple of 16 bytes
    ],
)
def test_weights_stream_whose_groups_are_whole_spans(
    format: QuantizedFormat, k: int, streamed: tuple[str, ...] | None
) -> None:
    found = phases_of(format, 1, 64, k)
    assert [phase.streamed for phase in found] == ([] if streamed is None else [streamed])


@pytest.mark.slow
@pytest.mark.parametrize("format", [FORMATS[0], FORMATS[1], FORMATS[3], FORMATS[5]])
@pytest.mark.parametrize(("n", "k"), [(2048, 1536), (1536, 8960), (4096, 14336), (7, 128)])
def test_a_slot_holds_what_a_unit_streams(format: QuantizedFormat, n: int, k: int) -> None:
    (phase,) = phases_of(format, 1, n, k)
    stream = phase.stream
    copies = -(-stream.unit_rows // stream.copied_rows)
    ends = [stream.copied_rows * stream.chunk_bytes * copies]
    for side in stream.sides:
        assert side.place >= max(ends) and side.place % 16 == side.stride % 16 == 0
        ends.append(side.place + -(-stream.unit_rows // stream.side_rows) * side.stride)
        assert side.stride >= (stream.side_rows - 1) * side.row_bytes + side.part_bytes + 15
    assert stream.slot_bytes == max(ends)
    assert stream.units * stream.own_rows >= n > (stream.units - 1) * stream.own_rows
    chunks = -(-stream.row_bytes // stream.chunk_bytes)
    assert all(side.chunk_bytes * (chunks - 1) < side.row_bytes for side in stream.sides)


def test_products_in_few_bits_are_one_resident_kernel_with_those_in_16_bits() -> None:
    phases = Phases("bfloat16", np.random.default_rng(0))
    h = phases.product(phases.operand("x", 1, 256), "few", 320, normed=True, format=FORMATS[1])
    phases.product(h, "dense", 64)
    (run,) = find_runs(phases.plan)
    assert [phase.file for phase in run.phases] == ["resident/quantized_product.cu", "resident/product.cu"]


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_gpu_computes_what_the_cpu_does(format: QuantizedFormat, rows: int, dtype: str, seed: int) -> None:
    torch.manual_seed(seed)
    state = {name: value.detach() for name, value in Model().state_dict().items()}
    ids = np.random.default_rng(seed).integers(0, TOKENS, (1, rows)).astype(np.int32)
    found = []
    for backend in (CPUBackend(), cuda_gpu.cuda_backends()[0]):
        program = compiled(backend, rows, format, dtype)
        weights = load_weights(state, program, backend)
        (out,) = Executor(program, backend).run({program.input_specs[0].name: ids}, weights).values()
        found.append(out.to_numpy().astype(np.float32))
    error = np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0])
    assert error < {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]


TILED = [
    QuantizedFormat("int4", 128, "float16", "zero_point"),
    QuantizedFormat("int4", 32, "bfloat16"),
    QuantizedFormat("int4", 96, "float32", "zero_point"),
    QuantizedFormat("int4", 32, "float16", "minimum"),
    QuantizedFormat("int4", 0, "float32", "minimum"),
    QuantizedFormat("int8"),
    QuantizedFormat("int8", 32, "bfloat16", "minimum"),
    QuantizedFormat("int8", 64, "float16", "zero_point"),
    QuantizedFormat("float8_e4m3", 64, "float32"),
    QuantizedFormat("float4_e2m1", 32, "bfloat16"),
    QuantizedFormat("iq4_nl", 0, "float32"),
    QuantizedFormat("float8_e4m3"),
]


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)
@pytest.mark.parametrize("format", TILED, ids=str)
@settings(max_examples=3, deadline=None)
@given(
    rows=st.sampled_from([8, 9, 16, 17, 32, 33, 64]),
    n=st.sampled_from([1, 40, 128, 333, 1536]),
    groups=st.integers(1, 40),
    capability=st.sampled_from([90, 80]),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    adds=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_tiles_are_products_with_the_dequantized_weight(
    format: QuantizedFormat, rows: int, n: int, groups: int, capability: int, dtype: str, adds: bool, seed: int
) -> None:
    k, rows = groups * (format.group or 64), rows if format.bits == 4 else min(rows, 32)
    phases = Phases(dtype, np.random.default_rng(seed))
    options: dict[str, Any] = {"bias": True, "residual": True, "activation": "silu"} if adds else {}
    phases.product(phases.operand("x", rows, k), "out", n, format=format, **options)
    make = Specializer(GPU(capability=capability), phases.plan.buffers)
    calls = expand(make, phases.calls[0])
    assert [call.kernel for call in calls] == ["quantized_tiles"]
    # Sums are in float32, and x and the result in 16 bits.
    tolerance = {"float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    phases.check(run_calls(calls, make, phases, cuda_gpu.cuda_backends()[0]), tolerance)
