"""Integer kernels: sums against loops over Python's integers, results against PyTorch on what these stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn import drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_networks import BACKENDS, DEQUANTIZE, DEQUANTIZE_CHANNELS, LIMITS, QUANTIZE, Network

from npu_compiler import compile
from npu_compiler.program.elementwise import ACTIVATIONS
from npu_runtime import Executor, load_weights
from npu_runtime.cpu.native import available as native_available
from npu_runtime.cpu.native.bindings import layout
from npu_runtime.cpu.native.integers import integer


def loops(x: np.ndarray, w: np.ndarray, stride: int, padding: int, dilation: int, groups: int) -> np.ndarray:
    """The convolution of integers, a sum at a time."""
    x = np.pad(x.astype(object), [(0, 0), (0, 0), (padding, padding), (padding, padding)])
    (n, _, h, wide), (o, i, kh, kw) = x.shape, w.shape
    p, q = ((size - (taps - 1) * dilation - 1) // stride + 1 for size, taps in ((h, kh), (wide, kw)))
    out = np.zeros((n, o, p, q), object)
    for channel in range(o):
        first = channel // (o // groups) * i
        for ky in range(kh):
            for kx in range(kw):
                rows = slice(ky * dilation, ky * dilation + (p - 1) * stride + 1, stride)
                columns = slice(kx * dilation, kx * dilation + (q - 1) * stride + 1, stride)
                part = x[:, first : first + i, rows, columns] * w[channel, :, ky, kx].astype(object)[:, None, None]
                out[:, channel] += part.sum(axis=1)
    return out.astype(np.float64)


def extremes(rng: np.random.Generator, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
    """Integers of which the least and the greatest are frequent, so that sums are as large as they can be."""
    return rng.choice([low, high, *rng.integers(low, high, 5)], shape)


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, Any]:
    kernel, groups = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 1, 2, 8, 32]))
    depthwise = groups > 2
    return {
        "shape": (draw(st.integers(1, 2)), groups * (1 if depthwise else draw(st.integers(1, 40))), 9, 8),
        "out": groups * (1 if depthwise else draw(st.integers(1, 40))),
        "kernel": kernel,
        "stride": draw(st.integers(1, 3)),
        "padding": draw(st.integers(0, kernel // 2)),
        "dilation": draw(st.integers(1, 2)) if kernel <= 3 else 1,
        "groups": groups,
        "dtype": draw(st.sampled_from(["int8", "uint8"])),
        "zero": draw(st.integers(-5, 5)),
        "has_zeros": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(convolutions())
def test_sums_of_a_convolution_are_those_of_exact_integers(case: dict[str, Any]) -> None:
    rng, net = np.random.default_rng(case["seed"]), Network()
    low, high = LIMITS[case["dtype"]]
    zero = case["zero"] + (low + high + 1) // 2
    codes = extremes(rng, low, high, case["shape"]).astype(np.float32)
    shape = (case["out"], case["shape"][1] // case["groups"], case["kernel"], case["kernel"])
    weight = extremes(rng, -128, 127, shape).astype(np.int8)
    zeros = rng.integers(-128, 127, case["out"]) if case["has_zeros"] else None
    x = net.g.input("x", *case["shape"])
    w = net.weight("w", weight, np.ones(case["out"]), zeros)
    window = {name: [case[name]] * 2 for name in ("stride", "padding", "dilation")}
    rounded = net.rounded(x, 1.0, zero, case["dtype"])
    net.g.output(net.g("aten.conv2d.default", rounded, w, None, **window, groups=case["groups"]))
    assert "npu.integer_conv2d" in net.ops
    wide = weight.astype(np.int64) - (0 if zeros is None else zeros.reshape(-1, 1, 1, 1))
    window_of = (case[name] for name in ("stride", "padding", "dilation", "groups"))
    want = loops(codes.astype(np.int64) - zero, wide, *window_of).astype(np.float32)
    for name, got in net.run({"x": codes - zero}).items():
        np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.parametrize("algorithm", ["direct", "winograd2", "winograd4"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 3), (7, 7), (14, 13), (31, 6)])
@pytest.mark.parametrize(("channels", "out"), [(32, 5), (64, 40), (448, 17), (1824, 17)])
def test_all_algorithms_for_three_by_three_taps_are_exact(
    channels: int, out: int, height: int, width: int, dtype: str, algorithm: str, seed: int, monkeypatch: Any
) -> None:
    """Transformed inputs and weights, and for many channels the results, are as large as they can be."""
    if not native_available():
        pytest.skip("there is no C++ compiler")
    rng, net, (low, high) = np.random.default_rng(seed), Network(), LIMITS[dtype]
    codes, weight = (
        rng.choice([low, high], (2, channels, height, width)),
        rng.choice([-128, 127], (out, channels, 3, 3)),
    )
    if channels == 448:
        codes[0], weight[0], weight[1:] = high, 127, rng.integers(-50, 50, (out - 1, channels, 3, 3))
    if channels == 1824:
        codes[0], weight[0] = high, -128
    rows = weight.astype(np.int64).reshape(out, -1)
    largest = 255 * int(np.maximum(np.maximum(rows, 0).sum(1), -np.minimum(rows, 0).sum(1)).max())
    exact = {"direct": True, "winograd2": 4 * largest < 2**31, "winograd4": 64 * largest < 2**31}[algorithm]
    chosen: list[str] = []

    def choose(call: Any) -> str:
        assert exact == (algorithm in ("direct", *integer._winograd(call)))
        chosen.append(algorithm if exact else "direct")
        return chosen[-1]

    monkeypatch.setattr(integer, "_choose", choose)
    x = net.g.input("x", *codes.shape)
    w = net.weight("w", weight.astype(np.int8), np.ones(out))
    net.g.output(net.g("aten.conv2d.default", net.rounded(x, 1.0, low, dtype), w, None, [1, 1], [1, 1]))
    want = F.conv2d(torch.from_numpy(codes - low).double(), torch.from_numpy(weight).double(), padding=1)
    got = net.run({"x": (codes - low).astype(np.float32)}, only="native")["native"]
    np.testing.assert_array_equal(got, want.float().numpy())
    assert chosen


@pytest.mark.parametrize("algorithm", ["tiles", "bytes"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(("height", "width"), [(1, 5), (4, 8), (3, 11), (13, 10)])
@pytest.mark.parametrize(
    ("channels", "out", "groups", "kernel"),
    [(64, 40, 1, 1), (36, 33, 1, 1), (128, 70, 2, 1), (20, 5, 1, 3), (64, 8, 2, 3)],
)
def test_rows_of_bytes_are_multiplied_exactly(
    channels: int,
    out: int,
    groups: int,
    kernel: int,
    height: int,
    width: int,
    dtype: str,
    algorithm: str,
    seed: int,
    monkeypatch: Any,
) -> None:
    """Blocks of rows are whole, begin early or lack rows; they are read in place, or packed if few bytes follow."""
    if not native_available():
        pytest.skip("there is no C++ compiler")
    if not (layout().has_tiles if algorithm == "tiles" else layout().has_byte_quads):
        pytest.skip("this CPU has no such instructions")
    monkeypatch.setattr(integer, "_choose", lambda call: algorithm)
    rng, net = np.random.default_rng(seed), Network()
    low, high = LIMITS[dtype]
    codes = extremes(rng, low, high, (2, channels, height, width))
    weight = extremes(rng, -128, 127, (out - out % groups, channels // groups, kernel, kernel))
    x, padding = net.g.input("x", *codes.shape), kernel // 2
    w = net.weight("w", weight.astype(np.int8), np.ones(len(weight)), None)
    rounded = net.rounded(x, 1.0, low + 3, dtype)
    net.g.output(net.g("aten.conv2d.default", rounded, w, None, [1, 1], [padding] * 2, [1, 1], groups))
    moved = (codes - low - 3).astype(np.float32)
    exact = torch.from_numpy(moved).double(), torch.from_numpy(weight).double()
    want = F.conv2d(*exact, padding=padding, groups=groups).float().numpy()
    np.testing.assert_array_equal(net.run({"x": moved}, only="native")["native"], want)


@pytest.mark.parametrize("algorithm", ["columns", "depthwise"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("activation", ["none", "relu6"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("taps", [3, 5])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    "size", drawn([(16, 1, 1), (32, 5, 2), (32, 3, 7), (64, 7, 7), (80, 2, 9), (144, 4, 5)], 1 / 3)
)
def test_depthwise_results_in_bytes_are_exact(
    size: tuple[int, int, int],
    zeros: bool,
    taps: int,
    stride: int,
    activation: str,
    dtype: str,
    algorithm: str,
    seed: int,
    monkeypatch: Any,
) -> None:
    if not native_available():
        pytest.skip("there is no C++ compiler")
    if zeros and algorithm == "columns" and layout().has_byte_quads:
        pytest.skip("columns of bytes are for weights without zero points")
    monkeypatch.setattr(integer, "_choose", lambda call: algorithm)
    rng, net, (low, high) = np.random.default_rng(seed), Network(), LIMITS[dtype]
    zero, step, (channels, height, width) = low + 7, 8.0, size
    codes = extremes(rng, low, high, (2, channels, height, width))
    weight = extremes(rng, -128, 127, (channels, 1, taps, taps))
    scales = 2.0 ** rng.integers(-8, -4, channels)
    net.state["b"] = rng.integers(-9, 9, channels).astype(np.float32)
    points = rng.integers(-128, 127, channels) if zeros else np.zeros(channels, np.int64)
    w, b = net.weight("w", weight.astype(np.int8), scales, points if zeros else None), net.g.weight("b", channels)
    x = net.g.input("x", *codes.shape)
    window = {"stride": [stride] * 2, "padding": [taps // 2] * 2, "groups": channels}
    value = net.g("aten.conv2d.default", net.rounded(x, 1.0, zero, dtype), w, b, **window)
    if activation == "relu6":
        value, step = net.g("aten.relu6.default", value), 0.125
    net.g.output(net.rounded(value, step, zero, dtype))
    sums = loops(codes - zero, weight - points.reshape(-1, 1, 1, 1), stride, taps // 2, 1, channels)
    want = sums * scales.reshape(-1, 1, 1) + net.state["b"].reshape(-1, 1, 1)
    want = np.clip(want, 0, 6) if activation == "relu6" else want
    want = (np.clip(np.rint(want / step) + zero, low, high) - zero) * step
    got = net.run({"x": (codes - zero).astype(np.float32)}, only="native")["native"]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("rows", "k", "n"), [(1, 1, 1), (1, 147, 10), (7, 33, 17), (13, 1000, 40), (45, 192, 70)])
def test_sums_of_a_linear_are_those_of_exact_integers(rows: int, k: int, n: int, seed: int) -> None:
    rng, net = np.random.default_rng(seed), Network()
    codes, weight = rng.integers(0, 256, (rows, k)), rng.integers(-128, 128, (n, k)).astype(np.int8)
    x = net.g.input("x", rows, k)
    net.g.output(net.g("aten.linear.default", net.rounded(x, 1.0, 3), net.weight("w", weight, np.ones(n))))
    assert "npu.integer_linear" in net.ops
    want = ((codes - 3) @ weight.T.astype(np.int64)).astype(np.float32)
    for name, got in net.run({"x": (codes - 3).astype(np.float32)}).items():
        np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.parametrize("residual", ["none", "bytes", "float"])
@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
def test_bias_residual_activation_and_rounding_follow_in_one_kernel(activation: str, residual: str, seed: int) -> None:
    rng, net = np.random.default_rng(seed), Network()
    x, other = net.g.input("x", 2, 12, 7, 6), net.g.input("other", 2, 20, 7, 6)
    weight, scales = rng.integers(-127, 128, (20, 12, 3, 3)).astype(np.int8), rng.uniform(0.5e-2, 1e-2, 20)
    net.state["b"] = rng.normal(size=20).astype(np.float32)
    value = net.g(
        "aten.conv2d.default",
        net.rounded(x, 0.02, 120),
        net.weight("w", weight, scales),
        net.g.weight("b", 20),
        [1, 1],
        [1, 1],
    )
    if residual != "none":
        value = net.g("aten.add.Tensor", value, net.rounded(other, 0.03, -7, "int8") if residual == "bytes" else other)
    if activation != "none":
        form = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
        value = net.g(f"aten.{activation.removesuffix('_tanh')}.default", value, **form)
    net.g.output(net.rounded(value, 0.05, 60))
    expected = ["npu.quantize"] * (2 if residual == "bytes" else 1) + ["npu.integer_conv2d", "npu.dequantize"]
    assert net.ops == expected
    inputs = {"x": rng.normal(size=(2, 12, 7, 6)), "other": rng.normal(size=(2, 20, 7, 6))}
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}

    def rounding(array: torch.Tensor, scale: float, zero: int, dtype: str = "uint8") -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(array, scale, zero, *LIMITS[dtype])

    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    w = torch.from_numpy(weight * scales.astype(np.float32).reshape(-1, 1, 1, 1))
    want = F.conv2d(
        rounding(given["x"], 0.02, 120).double(), w.double(), torch.from_numpy(net.state["b"]).double(), 1, 1
    )
    if residual != "none":
        want = want + (rounding(given["other"], 0.03, -7, "int8") if residual == "bytes" else given["other"])
    if activation == "gelu_tanh":
        want = F.gelu(want, approximate="tanh")
    elif activation != "none":
        want = getattr(torch if activation in ("relu", "sigmoid") else F, activation)(want)
    exact = want.numpy()
    want = rounding(want.float(), 0.05, 60).numpy()
    for name, got in net.run(inputs).items():
        # A value in the middle between two codes may go to either.
        near_middle = np.abs(np.abs(exact / 0.05 - np.trunc(exact / 0.05)) - 0.5) < 1e-3
        assert np.abs(got - want)[~near_middle].max() < 1e-5, name
        assert np.abs(got - want).max() < 0.051, name


def test_pooling_means_and_sums_stay_in_bytes(seed: int) -> None:
    rng, net = np.random.default_rng(seed), Network()
    x, y = net.g.input("x", 2, 40, 9, 9), net.g.input("y", 2, 40, 4, 4)
    pooled = net.g("aten.max_pool2d.default", net.rounded(x, 0.02, 100), [3, 3], [2, 2])
    summed = net.g("aten.relu.default", net.g("aten.add.Tensor", net.rounded(y, 0.03, 3, "int8"), pooled))
    mean = net.g("aten.adaptive_avg_pool2d.default", net.rounded(summed, 0.02, 0), [1, 1])
    net.g.output(net.g("aten.flatten.using_ints", mean, 1))
    assert [op for op in net.ops if op.startswith("npu.integer")] == [
        "npu.integer_max_pool2d",
        "npu.integer_add",
        "npu.integer_mean",
    ]
    inputs = {"x": rng.normal(size=(2, 40, 9, 9)), "y": rng.normal(size=(2, 40, 4, 4))}
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    found = net.run(inputs)
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    maps = F.max_pool2d(torch.fake_quantize_per_tensor_affine(given["x"], 0.02, 100, 0, 255), 3, 2)
    total = F.relu(torch.fake_quantize_per_tensor_affine(given["y"], 0.03, 3, -128, 127) + maps)
    want = torch.fake_quantize_per_tensor_affine(total, 0.02, 0, 0, 255).mean((2, 3)).numpy()
    for name, got in found.items():
        assert np.abs(got - want).max() < 0.02 / 4, name  # a code or two of 16 may be the next


@pytest.mark.parametrize(
    ("shape", "window"),
    [((3, 6, 6), ([2, 2], [1, 1], [0, 0], [1, 1])), ((1, 2, 8, 8), ([2, 2], [1, 1], [1, 1], [9, 9]))],
    ids=["one image", "windows without a pixel"],
)
def test_max_pooling_that_has_no_integer_kernel_is_done_in_floats(
    shape: tuple[int, ...], window: tuple[list[int], ...], rng: np.random.Generator
) -> None:
    net, x = Network(), rng.normal(size=shape).astype(np.float32)
    pooled = net.g("aten.max_pool2d.default", net.rounded(net.g.input("x", *shape), 0.02, 100), *window)
    net.g.output(net.rounded(pooled, 0.02, 100))
    assert "npu.integer_max_pool2d" not in net.ops
    rounded = torch.fake_quantize_per_tensor_affine(torch.from_numpy(x), 0.02, 100, 0, 255)
    want = torch.fake_quantize_per_tensor_affine(F.max_pool2d(rounded, *window), 0.02, 100, 0, 255).numpy()
    for name, got in net.run({"x": x}).items():
        np.testing.assert_allclose(got, want, atol=1e-6, err_msg=name)


def test_a_tensor_of_bytes_that_other_kernels_read_too_is_stored_as_integers() -> None:
    net = Network()
    x = net.g.input("x", 1, 8)
    attrs = {"scale": 0.1, "zero_point": 0, "quant_min": -128, "quant_max": 127, "dtype": "int8"}
    codes = net.g(QUANTIZE, x, **attrs, out=((1, 8), "int8"))
    value = net.g(DEQUANTIZE, codes, **attrs, out=((1, 8), "float32"))
    product = net.g("aten.linear.default", value, net.weight("w", np.ones((3, 8), np.int8), np.ones(3)))
    net.g.output(product, net.g("aten.cat.default", [codes, codes], 1))
    assert "npu.integer_linear" not in net.ops
    program = compile(net.g.ir())
    backend = BACKENDS["native"]
    found = Executor(program, backend).run(
        {"x": np.full((1, 8), 0.5, np.float32)}, load_weights(net.state, program, backend)
    )
    np.testing.assert_array_equal(found[program.output_specs[1].name].to_numpy(program.output_specs[1]), 5)


def test_bytes_that_are_an_input_are_checked_against_their_range() -> None:
    from npu_compiler import InputError

    net = Network()
    codes = net.g.input("x", 2, 8, dtype="int8")
    attrs = {"scale": 0.5, "zero_point": 1, "quant_min": -128, "quant_max": 127, "dtype": "int8"}
    value = net.g(DEQUANTIZE, codes, **attrs, out=((2, 8), "float32"))
    net.g.output(net.g("aten.linear.default", value, net.weight("w", np.ones((3, 8), np.int8), np.ones(3))))
    given = np.arange(-8, 8).reshape(2, 8)
    want = np.repeat(((given - 1) * 0.5).sum(axis=1, keepdims=True), 3, axis=1)
    for name, got in net.run({"x": given.astype(np.int8)}).items():
        np.testing.assert_array_equal(got, want, err_msg=name)
    with pytest.raises(InputError, match=r"'x' holds 200, which is outside -128\.\.127"):
        net.run({"x": np.full((2, 8), 200)})


def test_products_that_share_a_weight_have_zero_points_of_their_own() -> None:
    rng, net = np.random.default_rng(0), Network()
    codes, weight = rng.integers(0, 256, (3, 16)), rng.integers(-128, 128, (8, 16)).astype(np.int8)
    x = net.rounded(net.g.input("x", 3, 16), 1.0, 0)
    net.state |= {"w": weight, "scales": np.ones(8, np.float32), "3": np.full(8, 3), "7": np.full(8, 7)}
    stored, scales = net.g.weight("w", 8, 16, dtype="int8"), net.g.weight("scales", 8)
    attrs = {"axis": 0, "quant_min": -128, "quant_max": 127, "dtype": "int8"}
    first, second = (
        net.g(
            DEQUANTIZE_CHANNELS, stored, scales, net.g.weight(zero, 8, dtype="int64"), **attrs, out=((8, 16), "float32")
        )
        for zero in ("3", "7")
    )
    net.g.output(net.g("aten.cat.default", [net.g("aten.linear.default", x, each) for each in (first, second)], 1))
    assert net.ops.count("npu.integer_linear") == 2
    wide = weight.astype(np.int64)
    want = np.concatenate([codes @ (wide - zero).T for zero in (3, 7)], 1)
    for name, got in net.run({"x": codes.astype(np.float32)}).items():
        np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize(("scale", "zero"), [(1.0, -20), (1.0, 300), (0.5, 10)])
def test_parameters_that_are_tensors_may_be_outside_the_range(scale: float, zero: int, groups: int) -> None:
    rng, net = np.random.default_rng(0), Network()
    x = rng.integers(-30, 30, (1, 16, 4, 4)).astype(np.float32)
    weight = rng.integers(-9, 9, (16, 16 // groups, 3, 3)).astype(np.int8)
    parameters = [net.g.constant("scale", np.float32([scale])), net.g.constant("zero", np.int64([zero]))]
    attrs = {"quant_min": 0, "quant_max": 255, "dtype": "uint8"}
    quantize, dequantize = (name.replace(".default", ".tensor") for name in (QUANTIZE, DEQUANTIZE))
    codes = net.g(quantize, net.g.input("x", *x.shape), *parameters, **attrs, out=(x.shape, "uint8"))
    value = net.g(dequantize, codes, *parameters, **attrs, out=(x.shape, "float32"))
    window = {"stride": [1, 1], "padding": [1, 1], "groups": groups}
    net.g.output(net.g("aten.conv2d.default", value, net.weight("w", weight, np.ones(16)), **window))
    assert ("npu.integer_conv2d" in net.ops) == (0 <= zero <= 255)
    seen = (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale
    want = F.conv2d(torch.from_numpy(seen), torch.from_numpy(weight).float(), padding=1, groups=groups).numpy()
    for name, got in net.run({"x": x}).items():
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_a_residual_that_is_not_a_number_stays_so_in_floats(activation: str) -> None:
    net = Network()
    x, other = net.g.input("x", 1, 16, 3, 3), net.g.input("other", 1, 16, 3, 3)
    weight = net.weight("w", np.ones((16, 16, 1, 1), np.int8), np.ones(16))
    value = net.g("aten.add.Tensor", net.g("aten.conv2d.default", net.rounded(x, 1.0, 0), weight), other)
    net.g.output(value if activation == "none" else net.g(f"aten.{activation}.default", value))
    residual = np.zeros((1, 16, 3, 3), np.float32)
    residual[0, 5, 1, 2] = np.nan
    for name, got in net.run({"x": np.ones((1, 16, 3, 3), np.float32), "other": residual}).items():
        assert np.isnan(got[0, 5, 1, 2]) and np.isnan(got).sum() == 1, name


@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("groups", [1, 80])
def test_results_beyond_all_integers_become_the_least_or_the_greatest_code(
    groups: int, dtype: str, activation: str
) -> None:
    net, (low, high) = Network(), LIMITS[dtype]
    zero, beyond = low + 20, [3e9, -3e9, 1e30, -1e30, np.inf, -np.inf, 2.0, -3.0]
    x, b = net.g.input("x", 1, 80, 3, 3), net.g.weight("b", 80)
    net.state["b"] = np.resize(np.array(beyond, np.float32), 80)
    taps = 1 if groups == 1 else 3
    w = net.weight("w", np.zeros((80, 80 // groups, taps, taps), np.int8), np.ones(80))
    window = {"stride": [1, 1], "padding": [taps // 2] * 2, "groups": groups}
    value = net.g("aten.conv2d.default", net.rounded(x, 1.0, zero, dtype), w, b, **window)
    if activation != "none":
        value = net.g(f"aten.{activation}.default", value)
    net.g.output(net.rounded(value, 0.5, zero, dtype))
    limits = {"none": (-np.inf, np.inf), "relu": (0, np.inf), "relu6": (0, 6)}[activation]
    codes = np.clip(np.rint(np.clip(net.state["b"], *limits) / 0.5) + zero, low, high)
    want = np.broadcast_to(((codes - zero) * 0.5).reshape(1, 80, 1, 1), (1, 80, 3, 3))
    for name, got in net.run({"x": np.ones((1, 80, 3, 3), np.float32)}).items():
        np.testing.assert_array_equal(got, want, err_msg=name)
