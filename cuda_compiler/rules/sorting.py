"""Rules of sorting: by counting for short rows, radix sort for long ones."""

from __future__ import annotations

from functools import partial

from cuda_compiler.specialization.sizes import groups
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View

_COUNTING_BLOCK = 256
_LONG_ROW = 4096  # beyond this, radix sort is faster than comparing each element with all others
_RADIX_BLOCK = 512
_TILE = 2048
_DIGIT_BITS = 8
# The bits of a sorting key that can differ; a 16-bit float has the key of the same float32.
_BITS = {"float32": (0, 32), "int32": (0, 32), "float16": (8, 32), "bfloat16": (16, 32), "bool": (0, 8)}


def _argsort(make: Specializer, call: KernelCall) -> list[KernelCall]:
    width = call.inputs[0].shape[-1]
    rows = call.inputs[0].numel // width
    if width > _LONG_ROW:
        return _radix_sort(make, call, rows, width)
    return [
        make.kernel(
            call, "sorting/sort.cu", grid=(rows, groups(width, _COUNTING_BLOCK), 1), block=(_COUNTING_BLOCK, 1, 1)
        )
    ]


def _radix_sort(make: Specializer, call: KernelCall, rows: int, width: int) -> list[KernelCall]:
    """The calls of a radix sort, two per digit: one counts, the other moves keys and indices to other buffers."""
    (x,), (out,) = call.inputs, call.outputs
    tiles = groups(width, _TILE)
    counts = make.temporary(out.buffer, (rows, tiles, 2**_DIGIT_BITS), "int32")
    ranks, orders = ([make.temporary(out.buffer, (rows, width), "int32") for _ in range(2)] for _ in range(2))
    calls = []
    before: dict[str, View | None] = {"x": x, "ranks": None, "before": None}
    low, high = _BITS[x.dtype]
    for number, shift in enumerate(range(low, high, _DIGIT_BITS)):
        is_last = shift + _DIGIT_BITS == high
        moved = {"moved": ranks[number % 2], "order": out if is_last else orders[number % 2]}
        constants = {"WIDTH": width, "TILE": _TILE, "SHIFT": shift}
        make_one = partial(
            make.kernel, call, "sorting/sort.cu", grid=(rows, tiles, 1), block=(_RADIX_BLOCK, 1, 1), constants=constants
        )
        source = {"x": before["x"], "ranks": before["ranks"]}
        calls += [
            make_one(function="count_digits", inputs=source, outputs={"counts": counts}),
            make_one(function="move_by_digit", inputs={**before, "counts": counts}, outputs=moved),
        ]
        before = {"x": None, "ranks": moved["moved"], "before": moved["order"]}
    return calls


RULES: dict[str, Rule] = {
    "argsort_kernel": _argsort,
}
