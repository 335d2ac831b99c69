"""`verify`: refuses tile programs that the chip could not run, before any instruction runs.

An accepted program stays within the chip's memories and the program's buffers in every iteration of every loop, uses
engines, dtypes and operations that exist, and waits for no more signals than are raised. Deadlocks, and conflicting
accesses to the same bytes without a token between them, are detected by the machine at run time.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NoReturn

import numpy as np

from npu_compiler.errors import ProgramFormatError
from npu_compiler.graph.dtypes import KNOWN_DTYPES, is_float, itemsize
from npu_compiler.program.elementwise import ELEMENTWISE
from npu_model.chip import Chip
from npu_model.isa.instructions import (
    MAX_LOOPS,
    ZERO,
    Affine,
    Axis,
    Buffer,
    Compute,
    Engine,
    Fence,
    Instruction,
    Loop,
    Multiply,
    Node,
    Role,
    Section,
    Space,
    Step,
    Tile,
    TileProgram,
    Token,
    Transfer,
    core_name,
    core_of,
    has_whole_groups,
    is_transfer,
    kind_of,
)
from npu_model.machine.arithmetic import ALONG_AXES, COORDINATE, OPERATIONS, REDUCTIONS

MOST_EXECUTIONS = 2**24  # instructions of a run
MOST_TRANSFER_AXES = 5
MOST_AXES = 8
_MOST = 2**50  # no size, address or count is larger
_ENUMERATED = 2**16  # rounds that are gone through where bounds by themselves are too wide
_REUSE = 64  # elements of a product's operand, overlapping windows laid out, for each byte of the scratchpad
_MOST_ELEMENTS = 2**22  # of a vector program, where that is more than the memories hold
_COMPUTED = ("float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


def verify(program: TileProgram, chip: Chip) -> None:
    """Check that a chip can run a program.

    Raises:
        ProgramFormatError: it cannot; the message says which section and instruction, and what is wrong.
    """
    _Verifier(program, chip).run()


@dataclass(frozen=True)
class _Place:
    """Position of an instruction, for messages."""

    section: Section
    number: int
    instruction: Instruction

    def __str__(self) -> str:
        name = type(self.instruction).__name__.lower()
        return f"{name} {self.number} on {self.instruction.engine:.20} of section '{self.section.node:.60}'"


class _Verifier:
    def __init__(self, program: TileProgram, chip: Chip) -> None:
        self.program, self.chip = program, chip
        kinds = {Engine.VECTOR.value, *(f"{Engine.DMA}{queue}" for queue in range(chip.dma.channels))}
        kinds |= {Engine.MATRIX.value} if chip.matrix is not None else set()
        kinds |= {Engine.OUTPUT.value} if chip.output is not None else set()
        self.cores = [""] if chip.cores is None else [core_name(number) for number in range(chip.cores.count)]
        self.engines = {f"{core}.{kind}" if core else kind for core in self.cores for kind in kinds}
        self.buffers: dict[str, int] = {}
        self.packed: set[str] = set()
        self.executions = 0
        self.raised: Counter[Token] = Counter()
        self.where: object = "the tile program"

    def fail(self, problem: str) -> NoReturn:
        raise ProgramFormatError(f"{self.where}: {problem}")

    def need(self, condition: bool, problem: str) -> None:
        if not condition:
            self.fail(problem)

    def run(self) -> None:
        for buffer in self.program.buffers:
            self.need(buffer.name not in self.buffers, f"buffer '{buffer.name:.60}' is declared twice")
            self.need(buffer.name != "", "a buffer has no name")
            self.need(0 <= buffer.size <= _MOST, f"buffer '{buffer.name:.60}' has {buffer.size} bytes")
            self._form(buffer)
            self.buffers[buffer.name] = buffer.size
        for sections in (self.program.preload, self.program.sections):
            self.executions = 0
            for section in sections:
                self.where = f"section '{section.node:.60}'"
                self._loops(section.body, (), 1)
            for section in sections:
                for instruction, counts in self._instructions(section):
                    times = math.prod(counts)
                    for token in instruction.signals:
                        self.raised[token] += times
            for section in sections:
                for instruction, counts in self._instructions(section):
                    self._instruction(instruction, counts)

    def _form(self, buffer: Buffer) -> None:
        name = f"buffer '{buffer.name:.60}'"
        if not buffer.stored:
            self.need(not buffer.pattern, f"{name} has a pattern, but lies in DRAM as it is")
            return
        self.need(0 < buffer.stored <= _MOST and buffer.size > 0, f"{name} takes {buffer.stored} bytes")
        if not buffer.pattern:
            self.need(self.chip.weights is not None, f"{name} is compressed, but the chip has no decoder for that")
        else:
            known = () if self.chip.sparsity is None else self.chip.sparsity.patterns
            self.need(buffer.pattern in known, f"{name} has the pattern '{buffer.pattern:.10}', which the chip lacks")
        self.packed.add(buffer.name)

    def _loops(self, nodes: Sequence[Node], counts: tuple[int, ...], rounds: int) -> None:
        self.need(len(counts) <= MAX_LOOPS, f"loops are more than {MAX_LOOPS} deep")
        for node in nodes:
            if isinstance(node, Loop):
                self.need(node.count >= 1, f"a loop has {node.count} rounds")
                self.need(bool(node.body), "a loop is empty")
                self.need(rounds * node.count <= MOST_EXECUTIONS, f"loops have more than {MOST_EXECUTIONS} rounds")
                self._loops(node.body, (*counts, node.count), rounds * node.count)
            else:
                self.executions += rounds
                self.need(self.executions <= MOST_EXECUTIONS, f"a run has more than {MOST_EXECUTIONS} instructions")

    def _instructions(self, section: Section) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
        def walk(nodes: Sequence[Node], counts: tuple[int, ...]) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
            for node in nodes:
                if isinstance(node, Loop):
                    yield from walk(node.body, (*counts, node.count))
                else:
                    yield node, counts

        for number, (instruction, counts) in enumerate(walk(section.body, ())):
            self.where = _Place(section, number, instruction)
            yield instruction, counts

    # Instructions

    def _instruction(self, instruction: Instruction, counts: tuple[int, ...]) -> None:
        self.need(instruction.engine in self.engines, "the chip has no such engine")
        self._tokens(instruction, counts)
        for axis in instruction.axes:
            self.need(1 <= axis.size <= _MOST and 1 <= axis.total <= _MOST, f"an axis has {axis.size} of {axis.total}")
            self._bounded(axis.start, counts, "the start of an axis")
        for tile in (*instruction.reads, *instruction.writes):
            self._tile(tile, instruction, counts)
        if isinstance(instruction, Transfer):
            self._transfer(instruction, counts)
        elif isinstance(instruction, Multiply):
            self._multiply(instruction, counts)
        elif isinstance(instruction, Compute):
            self._compute(instruction, counts)
        else:
            self.need(isinstance(instruction, Fence), "it is none of the chip's instructions")

    def _tokens(self, instruction: Instruction, counts: tuple[int, ...]) -> None:
        limit = self.chip.control.tokens
        for token in (*instruction.signals, *(wait.token for wait in instruction.waits)):
            self.need(token.engine in self.engines, f"the chip has no engine '{token.engine:.20}' to raise a token")
            self.need(0 <= token.number < limit, f"token {token} is none of the engine's {limit}")
        for token in instruction.signals:
            self.need(token.engine == instruction.engine, f"it raises {token}, a token of another engine")
        for wait in instruction.waits:
            _, count = self._bounded(wait.count, counts, "a count that it waits for")
            most = self.raised[wait.token]
            self.need(count <= most, f"it waits for {wait.token} to be raised {count} times, which it is {most} times")

    def _bounded(self, value: Affine, counts: Sequence[int], name: str) -> tuple[int, int]:
        self.need(len(value.steps) <= len(counts), f"{name} depends on a loop that is not around it")
        low, high = value.bounds(counts)
        self.need(low >= -_MOST and high <= _MOST, f"{name} is out of range")
        return low, high

    def _begins(self, depths: Sequence[int], counts: Sequence[int]) -> None:
        for depth in depths:
            self.need(0 <= depth < len(counts), f"it begins with loop {depth}, which is not around it")

    # Operands

    def _tile(self, tile: Tile, instruction: Instruction, counts: Sequence[int]) -> None:
        self.need(tile.dtype in KNOWN_DTYPES, f"there is no dtype '{tile.dtype:.20}'")
        self.need(len(tile.strides) == len(instruction.axes), f"an operand has {len(tile.strides)} strides")
        self.need(all(abs(stride) <= _MOST for stride in tile.strides), "a stride is out of range")
        in_range = tile.slots >= 1 and tile.slot_bytes >= 0 and tile.slots * max(1, tile.slot_bytes) <= _MOST
        self.need(in_range, "the places of an operand are out of range")
        self.need(tile.slots > 1 or (not tile.slot_bytes and tile.turn == ZERO), "an operand of one place takes turns")
        self._bounded(tile.address, counts, "an address")
        self._bounded(tile.turn, counts, "the turn of an operand")
        size = itemsize(tile.dtype)
        for number in (tile.address.base, *tile.address.steps, *tile.strides, tile.slot_bytes):
            self.need(number % size == 0, f"{number} bytes are no multiple of {size}, for {tile.dtype}")
        if tile.space.has_buffers:
            self.need(tile.buffer in self.buffers, f"there is no buffer '{tile.buffer:.60}'")
            is_packed = tile.buffer in self.packed
            name = f"buffer '{tile.buffer:.60}'"
            self.need(is_packed or tile.space is Space.DRAM, f"{name} has no form of its own that could be decoded")
            self.need(not is_packed or tile.space is Space.PACKED, f"{name} has to be decoded on its way")
        elif tile.space is Space.L2:
            self.need(self.chip.l2 is not None and not tile.buffer, f"the chip has no L2 '{tile.buffer:.60}'")
        else:
            self.need(tile.buffer in self.cores, f"the chip has no core '{tile.buffer:.60}' with such a memory")
            own = core_of(instruction.engine)
            reaches = tile.buffer == own or isinstance(instruction, Transfer)
            self.need(reaches, f"an engine of {own} computes with the memory of {tile.buffer}")

    def _room(self, tile: Tile) -> tuple[int, str]:
        """Size in bytes of the memory or buffer that an operand is in, and its name for messages."""
        if tile.space.has_buffers:
            return self.buffers[tile.buffer], f"buffer '{tile.buffer:.60}'"
        if tile.space is Space.L2:
            return 0 if self.chip.l2 is None else self.chip.l2.size, "the L2"
        if tile.space is Space.SCRATCHPAD:
            return self.chip.sram.size, "the scratchpad"
        return self.chip.matrix.accumulator_bytes if self.chip.matrix else 0, "the accumulators"

    def _inside(self, tile: Tile, box: Sequence[Axis], counts: Sequence[int]) -> None:
        """Check that a box, without elements outside of the tensor, is within its memory in all iterations."""
        room, name = self._room(tile)
        low, high = _reach(tile, box, counts)
        if low < 0 or high > room:
            low, high = _exact_reach(tile, box, counts) or (low, high)
        self.need(low >= 0 and high <= room, f"bytes {low} to {high} are outside of {name} of {room} bytes")

    def _written(self, tile: Tile, box: Sequence[Axis]) -> None:
        """Check that an operand has no more elements than its memory, which bounds the work of simulating it."""
        room, name = self._room(tile)
        size = math.prod(min(axis.size, axis.total) for axis, stride in zip(box, tile.strides, strict=True) if stride)
        self.need(size * itemsize(tile.dtype) <= room, f"{size} elements are more than {name} of {room} bytes")

    def _transfer(self, instruction: Transfer, counts: Sequence[int]) -> None:
        source, target, box = instruction.source, instruction.target, instruction.box
        self.need(is_transfer(instruction.engine), "only DMA engines transfer")
        self.need(len(box) <= MOST_TRANSFER_AXES, f"a transfer has {len(box)} axes, more than {MOST_TRANSFER_AXES}")
        self.need(source.dtype == target.dtype, f"it transfers {source.dtype} to {target.dtype}")
        for tile in instruction.writes:
            for axis, stride in zip(box, tile.strides, strict=True):
                self.need(stride != 0 or axis.size == 1, "several elements go to one place")
        if instruction.others:
            self._multicast(instruction)
            for tile in instruction.others:
                self._written(tile, box)
                self._inside(tile, box, counts)
        own = core_of(instruction.engine)
        inside = [tile for tile in (source, target) if not tile.space.is_shared]
        self.need(not inside or own in {tile.buffer for tile in inside}, f"it moves nothing from or to {own}")
        self.need(target.space is not Space.PACKED, "weights in a form of their own are not written")
        for tile in (source, target):
            self.need(tile.space is not Space.ACCUMULATORS, "DMA engines do not reach the accumulators")
        self._fill(instruction.fill, target.dtype)
        index, limit = instruction.index, instruction.index_limit
        if index is None:
            self.need(not instruction.scatters and not limit, "it scatters or has a limit without an index")
            self._written(target, box)
            self._inside(source, box, counts)
            self._inside(target, box, counts)
        else:
            self.need(len(box) >= 1 and 1 <= limit <= _MOST, "an index has no axis or no limit")
            self.need(index.space is Space.SCRATCHPAD and index.dtype == "int32", "an index is int32 in the scratchpad")
            self.need(index.buffer == own, "an index is in another core's scratchpad")
            self._inside(index, box, counts)
            rows = (Axis(limit), *box[1:])
            self._written(target, rows if instruction.scatters else box)
            self._written(index, box)
            self._inside(source, box if instruction.scatters else rows, counts)
            self._inside(target, rows if instruction.scatters else box, counts)
        if instruction.fill is not None:
            whole = [Axis(axis.size) for axis in box]
            self._written(target, whole)
            self._inside(target, whole, counts)

    def _multicast(self, instruction: Transfer) -> None:
        cores, source, targets = self.chip.cores, instruction.source, instruction.writes
        self.need(cores is not None and cores.network.multicast, "the chip's network has no multicast")
        inside = all(tile.space is Space.SCRATCHPAD and tile.dtype == source.dtype for tile in targets)
        self.need(inside, "a multicast is to scratchpads, of one dtype")
        tiles = targets if source.space.is_shared else (source, *targets)
        self.need(len({tile.buffer for tile in tiles}) == len(tiles), "a multicast goes to one core twice")
        is_plain = instruction.index is None and instruction.fill is None
        self.need(is_plain, "a multicast neither gathers nor fills")

    def _fill(self, fill: float | int | None, dtype: str) -> None:
        if fill is None or is_float(dtype):
            return
        limits = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max) if "int" in dtype else None
        fits = limits is None or (math.isfinite(fill) and fill == int(fill) and limits[0] <= fill <= limits[1])
        self.need(fits, f"{fill} is no {dtype}")

    def _multiply(self, instruction: Multiply, counts: Sequence[int]) -> None:
        left, right, sums, box = instruction.left, instruction.right, instruction.sums, instruction.box
        matrix, roles = self.chip.matrix, instruction.roles
        self.need(
            kind_of(instruction.engine) == Engine.MATRIX and matrix is not None, "only the matrix engine multiplies"
        )
        assert matrix is not None
        self.need(len(roles) == len(box) <= MOST_AXES, f"a product has {len(box)} axes and {len(roles)} roles")
        is_integer = left.dtype in ("int8", "uint8")
        dtype = "int8" if is_integer else left.dtype
        self.need(dtype in matrix.rates, f"the chip multiplies {', '.join(matrix.rates)}, not {left.dtype}")
        self.need(is_float(dtype) or is_integer, f"it multiplies {left.dtype}")
        fits = right.dtype in ("int8", "uint8") if is_integer else is_float(right.dtype)
        self.need(fits, f"it multiplies {left.dtype} and {right.dtype}")
        self.need(sums.dtype == ("int32" if is_integer else "float32"), f"sums of {left.dtype} are not {sums.dtype}")
        self.need(sums.space is Space.ACCUMULATORS, "sums are in the accumulators")
        self.need({left.space, right.space} == {Space.SCRATCHPAD}, "what is multiplied is in the scratchpad")
        summed = (Role.SUM, Role.WINDOW)
        zeros = instruction.right_zeros
        for position, (role, axis) in enumerate(zip(roles, box, strict=True)):
            strides = [tile.strides[position] for tile in (left, right, sums)]
            absent = {Role.ROW: strides[1], Role.COLUMN: strides[0], Role.BATCH: 0}.get(role, strides[2])
            self.need(absent == 0, f"an operand has an axis of role {role} that is none of its own")
            self.need(role in summed or strides[2] != 0 or axis.size == 1, "several sums are in one place")
            has_zeros = zeros is not None and zeros.strides[position] != 0
            self.need(not has_zeros or role in (Role.COLUMN, Role.BATCH), "zeros belong to columns")
        most = _REUSE * self.chip.sram.size
        for other in (Role.ROW, Role.COLUMN):
            size = math.prod(axis.size for role, axis in zip(roles, box, strict=True) if role is not other)
            self.need(size <= most, f"it multiplies {size} elements, more than {most}")
        self.need(abs(instruction.left_zero) < 2**31, "the zero of the left operand is out of range")
        self.need(not instruction.left_zero or is_integer, "floats have no zero that is subtracted")
        if instruction.sparsity is not None:
            self._sparsity(instruction, instruction.sparsity)
        if zeros is not None:
            fits = zeros.dtype in ("int8", "uint8", "int32") and zeros.space is Space.SCRATCHPAD and is_integer
            self.need(fits, "the zeros of the right operand are integers in the scratchpad, of integers")
        self._begins(instruction.begins or (), counts)
        self._written(sums, box)
        for tile in (*instruction.reads, sums):
            self._inside(tile, box, counts)

    def _sparsity(self, instruction: Multiply, sparsity: tuple[int, int]) -> None:
        own, (kept, of) = self.chip.sparsity, sparsity
        skips = own is not None and own.skips_zeros and f"{kept}:{of}" in own.patterns
        self.need(skips, f"the matrix engine skips no zeros of {kept}:{of}")
        self.need(instruction.right_zeros is None, "zeros that are skipped have no zero points")
        axes = [axis for role, axis in zip(instruction.roles, instruction.box, strict=True) if role is Role.SUM]
        whole = len(axes) == 1 and has_whole_groups(axes[0], of)
        self.need(whole, f"a product with {kept}:{of} sums over parts of groups")

    def _compute(self, instruction: Compute, counts: Sequence[int]) -> None:
        box, inputs = instruction.box, instruction.inputs
        self.need(
            kind_of(instruction.engine) in (Engine.VECTOR, Engine.OUTPUT), "only vector and output engines compute"
        )
        self.need(len(box) <= MOST_AXES, f"a vector program has {len(box)} axes, more than {MOST_AXES}")
        most = self.chip.sram.size + (self.chip.matrix.accumulator_bytes if self.chip.matrix else 0)
        most = max(most, min(_REUSE * most, _MOST_ELEMENTS))  # windows overlap
        elements = math.prod(axis.size for axis in box)
        self.need(elements <= most, f"a vector program has {elements} elements, more than {most}")
        for tile in (*inputs, *instruction.writes):
            self.need(tile.dtype in _COMPUTED, f"vector programs do not compute {tile.dtype}")
            self.need(not tile.space.is_shared, "vector programs reach neither DRAM nor the L2")
            self._inside(tile, box, counts)
        self._begins(instruction.begins, counts)
        numbers = [number for number, _ in instruction.carried]
        fits = numbers == sorted(set(numbers)) and all(0 <= number < len(inputs) for number in numbers)
        self.need(fits, "inputs that are carried are out of order or none of its inputs")
        has_axes = [self._axes(tile, box) for tile in inputs]
        for step in instruction.steps:
            has_axes.append(self._step(step, has_axes, len(box)))
        self.need(bool(instruction.stores), "a vector program stores nothing")
        for register, tile in instruction.stores:
            self.need(0 <= register < len(has_axes), f"register {register} is not defined")
            several = {axis for axis in has_axes[register] if box[axis].size > 1}
            lacking = several - self._axes(tile, box)
            self.need(not lacking, f"several elements of register {register} go to one place")
            self._written(tile, box)

    @staticmethod
    def _axes(tile: Tile, box: Sequence[Axis]) -> set[int]:
        pairs = enumerate(zip(box, tile.strides, strict=True))
        return {position for position, (axis, stride) in pairs if stride and axis.size > 1}

    def _step(self, step: Step, has_axes: Sequence[set[int]], rank: int) -> set[int]:
        """Check a step of a vector program; return the axes along which its result varies."""
        name, registers = f"'{step.op:.40}'", [operand for operand in step.operands if isinstance(operand, int)]
        for register in registers:
            self.need(0 <= register < len(has_axes), f"{name} has register {register}, which is not defined")
        fits = not registers if step.op == COORDINATE else bool(registers) or step.op == "copy"  # of a constant
        self.need(fits, f"{name} has {len(registers)} registers")
        varies: set[int] = set().union(*(has_axes[register] for register in registers))
        if (op := ELEMENTWISE.get(step.op)) is not None:
            given, wanted = (len(step.operands), len(step.attrs)), (len(op.operands), len(op.attrs))
            self.need(given == wanted, f"{name} has {given[0]} operands and {given[1]} attributes, not {wanted}")
            return varies
        self.need(step.op in OPERATIONS or step.op == COORDINATE, f"there is no operation {name}")
        self.need(all(abs(value) < 2**31 for value in step.attrs), f"an attribute of {name} is out of range")
        if step.op in ALONG_AXES or step.op == COORDINATE:
            axes = {int(axis) for axis in step.attrs}
            fits = len(axes) == len(step.attrs) > 0 and axes <= set(range(rank)) and sorted(axes) == sorted(step.attrs)
            self.need(fits and (len(axes) == 1 or step.op in REDUCTIONS), f"{name} has axes {step.attrs} of {rank}")
            self.need(len(step.operands) == (step.op != COORDINATE), f"{name} has {len(step.operands)} operands")
            return varies - axes if step.op in REDUCTIONS else varies | axes
        try:
            inspect.signature(OPERATIONS[step.op]).bind(*step.operands, *step.attrs)
        except TypeError as error:
            self.fail(f"{name}: {error}")
        return varies


def _reach(tile: Tile, box: Sequence[Axis], counts: Sequence[int]) -> tuple[int, int]:
    """The first byte of an operand and one past its last, over all iterations; the range may be too wide.

    An element is at the operand's address + Σ its position in the box × stride; or, since that position is its
    coordinate less the start of the axis, at (address − Σ start × stride) + Σ coordinate × stride. Both forms are tried
    for each axis (operands in DRAM move with the axis, those in the scratchpad do not), and the narrowest range is
    returned.
    """
    strides = [(axis, stride) for axis, stride in zip(box, tile.strides, strict=True) if stride]
    moving = [position for position, (axis, _) in enumerate(strides) if axis.start != ZERO]
    best: tuple[int, int] | None = None
    for ways in product((True, False), repeat=len(moving)):
        by_coordinate = {position for position, way in zip(moving, ways, strict=True) if way}
        address, low, high = tile.address, 0, 0
        for position, (axis, stride) in enumerate(strides):
            least, most = axis.start.bounds(counts)
            first, last = max(0, -most), min(axis.size, axis.total - least) - 1
            if position in by_coordinate:
                address = address + axis.start * -stride
                first, last = max(0, least), min(axis.total, most + axis.size) - 1
            last = max(first, last)
            low += min(first * stride, last * stride)
            high += max(first * stride, last * stride)
        ends = address.bounds(counts)
        reach = ends[0] + low, ends[1] + high
        best = reach if best is None else (max(best[0], reach[0]), min(best[1], reach[1]))
    assert best is not None
    return best[0], best[1] + tile.slot_bytes * (tile.slots - 1) + itemsize(tile.dtype)


def _exact_reach(tile: Tile, box: Sequence[Axis], counts: Sequence[int]) -> tuple[int, int] | None:
    """Return the exact range of bytes over all iterations (see `_reach`), or None if there are too many to enumerate.

    The range is (0, 0) if no element exists.
    """
    extents = [axis.size * stride for axis, stride in zip(box, tile.strides, strict=True)]
    if math.prod(counts) > _ENUMERATED or max(map(abs, extents), default=0) > _MOST:
        return None
    counters = np.indices(counts).reshape(len(counts), math.prod(counts))

    def values(affine: Affine) -> np.ndarray:
        steps = np.array([*affine.steps, *[0] * (len(counts) - len(affine.steps))], np.int64)
        return affine.base + steps @ counters if counts else np.array([affine.base], np.int64)

    low = values(tile.address) + tile.slot_bytes * (values(tile.turn) % tile.slots)
    high, exists = low.copy(), np.ones(low.shape, bool)
    for axis, stride in zip(box, tile.strides, strict=True):
        start = values(axis.start)
        first, last = np.maximum(0, -start), np.minimum(axis.size, axis.total - start) - 1
        exists &= first <= last
        low += np.minimum(first * stride, last * stride)
        high += np.maximum(first * stride, last * stride)
    if not exists.any():
        return 0, 0
    return int(low[exists].min()), int(high[exists].max()) + itemsize(tile.dtype)


__all__ = ["MOST_AXES", "MOST_EXECUTIONS", "MOST_TRANSFER_AXES", "verify"]
