"""`scratchpad_over_time`: a drawing, in text, of which engine works on which place of the chip's memories, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence

from npu_compiler.graph.dtypes import itemsize
from npu_model.chip import Chip
from npu_model.isa.instructions import Axis, Space, Tile, TileProgram
from npu_model.machine.costs import Costs
from npu_model.machine.machine import Machine, token_totals
from npu_model.machine.streams import Streams

_Use = tuple[int, int, str]  # first cycle, the one behind the last, and the letter to draw


def scratchpad_over_time(program: TileProgram, chip: Chip, width: int = 72) -> str:
    """A line for each place that the program's sections use, a letter for each of `width` parts of the time.

    A letter is the first of the engine's name: large where it writes to the place, small where it reads from it.
    """
    run = Machine(chip, program).run(spans=True)
    streams = Streams(program.sections, Costs(chip), token_totals(program.preload))
    uses: dict[tuple[str, int], list[_Use]] = {}
    ends: dict[tuple[str, int], int] = {}
    for engine in sorted({span.engine for span in run.spans}):
        entries = [entry for entry in streams.stream(range(len(program.sections)), engine) if entry[2].cycles]
        spans = [span for span in run.spans if span.engine == engine]
        for (prepared, counters, *_), span in zip(entries, spans, strict=True):
            instruction = prepared.instruction
            for tiles, letter in ((instruction.reads, engine[0]), (instruction.writes, engine[0].upper())):
                for tile in tiles:
                    if tile.space is not Space.DRAM:
                        place = tile.space.value, tile.place(counters)
                        uses.setdefault(place, []).append((span.start, span.end, letter))
                        ends[place] = max(ends.get(place, 0), place[1] + _bytes(tile, instruction.axes))
    label = {place: f"{place[0]:<4} {place[1]:>9,} – {ends[place] - 1:,}" for place in uses}
    margin = max(map(len, label.values()))
    lines = [f"{'cycles':<{margin}}  0{run.cycles:>{width - 1},}"]
    return "\n".join(
        [*lines, *(f"{label[place]:<{margin}}  {_line(uses[place], run.cycles, width)}" for place in sorted(uses))]
    )


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
