"""`link_program`: generates the tile program of an op-level program for one chip, with a tiling for each call."""

from __future__ import annotations

import hashlib
import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from npu_compiler.constraint_checker import ADVICE
from npu_compiler.errors import ConstraintError
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import collapse
from npu_model.chip import Chip
from npu_model.isa.instructions import (
    Affine,
    Axis,
    Buffer,
    Engine,
    Fence,
    Section,
    Space,
    Tile,
    TileProgram,
    Token,
    Transfer,
    Wait,
    core_of,
    kind_of,
)
from npu_model.lowering.emitter import DoesNotFit, Draft, Place, Touch
from npu_model.lowering.families import CannotLower, Tiling
from npu_model.lowering.forms import Form
from npu_model.lowering.implied_waits import without_implied_waits
from npu_model.lowering.l2 import Use, check_places, choose_l2, l2_place
from npu_model.lowering.mapper import Candidate, Mapper, Placed, in_sequence, new_emitter
from npu_model.lowering.relocation import to_core
from npu_model.lowering.residency import Residency, choose_residency, positions
from npu_model.lowering.tokens import without_idle_tokens
from npu_model.machine.machine import engines_of, token_totals

_RECENT = 8  # sections whose pieces others avoid
_SENDING = 3  # DMA engine of transfers between cores
ARENA = "arena"  # the buffer in DRAM that holds intermediate values


def chip_digest(chip: Chip) -> str:
    """Hash of everything that a chip's programs depend on.

    The host is left out, and so is the link to it if the chip has DRAM.
    """
    link = "" if chip.dram is not None else repr(chip.link)
    return hashlib.sha256(f"{chip!r}{link}".encode()).hexdigest()[:16]


def trimmed(program: TileProgram, chip: Chip) -> TileProgram:
    """Remove redundant waits from a linked program, and tokens that no instruction waits for."""
    return without_idle_tokens(without_implied_waits(program, chip))


def link_program(plan: ExecutionPlan, chip: Chip, mapper: Mapper, residency: Residency | None = None) -> TileProgram:
    """Generate the tile program of a plan with planned memory; `trimmed` shortens it without changing its cycles.

    Args:
        residency: The values that stay in the scratchpad. None: chosen by estimates.

    Raises:
        ConstraintError: the chip cannot run some calls; the message names all of them with the reason.
    """
    check_calls(plan.calls, chip, mapper)
    try:
        placed = placed_program(plan, chip, mapper, residency or choose_residency(plan, chip, mapper))
        return placed.linked(placed.candidates())
    except ConstraintError:  # values that stay leave too little room for some call
        if chip.dram is None:
            raise
        placed = placed_program(plan, chip, mapper, nothing_stays(plan, chip))
        return placed.linked(placed.candidates())


def nothing_stays(plan: ExecutionPlan, chip: Chip) -> Residency:
    """The residency in which no value stays in the scratchpad."""
    return Residency({}, [chip.sram.size] * len(plan.calls))


@dataclass(frozen=True)
class PlacedProgram:
    """A plan whose values have their places, before tilings are chosen.

    Attributes:
        places: Buffer → its location.
        preload: Sections that load the weights that stay on the chip.
        calls: The calls with the locations of their operands.
    """

    plan: ExecutionPlan
    mapper: Mapper
    places: Mapping[str, Place]
    preload: tuple[Section, ...]
    calls: Sequence[Placed]

    def candidates(self) -> list[Candidate]:
        """The best tilings by estimates."""
        return in_sequence(self.calls)

    def linked(self, candidates: Sequence[Candidate]) -> TileProgram:
        """The tile program with a tiling for each call. Raises `ConstraintError` if the calls do not fit.

        Chips with the same tilings and places have the same program, which is generated once.
        """
        chip = self.mapper.chip
        sums = 0 if chip.matrix is None else chip.matrix.accumulator_bytes
        engines = chip.dma.channels, chip.output is not None, chip.sram.alignment, sums
        tilings = tuple(tuple(candidate.tiling.items()) for candidate in candidates)
        rooms = tuple((placed.room, placed.resident, placed.in_l2) for placed in self.calls)
        buffers = buffers_of(self.plan, self.mapper)
        kept = tuple(section.node for section in self.preload)
        key = engines, tilings, rooms, tuple(self.places.items()), kept, buffers
        program = self.mapper.shared.linked.get(self.plan, key, lambda: self._linked(candidates, buffers))
        return replace(program, chip=chip.name, digest=chip_digest(chip))

    def _linked(self, candidates: Sequence[Candidate], buffers: tuple[Buffer, ...]) -> TileProgram:
        linker = Linker(self.mapper, self.places, token_totals(self.preload))
        for call, candidate, placed in zip(self.plan.calls, candidates, self.calls, strict=True):
            linker.add(Part(call, candidate.tiling, placed.room, candidate.needs(placed.resident)))
        chip = self.mapper.chip
        return TileProgram(chip.name, chip_digest(chip), buffers, self.preload, tuple(linker.sections))


def placed_program(plan: ExecutionPlan, chip: Chip, mapper: Mapper, residency: Residency) -> PlacedProgram:
    """Give the values of a plan their places: in the scratchpad as `residency` says, in the L2, or in DRAM."""
    places = dram_places(plan, mapper)
    uses = [
        Use(call, time, Placed(mapper.choices(call), positions(call, residency.addresses), room), residency.addresses)
        for time, (call, room) in enumerate(zip(plan.calls, residency.rooms, strict=True))
    ]
    l2 = choose_l2(uses, plan.buffers, plan, chip)
    check_places({*residency.addresses, *l2}, touched_buffers(plan), plan, chip)
    preload = [
        *(preloaded(name, places[name], residency.addresses[name], chip) for name in residency.weights),
        *(preloaded(n, places[n], at, chip, Space.L2) for n, at in l2.items() if plan.buffers[n].is_constant),
    ]
    for name, address in residency.addresses.items():
        places[name] = Place(Space.SCRATCHPAD, "", address, places[name].size)
    places.update({name: l2_place(address, places[name].size) for name, address in l2.items()})
    return PlacedProgram(plan, mapper, places, tuple(preload), [use.with_l2(l2) for use in uses])


def check_calls(calls: Sequence[KernelCall], chip: Chip, mapper: Mapper) -> None:
    """Raise `ConstraintError` if a chip cannot run some calls; the message names all of them."""
    refused: dict[str, str] = {}
    problems = []
    for call in calls:
        try:
            mapper.choices(call)
        except CannotLower as error:
            reason = f"kernel '{call.kernel}' cannot run on chip '{chip.name}': {error}"
            refused.setdefault(call.node, reason)
            problems.append(f"node '{call.node}': {reason}; {ADVICE}")
    if problems:
        raise ConstraintError(list(dict.fromkeys(problems)), refused)


def preloaded(name: str, place: Place, address: int, chip: Chip, space: Space = Space.SCRATCHPAD) -> Section:
    """The section that loads a weight into the scratchpad or the shared L2, where it stays for all runs."""
    axes = (Axis(place.size),)
    engine = f"{Engine.DMA}{1 % chip.dma.channels}"
    move = Transfer(
        engine=engine,
        box=axes,
        source=Tile(place.space, "uint8", Affine(place.offset), (1,), place.name),
        target=Tile(space, "uint8", Affine(address), (1,)),
    )
    return Section(name, "preload", f"{place.size} bytes", (move,))


def dram_places(plan: ExecutionPlan, mapper: Mapper) -> dict[str, Place]:
    """Buffer → its location in DRAM: intermediate values in the arena, weights in their forms."""
    places = {}
    for name, buffer in plan.buffers.items():
        if buffer.kind == "arena":
            places[name] = Place(Space.DRAM, ARENA, buffer.offset, buffer.size_bytes)
        else:
            is_packed = buffer.is_constant and form_of(name, buffer, mapper) is not None
            space = Space.PACKED if is_packed else Space.DRAM
            places[name] = Place(space, plan.donations.get(name, name), 0, buffer.size_bytes)
    return places


def form_of(name: str, buffer: BufferAllocation, mapper: Mapper) -> Form | None:
    """A buffer's form in DRAM: as it was measured, else by the ratio that the chip states; None if it lies as it is."""
    weights = mapper.chip.weights
    if not buffer.is_constant or not buffer.size_bytes:
        return None
    if name in mapper.forms or weights is None:
        return mapper.forms.get(name)
    return Form(math.ceil(buffer.size_bytes * weights.ratio))


def touched_buffers(plan: ExecutionPlan) -> dict[str, BufferAllocation]:
    """The buffers that the plan's calls access, by name."""
    names = {view.buffer for call in plan.calls for view in (*call.inputs, *call.outputs)}
    return {name: plan.buffers[name] for name in sorted(names)}


def buffers_of(plan: ExecutionPlan, mapper: Mapper) -> tuple[Buffer, ...]:
    """The DRAM buffers of a tile program: those that the plan's calls access, and the arena for intermediate values."""

    def buffer(name: str, allocation: BufferAllocation) -> Buffer:
        form = form_of(name, allocation, mapper)
        return Buffer(name, allocation.size_bytes, *(() if form is None else (form.stored, form.pattern)))

    own = [buffer(name, b) for name, b in touched_buffers(plan).items() if b.kind != "arena"]
    return (*own, *([Buffer(ARENA, plan.arena_bytes)] if plan.arena_bytes else []))


class _Access(NamedTuple):
    """An access of an engine to a range of bytes, which has ended when the engine has raised its mark so often."""

    first: int
    end: int
    writes: bool
    engine: str
    mark: int


@dataclass(frozen=True)
class Part:
    """A call, or a core's part of one, in a tiling.

    Attributes:
        room: Scratchpad bytes, from address 0 on, that its tiles may use.
        size: Bytes that its tiles take.
        core: Name of the core that computes it; empty on a chip of one core.
    """

    call: KernelCall
    tiling: Tiling
    room: int
    size: int
    core: str = ""


@dataclass
class Linker:
    """Appends sections to a program: allocates their tiles, and orders accesses to shared bytes by fences and marks.

    Every engine of a section ends it by raising its token 0, its mark. If an engine of a later section touches the same
    bytes, it waits for that mark first. Parts that are added together do not wait for each other: they share only what
    they read, and write different elements.

    Attributes:
        mapper: Generates the sections.
        places: Buffer → its location.
        raised: Token → number of times that it is raised by the sections so far, including the preload.
        sections: The sections so far.
        own_places: Core → locations of buffers that are different for that core.
    """

    mapper: Mapper
    places: Mapping[str, Place]
    raised: dict[Token, int]
    sections: list[Section] = field(default_factory=list)
    own_places: Mapping[str, Mapping[str, Place]] = field(default_factory=dict)  # core → those that differ for it
    _accesses: dict[tuple[Space, str], list[_Access]] = field(default_factory=dict)
    _waited: dict[str, dict[str, int]] = field(default_factory=dict)
    _recent: dict[str, list[list[tuple[int, int]]]] = field(default_factory=dict)  # core → bytes of its last sections

    def add(self, *parts: Part) -> None:
        """Append the sections of parts that run concurrently.

        If possible, tiles get other addresses than the tiles and resident operands of the core's recent sections, so
        that the loads of a section may overlap with the computation of the previous one.
        """
        self._enter([touch for part in parts for touch in self._append(part.call, self._drafted(part), part.core)])

    def send(self, *copies: tuple[KernelCall, str]) -> None:
        """Append copies to cores that run concurrently, each executed by the sending core, or by one that reads DRAM.

        Copies of one source are a multicast if the chip's network has that.
        """
        touches: list[Touch] = []
        cores = self.mapper.chip.cores
        together: dict[object, list[tuple[KernelCall, str]]] = {}
        for copy, core in copies:
            key = (core, copy.inputs) if cores is not None and cores.network.multicast else id(copy)
            together.setdefault(key, []).append((copy, core))
        for (copy, core), *others in together.values():
            views = (*copy.inputs, *copy.outputs, *(other.outputs[0] for other, _ in others))
            emitter = new_emitter(self.mapper.chip, self._places(core), (0, 0))
            sizes, strides = collapse(views[0].shape, *(view.strides for view in views))
            axes = tuple(map(Axis, sizes))
            merged = (replace(view, strides=tuple(own)) for view, own in zip(views, strides, strict=True))
            source, target, *more = (emitter.whole(view, axes) for view in merged)
            emitter.transfer(axes, source, target, queue=_SENDING, others=more)
            touches += self._append(copy, emitter.finish(), core)
        self._enter(touches)

    def _drafted(self, part: Part) -> Draft:
        call, room = part.call, part.room
        recent, places = self._recent.setdefault(part.core, []), self._places(part.core)
        dma, sram = self.mapper.chip.dma, self.mapper.chip.sram
        least = sram.size - dma.staged_bytes if part.tiling.get("staged") else 0
        for first in (self._start(recent, room, part.size, least), 0):
            try:
                draft = self.mapper.draft(call, part.tiling, places, (first, room - first))
            except DoesNotFit:  # some lowerings need pieces of their own only for operands in the scratchpad
                continue
            operands = dict.fromkeys(places[view.buffer] for view in (*call.inputs, *call.outputs))
            ranges = [
                (place.offset, place.offset + place.size) for place in operands if place.space is Space.SCRATCHPAD
            ]
            if draft.scratchpad:
                ranges.append((first, first + draft.scratchpad))
            if ranges:
                recent[:] = [ranges, *recent[: _RECENT - 1]]
            return draft
        reason = f"kernel '{call.kernel}' does not fit the scratchpad of chip '{self.mapper.chip.name}'"
        raise ConstraintError([f"node '{call.node}': {reason}; {ADVICE}"], {call.node: reason})

    def _places(self, core: str) -> Mapping[str, Place]:
        own = self.own_places.get(core)
        return ChainMap(dict(own), dict(self.places)) if own else self.places

    def _raised_in(self, core: str) -> Mapping[Token, int]:
        """Number of times that a core's tokens have been raised, by their names within the core."""
        if not core:
            return self.raised
        own = ((token, times) for token, times in self.raised.items() if core_of(token.engine) == core)
        return {Token(kind_of(token.engine), token.number): times for token, times in own}

    def _start(self, recent: Sequence[Sequence[tuple[int, int]]], room: int, size: int, least: int) -> int:
        """Choose the address of a part's tiles: among several, the one unused by recent sections for longest.

        Args:
            least: The lowest address, unless there is too little room above it. Operands that are loaded whole share
                the upper `staged_bytes` of the scratchpad with those of other calls and with resident values.
        """
        alignment = self.mapper.chip.sram.alignment
        top = max(0, (room - size) // alignment * alignment)
        least = min(top, -(-least // alignment) * alignment)
        beside = [start for ranges in recent for first, end in ranges for start in (end, first - size)]
        starts = [start for start in (least, top, *beside) if least <= start <= top]

        def sections_before(start: int) -> int:
            taken = [any(first < start + size and start < end for first, end in ranges) for ranges in recent]
            return taken.index(True) if True in taken else len(taken)

        return max(starts, key=sections_before)

    def _append(self, call: KernelCall, draft: Draft, core: str) -> Sequence[Touch]:
        """Append a section for a core, with fences that wait for earlier accesses.

        Return the byte ranges that it accesses.
        """
        body, touches, raised = draft.body(self._raised_in(core)), draft.touches, draft.raised
        if core:
            own = to_core(core)
            body, touches, raised = own.nodes(body), own.touches(touches), own.raised(raised)
        fences: dict[str, dict[str, int]] = {}
        for touch in touches:
            begin, stop, is_written, engine = touch.first, touch.end, touch.writes, touch.engine
            for first, end, writes, other, mark in self._accesses.get((touch.space, touch.name), ()):
                if first < stop and begin < end and (writes or is_written) and other != engine:
                    needs = fences.setdefault(engine, {})
                    if mark > needs.get(other, 0):
                        needs[other] = mark
        engines = sorted(engines_of(body))
        before = []
        for engine, needs in sorted(fences.items()):
            waited = self._waited.setdefault(engine, {})
            new = {other: count for other, count in needs.items() if count > waited.get(other, 0)}
            waited.update(new)
            if new:
                waits = tuple(Wait(Token(other, 0), Affine(count)) for other, count in sorted(new.items()))
                before.append(Fence(engine=engine, waits=waits))
        marks = [Fence(engine=engine, signals=(Token(engine, 0),)) for engine in engines]
        for token, count in raised.items():
            self.raised[token] = self.raised.get(token, 0) + count
        for engine in engines:
            self.raised[Token(engine, 0)] = self.raised.get(Token(engine, 0), 0) + 1
        self.sections.append(Section(call.node, call.kernel, shapes(call), (*before, *body, *marks)))
        return touches

    def _enter(self, touches: Sequence[Touch]) -> None:
        """Record accesses, so that later sections that conflict with them wait."""
        for touch in touches:
            if touch.writes:  # whoever waits for this one waits for those before it
                before, first, end = self._accesses.get((touch.space, touch.name), []), touch.first, touch.end
                before[:] = [access for access in before if access[0] < first or end < access[1]]
        for touch in touches:
            access = _Access(touch.first, touch.end, touch.writes, touch.engine, self.raised[Token(touch.engine, 0)])
            self._accesses.setdefault((touch.space, touch.name), []).append(access)


def shapes(call: KernelCall) -> str:
    """A call's shapes in a line: `f16[1,64] * f16[64,64] -> f16[1,64]`."""

    def text(view: object) -> str:
        return f"{view.dtype}[{','.join(map(str, view.shape))}]"  # type: ignore[attr-defined]

    return f"{' * '.join(map(text, call.inputs))} -> {', '.join(map(text, call.outputs))}"


__all__ = ["ARENA", "Linker", "Part", "check_calls", "chip_digest", "link_program", "preloaded", "trimmed"]
