"""Two programs side by side: kernels, bytes, memory, and time where it was measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

# A total's name → its unit, and where it is among a program's facts.
_TOTALS = {
    "kernel launches": ("count", "kernel launches"),
    "launches once per set of weights": ("count", "prologue launches"),
    "work": ("flops", "FLOPs"),
    "bytes moved": ("bytes", "bytes moved"),
    "weights": ("bytes", "weight bytes"),
    "arena": ("bytes", "arena bytes"),
    "peak without weights": ("bytes", "peak bytes without weights"),
    "padding": ("bytes", "padding waste bytes"),
}


def compare_programs(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """The differences of two programs as JSON data.

    Args:
        a, b: From `program_facts`; `measured` has the seconds of a run, or is None.

    Returns:
        `totals`: name, unit and both values. `kernels`: launches, bytes and seconds of each kernel in both, the largest
        changes first. `nodes`: nodes that other kernels compute. `is_measured`: whether both were measured.
    """
    is_measured = bool(a["measured"] and b["measured"])
    totals = [
        {"name": name, "unit": unit, "a": a["totals"][key], "b": b["totals"][key]}
        for name, (unit, key) in _TOTALS.items()
    ]
    totals.append(
        {"name": "peak in use", "unit": "bytes", "a": a["arena"]["peak_bytes"], "b": b["arena"]["peak_bytes"]}
    )
    if is_measured:
        totals.append({"name": "run", "unit": "seconds", "a": a["measured"]["run"], "b": b["measured"]["run"]})
    return {
        "is_measured": is_measured,
        "totals": totals,
        "kernels": _kernels(a["calls"], b["calls"], is_measured),
        "nodes": _nodes(a["calls"], b["calls"]),
    }


def _kernels(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], is_measured: bool) -> list[dict[str, Any]]:
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for side, calls in (("a", a), ("b", b)):
        for call in calls:
            row = sums[call["kernel"]]
            row[f"count_{side}"] += 1
            row[f"bytes_{side}"] += call["bytes"]
            if is_measured:
                row[f"seconds_{side}"] += call["seconds"]
    names = [f"{unit}_{side}" for unit in ("count", "bytes", "seconds") for side in "ab"]
    rows = [
        {"kernel": kernel, **{name: row[name] if is_measured or "seconds" not in name else None for name in names}}
        for kernel, row in sums.items()
    ]
    rank = "seconds" if is_measured else "bytes"
    return sorted(rows, key=lambda row: (-abs(row[f"{rank}_a"] - row[f"{rank}_b"]), -row[f"{rank}_a"], row["kernel"]))


def _nodes(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The nodes whose kernels differ, in order of appearance."""
    sides: list[dict[str, list[str]]] = [defaultdict(list), defaultdict(list)]
    for side, calls in zip(sides, (a, b), strict=True):
        for call in calls:
            side[call["node"]].append(call["kernel"])
    left, right = sides
    return [
        {"node": node, "a": left.get(node, []), "b": right.get(node, [])}
        for node in dict.fromkeys((*left, *right))
        if left.get(node) != right.get(node)
    ]
