"""The effect of each compiler stage as text: the number of nodes or kernels, and a diff."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from difflib import unified_diff
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_compiler import IRGraph
    from npu_compiler.program.plan import ExecutionPlan

CONTEXT = 1  # unchanged lines around changed ones


def describe_stages(stages: Iterable[tuple[str, IRGraph | ExecutionPlan]], *, full: bool) -> Iterator[str]:
    """Yield a text for each stage of `npu_compiler.trace_compilation`: its name, node or kernel counts, and a diff.

    The first stage is the graph as read; like a stage that turns a graph into a plan, it has no diff, only a count.

    Args:
        full: Also print each graph or plan whole, instead of the diff to the one before.
    """
    before: IRGraph | ExecutionPlan | None = None
    for name, state in stages:
        if full or before is None or type(state) is not type(before):
            yield "\n".join([f"after {name}: {_count(state)}", *([*_lines(state), ""] if full else [])])
        else:
            yield _change(name, before, state)
        before = state


def _parts(state: IRGraph | ExecutionPlan) -> tuple[str, list[str]]:
    """Return ("nodes", the ops of a graph's nodes) or ("kernels", the kernels of a plan's calls)."""
    from npu_compiler import IRGraph

    if isinstance(state, IRGraph):
        return "nodes", [node.base for node in state.nodes]
    return "kernels", [call.kernel for call in (*state.prologue, *state.calls)]


def _count(state: IRGraph | ExecutionPlan) -> str:
    noun, parts = _parts(state)
    return f"{noun} {len(parts)}"


def _lines(state: IRGraph | ExecutionPlan) -> list[str]:
    from npu_compiler import IRGraph, print_graph
    from npu_compiler.program.describe import print_calls

    return (print_graph(state) if isinstance(state, IRGraph) else print_calls(state)).splitlines()


def _change(name: str, before: IRGraph | ExecutionPlan, after: IRGraph | ExecutionPlan) -> str:
    old, new = _lines(before), _lines(after)
    if old == new:
        return f"after {name}: {_count(after)}, unchanged"
    parts, now = (Counter(_parts(state)[1]) for state in (before, after))
    lines = [f"after {name}: {_count(before)} → {now.total()}"]
    for title, difference in (("gone", parts - now), ("new", now - parts)):
        if difference:
            lines.append(f"  {title}: {', '.join(f'{part} × {count}' for part, count in difference.most_common())}")
    _, _, *diff = unified_diff(old, new, lineterm="", n=CONTEXT)
    return "\n".join([*lines, *diff, ""])
