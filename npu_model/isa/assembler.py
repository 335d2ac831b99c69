"""`assemble`: parses the text form of a tile program, as `disassemble` writes it (docs/npu_isa.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, TypeAlias

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import KNOWN_DTYPES
from npu_model.isa.assembly import IN_A_CORE, NAME, dense_strides
from npu_model.isa.instructions import (
    MAX_LOOPS,
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
    Step,
    Tile,
    TileProgram,
    Token,
    Transfer,
    Value,
    Wait,
)

_Operand: TypeAlias = "Callable[[Sequence[int]], Tile]"

_TOKENS = re.compile(
    rf"""(?P<string>"(?:[^"\\]|\\.)*")|(?P<float>\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+)|(?P<integer>\d+)|(?P<name>{NAME})"""
    r"|(?P<symbol><-|\+=|>=|[-+*%()\[\],;:=])|(?P<blank>\s+|\#.*)|(?P<unknown>.)",
    re.ASCII,
)


def assemble(text: str) -> TileProgram:
    """Parse the text of a tile program.

    Raises:
        InputError: the text is malformed; the message names the line and what was expected there.
    """
    lines = [line for number, words in enumerate(text.splitlines(), 1) if (line := _Line(number, words)).words]
    if not lines:
        raise InputError("the text has no line 'chip NAME DIGEST'")
    reader = _Reader(lines)
    return reader.program()


@dataclass(frozen=True)
class _Word:
    kind: str
    text: str


class _Line:
    """A line of the text, split into words; each method parses and consumes the next ones."""

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self.indent = len(text) - len(text.lstrip(" "))
        self.words = [
            _Word(str(match.lastgroup), match.group()) for match in _TOKENS.finditer(text) if match.lastgroup != "blank"
        ]
        self.at = 0

    @property
    def next(self) -> str:
        return self.words[self.at].text if self.at < len(self.words) else ""

    def fail(self, expected: str) -> NoReturn:
        raise InputError(f"line {self.number}: expected {expected}, not {self.next[:40] or 'the end of the line'!r}")

    def accepts(self, text: str) -> bool:
        """Consume the next word if it equals `text`; return whether it does."""
        accepted = self.next == text and self.words[self.at].kind != "string"
        self.at += accepted
        return accepted

    def expect(self, text: str) -> None:
        if not self.accepts(text):
            self.fail(repr(text))

    def take(self, kind: str, expected: str) -> str:
        if self.at >= len(self.words) or self.words[self.at].kind != kind:
            self.fail(expected)
        self.at += 1
        return self.words[self.at - 1].text

    def end(self) -> None:
        if self.at < len(self.words):
            self.fail("the end of the line")

    def string(self) -> str:
        try:
            return str(json.loads(self.take("string", "a text in quotes"), strict=False))
        except ValueError:
            self.at -= 1
            self.fail("a text in quotes")

    def word(self) -> str:
        is_string = self.at < len(self.words) and self.words[self.at].kind == "string"
        return self.string() if is_string else self.take("name", "a name")

    def integer(self) -> int:
        sign = -1 if self.accepts("-") else 1
        return sign * self._digits("an integer")

    def _digits(self, expected: str) -> int:
        text = self.take("integer", expected)
        if len(text) > 20:
            self.at -= 1
            self.fail("an integer of at most 20 digits")
        return int(text)

    def pattern(self) -> tuple[int, int] | None:
        """Parse `sparse N:M`; None if something else follows."""
        if not self.accepts("sparse"):
            return None
        kept = self.integer()
        self.expect(":")
        return kept, self.integer()

    def value(self) -> Value:
        sign = -1 if self.accepts("-") else 1
        if self.next in ("inf", "nan") or (self.at < len(self.words) and self.words[self.at].kind == "float"):
            self.at += 1
            return sign * float(self.words[self.at - 1].text)
        return sign * self._digits("a number")

    def numbered(self, letter: str, expected: str) -> int:
        """Parse a letter with a number behind it, as in `t0`, and return the number."""
        match = re.fullmatch(rf"{letter}(\d{{1,6}})", self.next, re.ASCII)
        if match is None:
            self.fail(expected)
        self.at += 1
        return int(match.group(1))

    def affine(self, depth: int) -> tuple[Affine, bool]:
        """Parse a sum of integers and loop counters, with `depth` loops around.

        Returns the sum, and whether a `SIZE*(TURN % SLOTS)` term follows, which makes a tile rotate among slots.
        """
        value = ZERO
        sign = -1 if self.accepts("-") else 1
        while True:
            term = self.words[self.at : self.at + 3]
            if len(term) == 3 and term[1].text == "*" and term[2].text == "(":
                return value, True
            value = value + self._term(depth) * sign
            if self.next not in ("+", "-"):
                return value, False
            sign = -1 if self.next == "-" else 1
            self.at += 1

    def _term(self, depth: int) -> Affine:
        if self.at < len(self.words) and self.words[self.at].kind == "integer":
            factor = self._digits("an integer")
            return self._counter(depth) * factor if self.accepts("*") else Affine(factor)
        return self._counter(depth)

    def _counter(self, depth: int) -> Affine:
        number = self.numbered("t", "an integer or the counter of a loop")
        if number >= depth:
            self.at -= 1
            self.fail(f"the counter of one of {depth} loops")
        return Affine(0, (0,) * number + (1,))

    def plain_affine(self, depth: int) -> Affine:
        value, has_turn = self.affine(depth)
        if has_turn:
            self.fail("a sum of integers and counters")
        return value

    def listed(self, close: str) -> Iterator[None]:
        """Iterate once for each item of a comma-separated list that ends with `close`; the caller parses the item."""
        if self.accepts(close):
            return
        while True:
            yield
            if self.accepts(close):
                return
            if not self.accepts(","):
                self.fail(f"',' or {close!r}")

    def tile(self, depth: int) -> _Operand:
        """Parse an operand; the result is a function from the sizes of the instruction's box to the complete `Tile`."""
        is_name = self.at < len(self.words) and self.words[self.at].kind == "name"
        name = self.word()
        is_packed = is_name and name == Space.PACKED and not self.accepts("[")
        if is_packed:
            name = self.word()
        if is_packed or name != Space.PACKED or not is_name:
            self.expect("[")
        address, has_turn = self.affine(depth)
        slot_bytes, turn, slots = 0, ZERO, 1
        if has_turn:
            slot_bytes = self._digits("an integer")
            self.expect("*")
            self.expect("(")
            if self.accepts("("):
                turn = self.plain_affine(depth)
                self.expect(")")
            else:
                turn = self._term(depth)
            self.expect("%")
            slots = self._digits("an integer")
            self.expect(")")
        self.expect("]")
        dtype = self.take("name", "a dtype")
        if dtype not in KNOWN_DTYPES:
            self.at -= 1
            self.fail(f"one of {', '.join(sorted(KNOWN_DTYPES))}")
        strides = tuple(self.integer() for _ in self.listed(")")) if self.accepts("(") else None
        inside = IN_A_CORE.fullmatch(name) if is_name else None
        space, buffer = (Space.DRAM, name) if inside is None else (Space(inside[2]), inside[1] or "")
        if is_packed:
            space, buffer = Space.PACKED, name

        def operand(sizes: Sequence[int]) -> Tile:
            steps = dense_strides(sizes, dtype) if strides is None else strides
            return Tile(space, dtype, address, steps, buffer, slots, slot_bytes, turn)

        return operand

    def axis(self, depth: int) -> Axis:
        size = self._digits("the size of an axis")
        start = self.plain_affine(depth) if self.accepts("at") else ZERO
        return Axis(size, start, self._digits("a size") if self.accepts("of") else size)

    def box(self, depth: int) -> tuple[Axis, ...]:
        self.expect("[")
        return tuple(self.axis(depth) for _ in self.listed("]"))

    def begins(self, depth: int) -> tuple[int, ...]:
        depths: list[int] = []
        if self.accepts("begin"):
            depths.append(self._depth(depth))
            while self.accepts(","):
                depths.append(self._depth(depth))
        return tuple(depths)

    def _depth(self, depth: int) -> int:
        number = self.numbered("t", "the counter of a loop")
        if number >= depth:
            self.at -= 1
            self.fail(f"the counter of one of {depth} loops")
        return number

    def token(self) -> Token:
        name = self.take("name", "a token such as 'dma0.1'")
        engine, _, number = name.rpartition(".")
        if not engine or not number.isdigit() or len(number) > 9:
            self.at -= 1
            self.fail("a token such as 'dma0.1'")
        return Token(engine, int(number))

    def margin(self, depth: int) -> tuple[tuple[Wait, ...], tuple[Token, ...]]:
        """Parse the waits and signals at the end of a line."""
        waits: list[Wait] = []
        signals: list[Token] = []
        if self.accepts("wait"):
            while not waits or self.accepts(","):
                token = self.token()
                self.expect(">=")
                waits.append(Wait(token, self.plain_affine(depth)))
        if self.accepts("signal"):
            while not signals or self.accepts(","):
                signals.append(self.token())
        self.end()
        return tuple(waits), tuple(signals)


class _Reader:
    """A parser of tile programs in text form, line by line."""

    def __init__(self, lines: Sequence[_Line]) -> None:
        self.lines = lines
        self.at = 0

    def _next(self) -> _Line | None:
        return self.lines[self.at] if self.at < len(self.lines) else None

    def program(self) -> TileProgram:
        line = self.lines[0]
        line.expect("chip")
        chip, digest = line.word(), line.word()
        line.end()
        self.at = 1
        buffers: list[Buffer] = []
        sections: dict[str, list[Section]] = {"preload": [], "section": []}
        while (line_ := self._next()) is not None:
            line = line_
            if line.accepts("buffer"):
                name, size = line.word(), line.integer()
                stored = line.integer() if line.accepts("stored") else 0
                pattern = line.pattern() if stored else None
                line.end()
                buffers.append(Buffer(name, size, stored, "" if pattern is None else "{}:{}".format(*pattern)))
                self.at += 1
            elif line.next in sections:
                keyword = line.take("name", "a section")
                node, kernel, comment = line.word(), line.word(), line.string()
                line.end()
                self.at += 1
                sections[keyword].append(Section(node, kernel, comment, self._body(line.indent, 0)))
            else:
                line.fail("'buffer', 'preload' or 'section'")
        return TileProgram(chip, digest, tuple(buffers), tuple(sections["preload"]), tuple(sections["section"]))

    def _body(self, outside: int, depth: int) -> tuple[Node, ...]:
        """Parse the instructions and loops that are indented by more than `outside`."""
        nodes: list[Node] = []
        indent: int | None = None
        while (line := self._next()) is not None and line.indent > outside:
            indent = line.indent if indent is None else indent
            if line.indent != indent:
                raise InputError(f"line {line.number}: expected an indentation of {indent}, not of {line.indent}")
            self.at += 1
            if line.accepts("loop"):
                nodes.append(self._loop(line, depth))
            else:
                nodes.append(self._instruction(line, depth))
        return tuple(nodes)

    def _loop(self, line: _Line, depth: int) -> Loop:
        if depth == MAX_LOOPS:
            line.fail(f"at most {MAX_LOOPS} loops within each other")
        line.expect(f"t{depth}")
        line.expect("in")
        count = line.integer()
        line.expect(":")
        line.end()
        body = self._body(line.indent, depth + 1)
        if not body:
            raise InputError(f"line {line.number}: expected instructions in the loop")
        return Loop(count, body)

    def _instruction(self, line: _Line, depth: int) -> Instruction:
        indent = line.indent
        engine = line.take("name", "an engine or 'loop'")
        read = {
            "fence": _fence, "load": _transfer, "store": _transfer, "copy": _transfer, "matmul": _multiply,
            "conv": _multiply, "compute": _compute,
        }.get(line.next)  # fmt: skip
        if read is None:
            line.fail("fence, load, store, copy, matmul, conv or compute")
        line.at += 1
        instruction = read(line, engine, depth)
        below = None if line.next else self._next()
        if below is not None and below.indent > line.indent and below.next in ("wait", "signal"):
            self.at += 1
            line = below
        waits, signals = line.margin(depth)
        if isinstance(instruction, Compute):
            instruction = self._steps(instruction, indent, depth)
        return replace(instruction, waits=waits, signals=signals)

    def _steps(self, compute: Compute, outside: int, depth: int) -> Compute:
        """Parse the vector program in the lines below a `compute` instruction."""
        inputs: list[Tile] = []
        steps: list[Step] = []
        stores: list[tuple[int, Tile]] = []
        carried: list[tuple[int, float]] = []
        sizes = [axis.size for axis in compute.box]
        while (line := self._next()) is not None and line.indent > outside:
            self.at += 1
            if [word.text for word in line.words[1:2]] == ["="]:
                if line.numbered("r", "a register") != len(inputs) + len(steps):
                    line.at -= 1
                    line.fail(f"r{len(inputs) + len(steps)}, the next register")
                line.expect("=")
                if [word.text for word in line.words[3:4]] == ["("]:
                    steps.append(_step(line))
                elif steps:
                    line.fail("an operation: inputs come before them")
                else:
                    inputs.append(line.tile(depth)(sizes))
                    if line.accepts("first"):
                        carried.append((len(inputs) - 1, float(line.value())))
            else:
                tile = line.tile(depth)(sizes)
                line.expect("<-")
                stores.append((line.numbered("r", "a register"), tile))
            line.end()
        return replace(compute, inputs=tuple(inputs), steps=tuple(steps), stores=tuple(stores), carried=tuple(carried))


def _step(line: _Line) -> Step:
    op = line.take("name", "an operation")
    line.expect("(")
    operands: list[Value] = []
    attrs: list[Value] = []
    while line.next not in (")", ";"):
        is_register = re.fullmatch(r"r\d+", line.next) is not None
        operands.append(line.numbered("r", "a register") if is_register else float(line.value()))
        if not line.accepts(","):
            break
    if line.accepts(";"):
        attrs.append(line.value())
        while line.accepts(","):
            attrs.append(line.value())
    line.expect(")")
    return Step(op, tuple(operands), tuple(attrs))


def _fence(line: _Line, engine: str, depth: int) -> Fence:
    return Fence(engine=engine)


def _transfer(line: _Line, engine: str, depth: int) -> Transfer:
    target, others = line.tile(depth), []
    while line.accepts("and"):
        others.append(line.tile(depth))
    line.expect("<-")
    source, box = line.tile(depth), line.box(depth)
    sizes = [axis.size for axis in box]
    fill = line.value() if line.accepts("fill") else None
    index, limit, scatters = None, 0, line.next == "scatter"
    if line.accepts("scatter") or line.accepts("index"):
        index = line.tile(depth)(sizes)
        line.expect("below")
        limit = line.integer()
    return Transfer(
        engine=engine,
        box=box,
        source=source(sizes),
        target=target(sizes),
        fill=fill,
        index=index,
        index_limit=limit,
        scatters=scatters,
        others=tuple(other(sizes) for other in others),
    )


def _multiply(line: _Line, engine: str, depth: int) -> Multiply:
    sums = line.tile(depth)
    adds = line.accepts("+=")
    if not adds:
        line.expect("=")
    left = line.tile(depth)
    line.expect("*")
    right = line.tile(depth)
    line.expect("[")
    roles: list[Role] = []
    box: list[Axis] = []
    for _ in line.listed("]"):
        if line.next not in [role.value for role in Role]:
            line.fail(f"one of {', '.join(Role)} and a size")
        roles.append(Role(line.take("name", "a role")))
        box.append(line.axis(depth))
    begins = line.begins(depth)
    sizes = [axis.size for axis in box]
    return Multiply(
        engine=engine,
        box=tuple(box),
        roles=tuple(roles),
        left=left(sizes),
        right=right(sizes),
        sums=sums(sizes),
        begins=begins if adds else None,
        left_zero=line.integer() if line.accepts("left_zero") else 0,
        right_zeros=line.tile(depth)(sizes) if line.accepts("right_zeros") else None,
        sparsity=line.pattern(),
    )


def _compute(line: _Line, engine: str, depth: int) -> Compute:
    box = line.box(depth)
    return Compute(engine=engine, box=box, inputs=(), steps=(), stores=(), begins=line.begins(depth))


__all__ = ["assemble"]
