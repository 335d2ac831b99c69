"""Template rule of attention: split over the keys for few queries, tiles for many, a plain kernel for the rest."""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.cuda_templates import MAX_GRID, WARP, Specializer, groups, template_rule, vector_width
from npu_compiler.codegen_core import KERNELS, KernelCall
from npu_compiler.dtypes import HALF_DTYPES
from npu_compiler.views import View

FEW_QUERIES = 8
_WARPS = 4
_BLOCK_ROWS = 16  # of a warp's product
_BLOCK_KEYS = 16
_FILLING_BLOCKS = 264  # two for each multiprocessor of a large GPU
_WIDEST = 128  # whose sums a warp holds in registers
_RESIDENT = 2  # blocks of a multiprocessor, which leaves a thread all the registers that it needs
_SLICE = 512  # dimensions of a result that a block of the plain kernel makes


@template_rule("attention_kernel")
def _attention(make: Specializer, call: KernelCall) -> list[KernelCall]:
    q, k, v, mask, out = KERNELS[call.kernel].bind(call)
    assert q is not None and k is not None and v is not None and out is not None
    inputs = {"q": q, "k": k, "v": v, "mask": mask}
    batch, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    rows = queries * (heads // kv_heads)
    threads = _WARPS * WARP
    if not _suits_tensor_cores(q, k, v):
        width = min(v.shape[3], _SLICE)
        blocks = batch * kv_heads * rows * groups(v.shape[3], width)
        return [make.kernel(call, "attention.cu", function="attention_plain", inputs=inputs, outputs={"out": out},
                            grid=(blocks, 1, 1), block=(threads, 1, 1), constants={"slice": width})]  # fmt: skip
    row_blocks = groups(rows, _BLOCK_ROWS)
    if queries > FEW_QUERIES or max(batch, kv_heads * row_blocks) > MAX_GRID[1]:
        blocks = batch * kv_heads * groups(rows, _WARPS * _BLOCK_ROWS)
        return [make.kernel(call, "attention.cu", function="attention_tiled", inputs=inputs, outputs={"out": out},
                            grid=(blocks, 1, 1), block=(threads, 1, 1), resident=_RESIDENT)]  # fmt: skip
    splits = min(groups(keys, _WARPS * _BLOCK_KEYS), groups(_FILLING_BLOCKS, batch * kv_heads * row_blocks))
    grid, constants = (splits, kv_heads * row_blocks, batch), {"splits": splits}
    if splits == 1:
        return [make.kernel(call, "attention.cu", function="attention_once", inputs=inputs, outputs={"out": out},
                            grid=grid, block=(threads, 1, 1), constants=constants, resident=_RESIDENT)]  # fmt: skip
    sums = make.temporary(call.node, (batch, kv_heads, rows, splits, v.shape[3]), "float32")
    stats = make.temporary(call.node, (*sums.shape[:-1], 2), "float32")
    split = make.kernel(call, "attention.cu", function="attention_split", inputs=inputs,
                        outputs={"sums": sums, "stats": stats}, grid=grid, block=(threads, 1, 1),
                        constants=constants, resident=_RESIDENT)  # fmt: skip
    combine = make.kernel(call, "attention.cu", function="attention_combine", inputs={"sums": sums, "stats": stats},
                          outputs={"out": out}, grid=(batch * kv_heads * rows, 1, 1),
                          block=(groups(v.shape[3], WARP) * WARP, 1, 1), constants=constants)  # fmt: skip
    return [split, replace(combine, flops=0, bytes_moved=0)]


def _suits_tensor_cores(q: View, k: View, v: View) -> bool:
    """16-bit operands of one type whose rows are whole 16-byte pieces, and narrow enough for registers."""
    alike = q.dtype == k.dtype == v.dtype and q.dtype in HALF_DTYPES
    widths = (q.shape[3], v.shape[3])
    pieces = all(width % 8 == 0 and width <= _WIDEST for width in widths)
    return alike and pieces and k.shape[2] > 0 and all(vector_width(view) >= 8 for view in (q, k, v))
