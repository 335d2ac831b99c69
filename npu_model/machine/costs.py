"""Cost of single instructions on a chip (cycles, bytes and operations), without waits for other instructions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import NamedTuple, TypeAlias

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.elementwise import ELEMENTWISE
from npu_compiler.program.products import Product
from npu_model.chip import Chip, Dataflow, Matrix
from npu_model.chip.systolic import mapping, sram_accesses
from npu_model.isa.instructions import (
    Buffer,
    Compute,
    Engine,
    Fence,
    Instruction,
    Multiply,
    Role,
    Space,
    Tile,
    Transfer,
    core_number,
    kind_of,
)
from npu_model.machine.arithmetic import ALONG_AXES, COORDINATE, REDUCTIONS, RUNNING_SUM
from npu_model.machine.dram import Banks, banks_of


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one execution of an instruction.

    Attributes:
        cycles: Cycles that its engine is busy with it.
        latency: Further cycles until its results are complete, in which its engine may begin the next instruction.
        port_cycles: Part of `cycles` that is spent waiting for the scratchpad's ports.
        dram_read, dram_written: Bytes moved from and to DRAM.
        sram_bytes: Bytes read from and written to the scratchpad.
        l2_read, l2_written: Bytes moved from and to the shared L2.
        network: Bytes moved between cores.
        macs, operations: Multiply-accumulates; operations of vector lanes or of the output stage.
        dtype: Dtype that is multiplied; empty for other instructions.
    """

    cycles: int = 0
    dram_read: int = 0
    dram_written: int = 0
    sram_bytes: int = 0
    macs: int = 0
    operations: int = 0
    dtype: str = ""
    port_cycles: int = 0
    latency: int = 0
    network: int = 0
    l2_read: int = 0
    l2_written: int = 0


_NOTHING = Cost()
_MOST_ARRAYS = 32  # kinds of arrays whose products are remembered


class Moves(NamedTuple):
    """The amount of work of a transfer, independent of the chip.

    Attributes:
        filled: Bytes written, including fill values.
        read, written: Bytes moved from and to DRAM.
        inside: Bytes read from and written to the scratchpad.
        run, runs: Length in bytes of each contiguous run in DRAM, and number of runs.
        strides, extents, item: Access pattern in DRAM: byte strides, number of elements along each, and bytes of an
            element.
        path: The sending and the receiving cores of data that moves over the network; None if none does.
        l2_read, l2_written: Bytes moved from and to the shared L2.
        packed: Name of the source in DRAM if it has to be decoded; else empty.
    """

    filled: int
    read: int
    written: int
    inside: int
    run: int
    runs: int
    strides: tuple[int, ...]
    extents: tuple[int, ...]
    item: int
    path: tuple[str, ...] | None = None
    l2_read: int = 0
    l2_written: int = 0
    packed: str = ""

    @property
    def in_l2(self) -> Moves:
        """The work if the tensor in DRAM lay in the shared L2 instead."""
        return Moves(self.filled, 0, 0, self.inside, 0, 0, (), (), self.item, None, self.read, self.written)


class Multiplies(NamedTuple):
    """The amount of work of a product, independent of the chip.

    Attributes:
        batch, rows, columns, sums, window: Elements along the axes with these roles (`Role`).
        left, right: Bytes of an element of each operand.
        sparsity: N and M of the right operand, whose zeros are skipped; None if none are.
    """

    batch: int
    rows: int
    columns: int
    sums: int
    window: int
    dtype: str
    left: int
    right: int
    sparsity: tuple[int, int] | None = None

    @property
    def kept(self) -> int:
        """Products of a sum, over `sums`, that are not skipped."""
        return self.sums if self.sparsity is None else math.ceil(self.sums / self.sparsity[1]) * self.sparsity[0]


class Computes(NamedTuple):
    """The amount of work of a vector program, independent of the chip.

    Attributes:
        elements: Elements of its box.
        operations: Operations of vector lanes.
        moved: Bytes read from and written to the scratchpad.
        dtypes: Dtypes of its operands.
        on_output: Whether the output stage executes it, instead of the vector unit.
    """

    elements: int
    operations: int
    moved: int
    dtypes: frozenset[str]
    on_output: bool


Work: TypeAlias = Moves | Multiplies | Computes


class Costs:
    """The costs of instructions on one chip.

    Costs of equal products are computed once for all chips with the same arrays and scratchpad bandwidth.

    Args:
        buffers: The buffers of the program, of which some lie in DRAM in another form.
    """

    def __init__(self, chip: Chip, buffers: Iterable[Buffer] = ()) -> None:
        self.chip = chip
        self._packed = {
            buffer.name: (buffer.stored / buffer.size, _decoder(buffer, chip)) for buffer in buffers if buffer.stored
        }
        self._products = _products(repr((chip.matrix, chip.sram.bandwidth)))

    @cached_property
    def bytes_per_cycle(self) -> float:
        """DRAM bandwidth that transfers reach, in bytes per cycle: peak × `efficiency`, shared by reads and writes."""
        return self.chip.dram_bytes_per_cycle * self.chip.outside.efficiency

    @cached_property
    def burst_bytes(self) -> int:
        """Bytes of a DRAM burst, the granularity of its transfers."""
        return self.chip.outside.burst_bytes

    @cached_property
    def banks(self) -> Banks | None:
        """Timing model of DRAM's banks; None if the chip's file does not describe banks."""
        dram = self.chip.outside
        return None if dram.banks is None else banks_of(dram, self.chip.clock_ghz)

    def delay(self, core: str, other: str) -> int:
        """Network latency in cycles until one core sees a token or data that another one sent."""
        cores = self.chip.cores
        if core == other or cores is None:
            return 0
        hops = cores.hops(core_number(core), core_number(other))
        return math.ceil(hops * cores.network.latency_ns * self.chip.clock_ghz)

    def cost(self, instruction: Instruction, extents: Sequence[int], address: int = 0) -> Cost:
        """The cost of an execution in which `extents` elements exist along each axis of the box.

        Args:
            address: DRAM address at which a transfer begins; matters only for its position among channels and rows.
        """
        return self.of(work_of(instruction, extents), address)

    def of(self, work: Work | None, address: int = 0) -> Cost:
        """The cost of a given amount of work; zero for None."""
        if work is None:
            return _NOTHING
        if isinstance(work, Moves):
            return self._moves(work, address)
        if isinstance(work, Multiplies):
            return self._multiplies(work)
        return self._computes(work)

    def _moves(self, work: Moves, address: int) -> Cost:
        cycles, latency, network = work.filled / self.chip.sram.bandwidth, 0, 0
        if work.packed in self._packed:
            ratio, decoder = self._packed[work.packed]
            cycles = max(cycles, work.read / decoder)
            stored = math.ceil(work.read * ratio)  # in one run
            work, address = work._replace(read=stored, run=stored, runs=1), int(address * ratio)
            work = work._replace(strides=(1,), extents=(stored,), item=1)
        if work.read or work.written:
            burst = self.burst_bytes
            cycles = max(cycles, work.runs * -(-work.run // burst) * burst / self.bytes_per_cycle)
            if self.banks is not None:
                cycles = max(cycles, self.banks.cycles(address, work.strides, work.extents, work.item))
        if shared := work.l2_read + work.l2_written:
            assert self.chip.l2 is not None
            cycles = max(cycles, shared / self.chip.l2.bytes_per_cycle)
        if work.path is not None:
            assert self.chip.cores is not None
            cycles = max(cycles, work.filled * self.chip.clock_ghz / self.chip.cores.network.bandwidth_gb_s)
            sender, *receivers = work.path
            latency, network = max(self.delay(sender, core) for core in receivers), len(receivers) * work.filled
        own = work.l2_read, work.l2_written
        return Cost(
            math.ceil(cycles),
            work.read,
            work.written,
            work.inside,
            latency=latency,
            network=network,
            l2_read=own[0],
            l2_written=own[1],
        )

    def _multiplies(self, work: Multiplies) -> Cost:
        if work not in self._products:
            self._products[work] = self._product(work)
        cycles, accessed, ports = self._products[work]
        matrix = self.chip.matrix
        assert matrix is not None
        depth = _depth(matrix) if matrix.overlapped_folds else 0
        latency = math.ceil(depth / (matrix.rates[work.dtype] * matrix.efficiency))
        macs = work.batch * work.rows * work.columns * work.kept * work.window
        return Cost(cycles, 0, 0, accessed, macs, dtype=work.dtype, port_cycles=ports, latency=latency)

    def _product(self, work: Multiplies) -> tuple[int, int, int]:
        matrix = self.chip.matrix
        assert matrix is not None
        rate = matrix.rates.get(work.dtype)
        if rate is None:
            raise InputError(f"the matrix engine of chip '{self.chip.name}' does not multiply {work.dtype}")
        taps = 1 if matrix.windows == "columns" else work.window
        product = Product(work.rows, work.columns, work.kept * work.window // taps, work.batch * taps)
        dense = work.sums / work.kept  # the operands lie dense in the scratchpad, and are read whole
        return _array_time(product, self.chip, rate, work.left * dense, work.right * dense)

    def _computes(self, work: Computes) -> Cost:
        if work.on_output:
            assert self.chip.output is not None
            cycles = work.elements / self.chip.output.lanes
        else:
            cycles = work.operations / (self.chip.vector.lanes * self._vector_rate(work.dtypes))
        least = math.ceil(cycles)
        cycles = math.ceil(max(cycles, work.moved / self.chip.sram.bandwidth))
        return Cost(cycles, sram_bytes=work.moved, operations=work.operations, port_cycles=cycles - least)

    def _vector_rate(self, dtypes: Collection[str]) -> float:
        """Operations of a lane per cycle: the lowest rate among the dtypes that the program reads and writes."""
        rates = self.chip.vector.rates
        return min((rates[name] for name in dtypes if name in rates), default=min(rates.values()))


@lru_cache(maxsize=_MOST_ARRAYS)
def _products(arrays: str) -> dict[Multiplies, tuple[int, int, int]]:
    """The times of products so far (`_array_time`) on the arrays and scratchpad that a text says."""
    return {}


def _decoder(buffer: Buffer, chip: Chip) -> int:
    """Bytes per cycle that leave the decoder of a buffer's form."""
    own = chip.sparsity if buffer.pattern else chip.weights
    assert own is not None
    return own.decoder_bytes_per_cycle


def work_of(instruction: Instruction, extents: Sequence[int]) -> Work | None:
    """The work of an execution in which `extents` elements exist along each axis; None for a fence or if none exist."""
    if isinstance(instruction, Fence) or 0 in extents:
        return None
    if isinstance(instruction, Transfer):
        return _moves(instruction, extents)
    if isinstance(instruction, Multiply):
        return _multiplies(instruction, extents)
    assert isinstance(instruction, Compute)
    return _computes(instruction, extents)


def _moves(instruction: Transfer, extents: Sequence[int]) -> Moves:
    source, target = instruction.source, instruction.target
    size = itemsize(source.dtype)
    moved = size * math.prod(extents)
    filled = size * math.prod(axis.size for axis in instruction.box) if instruction.fill is not None else moved
    read, written = (moved if tile.space.has_buffers else 0 for tile in (source, target))
    index = instruction.index
    written_tiles = sum(tile.space is Space.SCRATCHPAD for tile in instruction.writes)
    inside = (moved if source.space is Space.SCRATCHPAD else 0) + filled * written_tiles
    if index is not None:
        inside += _distinct(index, extents) * itemsize(index.dtype)
    l2_read, l2_written = (moved if tile.space is Space.L2 else 0 for tile in (source, target))
    if not read and not written:
        return Moves(filled, 0, 0, inside, 0, 0, (), (), size, instruction.path, l2_read, l2_written)
    outside = source if source.space.has_buffers else target
    run, runs = _walk(outside, extents, size, index if outside is instruction.chosen else None)
    walked = run, runs, outside.strides, tuple(extents), size
    packed = source.buffer if source.space is Space.PACKED else ""
    return Moves(filled, read, written, inside, *walked, instruction.path, l2_read, l2_written, packed)


def _walk(tile: Tile, extents: Sequence[int], size: int, index: Tile | None) -> tuple[int, int]:
    """Length in bytes of each contiguous run of DRAM that a transfer accesses, and number of runs.

    DRAM is accessed in order of its addresses, whatever the order in the scratchpad. With an index, each indexed row is
    a run of its own.
    """
    run, runs = size, 1
    chosen = [False] * len(extents) if index is None else [True, *map(bool, index.strides[1:])]
    walked = sorted(zip(map(abs, tile.strides), extents, chosen, strict=True), key=lambda each: each[0])
    for stride, extent, is_chosen in walked:
        if stride == run and not is_chosen:
            run *= extent
        else:
            runs *= extent
    return run, runs


def _multiplies(instruction: Multiply, extents: Sequence[int]) -> Multiplies:
    sizes = dict.fromkeys(Role, 1)
    for role, extent in zip(instruction.roles, extents, strict=True):
        sizes[role] *= extent
    left, right = itemsize(instruction.left.dtype), itemsize(instruction.right.dtype)
    dtype = "int8" if left == 1 else (instruction.left if left >= right else instruction.right).dtype
    batch, rows, columns, sums, window = (
        sizes[role] for role in (Role.BATCH, Role.ROW, Role.COLUMN, Role.SUM, Role.WINDOW)
    )
    return Multiplies(batch, rows, columns, sums, window, dtype, left, right, instruction.sparsity)


def _computes(instruction: Compute, extents: Sequence[int]) -> Computes:
    elements = math.prod(extents)
    tiles = (*instruction.inputs, *instruction.writes)
    moved = sum(_distinct(tile, extents) * itemsize(tile.dtype) for tile in tiles if tile.space is Space.SCRATCHPAD)
    dtypes = {"int8" if t.dtype in ("uint8", "bool") else "float32" if t.dtype == "int32" else t.dtype for t in tiles}
    operations = max(elements, _lane_operations(instruction, extents))
    return Computes(elements, operations, moved, frozenset(dtypes), kind_of(instruction.engine) == Engine.OUTPUT)


def step_operations(op: str) -> int:
    """Operations of a lane for one element of a step: the number of operators and calls in its expression."""
    known = ELEMENTWISE.get(op)
    return 1 if known is None else known.operations


def _lane_operations(instruction: Compute, extents: Sequence[int]) -> int:
    """Operations of lanes for all steps; a step is counted once per distinct element, without broadcast repetitions.

    A running sum takes ⌈log2(axis size)⌉ passes of additions.
    """
    axes = [frozenset(axis for axis, stride in enumerate(tile.strides) if stride) for tile in instruction.inputs]
    total = 0
    for step in instruction.steps:
        own = frozenset({int(step.attrs[0])}) if step.op == COORDINATE else frozenset[int]()
        own = own.union(*(axes[operand] for operand in step.operands if isinstance(operand, int)))
        own |= frozenset(map(int, step.attrs)) if step.op in ALONG_AXES else frozenset()
        elements = math.prod(extents[axis] for axis in own)
        rounds = math.ceil(math.log2(max(2, extents[int(step.attrs[0])]))) if step.op == RUNNING_SUM else 1
        total += elements * step_operations(step.op) * rounds
        axes.append(own - frozenset(map(int, step.attrs)) if step.op in REDUCTIONS else own)
    return total


def _distinct(tile: Tile, extents: Sequence[int]) -> int:
    return math.prod(extent for extent, stride in zip(extents, tile.strides, strict=True) if stride)


def _array_time(product: Product, chip: Chip, rate: float, left: float, right: float) -> tuple[int, int, int]:
    """Time of a product on all arrays: (cycles, bytes read from the scratchpad, cycles spent waiting for its ports).

    The fastest division among the arrays is taken. Arrays read the scratchpad at once, so that fewer of them may be
    faster where its ports are the bottleneck.

    Args:
        rate: Multiply-accumulates of a processing element per cycle.
        left, right: Bytes of an element of each operand.
    """
    matrix = chip.matrix
    assert matrix is not None
    best: tuple[int, int, int] | None = None
    for arrays in _counts(matrix.arrays):
        for part, copies in _shares(product, arrays):
            cycles = fold_cycles(part, chip) / (rate * matrix.efficiency)
            accesses = sram_accesses(part, matrix.rows, matrix.columns, matrix.dataflow)
            size = int(copies * (accesses.input_reads * left + accesses.weight_reads * right) // part.batch)
            total = math.ceil(max(cycles, size / chip.sram.bandwidth))
            found = (total, size, total - math.ceil(cycles))
            best = found if best is None else min(best, found)
        if best is not None and not best[2] and arrays & (arrays - 1) == 0:
            break
    assert best is not None
    return best


_MANY_ARRAYS = 16


def _counts(arrays: int) -> list[int]:
    """Numbers of arrays to try, in descending order: each number up to 16, powers of two, and all."""
    powers = (1 << power for power in range(arrays.bit_length()))
    return sorted({arrays, *range(1, min(arrays, _MANY_ARRAYS) + 1), *powers}, reverse=True)


def _shares(product: Product, arrays: int) -> Iterator[tuple[Product, int]]:
    """Ways to divide a product among arrays: (the largest part of one array, number of parts that are computed in all).

    Arrays that divide the summed dimension add to the same sums in the accumulators.
    """
    if product.batch >= arrays:
        yield Product(product.m, product.n, product.k, -(-product.batch // arrays)), product.batch
        return
    for rows, columns, depths in _splits(arrays // product.batch):
        if rows <= product.m and columns <= product.n and depths <= product.k:
            part = Product(-(-product.m // rows), -(-product.n // columns), -(-product.k // depths), 1)
            yield part, rows * columns * depths * product.batch


@cache
def _splits(arrays: int) -> list[tuple[int, int, int]]:
    """The exact divisions of a number of arrays along rows, columns and the summed dimension."""
    factors = [part for part in range(1, arrays + 1) if arrays % part == 0]
    ways = [(a, b, arrays // a // b) for a in factors for b in factors if arrays // a % b == 0]
    return ways or [(arrays, 1, 1)]


def fold_cycles(product: Product, chip: Chip) -> int:
    """Cycles of one array for a product, without waiting for memory; folds are those of `npu_model.chip.systolic`.

    With overlapped folds, the stationary operand is replaced while the previous fold streams, and a fold begins to
    stream while the previous one's last results leave, also from one product to the next. The first load and the last
    results (the array's depth) are not counted here.
    """
    matrix = chip.matrix
    assert matrix is not None
    laid = mapping(product, matrix.rows, matrix.columns, matrix.dataflow)
    folds = laid.row_folds * laid.column_folds * product.batch
    if not matrix.overlapped_folds:
        return folds * (laid.time + _depth(matrix))
    return folds * max(laid.time, _load(matrix, min(laid.along_rows, matrix.rows)))


def _load(matrix: Matrix, rows: int) -> int:
    """Cycles to load the stationary operand into that many rows of the array; 0 if it is output stationary."""
    return 0 if matrix.dataflow is Dataflow.OUTPUT else -(-rows // matrix.load_rows)


def _depth(matrix: Matrix) -> int:
    """Cycles of a fold besides streaming: to load the stationary operand, and to drain the last results."""
    return _load(matrix, matrix.rows) + matrix.rows + matrix.columns - 2


__all__ = ["Cost", "Costs", "Work", "fold_cycles", "step_operations", "work_of"]
