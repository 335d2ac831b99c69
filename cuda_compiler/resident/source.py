"""The CUDA source of a resident kernel: `templates/resident/kernel.cu` with tables and code of a program's phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Template

from cuda_compiler.resident import layout
from cuda_compiler.resident.phases import Phase
from cuda_compiler.specialization.c_text import TYPES, index_type
from cuda_compiler.specialization.template_files import template_text
from npu_compiler.program.views import View

RESIDENT = "resident"


def kernel_source(phases: Sequence[Phase], place: Mapping[View, int], memory: View, mailbox_size: int) -> str:
    """The source of a resident kernel, with one step for each phase, in order.

    Args:
        place: Operand → its number in the kernel's arguments.
        memory: The operand that holds the grid barrier's counter and the mailboxes.
        mailbox_size: Number of values that a mailbox holds.
    """
    numbers: dict[str, int] = {}
    streams: dict[str, int] = {}
    steps = []
    computes: dict[int, str] = {}
    prefetches: dict[int, str] = {}
    for phase in phases:
        number = numbers.setdefault(phase.text(), len(numbers))
        stream, streamed = -1, [0, 0, 0]
        if phase.stream is not None:
            stream = streams.setdefault(str(phase.stream), len(streams))
            for index, name in enumerate(phase.streamed):
                streamed[index] = place[phase.operands[name]]
        operands = ", ".join(str(place[view]) for view in phase.operands.values())
        weight, *sides = streamed
        steps.append(f"    {{{number}, {stream}, {weight}, {{{sides[0]}, {sides[1]}}}, {{{operands}}}}},")
        computing, prefetching = (
            "".join(
                f", static_cast<{TYPES[view.dtype]} *>({memory_of.format(index)})"
                for index, view in enumerate(phase.operands.values())
            )
            for memory_of in ("step.at[{}]", "operands.at[step.operand[{}]]")
        )
        call = f"phase{number}::{phase.function}(ring, grid, queue, shared + PREFETCH_QUEUE_BYTES{computing})"
        computes[number] = f"            case {number}: {call}; break;"
        prefetches[number] = f"            case {number}: phase{number}::prefetch(queue{prefetching}); break;"
    constants = _constants(phases, len(place), place[memory], mailbox_size)
    exchanged = max(phase.exchanged for phase in phases)
    macros = [f"#define CHOICES {layout.most_choices(phases)}"]
    macros += [f"#define EXCHANGED {exchanged}"] if exchanged else []
    return Template(template_text("resident/kernel.cu")).substitute(
        name=RESIDENT,
        threads=layout.THREADS,
        index_type=index_type([view for phase in phases for view in phase.operands.values()]).rstrip(),
        constants="\n".join([*macros, *(f"constexpr int {name} = {value};" for name, value in constants.items())]),
        streams=", ".join(streams),
        steps="\n".join(steps),
        phases="\n".join(f"namespace phase{number} {{\n{text}}}" for text, number in numbers.items()),
        compute_cases="\n".join(computes.values()),
        prefetch_cases="\n".join(prefetches.values()),
    )


def _most_own_turns(phases: Sequence[Phase]) -> int:
    """The maximum number of lines (`LINE_BYTES` bytes of a row of x) that each warp of a product receives in registers.

    0 if all products of the kernel stage the rows of x in shared memory. They do where a weight in 16 bits has longer
    rows: a step of Qwen2.5-1.5B at position 500 takes 1.139 ms on an H100 then, 1.151 with all rows in registers, and
    1.153 with both ways in one kernel.
    """
    most = layout.MOST_OWN_TURNS * layout.WARPS * layout.LINE_BYTES // 2  # elements of 16 bits
    for phase in phases:
        x = phase.inputs.get("x")
        if phase.streamed == ("weight",) and x is not None and x.shape[-1] > most:
            return 0
    return layout.MOST_OWN_TURNS


def _constants(phases: Sequence[Phase], operands: int, grid_memory: int, mailbox_size: int) -> dict[str, int]:
    """The `constexpr` constants of `kernel.cu`, by name.

    Args:
        operands: Number of operands.
        grid_memory: Number of the operand that holds the grid barrier's counter and the mailboxes.
    """
    return {
        "THREADS": layout.THREADS,
        "ALL_THREADS": layout.ALL_THREADS,
        "UNIT_ROWS": layout.UNIT_ROWS,
        "SLOT_BYTES": layout.slot_bytes(phases),
        "SIDES": max(len(phase.stream.sides) for phase in phases if phase.stream is not None),
        "SCRATCH_BYTES": layout.scratch_bytes(phases),
        "PREFETCHED_BYTES": layout.prefetched_bytes(phases),
        "PREFETCH_QUEUE_BYTES": layout.prefetch_queue_bytes(phases),
        "PREFETCH_DEPTH": layout.PREFETCH_DEPTH,
        "MOST_OWN_TURNS": _most_own_turns(phases),
        "UNITS_AHEAD": layout.UNITS_AHEAD,
        "AHEAD_NS": layout.AHEAD_NS,
        "AFTER_RING_BYTES": layout.bytes_after_ring(phases),
        "MAILBOX_SIZE": mailbox_size,
        "GRID_MEMORY": grid_memory,
        "MAX_OPERANDS": max(len(phase.operands) for phase in phases),
        "OPERANDS": operands,
        "STEPS": len(phases),
    }
