"""Sections drawn at random: engines side by side, ordered by tokens alone, do what the sequence says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from on_chips import chip

from npu_compiler.program.views import View
from npu_model.isa.instructions import Affine, Axis, Buffer, Loop, Node, Role, Section, Space, TileProgram
from npu_model.lowering.emitter import DoesNotFit, Emitter, Piece, Place
from npu_model.lowering.vector_program import VectorProgram
from npu_model.machine.machine import Machine, MachineError
from npu_model.machine.memory import Memory

SIZE = 8  # elements of a piece
INPUTS, OUTPUTS = 64, 512  # pieces in DRAM


class Writer:
    """Draws instructions into an emitter, and knows which pieces hold something at each place."""

    def __init__(self, draw: st.DrawFn, emitter: Emitter) -> None:
        self.draw, self.e = draw, emitter
        self.stored = 0

    def block(self, depth: int, held: list[Piece], index: Affine) -> None:
        held = list(held)
        for _ in range(self.draw(st.integers(1, 4))):
            kind = self.draw(st.sampled_from(["load", "add", "update", "product", "store", "loop"]))
            if kind == "loop" and depth < 3:
                with self.e.loop(self.draw(st.integers(1, 4))) as counter:
                    self.block(depth + 1, held, index + counter * self.draw(st.integers(0, 3)))
            elif kind == "store" and held:
                self.store(self.draw(st.sampled_from(held)))
            elif kind == "add" and held:
                held.append(self.add(self.draw(st.sampled_from(held)), self.draw(st.sampled_from(held))))
            elif kind == "update" and held:
                self.update(self.draw(st.sampled_from(held)), self.draw(st.sampled_from(held)))
            elif kind == "product" and held:
                held.append(self.product(self.draw(st.sampled_from(held)), self.draw(st.sampled_from(held))))
            else:
                held.append(self.load(index + self.draw(st.integers(0, 7))))
        if held:
            self.store(held[-1])

    def load(self, index: Affine) -> Piece:
        view = View("x", (INPUTS * SIZE,), (1,), 0, "float32")
        return self.e.load(view, [(index * SIZE, SIZE)], queue=self.draw(st.integers(0, 3)))

    def add(self, first: Piece, second: Piece) -> Piece:
        program = VectorProgram([Axis(SIZE)])
        a, b = program.input(first, 0), program.input(second, 0)
        result = self.e.room([SIZE], "float32")
        program.emit(self.e, [(program.op("add", program.op("mul", a, 0.5), b), result, (0,))])
        return result

    def update(self, piece: Piece, other: Piece) -> None:
        program = VectorProgram([Axis(SIZE)])
        a, b = program.input(piece, 0), program.input(other, 0)
        program.emit(self.e, [(program.op("sub", b, program.op("mul", a, 0.25)), piece, (0,))])

    def product(self, first: Piece, second: Piece) -> Piece:
        sums = self.e.room([SIZE, SIZE], "float32", Space.ACCUMULATORS)
        one = Axis(1)
        self.e.multiply(
            [(Role.ROW, Axis(SIZE)), (Role.COLUMN, Axis(SIZE)), (Role.SUM, one)],
            (first, first.tile(0, None, None)),
            (second, second.tile(None, 0, None)),
            (sums, sums.tile(0, 1, None)),
        )
        program = VectorProgram([Axis(SIZE), Axis(SIZE)])
        value = program.op("sum", program.op("mul", program.input(sums, 0, 1), 0.125), attrs=(1,))
        result = self.e.room([SIZE, 1], "float32")
        program.emit(self.e, [(value, result, (0, None))], self.e.output_engine)
        return result.reshaped([Axis(SIZE)], result.strides[:1])

    def store(self, piece: Piece) -> None:
        """Store it in a place that no other instruction and no other round writes."""
        counts = self.e.rounds
        rounds = int(np.prod(counts, initial=1))
        if self.stored + rounds > OUTPUTS:
            return
        steps, step = [], 1
        for count in reversed(counts):
            steps.insert(0, step)
            step *= count
        view = View("y", (OUTPUTS * SIZE,), (1,), 0, "float32")
        self.e.store(
            piece, view, [(Affine(self.stored, tuple(steps)) * SIZE, SIZE)], queue=self.draw(st.integers(0, 3))
        )
        self.stored += rounds


@st.composite
def sections(draw: st.DrawFn, name: str) -> tuple[Node, ...]:
    hardware = chip(name)
    places = {"x": Place(Space.DRAM, "x", 0, 4 * INPUTS * SIZE), "y": Place(Space.DRAM, "y", 0, 4 * OUTPUTS * SIZE)}
    assert hardware.matrix is not None
    emitter = Emitter(
        places, hardware.dma.channels, (0, hardware.sram.size), (0, hardware.matrix.accumulator_bytes),
        hardware.sram.alignment, hardware.output is not None,
    )  # fmt: skip
    try:
        Writer(draw, emitter).block(0, [], Affine())
    except DoesNotFit:
        reject()
    return emitter.finish().body()


def in_sequence(nodes: Sequence[Node], machine: Machine, counters: tuple[int, ...] = ()) -> None:
    """Execute instructions one after the other, as if there were one engine."""
    for node in nodes:
        if isinstance(node, Loop):
            for counter in range(node.count):
                in_sequence(node.body, machine, (*counters, counter))
        else:
            machine.execution(node, range(len(node.axes)))(counters)


def machine_for(name: str, body: tuple[Node, ...], checked: bool) -> tuple[Machine, np.ndarray]:
    hardware = chip(name)
    x = np.random.default_rng(0).standard_normal(INPUTS * SIZE).astype(np.float32)
    y = np.zeros(OUTPUTS * SIZE, np.float32)
    memory = {"x": Memory("x", x.view(np.uint8), False), "y": Memory("y", y.view(np.uint8), False)}
    buffers = (Buffer("x", x.nbytes), Buffer("y", y.nbytes))
    program = TileProgram(name, "", buffers, (), (Section("n", "k", "", body),))
    return Machine(hardware, program, memory, checked), y


@pytest.mark.parametrize("name", ["edge", pytest.param("datacenter", marks=pytest.mark.slow), "odd"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_engines_side_by_side_do_what_the_sequence_says(name: str, data: st.DataObject) -> None:
    body = data.draw(sections(name))
    machine, ours = machine_for(name, body, checked=True)
    machine.run()
    other, expected = machine_for(name, body, checked=False)
    in_sequence(body, other)
    np.testing.assert_array_equal(ours, expected)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_time_does_not_depend_on_whether_data_are_computed(data: st.DataObject) -> None:
    body = data.draw(sections("edge"))
    machine, _ = machine_for("edge", body, checked=True)
    alone = Machine(machine.chip, machine.program)
    assert machine.run() == alone.run()


def test_a_read_of_what_was_never_written_is_found() -> None:
    hardware = chip("edge")
    e = Emitter({"y": Place(Space.DRAM, "y", 0, 4096)}, 1, (0, 4096), (0, 0), 64)
    e.store(e.room([SIZE], "float32"), View("y", (SIZE,), (1,), 0, "float32"), [(Affine(), SIZE)])
    machine, _ = machine_for("edge", e.finish().body(), checked=True)
    assert machine.chip is hardware
    with pytest.raises(MachineError, match="byte 0 of the scratchpad is read and was never written"):
        machine.run()
