"""Matrix products."""

from __future__ import annotations

from typing import Any

from metal_harness import Case, T

ACTIVATIONS = ("none", "relu", "relu6", "gelu", "gelu_tanh", "silu", "hardswish", "hardsigmoid", "sigmoid")


def linear(
    kernel: str,
    name: str,
    m: int,
    n: int,
    k: int,
    *,
    activation: str = "none",
    bias: str | None = None,
    residual: str | None = None,
    x: str = "compute",
    weight: str = "compute",
    out: str = "compute",
    row: int = 0,
    values: Any = None,
) -> Case:
    """act(x · wᵀ + bias) + residual.

    Args:
        bias, residual, x, weight, out: Dtypes.
        row: Elements from one row to the next in all matrices, and where each begins (a multiple of 4 of both lets the
            kernel use vector loads); 0: no gaps.
    """

    def matrix(rows: int, columns: int, dtype: str, drawn: Any = None) -> T:
        return T((rows, columns), dtype, strides=(row or columns, 1), offset=row, values=drawn)

    rows = 2 * n if kernel.startswith("gated") else n
    strides = (1, row or n) if "notrans" in kernel else (row or k, 1)
    inputs = [matrix(m, k, x, values), T((rows, k), weight, strides, row)]
    inputs += [T((rows,), bias)] if bias else []
    inputs += [matrix(m, n, residual)] if residual else []
    params = {
        "m": m,
        "n": n,
        "k": k,
        "has_bias": int(bias is not None),
        "has_residual": int(residual is not None),
        "activation": activation,
    }
    return Case(kernel, name, inputs, [matrix(m, n, out)], params)


def batched(name: str, a: T, b: T, out: T, *, scale: float = 1.0, transpose_b: bool = False) -> Case:
    *batch, m, n = out.shape
    count = 1
    for size in batch:
        count *= size
    params = {"m": m, "n": n, "k": a.shape[-1], "batch": count, "scale": scale, "transpose_b": int(transpose_b)}
    return Case("batched_matmul_kernel", name, [a, b], [out], params)


TILED = [
    linear(kernel, *case, **options)
    for kernel in ("matmul_kernel", "matmul_notrans_kernel")
    for *case, options in [
        ("one-element", 1, 1, 1, {"bias": "compute"}),
        ("one-term", 5, 3, 1, {"residual": "compute", "activation": "relu"}),
        ("no-terms", 3, 5, 0, {"bias": "float32", "activation": "sigmoid"}),
        ("past-a-tile", 17, 18, 35, {"bias": "compute", "residual": "compute", "activation": "gelu"}),
        ("past-a-block", 33, 37, 7, {"bias": "compute", "activation": "silu"}),
        ("two-rounds", 13, 11, 67, {"residual": "float32", "activation": "gelu_tanh"}),
        ("gaps", 3, 34, 37, {"bias": "compute", "residual": "compute", "row": 39}),
        ("vectors", 34, 36, 32, {"bias": "compute", "residual": "compute", "row": 36, "activation": "hardswish"}),
        ("vectors-uneven", 33, 35, 37, {"bias": "float32", "row": 40, "activation": "relu6"}),
        ("float-out", 9, 5, 19, {"out": "float32"}),
        ("float-x", 5, 17, 12, {"x": "float32", "activation": "hardsigmoid"}),
        ("float-weight", 7, 3, 13, {"weight": "float32", "row": 16}),
        ("integers", 5, 9, 8, {"x": "int32", "weight": "int32", "out": "int32"}),
        ("special", 4, 6, 3, {"values": "special", "bias": "compute", "activation": "relu6"}),
    ]
]

VECTORS = [
    linear(kernel, *case, **options)
    for kernel in ("matmul_vec_kernel", "matmul_vec_notrans_kernel", "gated_matmul_vec_kernel")
    for *case, options in [
        ("one-element", 1, 1, 1, {}),
        ("no-terms", 1, 3, 0, {"bias": "compute"}),
        ("uneven", 1, 7, 39, {"bias": "compute", "activation": "gelu"}),
        ("gaps", 1, 33, 5, {"row": 41, "bias": "float32"}),
        ("vectors", 1, 8, 256, {"row": 256}),
        ("vectors-uneven", 1, 5, 131, {"row": 132, "bias": "compute", "activation": "silu"}),
        ("two-rounds", 1, 3, 1063, {"row": 1064, "activation": "gelu_tanh"}),
        ("two-scalar-rounds", 1, 35, 1057, {}),
        ("float-out", 1, 6, 17, {"out": "float32"}),
        ("float-x", 1, 9, 36, {"x": "float32", "out": "float32"}),
        ("float-weight", 1, 5, 8, {"weight": "float32"}),
        ("integers", 1, 6, 13, {"x": "int32", "weight": "int32", "out": "int32", "row": 16}),
    ]
]
RESIDUALS = [
    linear(kernel, f"residual-{activation}", 1, n, 21, residual="compute", bias="compute", activation=activation)
    for kernel in ("matmul_vec_kernel", "matmul_vec_notrans_kernel")
    for n, activation in enumerate(ACTIVATIONS, start=1)
]

EPILOGUES = [
    Case(
        "linear_epilogue_kernel",
        name,
        [
            product := T((m, n), strides=(n + gap, 1)),
            *[T((n,), x) for x in (bias,) if x],
            *[T((m, n), x) for x in (residual,) if x],
        ],
        [product],
        {"has_bias": bool(bias), "has_residual": bool(residual), "activation": activation},
    )
    for name, m, n, gap, bias, residual, activation in [
        ("one-element", 1, 1, 0, "compute", None, "none"),
        ("everything", 7, 33, 3, "float32", "compute", "gelu"),
        ("wide", 2, 257, 0, "compute", None, "relu"),
        ("tall", 259, 3, 1, None, "compute", "silu"),
        ("activation-only", 5, 31, 0, None, None, "sigmoid"),
    ]
]

BATCHED = [
    batched("one-element", T((1, 1)), T((1, 1)), T((1, 1), "float32")),
    batched("no-terms", T((2, 3, 0)), T((2, 0, 5)), T((2, 3, 5))),
    batched("one-row", T((3, 1, 37)), T((3, 37, 5)), T((3, 1, 5)), scale=0.125),
    batched(
        "one-row-transposed", T((3, 1, 37)), T((3, 37, 33), strides=(1221, 1, 37)), T((3, 1, 33)), transpose_b=True
    ),
    batched("repeated", T((2, 17, 9)), T((2, 9, 5), strides=(0, 5, 1)), T((2, 17, 5)), scale=0.5),
    batched(
        "repeated-heads",
        T((2, 3, 5, 8)),
        T((2, 3, 8, 34), strides=(272, 0, 1, 8)),
        T((2, 3, 5, 34)),
        scale=0.35,
        transpose_b=True,
    ),
    batched(
        "heads-between-rows",
        T((2, 3, 5, 7), "float32", strides=(105, 7, 21, 1)),
        T((2, 3, 7, 4)),
        T((2, 3, 5, 4), strides=(60, 4, 12, 1)),
    ),
    batched(
        "rank-eight",
        T((1, 2, 1, 2, 1, 2, 3, 5), "float32"),
        T((1, 2, 1, 2, 1, 2, 5, 2), strides=(0, 0, 0, 12, 0, 26, 2, 1)),
        T((1, 2, 1, 2, 1, 2, 3, 2)),
    ),
    batched("left-transposed", T((2, 33, 35), strides=(1190, 1, 34)), T((2, 35, 3), "float32"), T((2, 33, 3))),
    batched(
        "any-strides",
        T((2, 5, 36), strides=(400, 78, 2)),
        T((2, 36, 7), strides=(800, 21, 3)),
        T((2, 5, 7), strides=(128, 2, 15), offset=3),
    ),
    batched("out-transposed", T((2, 4, 6)), T((2, 6, 35)), T((2, 4, 35), strides=(160, 1, 4))),
    batched("vectors", T((2, 33, 40), "float32"), T((2, 40, 36)), T((2, 33, 36)), scale=2.0),
    batched(
        "vectors-uneven",
        T((2, 3, 39), strides=(160, 40, 1)),
        T((2, 39, 33), "float32", strides=(1440, 36, 1)),
        T((2, 3, 33), strides=(160, 40, 1)),
    ),
    batched(
        "integers",
        T((2, 3, 33), "int32", values=(-5000, 5000)),
        T((2, 33, 35), "int32", values=(-5000, 5000)),
        T((2, 3, 35), "int32"),
    ),
    batched(
        "integers-tall",
        T((33, 3), "int32", strides=(4, 1)),
        T((3, 5), "int32", strides=(1, 3)),
        T((33, 5), "int32", strides=(6, 1)),
        transpose_b=True,
    ),
]

CASES = [*TILED, *VECTORS, *RESIDUALS, *EPILOGUES, *BATCHED]
