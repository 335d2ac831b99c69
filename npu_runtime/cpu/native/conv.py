"""Native 2-d convolution and pooling: packs weights, checks operands, and prepares launches of the C++ kernels.

The functions return None for what the kernels do not handle, and the caller then falls back to torch: other dtypes than
float32, bfloat16 and float16, planes that are not dense, or a machine without the compiled library. Bias and weight are
read when a launch is prepared; the other operands whenever it runs. `out` may be the residual, but not x.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runtime.cpu.native.bindings import DTYPES, NativeLaunch, available, layout

ACTIVATIONS = ("none", "relu", "relu6", "hardswish", "silu", "gelu", "hardsigmoid", "sigmoid")

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


class _ConvArgs(ctypes.Structure):
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

    @property
    def is_pointwise(self) -> bool:
        return self.kernel == (1, 1) and self.stride == (1, 1) and not any(self.padding)

    @property
    def is_valid(self) -> bool:
        return min(self.stride + self.dilation + self.kernel) > 0 and min(self.padding) >= 0

    def simplified(self, out: Tensor) -> _Window:
        """The same window with strides of 1 along axes where it has one position only."""
        rows, columns = (step if size > 1 else 1 for step, size in zip(self.stride, out.shape[2:], strict=True))
        return self._replace(stride=(rows, columns))

    def padded_size(self, out: Tensor) -> int:
        """The elements of a map that the window's positions span, padding included."""
        axes = zip(out.shape[2:], self.stride, self.kernel, self.dilation, strict=True)
        height, width = ((count - 1) * step + (size - 1) * apart + 1 for count, step, size, apart in axes)
        return height * width

    def fields(self) -> dict[str, int]:
        """The window's part of the argument block."""
        pairs = {"kernel": self.kernel, "stride": self.stride, "dilation": self.dilation}
        sizes = {f"{name}_{axis}": size for name, pair in pairs.items() for axis, size in zip("hw", pair, strict=True)}
        return sizes | {"pad_top": self.padding[0], "pad_left": self.padding[2]}


@dataclass
class PackedConv:
    """A constant weight, and the layouts of it that kernels have asked for so far."""

    weight: Tensor
    groups: int = 1
    _layouts: dict[tuple[str, bool], Tensor] = field(default_factory=dict, repr=False)

    def layout(self, algorithm: str, pairs: bool = False) -> Tensor:
        """The weight as `algorithm` reads it, one row per group: float32, or pairs of bfloat16 seen as int32."""
        if (algorithm, pairs) not in self._layouts:
            weight = self.weight.detach()
            elements = _pair_depth(weight) if pairs else weight.float()
            groups = elements.reshape(self.groups, -1, *elements.shape[1:])
            self._layouts[algorithm, pairs] = torch.stack([_PACKERS[algorithm](group) for group in groups])
        return self._layouts[algorithm, pairs]


def pack_conv_weight(weight: Tensor, groups: int = 1) -> PackedConv:
    """Prepares weight[Co, Ci / groups, Kh, Kw], which must not change afterwards, for any number of convolutions."""
    if weight.dim() != 4 or weight.shape[0] % groups:
        raise ValueError(f"no convolution weight of {groups} groups: {tuple(weight.shape)}")
    return PackedConv(weight, groups)


def conv2d(
    x: Tensor,
    packed: PackedConv,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    groups: int,
    out: Tensor,
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
    if tuple(out.shape) != expected or (residual is not None and residual.shape != out.shape):
        raise ValueError(f"the output is {expected}, not {tuple(out.shape)} or the residual's shape")
    if groups != packed.groups or x.shape[1] != weight.shape[1] * groups:
        raise ValueError(f"weight {tuple(weight.shape)} of {packed.groups} groups does not fit x {tuple(x.shape)}")
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
    bias = torch.zeros(weight.shape[0]) if bias is None else bias.detach().to(torch.float32, copy=True)
    args = _args(x, packed_weight, bias, residual, out, window)
    args.activation = ACTIVATIONS.index(activation)
    args.residual_before_activation = residual_before_activation
    args.groups, args.in_channels, args.out_channels = groups, weight.shape[1], weight.shape[0] // groups
    name, args.variant = _KERNELS[algorithm]
    args.weight_group_stride, args.pairs = packed_weight.stride(0), pairs
    if window.is_pointwise:  # rows may then run together
        args.in_h, args.in_w = args.out_h, args.out_w = 1, args.in_h * args.in_w
    return NativeLaunch(name, args, (x, packed_weight, bias, residual, out))


def max_pool2d(
    x: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    out: Tensor,
) -> NativeLaunch | None:
    """Prepares a maximum pooling; out's size decides about windows that leave the padded input (ceil_mode)."""
    return _pool("max_pool2d", x, _Window(kernel, stride, padding, dilation), None, out)


def avg_pool2d(
    x: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    out: Tensor,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> NativeLaunch | None:
    """Prepares an average pooling; out's size decides about windows that leave the padded input (ceil_mode)."""
    if not available():
        return None
    window = _Window(kernel, stride, padding)
    if divisor_override is not None:
        divisor = torch.full(out.shape[2:], float(divisor_override))
    else:
        rows, columns = (
            _window_lengths(
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
    scale = F.pad(1 / divisor.flatten(), (0, layout().lanes))
    return _pool("avg_pool2d", x, window, scale, out)


def global_avg_pool2d(x: Tensor, out: Tensor) -> NativeLaunch | None:
    """Prepares the average of each map into out[N, C, 1, 1]."""
    height, width = x.shape[2:]
    return avg_pool2d(x, (height, width), (1, 1), (0, 0, 0, 0), out)


def _window_lengths(
    size: int, count: int, kernel: int, stride: int, before: int, after: int, count_padding: bool
) -> Tensor:
    """How many elements each of `count` windows averages along one axis."""
    start = torch.arange(count) * stride - before
    end = torch.minimum(start + kernel, torch.tensor(size + after))
    if not count_padding:
        start, end = start.clamp(min=0), end.clamp(max=size)
    return (end - start).float()


def _pool(name: str, x: Tensor, window: _Window, scale: Tensor | None, out: Tensor) -> NativeLaunch | None:
    if not window.is_valid or not _all_handled(x, None, out):
        return None
    window = window.simplified(out)
    is_whole = scale is not None and window.kernel == x.shape[2:] and not any(window.padding)
    has_many_taps = window.kernel[0] * window.kernel[1] > _MOST_TAPS
    if has_many_taps and not (is_whole and out.shape[2:].numel() == 1) or not _is_bounded(window, x, out):
        return None
    if x.shape[:2] != out.shape[:2]:
        raise ValueError(f"pooling keeps batch and channels: {tuple(x.shape)}, {tuple(out.shape)}")
    no_bias = torch.zeros(x.shape[1])
    args = _args(x, scale, no_bias, None, out, window)
    args.groups, args.in_channels, args.out_channels = x.shape[1], 1, 1
    return NativeLaunch(name, args, (x, scale, no_bias, out))


def _args(
    x: Tensor, weight: Tensor | None, bias: Tensor, residual: Tensor | None, out: Tensor, window: _Window
) -> _ConvArgs:
    """The argument block without what only some kernels have."""
    args = _ConvArgs(
        x=x.data_ptr(),
        bias=bias.data_ptr(),
        out=out.data_ptr(),
        x_type=DTYPES[x.dtype],
        out_type=DTYPES[out.dtype],
        x_batch_stride=x.stride(0),
        out_batch_stride=out.stride(0),
        batch=x.shape[0],
        in_h=x.shape[2],
        in_w=x.shape[3],
        out_h=out.shape[2],
        out_w=out.shape[3],
        **window.fields(),
    )
    if weight is not None:
        args.weight = weight.data_ptr()
    if residual is not None:
        args.residual, args.residual_type = residual.data_ptr(), DTYPES[residual.dtype]
        args.residual_batch_stride = residual.stride(0)
    return args


def _choose(weight: Tensor, window: _Window, groups: int, out: Tensor, pairs: bool) -> str:
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


def _column_bytes(weight: Tensor, out: Tensor) -> int:
    """What "channels" gathers of one batch item, at most."""
    return 4 * out.shape[2:].numel() * weight[0].numel()


def alternatives(
    x: Tensor,
    weight: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    groups: int,
    out: Tensor,
) -> list[str]:
    """The other values of `conv2d`'s `algorithm` for these operands, besides the one that it chooses itself."""
    window = _Window((weight.shape[2], weight.shape[3]), stride, padding, dilation)
    pairs = _multiplies_pairs(x, weight)
    chosen = _choose(weight, window, groups, out, pairs)
    if chosen == "depthwise":  # a matrix product with one input channel wastes most of a tile
        return []
    channels = ["channels"] if _column_bytes(weight, out) <= _MOST_COLUMNS else []
    valid = ["pixels", *channels, *(["tiles"] if pairs and layout().has_tiles else [])]
    if groups == 1 and window.kernel == (3, 3) and window.stride == window.dilation == (1, 1):
        valid += ["winograd2", "winograd4"]
    return [name for name in valid if name != chosen]


def _all_handled(x: Tensor, residual: Tensor | None, out: Tensor) -> bool:
    tensors = [x, out] if residual is None else [x, out, residual]
    return available() and all(map(_is_handled, tensors))


def _is_bounded(window: _Window, x: Tensor, out: Tensor) -> bool:
    """Whether a padded map, of which kernels make copies, is about as large as the maps that are there."""
    return window.padded_size(out) <= _SMALL_MAP + 4 * (x.shape[2:].numel() + out.shape[2:].numel())


def _is_handled(tensor: Tensor) -> bool:
    """Whether the kernels read this dtype and layout: NCHW with dense planes that follow each other."""
    if tensor.dim() != 4 or tensor.dtype not in DTYPES or tensor.device.type != "cpu" or tensor.numel() == 0:
        return False
    dense = (tensor.shape[2] * tensor.shape[3], tensor.shape[3], 1)
    steps = zip(tensor.shape[1:], tensor.stride()[1:], dense, strict=True)
    return all(size == 1 or step == expected for size, step, expected in steps)


def _multiplies_pairs(x: Tensor, weight: Tensor) -> bool:
    """Whether the convolution multiplies pairs of bfloat16 at once."""
    return x.dtype == weight.dtype == torch.bfloat16 and layout().has_pairs


def _pair_depth(weight: Tensor) -> Tensor:
    """A bfloat16 weight[Co, ...] as [Co, pairs of successive values], a zero after an odd last one."""
    flat = weight.flatten(1)
    return F.pad(flat, (0, flat.shape[1] % 2)).contiguous().view(torch.int32)


def _row_blocks(rows: int) -> list[slice]:
    """The split of rows into blocks (RowBlocks in gemm.h)."""
    count = -(-rows // layout().max_rows)
    least, larger = divmod(rows, count)
    begins = [block * least + min(block, larger) for block in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(begins)]


def _pack_pixel_lanes(weight: Tensor) -> Tensor:
    """Blocks of output channels, each with the channels innermost."""
    flat = weight.flatten(1)
    return torch.cat([flat[block].t().flatten() for block in _row_blocks(len(flat))])


def _pack_channel_lanes(weight: Tensor) -> Tensor:
    """Panels of output channels, each with the channels innermost; zeros fill the last panel."""
    flat, panel = weight.flatten(1), layout().panel
    flat = F.pad(flat, (0, 0, 0, -len(flat) % panel))
    return flat.reshape(-1, panel, flat.shape[1]).transpose(1, 2).flatten()


def _pack_tiles(weight: Tensor) -> Tensor:
    """Rows of pairs, one for each output channel, with zeros after the last row and pair up to whole tiles."""
    flat = weight.flatten(1)
    return F.pad(flat, (0, -flat.shape[1] % _TILE_PAIRS, 0, -len(flat) % _TILE_ROWS)).flatten()


def _pack_winograd(weight: Tensor, tile: int) -> Tensor:
    """Blocks of output channels, each with the transformed points one after the other and the channels innermost."""
    transform = torch.tensor(_WINOGRAD_WEIGHTS[tile], dtype=torch.float64)
    points = torch.einsum("py,oiyx,qx->pqio", transform, weight.double(), transform).float().flatten(0, 1)
    return torch.cat([points[..., block].flatten() for block in _row_blocks(points.shape[-1])])


_PACKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "pixels": _pack_pixel_lanes,
    "channels": _pack_channel_lanes,
    "tiles": _pack_tiles,
    "winograd2": lambda weight: _pack_winograd(weight, 2),
    "winograd4": lambda weight: _pack_winograd(weight, 4),
    "depthwise": torch.flatten,
}
