"""Tiling: how a kernel call is cut into pieces that fit SRAM, found by a bounded search.

A tile is loaded while the one before is computed, so two of them lie in SRAM. Candidates are tile sizes (powers of two
times the array's size, and whole dimensions) and which side of a product is kept while the other passes by. They do not
depend on the size of SRAM, which only rules some of them out: what fits less SRAM stays a candidate for more. Each has
a lower bound on its time, from its traffic and from the folds of its tiles. Candidates are tried in the order of their
bounds until none can be better than the best, so the best of all is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product as combinations
from typing import Any

import numpy as np

from npu_compiler.errors import InputError
from npu_compiler.program.products import Product
from npu_model.chip import Chip, Matrix
from npu_model.measured import multiplied, slowdown
from npu_model.systolic import Dataflow, array_cycles, mapping, sram_accesses
from npu_model.work import Operations

_ACCUMULATOR = 4  # bytes of a sum
_SHORTEST_STREAM = 16  # elements


@dataclass(frozen=True)
class Side:
    """Bytes of an operand that come from DRAM: those that no call of a run writes, and others."""

    constant: int = 0
    changing: int = 0

    @property
    def total(self) -> int:
        return self.constant + self.changing


@dataclass(frozen=True)
class Demand:
    """What a call asks of a chip, given what stays in SRAM between calls; equal for equal layers.

    Attributes:
        left, right, element: What is read from DRAM, by role.
        stored: Bytes that are written to DRAM.
        kept: Bytes that the call reads and writes in SRAM only.
    """

    operations: Operations
    left: Side
    right: Side
    element: Side
    stored: int
    kept: int


@dataclass(frozen=True)
class Tiling:
    """A call in tiles, all alike: cycles and bytes are of one tile, on average.

    Attributes:
        shape: In words.
        array_cycles: Of the matrix arrays, without stalls; 0 where the vector unit multiplies.
        vector_cycles: Of the vector unit, without stalls.
        constants: Bytes loaded that no call of a run writes, so they can be loaded ahead of the calls before.
        inputs: Other bytes loaded.
        outputs: Bytes stored.
        sram_bytes: Read from SRAM and written to it, by engines and transfers.
        estimate: Cycles of the whole call by itself.
    """

    tiles: int
    shape: str
    array_cycles: float
    vector_cycles: float
    constants: float
    inputs: float
    outputs: float
    sram_bytes: float
    estimate: float


class Mapper:
    """Finds tilings for a chip, and remembers them."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self._known: dict[tuple[Demand, int], Tiling | None] = {}
        self._pieces: dict[tuple[Product, float, float, float], tuple[float, float]] = {}
        self._factors: dict[tuple[str, tuple[int, ...], str], float] = {}

    def tiling(self, demand: Demand, budget: int) -> Tiling | None:
        """The best tiling found with that many bytes of SRAM for tiles; None where not even the smallest tile fits."""
        key = (demand, budget)
        if key not in self._known:
            self._known[key] = self._product_tiling(*key) if demand.operations.products else self._plain_tiling(*key)
        return self._known[key]

    def _plain_tiling(self, demand: Demand, budget: int) -> Tiling | None:
        """A call that multiplies nothing, cut into equal parts."""
        footprint = demand.element.total + demand.stored
        rows = max(1, footprint // max(1, demand.operations.row_bytes or 64))
        least = max(1, -(-2 * footprint // budget))
        if demand.operations.row_bytes * 2 > budget or least > rows:
            return None
        cycles = demand.operations.vector_operations / self._chip.vector_rate(demand.operations.vector_dtype)
        cycles *= self._factor(demand)
        sram = 2 * footprint + demand.kept
        best: Tiling | None = None
        for doubling in range(6):
            tiles = min(rows, least << doubling)
            one = (cycles / tiles, demand.element.constant / tiles, demand.element.changing / tiles)
            found = self._tiling(
                "whole" if tiles == 1 else f"{tiles} parts", tiles, 0.0, *one, demand.stored / tiles, sram / tiles
            )
            if best is None or found.estimate < best.estimate:
                best = found
        return best

    def _product_tiling(self, demand: Demand, budget: int) -> Tiling | None:
        candidates = _candidates(demand, self._chip, budget, min(1.0, self._factor(demand)))
        if candidates is None:
            return None
        order = np.lexsort((candidates.tiles, candidates.bound))
        best: Tiling | None = None
        for index in order.tolist():
            if best is not None and candidates.bound[index] >= best.estimate:
                break
            found = self._evaluate(demand, candidates, index)
            if best is None or found.estimate < best.estimate:
                best = found
        return best

    def _evaluate(self, demand: Demand, found: Candidates, index: int) -> Tiling:
        """The exact cost of a candidate, by the arrays or by the vector unit, whichever is faster."""
        tile = tuple(int(size[index]) for size in (found.m, found.n, found.k, found.batch))
        tiles = int(found.tiles[index])
        operations, factor = demand.operations, self._factor(demand)
        least = least_cycles(operations, self._chip)
        vector = operations.vector_operations / self._chip.vector_rate(operations.vector_dtype) * factor / tiles
        loads = (float(found.constants[index]) / tiles, float(found.inputs[index]) / tiles, demand.stored / tiles)
        shape = f"{tile[0]}×{tile[1]}×{tile[2]}" + (f" ×{tile[3]}" if tile[3] > 1 else "")
        moved = sum(loads) + demand.kept / tiles
        results = []
        rate = self._chip.matrix_rate(operations.dtype)
        if self._chip.matrix is not None and rate is not None:
            cycles = accesses = 0.0
            for piece, count in _pieces(demand, tile):
                one_cycles, one_bytes = self._array_cost(piece, demand, self._chip.matrix, rate)
                cycles += count * one_cycles
                accesses += count * one_bytes
            cycles = max(factor * cycles, least)
            results.append(self._tiling(shape, tiles, cycles / tiles, vector, *loads, moved + accesses / tiles))
        by_vector = vector + max(factor * operations.macs / self._chip.vector_rate(operations.dtype), least) / tiles
        results.append(self._tiling(f"{shape} on lanes", tiles, 0.0, by_vector, *loads, 2 * moved))
        return min(results, key=lambda result: result.estimate)

    def _factor(self, demand: Demand) -> float:
        """By what factor the call's computing takes longer than rates and sizes say."""
        operations = demand.operations
        key = (operations.kind, operations.sizes, operations.dtype or operations.vector_dtype)
        if key not in self._factors:
            self._factors[key] = slowdown(self._chip.measured, *key)
        return self._factors[key]

    def _array_cost(self, piece: Product, demand: Demand, matrix: Matrix, rate: float) -> tuple[float, float]:
        """(cycles without memory stalls, bytes of SRAM that the arrays access) of a tile shared by arrays.

        Each array reads for itself, so where SRAM's ports would hold all of them up, fewer of them may be faster.
        """
        key = (piece, rate, demand.operations.left_bytes, demand.operations.right_bytes)
        if key not in self._pieces:
            best, arrays = (math.inf, 0.0, 0.0), matrix.arrays
            while arrays:
                for part, copies in _shares(piece, arrays):
                    cycles = fold_cycles(part, matrix) / rate
                    size = copies * _access_bytes(
                        part, matrix, demand.operations.left_bytes, demand.operations.right_bytes
                    )
                    best = min(best, (max(cycles, size / self._chip.sram.bandwidth), cycles, size))
                if best[1] == best[0]:
                    break
                arrays = 1 << (arrays - 1).bit_length() - 1 if arrays > 1 else 0
            self._pieces[key] = best[1:]
        return self._pieces[key]

    def _tiling(
        self,
        shape: str,
        tiles: int,
        array: float,
        vector: float,
        constants: float,
        inputs: float,
        outputs: float,
        sram_bytes: float,
    ) -> Tiling:
        chip = self._chip
        rate, latency = chip.dram_bytes_per_cycle, chip.dram_latency_cycles
        ports = sram_bytes / chip.sram.bandwidth
        load, store = (constants + inputs) / rate, outputs / rate
        array_time, vector_time = (max(array, ports), vector) if array else (0.0, max(vector, ports))
        transfers = (constants > 0) + (inputs > 0) + (outputs > 0)
        loads = latency + load if load else 0.0
        period = max(
            load + store,
            array_time,
            vector_time,
            (transfers * latency + load + store) / chip.dma.channels,
            (loads + array_time + vector_time) / 2,
        )
        fill = loads + array_time + vector_time + (latency + store if store else 0.0)
        estimate = fill + (tiles - 1) * period
        return Tiling(tiles, shape, array, vector, constants, inputs, outputs, sram_bytes, estimate)


@dataclass(frozen=True)
class Candidates:
    """Tilings of a product that fit, one per position: sizes of a tile, number of tiles, bytes loaded by all of them.

    Attributes:
        bound: Cycles that the call takes at least.
    """

    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    batch: np.ndarray
    tiles: np.ndarray
    constants: np.ndarray
    inputs: np.ndarray
    bound: np.ndarray


def _candidates(demand: Demand, chip: Chip, budget: int, factor: float) -> Candidates | None:
    """All tilings whose tiles fit twice into `budget` bytes; None where there is none.

    Args:
        factor: By which computing may be faster than rates and sizes say.
    """
    first, is_chain = demand.operations.products[0], len(demand.operations.products) > 1
    sizes = _tile_sizes(first, chip, is_chain)
    whole = np.array([(first.m, first.n, first.k, batch, 0) for batch in _powers(2, first.batch)], np.float64)
    parts = np.array(
        [(m, n, k, 1, right_kept) for m, n, k in combinations(*sizes) for right_kept in ((0,) if is_chain else (0, 1))],
        np.float64,
    )
    m, n, k, batch, right_kept = np.concatenate([parts, whole]).T
    along_m, along_n, along_k = np.ceil(first.m / m), np.ceil(first.n / n), np.ceil(first.k / k)
    along_batch = np.ceil(first.batch / batch)
    share_m, share_n = m / first.m, n / first.n
    left, right = demand.left.total / first.batch, demand.right.total / first.batch
    columns = demand.operations.products[-1].n if is_chain else n  # of the sums that a tile holds
    partial = (along_k > 1) | is_chain
    sums = np.where(partial, m * columns * batch * _ACCUMULATOR, 0.0) + (m * n * batch * _ACCUMULATOR) * is_chain
    results = (demand.element.total + demand.stored) / first.batch * share_m * batch
    footprint = (
        batch * (left * share_m * (k / first.k) + right * share_n * (1 if is_chain else k / first.k))
        + sums
        + results * (1 if is_chain else share_n)
    )
    fits = 2 * footprint <= budget
    if not fits.any():
        return None
    # How often each side is loaded: for m, for n, for k where the left is kept, else for n, for m, for k.
    single = along_n * along_k == 1
    left_times = np.where(
        right_kept == 1, np.where(along_m * along_k == 1, 1, along_n), np.where(along_k == 1, 1, along_n)
    )
    right_times = np.where(right_kept == 1, np.where(along_k == 1, 1, along_m), np.where(single, 1, along_m))
    constants = demand.left.constant * left_times + demand.right.constant * right_times + demand.element.constant
    inputs = demand.left.changing * left_times + demand.right.changing * right_times + demand.element.changing
    traffic = (constants + inputs + demand.stored) / chip.dram_bytes_per_cycle
    tiles = along_m * along_n * along_k * along_batch
    latency = chip.dram_latency_cycles * tiles / chip.dma.channels * ((constants > 0) | (inputs > 0))
    computed = demand.operations.macs / chip.vector_rate(demand.operations.dtype)
    rate = chip.matrix_rate(demand.operations.dtype)
    if chip.matrix is not None and rate is not None:
        tile = {"m": (first.m, m), "n": (first.n, n), "k": (first.k, k)}
        folded = _least_array_cycles(tile, chip.matrix) * first.batch
        if is_chain:
            later = demand.operations.products[1]
            folded += (
                _least_array_cycles({"m": tile["m"], "n": (later.n, later.n), "k": tile["n"]}, chip.matrix)
                * first.batch
            )
        fill = tiles * (chip.matrix.rows + chip.matrix.columns - 2)
        computed = np.minimum(computed, (folded / chip.matrix.arrays + fill) / rate)
    bound = np.maximum(
        np.maximum(traffic, latency),
        np.maximum(factor * computed, least_cycles(demand.operations, chip)),
    )
    chosen = [array[fits] for array in (m, n, k, batch, tiles, constants, inputs, bound)]
    return Candidates(*chosen)


def _least_array_cycles(sizes: Mapping[str, tuple[int, Any]], matrix: Matrix) -> Any:
    """Cycles of all tiles of one of the batches on one array, the filling and emptying of the array left out.

    Args:
        sizes: m, n and k of the product, and of a tile.
    """
    rows, columns, time = (sizes[name] for name in _laid_out(matrix.dataflow))
    load = 0 if matrix.dataflow is Dataflow.OUTPUT else matrix.rows
    streams = _over_tiles(*time, lambda size: np.maximum(size, load))
    return _over_tiles(*rows, lambda size: np.ceil(size / matrix.rows)) * (
        _over_tiles(*columns, lambda size: np.ceil(size / matrix.columns)) * streams
    )


def _over_tiles(size: int, step: Any, cost: Callable[[Any], Any]) -> Any:
    """The sum of a cost over the parts of `size` when it is cut every `step`."""
    whole = np.floor(size / step)
    rest = size - whole * step
    return whole * cost(step) + np.where(rest > 0, cost(np.maximum(rest, 1)), 0)


def _laid_out(dataflow: Dataflow) -> list[str]:
    """The sizes of a product, m, n or k, that lie along the rows, the columns and time."""
    laid = mapping(Product(m=1, n=2, k=3), 1, 1, dataflow)
    return ["mnk"[size - 1] for size in (laid.along_rows, laid.along_columns, laid.time)]


def _tile_sizes(first: Product, chip: Chip, is_chain: bool) -> tuple[list[int], list[int], list[int]]:
    """Tile sizes to try for m, n and k: powers of two times what fills an array, and the whole."""
    rows, columns = (1, 1) if chip.matrix is None else (chip.matrix.rows, chip.matrix.columns)
    dataflow = Dataflow.WEIGHT if chip.matrix is None else chip.matrix.dataflow
    least = dict(zip(_laid_out(dataflow), (rows, columns, _SHORTEST_STREAM), strict=True))
    given = (("m", first.m), ("n", first.n), ("k", first.k))
    sizes = [_powers(least[name], size) for name, size in given]
    return sizes[0], sizes[1], [first.k] if is_chain else sizes[2]


def _powers(least: int, size: int) -> list[int]:
    """least, 2 · least, … below `size`, and `size`."""
    return [*(least << step for step in range(64) if least << step < size), size] if least < size else [size]


def _pieces(demand: Demand, tile: tuple[int, ...]) -> Iterator[tuple[Product, int]]:
    """The products of all tiles, those at the edges smaller, each with the number of tiles like it."""
    m, n, k, batch = tile
    first = demand.operations.products[0]
    ends = [
        _cut(size, step) for size, step in zip((first.m, first.n, first.k, first.batch), (m, n, k, batch), strict=True)
    ]
    for (m, am), (n, an), (k, ak), (batch, ab) in combinations(*ends):
        count = am * an * ak * ab
        yield Product(m, n, k, batch), count
        for later in demand.operations.products[1:]:
            yield Product(m, later.n, n, batch), count


def _cut(size: int, step: int) -> list[tuple[int, int]]:
    """(length, how many) of the parts of `size` when it is cut every `step`."""
    whole, rest = divmod(size, step)
    return [(length, count) for length, count in ((step, whole), (rest, 1 if rest else 0)) if count]


_MANY_ARRAYS = 1024


def _shares(piece: Product, arrays: int) -> Iterator[tuple[Product, int]]:
    """The ways to share a product among arrays: the largest share, and how many arrays have one."""
    groups = min(piece.batch, arrays)
    batch, rest = -(-piece.batch // groups), arrays // groups
    seen = set()
    along_m = 1
    while along_m <= rest:
        along_n = rest // along_m
        if rest > _MANY_ARRAYS:  # of all divisions that cut n alike, only the smallest share is tried
            along_m = rest // along_n
        share = Product(-(-piece.m // along_m), -(-piece.n // along_n), piece.k, batch)
        if share not in seen:
            seen.add(share)
            used = -(-piece.m // share.m) * -(-piece.n // share.n) * -(-piece.batch // batch)
            yield share, used
        # On to where either part of the share may change: there are few such places, and may be many arrays.
        along_m = min(rest // along_n + 1, -(-piece.m // (share.m - 1)) if share.m > 1 else rest + 1)


def fold_cycles(product: Product, matrix: Matrix) -> float:
    """Cycles of a product on one array, for a dtype of rate 1, without memory stalls."""
    apart = array_cycles(product, matrix.rows, matrix.columns, matrix.dataflow).cycles
    if not matrix.overlapped_folds:
        return apart
    laid = mapping(product, matrix.rows, matrix.columns, matrix.dataflow)
    folds = laid.row_folds * laid.column_folds * product.batch
    load = 0 if matrix.dataflow is Dataflow.OUTPUT else matrix.rows
    together = folds * max(laid.time, load) + load + matrix.rows + matrix.columns - 2
    return min(apart, together)


def _access_bytes(product: Product, matrix: Matrix, left: float, right: float) -> float:
    """Bytes of SRAM that an array accesses for a product, its folds held in the block that needs the least."""
    found = []
    for doubling in range(matrix.held_folds.bit_length()):
        rows, columns = matrix.rows << doubling, matrix.columns * (matrix.held_folds >> doubling)
        access = sram_accesses(product, rows, columns, matrix.dataflow)
        sums = (access.output_writes + access.partial_reads) * _ACCUMULATOR
        found.append(access.input_reads * left + access.weight_reads * right + sums)
    return min(found)


def least_cycles(operations: Operations, chip: Chip) -> float:
    """Cycles that a call's products take at the chip's peak, whatever their sizes."""
    if not operations.macs:
        return 0.0
    share = multiplied(chip.measured, operations.kind, operations.sizes, operations.dtype)
    return share * operations.macs / chip.peak_macs(operations.dtype)


def no_tile(node: str, kernel: str, chip: Chip) -> InputError:
    """The error for a call whose smallest tile does not fit SRAM."""
    return InputError(
        f"kernel '{kernel}' at node '{node}' fits no SRAM of chip '{chip.name}': twice its smallest tile, which is "
        f"computed while the next one is loaded, is more than {chip.sram.size} bytes; give the chip a larger sram.size"
    )


__all__ = ["Demand", "Mapper", "Side", "Tiling", "fold_cycles", "least_cycles", "no_tile"]
