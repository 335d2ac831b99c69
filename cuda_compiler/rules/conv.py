"""Rules of convolutions.

A convolution over channels-last operands becomes a `ConvolutionLaunch`: the most promising kernel, what it computes,
and alternative kernels. The runtime picks the fastest on its GPU, cuDNN included, which may be missing. That choice
needs the GPU, so it is not made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cuda_compiler.cuda_program import Convolution, ConvolutionLaunch, KernelForm, kernel_launch_of
from cuda_compiler.rules.channel_packs import BYTE_PACKS, PACK, channels_last, is_packed
from cuda_compiler.rules.movement import transposing_copy
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View

# A parameter that `channels_last` adds: no call of a run writes the weight, so a kernel may prefetch it.
CONSTANT_WEIGHT = "constant_weight"

_BLOCK = 256
_PRODUCT_BLOCK = 64  # channels and pixels per block of the general kernel
_FULL = MULTIPROCESSORS * 512  # threads that keep a large GPU busy
# Depthwise convolutions: channels of a thread, rows and columns of its tile.
_DEPTHWISE_FORMS = ((4, 2, 4), (4, 1, 4), (2, 1, 4), (2, 1, 2), (2, 1, 1))
_DEPTHWISE_WIDE_FORMS = ((2, 2, 7), (2, 2, 4), (2, 1, 4), (2, 1, 2), (2, 1, 1))
_FEW_TAPS = 25
_CLUSTER = 8  # blocks that share an image
_FORMS, _WARPGROUP_FORMS = 5, 3  # tile shapes that the runtime shall try
ROW_BYTES = 128  # of a row of terms in a step of a tile


def _conv(make: Specializer, call: KernelCall) -> list[KernelCall]:
    forms = list(_forms(make, call))
    x, weight, _, _, out = KERNELS[call.kernel].bind(call)
    assert x is not None and weight is not None and out is not None
    # Layouts that cuDNN knows; our kernels have others too.
    packed = weight.is_contiguous or channels_last(weight).is_contiguous
    if x.dtype != weight.dtype or not (packed and is_packed(x, 1) and is_packed(out, 1)):
        return forms[:1]
    return [tuned(forms, call)]


def tuned(forms: Sequence[KernelCall], call: KernelCall) -> KernelCall:
    """A convolution's kernels as one call, of which the runtime picks the fastest."""
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
        ),
        tuple(KernelForm(form.kernel, form.source, kernel_launch_of(form)) for form in others),
    )
    return replace(first, params=launch.params())


def _forms(make: Specializer, call: KernelCall) -> Iterator[KernelCall]:
    """The kernels that can make a convolution, the most promising one first."""
    x, weight, bias, residual, out = KERNELS[call.kernel].bind(call)
    assert x is not None and weight is not None and out is not None
    images, channels, rows, columns = out.shape
    aligned = all(is_packed(view) for view in (out, residual) if view is not None)
    aligned = aligned and (bias is None or vector_width(bias) >= PACK)
    in_groups, halves = call.params["groups"], x.dtype == weight.dtype in HALF_DTYPES
    if in_groups == channels == x.shape[1] and aligned and is_packed(x) and is_packed(weight.transpose(0, 1)):
        yield depthwise(make, call, "conv_depthwise")
    elif in_groups == 1 and halves and is_packed(x) and _has_terms_in_order(weight):
        row_bytes = itemsize(weight.dtype) * weight.numel // channels
        for tile in tiles(make, images * rows * columns, channels, row_bytes, lambda tile: tile.shared_bytes):
            constants = {"aligned": aligned, CONSTANT_WEIGHT: bool(call.params.get(CONSTANT_WEIGHT))}
            yield tile.kernel(make, call, "conv/tiled.cu", ("conv_tiled", "conv_wgmma"), tile.shared_bytes, constants)
    elif call.params["direct"]:
        block = min(_BLOCK, WARP * groups(rows * columns, WARP))
        grid = (groups(rows * columns, block), channels, images)
        yield make.kernel(call, "conv/conv.cu", function="direct_conv2d_kernel", grid=grid, block=(block, 1, 1))
    else:
        grid = (
            groups(rows * columns, _PRODUCT_BLOCK),
            in_groups * groups(channels // in_groups, _PRODUCT_BLOCK),
            images,
        )
        yield make.kernel(call, "conv/conv.cu", grid=grid, block=(_BLOCK, 1, 1))


def _has_terms_in_order(weight: View) -> bool:
    """Whether each output channel's weights are contiguous, ordered by tap, then by input channel."""
    return is_packed(weight) and channels_last(weight).is_contiguous


def depthwise(make: Specializer, call: KernelCall, function: str) -> KernelCall:
    """A depthwise convolution by packs of channels and tiles of pixels.

    Both are the larger the more there is to do; large windows take fewer channels, since a thread has all products of a
    tile's row in registers.
    """
    images, channels, rows, columns = call.outputs[0].shape
    taps = call.inputs[1].shape[2] * call.inputs[1].shape[3]
    forms = _DEPTHWISE_FORMS if taps <= _FEW_TAPS else _DEPTHWISE_WIDE_FORMS
    pack, down, across = next(
        (
            form
            for form in forms
            if images * groups(channels, form[0]) * groups(rows, form[1]) * groups(columns, form[2]) >= _FULL
        ),
        forms[-1],
    )
    across = groups(columns, groups(columns, across))  # as few as divide the columns alike
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
    )


@dataclass(frozen=True)
class Tile:
    """The tiling of a convolution as an implicit matrix product.

    Attributes:
        m, n: Pixels and channels of a tile, which a block makes with `warps_m` × `warps_n` warps.
        stages: Depth of the pipeline of asynchronous copies to shared memory.
        splits: Split-K factor: blocks that divide the summation of one tile.
        by_warpgroups: Four warps multiply 64 rows together, which only Hopper can.
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
        """Shared memory for a step."""
        return (self.m + self.n) * ROW_BYTES

    @property
    def sum_bytes(self) -> int:
        """Shared memory for the sums, whose rows are padded."""
        return 4 * self.m * (self.n + 4)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a kernel that puts sums where steps were."""
        return max(self.stages * self.stage_bytes, self.sum_bytes)

    def for_steps(self, steps: int) -> Tile:
        """The tile with no more stages than a sum of `steps` steps can use."""
        return replace(self, stages=min(self.stages, max(steps + 1, 2) + self.by_warpgroups))

    def blocks(self, pixels: int, channels: int) -> int:
        """Number of tiles."""
        return groups(pixels, self.m) * groups(channels, self.n)

    def cost(self, pixels: int, channels: int, steps: int, shared: int) -> float:
        """A rough estimate of clock cycles on a large GPU, to rank the candidates.

        Args:
            steps: Number of steps of a sum.
            shared: Bytes of shared memory of a block.
        """
        blocks = self.blocks(pixels, channels) * self.splits
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
            inputs: Operands by name; by default the declaration's.
        """
        images, channels, rows, columns = call.outputs[0].shape
        shape = {name: getattr(self, name) for name in ("warps_m", "warps_n", "stages", "splits")}
        return make.kernel(
            call,
            file,
            function=functions[self.by_warpgroups],
            inputs=inputs,
            grid=(self.blocks(images * rows * columns, channels), 1, self.splits),
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
    make: Specializer, pixels: int, channels: int, row_bytes: int, shared_bytes: Callable[[Tile], int]
) -> list[Tile]:
    """The most promising tiles for [pixels, terms] times [terms, channels] on the target GPU.

    Args:
        row_bytes: Bytes of all terms of a row.
        shared_bytes: Function of a tile: bytes of shared memory that a kernel with it takes.
    """
    steps = groups(row_bytes, ROW_BYTES)
    shared_out = [
        (replace(tile, splits=splits), shared)
        for tile in (tile.for_steps(steps) for tile in _SHAPES)
        if (shared := shared_bytes(tile)) <= make.gpu.shared_memory
        and (make.gpu.has_warpgroups or not tile.by_warpgroups)
        for splits in (1, 2, 4, 8)
        if splits == 1 or splits <= steps and tile.blocks(pixels, channels) < 2 * MULTIPROCESSORS
    ]
    ranked = [
        tile for tile, _ in sorted(shared_out, key=lambda shares: shares[0].cost(pixels, channels, steps, shares[1]))
    ]
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
    """A copy to channels-last by a thread for each pack of channels."""
    out = call.outputs[0]
    packs = BYTE_PACKS if itemsize(out.dtype) == 1 else (PACK,)
    pack = next(pack for pack in packs if is_packed(out, pack))
    return make.kernel(
        call,
        "conv/conv.cu",
        function=function,
        inputs={"x": call.inputs[0]},
        outputs={"out": out},
        grid=(groups(out.numel // pack, _BLOCK), 1, 1),
        block=(_BLOCK, 1, 1),
        constants={"pack": pack, **{name: int(call.params[name]) for name in ("fold", "top", "left", "fill")}},
    )


def _conv_transpose(make: Specializer, call: KernelCall) -> list[KernelCall]:
    count = call.outputs[0].numel
    return [make.kernel(call, "conv/conv.cu", grid=(groups(count, _BLOCK), 1, 1), block=(_BLOCK, 1, 1))]


def _squeeze_excite(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """A cluster of blocks for each image."""
    x, squeeze, *others = call.inputs
    squeeze_bias = others.pop(0) if call.params["squeeze_bias"] else None
    excite, excite_bias = others.pop(0), others[0] if call.params["excite_bias"] else None
    packs = x.shape[1] // PACK
    threads = _BLOCK if packs <= _BLOCK // 2 else 2 * _BLOCK
    return [
        make.kernel(
            call,
            "conv/squeeze_excite.cu",
            inputs={
                "x": x,
                "squeeze": squeeze,
                "squeeze_bias": squeeze_bias,
                "excite": excite,
                "excite_bias": excite_bias,
            },
            outputs={"out": call.outputs[0]},
            grid=(x.shape[0], 1, _CLUSTER),
            block=(threads, 1, 1),
            constants={"blocks": _CLUSTER},
            cluster=_CLUSTER,
        )
    ]


RULES: dict[str, Rule] = {
    "conv2d_kernel": _conv,
    "to_channels_last": _to_channels_last,
    "squeeze_excite": _squeeze_excite,
    "conv_transpose2d_kernel": _conv_transpose,
}
