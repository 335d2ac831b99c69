"""Extended kernels: the ops that a language model adds, on the CPU and in the Metal shaders."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from ir_builder import IRBuilder
from metal_harness import CPU_AND_METAL

from npu_compiler import CompileOptions, InputError, compile
from npu_runtime import Device, Executor

pytestmark = pytest.mark.parametrize("device", CPU_AND_METAL)

X = np.random.default_rng(0).uniform(0.2, 2, (4, 6)).astype(np.float32)
IDS = np.array([[2, 0, 3]])


def run(g: IRBuilder, device: str, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs of a graph in float32, by name."""
    outputs = Executor(compile(g.ir(), options=CompileOptions(compute_dtype="float32")), Device(device)).run(inputs)
    return {name: buffer.to_numpy() for name, buffer in outputs.items()}


@pytest.mark.parametrize("name", "silu neg rsqrt cos sin exp sqrt tanh sigmoid gelu".split())
def test_an_element_wise_function(name: str, device: str) -> None:
    g = IRBuilder()
    g.output(g(f"aten.{name}.default", g.input("x", 4, 6), name="y"))
    function: Callable[..., torch.Tensor] = getattr(torch.ops.aten, name)
    np.testing.assert_allclose(run(g, device, x=X)["y"], function(torch.from_numpy(X)).numpy(), rtol=1e-5, atol=1e-6)


def test_an_embedding_picks_rows_and_checks_the_ids(device: str) -> None:
    g = IRBuilder()
    g.output(g("aten.embedding.default", g.input("table", 4, 6), g.input("ids", 1, 3, dtype="int64"), name="y"))
    np.testing.assert_array_equal(run(g, device, table=X, ids=IDS)["y"], X[IDS])
    with pytest.raises(InputError, match="'ids' holds 4, which is outside 0..3"):
        run(g, device, table=X, ids=IDS + 1)


def test_rms_norm_is_one_kernel(device: str) -> None:
    g = IRBuilder()
    g.output(g("aten.rms_norm.default", g.input("x", 4, 6), [6], None, 1e-6, name="y"))
    expected = X / np.sqrt((X * X).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(run(g, device, x=X)["y"], expected, rtol=1e-5)


def test_a_rotation_by_position_is_one_kernel(device: str) -> None:
    g = IRBuilder()
    x, cos, sin = g.input("x", 1, 2, 4, 6), g.input("cos", 1, 1, 4, 6), g.input("sin", 1, 1, 4, 6)
    halves = [g("aten.slice.Tensor", x, 3, start, start + 3) for start in (0, 3)]
    turned = g("aten.cat.default", [g("aten.neg.default", halves[1]), halves[0]], -1)
    g.output(g("aten.add.Tensor", g("aten.mul.Tensor", x, cos), g("aten.mul.Tensor", turned, sin), name="y"))
    assert [call.kernel for call in compile(g.ir()).kernels] == ["rope_kernel"]
    q = np.stack([X, X[::-1]])[None]
    expected = q * np.cos(X) + np.concatenate([-q[..., 3:], q[..., :3]], -1) * np.sin(X)
    result = run(g, device, x=q, cos=np.cos(X)[None, None], sin=np.sin(X)[None, None])["y"]
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_elements_are_moved_unchanged(device: str) -> None:
    g = IRBuilder()
    x = g.input("x", 4, 6)
    part = g("aten.slice.Tensor", g("aten.transpose.int", x, 0, 1), 0, 1, 5)  # a view of a view: neither copies
    g.output(g("aten.cat.default", [part, part], 1, name="y"))
    np.testing.assert_array_equal(run(g, device, x=X)["y"], np.concatenate([X.T[1:5]] * 2, axis=1))


def test_a_cache_is_updated_in_place(device: str) -> None:
    g = IRBuilder()
    cache, position, new = g.input("cache", 1, 8, 6), g.input("position", 1, dtype="int64"), g.input("new", 1, 1, 6)
    g.output(g("aten.index_copy.default", cache, 1, position, new, name="updated"))
    assert compile(g.ir()).plan.donations == {"updated": "cache"}
    result = run(g, device, cache=np.zeros((1, 8, 6), np.float32), position=np.array([3]), new=X[None, :1])["updated"]
    np.testing.assert_array_equal(result[0, 3], X[0])
    assert np.count_nonzero(result.any(-1)) == 1
