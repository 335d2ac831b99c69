"""Products of up to 16 rows on tensor cores, bound by reading their weight.

The kernels also compute the norm before and the gate after the product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from cuda_compiler.rules.gates import GATED, template_operands
from cuda_compiler.specialization.gpu import CLUSTERS_SHARING, WARP, memory_of_each
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.views import View

_FEWEST_ROWS, _MOST_ROWS = 3, 16  # with fewer, others read a large weight as fast; with more, cuBLASLt or tiles do
_FEWEST_ROWS_OF_SMALL, _SMALL = 2, 1 << 22  # elements of a weight that takes less time to read than a launch takes
_FEWEST_BYTES = 1 << 20  # of a 16-bit weight: smaller ones leave most multiprocessors idle
_FRAGMENT_ROWS = 16
_PIECE_TERMS = 32
_UNIT_ROWS = 8
_WARPS = (8, 16)
# Blocks of a cluster, the best first: one costs the least, and of large clusters each warp has the fewest terms.
_SPLITS = (1, 8, 4, 2)
_MOST_HELD, _MOST_HELD_OF_CODES = 12, 8  # fragments of x in a thread, of eight registers each
_SIDES = ("scales", "offset")
_RING_BYTES = 72 * 1024  # of a block: leaves room for the next kernel's first copies
_FEWEST_STAGES, _MOST_STAGES = 3, 8


@dataclass(frozen=True)
class WarpDivision:
    """The division of a product among blocks and warps, as `templates/matmul/streamed.cu` describes it.

    Attributes:
        tile_m: Rows of x, rounded up to whole tensor core fragments.
        warps, shared: Warps per block, and bytes of shared memory.
        splits, clusters: Number of blocks per cluster, and of clusters.
        pieces: Number of pieces (32 terms of each row of x) that a warp holds in registers.
        stages: Number of units (rows of the weight) that the ring in shared memory has room for.
    """

    tile_m: int
    warps: int
    splits: int
    clusters: int
    pieces: int
    stages: int
    shared: int


def suits_streaming(make: Specializer, call: KernelCall, inputs: Mapping[str, View | None]) -> bool:
    """Whether this kernel can compute a product, and is expected to be the fastest for its size.

    Args:
        inputs: The product's operands by name.
    """
    x, weight, data = (inputs.get(name) for name in ("x", "weight", "data"))
    m, n, k = (call.params[name] for name in "mnk")
    if (
        x is None
        or not make.gpu.has_clusters
        or not (_FEWEST_ROWS if n * k > _SMALL else _FEWEST_ROWS_OF_SMALL) <= m <= _MOST_ROWS
        or x.dtype not in HALF_DTYPES
        or not _has_rows(x)
        or k % 8
    ):
        return False
    if weight is not None:
        suits = weight.dtype == x.dtype and _has_rows(weight) and weight.numel * 2 >= _FEWEST_BYTES
    else:
        sides = [side for name in _SIDES if (side := inputs[name]) is not None]
        group = k // call.params["groups"]
        suits = data is not None and vector_width(data) >= 16 and group % _PIECE_TERMS == 0 and n % _UNIT_ROWS == 0
        suits = suits and all(side.is_contiguous and side.offset * itemsize(side.dtype) % 16 == 0 for side in sides)
    return suits and _division(make, call, inputs) is not None


def _has_rows(view: View) -> bool:
    return view.strides[1] == 1 and vector_width(view) >= 8


def _division(make: Specializer, call: KernelCall, inputs: Mapping[str, View | None]) -> WarpDivision | None:
    m, n, k = (call.params[name] for name in "mnk")
    sides = tuple(
        call.params["groups"] * itemsize(side.dtype) for name in _SIDES if (side := inputs.get(name)) is not None
    )
    bits = CODE_FORMATS[call.params["codes"]].bits if "codes" in call.params else 16
    return divided(m, n, k, call.kernel in GATED.values(), make.gpu.shared_memory, bits, sides)


def streamed_product(
    make: Specializer, call: KernelCall, inputs: dict[str, View | None], norm: KernelCall | None = None
) -> KernelCall:
    """The call of the kernel for a product for which `suits_streaming` holds.

    Args:
        inputs: x, the weight or its codes, scales and offsets, bias, residual.
        norm: The bfloat16 RMSNorm that computes x, without an offset to its gains, for the kernel to apply; None for
            none.
    """
    division = _division(make, call, inputs)
    assert division is not None
    inputs, constants = template_operands(call, inputs, norm)
    constants |= {
        "tile_m": division.tile_m,
        "splits": division.splits,
        "clusters": division.clusters,
        "pieces": division.pieces,
        "stages": division.stages,
    }
    file, parts = "matmul/streamed.cu", ["weight"]
    if "codes" in call.params:
        file, parts = "matmul/streamed_codes.cu", ["data", *_SIDES]
        constants |= {"pack": 8, "scaled_pieces": _scaled_pieces(call, division)}
    ahead = [inputs["gain"], *(inputs[name] for name in parts)]
    constants["ahead"] = all(view is None or make.never_written(view) for view in ahead)
    product = make.kernel(
        call,
        file,
        function="streamed",
        inputs=inputs,
        outputs={"out": call.outputs[0]},
        grid=(division.clusters, 1, division.splits),
        block=(division.warps * WARP, 1, 1),
        shared=division.shared,
        constants=constants,
        min_blocks=2 if division.warps == _WARPS[0] else 1,
        cluster=division.splits,
    )
    return replace(product, bytes_moved=sum(map(distinct_bytes, (*product.inputs, *product.outputs))))


def _scaled_pieces(call: KernelCall, division: WarpDivision) -> int:
    """Number of consecutive pieces of a warp's terms that always share one scale."""
    if call.params["groups"] == 1:
        return division.pieces
    pieces = groups(call.params["k"], _PIECE_TERMS)
    return math.gcd(division.pieces, groups(pieces, division.splits), pieces // call.params["groups"])


@cache
def divided(
    m: int, n: int, k: int, gated: bool, shared_memory: int, bits: int = 16, sides: tuple[int, ...] = ()
) -> WarpDivision | None:
    """The first division of which two blocks fit on a multiprocessor, or else the first that fits; None if none does.

    Args:
        m, n, k: Rows and columns of the result, and terms of a sum.
        gated: Whether the weight holds the rows of a gate, then those of what it multiplies.
        shared_memory: Bytes of shared memory that a block may have.
        bits: Bits of an element of the weight.
        sides: Bytes of a whole row's scales and of its offsets, for a quantized weight.
    """
    units, pieces = groups(n, _UNIT_ROWS), groups(k, _PIECE_TERMS)
    tile_m = groups(m, _FRAGMENT_ROWS) * _FRAGMENT_ROWS
    results = 4 * tile_m * _UNIT_ROWS  # bytes of a unit's sums
    side_bytes = sum(16 * groups(_UNIT_ROWS * side, 16) for side in sides)
    most_held = _MOST_HELD if bits == 16 else _MOST_HELD_OF_CODES
    fitting = []
    for splits in _SPLITS:
        for warps in _WARPS:
            own = groups(groups(pieces, splits), warps)
            clusters = min(CLUSTERS_SHARING[splits], units)
            kept = groups(units, clusters) * (2 if gated else 1) if splits > 1 else 1
            unit = _UNIT_ROWS * warps * own * _PIECE_TERMS * bits // 8 + side_bytes
            stages = min(_MOST_STAGES, max(_FEWEST_STAGES, _RING_BYTES // unit))
            shared = stages * unit + (2 * warps + kept) * results + 4 * tile_m * (warps + 1)
            if own * tile_m // _FRAGMENT_ROWS <= most_held and shared <= shared_memory:
                fitting.append(WarpDivision(tile_m, warps, splits, clusters, own, stages, shared))
    return next(
        (division for division in fitting if division.shared <= memory_of_each(shared_memory, 2)),
        fitting[0] if fitting else None,
    )
