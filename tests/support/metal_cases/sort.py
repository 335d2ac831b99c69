"""Sorting: odd lengths, equal elements, infinities, NaN and zeros of both signs, exact integers, strided views."""

from __future__ import annotations

import numpy as np
from metal_harness import Case, T

NAN = np.array([[np.nan, 1.0, -np.nan, -1.0, np.inf, -np.inf, 0.0] * 5, [-np.nan, 0.0, -0.0, np.nan, np.inf] * 7])

SHAPES = {
    "one": (T((3, 1)), T((3, 1), "int32")),
    "vector": (T((40,)), T((40,), "int32")),
    "ragged": (T((3, 71)), T((3, 71), "int32")),
    "float32": (T((2, 300), "float32"), T((2, 300), "int32")),
    "transposed": (T((3, 40), strides=(1, 3)), T((3, 40), "int32", strides=(2, 7))),
    "three-dimensions": (T((2, 3, 33), strides=(200, 1, 4)), T((2, 3, 33), "int32")),
    "equals": (T((3, 150), values="small"), T((3, 150), "int32")),
    "special": (T((4, 70), values="special"), T((4, 70), "int32")),
    "special-float32": (T((2, 150), "float32", values="special"), T((2, 150), "int32")),
    "nan-of-both-signs": (T((2, 35), values=NAN), T((2, 35), "int32")),
    "integers": (T((2, 150), "int32", values=(-(2**31), 2**31)), T((2, 150), "int32")),
    "least-integers": (T((1, 9), "int32", values=np.array([[0, -(2**31), 2**31 - 1] * 3])), T((1, 9), "int32")),
    "bools": (T((3, 140), "bool"), T((3, 140), "int32")),
}

CASES = [
    Case("argsort_kernel", f"{name}-{'down' if descending else 'up'}", [x], [order], {"descending": descending})
    for name, (x, order) in SHAPES.items()
    for descending in (False, True)
]
