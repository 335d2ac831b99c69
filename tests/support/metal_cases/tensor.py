"""Kernels that make or rearrange tensors: fill, arange, pad, triangle, flip."""

from __future__ import annotations

from typing import Any

from metal_harness import Case, T

from npu_compiler.graph.dtypes import as_int32

LARGE_INTS = (-(2**31), 2**31)  # floats would round them


def _fill(name: str, out: T, value: float) -> Case:
    return Case("fill_kernel", name, [], [out], {"value": float(value), "int_value": as_int32(value)})


def _arange(name: str, out: T, start: float, step: float) -> Case:
    params = {"start": start, "step": step, "int_start": int(start), "int_step": int(step)}
    return Case("arange_kernel", name, [], [out], params, atol=1e-6)


def _pad(name: str, x: T, pads: list[int], mode: str = "constant", value: float = 0.0, out: T | None = None) -> Case:
    """`pads` as torch's F.pad has them: before and after of the last dimension first."""
    padded = list(x.shape)
    for index in range(0, len(pads), 2):
        padded[-1 - index // 2] += pads[index] + pads[index + 1]
    target = out if out is not None else T(tuple(padded), x.dtype)
    assert target.shape == tuple(padded)
    params = {"mode": mode, "pads": pads + [0] * (12 - len(pads)), "value": value, "int_value": as_int32(value)}
    return Case("pad_kernel", f"{mode}-{name}", [x], [target], params, atol=0.0)


def _triangle(name: str, x: T, upper: bool, diagonal: int, out: T | None = None) -> Case:
    params = {"upper": upper, "diagonal": diagonal}
    return Case("triangle_kernel", name, [x], [out if out is not None else T(x.shape, x.dtype)], params, atol=0.0)


def _flip(name: str, x: T, dims: tuple[int, ...], **out: Any) -> Case:
    flags = [int(dim in dims) for dim in range(8)]
    return Case("flip_kernel", name, [x], [T(x.shape, x.dtype, **out)], {"dims": flags}, atol=0.0)


EIGHT = (2, 1, 3, 2, 1, 2, 3, 2)

CASES = [
    _fill("one", T((1,)), -1.5),
    _fill("scalar", T(()), 2.0),
    _fill("beyond-a-threadgroup", T((257,)), float("-inf")),
    _fill("with-gaps", T((5, 7, 9), strides=(80, 11, 1), offset=3), 0.25),
    _fill("transposed", T((30, 20), strides=(1, 31)), 3.0),
    _fill("large-int", T((19,), "int32"), 2**30 + 1),
    _fill("bool", T((300,), "bool"), 1),
    _fill("bool-half", T((5,), "bool"), 0.5),
    _fill("float32", T((6, 3), "float32"), 1e-9),
    _arange("ints", T((259,), "int32"), -7, 3),
    _arange("large-ints", T((5,), "int32"), 2**30 + 1, -1),
    _arange("halves", T((131,)), 0.5, 0.25),
    _arange("float32", T((1000,), "float32"), -1.0, 2 / 999),
    _arange("every-other", T((70,), strides=(2,), offset=1), 10.0, -1.0),
    _arange("one", T((1,)), 4.0, 1.0),
    _pad("row", T((7,)), [2, 3], value=-1.5),
    _pad("image", T((2, 3, 5, 6)), [1, 2, 3, 0], value=float("-inf")),
    _pad("beyond-a-threadgroup", T((5, 60)), [1, 0, 0, 1]),
    _pad(
        "strided",
        T((4, 9), strides=(1, 4), offset=2),
        [0, 1, 2, 0],
        value=7.0,
        out=T((6, 10), strides=(12, 1), offset=1),
    ),
    _pad("six-dims", T((2, 1, 3, 1, 2, 2)), [1, 0, 0, 1, 1, 1, 2, 0, 0, 1, 1, 0], value=1.5),
    _pad("rank-8", T(EIGHT), [1, 1, 0, 1], value=1.5),
    _pad("rank-8-of-ints", T(EIGHT, "int32", values=LARGE_INTS), [0, 1, 1, 0], value=-3.0),
    _pad("large-ints", T((5, 3), "int32", values=LARGE_INTS), [1, 1, 1, 1], value=2**30 + 1),
    _pad("bools", T((5, 3), "bool"), [2, 1], value=1.0),
    _pad("rows-before", T((5, 32)), [0, 0, 2, 1], value=0.5),
    _pad(
        "channels-last",
        T((2, 16, 5, 6), strides=(480, 1, 96, 16)),
        [1, 2, 0, 1],
        value=float("-inf"),
        out=T((2, 16, 6, 9), strides=(864, 1, 144, 16)),
    ),
    _pad("channels", T((2, 8, 3, 4), strides=(96, 1, 32, 8)), [0, 0, 1, 1, 8, 4], out=T((2, 20, 5, 4))),
    _pad("empty", T((0,)), [2, 3], value=2.0),
    _pad("special", T((33,), values="special"), [1, 1], value=float("nan")),
    _pad("row", T((2, 3, 9)), [4, 8], "reflect"),
    _pad("image", T((2, 3, 5, 6)), [2, 1, 0, 4], "reflect"),
    _pad("volume", T((1, 2, 4, 3, 5)), [1, 4, 2, 1, 3, 0], "reflect"),
    _pad("strided", T((2, 4, 6), strides=(50, 12, 2)), [3, 2], "reflect", out=T((2, 4, 11), strides=(60, 14, 1))),
    _pad("row", T((2, 3, 9)), [12, 8], "replicate"),
    _pad("image", T((2, 3, 5, 6), "float32"), [2, 9, 0, 4], "replicate"),
    _pad("rows", T((3, 5, 16)), [0, 0, 2, 3], "replicate"),
    _pad("volume", T((1, 2, 4, 3, 5)), [1, 4, 2, 1, 3, 0], "replicate"),
    _pad("row", T((2, 3, 9)), [4, 9], "circular"),
    _pad("image", T((2, 3, 5, 6)), [6, 1, 0, 5], "circular"),
    _pad("beyond-a-threadgroup", T((2, 3, 11, 10)), [3, 0, 2, 1], "circular"),
    _triangle("square", T((9, 9)), upper=False, diagonal=0),
    _triangle("wide", T((5, 11)), upper=True, diagonal=2),
    _triangle("tall", T((13, 4)), upper=True, diagonal=-3),
    _triangle("batch", T((2, 3, 8, 7), values="special"), upper=False, diagonal=-1),
    _triangle("beyond-a-threadgroup", T((17, 17)), upper=False, diagonal=3),
    _triangle("one", T((1, 1)), upper=True, diagonal=1),
    _triangle("large-ints", T((6, 7), "int32", values=LARGE_INTS), upper=True, diagonal=0),
    _triangle("bools", T((6, 6), "bool"), upper=False, diagonal=0),
    _triangle(
        "transposed",
        T((6, 8), strides=(1, 6), offset=1),
        upper=True,
        diagonal=1,
        out=T((6, 8), strides=(10, 1), offset=5),
    ),
    _flip("row", T((17,)), (0,)),
    _flip("rows", T((3, 6)), (0,)),
    _flip("columns", T((3, 6), values="special"), (1,)),
    _flip("beyond-a-threadgroup", T((3, 5, 19)), (0, 2)),
    _flip("one", T((1,)), (0,)),
    _flip("rank-8", T(EIGHT), (0, 2, 3, 7)),
    _flip("large-ints", T((4, 5), "int32", values=LARGE_INTS), (0, 1)),
    _flip("bools", T((21,), "bool"), (0,)),
    _flip("float32", T((21,), "float32"), (0,)),
    _flip("channels-last", T((2, 8, 3, 4), strides=(96, 1, 32, 8)), (2, 3), strides=(96, 1, 32, 8)),
    _flip("transposed", T((5, 6), strides=(1, 5), offset=2), (1,), strides=(9, 1), offset=1),
]
