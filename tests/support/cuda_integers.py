"""Integer kernels over images in bytes, as cases."""

from __future__ import annotations

from typing import Any

import numpy as np
from metal_harness import Case, T

LIMITS = {"uint8": (0, 256), "int8": (-128, 128)}


def images(*shape: int, dtype: str = "uint8") -> T:
    """[N, C, H, W] with its channels side by side; bytes of all values, extremes among them."""
    _, c, h, w = shape
    return T(shape, dtype, (c * h * w, 1, w * c, c), values=LIMITS.get(dtype, "normal"))


def _codes(dtype: str, limits: tuple[int, int] | None, zero_point: int) -> dict[str, int]:
    low, high = limits or {"uint8": (0, 255), "int8": (-128, 127)}.get(dtype, (0, 0))
    return {"low": low, "high": high, "out_zero_point": zero_point}


def conv(
    name: str,
    shape: tuple[int, int, int, int],
    weight: tuple[int, int, int, int],
    *,
    dtype: str = "uint8",
    out: str = "uint8",
    zero_point: int = 0,
    out_zero_point: int = 0,
    limits: tuple[int, int] | None = None,
    activation: str = "relu",
    bias: bool = True,
    residual: str | None = None,
    zeros: bool = False,
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> Case:
    (n, _, h, w), (o, i, kh, kw) = shape, weight
    top, bottom, left, right = padding
    p = (h + top + bottom - (kh - 1) * dilation - 1) // stride + 1
    q = (w + left + right - (kw - 1) * dilation - 1) // stride + 1
    inputs = [images(*shape, dtype=dtype), T(weight, "int8", values=LIMITS["int8"])]
    inputs.append(T((o,), "float32", values=(0.001, 0.01)))
    inputs += [T((o,), "int32", values=(-128, 128))] * zeros + [T((o,), "float32")] * bias
    inputs += [images(n, o, p, q, dtype=residual)] if residual is not None else []
    params: dict[str, Any] = {
        "x_scale": 0.0317,
        "zero_point": zero_point,
        "residual_scale": 0.021,
        "residual_zero_point": 7,
        "out_scale": 0.0007 * np.sqrt(i * kh * kw) * (1 + zeros),
        "activation": activation,
        "has_weight_zeros": int(zeros),
        "has_bias": int(bias),
        "has_residual": int(residual is not None),
        "stride": [stride] * 2,
        "padding": list(padding),
        "dilation": [dilation] * 2,
        "groups": groups,
        **_codes(out, limits, out_zero_point),
    }
    return Case("integer_conv2d_kernel", name, inputs, [images(n, o, p, q, dtype=out)], params)


def linear(name: str, m: int, n: int, k: int, *, out: str = "float32", residual: str | None = None) -> Case:
    inputs = [
        T((m, k), "uint8", values=LIMITS["uint8"]),
        T((n, k), "int8", values=LIMITS["int8"]),
        T((n,), "float32", values=(0.001, 0.01)),
        T((n,), "float32"),
    ]
    inputs += [T((m, n), residual, values=LIMITS.get(residual, "normal"))] if residual is not None else []
    params: dict[str, Any] = {
        "x_scale": 0.0317,
        "zero_point": 3,
        "residual_scale": 0.021,
        "residual_zero_point": 7,
        "out_scale": 0.3,
        "activation": "none",
        "has_weight_zeros": 0,
        "has_bias": 1,
        "has_residual": int(residual is not None),
        **_codes(out, None, 90),
    }
    return Case("integer_linear_kernel", name, inputs, [T((m, n), out)], params)


def total(name: str, shape: tuple[int, int, int, int], out: str, x: T | None = None) -> Case:
    params = {"x_scale": 0.03, "zero_point": 4, "residual_scale": 0.02, "residual_zero_point": -5, "out_scale": 0.04}
    inputs = [x or images(*shape), images(*shape, dtype="int8")]
    params |= {"activation": "relu", **_codes(out, None, 1)}  # type: ignore[dict-item]
    return Case("integer_add_kernel", name, inputs, [images(*shape, dtype=out)], params)


SAME = (1, 1, 1, 1)
CONVOLUTIONS = [
    conv("pointwise", (1, 64, 9, 7), (40, 64, 1, 1)),
    conv("residual", (2, 64, 28, 29), (256, 64, 1, 1), residual="uint8", out_zero_point=3),
    conv("many-pixels", (3, 48, 61, 59), (136, 48, 1, 1), activation="none", out_zero_point=120),
    conv("wide-tiles", (2, 144, 90, 91), (264, 144, 1, 1), zero_point=12),
    conv("three-by-three", (2, 24, 13, 11), (72, 24, 3, 3), padding=SAME, residual="uint8", zero_point=130),
    conv("few-pixels-many-terms", (1, 512, 7, 7), (256, 512, 3, 3), padding=SAME, residual="uint8", activation="none"),
    conv("many-terms", (1, 208, 66, 65), (328, 208, 3, 3), padding=SAME, dtype="int8", zero_point=-9, out="int8"),
    conv("stem", (2, 3, 41, 37), (64, 3, 7, 7), stride=2, padding=(3, 3, 3, 3), zero_point=130),
    conv(
        "uneven-stem", (2, 3, 40, 37), (32, 3, 3, 3), stride=2, padding=(0, 1, 0, 1), zero_point=127, activation="relu6"
    ),
    conv(
        "odd-channels",
        (2, 21, 8, 9),
        (45, 21, 3, 3),
        padding=SAME,
        dtype="int8",
        out="int8",
        zero_point=-3,
        out_zero_point=5,
        residual="int8",
        activation="none",
        limits=(-127, 100),
    ),
    conv("strided", (2, 32, 15, 17), (16, 32, 3, 3), stride=2, padding=SAME, bias=False),
    conv("dilated", (1, 8, 14, 23), (24, 8, 3, 3), dilation=2, padding=(2, 2, 2, 2), zero_point=9),
    conv("float-result", (1, 20, 14, 14), (10, 20, 1, 1), out="float32", activation="none", zero_point=4),
    conv("half-result", (1, 32, 14, 14), (64, 32, 1, 1), out="compute", residual="uint8", zero_point=4),
    conv("float-residual", (1, 32, 15, 14), (48, 32, 1, 1), residual="float32", zero_point=4, out_zero_point=8),
    conv("half-residual", (1, 64, 15, 14), (64, 64, 1, 1), residual="compute", out="compute", zero_point=4),
    conv("depthwise", (2, 24, 14, 13), (24, 1, 3, 3), groups=24, padding=SAME, zero_point=100, activation="relu6"),
    conv(
        "depthwise-strided", (1, 40, 19, 16), (40, 1, 5, 5), groups=40, stride=2, padding=(2, 2, 2, 2), residual="uint8"
    ),
    conv("depthwise-odd", (1, 9, 19, 16), (9, 1, 3, 3), groups=9, padding=SAME, zero_point=5),
    conv("depthwise-large", (4, 96, 112, 112), (96, 1, 3, 3), groups=96, padding=SAME),
    conv("grouped", (2, 32, 10, 10), (64, 8, 3, 3), groups=4, padding=SAME, zero_point=4),
    conv("weight-zeros", (1, 12, 6, 5), (10, 12, 3, 3), padding=SAME, zero_point=4, zeros=True),
]
OTHERS = [
    linear("few-rows", 3, 40, 64),
    linear("odd", 7, 17, 33),
    linear("one-row", 1, 1000, 2048),
    linear("bytes", 70, 128, 320, out="uint8", residual="uint8"),
    total("images", (2, 40, 9, 8), "uint8"),
    total("odd", (2, 5, 9, 8), "int8"),
    total("floats", (2, 40, 9, 8), "compute"),
    total("orders", (2, 8, 9, 8), "uint8", T((2, 8, 9, 8), "uint8", values=LIMITS["uint8"])),
    *(
        Case(
            "integer_mean_kernel",
            f"{channels}-{out}",
            [images(3, channels, 9, 7)],
            [T((3, channels), out)],
            {"x_scale": 0.03, "zero_point": 90, "out_scale": 0.01, **_codes(out, None, 7)},
        )
        for channels in (5, 40, 72)
        for out in ("uint8", "float32")
    ),
    *(
        Case(
            "integer_max_pool2d_kernel",
            f"{channels}-{dtype}",
            [images(2, channels, 33, 28, dtype=dtype)],
            [images(2, channels, 17, 14, dtype=dtype)],
            {"window": [3, 3], "stride": [2, 2], "padding": [1, 1], "dilation": [1, 1], "ceil_mode": 0},
        )
        for channels in (5, 64)
        for dtype in ("uint8", "int8")
    ),
    *(
        Case(
            "quantize_activation_kernel",
            f"{name}-{out}",
            [x],
            [images(2, 3, 33, 28, dtype=out)],
            {"out_scale": 0.02, **_codes(out, None, 3)},
        )
        for name, x in (("rows", T((2, 3, 33, 28))), ("pixels", images(2, 3, 33, 28, dtype="float32")))
        for out in ("uint8", "int8")
    ),
    Case(
        "dequantize_activation_kernel",
        "images",
        [images(2, 24, 9, 8, dtype="int8")],
        [T((2, 24, 9, 8))],
        {"x_scale": 0.03, "zero_point": -4},
    ),
]
