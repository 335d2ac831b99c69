"""Sliding windows over images: conditions on sizes and parameters of convolutions and poolings.

These conditions are parts of kernel declarations. Besides the formula for the output's size, they bound how far a
window may reach beyond the image, and with that the memory that a kernel may need for padded planes.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

from npu_compiler.program.products import Product, Window

_SLACK = 2**16  # elements that a padded plane may have, however small the image is


def fits_convolution(call: SimpleNamespace) -> bool:
    """Whether sizes and parameters of a convolution agree: x[n, c, h, w], weight[o, i, kh, kw] → out[n, o, p, q].

    The padding is top, bottom, left, right.
    """
    top, bottom, left, right = call.padding
    pads = ((top, bottom), (left, right))
    return _slides((call.h, call.w), (call.kh, call.kw), call.stride, pads, call.dilation, (call.p, call.q))


def convolution_products(call: SimpleNamespace) -> tuple[Product, ...]:
    """The matrix product of a convolution, once per group: windows (a row per output pixel) by a part of the weight."""
    taps = call.kh * call.kw
    window = Window(taps, call.stride[1], call.q)
    return (Product(call.n * call.p * call.q, call.o // call.groups, call.i * taps, call.groups, window),)


def fits_transposed_convolution(call: SimpleNamespace) -> bool:
    """Whether sizes and parameters of a transposed convolution agree: those of the convolution from out to x.

    `output_padding` adds pixels at the end.
    """
    spare = call.output_padding
    if any(extra >= max(step, gap) for extra, step, gap in zip(spare, call.stride, call.dilation, strict=True)):
        return False
    pads = tuple((pad, pad) for pad in call.padding)
    inner = tuple(size - extra for size, extra in zip((call.p, call.q), spare, strict=True))
    if 0 in (call.p, call.q):
        return False
    exact = all(
        (size - 1) * step - 2 * pad + (taps - 1) * gap + 1 == out
        for size, step, pad, taps, gap, out in zip(
            (call.h, call.w), call.stride, call.padding, (call.kh, call.kw), call.dilation, inner, strict=True
        )
    )
    return exact and _slides(inner, (call.kh, call.kw), call.stride, pads, call.dilation, (call.h, call.w))


def fits_pooling(call: SimpleNamespace) -> bool:
    """Whether sizes and parameters of a pooling agree: x[n, c, h, w] → out[n, c, p, q].

    The padding is the same on both sides, and at most half a window.
    """
    dilation = getattr(call, "dilation", (1, 1))
    if any(2 * pad > taps for pad, taps in zip(call.padding, call.window, strict=True)):
        return False
    pads = tuple((pad, pad) for pad in call.padding)
    return _slides((call.h, call.w), call.window, call.stride, pads, dilation, (call.p, call.q), bool(call.ceil_mode))


def reach_the_image(call: SimpleNamespace) -> bool:
    """Whether each window of a valid pooling contains a pixel; with dilation, all of its taps may be in the padding."""
    axes = zip((call.h, call.w), (call.p, call.q), call.window, call.stride, call.padding, call.dilation, strict=True)
    return all(
        any(0 <= stop * step - pad + tap * gap < size for tap in range(taps))
        for size, stops, taps, step, pad, gap in axes
        if pad and gap > 1
        for stop in range(stops)
    )


def fits_resampling(call: SimpleNamespace) -> bool:
    """Whether sizes and scales of a resampling are valid: x[n, c, h, w] → out[n, c, p, q].

    An output pixel is read at `scale` times its position.
    """
    return call.h > 0 and call.w > 0 and all(math.isfinite(scale) and 0 <= scale < 2**31 for scale in call.scale)


def _slides(
    image: tuple[int, int],
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, int],
    out: tuple[int, int],
    ceil_mode: bool = False,
) -> bool:
    """Whether a window that slides over a padded image has exactly `out` positions.

    All pairs are (vertical, horizontal).
    """
    if min(*window, *stride, *dilation) < 1 or min(map(min, padding)) < 0:
        return False
    spans = [(taps - 1) * gap + 1 for taps, gap in zip(window, dilation, strict=True)]
    padded = [size + sum(pads) for size, pads in zip(image, padding, strict=True)]
    before = [size + pads[0] for size, pads in zip(image, padding, strict=True)]
    if list(out) != [_stops(*axis, ceil_mode) for axis in zip(padded, spans, stride, before, strict=True)]:
        return False
    return math.prod(padded) <= 4 * (math.prod(image) + math.prod(out) + math.prod(window)) + _SLACK


def _stops(padded: int, span: int, step: int, before: int, ceil_mode: bool) -> int:
    """Number of positions of a window along one axis; with `ceil_mode`, the last may end beyond the padded image.

    A window that ends beyond must begin in the image or in the padding before it, which together have `before` pixels.
    """
    if not ceil_mode:
        return (padded - span) // step + 1 if padded >= span else 0
    stops = max(-(-(padded - span) // step) + 1, 0)
    return stops - 1 if stops and (stops - 1) * step >= before else stops
