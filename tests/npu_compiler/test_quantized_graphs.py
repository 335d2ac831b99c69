"""Random graphs whose weights are stored in random formats: every device computes with the dequantized weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from cuda_gpu import PROBLEM
from hypothesis import given, note, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder, Tensor
from metal_harness import open_metal

from npu_compiler import (
    CompiledProgram,
    CompileOptions,
    QuantizedArray,
    QuantizedFormat,
    compile,
    partition,
    print_graph,
    read_ir,
)
from npu_compiler.errors import ConstraintError
from npu_compiler.graph.code_formats import CODE_FORMATS, CodeFormat
from npu_compiler.graph.dtypes import numpy_dtype, saturating_cast
from npu_compiler.graph.quantization import OFFSETS
from npu_compiler.ops.quantized import is_quantized
from npu_compiler.target_config import KERNEL_CODES
from npu_model.chip import load_chip
from npu_model.device import NPUBackend
from npu_runtime import Backend, CPUBackend, DAGExecutor, Device, Executor, load_weights

Draw = Callable[..., Any]
Arrays = dict[str, np.ndarray]
WIDTHS = (1, 2, 6, 15, 16, 32, 50, 64, 96)
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
}
# Of the largest value, but no less than of 0.1: activations are rounded to the dtype between the layers.
TOLERANCE = {"float32": 5e-5, "float16": 6e-3, "bfloat16": 0.05}
CHIP = (NPUBackend(load_chip("edge")),)
METAL, EMULATOR = open_metal(mps=False)
BACKENDS = (CPUBackend(native=True), CPUBackend(native=False), CPUBackend(native=False, pytorch=False), METAL)


class Network:
    """A random graph of matrices in the making, and beside it what NumPy makes of the same.

    Attributes:
        values: Tensor → its value in float64 [rows, width], computed from the dequantized weights.
        stored: `state_dict` key → the weight as a checkpoint holds it.
    """

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.dtype: str = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.g = IRBuilder("random")
        self.values: Arrays = {}
        self.stored: dict[str, np.ndarray | QuantizedArray] = {}
        self.inputs: Arrays = {}
        self.table: Tensor | None = None
        rows, width = draw(st.sampled_from([1, 1, 2, 5])), self.width()
        if draw(st.booleans()):
            self.embed(rows, width)
        else:
            self.inputs["x"] = self.rounded(self.rng.uniform(-1, 1, (rows, width)))
            self.last = self.add(self.g.input("x", rows, width), self.inputs["x"])

    def embed(self, rows: int, width: int) -> None:
        self.inputs["ids"] = self.rng.integers(0, 7, rows)
        self.table = self.matrix(7, width)
        looked_up = self.g("aten.embedding.default", self.table, self.g.input("ids", rows, dtype="int64"))
        self.last = self.add(looked_up, self.values[self.table][self.inputs["ids"]])

    def width(self) -> int:
        return int(self.draw(st.sampled_from(WIDTHS)))

    def add(self, tensor: Tensor, value: np.ndarray) -> Tensor:
        self.values[tensor] = np.asarray(value, np.float64)
        return tensor

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Round values to the compute dtype; returns them in float32."""
        return saturating_cast(values.astype(np.float32), self.dtype).astype(np.float32)

    def matrix(self, n: int, k: int, format: QuantizedFormat | None = None) -> Tensor:
        """A weight, in few bits or not; its elements are about 1/√k."""
        key = f"w{len(self.stored)}"
        format = self.format(k) if format is None else format
        if format is None:
            dense = self.rounded(self.rng.uniform(-1, 1, (n, k)) / np.sqrt(k))
            self.stored[key] = dense
        else:
            self.stored[key] = stored = random_array(self.rng, format, (n, k))
            dense = stored.dequantize()
        return self.add(self.g.weight(key, n, k), dense)

    def format(self, k: int) -> QuantizedFormat | None:
        if not self.draw(st.integers(0, 4)):
            return None
        codes = self.draw(st.sampled_from([name for name in KERNEL_CODES if k * CODE_FORMATS[name].bits % 8 == 0]))
        group = self.draw(st.sampled_from([0, *(size for size in range(1, k + 1) if k % size == 0)]))
        offsets = self.draw(st.sampled_from(OFFSETS)) if CODE_FORMATS[codes].takes_offsets else "none"
        return QuantizedFormat(codes, group, self.draw(st.sampled_from(["float16", "bfloat16", "float32"])), offsets)

    def format_of(self, weight: Tensor) -> QuantizedFormat | None:
        stored = self.stored[self.g.weights[weight]]
        return stored.format if isinstance(stored, QuantizedArray) else None

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        value = self.values[x] @ self.values[weight].T
        if not self.draw(st.booleans()):
            return self.add(self.g("aten.linear.default", x, weight), value)
        bias = self.rounded(self.rng.uniform(-1, 1, len(self.values[weight])))
        key = f"w{len(self.stored)}"
        self.stored[key] = bias
        return self.add(self.g("aten.linear.default", x, weight, self.g.weight(key, len(bias))), value + bias)

    def activated(self, x: Tensor, name: str | None = None) -> Tensor:
        name = name or self.draw(st.sampled_from(sorted(ACTIVATIONS)))
        return self.add(self.g(f"aten.{name}.default", x), ACTIVATIONS[name](self.values[x]))

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return self.add(self.g("aten.mul.Tensor", x, y), self.values[x] * self.values[y])


def plain(m: Network, x: Tensor) -> Tensor:
    return m.activated(m.linear(x, m.matrix(m.width(), m.values[x].shape[1])))


def residual(m: Network, x: Tensor) -> Tensor:
    k = m.values[x].shape[1]
    y = m.linear(x, m.matrix(k, k))
    return m.activated(m.add(m.g("aten.add.Tensor", y, x), m.values[y] + m.values[x]))


def gated(m: Network, x: Tensor) -> Tensor:
    """Add a gated product whose two weights have one format, so that they become one product, or two."""
    n, k = m.width(), m.values[x].shape[1]
    gate = m.matrix(n, k)
    up = m.matrix(n, k, m.format_of(gate) if m.draw(st.booleans()) else None)
    gates = m.g("aten.linear.default", x, gate)
    ups = m.g("aten.linear.default", x, up)
    m.add(gates, m.values[x] @ m.values[gate].T)
    m.add(ups, m.values[x] @ m.values[up].T)
    return m.product(m.activated(gates, "silu"), ups)


def tied(m: Network, x: Tensor) -> Tensor:
    """The weight of an embedding, where it fits; or one that another op reads too."""
    k = m.values[x].shape[1]
    if m.table is not None and m.values[m.table].shape[1] == k:
        return m.activated(m.linear(x, m.table))
    weight = m.matrix(m.width(), k)
    negated = m.add(m.g("aten.neg.default", weight), -m.values[weight])
    return m.product(m.activated(m.linear(x, weight)), m.activated(m.linear(x, negated)))


def largest_code(row: CodeFormat) -> float:
    """The largest magnitude of a code without offsets."""
    return max(row.high - row.zero, row.zero - row.low)


def random_array(rng: np.random.Generator, format: QuantizedFormat, shape: tuple[int, int]) -> QuantizedArray:
    """Any codes, zero points and signs of scales."""
    parts, step = format.parts(shape), 2 / np.sqrt(shape[1])
    codes = rng.integers(0, 256, parts["codes"][0], np.uint8)
    if format.code_format.is_float:
        codes[np.isnan(format.code_format.unpack(codes))] = 0
    rows = parts["scales"][0]
    scales = rng.uniform(0.2, 1, rows) * rng.choice([-1, 1], rows) * step / largest_code(format.code_format)
    offsets = None
    if format.offsets == "minimum":
        offsets = rng.uniform(-step, step, rows).astype(numpy_dtype(format.scales))
    elif format.offsets == "zero_point":
        offsets = rng.integers(0, 2**format.bits, rows, np.uint8)
    return QuantizedArray(format, shape, codes, scales.astype(numpy_dtype(format.scales)), offsets)


@st.composite
def networks(draw: Draw) -> Network:
    m = Network(draw)
    for step in draw(st.lists(st.sampled_from([plain, residual, gated, tied]), min_size=1, max_size=3)):
        m.last = step(m, m.last)
    m.g.output(m.last)
    return m


def assert_right(m: Network, found: np.ndarray, where: str) -> None:
    want = m.values[m.last]
    scale = max(0.1, float(np.abs(want).max()))
    np.testing.assert_allclose(found, want, rtol=0, atol=TOLERANCE[m.dtype] * scale, err_msg=where)


def run(program: CompiledProgram, backend: Backend, m: Network) -> np.ndarray:
    results = Executor(program, backend).run(m.inputs, load_weights(m.stored, program, backend))
    (spec,) = program.output_specs
    return np.asarray(results[spec.name].to_numpy(spec), np.float32)


def formats_of(stored: Mapping[str, np.ndarray | QuantizedArray]) -> dict[str, QuantizedFormat]:
    return {key: x.format for key, x in stored.items() if isinstance(x, QuantizedArray)}


def check_alike(m: Network, backends: tuple[Backend, ...]) -> CompiledProgram:
    """One program, saved and loaded again, computes on several devices what NumPy does."""
    ir, formats = m.g.ir(), formats_of(m.stored)
    note(f"{print_graph(read_ir(ir))}\n{m.dtype} {formats}")
    program = compile(ir, backends[0].target, CompileOptions(compute_dtype=m.dtype, quantization=formats))
    again = CompiledProgram.from_bytes(program.to_bytes())
    assert again.to_bytes() == program.to_bytes()
    for backend in backends:
        assert_right(m, run(again, backend, m), backend.device)
    return program


@settings(max_examples=100)
@given(networks(), st.integers(1, 9))
def test_random_formats_are_computed_alike_everywhere(m: Network, thread_order: int) -> None:
    if EMULATOR is not None:
        EMULATOR.seed = thread_order
    program = check_alike(m, BACKENDS)
    assert any(map(is_quantized, program.kernels)) == bool(formats_of(m.stored))


def shares_bytes(stored: np.ndarray | QuantizedArray) -> bool:
    """Whether groups of a matrix begin within a byte, which chips refuse."""
    if not isinstance(stored, QuantizedArray):
        return False
    groups, k = stored.format.groups(stored.shape[1]), stored.shape[1]
    return groups > 1 and k // groups * stored.format.bits % 8 != 0


@settings(max_examples=25)
@given(networks())
def test_random_formats_are_computed_alike_on_a_chip(m: Network) -> None:
    if any(shares_bytes(x) for x in m.stored.values()):
        with pytest.raises(ConstraintError, match="codes in (int4|float4_e2m1|iq4_nl) are not a whole number of bytes"):
            check_alike(m, CHIP)
    else:
        check_alike(m, CHIP)


@settings(max_examples=25)
@given(networks(), st.sets(st.sampled_from(["aten.linear", "aten.embedding", "aten.tanh", "aten.mul"]), min_size=1))
def test_random_formats_are_computed_alike_in_partitions(m: Network, on_cpu: set[str]) -> None:
    plan = partition(
        m.g.ir(),
        lambda op: op.rsplit(".", 1)[0] not in on_cpu,
        compute_dtype=m.dtype,
        quantization=formats_of(m.stored),
    )
    executor = DAGExecutor(plan, BACKENDS[0])
    executor.load_weights(m.stored)
    (found,) = executor.execute(m.inputs).values()
    assert_right(m, np.asarray(found, np.float32), "partitions")


@pytest.mark.gpu
@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
@settings(max_examples=40)  # each compiles new kernels
@given(networks())
def test_random_formats_are_computed_alike_on_the_gpu(m: Network) -> None:
    check_alike(m, (Device("cuda").backend,))
