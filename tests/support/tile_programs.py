"""Tile programs for tests: of compiled models, drawn by the emitter, and of fields drawn one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
from ir_builder import IRBuilder

import npu_compiler
from npu_compiler import CompiledProgram
from npu_compiler.program.views import View
from npu_model.chip import Chip, load_chip
from npu_model.isa import instructions as isa
from npu_model.isa.encoding import decode
from npu_model.isa.instructions import Affine, Axis, Fence, Role, Space, TileProgram
from npu_model.lowering.emitter import DoesNotFit, Emitter, Piece, Place
from npu_model.lowering.program import chip_digest
from npu_model.lowering.vector_program import VectorProgram
from npu_model.machine.memory import Memory
from npu_model.target import NPUTarget

Arrays = Mapping[str, np.ndarray]


@cache
def chip(name: str = "edge") -> Chip:
    return load_chip(name)


def linear_model(m: int, n: int, k: int, layers: int = 1) -> IRBuilder:
    """Linear layers with a bias and ReLU, each but the first of `n` inputs."""
    g = IRBuilder()
    x = g.input("x", m, k)
    for layer in range(layers):
        x = g("aten.linear.default", x, g.weight(f"w{layer}", n, k if layer == 0 else n), g.weight(f"b{layer}", n))
        x = g("aten.relu.default", x)
    g.output(x)
    return g


def compiled(model: IRBuilder, name: str = "edge", dtype: str = "float16") -> CompiledProgram:
    return npu_compiler.compile(model.ir(), NPUTarget(chip(name)), npu_compiler.CompileOptions(compute_dtype=dtype))


@cache
def linear_program(m: int, n: int, k: int, layers: int = 1) -> TileProgram:
    """The tile program of `linear_model` for the chip `edge`."""
    return decode(compiled(linear_model(m, n, k, layers)).plan.machine_code)


def emitted_program(seed: int) -> TileProgram:
    """A program of one section with loops, transfers, products and vector steps, drawn by a seed.

    All its elements are float32 and small integers, whose sums are exact.
    """
    rng = Random(seed)
    while True:
        draw = _Draw(rng)
        try:
            draw.body(0)
        except DoesNotFit:
            continue
        section = isa.Section("drawn", "drawn_kernel", "", draw.emitter.finish().body())
        marks = tuple(Fence(engine=f"dma{queue}") for queue in range(2))
        buffers = tuple(isa.Buffer(name, view.shape[0] * view.shape[1] * 4) for name, view in draw.views.items())
        return TileProgram("edge", chip_digest(chip()), buffers, (), (section, isa.Section("end", "", "", marks)))


class _Draw:
    """Draws what an emitter writes: a tensor of DRAM is read only or written only."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.views: dict[str, View] = {}
        self.places: dict[str, Place] = {}
        self.left = rng.randrange(3, 16)  # instructions, about
        self.emitter = Emitter(self.places, 4, (0, 2**20), (0, 2**18), 64, rng.random() < 0.5)

    def _view(self, rows: int, columns: int) -> View:
        name = f"buffer{len(self.views)}"
        view = View(name, (rows, columns), (columns, 1), 0, "float32")
        self.views[name] = view
        self.places[name] = Place(Space.DRAM, name, 0, 4 * rows * columns)
        return view

    def body(self, depth: int, counters: tuple[tuple[Affine, int], ...] = ()) -> None:
        pieces: list[Piece] = []
        for _ in range(self.rng.randrange(1, 4)):
            if depth < 3 and self.left > 0 and self.rng.random() < 0.4:
                count = self.rng.randrange(2, 6)
                with self.emitter.loop(count) as counter:
                    self.body(depth + 1, (*counters, (counter, count)))
                continue
            for _ in range(self.rng.randrange(1, 4)):
                if self.left > 0:
                    self.left -= 1
                    self._instruction(pieces, counters)

    def _box(self, counters: Sequence[tuple[Affine, int]], rows: int, columns: int) -> tuple[View, list[Any]]:
        """A tensor, and a box of it that a loop moves along, or that leaves it at the end."""
        start, count = self.rng.choice(counters) if counters and self.rng.random() < 0.7 else (isa.ZERO, 1)
        missing = self.rng.randrange(rows) if count > 1 else 0
        view = self._view(rows * count - missing, columns)
        return view, [(start * rows, rows), (isa.ZERO, columns)]

    def _instruction(self, pieces: list[Piece], counters: Sequence[tuple[Affine, int]]) -> None:
        e, rng = self.emitter, self.rng
        size = rng.choice((4, 8))
        axes = (Axis(size), Axis(size))
        alike = [piece for piece in pieces if piece.shape == (size, size) and piece.space is Space.SCRATCHPAD]
        choice = rng.randrange(4) if alike else 0
        if choice == 0:
            pieces.append(
                e.load(*self._box(counters, size, size), fill=float(rng.randrange(3)), queue=rng.randrange(4))
            )
        elif choice == 1:
            left, right = rng.choice(alike), rng.choice(alike)
            sums = e.room(axes, "float32", Space.ACCUMULATORS)
            e.multiply(
                [(Role.ROW, axes[0]), (Role.COLUMN, axes[1]), (Role.SUM, Axis(size))],
                (left, left.tile(0, None, 1)), (right, right.tile(None, 0, 1)), (sums, sums.tile(0, 1, None)),
            )  # fmt: skip
            self._vector([sums, rng.choice(alike)], pieces, axes, e.output_engine)
        elif choice == 2:
            self._vector([rng.choice(alike) for _ in range(rng.randrange(1, 3))], pieces, axes, isa.Engine.VECTOR)
        else:
            e.store(rng.choice(alike), *self._box(counters, size, size), queue=rng.randrange(4))

    def _vector(self, inputs: list[Piece], pieces: list[Piece], axes: tuple[Axis, ...], engine: isa.Engine) -> None:
        program = VectorProgram(axes)
        registers = [program.input(piece, 0, 1) for piece in inputs]
        value = registers[0]
        for register in registers[1:]:
            value = program.op("add", value, register)
        value = program.op("remainder", value, 7.0)
        out = self.emitter.room(axes, "float32")
        program.emit(self.emitter, [(value, out, (0, 1))], engine)
        pieces.append(out)


def arrays_of(program: TileProgram, seed: int = 0) -> dict[str, np.ndarray]:
    """Bytes for each buffer of a program: small integers as float32."""
    rng = np.random.default_rng(seed)
    return {b.name: rng.integers(0, 4, b.size // 4).astype(np.float32).view(np.uint8) for b in program.buffers}


def memories(arrays: Arrays) -> dict[str, Memory]:
    return {name: Memory(f"buffer '{name}'", array, False) for name, array in arrays.items()}
