"""Rules of group norms: of channels-last images by clusters or by two kernels, of row-major ones by one kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cuda_compiler.rules.channel_packs import PACK, is_packed
from cuda_compiler.rules.rows import held_packs, shared_pack, teams_for
from cuda_compiler.specialization.gpu import CLUSTERS, GPU, MULTIPROCESSORS, RESERVED_SHARED_MEMORY, WARP
from cuda_compiler.specialization.sizes import groups
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View, collapse, numel

_CHANNEL_THREADS, _MOST_CHANNEL_THREADS = 256, 512
_MOST_THREADS = 2048  # of a multiprocessor
_FILLING_CHUNKS = 4 * MULTIPROCESSORS
_CHUNK_PIXELS = 16  # at least
_MOST_CHUNKS = 128  # of an image, since each block of the second kernel combines all of them
_LEAST_SLICE = 32  # channels, which are two sectors

# Fitted to 14 shapes on one H200, in seconds. A cluster's blocks meet, which takes a time and more for each of several.
# In turn, blocks begin, their threads do one pixel after another, and a thread combines several channels. A
# multiprocessor copies so many bytes a second; rows of less than a line cost as much as one.
_MEETING, _BLOCK_OF_SEVERAL, _ROUND, _PIXEL, _CHANNELS = 0.3e-6, 0.35e-6, 0.4e-6, 0.07e-6, 0.34e-6
_BLOCK_RATE, _LINE = 52e9, 128
# Two kernels take a time, and more for each byte that is read or written and for each group of a chunk.
_APART_TIME, _APART_RATE, _COMBINING = 3e-6, 3e12, 1e-9


def _group_norm(make: Specializer, call: KernelCall) -> list[KernelCall]:
    call = replace(call, params={"activation": "none", **call.params})
    views = [_spatial_merged(view) for view in (call.inputs[0], call.outputs[0])]
    if not all(view.rank == 3 and is_packed(view.unsqueeze(3)) for view in views) or views[0].shape[2] == 1:
        return [_group_norm_by_channels(make, call)]
    division = _division(make.gpu, views[0], call.params["groups"])
    if division is not None:
        return [_group_norm_by_clusters(make, call, views[0], views[1], division)]
    threads = _CHANNEL_THREADS
    while call.inputs[0].shape[1] // PACK > threads // 2 and threads < _MOST_CHANNEL_THREADS:
        threads *= 2
    if call.inputs[0].shape[1] // PACK <= threads:
        return _group_norm_by_pixels(make, call, views[0], views[1], threads)
    return [_group_norm_by_channels(make, call)]


@dataclass(frozen=True)
class _Division:
    """A division of each image of a group norm among clusters, each of which keeps its part in shared memory.

    Attributes:
        slice: Channels of a cluster, which are whole groups.
        blocks: Blocks of a cluster, each of which has as many pixels.
        threads: Threads of a block.
        shared: Bytes of shared memory of a block.
    """

    slice: int
    blocks: int
    threads: int
    shared: int


def _division(gpu: GPU, x: View, count: int) -> _Division | None:
    """Return the fastest division of images [N, C, pixels] with `count` groups; None if two kernels are faster."""
    if not gpu.has_clusters or itemsize(x.dtype) != 2:
        return None
    images, channels, pixels = x.shape
    found: list[tuple[float, int, _Division]] = []
    for parts in (parts for parts in range(1, count + 1) if count % parts == 0):
        width = channels // parts
        if width % PACK or parts > 1 and width < _LEAST_SLICE or width // PACK > _MOST_CHANNEL_THREADS:
            continue
        threads = _CHANNEL_THREADS if width // PACK <= _CHANNEL_THREADS else _MOST_CHANNEL_THREADS
        for blocks in CLUSTERS:
            own = groups(pixels, blocks)
            shared = _cluster_memory(own, width, threads, count // parts)
            if groups(pixels, own) == blocks and shared <= gpu.shared_memory:  # no block is without pixels
                division = _Division(width, blocks, threads, shared)
                found.append((_time(gpu, division, images * parts, own), parts, division))
    if not found:
        return None
    time, _, fastest = min(found, key=lambda each: each[:2])
    combining = _COMBINING * _chunks(images, pixels) * count
    return fastest if time < _APART_TIME + 3 * 2 * images * channels * pixels / _APART_RATE + combining else None


def _time(gpu: GPU, division: _Division, clusters: int, pixels: int) -> float:
    """The estimated seconds of so many clusters, whose blocks have so many pixels."""
    blocks, width, threads = clusters * division.blocks, division.slice, division.threads
    resident = (gpu.shared_memory + RESERVED_SHARED_MEMORY) // (division.shared + RESERVED_SHARED_MEMORY)
    resident = min(resident, _MOST_THREADS // threads)
    at_a_time = resident * MULTIPROCESSORS if resident > 1 else division.blocks * CLUSTERS[division.blocks]
    together = min(resident, groups(blocks, MULTIPROCESSORS))
    copies = together * pixels * 2 * max(2 * width, _LINE) / _BLOCK_RATE
    turns = groups(pixels, threads // (width // PACK))
    one = _ROUND + _PIXEL * turns * together + copies + _CHANNELS * width / threads
    meeting = _MEETING * (division.blocks > 1) + _BLOCK_OF_SEVERAL * division.blocks
    return meeting + groups(blocks, at_a_time) * one


def _cluster_memory(pixels: int, width: int, threads: int, count: int) -> int:
    """The shared memory of a block with so many pixels and channels in `count` groups: `Memory` of the template."""
    packs = width // PACK
    lines = threads // packs
    folds = packs < WARP and packs & (packs - 1) == 0
    rows = threads // WARP if folds else lines
    held = groups(pixels, lines) * threads * PACK * 2
    return groups(held + 4 * (width * (2 * rows + 1) + 4 * count), 16) * 16


def _group_norm_by_clusters(make: Specializer, call: KernelCall, x: View, out: View, division: _Division) -> KernelCall:
    """The call of a group norm of channels-last images by clusters, which read them once."""
    images, channels, _ = x.shape
    _, weight, bias, _ = KERNELS[call.kernel].bind(call)
    return make.kernel(
        call,
        "norms/group_norm.cu",
        function="groupnorm_cluster",
        inputs={"x": x, "weight": weight, "bias": bias},
        outputs={"out": out},
        grid=(channels // division.slice, images, division.blocks),
        block=(division.threads, 1, 1),
        shared=division.shared,
        cluster=division.blocks,
        constants={"pack": PACK, "chunks": division.blocks, "slice": division.slice},
    )


def _group_norm_by_pixels(make: Specializer, call: KernelCall, x: View, out: View, threads: int) -> list[KernelCall]:
    """The calls of a group norm of channels-last images, in chunks of pixels.

    One kernel computes, for each chunk and group, the mean and the sum of squared deviations from it; the other one
    combines the chunks and normalizes.

    Args:
        x, out: The images and the result [images, channels, pixels].
        threads: Threads of a block, which has a chunk of one image.
    """
    images, _, pixels = x.shape
    _, weight, bias, _ = KERNELS[call.kernel].bind(call)
    chunks = _chunks(images, pixels)
    stats = make.temporary(call.node, (images, chunks, call.params["groups"], 2), "float32")
    options: dict[str, Any] = {
        "grid": (chunks, images, 1),
        "block": (threads, 1, 1),
        "constants": {"pack": PACK, "chunks": chunks, "slice": x.shape[1]},
    }
    file = "norms/group_norm.cu"
    statistics = make.kernel(
        call, file, function="groupnorm_chunks", inputs={"x": x}, outputs={"stats": stats}, **options
    )
    inputs = {"x": x, "weight": weight, "bias": bias, "stats": stats}
    applied = make.kernel(call, file, function="groupnorm_apply", inputs=inputs, outputs={"out": out}, **options)
    return [replace(statistics, flops=0, bytes_moved=0), applied]


def _chunks(images: int, pixels: int) -> int:
    """The number of chunks of each image, none of which is empty."""
    chunks = max(1, min(groups(_FILLING_CHUNKS, images), groups(pixels, _CHUNK_PIXELS), _MOST_CHUNKS))
    return groups(pixels, groups(pixels, chunks))


def _group_norm_by_channels(make: Specializer, call: KernelCall) -> KernelCall:
    """The call of a group norm of row-major images.

    A vector access must not cross from one spatial row into the next, so its width divides the innermost size.
    """
    x, out = call.inputs[0], call.outputs[0]
    spatial = numel(x.shape[2:])
    flat = [_spatial_merged(view) for view in (x, out)]
    inner = flat[0].shape[-1] if flat[0].rank > 2 and flat[0].shape == flat[1].shape else 1
    pack = shared_pack(flat) if inner > 1 else 1
    while inner % pack:
        pack //= 2
    groups_of_all = x.shape[0] * call.params["groups"]
    items = spatial * (x.shape[1] // call.params["groups"]) // pack
    constants, grid, block = teams_for(groups_of_all, items)
    held = held_packs(items, block, constants["teams"])
    constants = {**constants, "pack": pack, "held_packs": held}
    return make.kernel(call, "norms/norms.cu", grid=grid, block=block, constants=constants)


def _spatial_merged(view: View) -> View:
    """[N, C, …] with adjacent spatial dimensions merged where one stride covers both."""
    sizes, (steps,) = collapse(view.shape[2:], view.strides[2:])
    return replace(view, shape=(*view.shape[:2], *sizes), strides=(*view.strides[:2], *steps))


RULES: dict[str, Rule] = {"groupnorm_kernel": _group_norm}
