"""Fusions: each pattern becomes its one kernel, and is no less precise than its ops one by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ir_builder import IRBuilder, Tensor
from numerics import assert_design6

from npu_compiler import CompileOptions, compile
from npu_compiler.fusion_patterns import FUSIONS
from npu_runtime import CPUBackend, Executor, load_weights


def conv_bn_relu(g: IRBuilder) -> Tensor:
    x = g("aten.conv2d.default", g.input("x", 1, 3, 8, 8), g.weight("w", 8, 3, 3, 3), None, [1, 1], [1, 1])
    norm = [g.weight(name, 8) for name in ("gamma", "beta", "mean", "var")]
    return g("aten.relu.default", g("aten.batch_norm.default", x, *norm, False, 0.1, 1e-5, True))


def add_relu(g: IRBuilder) -> Tensor:
    return g("aten.relu.default", g("aten.add.Tensor", g.input("x", 4, 64), g.weight("w", 4, 64)))


def rms_norm(g: IRBuilder) -> Tensor:
    x = g.input("x", 4, 64)
    mean = g("aten.mean.dim", g("aten.pow.Tensor_Scalar", x, 2), [-1], True)
    scale = g("aten.expand.default", g("aten.rsqrt.default", g("aten.add.Tensor", mean, 1e-6)), [4, 64])
    return g("aten.mul.Tensor", g("aten.mul.Tensor", x, scale), g.weight("w", 64))


def silu_mul(g: IRBuilder) -> Tensor:
    return g("aten.mul.Tensor", g("aten.silu.default", g.input("x", 4, 64)), g.weight("w", 4, 64))


def clamped_gate(g: IRBuilder) -> Tensor:
    gate = g("aten.clamp.default", g.input("x", 4, 64), None, 1.25)
    up = g("aten.clamp.default", g.weight("w", 4, 64), -1.25, 1.25)
    opened = g("aten.mul.Tensor", gate, g("aten.sigmoid.default", g("aten.mul.Tensor", gate, 1.702)))
    return g("aten.mul.Tensor", g("aten.add.Tensor", up, 1), opened)


def rope_by_halves(g: IRBuilder) -> Tensor:
    x, cos, sin = g.input("x", 1, 4, 5, 16), g.weight("cos", 5, 8), g.weight("sin", 5, 8)
    first, second = (g("aten.slice.Tensor", x, 3, start, start + 8) for start in (0, 8))
    lower = g("aten.sub.Tensor", g("aten.mul.Tensor", first, cos), g("aten.mul.Tensor", second, sin))
    upper = g("aten.add.Tensor", g("aten.mul.Tensor", second, cos), g("aten.mul.Tensor", first, sin))
    return g("aten.cat.default", [lower, upper], -1)


def masked_softmax(g: IRBuilder) -> Tensor:
    return g("aten.softmax.int", g("aten.add.Tensor", g.input("x", 1, 2, 8, 8), g.weight("w", 1, 1, 8, 8)), -1)


PATTERNS: dict[Callable[[IRBuilder], Tensor], str] = {
    conv_bn_relu: "conv2d_kernel",
    add_relu: "add_relu_kernel",
    rms_norm: "rmsnorm_kernel",
    silu_mul: "silu_mul_kernel",
    clamped_gate: "clamped_silu_mul_kernel",
    rope_by_halves: "rope_kernel",
    masked_softmax: "masked_softmax_kernel",
}


def outputs(build: Callable[[IRBuilder], Tensor], dtype: str, fused: bool) -> tuple[np.ndarray, list[str]]:
    """Return the results of a pattern for eight inputs, and the names of the kernels that ran."""
    g, rng, backend = IRBuilder(), np.random.default_rng(0), CPUBackend()
    g.output(build(g))
    program = compile(g.ir(), options=CompileOptions(compute_dtype=dtype, disabled_fusions=() if fused else FUSIONS))
    state = {key: rng.uniform(0.5, 1.5, g.metas[name]["shape"]).astype(np.float32) for name, key in g.weights.items()}
    executor, weights = Executor(program, backend), load_weights(state, program, backend)
    draws = [rng.normal(size=program.input_specs[0].shape).astype(np.float32) for _ in range(8)]
    results = [next(iter(executor.run({"x": x}, weights).values())).to_numpy() for x in draws]
    return np.stack(results).astype(np.float64), [call.kernel for call in program.kernels]


@pytest.mark.parametrize("build", PATTERNS, ids=lambda build: build.__name__)
def test_a_fusion_is_one_kernel_and_no_less_precise(build: Callable[[IRBuilder], Tensor]) -> None:
    exact, _ = outputs(build, "float32", fused=False)
    apart, separate = outputs(build, "float16", fused=False)
    together, kernels = outputs(build, "float16", fused=True)
    assert kernels == [PATTERNS[build]]
    assert len(separate) > 1
    assert_design6(together, exact, apart)
