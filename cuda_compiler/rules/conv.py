"""Rules of convolutions.

A convolution over channels-last operands becomes a `ConvolutionLaunch`: the most promising kernel, the convolution's
definition, and alternative kernels. The runtime picks the fastest on its GPU among these and cuDNN, which may be
missing. That choice needs the GPU, so it is not made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from cuda_compiler.cuda_program import Convolution, ConvolutionLaunch, GemmLaunch, KernelForm, gemm_of, kernel_launch_of
from cuda_compiler.rules.channel_packs import BYTE_PACKS, PACK, channels_last, is_packed
from cuda_compiler.rules.epilogues import EPILOGUE, kernel_options
from cuda_compiler.rules.linear_halves import linear_halves
from cuda_compiler.rules.matmul import cublas_activates, gemm
from cuda_compiler.rules.movement import transposing_copy
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, REGISTERS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View

# A parameter that `channels_last` adds: no call of a run writes the weight, so a kernel may prefetch it.
CONSTANT_WEIGHT = "constant_weight"
# A parameter that `absorb_epilogues` adds: the residual is added behind the activation.
RESIDUAL_LAST = "residual_last"
_FOLDING = ("fold", "top", "left", "fill")  # parameters of copies to channels-last
_ONLY_OURS = ("spread", RESIDUAL_LAST, EPILOGUE)  # parameters of what libraries do not compute

_BLOCK = 256
_PRODUCT_BLOCK = 64  # channels and pixels per block of the general kernel
_FULL = MULTIPROCESSORS * 512  # threads that keep a large GPU busy
# Depthwise convolutions: channels of a thread, rows and columns of its tile.
_DEPTHWISE_FORMS = ((4, 2, 4), (4, 1, 4), (2, 1, 4), (2, 1, 2), (2, 1, 1))
_DEPTHWISE_WIDE_FORMS = ((2, 2, 7), (2, 2, 4), (2, 1, 4), (2, 1, 2), (2, 1, 1))
_FEW_TAPS, _SHORT_TAPS = 25, 9
DEPTHWISE = "conv_depthwise"
# Convolutions by windows: most channels of a group, or output channels of a block; without groups, most input channels,
# and blocks that share the output channels; input channels and pixels of a block's window, its threads, and their
# registers.
_NARROW, _FEW_INPUTS, _MOST_SHARES, _WINDOW_FORMS = 64, 128, 4, ((64, 112), (32, 112), (64, 224), (128, 64))
_WINDOW_THREADS, _WINDOW_REGISTERS = 128, 128
_CLUSTER = 8  # blocks that share an image
_EXCITE_BLOCK = 512  # threads of each; two blocks fit on a multiprocessor, so that sixteen images are processed at once
_FORMS, _WARPGROUP_FORMS = 5, 3  # tile shapes that the runtime shall try
_FORMS_BESIDE_PRODUCT = _WARPGROUP_FORMS + 1  # kernels that it shall, beside cuBLASLt; the last one may go by rows
ROW_BYTES = 128  # of a row of terms in a step of a tile


def _conv(make: Specializer, call: KernelCall) -> list[KernelCall]:
    product = _product(call)
    forms = list(_forms(make, call))[: None if product is None else _FORMS_BESIDE_PRODUCT]
    x, weight, _, _, out = KERNELS[call.kernel].bind(call)
    assert x is not None and weight is not None and out is not None
    # Layouts that cuDNN knows; our kernels have others too.
    packed = weight.is_contiguous or channels_last(weight).is_contiguous
    is_known = x.dtype == weight.dtype and packed and is_packed(x, 1) and is_packed(out, 1)
    if not is_known and (forms[0].kernel != DEPTHWISE or len(forms) == 1):
        return forms[:1]
    return [tuned(forms, call, is_known, product)]


def tuned(
    forms: Sequence[KernelCall], call: KernelCall, is_known: bool = True, product: GemmLaunch | None = None
) -> KernelCall:
    """One call for a convolution that several kernels can compute; the runtime picks the fastest.

    Args:
        is_known: Whether cuDNN knows the layouts of the operands.
        product: The convolution as a product of cuBLASLt.
    """
    first, *others = forms
    launch = ConvolutionLaunch(
        kernel_launch_of(first),
        Convolution(
            stride=tuple(call.params["stride"]),
            padding=tuple(call.params["padding"]),
            dilation=tuple(call.params["dilation"]),
            groups=call.params["groups"],
            activation=call.params["activation"],
            has_bias=call.params["has_bias"],
            has_residual=call.params["has_residual"],
            only_ours=not is_known or not call.params.keys().isdisjoint(_ONLY_OURS),
        ),
        tuple(KernelForm(form.kernel, form.source, kernel_launch_of(form)) for form in others),
        product,
    )
    return replace(first, params=launch.params())


def _product(call: KernelCall) -> GemmLaunch | None:
    """A convolution of single pixels as a product of cuBLASLt; None if it is none, or cuBLASLt lacks its epilogue."""
    rows = _rows(call)
    if rows is None or not call.params.keys().isdisjoint(_ONLY_OURS):
        return None
    activation = call.params["activation"]
    if activation != "none" and (rows.residual is not None or not cublas_activates(activation, rows.out.dtype)):
        return None
    found = gemm(
        call,
        rows.x,
        rows.weight.transpose(0, 1),
        rows.out,
        bias=rows.bias,
        residual=rows.residual,
        activation=activation,
    )
    return None if found is None or found.outputs[0] != rows.out else gemm_of(found)


def _by_rows(make: Specializer, call: KernelCall) -> KernelCall | None:
    """The call of the kernel for products of many rows; None if a convolution is none."""
    rows = _rows(call)
    if rows is None or "spread" in call.params or EPILOGUE in call.params:
        return None
    last = RESIDUAL_LAST in call.params
    return linear_halves(make, call, rows.x, rows.weight, rows.bias, rows.residual, rows.out, last)


@dataclass(frozen=True)
class _Rows:
    """The operands of a convolution of single pixels as those of a product: x · weightᵀ."""

    x: View
    weight: View
    bias: View | None
    residual: View | None
    out: View


def _rows(call: KernelCall) -> _Rows | None:
    """A convolution of single pixels as a product; None if it is none, or its pixels are not at equal distances."""
    x, weight, bias, residual, out = KERNELS[call.kernel].bind(call)
    assert x is not None and weight is not None and out is not None
    plain = weight.shape[2:] == (1, 1) and list(call.params["stride"]) == [1, 1] and not any(call.params["padding"])
    if not plain or call.params["groups"] > 1:
        return None
    pixels, results, added = (None if view is None else _rows_of_pixels(view) for view in (x, out, residual))
    if pixels is None or results is None or (residual is not None and added is None):
        return None
    factors = replace(weight, shape=weight.shape[:2], strides=weight.strides[:2])
    return _Rows(pixels, factors, bias, added, results)


def _rows_of_pixels(view: View) -> View | None:
    """An image [N, C, H, W] as a matrix [N * H * W, C]; None if its pixels are not at equal distances."""
    return channels_last(view).reshape((view.numel // max(view.shape[1], 1), view.shape[1]))


def _forms(make: Specializer, call: KernelCall) -> Iterator[KernelCall]:
    """The calls of kernels that can compute a convolution, the most promising one first."""
    x, weight, bias, residual, out = KERNELS[call.kernel].bind(call)
    assert x is not None and weight is not None and out is not None
    images, channels, rows, columns = out.shape
    aligned = all(is_packed(view) for view in (out, residual) if view is not None)
    aligned = aligned and (bias is None or vector_width(bias) >= PACK)
    in_groups = call.params["groups"]
    if "spread" in call.params:
        assert is_packed(x), f"the input of '{call.node}' is not packed"
        yield from _tiled(make, call, aligned)
        return
    if in_groups == channels == x.shape[1] and (width := _depthwise_width(x, weight, bias, residual, out)):
        yield from _depthwise_forms(make, call, width)
        return
    halves = x.dtype == weight.dtype in HALF_DTYPES and is_packed(x) and channels_last(weight).is_contiguous
    windows, tiled = (_by_windows(make, call), _tiled(make, call, aligned)) if halves else ((), ())
    by_tensor_cores = [*tiled, *windows] if in_groups == 1 else [*windows, *tiled]
    if (by_rows := _by_rows(make, call)) is not None:  # such large products take warps much longer than warpgroups
        by_tensor_cores = [*(form for form in by_tensor_cores if form.kernel != "conv_tiled"), by_rows]
    if by_tensor_cores:
        yield from by_tensor_cores
    elif call.params["direct"]:
        block = min(_BLOCK, WARP * groups(rows * columns, WARP))
        grid = (groups(rows * columns, block), channels, images)
        direct = "direct_conv2d_kernel"
        yield make.kernel(call, "conv/conv.cu", function=direct, grid=grid, block=(block, 1, 1), **kernel_options(call))
    else:
        grid = (
            groups(rows * columns, _PRODUCT_BLOCK),
            in_groups * groups(channels // in_groups, _PRODUCT_BLOCK),
            images,
        )
        yield make.kernel(call, "conv/conv.cu", grid=grid, block=(_BLOCK, 1, 1), **kernel_options(call))


def _tiled(make: Specializer, call: KernelCall, aligned: bool) -> Iterator[KernelCall]:
    """The calls that compute each group as a tiled matrix product; none unless its input channels are whole packs.

    Args:
        aligned: Whether bias, residual and output channels can be accessed as packs.
    """
    weight, parts = call.inputs[1], call.params["groups"]
    if not is_packed(weight):
        return
    windows, channels = _windows(call), weight.shape[0]
    row_bytes = itemsize(weight.dtype) * weight.numel // channels
    constants = {
        "aligned": aligned and call.outputs[0].shape[1] // parts % PACK == 0,
        CONSTANT_WEIGHT: bool(call.params.get(CONSTANT_WEIGHT)),
    }
    count = call.outputs[0].shape[0] * windows.rows * windows.columns
    for tile in tiles(make, count, channels, row_bytes, lambda tile: tile.shared_bytes, parts):
        yield tile.kernel(make, call, "conv/tiled.cu", ("conv_tiled", "conv_wgmma"), tile.shared_bytes, constants)


def _by_windows(make: Specializer, call: KernelCall) -> Iterator[KernelCall]:
    """The calls of kernels for few channels, or groups of few, whose blocks keep a window of the image.

    There are none for other convolutions.
    """
    shares, joined = _window_shares(call)
    if not shares:
        return
    images, channels, rows, columns = call.outputs[0].shape
    weight, parts = call.inputs[1], call.params["groups"]
    tried = set()
    for width, pixels in _WINDOW_FORMS:
        packed = _packed_groups(width, parts, weight.shape[1])
        across = groups(columns, groups(columns, 16))
        down = groups(rows, groups(rows, max(pixels // across, 1)))
        threads = _WINDOW_THREADS * (1 if packed * groups(down * across, 32) <= 4 or parts > 1 else 2)
        window = _window_bytes(call, packed, down, across)
        factors = packed * (channels // parts // shares) * _factor_bytes(weight)
        most = REGISTERS // (_WINDOW_REGISTERS * threads)
        # Copies go on beside products with a second window, or with a second block.
        resident = {n: min(most, make.gpu.shared_memory // (n * window + factors)) for n in (2, 1)}
        windows = 2 if resident[2] > 1 or resident[1] == resident[2] else 1
        if not packed or not resident[1] or (packed, down) in tried:
            continue
        tried.add((packed, down))
        count, blocks = images * groups(rows, down) * groups(columns, across), shares * parts // packed
        each = groups(count * blocks, resident[windows] * MULTIPROCESSORS)
        yield make.kernel(
            call,
            "conv/window.cu",
            function="conv_window",
            grid=(groups(count, each), blocks, 1),
            block=(threads, 1, 1),
            shared=windows * window + factors,
            constants={
                "packed": packed,
                "shares": shares,
                "down": down,
                "across": across,
                "windows": windows,
                "joined": joined,
                CONSTANT_WEIGHT: bool(call.params.get(CONSTANT_WEIGHT)),
            },
            min_blocks=resident[windows],
            **kernel_options(call),
        )


def _window_shares(call: KernelCall) -> tuple[int, int]:
    """The division of the output channels of a convolution by windows; zeros if it cannot be one.

    Returns:
        shares: Number of blocks that share those of a group.
        joined: Number of fragments whose columns are side by side in a lane, which stores them at once.
    """
    _, weight, bias, residual, out = KERNELS[call.kernel].bind(call)
    assert weight is not None and out is not None
    parts, inner, taps = call.params["groups"], weight.shape[1], weight.shape[2] * weight.shape[3]
    outer = out.shape[1] // parts
    is_narrow = max(inner, outer) <= _NARROW if parts > 1 else inner <= _FEW_INPUTS and taps > 1
    shares = next((n for n in range(1, _MOST_SHARES + 1) if outer % (2 * n) == 0 and outer // n <= _NARROW), 0)
    if not (is_narrow and shares and inner % 2 == 0):
        return 0, 0

    def fits(pack: int) -> bool:
        aligned = all(is_packed(view, pack) for view in (out, residual) if view is not None)
        return aligned and (bias is None or vector_width(bias) >= pack)

    wide = (count for count in (4, 2) if outer // shares % (8 * count) == 0 and fits(2 * count))
    return (shares, next(wide, 1)) if fits(2) else (0, 0)


def _window_bytes(call: KernelCall, packed: int, down: int, across: int) -> int:
    """Bytes of shared memory of a window of `packed` groups' channels, for `down` × `across` output pixels."""
    weight = call.inputs[1]
    (stride, step), (reach, span) = call.params["stride"], call.params["dilation"]
    height = (down - 1) * stride + (weight.shape[2] - 1) * reach + 1
    width = (across - 1) * step + (weight.shape[3] - 1) * span + 1
    return int(height * width) * 16 * (packed * weight.shape[1] // PACK | 1)


def _factor_bytes(weight: View) -> int:
    """Bytes of shared memory of an output channel's factors."""
    return 32 * groups(weight.numel // weight.shape[0], 16) + 16


def _depthwise_width(x: View, weight: View, bias: View | None, residual: View | None, out: View) -> int:
    """Channels that a thread of a depthwise convolution can access as a vector; 0 if channels are not contiguous."""
    images = [view for view in (x, weight.transpose(0, 1), residual, out) if view is not None]
    fits = (4, 2, 1) if bias is None or bias.strides == (1,) else ()
    return next(
        (w for w in fits if all(is_packed(each, w) for each in images) and (bias is None or vector_width(bias) >= w)), 0
    )


def _depthwise_forms(make: Specializer, call: KernelCall, width: int) -> Iterator[KernelCall]:
    """The calls of kernels for a depthwise convolution: one whose code has all rows of a tile, one after the other.

    For large windows, whose code would be fetched longer than it runs, there are some that loop over the rows too.
    """
    tile = pack, down, across = _depthwise_tile(call, width)
    yield depthwise(make, call, DEPTHWISE, tile)
    _, _, height, length = call.inputs[1].shape
    if height * length <= _SHORT_TAPS:
        return
    looping = replace(call, params={**call.params, "loops": 1})
    for rows in dict.fromkeys((down, min(2 * down, call.outputs[0].shape[2]), max(down // 2, 1))):
        yield depthwise(make, looping, DEPTHWISE, (pack, rows, across))


def merged_groups(parts: int, inner: int, outer: int) -> int:
    """Number of groups of a convolution that should become one, so that tensor cores take them: 1 if they do already.

    A joined group has the weights of its groups on its diagonal, and zeros elsewhere.

    Args:
        parts: Number of groups.
        inner, outer: Input and output channels of a group.
    """
    depthwise = inner == outer == 1
    narrow = max(inner, outer) <= _NARROW and inner % 2 == outer % 2 == 0
    if parts == 1 or depthwise or inner % PACK == 0:
        return 1
    if narrow and any(_packed_groups(width, parts, inner) for width, _ in _WINDOW_FORMS):
        return 1
    return next((count for count in range(2, parts) if parts % count == 0 and count * inner % PACK == 0), parts)


def _packed_groups(width: int, parts: int, inner: int) -> int:
    """The largest number of groups of a `conv_window` block that divides all groups into whole packs; 0 for none.

    Args:
        width: Input channels of a block, which more than one group may not exceed.
    """
    counts = range(max(width // inner, 1), 0, -1)
    return next((count for count in counts if parts % count == 0 and count * inner % PACK == 0), 0)


def _depthwise_tile(call: KernelCall, width: int = PACK) -> tuple[int, int, int]:
    """Channels, rows and columns of the tile of a depthwise convolution that a thread computes.

    They are the larger the more there is to compute. Large windows take smaller packs of channels, since a thread has
    all products of a tile's row in registers.

    Args:
        width: Most channels that a thread may access as a vector.
    """
    images, channels, rows, columns = call.outputs[0].shape
    taps = call.inputs[1].shape[2] * call.inputs[1].shape[3]
    forms = [
        (min(pack, width), *tile) for pack, *tile in (_DEPTHWISE_FORMS if taps <= _FEW_TAPS else _DEPTHWISE_WIDE_FORMS)
    ]
    pack, down, across = next(
        (
            form
            for form in forms
            if images * groups(channels, form[0]) * groups(rows, form[1]) * groups(columns, form[2]) >= _FULL
        ),
        forms[-1],
    )
    return pack, down, groups(columns, groups(columns, across))  # as few as divide the columns alike


def depthwise(
    make: Specializer, call: KernelCall, function: str, tile: tuple[int, int, int] | None = None
) -> KernelCall:
    """The call of a depthwise convolution, whose threads compute a pack of channels of a tile of pixels.

    Args:
        function: Name of the kernel in its template.
        tile: Channels, rows and columns of a thread's tile; None chooses them for the widest access.
    """
    images, channels, rows, columns = call.outputs[0].shape
    pack, down, across = tile or _depthwise_tile(call)
    packs = next((packs for packs in (4, 8) if packs * pack >= channels), 16)
    tiles = images * groups(rows, down) * groups(columns, across)
    threads = 128
    return make.kernel(
        call,
        "conv/depthwise.cu",
        function=function,
        grid=(groups(tiles, threads // packs), groups(channels, pack * packs), 1),
        block=(threads, 1, 1),
        constants={
            "pack": pack,
            "packs": packs,
            "down": down,
            "across": across,
            "aligned": True,
            "constant_weight": bool(call.params.get(CONSTANT_WEIGHT)),
        },
        **kernel_options(call),
    )


@dataclass(frozen=True)
class _Windows:
    """The windows of an image, and the output pixels that each of them makes.

    Attributes:
        rows, columns: Number of windows.
        down, right: Rows and columns of the pixels that a window makes: one, except in transposed convolutions.
        top, left: Rows and columns of pixels before those of the output.
    """

    rows: int
    columns: int
    down: int = 1
    right: int = 1
    top: int = 0
    left: int = 0

    @property
    def constants(self) -> dict[str, int]:
        """The constants of `tiles.cuh`."""
        return {
            "window_rows": self.rows,
            "window_columns": self.columns,
            "spread_down": self.down,
            "spread_right": self.right,
            "crop_top": self.top,
            "crop_left": self.left,
        }


def _windows(call: KernelCall) -> _Windows:
    """The windows of a convolution; `passes/transposed_convolutions.py` says which parameters transposed ones have."""
    if "spread" not in call.params:
        return _Windows(*call.outputs[0].shape[2:])
    return _Windows(*call.params["windows"], *call.params["spread"], *call.params["crop"])


@dataclass(frozen=True)
class Tile:
    """The tiling of a convolution as an implicit matrix product.

    Attributes:
        m, n: Windows and output channels of a tile, which a block computes with `warps_m` × `warps_n` warps.
        stages: Depth of the pipeline of asynchronous copies to shared memory.
        splits: Split-K factor: number of blocks that divide the summation of one tile.
        by_warpgroups: Whether groups of four warps multiply 64 rows together, which only Hopper can.
    """

    m: int
    n: int
    warps_m: int
    warps_n: int
    stages: int
    splits: int = 1
    by_warpgroups: bool = False

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory for the operands of one step of the summation."""
        return (self.m + self.n) * ROW_BYTES

    @property
    def sum_bytes(self) -> int:
        """Bytes of shared memory for a tile's sums, whose rows are padded."""
        return 4 * self.m * (self.n + 4)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a kernel whose sums reuse the memory of the steps."""
        return max(self.stages * self.stage_bytes, self.sum_bytes)

    def for_steps(self, steps: int) -> Tile:
        """The tile with no more stages than a summation of `steps` steps can use."""
        return replace(self, stages=min(self.stages, max(steps + 1, 2) + self.by_warpgroups))

    def blocks(self, windows: int, channels: int, parts: int = 1) -> int:
        """Number of tiles that cover all windows and channels; a tile's channels belong to one of `parts` groups."""
        return groups(windows, self.m) * groups(channels // parts, self.n) * parts

    def cost(self, windows: int, channels: int, steps: int, shared: int, parts: int = 1) -> float:
        """A rough estimate of clock cycles on a large GPU, to rank the candidates.

        Args:
            steps: Number of steps of a sum.
            shared: Bytes of shared memory of a block.
        """
        blocks = self.blocks(windows, channels, parts) * self.splits
        resident = max(1, min(200 * 1024 // shared, 2048 // (WARP * self.warps_m * self.warps_n)))
        together = min(resident, groups(blocks, MULTIPROCESSORS))
        copied = self.stage_bytes / 64
        multiplied = self.m * self.n * 64 / (1700 if self.by_warpgroups else 1150)
        step = max(150.0, together * copied, together * multiplied)
        waves = groups(blocks, MULTIPROCESSORS * together)
        return waves * (groups(steps, self.splits) * step + 1500 + (900 if self.splits > 1 else 0))

    def kernel(
        self,
        make: Specializer,
        call: KernelCall,
        file: str,
        functions: tuple[str, str],
        shared: int,
        constants: Mapping[str, bool | int],
        inputs: Mapping[str, View | None] | None = None,
    ) -> KernelCall:
        """A call of a template's kernel with this tiling.

        Args:
            functions: The kernel that multiplies by warps, and the one that does by warpgroups.
            shared: Bytes of shared memory.
            inputs: Operands by name; None means those of the kernel's declaration.
        """
        windows = _windows(call)
        channels = call.outputs[0].shape[1] * windows.down * windows.right
        count = call.outputs[0].shape[0] * windows.rows * windows.columns
        shape = {name: getattr(self, name) for name in ("warps_m", "warps_n", "stages", "splits")}
        shape |= windows.constants
        return make.kernel(
            call,
            file,
            function=functions[self.by_warpgroups],
            **{"inputs": inputs, **kernel_options(call)},
            grid=(self.blocks(count, channels, call.params["groups"]), 1, self.splits),
            block=(WARP * self.warps_m * self.warps_n, 1, 1),
            shared=shared,
            constants={"tile_m": self.m, "tile_n": self.n, **shape, **constants},
            min_blocks=2 if self.by_warpgroups and self.m * self.n <= 128 * 160 else 1,
            cluster=self.splits,
        )


_SHAPES = (
    Tile(128, 256, 8, 2, 4, by_warpgroups=True),
    Tile(128, 128, 8, 1, 3, by_warpgroups=True),
    Tile(128, 160, 8, 1, 3, by_warpgroups=True),
    Tile(128, 96, 8, 1, 4, by_warpgroups=True),
    Tile(128, 64, 8, 1, 4, by_warpgroups=True),
    Tile(64, 128, 4, 1, 4, by_warpgroups=True),
    Tile(64, 64, 4, 1, 4, by_warpgroups=True),
    Tile(128, 128, 4, 2, 3),
    Tile(128, 64, 4, 2, 4),
    Tile(64, 128, 2, 4, 4),
    Tile(64, 64, 2, 2, 4),
    Tile(64, 32, 2, 2, 4),
    Tile(32, 64, 2, 2, 4),
    Tile(32, 32, 2, 1, 6),
    Tile(64, 16, 4, 1, 4),
    Tile(16, 64, 1, 4, 4),
    Tile(16, 32, 1, 2, 6),
)


def tiles(
    make: Specializer,
    windows: int,
    channels: int,
    row_bytes: int,
    shared_bytes: Callable[[Tile], int],
    parts: int = 1,
) -> list[Tile]:
    """The most promising tiles for a product of [windows, terms] and [terms, channels], in groups, on the target GPU.

    Args:
        row_bytes: Bytes of all terms of a row.
        shared_bytes: Function of a tile: bytes of shared memory that a kernel with it takes.
        parts: Number of groups of channels.
    """
    steps = groups(row_bytes, ROW_BYTES)
    shared_out = [
        (replace(tile, splits=splits), shared)
        for tile in (tile.for_steps(steps) for tile in _SHAPES)
        if (shared := shared_bytes(tile)) <= make.gpu.shared_memory
        and (make.gpu.has_warpgroups or not tile.by_warpgroups)
        for splits in (1, 2, 4, 8)
        if splits == 1 or splits <= steps and tile.blocks(windows, channels, parts) < 2 * MULTIPROCESSORS
    ]
    by_cost = sorted(shared_out, key=lambda shares: shares[0].cost(windows, channels, steps, shares[1], parts))
    ranked = [tile for tile, _ in by_cost]
    by_warps = [tile for tile in ranked if not tile.by_warpgroups][:_FORMS]
    by_warpgroups = [tile for tile in ranked if tile.by_warpgroups][:_WARPGROUP_FORMS]
    return [tile for tile in ranked if tile in by_warps or tile in by_warpgroups]


def _to_channels_last(make: Specializer, call: KernelCall) -> list[KernelCall]:
    (x,), (out,) = call.inputs, call.outputs
    if call.params["fold"] == 1 and x.shape == out.shape:
        transposed = transposing_copy(make, call)
        if transposed is not None:
            return [transposed]
    return [packed_copy(make, call, call.kernel)]


def packed_copy(make: Specializer, call: KernelCall, function: str) -> KernelCall:
    """The call of a copy to channels-last, in which each thread moves a pack of channels.

    Args:
        call: The copy; its parameters say how many pixels become channels (`fold`, see `PackedOperands.fold`), and
            where the image lies in a padded one (`top`, `left`; `fill` is the value around it).
        function: Name of the kernel in `conv/conv.cu`.
    """
    (x,), (out,), fold = call.inputs, call.outputs, int(call.params["fold"])
    packs = BYTE_PACKS if itemsize(out.dtype) == 1 else (PACK,)
    pack = next(pack for pack in packs if is_packed(out, pack))
    widest = 16 // itemsize(x.dtype)
    if fold > 1:
        run = min(gcd(pack, fold), vector_width(x), widest)
        while int(call.params["left"]) % run or x.shape[3] % run:
            run //= 2
    else:
        run = gcd(min(pack, vector_width(x.permute((0, 2, 3, 1))), widest), x.shape[1])
    return make.kernel(
        call,
        "conv/conv.cu",
        function=function,
        inputs={"x": x},
        outputs={"out": out},
        grid=(groups(out.numel // pack, _BLOCK), 1, 1),
        block=(_BLOCK, 1, 1),
        constants={"pack": pack, "run": run, **{name: int(call.params[name]) for name in _FOLDING}},
    )


def _conv_transpose(make: Specializer, call: KernelCall) -> list[KernelCall]:
    x = call.inputs[0]
    depthwise = x.shape[1] == call.params["groups"] == call.outputs[0].shape[1]
    packs = (PACK, 4, 2) if depthwise and x.dtype in HALF_DTYPES else ()
    pack = next((pack for pack in packs if is_packed(x, pack) and is_packed(call.outputs[0], pack)), 1)
    grid = (groups(call.outputs[0].numel // pack, _BLOCK), 1, 1)
    return [make.kernel(call, "conv/conv.cu", grid=grid, block=(_BLOCK, 1, 1), constants={"pack": pack})]


def _squeeze_excite(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """The call of squeeze-and-excitation, with a cluster of blocks for each image."""
    x, squeeze, *others = call.inputs
    squeeze_bias = others.pop(0) if call.params["squeeze_bias"] else None
    excite, excite_bias = others.pop(0), others[0] if call.params["excite_bias"] else None
    lines = _EXCITE_BLOCK // (x.shape[1] // PACK)
    shared = 4 * ((lines + 2) * x.shape[1] + excite.shape[1])
    inputs = {"x": x, "squeeze": squeeze, "squeeze_bias": squeeze_bias, "excite": excite, "excite_bias": excite_bias}
    return [
        make.kernel(
            call,
            "conv/squeeze_excite.cu",
            outputs={"out": call.outputs[0]},
            grid=(x.shape[0], 1, _CLUSTER),
            block=(_EXCITE_BLOCK, 1, 1),
            shared=shared,
            constants={"blocks": _CLUSTER},
            min_blocks=2,
            cluster=_CLUSTER,
            **{"inputs": inputs, **kernel_options(call, inputs)},
        )
    ]


RULES: dict[str, Rule] = {
    "conv2d_kernel": _conv,
    "to_channels_last": _to_channels_last,
    "squeeze_excite": _squeeze_excite,
    "conv_transpose2d_kernel": _conv_transpose,
}
