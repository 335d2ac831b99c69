"""Native 2-d convolution and pooling: packs weights, checks operands, and prepares launches of the C++ kernels.

The functions return None for what the kernels do not handle, and the caller then uses another: other dtypes than
float32, bfloat16 and float16, planes that are not dense, or a machine without the compiled library. Bias and weight are
read when a launch is prepared; the other operands whenever it runs. `out` may be the residual, but not x.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from npu_compiler.program.views import numel
from npu_runtime.cpu.arrays import BFLOAT16, address, host_memory, strides_of
from npu_runtime.cpu.native.bindings import NativeLaunch, available, layout
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, floats, item_size, strided
from npu_runtime.cpu.native.numbers import ACTIVATIONS, DTYPES
from npu_runtime.cpu.native.pointwise import widened
from npu_runtime.cpu.window_lengths import window_lengths

_TILE_ROWS, _TILE_PAIRS = 32, 16  # kTileRows and kTileSteps in vec.h
_MOST_TAPS = 1024  # kMostTaps in taps.h
_SMALL_MAP = 4096  # elements of a padded map that is never too large
_MOST_COLUMNS = 2**28  # bytes of gathered columns that are worth having at once
_KERNELS = {  # algorithm → kernel, and its variant
    "pixels": ("conv2d", 0),
    "channels": ("conv2d", 1),
    "tiles": ("conv2d", 2),
    "winograd2": ("conv2d_winograd", 2),
    "winograd4": ("conv2d_winograd", 4),
    "depthwise": ("conv2d_depthwise", 0),
}

_WINOGRAD_WEIGHTS = {  # the transform of a 3-tap filter, by output tile size
    2: [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
    4: [
        [1 / 4, 0, 0],
        [-1 / 6, -1 / 6, -1 / 6],
        [-1 / 6, 1 / 6, -1 / 6],
        [1 / 24, 1 / 12, 1 / 6],
        [1 / 24, -1 / 12, 1 / 6],
        [0, 0, 1],
    ],
}


class _ConvArgs(ArgumentBlock):
    """ConvArgs in conv_args.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "weight", "bias", "residual", "out")] + [
        (name, ctypes.c_int64)
        for name in (
            "x_type",
            "residual_type",
            "out_type",
            "activation",
            "residual_before_activation",
            "x_batch_stride",
            "residual_batch_stride",
            "out_batch_stride",
            "batch",
            "groups",
            "in_channels",
            "out_channels",
            "in_h",
            "in_w",
            "out_h",
            "out_w",
            "kernel_h",
            "kernel_w",
            "stride_h",
            "stride_w",
            "dilation_h",
            "dilation_w",
            "pad_top",
            "pad_left",
            "weight_group_stride",
            "variant",
            "pairs",
        )
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        features = self.groups * self.out_channels
        image, result = self.groups * self.in_channels * self.in_h * self.in_w, features * self.out_h * self.out_w
        for name, size in (("x", image), ("residual", result), ("out", result)):
            start, stride = getattr(self, name), getattr(self, f"{name}_batch_stride")
            yield strided(name, start, item_size(getattr(self, f"{name}_type")), (self.batch, size), (stride, 1))
        yield floats("bias", self.bias, features)
        yield floats("weight", self.weight, self._weight_size(kernel))

    def _weight_size(self, kernel: str) -> int:
        """Elements of four bytes, pairs of bfloat16 among them."""
        taps, outs = self.kernel_h * self.kernel_w, self.out_channels
        if kernel == "avg_pool2d":  # divisors, and a vector behind them
            return int(self.out_h * self.out_w + layout().lanes)
        if kernel == "conv2d_depthwise":
            return int(self.groups * outs * taps)
        if kernel == "conv2d_winograd":
            size = (self.variant + 2) ** 2 * outs * self.in_channels
        else:
            depth, multiple = -(-self.in_channels * taps // (2 if self.pairs else 1)), 1
            if self.variant == _KERNELS["channels"][1]:
                multiple = layout().panel
            elif self.variant == _KERNELS["tiles"][1]:
                multiple, depth = _TILE_ROWS, -(-depth // _TILE_PAIRS) * _TILE_PAIRS
            size = -(-outs // multiple) * multiple * depth
        return int((self.groups - 1) * self.weight_group_stride + size)


class _Window(NamedTuple):
    """How a kernel slides over a plane; pairs are (vertical, horizontal), padding is (top, bottom, left, right)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int] = (1, 1)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        top, bottom, left, right = self.padding
        padded = (height + top + bottom, width + left + right)
        spans = [(size - 1) * step + 1 for size, step in zip(self.kernel, self.dilation, strict=True)]
        rows, columns = [(p - s) // step + 1 for p, s, step in zip(padded, spans, self.stride, strict=True)]
        return rows, columns

    def is_pointwise(self, x: np.ndarray, out: np.ndarray) -> bool:
        """Whether each output pixel reads the one input pixel at its own place, and every input pixel is read."""
        unmoved = self.kernel == (1, 1) and self.stride == (1, 1) and not any(self.padding)
        return unmoved and x.shape[2:] == out.shape[2:]  # a window with one position has a stride of 1 on any map

    @property
    def is_valid(self) -> bool:
        return min(self.stride + self.dilation + self.kernel) > 0 and min(self.padding) >= 0

    def simplified(self, out: np.ndarray) -> _Window:
        """The same window with strides of 1 along axes where it has one position only."""
        rows, columns = (step if size > 1 else 1 for step, size in zip(self.stride, out.shape[2:], strict=True))
        return self._replace(stride=(rows, columns))

    def begins_inside(self, x: np.ndarray, out: np.ndarray) -> bool:
        """Whether each position begins in the padded map; with ceil_mode it may end behind it."""
        before, behind = self.padding[::2], self.padding[1::2]
        axes = zip(x.shape[2:], out.shape[2:], self.stride, before, behind, strict=True)
        return all((count - 1) * step < size + first + last for size, count, step, first, last in axes)

    def padded_size(self, out: np.ndarray) -> int:
        """The elements of a map that the window's positions span, padding included."""
        axes = zip(out.shape[2:], self.stride, self.kernel, self.dilation, strict=True)
        height, width = ((count - 1) * step + (size - 1) * apart + 1 for count, step, size, apart in axes)
        span: int = height * width
        return span

    def fields(self) -> dict[str, int]:
        """The window's part of the argument block."""
        pairs = {"kernel": self.kernel, "stride": self.stride, "dilation": self.dilation}
        sizes = {f"{name}_{axis}": size for name, pair in pairs.items() for axis, size in zip("hw", pair, strict=True)}
        return sizes | {"pad_top": self.padding[0], "pad_left": self.padding[2]}


@dataclass
class PackedConv:
    """A constant weight, and the layouts of it that kernels have asked for so far."""

    weight: np.ndarray
    groups: int = 1
    _layouts: dict[tuple[str, bool], np.ndarray] = field(default_factory=dict, repr=False)

    def layout(self, algorithm: str, pairs: bool = False) -> np.ndarray:
        """The weight as `algorithm` reads it, one row per group: float32, or pairs of bfloat16 seen as int32."""
        if (algorithm, pairs) not in self._layouts:
            elements = _pair_depth(self.weight) if pairs else widened(self.weight)
            groups = elements.reshape(self.groups, -1, *elements.shape[1:])
            rows = [_PACKERS[algorithm](group) for group in groups]
            memory = host_memory(len(rows) * rows[0].size, rows[0].dtype)
            self._layouts[algorithm, pairs] = np.stack(rows, out=memory.reshape(len(rows), -1))
        return self._layouts[algorithm, pairs]


def pack_conv_weight(weight: np.ndarray, groups: int = 1) -> PackedConv:
    """Prepares weight[Co, Ci / groups, Kh, Kw], which must not change afterwards, for any number of convolutions."""
    if weight.ndim != 4 or weight.shape[0] % groups:
        raise ValueError(f"no convolution weight of {groups} groups: {weight.shape}")
    return PackedConv(weight, groups)


def conv2d(
    x: np.ndarray,
    packed: PackedConv,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    activation: str,
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    groups: int,
    out: np.ndarray,
    residual_before_activation: bool = True,
    algorithm: str | None = None,
) -> NativeLaunch | None:
    """Prepares out = activation(conv(x, weight) + bias + residual), or the residual added last.

    Padding is (top, bottom, left, right). Arithmetic is float32, rounded once to out's dtype; where x and the weight
    are both bfloat16, their exact products are summed in float32. `algorithm` overrides the choice made by shape:
    "pixels", "channels", "tiles" (bfloat16, on a machine that has them), "winograd2", "winograd4" or "depthwise".
    """
    weight = packed.weight
    kernel_h, kernel_w = weight.shape[2:]
    window = _Window((kernel_h, kernel_w), stride, padding, dilation)
    if not window.is_valid or not _all_handled(x, residual, out):
        return None
    expected = (x.shape[0], weight.shape[0], *window.output_size(*x.shape[2:]))
    if out.shape != expected or (residual is not None and residual.shape != out.shape):
        raise ValueError(f"the output is {expected}, not {out.shape} or the residual's shape")
    if groups != packed.groups or x.shape[1] != weight.shape[1] * groups:
        raise ValueError(f"weight {weight.shape} of {packed.groups} groups does not fit x {x.shape}")
    window = window.simplified(out)
    if not _is_bounded(window, x, out):
        return None
    # A float32 weight (that of a folded batch norm, say) keeps its precision.
    pairs = _multiplies_pairs(x, weight)
    if algorithm is None:
        algorithm = _choose(weight, window, groups, out, pairs)
    if algorithm == "tiles" and not (pairs and layout().has_tiles):
        return None
    if algorithm == "depthwise" and kernel_h * kernel_w > _MOST_TAPS:
        return None

    pairs = pairs and algorithm in ("pixels", "channels", "tiles")
    packed_weight = packed.layout(algorithm, pairs)
    bias = np.zeros(weight.shape[0], np.float32) if bias is None else bias.astype(np.float32)
    args = _args(x, packed_weight, bias, residual, out, window)
    args.activation = ACTIVATIONS[activation]
    args.residual_before_activation = residual_before_activation
    args.groups, args.in_channels, args.out_channels = groups, weight.shape[1], weight.shape[0] // groups
    name, args.variant = _KERNELS[algorithm]
    args.weight_group_stride, args.pairs = packed_weight.shape[1], pairs
    if window.is_pointwise(x, out):  # rows may then run together
        args.in_h, args.in_w = args.out_h, args.out_w = 1, args.in_h * args.in_w
    return NativeLaunch(name, args, (x, packed_weight, bias, residual, out))


def max_pool2d(
    x: np.ndarray,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    out: np.ndarray,
) -> NativeLaunch | None:
    """Prepares a maximum pooling; out's size decides about windows that leave the padded input (ceil_mode)."""
    return _pool("max_pool2d", x, _Window(kernel, stride, padding, dilation), None, out)


def avg_pool2d(
    x: np.ndarray,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    out: np.ndarray,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> NativeLaunch | None:
    """Prepares an average pooling; out's size decides about windows that leave the padded input (ceil_mode)."""
    if not available():
        return None
    window = _Window(kernel, stride, padding)
    if divisor_override is not None:
        divisor = np.full(out.shape[2:], divisor_override, np.float32)
    else:
        rows, columns = (
            window_lengths(
                x.shape[2 + axis],
                out.shape[2 + axis],
                kernel[axis],
                stride[axis],
                padding[2 * axis],
                padding[2 * axis + 1],
                count_include_pad,
            )
            for axis in (0, 1)
        )
        divisor = rows[:, None] * columns
    # The kernel reads whole vectors.
    scale = np.pad(1 / divisor.reshape(-1), (0, layout().lanes))
    return _pool("avg_pool2d", x, window, scale, out)


def global_avg_pool2d(x: np.ndarray, out: np.ndarray) -> NativeLaunch | None:
    """Prepares the average of each map into out[N, C, 1, 1]."""
    height, width = x.shape[2:]
    return avg_pool2d(x, (height, width), (1, 1), (0, 0, 0, 0), out)


def _pool(name: str, x: np.ndarray, window: _Window, scale: np.ndarray | None, out: np.ndarray) -> NativeLaunch | None:
    if not window.is_valid or not _all_handled(x, None, out):
        return None
    window = window.simplified(out)
    is_whole = scale is not None and window.kernel == x.shape[2:] and not any(window.padding)
    has_many_taps = window.kernel[0] * window.kernel[1] > _MOST_TAPS
    if has_many_taps and not (is_whole and out.shape[2:] == (1, 1)) or not _is_bounded(window, x, out):
        return None
    if x.shape[:2] != out.shape[:2]:
        raise ValueError(f"pooling keeps batch and channels: {x.shape}, {out.shape}")
    if not window.begins_inside(x, out):
        raise ValueError(f"a window of {out.shape} begins behind the padded map of {x.shape}")
    no_bias = np.zeros(x.shape[1], np.float32)
    args = _args(x, scale, no_bias, None, out, window)
    args.groups, args.in_channels, args.out_channels = x.shape[1], 1, 1
    return NativeLaunch(name, args, (x, scale, no_bias, out))


def _args(
    x: np.ndarray,
    weight: np.ndarray | None,
    bias: np.ndarray,
    residual: np.ndarray | None,
    out: np.ndarray,
    window: _Window,
) -> _ConvArgs:
    """The argument block without what only some kernels have."""
    args = _ConvArgs(
        x=address(x),
        bias=address(bias),
        out=address(out),
        x_type=DTYPES[x.dtype],
        out_type=DTYPES[out.dtype],
        x_batch_stride=strides_of(x)[0],
        out_batch_stride=strides_of(out)[0],
        batch=x.shape[0],
        in_h=x.shape[2],
        in_w=x.shape[3],
        out_h=out.shape[2],
        out_w=out.shape[3],
        **window.fields(),
    )
    if weight is not None:
        args.weight = address(weight)
    if residual is not None:
        args.residual, args.residual_type = address(residual), DTYPES[residual.dtype]
        args.residual_batch_stride = strides_of(residual)[0]
    return args


def _choose(weight: np.ndarray, window: _Window, groups: int, out: np.ndarray, pairs: bool) -> str:
    """The fastest algorithm by measurements on two cores of a Zen 4 (16 lanes) and of a Zen 3 (8 lanes)."""
    out_channels, in_channels = weight.shape[:2]
    pixels = out.shape[2] * out.shape[3]
    if in_channels == 1:
        return "depthwise"
    if pairs and layout().has_tiles and out_channels // groups >= _TILE_ROWS:
        return "tiles"
    if groups > 1:
        return "pixels"
    if window.kernel == (3, 3) and window.stride == window.dilation == (1, 1) and min(in_channels, out_channels) >= 16:
        # On small maps larger tiles would mostly hold padding, and their transformed weights, of up to eight times the
        # bytes of bfloat16 pairs, come from memory.
        if pairs:
            return "winograd4" if pixels > 200 else "channels"
        return "winograd4" if pixels > 64 else "winograd2"
    # Long vectors leave more lanes idle at the end of a map.
    is_large = pixels >= (784 if layout().lanes == 16 else 196) or _column_bytes(weight, out) > _MOST_COLUMNS
    return "pixels" if is_large else "channels"


def _column_bytes(weight: np.ndarray, out: np.ndarray) -> int:
    """What "channels" gathers of one batch item, at most."""
    return 4 * numel(out.shape[2:]) * numel(weight.shape[1:])


def alternatives(
    x: np.ndarray,
    weight: np.ndarray,
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    groups: int,
    out: np.ndarray,
) -> list[str]:
    """The other values of `conv2d`'s `algorithm` for these operands, besides the one that it chooses itself."""
    window = _Window((weight.shape[2], weight.shape[3]), stride, padding, dilation).simplified(out)
    pairs = _multiplies_pairs(x, weight)
    chosen = _choose(weight, window, groups, out, pairs)
    if chosen == "depthwise":  # a matrix product with one input channel wastes most of a tile
        return []
    channels = ["channels"] if _column_bytes(weight, out) <= _MOST_COLUMNS else []
    valid = ["pixels", *channels, *(["tiles"] if pairs and layout().has_tiles else [])]
    if groups == 1 and window.kernel == (3, 3) and window.stride == window.dilation == (1, 1):
        valid += ["winograd2", "winograd4"]
    return [name for name in valid if name != chosen]


def _all_handled(x: np.ndarray, residual: np.ndarray | None, out: np.ndarray) -> bool:
    arrays = [x, out] if residual is None else [x, out, residual]
    return available() and all(map(_is_handled, arrays))


def _is_bounded(window: _Window, x: np.ndarray, out: np.ndarray) -> bool:
    """Whether a padded map, of which kernels make copies, is about as large as the maps that are there."""
    return window.padded_size(out) <= _SMALL_MAP + 4 * (numel(x.shape[2:]) + numel(out.shape[2:]))


def _is_handled(array: np.ndarray) -> bool:
    """Whether the kernels read this dtype and layout: NCHW with dense planes that follow each other."""
    if array.ndim != 4 or array.dtype not in DTYPES or array.size == 0:
        return False
    dense = (array.shape[2] * array.shape[3], array.shape[3], 1)
    steps = zip(array.shape[1:], strides_of(array)[1:], dense, strict=True)
    return all(size == 1 or step == expected for size, step, expected in steps)


def _multiplies_pairs(x: np.ndarray, weight: np.ndarray) -> bool:
    """Whether the convolution multiplies pairs of bfloat16 at once."""
    return x.dtype == weight.dtype == BFLOAT16 and layout().has_pairs


def _pair_depth(weight: np.ndarray) -> np.ndarray:
    """A bfloat16 weight[Co, ...] as [Co, pairs of successive values], a zero after an odd last one."""
    flat = _rows(weight)
    return np.pad(flat.view(np.int16), ((0, 0), (0, flat.shape[1] % 2))).view(np.int32)


def _rows(weight: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(weight.reshape(len(weight), -1))


def _row_blocks(rows: int) -> list[slice]:
    """The split of rows into blocks (RowBlocks in gemm.h)."""
    count = -(-rows // layout().max_rows)
    least, larger = divmod(rows, count)
    begins = [block * least + min(block, larger) for block in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(begins)]


def _pack_pixel_lanes(weight: np.ndarray) -> np.ndarray:
    """Blocks of output channels, each with the channels innermost."""
    flat = _rows(weight)
    return np.concatenate([flat[block].T.reshape(-1) for block in _row_blocks(len(flat))])


def _pack_channel_lanes(weight: np.ndarray) -> np.ndarray:
    """Panels of output channels, each with the channels innermost; zeros fill the last panel."""
    flat, panel = _rows(weight), layout().panel
    flat = np.pad(flat, ((0, -len(flat) % panel), (0, 0)))
    return flat.reshape(-1, panel, flat.shape[1]).transpose(0, 2, 1).reshape(-1)


def _pack_tiles(weight: np.ndarray) -> np.ndarray:
    """Rows of pairs, one for each output channel, with zeros after the last row and pair up to whole tiles."""
    flat = _rows(weight)
    return np.pad(flat, ((0, -len(flat) % _TILE_ROWS), (0, -flat.shape[1] % _TILE_PAIRS))).reshape(-1)


def _pack_winograd(weight: np.ndarray, tile: int) -> np.ndarray:
    """Blocks of output channels, each with the transformed points one after the other and the channels innermost."""
    transform = np.array(_WINOGRAD_WEIGHTS[tile])
    taps = weight.reshape(*weight.shape[:2], -1).transpose(2, 1, 0).reshape(weight[0, 0].size, -1)
    points = (np.kron(transform, transform) @ taps).astype(np.float32).reshape(-1, *weight.shape[1::-1])
    return np.concatenate([points[..., block].reshape(-1) for block in _row_blocks(points.shape[-1])])


_PACKERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "pixels": _pack_pixel_lanes,
    "channels": _pack_channel_lanes,
    "tiles": _pack_tiles,
    "winograd2": lambda weight: _pack_winograd(weight, 2),
    "winograd4": lambda weight: _pack_winograd(weight, 4),
    "depthwise": np.ravel,
}
