"""Convolutions over channels-last images, as cases."""

from __future__ import annotations

from metal_cases.conv import conv, transposed
from metal_harness import T


def nhwc(*shape: int, dtype: str = "compute") -> T:
    """[N, C, H, W] with its channels side by side."""
    _, c, h, w = shape
    return T(shape, dtype, (c * h * w, 1, w * c, c))


def heads(*shape: int) -> T:
    """[N, C, H, W] with the channels of all images side by side, pixel by pixel, as the heads of tokens lie."""
    n, c, _, w = shape
    return T(shape, "compute", (c, 1, w * n * c, n * c))


SAME = {"padding": (1, 1, 1, 1)}
CASES = [
    conv("pointwise", nhwc(1, 64, 9, 7), (40, 64, 1, 1), bias="float32", activation="relu"),
    conv(
        "three-by-three",
        nhwc(2, 24, 13, 11),
        (72, 24, 3, 3),
        **SAME,
        bias="float32",
        residual="compute",
        activation="relu",
    ),
    conv("few-pixels-many-terms", nhwc(1, 512, 7, 7), (256, 512, 3, 3), **SAME, bias="compute", activation="silu"),
    conv("many-pixels", nhwc(3, 16, 61, 59), (136, 16, 1, 1), residual="compute"),
    conv("wide-tiles", nhwc(2, 72, 90, 91), (264, 72, 1, 1), bias="compute", activation="gelu"),
    conv("many-terms", nhwc(1, 200, 66, 65), (328, 200, 3, 3), **SAME, bias="float32", residual="compute"),
    conv("strided", nhwc(2, 32, 15, 17), (16, 32, 3, 3), stride=(2, 2), padding=(1, 1, 1, 1), bias="float32"),
    conv(
        "uneven",
        nhwc(1, 8, 14, 23),
        (24, 8, 5, 2),
        stride=(3, 1),
        padding=(2, 0, 1, 3),
        dilation=(1, 2),
        activation="gelu",
    ),
    conv(
        "stem",
        nhwc(2, 3, 41, 37),
        (64, 3, 7, 7),
        stride=(2, 2),
        padding=(3, 3, 3, 3),
        bias="float32",
        activation="relu",
    ),
    conv("odd-channels", nhwc(2, 21, 8, 9), (45, 21, 3, 3), **SAME, bias="compute", residual="compute"),
    conv("hard", nhwc(1, 16, 6, 6), (32, 16, 1, 1), bias="compute", activation="hardswish"),
    conv("depthwise", nhwc(2, 24, 14, 13), (24, 1, 3, 3), groups=24, **SAME, bias="float32", activation="relu6"),
    conv(
        "depthwise-strided",
        nhwc(1, 40, 19, 16),
        (40, 1, 5, 5),
        groups=40,
        stride=(2, 2),
        padding=(2, 2, 2, 2),
        residual="compute",
    ),
    conv("depthwise-dilated", nhwc(1, 8, 20, 21), (8, 1, 3, 3), groups=8, dilation=(2, 3), padding=(2, 2, 3, 3)),
    conv(
        "depthwise-seven",
        nhwc(2, 40, 57, 30),
        (40, 1, 7, 7),
        groups=40,
        padding=(3, 3, 3, 3),
        bias="float32",
        activation="gelu",
    ),
    conv("depthwise-many", nhwc(4, 72, 60, 61), (72, 1, 3, 3), groups=72, **SAME, bias="float32", residual="compute"),
    conv("depthwise-large", nhwc(4, 96, 112, 112), (96, 1, 3, 3), groups=96, **SAME, bias="compute"),
    conv("grouped", nhwc(2, 32, 10, 10), (64, 8, 3, 3), groups=4, **SAME, bias="float32", activation="relu"),
    conv("groups-of-four", nhwc(3, 128, 57, 29), (128, 4, 3, 3), groups=32, **SAME, bias="float32", activation="relu"),
    conv(
        "groups-strided",
        nhwc(2, 64, 29, 31),
        (64, 8, 3, 3),
        groups=8,
        stride=(2, 2),
        padding=(1, 1, 1, 1),
        bias="compute",
        residual="compute",
    ),
    conv("groups-of-sixteen", nhwc(2, 512, 14, 14), (512, 16, 3, 3), groups=32, **SAME, bias="float32"),
    conv("groups-of-thirty-two", nhwc(2, 1024, 7, 7), (1024, 32, 3, 3), groups=32, **SAME, activation="relu"),
    conv("groups-of-twenty-four", nhwc(2, 120, 19, 20), (120, 24, 3, 3), groups=5, **SAME, bias="float32"),
    conv("wide-groups", nhwc(2, 224, 14, 15), (224, 112, 3, 3), groups=2, **SAME, bias="float32", activation="relu"),
    conv(
        "uneven-groups",
        nhwc(1, 48, 17, 23),
        (96, 12, 5, 2),
        groups=4,
        stride=(3, 1),
        padding=(2, 0, 1, 3),
        dilation=(1, 2),
        activation="gelu",
    ),
    conv("groups-of-few-outputs", nhwc(2, 64, 12, 13), (12, 32, 3, 3), groups=2, **SAME, residual="compute"),
    conv("odd-groups", nhwc(2, 9, 12, 13), (15, 3, 3, 3), groups=3, **SAME, bias="float32"),
    conv("few-odd-groups", nhwc(2, 12, 23, 22), (48, 6, 3, 3), groups=2, stride=(2, 2), **SAME, bias="compute"),
    conv("depthwise-multiplied", nhwc(2, 24, 12, 13), (48, 1, 3, 3), groups=24, **SAME, bias="float32"),
    conv("depthwise-odd", nhwc(2, 13, 11, 12), (13, 1, 3, 3), groups=13, **SAME, bias="float32", activation="silu"),
    conv("depthwise-even", nhwc(2, 34, 11, 12), (34, 1, 7, 7), groups=34, padding=(3, 3, 3, 3), residual="compute"),
    conv("groups-of-points", nhwc(2, 64, 12, 13), (64, 16, 1, 1), groups=4, bias="float32", activation="silu"),
    conv(
        "float",
        nhwc(1, 16, 12, 12, dtype="float32"),
        (24, 16, 3, 3),
        **SAME,
        weight_dtype="float32",
        bias="float32",
        out_dtype="float32",
        activation="relu",
    ),
    conv("heads", heads(3, 64, 13, 11), (40, 64, 1, 1), bias="float32", residual="compute"),
    conv("heads-three-by-three", heads(2, 24, 9, 10), (48, 24, 3, 3), **SAME, bias="compute", activation="relu"),
    conv("heads-depthwise", heads(3, 48, 12, 11), (48, 1, 3, 3), groups=48, stride=(2, 2), **SAME),
    conv("heads-grouped", heads(2, 64, 12, 13), (64, 16, 3, 3), groups=4, **SAME, bias="float32"),
    transposed("transposed", (2, 64, 7, 9), (64, 40, 4, 4), stride=(2, 2), padding=(1, 1), bias="float32"),
    transposed("transposed-patches", (1, 48, 6, 5), (48, 16, 3, 2), stride=(3, 2), bias="compute"),
    transposed(
        "transposed-odd",
        (2, 21, 9, 8),
        (21, 5, 3, 3),
        stride=(2, 2),
        padding=(1, 1),
        output_padding=(1, 1),
        bias="compute",
    ),
    transposed("transposed-dilated", (1, 24, 11, 12), (24, 16, 3, 3), padding=(1, 3), dilation=(2, 3)),
    transposed("transposed-row", (2, 32, 1, 50), (32, 16, 1, 16), stride=(1, 8), padding=(0, 4), bias="float32"),
    transposed("transposed-groups", (2, 128, 9, 8), (128, 64, 4, 4), stride=(2, 2), padding=(1, 1), groups=2),
    transposed("transposed-depthwise", (2, 24, 7, 6), (24, 1, 4, 4), stride=(2, 2), padding=(1, 1), groups=24),
]
