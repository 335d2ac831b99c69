"""Lowering of kernel calls to the tile program of one chip: a file for each family of kernels.

Names that recur in these files:

- `e`, an `Emitter`: it writes the section (instructions) of one call, as if they ran one after the other.
- `o`, an `Operands`: the call's views and parameters as attributes, such as `o.x` or `o.k`.
- `tiling`: name → size of a tile, or another choice; `tilings` yields those to try, and the fastest is taken.
- axis, box: an axis has a size, a first coordinate (affine in the counters of loops) and the tensor's size; elements
  beyond that do not exist. A box has an axis, or (first coordinate, size), for each dimension.
- piece, tile: a piece is a box of a tensor that lies in a memory of the chip, from `e.load` (copied there), `e.room`
  (allocated for a result) or `e.result`. A tile is how one instruction reads or writes a piece.
- place: where a whole buffer lies; in `indexing.py`, `scattering.py` and `sorting.py`, an index of a row.
- `turn`, a `Round`: one iteration of the loops that `tiled` opens, with its box and loaded pieces.
- `begins`: depths of loops. A running value (sum, maximum) starts anew in iterations in which the counters of all these
  loops are 0. No loops, `()`: a vector program always starts anew, and `Multiply` never (None: always).
- `part`: the counter of a loop over parts of an axis, along which sums run.
- `elements`: about how many elements a tile of the result may have.
- `first`, `count`: the first coordinate of a box along its only varying dimension, and its number of elements.
- `queue`: number of a DMA engine, modulo their number, so that loads of different operands and stores run at once.
- `m`, `n`, `k`: rows and columns of a product's result, and terms of each of its sums; `tm`, `tn`, `tk` are sizes of
  tiles along them, as `tp`, `tq` are along rows and columns of images.
- `divisor`: number by which `tilings` divide all sizes, if none of the usual sizes fits the chip (`in_tiers`).
- A register of a `VectorProgram` is an int (`register`, `value`, `code`, `scale`); a float is a constant.
"""

from npu_model.lowering import (
    attention,
    convolutions,
    elementwise,
    indexing,
    integers,
    movement,
    pooling,
    products,
    quantized,
    rope,
    rows,
    scattering,
    sorting,
    transposed,
)

__all__ = [
    "attention",
    "convolutions",
    "elementwise",
    "indexing",
    "integers",
    "movement",
    "pooling",
    "products",
    "quantized",
    "rope",
    "rows",
    "scattering",
    "sorting",
    "transposed",
]
