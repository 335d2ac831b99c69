"""Use of the scratchpad over time: accesses of engines as text, and the data that occupies it during a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from npu_compiler.graph.dtypes import itemsize
from npu_model.analysis.result import CallResult, area_of
from npu_model.chip import Chip
from npu_model.isa.instructions import Axis, Section, Space, Tile, TileProgram, Transfer, instructions
from npu_model.machine.costs import Costs
from npu_model.machine.machine import Machine, token_totals
from npu_model.machine.streams import Streams


class Content(StrEnum):
    """Kinds of data in a part of the scratchpad."""

    LOADED = "loaded"  # from DRAM, for one call
    COMPUTED = "computed"  # by one call, for itself or for DRAM
    HANDED_ON = "handed on"  # between two calls, without DRAM
    KEPT = "kept"  # weights, from run to run


@dataclass(frozen=True)
class Resident:
    """A part of the scratchpad that is occupied for a time.

    Attributes:
        first, last: Its first byte, and one past its last.
        start, end: Its first cycle, and one past its last.
        call: Number of the call that accesses it; of the reading call, if the data is handed from one call to another.
        content: The kind of data.
    """

    first: int
    last: int
    start: int
    end: int
    call: int
    content: Content


_Use = tuple[int, int, str]  # first cycle, the one behind the last, and the letter to draw


def scratchpad_over_time(program: TileProgram, chip: Chip, width: int = 72) -> str:
    """A text chart: a line for each address that instructions access, and a letter for each of `width` time intervals.

    The letter is the initial of the engine's name: upper case if it writes there, lower case if it reads.
    """
    run = Machine(chip, program).run(spans=True)
    streams = Streams(program.sections, Costs(chip, program.buffers), token_totals(program.preload))
    uses: dict[tuple[str, int], list[_Use]] = {}
    ends: dict[tuple[str, int], int] = {}
    for engine in sorted({span.engine for span in run.spans}):
        entries = [entry for entry in streams.stream(range(len(program.sections)), engine) if entry[2].cycles]
        spans = [span for span in run.spans if span.engine == engine]
        for (prepared, counters, *_), span in zip(entries, spans, strict=True):
            instruction = prepared.instruction
            for tiles, letter in ((instruction.reads, engine[0]), (instruction.writes, engine[0].upper())):
                for tile in tiles:
                    if not tile.space.has_buffers:
                        place = tile.space.value, tile.place(counters)
                        uses.setdefault(place, []).append((span.start, span.end, letter))
                        ends[place] = max(ends.get(place, 0), place[1] + _bytes(tile, instruction.axes))
    label = {place: f"{place[0]:<4} {place[1]:>9,} – {ends[place] - 1:,}" for place in uses}
    margin = max(map(len, label.values()))
    lines = [f"{'cycles':<{margin}}  0{run.cycles:>{width - 1},}"]
    return "\n".join(
        [*lines, *(f"{label[place]:<{margin}}  {_line(uses[place], run.cycles, width)}" for place in sorted(uses))]
    )


def residents(program: TileProgram, calls: Sequence[CallResult], cycles: int) -> list[Resident]:
    """The parts of the scratchpad that are occupied during a run.

    Tiles of a call occupy it from the call's first instruction to its last. A value that a call reads without writing
    it was written by an earlier call, and occupies its part from then on, or by the preload, and does so for the whole
    run.

    Args:
        calls: The result of each section of the program.
        cycles: Cycles of the run.
    """
    taken: list[Resident] = []
    writers: list[tuple[int, int, int]] = []  # first and last byte, and the call that wrote them; the latest last
    for index, (section, call) in enumerate(zip(program.sections, calls, strict=True)):
        areas = _areas(section)
        written = [(first, last) for first, last, content in areas if content is not None]
        for first, last, content in areas:
            if content is None:
                if any(low < last and first < high for low, high in written):
                    continue
                before = [writer for low, high, writer in reversed(writers) if low < last and first < high]
                content = Content.HANDED_ON if before else Content.KEPT
                start, end = (calls[before[0]].end, call.end) if before else (0, cycles)
            else:
                start, end = call.start, call.end
            taken.append(Resident(first, last, min(start, end), end, index, content))
        writers = [each for each in writers if not any(low <= each[0] and each[1] <= high for low, high in written)]
        writers += [(first, last, index) for first, last in written]
    kept = {(each.first, each.last): each for each in taken if each.content is Content.KEPT}
    return [each for each in taken if each.content is not Content.KEPT] + list(kept.values())


def _areas(section: Section) -> list[tuple[int, int, Content | None]]:
    """The byte ranges of the scratchpad that a section accesses, and their kind of data; None if it only reads them."""
    areas: dict[tuple[int, int], Content | None] = {}
    for instruction, counts in instructions(section.body):
        for tiles, content in (
            (instruction.reads, None),
            (instruction.writes, Content.LOADED if isinstance(instruction, Transfer) else Content.COMPUTED),
        ):
            for tile in tiles:
                if tile.space is Space.SCRATCHPAD:
                    area = area_of(tile, instruction, counts)
                    areas[area] = content or areas.get(area)
    return [(first, last, content) for (first, last), content in sorted(areas.items())]


def _bytes(tile: Tile, axes: Sequence[Axis]) -> int:
    return itemsize(tile.dtype) + sum(
        max(0, (axis.size - 1) * stride) for axis, stride in zip(axes, tile.strides, strict=True)
    )


def _line(uses: Sequence[_Use], cycles: int, width: int) -> str:
    letters = ["·"] * width
    for start, end, letter in sorted(uses):
        first = start * width // cycles
        for column in range(first, max(first + 1, math.ceil(end * width / cycles))):
            letters[min(column, width - 1)] = letter
    return "".join(letters)
