"""Comparison of two programs, or of one on two chips: kernels, bytes, memory, and time if measured or simulated."""

from __future__ import annotations

from collections import defaultdict
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
    """Return the differences of two programs as JSON data.

    Args:
        a, b: Results of `program_facts`, with two more entries: `measured` is the seconds of a run, or None;
            `simulated` is the result of `simulated_facts`, or None.

    Returns:
        `totals`: name, unit and both values. `kernels`: launches, bytes and seconds of each kernel in both, the largest
            changes first; seconds are measured or, if not both programs were, simulated. `nodes`: nodes that the two
            compute with different kernels. `layers`: seconds and joules of each node, in order of appearance, if both
            were simulated. `is_measured`, `is_simulated`: whether both programs were.
    """
    is_measured = bool(a["measured"] and b["measured"])
    is_simulated = bool(a["simulated"] and b["simulated"])
    totals = [
        {"name": name, "unit": unit, "a": a["totals"][key], "b": b["totals"][key]}
        for name, (unit, key) in _TOTALS.items()
    ]
    totals.append(
        {"name": "peak in use", "unit": "bytes", "a": a["arena"]["peak_bytes"], "b": b["arena"]["peak_bytes"]}
    )
    if is_measured:
        totals.append({"name": "run", "unit": "seconds", "a": a["measured"]["run"], "b": b["measured"]["run"]})
    if is_simulated:
        totals += _simulated_totals(a["simulated"], b["simulated"])
    times = [_seconds(each) for each in (a, b)] if is_measured or is_simulated else None
    return {
        "is_measured": is_measured,
        "is_simulated": is_simulated,
        "totals": totals,
        "kernels": _kernels(a["calls"], b["calls"], times),
        "nodes": _nodes(a["calls"], b["calls"]),
        "layers": _layers(a, b) if is_simulated else [],
    }


def _seconds(facts: Mapping[str, Any]) -> list[float]:
    """Return the seconds of each kernel call: measured, or simulated if nothing was measured."""
    if facts["measured"]:
        return [call["seconds"] for call in facts["calls"]]
    return [call["own"] for call in facts["simulated"]["calls"]]


def _simulated_totals(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows that compare two simulated runs: time and its parts, traffic, and energy if both chips declare it."""
    rows = [
        {"name": "simulated run", "unit": "seconds", "a": a["run"], "b": b["run"]},
        {"name": "the roofline allows", "unit": "seconds", "a": a["least"], "b": b["least"]},
        {"name": "matrix peak in use", "unit": "share", "a": a["utilization"], "b": b["utilization"]},
        {
            "name": "DRAM bandwidth in use",
            "unit": "share",
            "a": a["bandwidth_utilization"],
            "b": b["bandwidth_utilization"],
        },
        {"name": "time computing", "unit": "seconds", "a": a["computing"], "b": b["computing"]},
    ]
    rows += _by_part("stalled by {}", "seconds", a["stalls"], b["stalls"])
    rows += _by_part("{}", "bytes", a["traffic"], b["traffic"])
    if a["energy"] and b["energy"]:
        whole = (sum(each["energy"].values()) for each in (a, b))
        rows += [{"name": "energy", "unit": "joules", **dict(zip("ab", whole, strict=True))}]
        rows += _by_part("energy of {}", "joules", a["energy"], b["energy"])
    return rows


def _by_part(name: str, unit: str, a: Mapping[str, float], b: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a row with both values for each part of a total, except for parts that are 0 in both."""
    return [
        {"name": name.format(part), "unit": unit, "a": a.get(part, 0), "b": b.get(part, 0)}
        for part in dict.fromkeys((*a, *b))
        if a.get(part) or b.get(part)
    ]


def _layers(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return module, family, seconds and joules of each node in both programs.

    Joules are None for a node that a program lacks, or on a chip whose file declares no energies.
    """
    rows: dict[str, dict[str, Any]] = {}
    for side, facts in (("a", a), ("b", b)):
        for call, simulated in zip(facts["calls"], facts["simulated"]["calls"], strict=True):
            known = {key: call[key] for key in ("node", "module", "family")}
            empty = {"seconds_a": 0.0, "seconds_b": 0.0, "joules_a": None, "joules_b": None}
            row = rows.setdefault(call["node"], {**known, **empty})
            row[f"seconds_{side}"] += simulated["own"]
            if simulated["energy"]:
                row[f"joules_{side}"] = (row[f"joules_{side}"] or 0.0) + sum(simulated["energy"].values())
    return list(rows.values())


def _kernels(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], times: Sequence[Sequence[float]] | None
) -> list[dict[str, Any]]:
    names = [f"{unit}_{side}" for unit in ("count", "bytes", "seconds") for side in "ab"]
    sums: dict[str, dict[str, Any]] = defaultdict(lambda: dict.fromkeys(names, 0))
    families: dict[str, str] = {}
    for number, (side, calls) in enumerate((("a", a), ("b", b))):
        for index, call in enumerate(calls):
            row = sums[call["kernel"]]
            families[call["kernel"]] = call["family"]
            row[f"count_{side}"] += 1
            row[f"bytes_{side}"] += call["bytes"]
            if times is not None:
                row[f"seconds_{side}"] += times[number][index]
    rows = [
        {
            "kernel": kernel,
            "family": families[kernel],
            **{name: row[name] if times or "seconds" not in name else None for name in names},
        }
        for kernel, row in sums.items()
    ]
    rank = "seconds" if times else "bytes"
    return sorted(rows, key=lambda row: (-abs(row[f"{rank}_a"] - row[f"{rank}_b"]), -row[f"{rank}_a"], row["kernel"]))


def _nodes(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes that the two programs compute with different kernels, in order of appearance."""
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
