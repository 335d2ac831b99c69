"""Pooling and resampling of images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from metal_harness import Case, T

Pair = tuple[int, int]


def _pool(
    kernel: str,
    name: str,
    x: T,
    window: Pair,
    stride: Pair,
    padding: Pair,
    ceil_mode: bool,
    out: T | None,
    dtype: str = "compute",
    **params: object,
) -> Case:
    """A pooling of [N, C, H, W] whose result has the shape that torch gives it, and by default the dtype under test."""
    settings = {"window": window, "stride": stride, "padding": padding, "ceil_mode": ceil_mode, **params}
    dilation = settings.get("dilation", (1, 1))
    image = torch.zeros(x.shape)
    shape = tuple(F.max_pool2d(image, window, stride, padding, dilation, ceil_mode).shape)
    return Case(kernel, name, [x], [out if out is not None else T(shape, dtype)], settings)


def _max(
    name: str,
    x: T,
    window: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    ceil_mode: bool = False,
    out: T | None = None,
) -> Case:
    return _pool("max_pool2d_kernel", name, x, window, stride, padding, ceil_mode, out, dilation=dilation)


def _max_index(
    name: str,
    x: T,
    window: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    ceil_mode: bool = False,
) -> Case:
    kernel = "max_pool2d_index_kernel"
    return _pool(kernel, name, x, window, stride, padding, ceil_mode, None, "int32", dilation=dilation)


def _avg(
    name: str,
    x: T,
    window: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int = 0,
    out: T | None = None,
) -> Case:
    return _pool(
        "avg_pool2d_kernel",
        name,
        x,
        window,
        stride,
        padding,
        ceil_mode,
        out,
        count_include_pad=count_include_pad,
        divisor=divisor,
    )


def _adaptive(name: str, x: T, size: Pair, **out: object) -> Case:
    return Case("adaptive_avg_pool2d_kernel", name, [x], [T((*x.shape[:2], *size), **out)])  # type: ignore[arg-type]


def _scale(x: T, size: Sequence[int]) -> list[float]:
    return [source / target for source, target in zip(x.shape[2:], size, strict=True)]


def _nearest(name: str, x: T, size: Pair, exact: bool = False, out: T | None = None) -> Case:
    target = out if out is not None else T((*x.shape[:2], *size), x.dtype)
    return Case("upsample_nearest_kernel", name, [x], [target], {"scale": _scale(x, size), "exact": exact}, atol=0.0)


def _bilinear(
    name: str, x: T, size: Pair, align_corners: bool, out: T | None = None, scale: list[float] | None = None
) -> Case:
    target = out if out is not None else T((*x.shape[:2], *size))
    params = {"scale": scale if scale is not None else _scale(x, size), "align_corners": align_corners}
    return Case("upsample_bilinear_kernel", name, [x], [target], params, atol=1e-6)


PADDED_CHANNELS = T((2, 3, 9, 7), strides=(32 * 63, 63, 7, 1))  # three channels of 32

CASES = [
    _max("halving", T((1, 2, 8, 6)), (2, 2), (2, 2)),
    _max("padded", T((2, 3, 9, 7)), (3, 3), (2, 2), (1, 1)),
    _max("stride-one", T((1, 2, 11, 5)), (3, 2), (1, 1), (1, 0)),
    _max("special", T((1, 2, 11, 10), values="special"), (3, 3), (1, 1), (1, 1)),
    _max("dilated", T((1, 2, 13, 12)), (3, 2), (1, 2), (1, 1), dilation=(2, 3)),
    _max("ceil", T((1, 2, 8, 7)), (3, 3), (2, 2), (0, 1), ceil_mode=True),
    _max("line", T((2, 3, 1, 40)), (1, 3), (1, 2), (0, 1)),
    _max("beyond-a-threadgroup", T((1, 1, 3, 270)), (1, 1), (1, 1)),
    _max(
        "padded-channels", PADDED_CHANNELS, (2, 2), (2, 2), out=T((2, 3, 4, 3), strides=(32 * 12, 12, 3, 1), offset=1)
    ),
    _max(
        "float32",
        T((1, 2, 5, 5), "float32", values=(-9.0, -1.0)),
        (3, 3),
        (1, 1),
        (1, 1),
        out=T((1, 2, 5, 5), "float32"),
    ),
    _max_index("halving", T((1, 2, 8, 6)), (2, 2), (2, 2)),
    _max_index("ties", T((2, 3, 9, 7), values="small"), (3, 3), (2, 2), (1, 1)),
    _max_index("special", T((1, 2, 11, 10), values="special"), (3, 3), (1, 1), (1, 1)),
    _max_index("lowest", T((1, 1, 4, 6), values=np.full((1, 1, 4, 6), -np.inf)), (2, 2), (2, 2)),
    _max_index("dilated", T((1, 2, 13, 12)), (3, 2), (1, 2), (1, 1), dilation=(2, 3)),
    _max_index("ceil", T((1, 2, 8, 7), "float32"), (3, 3), (2, 2), (0, 1), ceil_mode=True),
    _max_index("padded-channels", PADDED_CHANNELS, (2, 2), (2, 2)),
    _avg("halving", T((1, 2, 8, 6)), (2, 2), (2, 2)),
    _avg("padded", T((2, 3, 9, 7)), (3, 3), (2, 2), (1, 1)),
    _avg("without-padding", T((2, 3, 9, 7)), (3, 3), (2, 2), (1, 1), count_include_pad=False),
    _avg("divisor", T((1, 2, 9, 7)), (3, 2), (1, 2), (1, 1), divisor=5),
    _avg("ceil", T((1, 2, 8, 7)), (3, 3), (2, 2), (1, 1), ceil_mode=True),
    _avg("ceil-without-padding", T((1, 2, 8, 8)), (3, 3), (2, 2), (1, 1), ceil_mode=True, count_include_pad=False),
    _avg("special", T((1, 2, 11, 10), values="special"), (2, 3), (1, 1)),
    _avg("line", T((2, 3, 1, 40)), (1, 3), (1, 2), (0, 1)),
    _avg("beyond-a-threadgroup", T((1, 1, 3, 270)), (1, 1), (1, 1)),
    _avg(
        "padded-channels", PADDED_CHANNELS, (2, 2), (2, 2), out=T((2, 3, 4, 3), strides=(32 * 12, 12, 3, 1), offset=1)
    ),
    _adaptive("global", T((2, 5, 7, 7)), (1, 1)),
    _adaptive("global-large", T((1, 3, 9, 37)), (1, 1)),
    _adaptive("uneven", T((1, 2, 10, 11)), (3, 4)),
    _adaptive("enlarging", T((1, 2, 3, 5)), (7, 6)),
    _adaptive("same", T((1, 1, 4, 4), values="special"), (4, 4)),
    _adaptive("line", T((2, 3, 1, 100), "float32"), (1, 3), dtype="float32"),
    _adaptive("columns", T((1, 2, 70, 1)), (2, 1)),
    _adaptive("padded-channels", PADDED_CHANNELS, (2, 3), strides=(32 * 6, 6, 3, 1), offset=2),
    _nearest("double", T((1, 2, 4, 5)), (8, 10)),
    _nearest("half", T((1, 2, 8, 6)), (4, 3)),
    _nearest("uneven", T((2, 3, 5, 7), values="special"), (13, 9)),
    _nearest("uneven-exact", T((2, 3, 5, 7)), (13, 9), exact=True),
    _nearest("shrinking-exact", T((1, 1, 11, 13)), (4, 5), exact=True),
    _nearest("beyond-a-threadgroup", T((1, 1, 2, 90)), (3, 270)),
    _nearest("large-ints", T((1, 1, 3, 4), "int32", values=(-(2**31), 2**31)), (6, 8)),
    _nearest("strided", T((1, 2, 4, 5), strides=(40, 1, 10, 2)), (9, 6), out=T((1, 2, 9, 6), strides=(128, 64, 7, 1))),
    _bilinear("double", T((1, 2, 4, 5)), (8, 10), align_corners=False),
    _bilinear("double-aligned", T((1, 2, 4, 5)), (8, 10), align_corners=True),
    _bilinear("half", T((1, 2, 8, 6)), (4, 3), align_corners=False),
    _bilinear("uneven", T((2, 3, 5, 7)), (13, 9), align_corners=False),
    _bilinear("uneven-aligned", T((2, 3, 5, 7)), (13, 9), align_corners=True),
    _bilinear("given-scale", T((1, 2, 5, 7)), (7, 10), align_corners=False, scale=[1 / 1.5, 1 / 1.5]),
    _bilinear("to-one", T((1, 2, 5, 7)), (1, 1), align_corners=True),
    _bilinear("from-one", T((1, 2, 1, 1)), (3, 9), align_corners=False),
    _bilinear("beyond-a-threadgroup", T((1, 1, 2, 90)), (3, 270), align_corners=False),
    _bilinear(
        "strided",
        T((1, 2, 4, 5), "float32", strides=(40, 1, 10, 2)),
        (9, 6),
        align_corners=False,
        out=T((1, 2, 9, 6), strides=(128, 64, 7, 1)),
    ),
]
