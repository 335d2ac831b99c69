"""Convolutions: as matrix products, directly (few output channels a group), and transposed."""

from __future__ import annotations

from metal_harness import Case, T

Pair = tuple[int, int]


def conv(
    name: str,
    x: T,
    weight: tuple[int, int, int, int],
    *,
    stride: Pair = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
    activation: str = "none",
    bias: str | None = None,
    residual: str | None = None,
    weight_dtype: str = "compute",
    out_dtype: str = "compute",
    padded: int = 0,
) -> Case:
    """A convolution, direct where its groups have fewer than 8 output channels.

    Args:
        bias, residual: Dtypes.
        padding: Top, bottom, left, right.
        padded: Channels in the memory of output and residual, which have also a gap after each row; 0: no gaps.
    """
    images, _, height, width = x.shape
    channels, _, *kernel = weight
    rows, columns = (
        (size + before + after - d * (k - 1) - 1) // s + 1
        for size, before, after, d, k, s in zip(
            (height, width), padding[::2], padding[1::2], dilation, kernel, stride, strict=True
        )
    )
    shape = (images, channels, rows, columns)
    line = columns + 3
    strides = (padded * rows * line, rows * line, line, 1) if padded else None
    inputs = [x, T(weight, weight_dtype)]
    inputs += [T((channels,), bias)] if bias else []
    inputs += [T(shape, residual, strides)] if residual else []
    params = {
        "stride": list(stride),
        "padding": list(padding),
        "dilation": list(dilation),
        "groups": groups,
        "has_bias": int(bias is not None),
        "has_residual": int(residual is not None),
        "activation": activation,
        "direct": int(channels // groups < 8),
    }
    return Case("conv2d_kernel", name, inputs, [T(shape, out_dtype, strides)], params)


def transposed(
    name: str,
    x: tuple[int, int, int, int],
    weight: tuple[int, int, int, int],
    *,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    output_padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
    bias: str | None = None,
    x_dtype: str = "compute",
    gap: int = 0,
) -> Case:
    """A transposed convolution; `gap` elements behind each row of the output."""
    rows, columns = (
        (size - 1) * s - 2 * p + d * (k - 1) + o + 1
        for size, s, p, d, k, o in zip(x[2:], stride, padding, dilation, weight[2:], output_padding, strict=True)
    )
    channels = weight[1] * groups
    line = columns + gap
    inputs = [T(x, x_dtype), T(weight)] + ([T((channels,), bias)] if bias else [])
    params = {
        "stride": list(stride),
        "padding": list(padding),
        "output_padding": list(output_padding),
        "dilation": list(dilation),
        "groups": groups,
        "has_bias": int(bias is not None),
    }
    out = T((x[0], channels, rows, columns), strides=(channels * rows * line, rows * line, line, 1))
    return Case("conv_transpose2d_kernel", name, inputs, [out], params)


PRODUCTS = [
    conv("one-pixel", T((1, 1, 1, 1)), (8, 1, 1, 1)),
    conv("pointwise", T((1, 17, 3, 5)), (9, 17, 1, 1), bias="compute", activation="relu6"),
    conv("past-a-block", T((1, 3, 9, 9)), (33, 3, 2, 2), padding=(1, 0, 0, 1), activation="relu"),
    conv("past-a-quadrant", T((1, 2, 5, 11)), (17, 2, 3, 3), padding=(1, 1, 1, 1), bias="float32", activation="silu"),
    conv("one-dimensional", T((2, 3, 1, 19)), (10, 3, 1, 5), padding=(0, 0, 2, 2), stride=(1, 3)),
    conv(
        "strided",
        T((1, 5, 8, 7)),
        (11, 5, 3, 2),
        stride=(2, 3),
        padding=(0, 1, 2, 0),
        bias="compute",
        residual="compute",
        activation="hardswish",
    ),
    conv("dilated", T((1, 2, 9, 10)), (8, 2, 3, 3), dilation=(2, 3), padding=(2, 2, 3, 1), activation="gelu"),
    conv(
        "groups", T((2, 6, 5, 4)), (27, 2, 3, 3), groups=3, padding=(1, 1, 1, 1), bias="compute", activation="sigmoid"
    ),
    conv(
        "padded-channels",
        T((2, 5, 4, 6), strides=(192, 24, 6, 1)),
        (9, 5, 3, 3),
        padding=(1, 1, 1, 1),
        padded=12,
        residual="float32",
        activation="hardsigmoid",
    ),
    conv(
        "float-weight",
        T((1, 4, 3, 3)),
        (8, 4, 3, 3),
        padding=(1, 1, 1, 1),
        weight_dtype="float32",
        bias="float32",
        out_dtype="float32",
    ),
    conv("float-x", T((1, 3, 4, 4), "float32"), (12, 3, 2, 2), activation="gelu_tanh"),
]

DIRECT = [
    conv("direct-one-pixel", T((1, 1, 1, 1)), (1, 1, 1, 1)),
    conv(
        "depthwise", T((2, 5, 7, 6)), (5, 1, 3, 3), groups=5, padding=(1, 1, 1, 1), bias="compute", activation="relu6"
    ),
    conv(
        "depthwise-strided",
        T((1, 3, 9, 11)),
        (3, 1, 3, 5),
        groups=3,
        stride=(2, 2),
        padding=(0, 1, 2, 3),
        bias="float32",
        residual="compute",
        activation="hardswish",
        padded=4,
    ),
    conv(
        "depthwise-dilated",
        T((1, 2, 8, 9), strides=(288, 72, 9, 1)),
        (4, 1, 3, 2),
        groups=2,
        dilation=(2, 3),
        padding=(2, 1, 0, 2),
    ),
    conv("few-channels", T((1, 4, 5, 13)), (6, 2, 2, 3), groups=2, activation="sigmoid", residual="compute"),
    conv("many-pixels", T((1, 2, 33, 35)), (2, 1, 1, 1), groups=2, weight_dtype="float32"),
    conv(
        "direct-float",
        T((1, 3, 4, 5), "float32"),
        (3, 3, 3, 3),
        padding=(1, 1, 1, 1),
        out_dtype="float32",
        activation="gelu",
    ),
]

TRANSPOSED = [
    transposed("one-pixel", (1, 1, 1, 1), (1, 1, 1, 1)),
    transposed("doubling", (2, 3, 4, 5), (3, 5, 2, 2), stride=(2, 2), bias="compute"),
    transposed("overlapping", (1, 2, 5, 3), (2, 3, 4, 3), stride=(2, 3), padding=(1, 1), output_padding=(1, 2), gap=4),
    transposed("dilated", (1, 3, 3, 4), (3, 2, 3, 2), dilation=(2, 3), padding=(1, 0), bias="float32"),
    transposed("groups", (1, 4, 3, 3), (4, 3, 3, 3), stride=(3, 2), padding=(2, 1), groups=2, x_dtype="float32"),
]

CASES = [*PRODUCTS, *DIRECT, *TRANSPOSED]
