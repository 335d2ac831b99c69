"""Products of up to 16 rows with a 16-bit weight on tensor cores, with the norm before and the gate behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from cuda_compiler.specialization.gpu import HOPPER, MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.kernels import KERNELS, KernelCall, distinct_bytes
from npu_compiler.program.views import View

GATED = "gated_matmul_vec_kernel"  # whose weight has the rows of a gate, then as many others
FEWEST_ROWS, MOST_ROWS = 3, 16  # with fewer, a warp a column is as fast; with more, cuBLASLt is
_FEWEST_BYTES = 1 << 20  # of a weight: smaller ones leave most multiprocessors idle
_FRAGMENT_ROWS = 16
_PIECE_TERMS = 32
_UNIT_ROWS = 8
_WARPS = (8, 16)
# Blocks of a cluster → clusters that a GPU has room for; those of four and eight cannot use all multiprocessors. The
# best first: none cost the least, and of large ones each warp has the fewest terms.
_CLUSTERS = {1: MULTIPROCESSORS, 8: 16, 4: 32, 2: MULTIPROCESSORS // 2}
_MOST_HELD = 12  # fragments of x in a thread, of eight registers each
_RING_BYTES = 72 * 1024  # of a block: leaves room for the next kernel's first copies
_FEWEST_STAGES, _MOST_STAGES = 3, 8


@dataclass(frozen=True)
class Division:
    """How a product is divided among blocks and warps, as `templates/matmul/streamed.cu` describes it.

    Attributes:
        tile_m: Rows of x, rounded up to those of whole fragments.
        warps, shared: Of a block; bytes of shared memory.
        splits, clusters: Blocks of a cluster, and the number of clusters.
        pieces: Of 32 terms, of each row of x, that a warp holds.
        stages: Units of the weight that the ring has room for.
    """

    tile_m: int
    warps: int
    splits: int
    clusters: int
    pieces: int
    stages: int
    shared: int


def suits_streaming(make: Specializer, call: KernelCall, x: View, weight: View) -> bool:
    """Whether a product is one that this kernel makes faster than others."""
    m, n, k = (call.params[name] for name in "mnk")
    rows = all(view.strides[1] == 1 and vector_width(view) >= 8 for view in (x, weight))
    return (
        make.capability >= HOPPER
        and FEWEST_ROWS <= m <= MOST_ROWS
        and x.dtype == weight.dtype
        and x.dtype in HALF_DTYPES
        and rows
        and k % 8 == 0
        and weight.numel * 2 >= _FEWEST_BYTES
        and divided(m, n, k, call.kernel == GATED, make.shared_memory) is not None
    )


def streamed_product(
    make: Specializer, call: KernelCall, inputs: dict[str, View | None], norm: KernelCall | None = None
) -> KernelCall:
    """A product for which `suits_streaming` holds.

    Args:
        inputs: x, weight, bias, residual.
        norm: The RMSNorm that makes x, of bfloat16 and without an offset to its gains; the product takes its place.
    """
    m, n, k = (call.params[name] for name in "mnk")
    x, gain = inputs["x"], None
    if norm is not None:
        x, gain = KERNELS[norm.kernel].bind(norm)[:2]
    weight, gated = inputs["weight"], call.kernel == GATED
    found = divided(m, n, k, gated, make.shared_memory)
    assert weight is not None and found is not None
    made = make.kernel(
        call,
        "matmul/streamed.cu",
        function="streamed",
        inputs={**inputs, "x": x, "gain": gain},
        outputs={"out": call.outputs[0]},
        grid=(found.clusters, 1, found.splits),
        block=(found.warps * WARP, 1, 1),
        shared=found.shared,
        constants={
            "gated": gated,
            "normed": norm is not None,
            "norm_eps": float(norm.params["eps"]) if norm is not None else 0.0,
            "ahead": all(view is None or view.buffer in make.constants for view in (weight, gain)),
            "tile_m": found.tile_m,
            "splits": found.splits,
            "clusters": found.clusters,
            "pieces": found.pieces,
            "stages": found.stages,
        },
        min_blocks=2 if found.warps == _WARPS[0] else 1,
        cluster=found.splits,
    )
    return replace(made, bytes_moved=sum(map(distinct_bytes, (*made.inputs, *made.outputs))))


@cache
def divided(m: int, n: int, k: int, gated: bool, shared_memory: int) -> Division | None:
    """The first division that fits the registers and half of the shared memory, or else all of that."""
    units, pieces = groups(n, _UNIT_ROWS), groups(k, _PIECE_TERMS)
    tile_m = groups(m, _FRAGMENT_ROWS) * _FRAGMENT_ROWS
    results = 4 * tile_m * _UNIT_ROWS  # bytes of a unit's sums
    fitting = []
    for splits, most in _CLUSTERS.items():
        for warps in _WARPS:
            own = groups(groups(pieces, splits), warps)
            clusters = min(most, units)
            kept = groups(units, clusters) * (2 if gated else 1) if splits > 1 else 1
            unit = _UNIT_ROWS * warps * own * _PIECE_TERMS * 2
            stages = min(_MOST_STAGES, max(_FEWEST_STAGES, _RING_BYTES // unit))
            shared = stages * unit + (2 * warps + kept) * results + 4 * tile_m * (warps + 1)
            if own * tile_m // _FRAGMENT_ROWS <= _MOST_HELD and shared <= shared_memory:
                fitting.append(Division(tile_m, warps, splits, clusters, own, stages, shared))
    return next((found for found in fitting if found.shared <= shared_memory // 2), fitting[0] if fitting else None)
