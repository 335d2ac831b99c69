"""Clocks inside a resident kernel: when each multiprocessor did each step. Off by default.

The templates do not mention them: `with_clocks` adds lines to a kernel's source, so without clocks nothing changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_compiler.specialization.template_files import template_text
from npu_compiler.program.kernels import KernelCall

BLOCKS = 256  # that have room for their clocks: no GPU has had so many multiprocessors
_HEADER = 5  # words of a block before its marks: multiprocessor + 1; global time and clock at the start; at the end
_PARTS = ("wait for operands", "compute", "pass on")  # of a step, each of which ends with a mark
_LABELS = "clocked_steps"  # the parameter with a name for each step

# Line → the line that follows it with clocks, in a source whose includes are expanded. Those of the kernel stand there
# once, those of a phase once for each shape: products, attention.
_IN_KERNEL = {
    "    int mailbox;  // that this step fills": "    Clocks clocks;",
    "    Grid grid(operands.at[GRID_MEMORY], Progress(ring.progress_place()));": (
        "    grid.clocks.begin_run(operands.at[CLOCK_MEMORY]);"
    ),
    "        grid.end_step();": "        grid.clocks.mark(grid.step, 2);",
    "    grid.end_run();": "    grid.clocks.end_run();",
}
_IN_PHASES = {
    "    const HeldColumns held_columns(grid, scratch, input);": "    grid.clocks.mark(grid.step, 0);",
    "        // After this the sums of the previous batch may be overwritten (I18).": (
        "        grid.clocks.mark(grid.step, 1);"
    ),
    "        insert_new_rows(key_words, values, prefetched, scratch, key);": "        grid.clocks.mark(grid.step, 0);",
    "        combine_warps(problem, item.first_row, state, scratch.memory, send, used);": (
        "        grid.clocks.mark(grid.step, 1);"
    ),
    "        problem.q = &scratch.q[0][0];": "        grid.clocks.mark(grid.step, 0);",
    "        combine_warps(problem, 0, state, scratch.memory, send, used);": "        grid.clocks.mark(grid.step, 1);",
}
_DEFINED_AFTER = "constexpr int GRID_WORDS = 32;  // before the mailboxes"


def words(steps: int) -> int:
    """Number of 64-bit words that hold the clocks of a kernel of `steps` steps."""
    return BLOCKS * _words_of_block(steps)


def _words_of_block(steps: int) -> int:
    return _HEADER + len(_PARTS) * steps


def with_clocks(source: str, memory: int) -> str:
    """A resident kernel's source with added statements that record the time of each step and its parts.

    Args:
        memory: The number of the kernel's operand that receives `words` words.
    """
    constants = {"CLOCK_MEMORY": memory, "CLOCKED_BLOCKS": BLOCKS, "CLOCK_HEADER": _HEADER, "CLOCK_MARKS": len(_PARTS)}
    definitions = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    added = {
        _DEFINED_AFTER: "\n".join([*definitions, template_text("resident/clocks.cuh").rstrip()]),
        **_IN_KERNEL,
        **_IN_PHASES,
    }
    lines = source.split("\n")
    counts = Counter(line for line in lines if line in added)
    once = (_DEFINED_AFTER, *_IN_KERNEL)
    assert all(counts[line] == 1 for line in once), "a template has changed, and the lines to add to it have not"
    return "\n".join("\n".join([line, added[line]]) if line in added else line for line in lines)


def labels(names: Sequence[str]) -> dict[str, Any]:
    """The call parameters that name the steps of a kernel, and so say that its last output holds clocks."""
    return {_LABELS: list(names)}


def has_clocks(call: KernelCall) -> bool:
    return _LABELS in call.params


@dataclass(frozen=True)
class Interval:
    """An activity of one multiprocessor; times are in nanoseconds since the first activity of the run began."""

    multiprocessor: int
    name: str
    start: float
    end: float


def intervals(call: KernelCall, noted: np.ndarray) -> Iterator[Interval]:
    """The activities of each multiprocessor in the latest run: every step, and within it the parts that were recorded.

    A block's clock counts become nanoseconds by the global time at its beginning and end.

    Args:
        noted: The contents of the call's last output.
    """
    names = call.params[_LABELS]
    blocks = noted.reshape(-1).view(np.uint64).reshape(-1, _words_of_block(len(names)))
    blocks = blocks[blocks[:, 0] > 0]
    blocks = blocks[np.argsort(blocks[:, 0])]
    zero = min((int(block[1]) for block in blocks), default=0)
    for block in blocks:
        multiprocessor, begun, first, ended, last = (int(word) for word in block[:_HEADER])
        rate = (ended - begun) / (last - first)
        times = (block[_HEADER:].astype(np.int64) - first) * rate + (begun - zero)
        start = float(begun - zero)
        for name, marks in zip(names, times.reshape(len(names), -1).tolist(), strict=True):
            end = marks[-1]
            yield Interval(multiprocessor - 1, name, start, end)
            for part, mark in zip(_PARTS, marks, strict=True):
                if start <= mark <= end:  # what a block skipped in this run it may have noted in an earlier one
                    yield Interval(multiprocessor - 1, part, start, mark)
                    start = mark
            start = end
