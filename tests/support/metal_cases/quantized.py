"""Products and lookups with weights in few bits; the reference computes with the dequantized weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from metal_harness import Case, T

from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_runtime.cpu.quantized_weights import weight_parts
from npu_runtime.cpu.torch_kernels.prepacked import dequantized

# Codes, what is taken off or added, and the dtype of the scales: each of the other 16-bit dtype too.
FORMATS = [
    ("int4", "none", "compute"),
    ("int4", "minimum", "float16"),
    ("int4", "zero_point", "bfloat16"),
    ("int8", "none", "float32"),
    ("int8", "minimum", "bfloat16"),
    ("int8", "zero_point", "float16"),
    ("float8_e4m3", "none", "compute"),
    ("float8_e4m3", "none", "float32"),
    ("float4_e2m1", "none", "bfloat16"),
    ("iq4_nl", "none", "float16"),
]
INT4, INT8, FLOAT8 = FORMATS[1], FORMATS[5], FORMATS[6]
OUTSIDE = [3, -1, 0, 5, 4, -(2**31), 2**31 - 1]  # of five rows


def weight_parts_of(
    rows: int, k: int, group: int, format: tuple[str, str, str], gap: int = 0, offset: int = 0
) -> tuple[list[T], dict[str, Any]]:
    """The operands that hold a weight of any codes, and the parameters that say how.

    Args:
        gap: Elements between the rows of each operand.
        offset: First element of each operand; 16, 32, … lets kernels read 16 bytes of codes at once.
    """
    codes, offsets, scales = format
    rng = np.random.default_rng([rows, k, group])
    data = rng.integers(0, 256, (rows, k * CODE_FORMATS[codes].bits // 8))
    if codes == "float8_e4m3":
        data[(data & 0x7F) == 0x7F] = 0x01  # no NaN, but the smallest subnormal
    groups = k // group

    def part(array: Any, dtype: str) -> T:
        return T(np.shape(array), dtype, strides=(np.shape(array)[1] + gap, 1), offset=offset, values=array)

    parts = [part(data, "uint8"), part(rng.uniform(-1, 1, (rows, groups)), scales)]
    if offsets == "minimum":
        parts.append(part(rng.uniform(-8, 8, (rows, groups)), scales))
    elif offsets == "zero_point":
        parts.append(part(rng.integers(0, 256 if codes == "int8" else 16, (rows, groups)), "uint8"))
    params = {"k": k, "groups": groups, "codes": codes, "offsets": offsets, "has_offset": int(offsets != "none")}
    return parts, params


def _linear(
    kernel: str,
    name: str,
    m: int,
    n: int,
    k: int,
    group: int,
    format: tuple[str, str, str],
    *,
    bias: str | None = None,
    residual: str | None = None,
    activation: str = "none",
    x: str = "compute",
    out: str = "compute",
    gap: int = 0,
    offset: int = 0,
) -> Case:
    def matrix(columns: int, dtype: str) -> T:
        return T((m, columns), dtype, strides=(columns + gap, 1), offset=offset)

    is_gated = "gated" in kernel
    rows = 2 * n if is_gated else n
    weight, params = weight_parts_of(rows, k, group, format, gap, offset)
    inputs = [matrix(k, x), *weight, *([T((rows,), bias)] if bias else [])]
    params |= {"m": m, "n": n, "has_bias": int(bias is not None), "activation": activation}
    if not is_gated:
        inputs += [matrix(n, residual)] if residual else []
        params["has_residual"] = int(residual is not None)
    return Case(kernel, f"{format[0]}-{format[1]}-{name}", inputs, [matrix(n, out)], params)


def _embedding(
    name: str,
    rows: int,
    k: int,
    group: int,
    format: tuple[str, str, str],
    ids: T,
    *,
    out: str = "compute",
    gap: int = 0,
    offset: int = 0,
    strides: tuple[int, ...] | None = None,
    checked: bool = True,
) -> Case:
    weight, params = weight_parts_of(rows, k, group, format, gap, offset)
    target = T((*ids.shape, k), out, strides=strides)
    params |= {"rows": rows, "checked": checked}
    name = f"{format[0]}-{format[1]}-{name}"
    reference = None if checked else _look_up_what_is_there
    return Case("quantized_embedding_kernel", name, [*weight, ids], [target], params, reference=reference)


def _look_up_what_is_there(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], params: Mapping[str, Any]
) -> None:
    """NaN where an index is out of range."""
    parts, (ids,) = weight_parts(inputs, params, 0)
    table = dequantized(parts, params)
    found = (ids >= 0) & (ids < len(table))
    outputs[0].copy_(table[ids.long().clamp(0, len(table) - 1)])
    outputs[0].masked_fill_(~found.unsqueeze(-1), float("nan"))


def _ids(shape: tuple[int, ...], values: Any, **geometry: Any) -> T:
    return T(shape, "int32", values=values, **geometry)


VECTORS = [
    _linear(kernel, name, 1, n, k, group, format, **options)
    for kernel in ("quantized_matmul_vec_kernel", "quantized_gated_matmul_vec_kernel")
    for name, n, k, group, formats, options in [
        ("groups", 6, 192, 64, FORMATS, {"bias": "compute"}),
        ("one-group", 5, 96, 96, FORMATS, {"activation": "silu"}),
        ("small-groups", 3, 36, 6, FORMATS, {"bias": "float32"}),
        ("odd-groups", 7, 50, 25, FORMATS, {"activation": "gelu"}),
        ("pairs", 1, 2, 1, [INT4, INT8], {}),
        ("quads", 4, 48, 12, [INT4, INT8], {}),
        ("one-element", 1, 1, 1, [INT8, FLOAT8], {}),
        ("two-rounds", 2, 8256, 64, [INT4], {}),
        ("two-rounds", 2, 4128, 32, [INT8], {}),
        ("two-odd-rounds", 2, 8230, 5, [INT4], {}),
        ("two-odd-rounds", 2, 4119, 3, [INT8], {}),
        ("gaps", 33, 64, 32, [INT4, INT8], {"gap": 16, "offset": 32}),
        ("uneven-gaps", 9, 64, 32, [INT4, INT8], {"gap": 3, "offset": 5}),
        ("codes-not-at-16-bytes", 5, 64, 32, [INT4, INT8], {"gap": 4, "offset": 4}),
        ("float-x", 5, 64, 32, [INT4, INT8], {"x": "float32"}),
        ("float-out", 5, 64, 32, [INT4, FLOAT8], {"out": "float32"}),
        ("floats", 5, 64, 32, [INT4, FLOAT8], {"x": "float32", "out": "float32", "bias": "float32"}),
    ]
    for format in formats
]
RESIDUALS = [
    _linear(
        "quantized_matmul_vec_kernel",
        activation,
        1,
        n,
        64,
        32,
        INT4,
        bias="compute",
        residual="compute",
        activation=activation,
    )
    for n, activation in enumerate(("none", "relu", "gelu_tanh", "sigmoid"), start=3)
]
TILED = [
    _linear("quantized_matmul_kernel", name, m, n, k, group, format, **options)
    for name, m, n, k, group, formats, options in [
        ("groups", 5, 7, 64, 32, FORMATS, {"bias": "compute"}),
        ("odd-groups", 3, 5, 50, 25, FORMATS, {"residual": "compute"}),
        ("one-element", 1, 1, 1, 1, [INT8, FLOAT8], {}),
        ("past-a-tile", 17, 18, 36, 12, [INT4, INT8], {"activation": "relu"}),
        ("past-a-block", 33, 37, 36, 36, [INT4, INT8], {"bias": "float32", "residual": "float32"}),
        ("past-a-block-of-quads", 34, 35, 40, 4, [INT4, FLOAT8], {"activation": "gelu"}),
        ("part-of-a-block", 3, 5, 48, 16, [INT8, FLOAT8], {}),
        ("gaps", 6, 5, 64, 32, [INT4, INT8], {"gap": 16, "offset": 32, "residual": "compute"}),
        ("uneven-gaps", 9, 3, 64, 32, [INT4, INT8], {"gap": 3, "offset": 5}),
        ("float-x", 5, 3, 32, 16, [INT4, FLOAT8], {"x": "float32"}),
        ("float-out", 5, 3, 32, 32, [INT4, INT8], {"out": "float32"}),
    ]
    for format in formats
]
EMBEDDINGS = [
    *(_embedding("groups", 5, 64, 16, format, _ids((3,), (0, 5))) for format in FORMATS),
    *(_embedding("odd-groups", 5, 50, 25, format, _ids((2, 2), (0, 5))) for format in FORMATS),
    _embedding("one-element", 1, 1, 1, INT8, _ids((1,), 0)),
    _embedding("float-out", 5, 32, 32, INT4, _ids((4,), (0, 5)), out="float32"),
    _embedding("gaps", 5, 32, 8, INT8, _ids((4,), (0, 5)), gap=16, offset=32, strides=(36, 1)),
    _embedding("rest-behind-vectors", 5, 18, 6, INT8, _ids((3,), (0, 5)), strides=(20, 1)),
    _embedding("uneven-gaps", 5, 12, 4, INT4, _ids((3,), (0, 5)), gap=1, offset=3, strides=(1, 3)),
    _embedding("beyond-a-threadgroup", 3, 1032, 8, INT4, _ids((2,), (0, 3))),
    _embedding("strided-ids", 5, 6, 2, INT4, _ids((3, 2), (0, 5), strides=(1, 4), offset=1), strides=(30, 1, 5)),
    _embedding("out-of-range", 5, 16, 16, INT4, _ids((7,), OUTSIDE), checked=False),
    _embedding("odd-out-of-range", 5, 15, 5, INT8, _ids((7,), OUTSIDE), checked=False),
]

CASES = [*VECTORS, *RESIDUALS, *TILED, *EMBEDDINGS]
