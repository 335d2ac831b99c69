"""Rules of reductions and running sums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cuda_compiler.rules.rows import MOST_WARPS
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.dtypes import is_float, itemsize
from npu_compiler.ops.reductions import REDUCTIONS
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View, collapse, numel

_FEW_ROWS = 32
_LONG_ROW = 16384
_CHUNKS = 128  # blocks per long row
_INDEXED = ("argmax_kernel", "argmin_kernel")  # whose results depend on the order of the reduced dimensions
_THREADS = 256
FILLING = 512 * MULTIPROCESSORS  # threads that keep enough loads on their way
_LINE = 128  # bytes side by side that threads should read together
_LEAST_ACCESSES = 4  # of a thread, before more blocks share a result
_MOST_RESULTS = 8  # of a thread, as registers allow
_STATE_WORDS = 3  # the most that a thread knows of a result, in words of 32 bits


@dataclass(frozen=True)
class Walk:
    """The way in which threads walk the elements of a reduction (see `reduce.cu`).

    Attributes:
        x, out: The operands, with the dimensions in their order in memory; the reduced ones of `x` come last.
        kept: Number of kept dimensions.
        along: Whether the innermost dimension in memory is a reduced one.
        pack: Elements of an access.
        beside: Number of threads that should read neighbouring results side by side; 1 where those of one result
            lie together.
    """

    x: View
    out: View
    kept: int
    along: bool
    pack: int
    beside: int

    @property
    def results(self) -> int:
        """Number of results of a thread."""
        return 1 if self.along else self.pack

    @property
    def items(self) -> int:
        """Number of accesses to the elements of a result, without a last one that is not whole."""
        count = numel(self.x.shape[self.kept :])
        return count // self.pack if self.along else count

    @property
    def together(self) -> int:
        """Number of threads that should read elements of one result side by side."""
        by_walkers = self.along and self.beside == 1
        return _together(self.items, self.pack * itemsize(self.x.dtype)) if by_walkers else 1


def walk_of(x: View, out: View, kept: int, has_order: bool) -> Walk:
    """The walk over `x`, whose dimensions from `kept` on are reduced.

    Dimensions are merged where possible, so that more calls share a kernel.

    Args:
        has_order: Whether the results depend on the order of the reduced dimensions.
    """
    lead = _outermost_first(x, range(kept))
    inner = range(kept, x.rank) if has_order else _outermost_first(x, range(kept, x.rank))
    of_lead = ([view[dim] for dim in lead] for view in (x.shape, x.strides, out.strides))
    sizes, (x_steps, out_steps) = collapse(*of_lead)
    reduced, (steps,) = collapse(*([view[dim] for dim in inner] for view in (x.shape, x.strides)))
    along = bool(reduced and steps[-1]) and not (sizes and 0 < x_steps[-1] < steps[-1])
    innermost = (reduced if along else sizes or [1])[-1]
    order = (*sizes, *reduced), (*x_steps, *steps)
    if not along:
        order = (*reduced, *sizes), (*steps, *x_steps)
    pack = min(vector_width(replace(x, shape=order[0], strides=order[1])), 16 // itemsize(x.dtype), _MOST_RESULTS)
    while pack > 1 and innermost % pack and not (along and len(reduced) == 1 and innermost > pack):
        pack //= 2
    reduced, steps = (reduced, steps) if reduced else ([1], [1])
    x = replace(x, shape=(*sizes, *reduced), strides=(*x_steps, *steps))
    out = replace(out, shape=tuple(sizes), strides=tuple(out_steps))
    pack = pack if sizes or along else 1
    beside, access = 1, pack * itemsize(x.dtype)
    if not along:
        beside = _together((sizes or [1])[-1] // pack, access)
    elif sizes and len(steps) > 1 and x_steps[-1] < steps[-2] and reduced[-1] * itemsize(x.dtype) < _LINE:
        beside = _together(sizes[-1], x_steps[-1] * itemsize(x.dtype))  # each has a few elements before the next one's
    return Walk(x, out, len(sizes), along, pack, beside)


def _together(count: int, size: int) -> int:
    """Number of threads, a power of two, that read up to `count` neighbours of `size` bytes in one line of memory."""
    return power_of_two(max(1, min(count, _LINE // max(size, 1))))


def _outermost_first(view: View, dims: Iterable[int]) -> list[int]:
    """The dimensions by their steps in memory, descending; those of equal elements first."""
    return sorted(dims, key=lambda dim: -(view.strides[dim] or math.inf))


def _reduction(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """The call of a reduction, whose threads read neighbouring elements together, however the dimensions lie.

    Each result is shared by as many threads, and blocks, as are needed to fill the GPU.
    """
    (x,), (out,) = call.inputs, call.outputs
    if not out.numel:
        return []
    walk = walk_of(x, out, x.rank - call.params["reduce_dims"], call.kernel in _INDEXED)
    columns_of_all, items = out.numel // walk.results, walk.items
    walkers = max(groups(FILLING, columns_of_all), walk.together)
    walkers = min(power_of_two(max(1, min(walkers, items))), _THREADS // walk.beside)
    columns = _THREADS // walkers
    blocks, chunks = groups(columns_of_all, columns), 1
    if walkers * walk.beside == _THREADS and blocks < 2 * MULTIPROCESSORS:
        chunks = min(groups(2 * MULTIPROCESSORS, blocks), groups(items, walkers * _LEAST_ACCESSES))
    share = groups(items, chunks)
    chunks = groups(items, share)
    outputs: dict[str, View | None] = {"partial": None, "done": None, "out": walk.out}
    if chunks > 1:
        states = (blocks, chunks, columns * walk.results * _STATE_WORDS)
        outputs["partial"] = make.temporary(out.buffer, states, "int32")
        outputs["done"] = make.counters(out.buffer, blocks)
    constants = {
        "kept_dims": walk.kept,
        "along": walk.along,
        "by_walkers": walk.along and walk.beside == 1,
        "pack": walk.pack,
        "columns": columns,
        "walkers": walkers,
        "chunks": chunks,
        "share": share,
        "most_words": _STATE_WORDS,
    }
    return [
        make.kernel(
            replace(call, params={**call.params, "reduce_dims": walk.x.rank - walk.kept}),
            "reductions/reduce.cu",
            inputs={"x": walk.x},
            outputs=outputs,
            grid=(blocks * chunks, 1, 1),
            block=(_THREADS, 1, 1),
            constants=constants,
        )
    ]


def power_of_two(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def _running_sum(make: Specializer, call: KernelCall) -> list[KernelCall]:
    (x,), (out,) = call.inputs, call.outputs
    width = out.shape[-1]
    rows = out.numel // width
    warps = min(groups(width, WARP), MOST_WARPS)
    constants, block = {"team_warps": warps, "team_lanes": WARP, "teams": 1}, (warps * WARP, 1, 1)
    if rows > _FEW_ROWS or width < _LONG_ROW:
        return [make.kernel(call, "reductions/cumsum.cu", grid=(rows, 1, 1), block=block, constants=constants)]
    chunk = block[0] * groups(width, block[0] * _CHUNKS)
    chunks = groups(width, chunk)
    sums = make.temporary(out.buffer, (rows, chunks), "float32" if is_float(x.dtype) else "int32")
    grid, constants = (chunks, rows, 1), {**constants, "CHUNK": chunk}
    return [
        make.kernel(
            call,
            "reductions/cumsum.cu",
            function="sum_chunks",
            inputs={"x": x},
            outputs={"sums": sums},
            grid=grid,
            block=block,
            constants=constants,
        ),
        make.kernel(
            call,
            "reductions/cumsum.cu",
            function="cumsum_of_chunks",
            inputs={"x": x, "sums": sums},
            outputs={"out": out},
            grid=grid,
            block=block,
            constants=constants,
        ),
    ]


RULES: dict[str, Rule] = {
    **{f"{name}_kernel": _reduction for name in REDUCTIONS},
    "cumsum_kernel": _running_sum,
}
