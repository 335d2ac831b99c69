"""Mutants of tile programs: one thing changed that a correct compiler would not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tile_programs import memories

from npu_compiler.errors import ProgramFormatError
from npu_compiler.graph.dtypes import itemsize, numpy_dtype
from npu_model.chip import Chip
from npu_model.isa.assembly import instruction_text
from npu_model.isa.instructions import Affine, Axis, Instruction, Loop, Node, Section, Tile, TileProgram, instructions
from npu_model.isa.verifier import verify
from npu_model.machine.machine import Machine
from npu_model.machine.memory import MachineError

Arrays = dict[str, np.ndarray]
Body = tuple[Node, ...]


@dataclass(frozen=True)
class Mutant:
    """A changed program.

    Attributes:
        kind: `wait`, `signal`, `address`, `box`, `pad`, `slot` or `order`.
        what: Which instruction, and what is changed of it.
        pair: The instructions that change places.
        instruction, operand: The instruction that is changed, as it was, and of which operand an address or a place.
    """

    kind: str
    what: str
    program: TileProgram
    pair: tuple[Instruction, Instruction] | None = None
    instruction: Instruction | None = None
    operand: str = ""


def mutants(program: TileProgram) -> list[Mutant]:
    """All mutants of a program's sections."""
    return [
        replace(mutant, program=_with_body(program, number, body), what=f"{section.node}: {mutant.what}")
        for number, section in enumerate(program.sections)
        for mutant, body in _of_body(section.body, program)
    ]


def _with_body(program: TileProgram, number: int, body: Body) -> TileProgram:
    sections = list(program.sections)
    sections[number] = replace(sections[number], body=body)
    return replace(program, sections=tuple(sections))


def _of_body(body: Body, program: TileProgram) -> Iterator[tuple[Mutant, Body]]:
    """Mutants, whose program is not yet changed, with their changed body."""
    for number, node in enumerate(body):

        def put(*nodes: Node, number: int = number) -> Body:
            return (*body[:number], *nodes, *body[number + 1 :])

        if isinstance(node, Loop):
            for mutant, inner in _of_body(node.body, program):
                yield mutant, put(Loop(node.count, inner))
            continue
        for kind, what, changed in _of_instruction(node):
            text = f"{node.engine} {instruction_text(node)[0]}: {what}"
            yield Mutant(kind, text, program, None, node, what.rpartition(" ")[0]), put(changed)
        for later in range(number + 1, len(body)):
            other = body[later]
            if isinstance(other, Loop):
                break
            if other.engine == node.engine:
                swapped = (*body[:number], other, *body[number + 1 : later], node, *body[later + 1 :])
                text = f"{node.engine} {instruction_text(node)[0]} after {instruction_text(other)[0]}"
                yield Mutant("order", text, program, (node, other)), swapped
                break


def _of_instruction(node: Instruction) -> Iterator[tuple[str, str, Instruction]]:
    for number, wait in enumerate(node.waits):
        yield "wait", f"{wait.token}", replace(node, waits=_without(node.waits, number))
    for number, token in enumerate(node.signals):
        yield "signal", f"{token}", replace(node, signals=_without(node.signals, number))
    for name, tile, put in _tiles(node):
        size = itemsize(tile.dtype)
        for step in (size, -size):
            yield "address", f"{name} {step:+}", put(replace(tile, address=tile.address + step))
        if tile.slots > 1:
            yield "slot", f"{name} next", put(replace(tile, turn=tile.turn + 1))
    for number, axis in enumerate(node.axes):
        if axis.size > 1:
            yield "box", f"axis {number} shorter", _with_axis(node, number, replace(axis, size=axis.size - 1))
        if axis.total != axis.size:
            yield "pad", f"axis {number} by one", _with_axis(node, number, replace(axis, start=axis.start + 1))


def _without(items: tuple, number: int) -> tuple:  # type: ignore[type-arg]
    return (*items[:number], *items[number + 1 :])


def _with_axis(node: Instruction, number: int, axis: Axis) -> Instruction:
    return replace(node, box=(*node.axes[:number], axis, *node.axes[number + 1 :]))  # type: ignore[call-arg]


def _tiles(node: Instruction) -> Iterator[tuple[str, Tile, Callable[[Tile], Instruction]]]:
    """Each operand, and a function that puts another one in its place."""
    for name in ("source", "target", "index", "left", "right", "sums", "right_zeros"):
        tile = getattr(node, name, None)
        if tile is not None:
            yield name, tile, lambda new, name=name: replace(node, **{name: new})
    for number, tile in enumerate(getattr(node, "inputs", ())):
        yield f"r{number}", tile, lambda new, n=number: replace(node, inputs=_put(node.inputs, n, new))  # type: ignore
    for number, (register, tile) in enumerate(getattr(node, "stores", ())):
        yield (
            f"store {number}", tile,
            lambda new, n=number, r=register: replace(node, stores=_put(node.stores, n, (r, new))),  # type: ignore
        )  # fmt: skip


def _put(items: tuple, number: int, item: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:number], item, *items[number + 1 :])


def random_arrays(program: TileProgram, seed: int) -> Arrays:
    """Random values for each buffer, of the dtype that it is read or written as."""
    rng = np.random.default_rng(seed)
    dtypes: dict[str, str] = {}
    for section in (*program.sections, *program.preload):
        for node, _ in instructions(section.body):
            for tile in (*node.reads, *node.writes):
                dtypes.setdefault(tile.buffer, "float16" if tile.dtype == "uint8" else tile.dtype)
    return {
        b.name: rng.standard_normal(b.size // itemsize(dtypes.get(b.name, "float16")))
        .astype(numpy_dtype(dtypes.get(b.name, "float16"))).view(np.uint8)
        for b in program.buffers
    }  # fmt: skip


def results(program: TileProgram, chip: Chip, arrays: Arrays) -> Arrays:
    """The buffers after a checked run of a program that the verifier takes."""
    verify(program, chip)
    own = {name: array.copy() for name, array in arrays.items()}
    machine = Machine(chip, program, memories(own), checked=True)
    machine.preload()
    machine.run()
    return own


def judge(mutant: Mutant, chip: Chip, arrays: Arrays, expected: Arrays) -> str:
    """The fate of a mutant: `refused`, `found`, `changed`, or `equal`."""
    try:
        outcome = results(mutant.program, chip, arrays)
    except ProgramFormatError:
        return "refused"
    except MachineError:
        return "found"
    return "equal" if all(np.array_equal(outcome[name], expected[name]) for name in expected) else "changed"


def is_read(mutant: Mutant, original: TileProgram) -> bool:
    """Whether some round reads the bytes of the operand that a mutant moves.

    Inputs that hold a first value in every round are not read.
    """
    assert mutant.instruction is not None
    if mutant.operand.startswith("r") and mutant.operand[1:].isdigit():
        return not _is_constant(mutant.instruction, int(mutant.operand[1:]))
    tile, counts = next(
        (tile, counts)
        for section in original.sections for node, counts in instructions(section.body) if node == mutant.instruction
        for name, tile, _ in _tiles(node) if name == mutant.operand
    )  # fmt: skip
    if tile.buffer:
        return True
    first, end = _span(tile, mutant.instruction, counts)
    return any(
        other.space == tile.space
        and _span(other, node, counts)[0] < end and first < _span(other, node, counts)[1]
        and not (name.startswith("r") and name[1:].isdigit() and _is_constant(node, int(name[1:])))
        for section in original.sections for node, counts in instructions(section.body)
        for name, other, _ in _tiles(node) if any(other is read for read in node.reads)
    )  # fmt: skip


def _is_constant(node: Instruction, number: int) -> bool:
    return not getattr(node, "begins", ()) and number in dict(getattr(node, "carried", ()))


def commute(first: Instruction, second: Instruction, sections: Sequence[Section]) -> bool:
    """Whether neither of two instructions writes to a memory's bytes that the other one touches in the same round."""
    operands = []
    for node in (first, second):
        counts = next(counts for section in sections for inner, counts in instructions(section.body) if inner == node)
        operands.append(
            [(tile, node, counts, writes)
             for tiles, writes in ((node.reads, False), (node.writes, True)) for tile in tiles]
        )  # fmt: skip
    return not any(
        (one[-1] or other[-1]) and (one[0].space, one[0].buffer) == (other[0].space, other[0].buffer)
        and _meet(*one[:-1], *other[:-1])
        for one in operands[0] for other in operands[1]
    )  # fmt: skip


def _meet(
    tile: Tile, node: Instruction, counts: Sequence[int], other: Tile, its_node: Instruction, its_counts: Sequence[int]
) -> bool:
    """Whether two operands may share bytes in a round; of places that move alike, whether they do in the first one."""
    if tile.address.steps == other.address.steps and (tile.slots, tile.slot_bytes, tile.turn) == (
        other.slots, other.slot_bytes, other.turn
    ):  # fmt: skip
        tile, other = (replace(each, address=Affine(each.address.base), slots=1) for each in (tile, other))
    low, high = _span(tile, node, counts)
    its_low, its_high = _span(other, its_node, its_counts)
    return low < its_high and its_low < high


def _span(tile: Tile, node: Instruction, counts: Sequence[int]) -> tuple[int, int]:
    low, high = tile.address.bounds(counts)
    for axis, stride in zip(node.axes, tile.strides, strict=True):
        low += min(0, (axis.size - 1) * stride)
        high += max(0, (axis.size - 1) * stride)
    return low, high + (tile.slots - 1) * tile.slot_bytes + itemsize(tile.dtype)
