"""`lower_program`: the tile program of an op-level program for one chip."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from npu_compiler.constraint_checker import ADVICE
from npu_compiler.errors import ConstraintError
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.elementwise import declaration
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_model.chip import Chip
from npu_model.isa.instructions import (
    Affine,
    Buffer,
    Fence,
    Section,
    Space,
    TileProgram,
    Token,
    Wait,
)
from npu_model.lowering.emitter import Draft, Emitter, Place, Touch
from npu_model.lowering.families import CannotLower
from npu_model.lowering.mapper import Mapper
from npu_model.machine.machine import engines_of

ARENA = "arena"  # the buffer in DRAM that holds intermediate values


def chip_digest(chip: Chip) -> str:
    """Hash of all numbers of a chip."""
    return hashlib.sha256(repr(chip).encode()).hexdigest()[:16]


def lower_program(plan: ExecutionPlan, chip: Chip, mapper: Mapper | None = None) -> TileProgram:
    """The tile program of a plan whose memory has been planned.

    Args:
        mapper: Of the chip, which remembers the calls that it has mapped.

    Raises:
        ConstraintError: the chip cannot run some calls, or their smallest tiles do not fit its scratchpad; lists all.
    """
    places = dram_places(plan)
    linker = Linker(chip, places, 0)
    mapper = mapper or Mapper(chip)
    refused: dict[str, str] = {}
    violations = []
    for call in plan.calls:
        try:
            linker.add(call, mapper)
        except CannotLower as error:
            reason = f"kernel '{call.kernel}' cannot run on chip '{chip.name}': {error}"
            refused.setdefault(call.node, reason)
            violations.append(f"node '{call.node}': {reason}; {ADVICE}")
    if refused:
        raise ConstraintError(violations, refused)
    return TileProgram(chip.name, chip_digest(chip), buffers_of(plan), (), tuple(linker.sections))


def dram_places(plan: ExecutionPlan) -> dict[str, Place]:
    """Buffer → its place in DRAM; intermediate values lie in the arena."""
    places = {}
    for name, buffer in plan.buffers.items():
        if buffer.kind == "arena":
            places[name] = Place(Space.DRAM, ARENA, buffer.offset, buffer.size_bytes)
        else:
            places[name] = Place(Space.DRAM, plan.donations.get(name, name), 0, buffer.size_bytes)
    return places


def buffers_of(plan: ExecutionPlan) -> tuple[Buffer, ...]:
    """The memory in DRAM that the plan's calls touch."""
    names = {view.buffer for call in plan.calls for view in (*call.inputs, *call.outputs)}
    own = [Buffer(n, plan.buffers[n].size_bytes) for n in sorted(names) if plan.buffers[n].kind != "arena"]
    return (*own, *([Buffer(ARENA, plan.arena_bytes)] if plan.arena_bytes else []))


@dataclass
class _Access:
    touch: Touch
    mark: int


@dataclass
class Linker:
    """Puts sections one behind the other: places their pieces, and orders what they share by fences and marks.

    Every engine of a section ends it by raising its token 0, its mark. A later section's engine that touches the same
    bytes waits for that mark first.
    """

    chip: Chip
    places: Mapping[str, Place]
    resident: int
    sections: list[Section] = field(default_factory=list)
    _raised: dict[Token, int] = field(default_factory=dict)
    _accesses: dict[tuple[Space, str], list[_Access]] = field(default_factory=dict)
    _waited: dict[str, dict[str, int]] = field(default_factory=dict)
    _next: int = 0

    def add(self, call: KernelCall, mapper: Mapper) -> None:
        """Append a call's section. Raises `CannotLower`."""
        room = self.chip.sram.size - self.resident
        choice = mapper.choice(call, self.places, room)
        if self._next + choice.scratchpad > room:
            self._next = 0
        emitter = new_emitter(self.chip, self.places, (self.resident + self._next, room - self._next), self._raised)
        choice.emit(emitter)
        draft = emitter.finish()
        self._next += draft.scratchpad
        self._append(call, draft)

    def _append(self, call: KernelCall, draft: Draft) -> None:
        fences: dict[str, dict[str, int]] = {}
        for touch in draft.touches:
            for access in self._accesses.get((touch.space, touch.name), ()):
                other = access.touch
                overlaps = other.first < touch.end and touch.first < other.end
                if overlaps and (other.writes or touch.writes) and other.engine != touch.engine:
                    needs = fences.setdefault(touch.engine, {})
                    needs[other.engine] = max(needs.get(other.engine, 0), access.mark)
        engines = sorted(engines_of(draft.body))
        before = []
        for engine, needs in sorted(fences.items()):
            waited = self._waited.setdefault(engine, {})
            new = {other: count for other, count in needs.items() if count > waited.get(other, 0)}
            waited.update(new)
            if new:
                waits = tuple(Wait(Token(other, 0), Affine(count)) for other, count in sorted(new.items()))
                before.append(Fence(engine=engine, waits=waits))
        marks = [Fence(engine=engine, signals=(Token(engine, 0),)) for engine in engines]
        for token, count in draft.raised.items():
            self._raised[token] = self._raised.get(token, 0) + count
        for engine in engines:
            self._raised[Token(engine, 0)] = self._raised.get(Token(engine, 0), 0) + 1
        for touch in draft.touches:
            known = self._accesses.setdefault((touch.space, touch.name), [])
            if touch.writes:
                known[:] = [a for a in known if not (touch.first <= a.touch.first and a.touch.end <= touch.end)]
            known.append(_Access(touch, self._raised[Token(touch.engine, 0)]))
        self.sections.append(Section(call.node, call.kernel, shapes(call), (*before, *draft.body, *marks)))


def new_emitter(
    chip: Chip, places: Mapping[str, Place], room: tuple[int, int], raised: Mapping[Token, int] | None = None
) -> Emitter:
    """An emitter for a section on a chip that may use `room` (first byte, size) of the scratchpad."""
    sums = chip.matrix.accumulator_bytes if chip.matrix is not None else 0
    return Emitter(places, chip.dma.channels, room, (0, sums), chip.sram.alignment, chip.output is not None, raised)


def shapes(call: KernelCall) -> str:
    """A call's shapes in a line: `f16[1,64] * f16[64,64] -> f16[1,64]`."""

    def text(view: object) -> str:
        return f"{view.dtype}[{','.join(map(str, view.shape))}]"  # type: ignore[attr-defined]

    return f"{' * '.join(map(text, call.inputs))} -> {', '.join(map(text, call.outputs))}"


__all__ = ["ARENA", "Linker", "chip_digest", "declaration", "itemsize", "lower_program", "new_emitter", "replace"]
