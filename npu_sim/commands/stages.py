"""What a compiler stage changed, as text: the counts of nodes and ops, and a diff of the graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from difflib import unified_diff
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_compiler import IRGraph

CONTEXT = 1  # unchanged lines around changed ones


def describe_stages(stages: Iterable[tuple[str, IRGraph]], *, full: bool) -> Iterator[str]:
    """A text for each (name, graph after the stage), the first of which is the graph as read.

    Args:
        full: Print each graph whole, instead of how it differs from the one before.
    """
    before: IRGraph | None = None
    for name, graph in stages:
        yield _whole(name, graph) if full else _first(name, graph) if before is None else _change(name, before, graph)
        before = graph


def _first(name: str, graph: IRGraph) -> str:
    return f"after {name}: nodes {len(graph.nodes)}"


def _whole(name: str, graph: IRGraph) -> str:
    from npu_compiler import print_graph

    return f"{_first(name, graph)}\n{print_graph(graph)}\n"


def _change(name: str, before: IRGraph, after: IRGraph) -> str:
    from npu_compiler import print_graph

    old, new = (print_graph(graph).splitlines() for graph in (before, after))
    if old == new:
        return f"{_first(name, after)}, unchanged"
    ops, now = (Counter(node.base for node in graph.nodes) for graph in (before, after))
    lines = [f"after {name}: nodes {len(before.nodes)} → {len(after.nodes)}"]
    for title, difference in (("gone", ops - now), ("new", now - ops)):
        if difference:
            lines.append(f"  {title}: {', '.join(f'{op} × {count}' for op, count in difference.most_common())}")
    _, _, *diff = unified_diff(old, new, lineterm="", n=CONTEXT)
    return "\n".join([*lines, *diff, ""])
