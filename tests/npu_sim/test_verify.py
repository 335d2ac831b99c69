"""`npu_sim.verify`: agreement is seen, and a wrong kernel, fusion or layout is found by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_gpu import DEVICES, PROBLEM
from ir_builder import IRBuilder
from numerics import MIN_DRAWS

from cuda_compiler.rules.table import RULES as CUDA_RULES
from npu_compiler import IRGraph, compile
from npu_compiler.errors import DeviceError, InputError, WeightError
from npu_compiler.fusion_patterns import FUSIONS
from npu_compiler.fusions.activations import rewrite_unary
from npu_compiler.fusions.engine import Fusion, P, Var, mul
from npu_compiler.graph.reader import read_ir
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.target import OpLevelTarget, PlanStage
from npu_runtime import CPUBackend, Device, Executor
from npu_runtime.cpu import backend as cpu_backend
from npu_runtime.cpu.kernels import CPU_KERNELS
from npu_runtime.cpu.kernels.elementwise import bound_elementwise
from npu_sim.arrays import random_inputs
from npu_sim.verify import input_specs, verify
from npu_sim.verify.criteria import compare_output
from npu_sim.verify.reference import references, retype

SEED = 11


def model() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Two linears with a hand-written SiLU between them, an RMS norm, and a residual."""
    g = IRBuilder("small")
    x = g.input("x", 2, 6, 32)
    up = g("aten.linear.default", x, g.weight("up.weight", 32, 32), g.weight("up.bias", 32), name="up")
    gate = g("aten.mul.Tensor", up, g("aten.sigmoid.default", up, name="gate"), name="swish")
    square = g("aten.pow.Tensor_Scalar", gate, 2, name="square")
    mean = g("aten.mean.dim", square, [-1], True, name="mean")
    scale = g("aten.rsqrt.default", g("aten.add.Tensor", mean, 1e-6, name="shifted"), name="scale")
    unit = g("aten.mul.Tensor", gate, scale, name="unit")
    normal = g("aten.mul.Tensor", g.weight("norm.weight", 32), unit, name="norm")
    probabilities = g("aten.softmax.int", normal, -1, name="softmax")
    total = g("aten.add.Tensor", g("aten.mul.Tensor", probabilities, 10.0, name="tenfold"), x, name="total")
    g.output(g("aten.linear.default", total, g.weight("down.weight", 8, 32), name="down"))
    rng = np.random.default_rng(SEED)
    shapes = {"up.weight": (32, 32), "up.bias": (32,), "norm.weight": (32,), "down.weight": (8, 32)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    return g.ir(), {**weights, "norm.weight": 1 + weights["norm.weight"]}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The CPU with its reference kernels only, which a test can break by name."""
    monkeypatch.setattr(cpu_backend, "candidates", lambda *_: [])
    chosen = Device("cpu")
    chosen.backend = CPUBackend(native=False, pytorch=False)
    yield chosen


def check(device: Device, **options: Any) -> Any:
    ir, weights = model()
    specs = input_specs(read_ir(ir), options.get("compute_dtype"))
    return verify(ir, weights, [random_inputs(specs, SEED + i) for i in range(MIN_DRAWS)], device, **options)


def break_kernel(
    monkeypatch: pytest.MonkeyPatch, kernel: str, when: Callable[[Any], bool] = lambda params: True
) -> None:
    """Patch a kernel to write its result 1.5 times as large where `when(params)`."""
    original = CPU_KERNELS.get(kernel)

    def wrong(inputs: Any, outputs: Any, params: Any) -> None:
        if original is None:
            bound_elementwise(ELEMENTWISE_KERNELS[kernel].op, inputs, outputs[0], params)()
        else:
            original(inputs, outputs, params)
        if when(params):
            outputs[0] *= outputs[0].dtype.type(1.5)

    monkeypatch.setitem(CPU_KERNELS, kernel, wrong)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_agreement_passes_in_every_compute_dtype(name: str, dtype: str) -> None:
    report = check(Device(name), compute_dtype=dtype)
    assert report.passed, f"seed {SEED}: {report}"
    assert "agrees" in str(report)
    assert report.outputs[0].pearson > 0.999


@pytest.mark.parametrize(
    ("kernel", "when", "node"),
    [
        ("softmax_kernel", lambda params: True, "softmax"),
        ("matmul_kernel", lambda params: True, "up"),
        ("mul_scalar_kernel", lambda params: 10.0 in params["scalars"], "tenfold"),
    ],
)
def test_a_wrong_kernel_is_found_by_node(
    monkeypatch: pytest.MonkeyPatch, device: Device, kernel: str, when: Callable[[Any], bool], node: str
) -> None:
    break_kernel(monkeypatch, kernel, when)
    report = check(device)
    assert not report.passed
    assert report.culprit is not None and report.culprit.node == node
    assert f"node '{node}'" in str(report) and report.culprit.kernel in str(report)
    assert report.culprit.error > 10
    assert report.fusions == () and not report.only_fused


@pytest.mark.gpu
@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
def test_a_wrong_kernel_of_the_gpu_is_found_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CUDA_RULES["softmax_kernel"]

    def wrong(make: Any, call: Any) -> Any:
        return right(make, replace(call, params={**call.params, "scale": 1.5}))

    monkeypatch.setitem(CUDA_RULES, "softmax_kernel", wrong)
    report = check(Device("cuda"))
    assert not report.passed
    assert report.culprit is not None and report.culprit.node == "softmax"


def test_a_wrong_fused_kernel_is_blamed_on_its_fusion(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    break_kernel(monkeypatch, "rmsnorm_kernel")
    report = check(device)
    assert report.fusions == ("rms_norm",)
    assert report.culprit is not None and report.culprit.kernel == "rmsnorm_kernel"
    assert {"norm", "unit", "scale", "mean", "square"} <= set(report.culprit.nodes)
    assert "passes without the fusion 'rms_norm'" in str(report)


def test_a_fusion_that_rewrites_to_another_function_is_blamed(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    pattern = mul(Var("x"), P("aten.sigmoid", (Var("x"),)))
    monkeypatch.setitem(FUSIONS, "silu", Fusion("silu", (pattern,), rewrite_unary("aten.relu.default")))
    report = check(device)
    assert "silu" in report.fusions
    assert report.culprit is not None and "gate" in report.culprit.nodes


class Swapping(OpLevelTarget):
    """A target whose first stage is right, and whose second subtracts instead of adding."""

    def stages(self) -> list[PlanStage]:
        def swap(plan: ExecutionPlan) -> ExecutionPlan:
            wrong = {"add_kernel": "sub_kernel"}
            return replace(plan, calls=[replace(c, kernel=wrong.get(c.kernel, c.kernel)) for c in plan.calls])

        return [("keep", lambda plan: plan), ("swap", swap)]


def test_a_wrong_stage_of_the_target_is_blamed(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    monkeypatch.setattr(CPUBackend, "target", Swapping())
    report = check(device)
    assert not report.passed and report.stages == ("swap",)
    assert "passes without the stage 'swap'" in str(report) and report.to_dict()["stages"] == ("swap",)


def test_a_device_that_cannot_run_the_program_fails_the_verification(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    def broken(inputs: Any, outputs: Any, params: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setitem(CPU_KERNELS, "softmax_kernel", broken)
    report = check(device)
    assert not report.passed and "out of order" in str(report)
    assert report.to_dict()["passed"] is False


@pytest.mark.parametrize("name", DEVICES)
def test_wrong_inputs_and_weights_are_refused(name: str) -> None:
    ir, weights = model()
    device = Device(name)
    with pytest.raises(InputError, match="shape"):
        verify(ir, weights, [{"x": np.zeros((1, 2), np.float32)}], device)
    with pytest.raises(InputError, match="missing input 'x'"):
        verify(ir, weights, [{}], device)
    with pytest.raises(WeightError, match="norm.weight"):
        verify(ir, {k: v for k, v in weights.items() if k != "norm.weight"}, [], device)


def test_one_wrong_value_in_an_output_is_a_difference() -> None:
    rng = np.random.default_rng(SEED)
    exact = rng.standard_normal((4, 1000)).astype(np.float32)
    half = exact.astype(np.float16)
    assert compare_output("y", [half], [exact], [half], "float16").passed
    wrong = half.copy()
    wrong[2, 7] += 4
    assert not compare_output("y", [wrong], [exact], [half], "float16").passed
    wrong[2, 7] = np.nan
    assert "1 of 4000 values are not finite" in compare_output("y", [wrong], [exact], [half], "float16").problems[0]
    counts = np.arange(5)
    report = compare_output("n", [counts + (counts == 3)], [counts], [counts], "float16")
    assert report.problems == ("1 of 5 values differ",)


def test_a_retyped_graph_casts_where_operands_must_agree() -> None:
    g = IRBuilder()
    positions, x = g.input("positions", 4, dtype="int64"), g.input("x", 3, 4)
    angles = g("aten.sin.default", positions, name="angles")
    g.output(g("aten.matmul.default", x, angles))
    graph = read_ir(g.ir())
    narrow = retype(graph, {name: "float16" for name in graph.tensors if name not in ("positions", "angles")})
    assert [node.op_type for node in narrow.nodes] == ["aten.sin.default", "aten.to.dtype", "aten.matmul.default"]
    exact, half = references(graph, {}, "float16")
    inputs = {"positions": np.arange(4), "x": np.ones((3, 4), np.float32)}
    (wanted,), (near,) = exact.run(inputs).values(), half.run(inputs).values()
    assert (wanted.dtype, near.dtype) == (np.float32, np.float16)
    np.testing.assert_allclose(near, wanted, rtol=2e-3)


def test_a_device_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise DeviceError("no memory left")

    monkeypatch.setattr(device.backend, "allocate_zeros", refuse)
    assert check(device).failure == "no memory left"


def overflowing() -> IRBuilder:
    """softmax((1e6 x)² / 1e12): the square is beyond float16, though the result is not."""
    g = IRBuilder("overflowing")
    large = g("aten.mul.Tensor", g.input("x", 2, 8), 1e6, name="large")
    square = g("aten.mul.Tensor", large, large, name="square")
    return g.output(g("aten.softmax.int", g("aten.div.Tensor", square, 1e12, name="small"), -1, name="probabilities"))


def test_values_that_overflow_in_16_bits_fail_and_the_kernel_that_did_it_is_named() -> None:
    inputs = [{"x": np.linspace(0.5, 2, 16, dtype=np.float32).reshape(2, 8)}]
    report = verify(overflowing().ir(), {}, inputs, Device("cpu"))
    assert not report.passed
    assert "16 of 16 values are not finite, although PyTorch's in float32 are" in report.outputs[0].problems
    assert report.culprit is not None and report.culprit.node == "large"
    for dtype in ("bfloat16", "float32"):
        assert verify(overflowing().ir(), {}, inputs, Device("cpu"), compute_dtype=dtype).passed


def test_values_clamped_to_the_range_fail() -> None:
    exact = np.array([[1e5, 2.0, 3.0]], np.float32)
    clamped = np.clip(exact, -65504, 65504)
    report = compare_output("y", [clamped], [exact], [clamped], "float16")
    assert "1 of 3 values are clamped to the range of float16, ±65504" in report.problems
    lowest = np.array([[np.finfo(np.float32).min, 2.0, 3.0]], np.float32)
    masked = np.array([[-65504.0, 2.0, 3.0]], np.float32)
    assert compare_output("y", [masked], [lowest], [masked], "float16").passed


def test_outputs_are_held_against_the_graph_as_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are compared with the graph before any pass, since every later reference repeats a pass's mistake."""
    g = IRBuilder("doubled")
    ir = g.output(g("aten.mul.Tensor", g.input("x", 4, 8), 2.0, name="y")).ir()
    inputs = [{"x": np.random.default_rng(SEED).normal(size=(4, 8)).astype(np.float32)}]
    assert verify(ir, {}, inputs, Device("cpu")).passed

    def wrong(graph: IRGraph) -> IRGraph:
        shifted = replace(graph.nodes[0], op_type="aten.add.Tensor")
        return replace(graph, nodes=[shifted, *graph.nodes[1:]])

    monkeypatch.setattr("npu_compiler.compiler._NORMALIZE", [("wrong", wrong)])
    report = verify(ir, {}, inputs, Device("cpu"))
    assert not report.passed
    assert "normalizing the graph changes its result" in report.remark and report.remark in str(report)


@pytest.mark.parametrize(("op", "expected"), [("mul", 1e6 * 3e-3), ("div", 3e-3 / 1e6), ("pow", 3e-3**1e5)])
def test_scalars_beyond_16_bits_take_part_as_they_are(op: str, expected: float) -> None:
    g = IRBuilder()
    number = 1e5 if op == "pow" else 1e6
    name = "aten.pow.Tensor_Scalar" if op == "pow" else f"aten.{op}.Tensor"
    g.output(g(name, g.input("x", 4), number, name="y"))
    result = Executor(compile(g.ir()), Device("cpu")).run({"x": np.full(4, 3e-3, np.float32)})["y"].to_numpy()
    np.testing.assert_allclose(result, np.float16(expected), rtol=2e-3)


def test_scalars_that_stand_for_an_infinity_stay_finite() -> None:
    """A row that is masked throughout becomes uniform, as in PyTorch, and not NaN."""
    for fill in (-1e9, float(np.finfo(np.float32).min)):
        g = IRBuilder()
        x, mask = g.input("x", 2, 4), g.input("mask", 2, 4, dtype="bool")
        g.output(g("aten.softmax.int", g("aten.masked_fill.Scalar", x, mask, fill), -1, name="y"))
        inputs = {"x": np.ones((2, 4), np.float32), "mask": np.ones((2, 4), np.bool_)}
        result = Executor(compile(g.ir()), Device("cpu")).run(inputs)["y"].to_numpy()
        np.testing.assert_allclose(result, 0.25)
