"""`VectorProgram`: a builder of `Compute` instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from npu_compiler.program.elementwise import ACTIVATIONS, ELEMENTWISE
from npu_model.isa.instructions import Axis, Engine, Step, Tile, Value
from npu_model.lowering.emitter import Emitter, Piece


class VectorProgram:
    """A builder of a vector program over a box; operands are registers (ints) or constants (floats).

    Args:
        axes: The axes of the box.
    """

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = tuple(axes)
        self._inputs: list[tuple[Piece, Tile]] = []
        self._steps: list[tuple[str, tuple[Value, ...], tuple[Value, ...]]] = []
        self._registers: dict[str, int] = {}
        self._carried: list[tuple[int, float]] = []
        self._begins: tuple[int, ...] = ()

    def input(self, piece: Piece, *dims: int | None) -> int:
        """Add an on-chip tile as input, and return its register.

        Args:
            dims: For each axis of the box, a dimension of the tile, or None to broadcast.
        """
        return self.input_tile(piece, piece.tile(*dims))

    def input_tile(self, piece: Piece, tile: Tile) -> int:
        """Add an operand as input; returns its register."""
        assert not self._steps, "inputs come before steps"
        self._inputs.append((piece, tile))
        return len(self._inputs) - 1

    def carried(self, piece: Piece, first: float, begins: tuple[int, ...], *dims: int | None) -> int:
        """Add an on-chip tile that loops accumulate into as input, and return its register.

        Args:
            first: Initial value, which the register has in iterations in which the counters of all loops `begins` are
                0.
            begins: Depths of the loops.
            dims: For each axis of the box, a dimension of the tile, or None to broadcast.
        """
        register = self.input(piece, *dims)
        self._carried.append((register, first))
        self._begins = begins
        return register

    def op(self, name: str, *operands: Value, attrs: Sequence[Value] = ()) -> int:
        """Add an operation and return its result's register, that of an equal earlier operation if there is one.

        Args:
            attrs: Attributes; empty: the op's defaults.
        """
        op = ELEMENTWISE.get(name)
        if op is not None and not attrs:
            attrs = tuple(float(value) for value in op.attrs.values())
        step = (name, operands, tuple(attrs))
        if repr(step) not in self._registers:
            self._steps.append(step)
            self._registers[repr(step)] = len(self._inputs) + len(self._steps) - 1
        return self._registers[repr(step)]

    def activation(self, register: int, name: str) -> int:
        """Apply an activation by its name; `none` returns the register unchanged."""
        return register if name == "none" else self.op(ACTIVATIONS[name], register)

    def emit(
        self,
        emitter: Emitter,
        stores: Sequence[tuple[int, Piece, Sequence[int | None]]],
        engine: Engine = Engine.VECTOR,
    ) -> None:
        """Emit the instruction.

        Args:
            stores: The registers to store, each with its target tile, and the tile's dimension along each axis of the
                box.
            engine: The vector engine or the output stage.
        """
        self.emit_tiles(emitter, [(register, piece, piece.tile(*dims)) for register, piece, dims in stores], engine)

    def emit_tiles(
        self, emitter: Emitter, stores: Sequence[tuple[int, Piece, Tile]], engine: Engine = Engine.VECTOR
    ) -> None:
        emitter.compute(
            self.axes,
            self._inputs,
            [Step(*step) for step in self._steps],
            [(register, (piece, tile)) for register, piece, tile in stores],
            engine=engine,
            begins=self._begins,
            carried=self._carried,
        )


def attributes(op: str, params: Mapping[str, Any]) -> tuple[float, ...]:
    """The values of an element-wise op's attributes, from a call's parameters, in the order of the op's declaration."""
    return tuple(float(params[name]) for name in ELEMENTWISE[op].attrs)
