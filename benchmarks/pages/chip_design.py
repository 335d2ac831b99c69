"""The tables of the tutorial `docs/design_a_chip.md`, in each of its languages, from the commands that it shows.

`python -m benchmarks.pages.chip_design` writes what they print now.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from npu_sim.cli import app

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "design_a_chip.md", DOCS / "design_a_chip.ko.md")
_SWEEP = re.compile(r"^npu-sim report (\S+) --npu edge --sweep (\S+)", re.MULTILINE)
_CHIP = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n\n\|.*\n\|.*\n)(?:\|.*\n)*")


def tables(page: str) -> dict[str, list[str]]:
    """Return the rows of the page's tables by name: `edge`, `twice`, and a model's name for its sweep."""
    sweeps = dict(_SWEEP.findall(page))
    (chip,) = _CHIP.findall(page)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        exec(chip, {})
        runs = {npu: {model: _simulated(model, npu) for model in sweeps} for npu in ("edge", "twice.toml")}
    found = {model: _sweep_rows(model, ranges) for model, ranges in sweeps.items()}
    found["edge"] = [_row(model, _figures(run)) for model, run in runs["edge"].items()]
    found["twice"] = [
        _row(
            model,
            f"{before:.2f} → {after:.2f} ms",
            f"{spent:.2f} → {saved:.2f} mJ",
            _times(before * spent, after * saved),
        )
        for model in sweeps
        for before, spent in [_cost(runs["edge"][model])]
        for after, saved in [_cost(runs["twice.toml"][model])]
    ]
    return found


def with_tables(page: str, rows: Mapping[str, Sequence[str]]) -> str:
    """Return the page with the rows of its tables replaced."""
    return _TABLE.sub(lambda table: table[1] + "".join(f"{row}\n" for row in rows[table[2]]), page)


def _simulated(model: str, npu: str) -> dict[str, Any]:
    """Return the simulated run of a model, for a language model that of its decode step."""
    result: dict[str, Any] = _json("simulate", model, "--npu", npu)
    run: dict[str, Any] = result.get("decode", result)
    return run


def _cost(run: Mapping[str, Any]) -> tuple[float, float]:
    """Return the milliseconds and millijoules of a run."""
    return 1e-3 * run["latency_us"], 1e-3 * run["energy_uj"]["total"]


def _figures(run: Mapping[str, Any]) -> tuple[str, ...]:
    latency, energy = _cost(run)
    waits = sum(run["stall_us"].values()) / run["latency_us"]
    shares = (
        run["utilization"],
        run["bandwidth_utilization"],
        waits,
        run["energy_uj"]["dram"] / run["energy_uj"]["total"],
    )
    return (f"{latency:.2f} ms", f"{energy:.2f} mJ", *(f"{share:.1%}" for share in shares))


def _sweep_rows(model: str, ranges: str) -> list[str]:
    """Return a row for each chip, the most efficient first.

    The last column is the chip's efficiency as a multiple of that of `edge`.
    """
    chips = _json("simulate", model, "--npu", "edge", "--sweep", ranges)["chips"]
    knobs = [part.partition("=")[0] for part in ranges.split(",")]
    edge = _cost(_simulated(model, "edge"))
    rows = []
    for chip in sorted(chips, key=lambda chip: float(chip["latency_us"] * chip["energy_uj"])):
        latency, energy = 1e-3 * chip["latency_us"], 1e-3 * chip["energy_uj"]
        settings = [_setting(knob, chip[knob]) for knob in knobs]
        figures = (f"{chip['area_mm2']:.2f} mm²", f"{latency:.2f} ms", f"{energy:.2f} mJ")
        rows.append("| " + " | ".join((*settings, *figures, _times(edge[0] * edge[1], latency * energy))) + " |")
    return rows


def _setting(knob: str, value: float) -> str:
    return f"{value / 1024:.0f} KiB" if knob == "sram" else f"{value:g}"


def _times(before: float, after: float) -> str:
    return f"{before / after:.2f}"


def _row(model: str, *cells: Any) -> str:
    flat = [cell for each in cells for cell in (each if isinstance(each, tuple) else (each,))]
    return f"| `{model}` | " + " | ".join(flat) + " |"


@cache
def _json(*args: str) -> Any:
    done = CliRunner().invoke(app, [*args, "--json"], prog_name="npu-sim")
    if done.exit_code:
        raise SystemExit(done.output)
    return json.loads(done.stdout)


def main() -> None:
    rows = tables(PAGES[0].read_text("utf-8"))
    for page in PAGES:
        page.write_text(with_tables(page.read_text("utf-8"), rows), "utf-8")


if __name__ == "__main__":
    main()
