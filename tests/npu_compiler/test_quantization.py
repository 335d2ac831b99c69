"""Weights in few bits: formats and arrays, how they go through the stages, and what programs with them compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder

from npu_compiler import (
    CompiledProgram,
    CompileOptions,
    QuantizedArray,
    QuantizedFormat,
    compile,
    print_graph,
    quantize,
    trace_stages,
)
from npu_compiler.errors import InputError, ProgramFormatError, WeightError
from npu_compiler.graph.code_formats import CODE_FORMATS, CodeFormat
from npu_runtime import CPUBackend, Device, Executor, NPUBuffer, load_weights

FORMATS = [
    QuantizedFormat("int4", 32, "float16"),
    QuantizedFormat("int4", 32, "float16", "minimum"),
    QuantizedFormat("int4", 16, "float32", "zero_point"),
    QuantizedFormat("int8", 0),
    QuantizedFormat("int8", 32, "bfloat16", "zero_point"),
    QuantizedFormat("int8", 16, "float32", "minimum"),
    QuantizedFormat("float8_e4m3", 0),
    QuantizedFormat("float8_e4m3", 64, "float32"),
]
BACKENDS: dict[str, Callable[[], CPUBackend]] = {
    "native": CPUBackend,
    "pytorch": lambda: CPUBackend(native=False),
    "numpy": lambda: CPUBackend(native=False, pytorch=False),
}


@given(st.sampled_from(FORMATS), st.integers(0, 2**32 - 1), st.floats(-3, 3))
@settings(max_examples=60, deadline=None)
def test_rounding_errs_by_half_a_step_at_most(format: QuantizedFormat, seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    matrix = (10**exponent * rng.standard_normal((3, 128))).astype(np.float32)
    stored = quantize(matrix, format)
    error = np.abs(stored.dequantize() - matrix).reshape(3, format.groups(128), -1)
    step = stored.scales.astype(np.float32)[..., None]
    if format.codes == "float8_e4m3":  # 3 bits of mantissa, and subnormals 2^-9 apart
        step = np.maximum(np.abs(matrix).reshape(error.shape) / 8, step * 2.0**-8)
    largest = np.abs(matrix).max() * (2.0**-7 if format.scales == "bfloat16" else 2.0**-10)  # scales are rounded too
    assert (error <= step / 2 * (1 + 2 * (format.offsets != "none")) + largest).all()


def integers(bits: int) -> CodeFormat:
    """A format of unsigned integers around the middle of their range."""
    middle = 2 ** (bits - 1)
    return CodeFormat(f"uint{bits}", bits, np.dtype(np.uint8), 0, 2 * middle - 1, zero=middle, largest=middle - 0.5)


@pytest.mark.parametrize(
    "row",
    [*(row for row in CODE_FORMATS.values() if not row.is_float), *map(integers, (1, 2, 4, 8))],
    ids=lambda row: row.name,
)
def test_packing_and_unpacking_are_inverse(row: CodeFormat) -> None:
    low, high = (0, len(row.table) - 1) if row.table else (int(row.low), int(row.high))
    values = np.random.default_rng(0).integers(low, high + 1, (5, 16))
    packed = row.pack(values)
    assert packed.shape == (5, 16 * row.bits // 8)
    np.testing.assert_array_equal(row.unpack(packed), values)


@pytest.mark.parametrize("row", [row for row in CODE_FORMATS.values() if row.table], ids=lambda row: row.name)
def test_codes_of_a_table_stand_for_its_numbers_and_the_nearest_is_chosen(row: CodeFormat) -> None:
    numbers = np.array(row.table)
    np.testing.assert_array_equal(row.numbers(np.arange(16)), numbers)
    np.testing.assert_array_equal(numbers[row.nearest(numbers.astype(np.float32))], numbers)
    wanted = np.random.default_rng(0).uniform(row.low, row.high, 500).astype(np.float32)
    distance = np.abs(numbers[row.nearest(wanted)] - wanted)
    np.testing.assert_array_equal(distance, np.abs(numbers[:, None] - wanted).min(axis=0))


def test_the_tables_are_those_of_the_formats() -> None:
    import ml_dtypes
    from gguf import quants

    floats = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert CODE_FORMATS["float4_e2m1"].table == tuple(2 * floats) == tuple(quants.MXFP4.kvalues)
    assert CODE_FORMATS["iq4_nl"].table == tuple(quants.IQ4_NL.kvalues)


@pytest.mark.parametrize("bits", [0, 3, 5, 6, 7, 16])
def test_codes_that_cross_bytes_are_refused(bits: int) -> None:
    with pytest.raises(InputError, match=f"codes of {bits} bits, as odd has, cross bytes; use 1, 2, 4 or 8 bits"):
        CodeFormat("odd", bits, np.dtype(np.uint8), 0, 1, zero=0, largest=1)


@pytest.mark.parametrize("bits, dtype", [(4, np.int8), (8, np.int16)])
def test_codes_that_their_dtype_does_not_hold_are_refused(bits: int, dtype: type) -> None:
    with pytest.raises(InputError, match=f"codes of {bits} bits, as odd has, cannot be {np.dtype(dtype)}; use uint8"):
        CodeFormat("odd", bits, np.dtype(dtype), 0, 1, zero=0, largest=1)


def test_of_two_4_bit_codes_the_low_half_of_the_byte_is_first() -> None:
    stored = QuantizedArray(
        QuantizedFormat("int4", 2, "float32", "zero_point"),
        (1, 4),
        np.array([[0x21, 0x43]], np.uint8),
        np.array([[1, 10]], np.float32),
        np.array([[1, 3]], np.uint8),
    )
    np.testing.assert_array_equal(stored.dequantize(), [[0, 1, 0, 10]])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("int3",), "unknown codes 'int3' of a quantized format; known are int4, int8, float8_e4m3"),
        (("int4", -1), "group size of a quantized format is -1"),
        (("int4", 32, "int8"), "scales of dtype 'int8'; use float16, bfloat16 or float32"),
        (("float8_e4m3", 32, "float32", "minimum"), "offsets 'minimum' of float8_e4m3"),
        (("iq4_nl", 32, "float32", "zero_point"), "offsets 'zero_point' of iq4_nl"),
    ],
)
def test_formats_that_do_not_exist_are_refused(fields: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        QuantizedFormat(*fields)


def test_parts_that_do_not_fit_are_refused() -> None:
    format = QuantizedFormat("int8", 4)
    codes, scales = np.zeros((2, 8), np.uint8), np.ones((2, 2), np.float32)
    with pytest.raises(
        InputError, match=r"the scales of a matrix \[2, 8\] in int8 group 4 float32 are \(\(2, 3\), 'float32'\)"
    ):
        QuantizedArray(format, (2, 8), codes, np.ones((2, 3), np.float32))
    with pytest.raises(InputError, match="rows of 6 elements are not a whole number of groups of 4"):
        QuantizedArray(format, (2, 6), codes, scales)
    with pytest.raises(InputError, match="values that are not finite cannot be quantized"):
        quantize(np.full((2, 8), np.nan, np.float32), format)


def _network() -> IRBuilder:
    """A table that is also the last linear's weight, two linears that share an input, and a gated pair."""
    g = IRBuilder()
    ids = g.input("ids", 1, dtype="int64")
    table = g.weight("table", 48, 64)
    x = g("aten.embedding.default", table, ids)
    q, k = (g("aten.linear.default", x, g.weight(name, 64, 64)) for name in "qk")
    x = g("aten.add.Tensor", g("aten.mul.Tensor", q, k), x)
    gate, up = (g("aten.linear.default", x, g.weight(name, 32, 64)) for name in ("gate", "up"))
    x = g("aten.mul.Tensor", g("aten.silu.default", gate), up)
    x = g("aten.linear.default", x, g.weight("down", 64, 32), g.weight("bias", 64))
    g.output(g("aten.linear.default", x, table))
    return g


def _weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"table": (48, 64), "q": (64, 64), "k": (64, 64), "gate": (32, 64), "up": (32, 64), "down": (64, 32)}
    matrices = {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    return {**matrices, "bias": rng.standard_normal(64).astype(np.float32)}


def _dense(stored: Mapping[str, np.ndarray | QuantizedArray]) -> dict[str, np.ndarray]:
    return {key: x.dequantize() if isinstance(x, QuantizedArray) else x for key, x in stored.items()}


def _expected(state: Mapping[str, np.ndarray], token: int) -> np.ndarray:
    x = state["table"][token]
    x = (state["q"] @ x) * (state["k"] @ x) + x
    gate = state["gate"] @ x
    x = state["down"] @ (gate / (1 + np.exp(-gate)) * (state["up"] @ x)) + state["bias"]
    return np.asarray(state["table"] @ x)


def _run(program: CompiledProgram, state: Mapping[str, Any], token: int, backend: CPUBackend) -> np.ndarray:
    spec = program.input_specs[0]
    inputs = {spec.name: NPUBuffer.from_numpy(np.array([token]), backend, spec=spec)}
    (out,) = Executor(program, backend).run(inputs, load_weights(state, program, backend)).values()
    return np.asarray(out.to_numpy(), np.float32).reshape(-1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_program_computes_with_the_dequantized_weights(format: QuantizedFormat, backend: str) -> None:
    weights = _weights()
    stored = {
        key: quantize(x, format) if x.ndim == 2 and format.problem(x.shape) is None else x for key, x in weights.items()
    }
    formats = {key: x.format for key, x in stored.items() if isinstance(x, QuantizedArray)}
    program = compile(_network().ir(), options=CompileOptions(compute_dtype="float32", quantization=formats))
    assert {"table", "q", "k", "gate", "up"} <= formats.keys()
    kernels = {call.kernel for call in program.kernels}
    assert {"quantized_embedding_kernel", "quantized_gated_matmul_vec_kernel", "quantized_matmul_vec_kernel"} <= kernels
    for token in (0, 47):
        expected = _expected(_dense(stored), token)
        found = _run(program, stored, token, BACKENDS[backend]())
        np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_weights_that_are_not_quantized_are_rounded_when_they_are_loaded(name: str) -> None:
    weights = _weights()
    program = compile(_network().ir(), options=CompileOptions(compute_dtype="float32", quantization=name))
    formats = {
        leaf.params["key"]: leaf.format
        for weight in program.weight_specs.values()
        for leaf in weight.recipe.leaves()
        if leaf.op == "quantized"
    }
    assert formats.keys() == weights.keys() - {"bias"}
    assert formats["table"].codes == {"int4": "int8", "int8": "int8", "fp8": "float8_e4m3"}[name], "shared with a table"
    rounded = {key: quantize(x, formats[key]) if key in formats else x for key, x in weights.items()}
    np.testing.assert_array_equal(
        _run(program, weights, 3, CPUBackend(native=False)), _run(program, rounded, 3, CPUBackend(native=False))
    )


def test_a_weight_stays_one_tensor_until_its_parts_are_split() -> None:
    g = IRBuilder()
    x, w = g.input("x", 1, 64), g.weight("w", 32, 64)
    g.output(g("aten.relu.default", g("aten.linear.default", x, w)))
    stages = dict(
        trace_stages(g.ir(), options=CompileOptions(quantization=QuantizedFormat("int4", 32, "float16", "minimum")))
    )
    assert "weight %p_w: f32[32, 64] as int4 group 32 float16 minimum = w" in print_graph(stages["fuse"])
    assert print_graph(stages["split_quantized_weights"]).split("\n") == [
        "graph test(%x: f16[1, 64])",
        "  weight %p_w.codes: uint8[32, 32] = w.codes (int4 group 32 float16 minimum)",
        "  weight %p_w.scales: f16[32, 2] = w.scales (int4 group 32 float16 minimum)",
        "  weight %p_w.offsets: f16[32, 2] = w.offsets (int4 group 32 float16 minimum)",
        "  %relu: f16[1, 32] = npu.quantized_linear(%x, %p_w.codes, %p_w.scales, %p_w.offsets) "
        "{activation=relu, format=int4 group 32 float16 minimum, has_bias=False, has_residual=False}",
        "  return %relu",
    ]


def test_a_weight_that_other_ops_read_too_is_there_twice() -> None:
    g = IRBuilder()
    x, w = g.input("x", 2, 64), g.weight("w", 64, 64)
    g.output(g("aten.linear.default", x, g("aten.neg.default", w)), g("aten.linear.default", x, w))
    program = compile(
        g.ir(), options=CompileOptions(compute_dtype="float32", quantization={"w": QuantizedFormat("int8")})
    )
    stored = {"w": quantize(_weights()["q"], QuantizedFormat("int8"))}
    assert sum("quantized" in call.kernel for call in program.kernels) == 1
    device, data = Device("cpu"), np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    out = Executor(program, device).run(
        {"x": NPUBuffer.from_numpy(data, device)}, load_weights(stored, program, device)
    )
    negated, plain = (x.to_numpy() for x in out.values())
    np.testing.assert_allclose(plain, data @ stored["w"].dequantize().T, atol=1e-4)
    np.testing.assert_allclose(negated, -plain, atol=2e-4)


def test_linears_of_several_formats_are_not_joined() -> None:
    formats = {"q": QuantizedFormat("int8"), "k": QuantizedFormat("int4", 32, "float16")}
    weights = _weights()
    state = {**weights, **{key: quantize(weights[key], format) for key, format in formats.items()}}
    program = compile(_network().ir(), options=CompileOptions(compute_dtype="float32", quantization=formats))
    expected = _expected(_dense(state), 5)
    found = _run(program, state, 5, CPUBackend())
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


def test_a_program_file_holds_the_formats_and_counts_the_bytes() -> None:
    formats = {key: QuantizedFormat("int4", 32, "float16") for key in ("q", "k")}
    program = compile(_network().ir(), options=CompileOptions(quantization=formats))
    again = CompiledProgram.from_bytes(program.to_bytes())
    assert again.describe() == program.describe() and "q.codes (int4 group 32 float16)" in again.describe()
    sizes = {name: buffer.size_bytes for name, buffer in again.plan.buffers.items() if "codes" in name}
    assert sum(sizes.values()) == 2 * 64 * 32


def test_unknown_quantizations_and_misfits_are_refused() -> None:
    with pytest.raises(InputError, match="unknown quantization 'int5'; choose one of int4, int8, fp8"):
        compile(_network().ir(), options=CompileOptions(quantization="int5"))
    with pytest.raises(InputError, match="'down' cannot be stored as .*: rows of 32 elements are not a whole number"):
        compile(_network().ir(), options=CompileOptions(quantization={"down": QuantizedFormat("int8", 64)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda x: quantize(x, QuantizedFormat("int8", 64)),
            "stored as int8 group 64 float32; the program expects int8",
        ),
        (lambda x: quantize(x[:32], QuantizedFormat("int8", 32)), r"'q' is \[32, 64\], the model expects \[64, 64\]"),
        (lambda x: _with_scale(x, np.nan), "'q': its scales contain values that are not finite"),
        (lambda x: _with_scale(x, np.inf), "'q': its scales contain values that are not finite"),
        (lambda x: _with_scale(x, 0), "'q': its scales are 0 where its codes are not"),
        (lambda x: np.where(x > 0.2, np.nan, x), "contains NaN"),
        (lambda x: np.where(x > 0.2, np.inf, x), "values that are not finite cannot be quantized"),
    ],
)
def test_weights_that_are_useless_are_refused(damage: Callable[[np.ndarray], Any], message: str) -> None:
    program = compile(_network().ir(), options=CompileOptions(quantization={"q": QuantizedFormat("int8", 32)}))
    weights = _weights()
    with pytest.raises(WeightError, match=message):
        load_weights({**weights, "q": damage(weights["q"])}, program, Device("cpu"))


def _with_scale(matrix: np.ndarray, scale: float) -> QuantizedArray:
    stored = quantize(matrix, QuantizedFormat("int8", 32))
    stored.scales[3, 1] = scale
    return stored


def test_a_group_of_zeros_may_have_a_scale_of_zero() -> None:
    matrix = np.zeros((2, 64), np.float32)
    for format in (QuantizedFormat("int8", 32), QuantizedFormat("int4", 32), QuantizedFormat("float8_e4m3")):
        assert list(quantize(matrix, format).problems()) == []


def test_float8_codes_that_are_nan_are_reported() -> None:
    stored = quantize(np.ones((1, 4), np.float32), QuantizedFormat("float8_e4m3"))
    assert stored.codes.view(ml_dtypes.float8_e4m3fn)[0, 0] == 448
    stored.codes[0, 2] = 0xFF
    assert list(stored.problems()) == ["its float8 codes contain NaN"]


def test_a_damaged_format_in_a_program_is_refused() -> None:
    program = compile(_network().ir(), options=CompileOptions(quantization={"q": QuantizedFormat("int8", 32)}))
    data = program.to_bytes()
    for old, new in ((b"int8", b"int9"), (b"scales", b"scalez")):
        with pytest.raises(ProgramFormatError):
            CompiledProgram.from_bytes(_resealed(data, old, new))


def _resealed(data: bytes, old: bytes, new: bytes) -> bytes:
    """A program's file with other bytes in its body, and the checksum that fits."""
    import hashlib

    import msgpack

    from npu_compiler.program.format import MAGIC

    version, _, body, authentication = msgpack.unpackb(data[len(MAGIC) :])
    assert old in body
    body = body.replace(old, new)
    return MAGIC + bytes(msgpack.packb([version, hashlib.sha256(body).digest(), body, authentication]))
