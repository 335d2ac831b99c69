"""Products by experts: each row with the matrix that it is routed to, among them rows of no expert."""

from __future__ import annotations

from metal_cases.quantized import FORMATS, weight_parts_of
from metal_harness import Case, T


def _experts(rows: int, count: int) -> T:
    """The experts of rows, in no order; every seventh is none."""
    chosen = [(5 * row + row // 3) % count if row % 7 != 6 else (-1, count, -(2**31))[row % 3] for row in range(rows)]
    return T((rows,), "int32", values=chosen)


def dense(
    name: str,
    rows: int,
    choices: int,
    count: int,
    n: int,
    k: int,
    *,
    bias: str | None = None,
    x: str = "compute",
    weight: str = "compute",
    out: str = "compute",
    transposed: bool = False,
) -> Case:
    """Products of `rows` rows with the matrices [n, k] of `choices` of `count` experts each."""
    strides = (n * k, 1, n) if transposed else (n * k, k, 1)
    inputs = [T((rows, k), x), T((count, n, k), weight, strides=strides), _experts(rows * choices, count)]
    inputs += [T((count, n), bias)] if bias else []
    params = {"e": count, "k": k, "has_bias": int(bias is not None)}
    return Case("expert_matmul_kernel", name, inputs, [T((rows * choices, n), out)], params)


def quantized(
    name: str,
    rows: int,
    choices: int,
    count: int,
    n: int,
    k: int,
    group: int,
    format: tuple[str, str, str],
    *,
    bias: str | None = None,
    x: str = "compute",
    out: str = "compute",
) -> Case:
    weight, params = weight_parts_of(count * n, k, group, format)
    inputs = [T((rows, k), x), *weight, _experts(rows * choices, count)]
    inputs += [T((count, n), bias)] if bias else []
    params |= {"e": count, "has_bias": int(bias is not None)}
    name = f"{format[0]}-{format[1]}-{name}"
    return Case("quantized_expert_matmul_kernel", name, inputs, [T((rows * choices, n), out)], params)


CASES = [
    dense("one-row", 1, 2, 4, 6, 32),
    dense("many-rows", 11, 2, 3, 7, 20, bias="compute"),
    dense("one-choice", 9, 1, 2, 16, 8, bias="float32", x="float32"),
    dense("odd", 5, 3, 5, 3, 7, out="float32"),
    dense("transposed", 4, 2, 3, 5, 12, transposed=True),
    dense("one-expert", 3, 1, 1, 1, 1),
    *(quantized("rows", 5, 2, 3, 6, 64, 32, format) for format in FORMATS),
    *(quantized("odd-groups", 4, 2, 3, 5, 50, 25, format, bias="compute", out="float32") for format in FORMATS),
    quantized("one-row", 1, 4, 8, 4, 96, 96, FORMATS[3], bias="float32", x="float32"),
]
