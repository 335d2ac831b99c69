"""Rules of softmax and the norms, whose kernels keep a row in registers between their passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from cuda_compiler.rules.channel_packs import PACK, is_packed
from cuda_compiler.rules.columns import is_by_columns, softmax_by_columns
from cuda_compiler.rules.rows import held_packs, shared_pack, small_teams_for, teams_for
from cuda_compiler.specialization.gpu import MULTIPROCESSORS
from cuda_compiler.specialization.sizes import Size3, groups
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View, collapse, numel

# Group norm of channels-last images.
_CHANNEL_THREADS, _MOST_CHANNEL_THREADS = 256, 512
_FILLING_CHUNKS = 4 * MULTIPROCESSORS
_CHUNK_PIXELS = 16  # at least
_MOST_CHUNKS = 128  # of an image, since each block of the second kernel combines all of them


ROW_KERNELS = {
    "softmax_kernel": "norms/softmax.cu",
    "log_softmax_kernel": "norms/softmax.cu",
    "masked_softmax_kernel": "norms/softmax.cu",
    "rmsnorm_kernel": "norms/norms.cu",
    "layernorm_kernel": "norms/norms.cu",
}
Form: TypeAlias = tuple[dict[str, bool | int | float], Size3, Size3]


def own_teams(call: KernelCall) -> Callable[[int, int], Form]:
    """The function that divides the rows of a softmax or norm among teams."""
    return teams_for if call.kernel.endswith("softmax_kernel") else small_teams_for


def row_form(call: KernelCall, pack: int, teams: Callable[[int, int], Form]) -> Form:
    """The template constants, grid and block of a kernel over rows, whose threads access `pack` elements at a time."""
    out = call.outputs[0]
    width = out.shape[-1]
    constants, grid, block = teams(out.numel // width, groups(width, pack))
    held = held_packs(width // pack, block, constants["teams"])
    return {**constants, "pack": pack, "held_packs": held}, grid, block


def _rows(make: Specializer, call: KernelCall) -> list[KernelCall]:
    if is_by_columns(call):
        return [softmax_by_columns(make, call)]
    constants, grid, block = row_form(call, shared_pack((*call.inputs, *call.outputs)), own_teams(call))
    operands: dict[str, Any] = {}
    if call.kernel.endswith("softmax_kernel"):
        x, *mask = call.inputs
        operands["inputs"] = {"x": x, "mask": mask[0] if mask else None}
    return [make.kernel(call, ROW_KERNELS[call.kernel], grid=grid, block=block, constants=constants, **operands)]


def _group_norm(make: Specializer, call: KernelCall) -> list[KernelCall]:
    call = replace(call, params={"activation": "none", **call.params})
    views = [_spatial_merged(view) for view in (call.inputs[0], call.outputs[0])]
    threads = _CHANNEL_THREADS
    while call.inputs[0].shape[1] // PACK > threads // 2 and threads < _MOST_CHANNEL_THREADS:
        threads *= 2
    by_pixels = all(view.rank == 3 and is_packed(view.unsqueeze(3)) for view in views)
    if by_pixels and call.inputs[0].shape[1] // PACK <= threads and views[0].shape[2] > 1:
        return _group_norm_by_pixels(make, call, views[0], views[1], threads)
    return [_group_norm_by_channels(make, call)]


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
    chunks = max(1, min(groups(_FILLING_CHUNKS, images), groups(pixels, _CHUNK_PIXELS), _MOST_CHUNKS))
    chunks = groups(pixels, groups(pixels, chunks))  # none is empty
    stats = make.temporary(call.node, (images, chunks, call.params["groups"], 2), "float32")
    options: dict[str, Any] = {
        "grid": (chunks, images, 1),
        "block": (threads, 1, 1),
        "constants": {"pack": PACK, "chunks": chunks},
    }
    file = "norms/group_norm.cu"
    statistics = make.kernel(
        call, file, function="groupnorm_chunks", inputs={"x": x}, outputs={"stats": stats}, **options
    )
    inputs = {"x": x, "weight": weight, "bias": bias, "stats": stats}
    applied = make.kernel(call, file, function="groupnorm_apply", inputs=inputs, outputs={"out": out}, **options)
    return [replace(statistics, flops=0, bytes_moved=0), applied]


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


RULES: dict[str, Rule] = {
    **dict.fromkeys(ROW_KERNELS, _rows),
    "groupnorm_kernel": _group_norm,
}
