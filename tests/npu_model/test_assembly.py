"""The text of tile programs: it reads back to an equal program, and errors say which line is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

import pytest
from tile_programs import arrays_of, chip, emitted_program, linear_program, memories

from npu_compiler.errors import InputError
from npu_model.isa import instructions as isa
from npu_model.isa.assembler import assemble
from npu_model.isa.assembly import dense_strides, disassemble
from npu_model.isa.instructions import Space
from npu_model.isa.traffic import traffic
from npu_model.machine.machine import Machine

T = TypeVar("T")
DTYPES = ("int8", "uint8", "bool", "float16", "bfloat16", "int32", "float32", "int64")
ENGINES = ("matrix", "vector", "output", "dma0", "dma13")
NAMES = ("x", "layer1.0.conv1.weight", "sram", "acc", "t0", "r1", "wait", "", "two words", '"\n#', "\ud800é", "0")


class Fields:
    """Draws programs field by field: well formed, and without sense."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def several(self, draw: Callable[[], T], least: int, most: int) -> tuple[T, ...]:
        return tuple(draw() for _ in range(self.rng.randint(least, most)))

    def number(self) -> int | float:
        rng = self.rng
        return rng.choice((0, -1, rng.randrange(-99, 2**30), 0.0, 1.5, -1e-30, 1e300, -math.inf, rng.random()))

    def affine(self, depth: int) -> isa.Affine:
        steps = self.several(lambda: self.rng.choice((0, 1, -1, self.rng.randrange(-(2**20), 2**30))), 0, depth)
        return isa.Affine(self.rng.choice((0, self.rng.randrange(-(2**20), 2**40))), steps)

    def axis(self, depth: int) -> isa.Axis:
        size = self.rng.randrange(100)
        return isa.Axis(size, self.rng.choice((isa.ZERO, self.affine(depth))), self.rng.choice((size, 7)))

    def tile(self, depth: int, box: Sequence[isa.Axis]) -> isa.Tile:
        rng = self.rng
        space, dtype = rng.choice(list(isa.Space)), rng.choice(DTYPES)
        strides = dense_strides([axis.size for axis in box], dtype)
        if rng.random() < 0.5:
            strides = tuple(rng.randrange(-99, 2**20) for _ in box)
        turn = (rng.randrange(1, 9), rng.randrange(2**20), self.affine(depth)) if rng.random() < 0.5 else ()
        buffer = rng.choice(NAMES) if space is isa.Space.DRAM else ""
        return isa.Tile(space, dtype, self.affine(depth), strides, buffer, *turn)

    def token(self) -> isa.Token:
        return isa.Token(self.rng.choice(ENGINES), self.rng.randrange(1000))

    def instruction(self, depth: int) -> isa.Instruction:
        rng = self.rng
        box = self.several(lambda: self.axis(depth), 0, 4)
        begins = self.several(lambda: rng.randrange(depth), 0, 2) if depth else ()
        margin: dict[str, Any] = {
            "engine": rng.choice(ENGINES),
            "waits": self.several(lambda: isa.Wait(self.token(), self.affine(depth)), 0, 2),
            "signals": self.several(self.token, 0, 2),
        }

        def tile() -> isa.Tile:
            return self.tile(depth, box)

        kind = rng.randrange(4)
        if kind == 0:
            return isa.Fence(**margin)
        if kind == 1:
            index = (tile(), rng.randrange(100)) if rng.random() < 0.5 else (None, 0)
            fill = rng.choice((None, self.number()))
            return isa.Transfer(
                **margin,
                box=box,
                source=tile(),
                target=tile(),
                fill=fill,
                index=index[0],
                index_limit=index[1],
                scatters=index[0] is not None and rng.random() < 0.5,
                others=self.several(tile, 0, 1),
            )
        if kind == 2:
            return isa.Multiply(
                **margin, box=box, roles=tuple(rng.choice(list(isa.Role)) for _ in box), left=tile(), right=tile(),
                sums=tile(), begins=rng.choice((None, begins)), left_zero=rng.choice((0, rng.randrange(-9, 9))),
                right_zeros=rng.choice((None, tile())),
                sparsity=rng.choice((None, (rng.randrange(9), rng.randrange(9)))),
            )  # fmt: skip
        inputs = self.several(tile, 0, 3)
        return isa.Compute(
            **margin, box=box, inputs=inputs, steps=self.several(self.step, 0, 3), begins=begins,
            stores=self.several(lambda: (rng.randrange(9), tile()), 0, 2),
            carried=tuple((i, rng.choice((0.0, -math.inf))) for i in range(len(inputs)) if rng.random() < 0.5),
        )  # fmt: skip

    def step(self) -> isa.Step:
        operands = self.several(lambda: self.rng.choice((self.rng.randrange(9), float(self.number()))), 0, 3)
        return isa.Step(self.rng.choice(("add", "sum", "to_float")), operands, self.several(self.number, 0, 2))

    def body(self, depth: int = 0) -> tuple[isa.Node, ...]:
        return self.several(lambda: self.node(depth), 1, 3)

    def node(self, depth: int) -> isa.Node:
        is_loop = depth < 3 and self.rng.random() < 0.4
        return isa.Loop(self.rng.randrange(1, 5), self.body(depth + 1)) if is_loop else self.instruction(depth)

    def name(self) -> str:
        return self.rng.choice(NAMES)

    def section(self) -> isa.Section:
        return isa.Section(self.name(), self.name(), self.name(), self.body())

    def buffer(self) -> isa.Buffer:
        form = self.rng.choice(((), (1 + self.rng.randrange(99),), (1 + self.rng.randrange(99), "2:4")))
        return isa.Buffer(self.name(), self.rng.randrange(2**40), *form)

    def program(self) -> isa.TileProgram:
        buffers = self.several(self.buffer, 0, 2)
        preload, sections = self.several(self.section, 0, 1), self.several(self.section, 0, 2)
        return isa.TileProgram(self.name(), self.name(), buffers, preload, sections)


def test_any_program_is_read_back_from_its_text(seed: int) -> None:
    for number in range(200):
        program = Fields(Random(f"{seed} {number}")).program()
        assert assemble(disassemble(program)) == program


@pytest.mark.parametrize("program", [linear_program(5, 300, 200, 2), *map(emitted_program, range(40))])
def test_compiled_and_emitted_programs_are_read_back(program: isa.TileProgram) -> None:
    assert assemble(disassemble(program)) == program


@pytest.mark.parametrize("program", [linear_program(37, 300, 200, 2), *map(emitted_program, range(40, 60))])
def test_the_bytes_at_a_sections_end_are_those_that_the_machine_moves(program: isa.TileProgram) -> None:
    run = Machine(chip(), program, memories(arrays_of(program))).run()
    counted = [(section.dram_read, section.dram_written) for section in run.sections]
    assert counted == [traffic(section.body, Space.DRAM) for section in program.sections]
    assert f"# {counted[0][0]:,} bytes read from DRAM, {counted[0][1]:,} written" in disassemble(program)


def test_a_linear_layer_reads_like_assembly() -> None:
    text = disassemble(linear_program(5, 300, 200))
    assert 'section relu matmul_kernel "float16[5,200] * float16[300,200] * float16[300] -> float16[5,300]"\n' in text
    for line in (
        r"  loop t0 in \d+:",
        r"    matrix  matmul  acc\[.*\] .* \+= sram\[.*\] float16 .* \* sram\[.*\] .* \[m 5, n 300, k .*\] begin t0",
        r"                    wait dma\d\.\d >= .*   signal matrix.1",
        r"          r(\d) = relu\(r\d\)",
        r"          sram\[.*\] float16 <- r\d",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), line


HEADER = 'chip edge d0\nbuffer x 64\nsection a b ""\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text has no line 'chip NAME DIGEST'"),
        ("buffer x 4", "line 1: expected 'chip', not 'buffer'"),
        ("chip edge d0\nsection a b", "line 2: expected a text in quotes, not 'the end of the line'"),
        ("chip edge d0\nstart", "line 2: expected 'buffer', 'preload' or 'section', not 'start'"),
        (HEADER + "  dma0 jump", "line 4: expected fence, load, store, copy, matmul, conv or compute, not 'jump'"),
        (HEADER + "  loop t0 in 4:", "line 4: expected instructions in the loop"),
        (HEADER + "  loop t1 in 4:", "line 4: expected 't0', not 't1'"),
        (HEADER + "  loop t0 in 4:\n    dma0 fence\n   dma0 fence", "line 6: expected an indentation of 4, not of 3"),
        (HEADER + "  dma0 fence wait dma1", "line 4: expected a token such as 'dma0.1', not 'dma1'"),
        (HEADER + "  dma0 fence wait dma1.1 >= t0", "line 4: expected the counter of one of 0 loops, not 't0'"),
        (HEADER + "  dma0 load sram[0] int8 <- x[t] int8 [4]", "line 4: expected an integer or the counter of a loop"),
        (HEADER + "  dma0 load sram[0] word <- x[0] int8 [4]", "line 4: expected one of bfloat16, .* not 'word'"),
        (HEADER + "  dma0 load sram[0] int8 x[0] int8 [4]", "line 4: expected '<-', not 'x'"),
        (HEADER + "  dma0 load sram[0] int8 <- x[0] int8 [4", r"line 4: expected ',' or '\]', not 'the end"),
        (HEADER + "  dma0 fence ?", r"line 4: expected the end of the line, not '\?'"),
        (HEADER + "  vector compute [4]\n     r1 = x[0] int8", "line 5: expected r0, the next register, not 'r1'"),
        (HEADER + "  matrix matmul acc[0] int8 = x[0] int8 * x[0] int8 [q 4]", "line 4: expected one of b, m, n, k"),
        (f"chip edge d0\nbuffer x {'9' * 5000}", "line 2: expected an integer of at most 20 digits"),
    ],
)  # fmt: skip
def test_errors_name_the_line_and_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        assemble(text)
