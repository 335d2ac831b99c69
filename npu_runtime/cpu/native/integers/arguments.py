"""The argument block of the integer kernels, and checks whether they take the operands."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from npu_runtime.cpu.arrays import address, strides_of
from npu_runtime.cpu.bound_call import Params
from npu_runtime.cpu.native.bindings import layout
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, floats, item_size, packed
from npu_runtime.cpu.native.numbers import ACTIVATIONS, STORED_DTYPES

CHANNELS_LAST = (0, 2, 3, 1)
TILE_STEPS = 16  # kTileSteps in vec.h


class IntegerArgs(ArgumentBlock):
    """The C struct Args in integer_args.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "scales", "bias", "offsets", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("x_type", "residual_type", "out_type", "activation")),
        *((name, ctypes.c_float) for name in ("x_scale", "residual_scale", "inverse_out_scale")),
        *((name, ctypes.c_int32) for name in ("zero_point", "residual_zero_point", "out_zero_point", "low", "high")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("batch", "groups", "in_channels", "out_channels", "in_h", "in_w", "out_h", "out_w"),
                *("kernel_h", "kernel_w", "stride_h", "stride_w", "dilation_h", "dilation_w", "pad_top", "pad_left"),
                "weight_group_stride",
            )
        ),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        if kernel.startswith("integer_conv2d"):
            yield from self._convolution(kernel.removeprefix("integer_conv2d").removeprefix("_"))
            return
        maps = self.batch * self.groups
        size = maps * self.in_h * self.in_w
        results = {"integer_max_pool2d": maps * self.out_h * self.out_w, "integer_mean": maps}.get(kernel, size)
        yield packed("x", self.x, size * item_size(self.x_type))
        yield packed("residual", self.residual, size * item_size(self.residual_type))
        yield packed("out", self.out, results * item_size(self.out_type))

    def _convolution(self, algorithm: str) -> Iterator[Extent]:
        """The extents of a convolution, which reads whole vectors of scales, biases and offsets, and whole panels."""
        features, pixels = self.groups * self.out_channels, self.batch * self.out_h * self.out_w
        yield packed("x", self.x, self.batch * self.groups * self.in_channels * self.in_h * self.in_w)
        yield packed("residual", self.residual, pixels * features * item_size(self.residual_type))
        yield packed("out", self.out, pixels * features * item_size(self.out_type))
        panel, lanes, taps = layout().panel, layout().lanes, self.kernel_h * self.kernel_w
        if algorithm == "columns":
            width, quads = (4 * lanes, True) if layout().has_byte_quads else (lanes, False)
            read = -(-features // width) * width
            steps = self.kernel_w * -(-self.kernel_h // (4 if quads else 2))
            weight = read * steps * 4
        elif algorithm == "depthwise":
            read, weight = -(-features // lanes) * lanes, -(-taps // 2) * 2 * features * 2
        else:
            read = features - self.out_channels + -(-self.out_channels // panel) * panel
            last = -(-self.out_channels // panel) * panel
            if algorithm.startswith("winograd"):
                weight = last * self.in_channels * taps
            else:
                step, multiple, size = {"bytes": (4, 1, 1), "tiles": (4, TILE_STEPS, 1)}.get(algorithm, (2, 1, 2))
                steps = -(-(taps * self.in_channels) // (step * multiple)) * step * multiple
                weight = ((self.groups - 1) * self.weight_group_stride + last * steps) * size
        yield packed("weight", self.weight, weight)
        for name in ("scales", "bias", "offsets"):
            yield floats(name, getattr(self, name), read)


def is_packed(array: np.ndarray) -> bool:
    """Whether the array is row-major without gaps."""
    expected = 1
    for size, stride in zip(reversed(array.shape), reversed(strides_of(array)), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return array.size > 0


def is_image(array: np.ndarray) -> bool:
    return array.ndim == 4 and is_packed(array.transpose(CHANNELS_LAST))


def base_args(x: np.ndarray, residual: np.ndarray | None, out: np.ndarray, params: Params) -> IntegerArgs:
    """The argument block of an integer kernel, without its shapes."""
    scale = np.float32(params.get("out_scale", 1.0))
    args = IntegerArgs(
        x=address(x),
        out=address(out),
        x_type=STORED_DTYPES[x.dtype],
        out_type=STORED_DTYPES[out.dtype],
        activation=ACTIVATIONS[params.get("activation", "none")],
        inverse_out_scale=np.float32(1) / scale,
        **{name: params[name] for name in ("x_scale", "zero_point", "out_zero_point", "low", "high") if name in params},
    )
    if residual is not None:
        args.residual, args.residual_type = address(residual), STORED_DTYPES[residual.dtype]
        args.residual_scale, args.residual_zero_point = params["residual_scale"], params["residual_zero_point"]
    return args


def set_fields(args: IntegerArgs, **fields: int) -> None:
    for name, value in fields.items():
        setattr(args, name, value)


def set_window(args: IntegerArgs, params: Params, kernel: tuple[int, ...], padding: tuple[int, int]) -> None:
    for name, pair in (("kernel", kernel), ("stride", params["stride"]), ("dilation", params["dilation"])):
        set_fields(args, **{f"{name}_h": pair[0], f"{name}_w": pair[1]})
    set_fields(args, pad_top=padding[0], pad_left=padding[1])
