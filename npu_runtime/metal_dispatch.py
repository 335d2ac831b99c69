"""How many threadgroups of how many threads each Metal kernel runs with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from npu_compiler.codegen import KernelCall
from npu_compiler.target_config import TargetConfig
from npu_compiler.views import numel
from npu_runtime.backend import DispatchStrategy, Size3

SIMD_WIDTH = 32
VEC_COLUMNS = 4  # output columns that one threadgroup of a vector product makes

Shape: TypeAlias = Callable[[KernelCall, TargetConfig], tuple[Size3, Size3]]


class MetalDispatchStrategy(DispatchStrategy):
    """Grids for the kernels in `metal_kernels`; whole threadgroups, so kernels guard their edges."""

    def __init__(self, config: TargetConfig) -> None:
        self.config = config

    def compute_dispatch(self, call: KernelCall) -> tuple[Size3, Size3]:
        if "op" in call.params:
            shape: Shape = _broadcast if call.kernel.endswith("_broadcast_kernel") else _four_elements
        else:
            shape = _SHAPES.get(call.kernel, _one_element)
        return shape(call, self.config)


def _groups(count: int, size: int) -> int:
    return max(1, -(-count // size))


def _whole_simdgroups(count: int, most: int) -> int:
    """A threadgroup size for `count` things to do: a multiple of the SIMD width, at most `most`."""
    return min(most, SIMD_WIDTH * _groups(count, SIMD_WIDTH))


def _one_element(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """One thread per output element."""
    threads = config.max_threadgroup_1d
    return (_groups(call.outputs[0].numel, threads), 1, 1), (threads, 1, 1)


def _four_elements(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """One thread per four consecutive output elements."""
    threads = config.max_threadgroup_1d
    return (_groups(call.outputs[0].numel, 4 * threads), 1, 1), (threads, 1, 1)


def _broadcast(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """Columns, rows, and everything outside them, of the collapsed output."""
    *outer, rows, columns = call.outputs[0].shape
    width = _whole_simdgroups(columns, config.max_threadgroup_1d)
    height = max(1, min(rows, config.max_threadgroup_1d // width))
    return (_groups(columns, width), _groups(rows, height), numel(outer)), (width, height, 1)


def _row(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """One threadgroup per row (the last dimension) of the output."""
    out = call.outputs[0]
    width = out.shape[-1] if out.rank else 1
    return (out.numel // max(width, 1), 1, 1), (_whole_simdgroups(width, config.max_threadgroup_1d), 1, 1)


def _reduction(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """One threadgroup per output element."""
    out = call.outputs[0]
    width = call.inputs[0].numel // max(out.numel, 1)
    return (out.numel, 1, 1), (_whole_simdgroups(width, config.max_threadgroup_1d), 1, 1)


def _group_norm(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """One threadgroup per image and group of channels."""
    out, groups = call.outputs[0], call.params["groups"]
    count = out.shape[0] * groups
    return (count, 1, 1), (_whole_simdgroups(out.numel // max(count, 1), config.max_threadgroup_1d), 1, 1)


def _matmul(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """One threadgroup of four SIMD groups per block of 2 × 2 tiles; batches along z."""
    block = 2 * config.matmul_tile
    params = call.params
    grid = (_groups(params["n"], block), _groups(params["m"], block), params.get("batch", 1))
    return grid, (4 * SIMD_WIDTH, 1, 1)


def _matmul_vec(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """One threadgroup per few output columns; its threads share the K-reduction."""
    return (_groups(call.params["n"], VEC_COLUMNS), 1, 1), (config.max_threadgroup_1d, 1, 1)


def _matmul_vec_notrans(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """One threadgroup per SIMD width of output columns, which lie side by side; K is split over its SIMD groups."""
    return (_groups(call.params["n"], SIMD_WIDTH), 1, 1), (config.max_threadgroup_1d, 1, 1)


def _attention(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """One threadgroup per query row, head and batch."""
    batch, heads, queries, _ = call.outputs[0].shape
    return (queries, heads, batch), (config.max_threadgroup_1d, 1, 1)


_SHAPES: dict[str, Shape] = {
    "softmax_kernel": _row,
    "log_softmax_kernel": _row,
    "masked_softmax_kernel": _row,
    "rmsnorm_kernel": _row,
    "layernorm_kernel": _row,
    "cumsum_kernel": _row,
    "groupnorm_kernel": _group_norm,
    "matmul_kernel": _matmul,
    "matmul_notrans_kernel": _matmul,
    "batched_matmul_kernel": _matmul,
    "matmul_vec_kernel": _matmul_vec,
    "matmul_vec_notrans_kernel": _matmul_vec_notrans,
    "attention_kernel": _attention,
    **{
        f"{op}_kernel": _reduction
        for op in (
            "sum", "mean", "max", "min", "prod", "var", "std", "any", "all", "argmax", "argmin", "norm", "logsumexp",
        )
    },
}  # fmt: skip
