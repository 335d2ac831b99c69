"""RMSNorm, LayerNorm, GroupNorm and rotary embedding."""

from __future__ import annotations

from metal_harness import Case, T


def rms(name: str, x: T, out: T, weight: T | None = None, *, offset: float = 0.0, eps: float = 1e-6) -> Case:
    rows, width = x.shape
    params = {"rows": rows, "width": width, "eps": eps, "weight_offset": offset, "has_weight": int(weight is not None)}
    return Case("rmsnorm_kernel", name, [x, *([weight] if weight else [])], [out], params)


def layer(name: str, x: T, out: T, weight: T | None = None, bias: T | None = None, eps: float = 1e-5) -> Case:
    rows, width = x.shape
    params = {
        "rows": rows,
        "width": width,
        "eps": eps,
        "has_weight": int(weight is not None),
        "has_bias": int(bias is not None),
    }
    return Case("layernorm_kernel", name, [x, *(t for t in (weight, bias) if t)], [out], params, atol=1e-4)


def group(name: str, x: T, groups: int, out: T | None = None, weight: T | None = None, bias: T | None = None) -> Case:
    params = {"groups": groups, "eps": 1e-5, "has_weight": int(weight is not None), "has_bias": int(bias is not None)}
    affine = [t for t in (weight, bias) if t]
    return Case("groupnorm_kernel", name, [x, *affine], [out or T(x.shape)], params, atol=1e-4)


def rope(
    name: str,
    shape: tuple[int, ...],
    x: T | None = None,
    table: str = "compute",
    out: T | None = None,
    table_strides: tuple[int, ...] | None = None,
) -> Case:
    """`table_strides`: of cos and sin, which repeat over heads."""
    angles = [T(shape, table, strides=table_strides, values=(-1.0, 1.0)) for _ in range(2)]
    return Case("rope_kernel", name, [x or T(shape), *angles], [out or T(shape)], {"rotary_dim": shape[-1]})


CASES = [
    *(rms(f"width-{width}", T((2, width)), T((2, width)), T((width,))) for width in (1, 31, 36, 257, 1100)),
    rms("no-weight", T((3, 40)), T((3, 40))),
    rms("no-weight-ragged", T((3, 133)), T((3, 133))),
    rms("weight-offset", T((2, 140)), T((2, 140)), T((140,)), offset=1.0),
    rms("weight-offset-ragged", T((2, 139)), T((2, 139)), T((139,)), offset=1.0),
    rms("rows-with-gaps", T((3, 135), strides=(144, 1), offset=4), T((3, 135), strides=(136, 1)), T((135,))),
    rms("float32-weight", T((2, 134)), T((2, 134)), T((134,), "float32")),
    rms("float32-weight-vectorized", T((2, 136)), T((2, 136)), T((136,), "float32")),
    rms("float32", T((2, 132), "float32"), T((2, 132), "float32"), T((132,))),
    rms("zeros", T((2, 8), values=0.0), T((2, 8)), T((8,)), eps=1e-5),
    rms("special", T((4, 40), values="special"), T((4, 40)), T((40,))),
    *(
        layer(f"width-{width}", T((2, width)), T((2, width)), T((width,)), T((width,)))
        for width in (1, 33, 36, 257, 1100)
    ),
    layer("plain", T((3, 44)), T((3, 44))),
    layer("plain-ragged", T((3, 131)), T((3, 131))),
    layer("no-bias", T((3, 136)), T((3, 136)), T((136,))),
    layer(
        "rows-with-gaps", T((3, 135), strides=(140, 1)), T((3, 135), strides=(144, 1), offset=8), T((135,)), T((135,))
    ),
    layer("float32-affine", T((2, 150)), T((2, 150)), T((150,), "float32"), T((150,), "float32")),
    layer("float32", T((2, 140), "float32"), T((2, 140), "float32"), T((140,)), T((140,))),
    layer("far-from-zero", T((2, 160), values=(1000.0, 1010.0)), T((2, 160))),
    layer("constant", T((2, 9), values=3.0), T((2, 9)), T((9,)), T((9,)), eps=1e-3),
    layer("special", T((4, 37), values="special"), T((4, 37)), T((37,)), T((37,))),
    group("square", T((2, 6, 4, 6)), 3, None, T((6,)), T((6,))),
    group("ragged", T((2, 6, 5, 7)), 2, None, T((6,)), T((6,))),
    group("plain", T((1, 4, 9, 5)), 4),
    group("one-group", T((2, 5, 7)), 1, None, T((5,))),
    group("no-space", T((3, 8)), 2, None, T((8,)), T((8,))),
    group("no-space-wide", T((2, 160)), 1, None, T((160,)), T((160,))),
    group(
        "padded-channels",
        T((2, 6, 4, 8), strides=(320, 32, 8, 1)),
        2,
        T((2, 6, 4, 8), strides=(288, 32, 8, 1)),
        T((6,)),
        T((6,)),
    ),
    group("channels-last", T((2, 6, 5, 3), strides=(90, 1, 18, 6)), 3, None, T((6,)), T((6,))),
    group("to-channels-last", T((2, 6, 4, 4)), 3, T((2, 6, 4, 4), strides=(96, 1, 24, 6)), T((6,)), T((6,))),
    group("rows-with-gaps", T((1, 4, 3, 8), strides=(160, 40, 12, 1)), 2, None, T((4,)), T((4,))),
    group("float32-affine", T((1, 8, 6, 6)), 2, None, T((8,), "float32"), T((8,), "float32")),
    group("far-from-zero", T((1, 4, 8, 8), values=(1000.0, 1010.0)), 2),
    rope("pairs-of-four", (2, 3, 5, 24), table_strides=(0, 0, 24, 1)),
    rope("many-rows", (1, 4, 33, 64), table="float32", table_strides=(0, 0, 64, 1)),
    rope("odd-half", (2, 2, 3, 14), table_strides=(42, 0, 14, 1)),
    rope("one-pair", (3, 2)),
    rope("vector", (16,)),
    rope("float32", (2, 3, 40), T((2, 3, 40), "float32"), "float32", T((2, 3, 40), "float32")),
    rope(
        "transposed",
        (2, 3, 5, 32),
        T((2, 3, 5, 32), strides=(480, 32, 96, 1)),
        "float32",
        T((2, 3, 5, 32), strides=(480, 32, 96, 1)),
        (0, 0, 32, 1),
    ),
    rope("slice", (1, 3, 4, 16), T((1, 3, 4, 16), strides=(320, 16, 80, 1), offset=16)),
    rope(
        "half-not-of-four",
        (7, 3, 20),
        T((7, 3, 20), strides=(96, 32, 1)),
        "compute",
        T((7, 3, 20), strides=(72, 24, 1)),
        (60, 20, 1),
    ),
    rope("very-wide", (2, 2056)),
    rope("five-dimensions", (2, 1, 2, 3, 8), table_strides=(0, 0, 0, 8, 1)),
    rope("constant-angle", (3, 4, 12), table_strides=(0, 0, 0)),
]
