"""The page on architectures: a summary for each route, a table of models, and reasons for nodes off the device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
RUN = ("right", "wrong", "refused", "crashed")


def summary(records: Sequence[Record]) -> str:
    """Return a line with the number of models that ran, the share that are right, and the other outcomes."""
    counts = Counter(record["status"] for record in records)
    tried = sum(counts[status] for status in RUN)
    nodes, here = sum(r["nodes"] for r in records), sum(r["on_device"] for r in records)
    share = f"; {here / nodes:.1%} of {nodes} nodes on the device" if nodes else ""
    parts = ", ".join(f"{counts[status]} {status}" for status in RUN[1:])
    right = f" ({counts['right'] / tried:.1%})" if tried else ""
    return f"{counts['right']} of {tried} right{right}, {parts}; {counts['unbuilt']} could not be built{share}"


def histogram(records: Iterable[Record]) -> list[str]:
    """List the reasons for nodes off the device as `nodes, models  reason`, the most common first."""
    nodes: Counter[str] = Counter()
    models: Counter[str] = Counter()
    for record in records:
        reasons: Counter[str] = Counter()
        for reason, count in record["cpu"].items():
            reasons[_general(reason)] += count
        nodes.update(reasons)
        models.update(reasons.keys())
    return [f"{nodes[reason]:6} nodes, {count:4} models  {reason}" for reason, count in models.most_common()]


def _general(reason: str) -> str:
    """Return a reason with names and numbers of a single node replaced by placeholders."""
    return re.sub(r"-?\b\d[\d.e+-]*\b", "N", re.sub(r"'[^']*_\d*'|'[a-z_]+'", "…", reason))[:200]


def document(records: Sequence[Record]) -> str:
    """Return the page in Markdown."""
    lines = [
        "# Architectures",
        "",
        "Every model type of transformers for which general rules make a tiny configuration and inputs that eager",
        "PyTorch runs, through the front doors. A model is right if every output is by the criteria of",
        "[architecture.md](../architecture.md#6-what-right-means); in float32, the relative RMS error is at most 1e-4.",
        "Written by `python -m benchmarks.architectures`.",
        "",
    ]
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in sorted(records, key=lambda r: r["model_type"]):
        groups.setdefault((record["route"], record["device"], record["dtype"]), []).append(record)
    for (route, device, dtype), group in groups.items():
        lines += [f"## `{route}`, {device}, {dtype}", "", summary(group) + ".", ""]
        lines += [
            "| model type | result | Pearson r | error | largest | nodes | on the device | graph breaks | reason |",
            "|---|---|---:|---:|---:|---:|---:|---:|---|",
            *(_row(record) for record in group if record["status"] in RUN),
            "",
            "Why nodes are not on the device:",
            "",
            "```",
            *histogram(group)[:40],
            "```",
            "",
        ]
        unbuilt = [record["model_type"] for record in group if record["status"] == "unbuilt"]
        if unbuilt:
            lines += [f"Not built by the rules, or lacking a package: {', '.join(unbuilt)}.", ""]
    return "\n".join(lines)


def _row(record: Record) -> str:
    nodes = record["nodes"]
    cells = (
        record["model_type"],
        record["status"],
        "" if record["pearson"] is None else f"{record['pearson']:.6f}",
        "" if record["error"] is None else f"{record['error']:.1e}",
        "" if record["largest"] is None else f"{record['largest']:.1e}",
        str(nodes or ""),
        f"{record['on_device'] / nodes:.0%}" if nodes else "",
        str(record["graphs"] - 1) if nodes else "",
        record["reason"].replace("|", "\\|")[:160],
    )
    return f"| {' | '.join(cells)} |"
