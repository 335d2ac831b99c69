"""The effect of each fusion on Qwen2.5-1.5B: kernel launches and bytes moved.

    python -m benchmarks.pages.dispatches [--output docs/measurements/fusions.md]

The model is compiled with its real configuration on the meta device, so no weights are needed. Nothing is timed: the
numbers come from the compiler (`describe()`) and are the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.qwen import CACHE_LENGTH, LAYERS, PROMPT, step_graph
from npu_compiler import CompiledProgram, CompileOptions, compile, read_ir
from npu_compiler.fusion_patterns import FUSIONS
from npu_compiler.ops import declaration
from npu_compiler.program.describe import summary
from npu_compiler.program.kernels import Grid

DOCUMENT = Path(__file__).parents[2] / "docs" / "measurements" / "fusions.md"
# Dispatches of the same decode step by phase of development, from the project's design notes.
EARLIER_PHASES = {
    "baseline": "1,831",
    "broadcast binary ops": "~1,521",
    "fused RMSNorm": "~1,122",
    "SiLU + gate, masked softmax": "~1,038",
}


@dataclass(frozen=True)
class Traffic:
    """The bytes that a step must read.

    Attributes:
        weights: Every weight once, except an embedding table of which only some rows are read.
        cache: The keys and values that attention reads.
    """

    weights: int
    cache: int

    @property
    def floor(self) -> int:
        return self.weights + self.cache


def traffic(program: CompiledProgram) -> Traffic:
    plan = program.plan
    whole = {
        view.buffer for call in plan.calls if declaration(call).grid is not Grid.TABLE_ROWS for view in call.inputs
    }
    weights = sum(b.size_bytes for b in plan.buffers.values() if b.kind == "weight" and b.name in whole)
    return Traffic(weights, sum(plan.buffers[name].size_bytes for name in plan.donations.values()))


@dataclass(frozen=True)
class Row:
    """The step compiled with all fusions up to and including `fusion`, its kernel launches and bytes moved."""

    fusion: str
    launches: int
    bytes_moved: int


def measure(ir: dict[str, Any]) -> tuple[list[Row], Traffic]:
    """Compile the step without fusions, then with one more of `FUSIONS` at a time, in the order of application."""
    graph, names = read_ir(ir), list(FUSIONS)
    rows = []
    for count in range(len(names) + 1):
        program = compile(graph, options=CompileOptions(disabled_fusions=names[count:]))
        figures = summary(program.plan)
        launches, moved = int(figures["kernel launches"]), int(figures["bytes moved"])
        rows.append(Row(names[count - 1] if count else "none", launches, moved))
    return rows, traffic(program)


def table(rows: list[Row], floor: int) -> list[str]:
    """Return a Markdown table of the fusions that have an effect, and a line that names the others."""
    lines = ["| fusion enabled | launches | saved | bytes moved (MB) | × floor |", "|---|--:|--:|--:|--:|"]
    idle = []
    for before, row in zip((None, *rows), rows, strict=False):
        if before is not None and (before.launches, before.bytes_moved) == (row.launches, row.bytes_moved):
            idle.append(row.fusion)
            continue
        saved = "" if before is None else f"{before.launches - row.launches:,}"
        moved = f"{row.bytes_moved / 1e6:,.1f} | {row.bytes_moved / floor:.3f}"
        lines.append(f"| {row.fusion} | {row.launches:,} | {saved} | {moved} |")
    return [*lines, "", f"No effect on this graph: {', '.join(idle)}."]


_HEAD = f"""\
# The effect of each fusion

Qwen2.5-1.5B ({LAYERS} layers, bfloat16, tied embeddings) with a KV cache of {CACHE_LENGTH} tokens, compiled without
fusions and then with one more at a time, in the order in which the compiler applies them (`FUSIONS`). The numbers are
those of `describe()`: the kernel launches of a step, and the bytes that they read and write, counting each distinct
element of an operand once. Nothing is timed. `python -m benchmarks.pages.dispatches` regenerates this page.

The floor is what no fusion can save: every weight is read once, and attention reads the whole KV cache, whose length is
static (rows beyond the position are masked). The embedding table is tied to the LM head, which reads all of it; of a
separate table, only the rows of the step's tokens would count. The floor leaves out activations.
"""


_BEFORE = """\
The project's design notes list the dispatches of the same decode step by phase of development. Even without fusions
there are fewer here, since transposes, slices and broadcasts are views, which launch no kernels.
"""


def document() -> str:
    lines = [_HEAD]
    for heading, tokens in (("A decode step", 1), (f"A prefill of {PROMPT} tokens", PROMPT)):
        rows, least = measure(step_graph(tokens))
        lines += [
            f"## {heading}",
            "",
            f"Floor: {least.weights / 1e6:,.1f} MB of weights + {least.cache / 1e6:,.1f} MB of keys and values"
            f" = {least.floor / 1e6:,.1f} MB.",
            "",
            *table(rows, least.floor),
            "",
        ]
        if tokens == 1:
            lines += [_BEFORE]
            lines += ["| phase | dispatches |", "|---|--:|"]
            lines += [f"| {name} | {launches} |" for name, launches in EARLIER_PHASES.items()] + [""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=DOCUMENT, help="the Markdown page to write (default: %(default)s)"
    )
    output: Path = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(document(), encoding="utf-8")
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
