"""Instructions bound to a machine's memories, ready to be executed.

Everything that is equal in all iterations is computed once for an instruction and the part of its box that lies inside
the tensor: addresses, the order of axes, the functions of a vector program. An iteration is then a few NumPy calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from npu_model.isa.instructions import Compute, Instruction, Multiply, Tile, Transfer
from npu_model.machine.arithmetic import VectorProgram, register
from npu_model.machine.memory import MachineError, Memories, Part, Ranges
from npu_model.machine.products import Work, product
from npu_model.machine.streams import Counters


class Execution:
    """An instruction bound to memories; calling it executes one iteration of its loops.

    Args:
        varying: Axes of which, in some iterations, some elements lie outside of the tensor.
    """

    def __init__(self, instruction: Instruction, varying: Sequence[int], memories: Memories) -> None:
        self.instruction = instruction
        self._memories = memories
        self._varying = [instruction.axes[position] for position in varying]
        self._by_ranges: dict[Ranges, Work] = {}

    def __call__(self, counters: Sequence[int]) -> None:
        """Execute the instruction in the iteration with these loop counters.

        Raises:
            MachineError: it accesses bytes outside of a memory, reads bytes that were never written, or an index is out
                of range.
        """
        key = tuple([axis.inside(counters) for axis in self._varying]) if self._varying else ()
        work = self._by_ranges.get(key)
        if work is None:
            ranges = [axis.inside(counters) for axis in self.instruction.axes]
            work = self._by_ranges[key] = _work(self.instruction, ranges, self._memories)
        work(counters)


Executed: TypeAlias = tuple[str, Execution, Counters]
"""An instruction that was executed: its node, its `Execution`, and the loop counters."""


def execute(node: str, execution: Execution, counters: Counters) -> None:
    """Execute an instruction in one iteration. Raises `MachineError`, which names node, instruction and iteration."""
    try:
        execution(counters)
    except (ArithmeticError, TypeError, ValueError, MachineError) as error:
        raise located(error, node, execution.instruction, counters) from error


def located(error: Exception, node: str, instruction: Instruction, counters: Counters) -> MachineError:
    """Wrap an error in a `MachineError` whose message names the instruction, its iteration and the node."""
    rounds = f" in round {', '.join(map(str, counters))}" if counters else ""
    where = f"{type(instruction).__name__.lower()} on {instruction.engine}{rounds} of node '{node}'"
    return MachineError(f"{where}{'' if isinstance(error, MachineError) else ' cannot be executed'}: {error}")


def _work(instruction: Instruction, ranges: Ranges, memories: Memories) -> Work:
    is_empty = any(end <= first for first, end in ranges)
    if isinstance(instruction, Transfer):
        move = _nothing if is_empty else _transfer(instruction, ranges, memories)
        return _filled(instruction, ranges, memories, move)
    if is_empty:
        return _nothing
    if isinstance(instruction, Multiply):
        return product(instruction, ranges, memories)
    if isinstance(instruction, Compute):
        return _compute(instruction, ranges, memories)
    return _nothing


def _nothing(counters: Sequence[int]) -> None:
    pass


def _filled(instruction: Transfer, ranges: Ranges, memories: Memories, move: Work) -> Work:
    """A transfer that first writes the fill value to the whole target, if some elements lie outside of the tensor."""
    everywhere = [(0, axis.size) for axis in instruction.box]
    if instruction.fill is None or ranges == everywhere:
        return move
    whole, fill = Part(instruction.target, everywhere, memories), instruction.fill

    def work(counters: Sequence[int]) -> None:
        whole.write(counters)[...] = fill
        move(counters)

    return work


def _transfer(instruction: Transfer, ranges: Ranges, memories: Memories) -> Work:
    if instruction.index is not None:
        return (_scatter if instruction.scatters else _gather)(instruction, instruction.index, ranges, memories)
    source, *targets = (Part(tile, ranges, memories) for tile in (instruction.source, *instruction.writes))

    def work(counters: Sequence[int]) -> None:
        values = source.read(counters)
        for target in targets:
            target.write(counters)[...] = values

    return work


def _gather(instruction: Transfer, index: Tile, ranges: Ranges, memories: Memories) -> Work:
    limit = instruction.index_limit
    source = Part(instruction.source, [(0, limit), *ranges[1:]], memories)
    target, chosen = Part(instruction.target, ranges, memories), Part(index, ranges, memories)

    def work(counters: Sequence[int]) -> None:
        places, whole = _places(chosen, limit, counters), source.read(counters)
        places = np.broadcast_to(places, [places.shape[0], *whole.shape[1:]])
        values = np.take_along_axis(whole, places, 0)
        target.write(counters)[...] = values

    return work


def _scatter(instruction: Transfer, index: Tile, ranges: Ranges, memories: Memories) -> Work:
    limit = instruction.index_limit
    source, chosen = Part(instruction.source, ranges, memories), Part(index, ranges, memories)
    target = Part(instruction.target, [(0, limit), *ranges[1:]], memories)
    shape = [end - first for first, end in ranges]

    def work(counters: Sequence[int]) -> None:
        places, rows = _places(chosen, limit, counters), source.read(counters)
        whole = target.write(counters, np.unique(places).tolist())
        np.put_along_axis(whole, np.broadcast_to(places, shape), np.broadcast_to(rows, shape), 0)

    return work


def _places(index: Part, limit: int, counters: Sequence[int]) -> np.ndarray:
    """Read an index tile: row numbers. Raises `IndexError` if one is out of range."""
    places = index.read(counters).astype(np.int64)
    least, most = places.min(), places.max()
    if least < 0 or most >= limit:
        raise IndexError(f"index {least if least < 0 else most} is out of range for {limit} rows")
    return places


def _compute(instruction: Compute, ranges: Ranges, memories: Memories) -> Work:
    inputs = [Part(tile, ranges, memories) for tile in instruction.inputs]
    stores = [(register, Part(tile, ranges, memories)) for register, tile in instruction.stores]
    program = VectorProgram(instruction.steps, instruction.box, ranges)
    first = {
        number: np.full([1] * len(ranges), value, np.int32 if inputs[number].dtype.kind in "iub" else np.float32)
        for number, value in instruction.carried
    }

    def work(counters: Sequence[int]) -> None:
        carried = first if first and instruction.begin(counters) else {}
        registers = program.run(
            [
                carried[number] if number in carried else register(part.read(counters))
                for number, part in enumerate(inputs)
            ],
            counters,
        )
        for number, part in stores:
            part.write(counters)[...] = registers[number]

    return work


__all__ = ["Executed", "Execution", "execute", "located"]
