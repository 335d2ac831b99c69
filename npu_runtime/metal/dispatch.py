"""Number of threadgroups, and of threads in each, for every Metal kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from npu_compiler.ops import declaration
from npu_compiler.program.elementwise import ElementwiseKernel
from npu_compiler.program.kernels import Grid, KernelCall
from npu_compiler.program.views import numel
from npu_compiler.target_config import TargetConfig
from npu_runtime.dispatch import DispatchStrategy, Size3

SIMD_WIDTH = 32
VEC_COLUMNS = 4  # output columns that one threadgroup of a vector product makes
CODE_BYTES = 16  # of a row's codes that one thread of a vector product takes at a time
CONV_PIXELS = 64  # output pixels that one threadgroup of a convolution makes
DIRECT_PIXELS = 4  # output pixels that one thread of a direct convolution makes
ATTENTION_WIDTH = 128  # a head up to this wide is held in registers
ATTENTION_SLICE = 256  # of a wider head's result, what one threadgroup makes
ATTENTION_KEY_LANES = 8  # lanes that share a key
ATTENTION_TILE = 32  # queries of a tile, eight to a SIMD group
PREFILL_QUERIES = 8  # from so many queries on, a tile of them is faster than one by one

Shape: TypeAlias = Callable[[KernelCall, TargetConfig], tuple[Size3, Size3]]


class MetalDispatchStrategy(DispatchStrategy):
    """Grids for the kernels in `metal_kernels`, of whole threadgroups, so that kernels have to check their bounds."""

    def __init__(self, config: TargetConfig) -> None:
        self.config = config

    def compute_dispatch(self, call: KernelCall, pipeline: Any) -> tuple[Size3, Size3]:
        """The grid of a call.

        It does not depend on the pipeline, as all pipelines are compiled for the largest threadgroups.
        """
        return _SHAPES[declaration(call).grid](call, self.config)

    def function(self, call: KernelCall) -> str:
        """The Metal function that runs a call; one kernel may have several, for different shapes."""
        decl = declaration(call)
        if decl.grid is Grid.QUERIES:
            return _attention_form(call)
        if decl.grid is Grid.TOKENS:
            return "paged_attention_wide_kernel" if _is_wide(call) else decl.name
        return decl.function if isinstance(decl, ElementwiseKernel) else decl.name


def _groups(count: int, size: int) -> int:
    return max(1, -(-count // size))


def _whole_simdgroups(count: int, most: int) -> int:
    """A threadgroup size for `count` work items: a multiple of the SIMD width, at most `most`."""
    return min(most, SIMD_WIDTH * _groups(count, SIMD_WIDTH))


def _one_element(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one thread per output element."""
    threads = config.max_threadgroup_1d
    return (_groups(call.outputs[0].numel, threads), 1, 1), (threads, 1, 1)


def _four_elements(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one thread per four consecutive output elements."""
    threads = config.max_threadgroup_1d
    return (_groups(call.outputs[0].numel, 4 * threads), 1, 1), (threads, 1, 1)


def _planes(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one thread per output element: columns along x, rows along y, all other dimensions along z."""
    *outer, rows, columns = call.outputs[0].shape
    width = _whole_simdgroups(columns, config.max_threadgroup_1d)
    height = max(1, min(rows, config.max_threadgroup_1d // width))
    return (_groups(columns, width), _groups(rows, height), numel(outer)), (width, height, 1)


def _embedding(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one thread per four columns of the table; ids along y."""
    *ids, width = call.outputs[0].shape
    columns = _groups(width, 4)
    threads = _whole_simdgroups(columns, config.max_threadgroup_1d)
    return (_groups(columns, threads), numel(ids), 1), (threads, 1, 1)


def _source_elements(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one thread per element of the rows that replace others in an update."""
    count, threads = call.inputs[1].numel, config.max_threadgroup_1d
    return (_groups(count, threads), 1, 1), (threads, 1, 1)


def _simdgroup_per_element(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one SIMD group per output element."""
    threads = config.max_threadgroup_1d
    return (_groups(call.outputs[0].numel, threads // SIMD_WIDTH), 1, 1), (threads, 1, 1)


def _row(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one threadgroup per row (the last dimension) of the output, a thread for every four elements."""
    out = call.outputs[0]
    return (out.numel // max(out.shape[-1], 1), 1, 1), (_quads(out.shape[-1], config), 1, 1)


def _row_elements(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one threadgroup per row (the last dimension) of the output, a thread for every element."""
    out = call.outputs[0]
    threads = _whole_simdgroups(out.shape[-1], config.max_threadgroup_1d)
    return (out.numel // max(out.shape[-1], 1), 1, 1), (threads, 1, 1)


def _reduction(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one threadgroup per output element, a thread for every four elements that are reduced."""
    out = call.outputs[0]
    return (out.numel, 1, 1), (_quads(call.inputs[0].numel // max(out.numel, 1), config), 1, 1)


def _quads(width: int, config: TargetConfig) -> int:
    return _whole_simdgroups(_groups(width, 4), config.max_threadgroup_1d)


def _group_norm(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one threadgroup per image and group of channels."""
    out, groups = call.outputs[0], call.params["groups"]
    count = out.shape[0] * groups
    return (count, 1, 1), (_quads(out.numel // max(count, 1), config), 1, 1)


def _matmul(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one threadgroup of four SIMD groups per block of 2 × 2 tiles; batches along z."""
    block = 2 * config.matmul_tile
    params = call.params
    grid = (_groups(params["n"], block), _groups(params["m"], block), params.get("batch", 1))
    return grid, (4 * SIMD_WIDTH, 1, 1)


def _matmul_vec(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one threadgroup per few output columns; its threads share the K-reduction, four terms at a time."""
    return _columns(call.params["n"], _groups(call.params["k"], 4), config)


def _quantized_matmul_vec(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid for a product of one row and a quantized weight; a thread reads 16 bytes of a row's codes at a time."""
    return _columns(call.params["n"], _groups(call.inputs[1].shape[-1], CODE_BYTES), config)


def _columns(count: int, steps: int, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one threadgroup per few columns, with a thread for each step, or every few steps, of the reduction."""
    rounds = _groups(steps, config.max_threadgroup_1d)
    threads = _whole_simdgroups(_groups(steps, rounds), config.max_threadgroup_1d)
    return (_groups(count, VEC_COLUMNS), 1, 1), (threads, 1, 1)


def _matmul_vec_notrans(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one threadgroup per SIMD width of adjacent output columns; its SIMD groups divide K."""
    return (_groups(call.params["n"], SIMD_WIDTH), 1, 1), (config.max_threadgroup_1d, 1, 1)


def _conv(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid with pixels along x, channels along y, images along z.

    A threadgroup takes a tile, or a thread a few pixels.
    """
    images, channels, rows, columns = call.outputs[0].shape
    pixels = rows * columns
    if call.params.get("direct"):
        threads = _whole_simdgroups(_groups(pixels, DIRECT_PIXELS), config.max_threadgroup_1d)
        return (_groups(pixels, DIRECT_PIXELS * threads), channels, images), (threads, 1, 1)
    groups = call.params["groups"]
    blocks = groups * _groups(channels // groups, config.channel_tile)
    return (_groups(pixels, CONV_PIXELS), blocks, images), (4 * SIMD_WIDTH, 1, 1)


def _rope(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one thread per four pairs along x; rows along y."""
    *lead, width = call.inputs[0].shape
    quads, rows = _groups(width // 2, 4), numel(lead)
    columns = min(quads, config.max_threadgroup_1d)
    height = max(1, min(rows, config.max_threadgroup_1d // columns))
    return (_groups(quads, columns), _groups(rows, height), 1), (columns, height, 1)


def _attention_form(call: KernelCall) -> str:
    """The Metal function for attention: tiles of queries if there are many, else single queries, or wide heads."""
    q, k, v = call.inputs[:3]
    if _is_wide(call):
        return "attention_wide_kernel"
    if q.shape[2] < PREFILL_QUERIES:
        return "attention_kernel"
    in_float = "float32" in (q.dtype, k.dtype, v.dtype)
    return "attention_prefill_float_kernel" if in_float else "attention_prefill_kernel"


def _is_wide(call: KernelCall) -> bool:
    """Whether a head of queries or values is wider than kernels can hold in registers."""
    q, _, v = call.inputs[:3]
    return max(q.shape[-1], v.shape[-1]) > ATTENTION_WIDTH


def _attention(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one threadgroup per query (or tile of them, or slice of a wide head's result), head and batch."""
    batch, heads, queries, width = call.outputs[0].shape
    form = _attention_form(call)
    if "prefill" in form:
        return (_groups(queries, ATTENTION_TILE), heads, batch), (ATTENTION_TILE // 8 * SIMD_WIDTH, 1, 1)
    keys = call.inputs[1].shape[2]
    threads = _whole_simdgroups(keys * ATTENTION_KEY_LANES, config.max_threadgroup_1d)
    slices = _groups(width, ATTENTION_SLICE) if form == "attention_wide_kernel" else 1
    return (slices * queries, heads, batch), (threads, 1, 1)


def _sequences(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one threadgroup per sequence of the batch, and direction; its threads divide the hidden state."""
    directions, rows, hidden = call.outputs[1].shape
    return (rows, directions, 1), (_whole_simdgroups(hidden, config.max_threadgroup_1d), 1, 1)


def _paged_attention(call: KernelCall, config: TargetConfig) -> tuple[Size3, Size3]:
    """A grid of one threadgroup per token (for wide heads, per slice of its result) and head."""
    tokens, heads, width = call.outputs[0].shape
    keys = call.inputs[3].shape[1] * call.params["block_size"]
    threads = _whole_simdgroups(keys * ATTENTION_KEY_LANES, config.max_threadgroup_1d)
    slices = _groups(width, ATTENTION_SLICE) if _is_wide(call) else 1
    return (slices * tokens, heads, 1), (threads, 1, 1)


_SHAPES: dict[Grid, Shape] = {
    Grid.ELEMENTS: _one_element,
    Grid.QUADS: _four_elements,
    Grid.PLANES: _planes,
    Grid.SOURCE_ELEMENTS: _source_elements,
    Grid.TABLE_ROWS: _embedding,
    Grid.ROWS: _row,
    Grid.ROW_ELEMENTS: _row_elements,
    Grid.REDUCTIONS: _reduction,
    Grid.SHORT_REDUCTIONS: _simdgroup_per_element,
    Grid.CHANNEL_GROUPS: _group_norm,
    Grid.TILES: _matmul,
    Grid.COLUMNS: _matmul_vec,
    Grid.CODE_COLUMNS: _quantized_matmul_vec,
    Grid.COLUMN_BLOCKS: _matmul_vec_notrans,
    Grid.PIXELS: _conv,
    Grid.ROTATIONS: _rope,
    Grid.QUERIES: _attention,
    Grid.TOKENS: _paged_attention,
    Grid.SEQUENCES: _sequences,
}
