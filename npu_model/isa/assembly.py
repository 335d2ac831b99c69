"""`disassemble`: writes tile programs as text, which `assemble` reads back to equal programs (docs/npu_isa.md).

An instruction is a line: its engine, operation, operands and box (the index space it iterates over), then, in the
margin or in a line of its own, the tokens that it waits for and raises. The steps of a vector program follow, a line
each. `t0`, `t1`, … are the counters of the enclosing loops, the outermost first. Strides are left out where an operand
is contiguous in the order of the box.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.views import contiguous_strides
from npu_model.isa.instructions import (
    ZERO,
    Affine,
    Axis,
    Buffer,
    Compute,
    Fence,
    Instruction,
    Loop,
    Multiply,
    Node,
    Role,
    Section,
    Space,
    Tile,
    TileProgram,
    Transfer,
    Value,
)
from npu_model.isa.traffic import traffic

_MARGIN = 80  # column at which waits and signals begin, in lines of at most so many:
_WIDTH = 150
NAME = r"[A-Za-z_]\w*(?:\.\w+)*"
IN_A_CORE = re.compile(
    rf"(?:(core\d+)\.)?({Space.SCRATCHPAD.value}|{Space.ACCUMULATORS.value}|{Space.L2.value})", re.ASCII
)


def disassemble(program: TileProgram) -> str:
    """The text of a program that has passed the verifier.

    Comments give the DRAM traffic of each section (kernel call).
    """
    lines = [f"chip {_word(program.chip)} {_word(program.digest)}"]
    lines += [_buffer_line(buffer) for buffer in program.buffers]
    for keyword, sections in (("preload", program.preload), ("section", program.sections)):
        for section in sections:
            lines += ["", *section_lines(section, keyword)]
    return "\n".join(lines) + "\n"


def _buffer_line(buffer: Buffer) -> str:
    pattern = f" sparse {buffer.pattern}" if buffer.pattern else ""
    return f"buffer {_word(buffer.name)} {buffer.size}" + (f" stored {buffer.stored}{pattern}" if buffer.stored else "")


def section_lines(section: Section, keyword: str = "section") -> Iterator[str]:
    """The lines of a section, which has the instructions of one kernel call; `keyword` is `section` or `preload`."""
    yield f"{keyword} {_word(section.node)} {_word(section.kernel)} {json.dumps(section.comment)}"
    yield from _node_lines(section.body, 0)
    read, written = traffic(section.body, Space.DRAM)
    yield f"  # {read:,} bytes read from DRAM, {written:,} written"
    if packed := traffic(section.body, Space.PACKED)[0]:
        yield f"  # {packed:,} bytes decoded of weights"
    if any(shared := traffic(section.body, Space.L2)):
        yield f"  # {shared[0]:,} bytes read from the L2, {shared[1]:,} written"


def _node_lines(nodes: Sequence[Node], depth: int) -> Iterator[str]:
    indent = "  " * (depth + 1)
    for node in nodes:
        if isinstance(node, Loop):
            yield f"{indent}loop t{depth} in {node.count}:"
            yield from _node_lines(node.body, depth + 1)
            continue
        does, *rest = instruction_text(node)
        line = f"{indent}{node.engine:<7} {does}"
        margin = "   ".join(_margin(node))
        beside = f"{line:<{_MARGIN}} {margin}".rstrip()
        if len(line) <= _MARGIN and len(beside) <= _WIDTH:
            yield beside
        else:
            yield from (line, f"{indent}{'':16}{margin}".rstrip())
        yield from (f"{indent}        {line}" for line in rest)


def _margin(instruction: Instruction) -> Iterator[str]:
    if instruction.waits:
        yield f"wait {', '.join(f'{wait.token} >= {_affine(wait.count)}' for wait in instruction.waits)}"
    if instruction.signals:
        yield f"signal {', '.join(map(str, instruction.signals))}"


def instruction_text(instruction: Instruction) -> list[str]:
    """Return an instruction as text: a line, and for a vector program a line for each input, step and store."""
    box = f"[{', '.join(map(_axis, instruction.axes))}]"
    if isinstance(instruction, Fence):
        return ["fence"]
    if isinstance(instruction, Transfer):
        return [" ".join(_transfer_words(instruction, box))]
    if isinstance(instruction, Multiply):
        return [" ".join(_multiply_words(instruction))]
    assert isinstance(instruction, Compute)
    carried = dict(instruction.carried)
    sizes = [axis.size for axis in instruction.box]
    lines = [f"compute {box}{_begin(instruction.begins)}"]
    for number, tile in enumerate(instruction.inputs):
        first = f" first {_number(carried[number])}" if number in carried else ""
        lines.append(f"r{number} = {_tile(tile, sizes)}{first}")
    for number, step in enumerate(instruction.steps, len(instruction.inputs)):
        operands = ", ".join(f"r{x}" if isinstance(x, int) else _number(x) for x in step.operands)
        attrs = f"; {', '.join(map(_number, step.attrs))}" if step.attrs else ""
        lines.append(f"r{number} = {step.op}({operands}{attrs})")
    return [*lines, *(f"{_tile(tile, sizes)} <- r{register}" for register, tile in instruction.stores)]


def _transfer_words(instruction: Transfer, box: str) -> Iterator[str]:
    is_read, is_written = (tile.space.is_shared for tile in (instruction.source, instruction.target))
    yield "copy   " if is_read == is_written else "load   " if is_read else "store  "
    sizes = [axis.size for axis in instruction.box]
    targets = " and ".join(_tile(tile, sizes) for tile in instruction.writes)
    yield f"{targets} <- {_tile(instruction.source, sizes)} {box}"
    if instruction.fill is not None:
        yield f"fill {_number(instruction.fill)}"
    if instruction.index is not None:
        word = "scatter" if instruction.scatters else "index"
        yield f"{word} {_tile(instruction.index, sizes)} below {instruction.index_limit}"


def _multiply_words(instruction: Multiply) -> Iterator[str]:
    yield "conv   " if Role.WINDOW in instruction.roles else "matmul "
    adds = "=" if instruction.begins is None else "+="
    sizes = [axis.size for axis in instruction.box]
    sums, left, right = (_tile(tile, sizes) for tile in (instruction.sums, instruction.left, instruction.right))
    yield f"{sums} {adds} {left} * {right}"
    axes = (f"{role.value} {_axis(axis)}" for role, axis in zip(instruction.roles, instruction.box, strict=True))
    yield f"[{', '.join(axes)}]{_begin(instruction.begins or ())}"
    if instruction.left_zero:
        yield f"left_zero {instruction.left_zero}"
    if instruction.right_zeros is not None:
        yield f"right_zeros {_tile(instruction.right_zeros, sizes)}"
    if instruction.sparsity is not None:
        yield f"sparse {instruction.sparsity[0]}:{instruction.sparsity[1]}"


def _begin(depths: Sequence[int]) -> str:
    return f" begin {', '.join(f't{depth}' for depth in depths)}" if depths else ""


def dense_strides(sizes: Sequence[int], dtype: str) -> tuple[int, ...]:
    """Strides in bytes of a contiguous array, row-major."""
    return tuple(stride * itemsize(dtype) for stride in contiguous_strides(sizes))


def _tile(tile: Tile, sizes: Sequence[int]) -> str:
    name = f"{tile.buffer}.{tile.space.value}" if tile.buffer else tile.space.value
    if tile.space.has_buffers:
        name = json.dumps(tile.buffer) if IN_A_CORE.fullmatch(tile.buffer) else _word(tile.buffer)
        name = f"{Space.PACKED} {name}" if tile.space is Space.PACKED else name
    place = _affine(tile.address)
    if (tile.slots, tile.slot_bytes, tile.turn) != (1, 0, ZERO):
        turn = _affine(tile.turn)
        turn = turn if re.fullmatch(r"\d+|(\d+\*)?t\d", turn) else f"({turn})"
        place = f"{'' if place == '0' else f'{place} + '}{tile.slot_bytes}*({turn} % {tile.slots})"
    strides = "" if tile.strides == dense_strides(sizes, tile.dtype) else f" ({', '.join(map(str, tile.strides))})"
    return f"{name}[{place}] {tile.dtype}{strides}"


def _axis(axis: Axis) -> str:
    start = f" at {_affine(axis.start)}" if axis.start != ZERO else ""
    total = f" of {axis.total}" if axis.total != axis.size else ""
    return f"{axis.size}{start}{total}"


def _affine(value: Affine) -> str:
    terms = [(s, f"t{depth}" if abs(s) == 1 else f"{abs(s)}*t{depth}") for depth, s in enumerate(value.steps)]
    terms.append((value.base, str(abs(value.base))))
    text = ""
    for factor, term in terms:
        if factor:
            sign = "-" if factor < 0 else "+" if text else ""
            text += f" {sign} {term}" if text else f"{sign}{term}"
    return text or "0"


def _number(value: Value) -> str:
    return repr(value)


def _word(text: str) -> str:
    """A name unchanged, or any other text in quotes."""
    return text if re.fullmatch(NAME, text, re.ASCII) else json.dumps(text)


__all__ = ["disassemble", "instruction_text", "section_lines"]
