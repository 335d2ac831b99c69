"""Reductions and running sums: vectorized, ragged, strided and multi-dimensional views; exact integers."""

from __future__ import annotations

from math import inf, nan, prod

import numpy as np
from metal_harness import Case, T

FLOAT_OPS = ("sum", "mean", "max", "min", "var", "std", "norm", "logsumexp")
INDEX_OPS = ("argmax", "argmin")
LOGICAL_OPS = ("any", "all")


def reduction(
    op: str, name: str, x: T, dims: int = 1, out: T | None = None, *, correction: float = 1.0, order: float = 2.0
) -> Case:
    """A reduction over the last `dims` dimensions; the output is dense unless given."""
    dtype = "int32" if op in INDEX_OPS else "bool" if op in LOGICAL_OPS else x.dtype
    made = out or T(x.shape[: len(x.shape) - dims], dtype)
    params = {"reduce_dims": dims, "correction": correction, "order": order}
    return Case(f"{op}_kernel", name, [x], [made], params, atol=3e-5)


SHAPES = {
    "one": (T((3, 1)), 1),
    "all-to-scalar": (T((7,)), 1),
    "scalar": (T(()), 0),
    "simd-group": (T((3, 31)), 1),
    "ragged": (T((2, 257)), 1),
    "vectorized": (T((3, 136)), 1),
    "vectorized-tail": (T((2, 135), strides=(140, 1), offset=8), 1),
    "several-rounds": (T((1, 1300)), 1),
    "two-dimensions": (T((3, 5, 28)), 2),
    "two-dimensions-with-gaps": (T((2, 9, 17), strides=(250, 20, 1)), 2),
    "channels-last": (T((2, 5, 7, 3), strides=(200, 1, 15, 5)), 2),
    "first-dimension": (T((5, 37), strides=(1, 6)), 1),
    "broadcast": (T((2, 3, 33), strides=(33, 0, 1)), 2),
    "column-of-vectors": (T((3, 8, 1), strides=(64, 8, 8)), 2),
    "float32": (T((2, 150), "float32"), 1),
}

# Eight rows, two SIMD groups long; the odd value is in the second one, or the only one of its kind.
ODD_ROWS = np.array(
    [
        [nan] * 150,
        [1.0] * 149 + [nan],
        [-inf] * 150,
        [1.0] * 149 + [-inf],
        [inf] * 150,
        [-1.0] * 149 + [inf],
        [0.0, -0.0] * 75,
        [-0.0, 0.0] * 75,
    ]
)
TIES = np.array([[3.0, 1.0, 3.0, 1.0] * 40, [0.0, -1.0, 2.0, 2.0, -1.0] * 32, [5.0] * 160, [-2.0] * 160])

CASES = [
    *(
        reduction(op, name, x, dims, correction=0.0 if prod(x.shape) == x.shape[-1:] else 1.0)
        for op in (*FLOAT_OPS, *INDEX_OPS)
        for name, (x, dims) in SHAPES.items()
    ),
    *(
        reduction(op, name, T((2, 2, 150), dtype, strides=strides, values=values), 1)
        for op in LOGICAL_OPS
        for dtype in ("compute", "int32", "bool")
        for name, strides, values in (
            (f"zeros-{dtype}", None, 0),
            (f"ones-{dtype}", None, 1),
            (f"last-differs-{dtype}", None, np.array([[[0] * 149 + [1], [1] * 149 + [0]]])),
            (f"mixed-{dtype}", (1, 2, 4), None),
        )
    ),
    *(reduction(op, "odd", T((8, 150), values=ODD_ROWS), 1) for op in (*FLOAT_OPS, *INDEX_OPS, "any", "all")),
    *(reduction(op, "odd-float32", T((8, 150), "float32", values=ODD_ROWS)) for op in (*FLOAT_OPS, *INDEX_OPS)),
    *(reduction(op, "special", T((6, 9), values="special")) for op in (*FLOAT_OPS, "prod", *INDEX_OPS)),
    *(reduction(op, "ties", T((4, 160), values=TIES)) for op in (*INDEX_OPS, "max", "min")),
    *(reduction(op, "integers", T((3, 150), "int32", values=(-(2**31), 2**31))) for op in ("max", "min", *INDEX_OPS)),
    *(reduction(op, "same-integers", T((2, 70), "int32", values=-(2**31))) for op in ("max", "min", *INDEX_OPS)),
    *(reduction(op, "bools", T((3, 140), "bool"), out=T((3,), "int32")) for op in ("max", "min")),
    *(reduction(op, "bool-to-bool", T((3, 40), "bool")) for op in ("max", "min")),
    *(
        reduction(op, "integers-two-dimensions", T((2, 3, 50), "int32", strides=(1, 100, 2)), 2)
        for op in ("sum", "max", "argmin")
    ),
    reduction("sum", "integers", T((3, 150), "int32", values=(-(2**31), 2**31))),
    reduction("sum", "bools", T((3, 150), "bool"), out=T((3,), "int32")),
    reduction("sum", "to-float32", T((3, 150)), out=T((3,), "float32")),
    reduction("sum", "to-strided", T((3, 4, 9)), out=T((3, 4), strides=(1, 5))),
    reduction("mean", "bools", T((3, 36), "bool"), out=T((3,), "float32")),
    reduction("mean", "integers", T((3, 36), "int32"), out=T((3,), "float32")),
    reduction("prod", "integers", T((4, 37), "int32", values=(1, 1000))),
    reduction("prod", "many-integers", T((3, 150), "int32", values=(-3, 4))),
    reduction("prod", "bools", T((3, 33), "bool", values=1), out=T((3,), "int32")),
    *(
        reduction("prod", name, T(x.shape, x.dtype, x.strides, x.offset, (0.97, 1.03)), dims)
        for name, (x, dims) in SHAPES.items()
    ),
    reduction("prod", "odd", T((8, 150), values=ODD_ROWS)),
    *(
        reduction(op, f"correction-{correction:g}", T((3, 135)), correction=correction)
        for op in ("var", "std")
        for correction in (0.0, 1.0, 2.5, 200.0)
    ),
    *(reduction(op, "far-from-zero", T((2, 150), values=(1000.0, 1010.0))) for op in ("var", "std")),
    *(
        reduction("norm", f"order-{order:g}", T((3, 137)), order=order)
        for order in (0.0, 1.0, 2.0, 3.0, 0.5, -1.5, inf, -inf)
    ),
    *(
        reduction("norm", f"odd-order-{order:g}", T((8, 150), values=ODD_ROWS), order=order)
        for order in (0.0, 1.0, 3.0, inf, -inf)
    ),
    reduction("norm", "zeros-among", T((2, 12), values=[[0.0, 1.0, -2.0] * 4, [0.0, -0.0, 0.0] * 4]), order=0.0),
    reduction("logsumexp", "large", T((2, 140), "float32", values=(-1e4, 1e4))),
    *(
        Case("cumsum_kernel", name, [x], [out], {}, atol=3e-5)
        for name, x, out in (
            ("one", T((2, 1)), T((2, 1))),
            ("simd-group", T((2, 32)), T((2, 32))),
            ("ragged", T((3, 71)), T((3, 71))),
            ("three-blocks", T((2, 600)), T((2, 600), "float32")),
            ("transposed", T((3, 40), strides=(1, 3)), T((3, 40), strides=(2, 7))),
            ("special", T((4, 70), values=ODD_ROWS[[1, 3, 5, 6], 80:]), T((4, 70))),
            ("integers", T((2, 300), "int32", values=(-(2**31), 2**31)), T((2, 300), "int32")),
            ("bools", T((3, 300), "bool"), T((3, 300), "int32")),
            ("integers-transposed", T((2, 2, 40), "int32", strides=(1, 90, 2)), T((2, 2, 40), "int32")),
        )
    ),
]
