"""Rules of integer kernels: convolutions and products on tensor cores, depthwise ones, pooling and sums."""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.passes.integers import (
    CONVOLUTION,
    LINEAR,
    QUANTIZE,
    QUANTIZED_COPY,
    TILED,
    WEIGHT_SUMS,
    as_convolution,
)
from cuda_compiler.passes.packed_operands import in_order_of_memory
from cuda_compiler.rules.channel_packs import BYTE_PACKS, PACK, is_packed
from cuda_compiler.rules.conv import CONSTANT_WEIGHT, Tile, depthwise, packed_copy, tiles, tuned
from cuda_compiler.rules.pooling import channel_pack, per_pack
from cuda_compiler.specialization.gpu import WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View

_FILE = "conv/integer.cu"
_BLOCK = 128
_MEAN_LANES = 8


def _tiled(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """The calls of an integer convolution on tensor cores, over operands that `passes/integers.py` has packed."""
    x, weight, scales, factors, *rest = call.inputs
    named = {"x": x, "weight": weight, "scales": scales, "factors": factors}
    inputs: dict[str, View | None] = {
        **named,
        **{name: rest.pop(0) if call.params[f"has_{name}"] else None for name in ("weight_sums", "bias", "residual")},
    }
    out, residual = call.outputs[0], inputs["residual"]
    images, channels, rows, columns = out.shape
    unit = next(pack for pack in BYTE_PACKS if is_packed(x, pack) and weight.shape[1] % pack == 0)
    moved = [view for view in (out, residual) if view is not None and itemsize(view.dtype) == itemsize(out.dtype)]
    vector = 16 // itemsize(out.dtype)
    while vector > 1 and not all(is_packed(view, vector) for view in moved):
        vector //= 2
    constants = {"unit_bytes": unit, "vector": vector, CONSTANT_WEIGHT: bool(call.params[CONSTANT_WEIGHT])}
    row_bytes = weight.numel // channels
    steps = groups(row_bytes, 128)

    def ring_bytes(tile: Tile) -> int:
        """Bytes of shared memory for copies of steps; partial sums reuse it afterwards if blocks share a sum."""
        ring = min(tile.stages, steps) * tile.stage_bytes  # without clusters, one block makes all steps
        return max(ring, tile.sum_bytes) if tile.splits > 1 else ring

    def shared_bytes(tile: Tile) -> int:
        return ring_bytes(tile) + tile.m * (tile.n * itemsize(out.dtype) + 16)

    plain = replace(call, kernel=CONVOLUTION)
    forms = [
        tile.kernel(
            make,
            plain,
            "conv/integer_tiled.cu",
            ("integer_tiled", "integer_wgmma"),
            shared_bytes(tile),
            {**constants, "ring_bytes": ring_bytes(tile)},
            inputs,
        )
        for tile in tiles(make, images * rows * columns, channels, row_bytes, shared_bytes)
    ]
    return [tuned(forms, call)]


def _convolve(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """The calls of an integer convolution that does not use tensor cores."""
    x, weight, _, zeros, _, residual, out = KERNELS[CONVOLUTION].bind(call)
    assert x is not None and weight is not None and out is not None
    is_depthwise = call.params["groups"] == out.shape[1] == x.shape[1] and zeros is None
    packed = [view for view in (x, weight.transpose(0, 1), residual, out) if view is not None]
    if is_depthwise and all(is_packed(view, PACK) for view in packed):
        return [depthwise(make, call, "integer_depthwise")]
    return [make.kernel(call, _FILE, grid=(groups(out.numel, _BLOCK), 1, 1), block=(_BLOCK, 1, 1))]


def _linear(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return _convolve(make, as_convolution(call))


def _weight_sums(make: Specializer, call: KernelCall) -> list[KernelCall]:
    grid = (groups(call.inputs[0].shape[0], _BLOCK // WARP), 1, 1)
    inputs, outputs = {"x": call.inputs[0]}, {"out": call.outputs[0]}
    return [make.kernel(call, _FILE, inputs=inputs, outputs=outputs, grid=grid, block=(_BLOCK, 1, 1))]


def _quantized_copy(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return [packed_copy(make, replace(call, kernel=QUANTIZE), call.kernel)]


def _max_pool(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return per_pack(make, call, "conv/pool.cu", "max_pool2d_kernel")


def _mean(make: Specializer, call: KernelCall) -> list[KernelCall]:
    x = call.inputs[0]
    pack = min(channel_pack(x), 4)
    warps = x.shape[0] * groups(x.shape[1] // pack, _MEAN_LANES)
    grid = (groups(warps, _BLOCK // WARP), 1, 1)
    return [make.kernel(call, _FILE, grid=grid, block=(_BLOCK, 1, 1), constants={"pack": pack})]


def _add(make: Specializer, call: KernelCall) -> list[KernelCall]:
    call = in_order_of_memory(call)
    views = (*call.inputs, *call.outputs)
    pack = min(*map(vector_width, views), 16 // itemsize(call.outputs[0].dtype))
    while call.outputs[0].rank and call.outputs[0].shape[-1] % pack:
        pack //= 2
    grid = (groups(call.outputs[0].numel // pack, _BLOCK), 1, 1)
    return [make.kernel(call, _FILE, grid=grid, block=(_BLOCK, 1, 1), constants={"pack": pack})]


RULES: dict[str, Rule] = {
    TILED: _tiled,
    CONVOLUTION: _convolve,
    LINEAR: _linear,
    WEIGHT_SUMS: _weight_sums,
    QUANTIZED_COPY: _quantized_copy,
    "integer_max_pool2d_kernel": _max_pool,
    "integer_mean_kernel": _mean,
    "integer_add_kernel": _add,
}
