"""Predictions of `npu_model` for the H200 and for a CPU, compared with measurements.

    python -m benchmarks.simulated [--chip h200] [--chip-file chip.toml] [--json docs/simulated.json]

The measured times of the H200 are those of the other benchmarks: docs/measurements/cuda.json, a table of figures.md;
docs/simulated-measured.json has those of models that are compared with no other library. Per kernel, its accounts in
the former are compared by kind of kernel, since the CUDA device fuses other calls than the op-level program has.
Those of the CPU were measured by `benchmarks.simulated_cpu`, which also compares call by call.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import correlation

from benchmarks.figures import OURS, load_run
from benchmarks.simulated_programs import Case, cases, cpu_cases
from npu_compiler.files import write_atomically
from npu_model.chip import load_chip
from npu_model.result import Result
from npu_model.simulation import simulate

DOCS = Path(__file__).parents[1] / "docs"
MEASURED = DOCS / "measurements" / "cuda.json"
CHIPS = ("h200", "cpu")
CPU = DOCS / "simulated-cpu.json"
ALONE = DOCS / "simulated-measured.json"  # chip → model → batch → milliseconds
PROGRAMS = Path.home() / ".cache" / "npu-simulation" / "simulated"
# Kinds of the kernels in docs/measurements/cuda.json → families of our declarations.
KINDS = (
    (r"nvjet|matvec|splitKreduce", ("matmul",)),
    (r"conv|fprop", ("conv",)),
    (r"attention", ("attention",)),
    (r"rmsnorm", ("norm",)),
    (r"pool", ("pool",)),
)


@dataclass(frozen=True)
class Row:
    """A program on a chip: milliseconds predicted and measured, and the roofline's."""

    chip: str
    title: str
    dtype: str
    predicted_ms: float
    measured_ms: float
    roofline_ms: float
    source: str

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def measured(case: Case) -> tuple[float, str]:
    """(milliseconds, the document that says so)."""
    task, model, parameters = case.key
    if case.chip == "cpu":
        return float(json.loads(CPU.read_text("utf-8"))["programs"][case.name]["ms"]), CPU.name
    if task == "models":
        return _of_figures_page(model, dict(parameters)["batch"]), "figures.md"
    if task == "alone":
        models = json.loads(ALONE.read_text("utf-8"))[case.chip]
        return float(models[model][str(dict(parameters)["batch"])]), ALONE.name
    path = MEASURED
    for figure in load_run(path).figures:
        if (figure.task, figure.model, figure.case) == (task, model, dict(parameters)):
            return figure.ms.get(OURS) or figure.ms[f"{OURS} {case.dtype}"], f"measurements/{path.name}"
    raise LookupError(f"{path} has no {case.title}")


def _of_figures_page(model: str, batch: int) -> float:
    """Return our time from the table of vision, language and diffusion models, at batch 1 or the larger batch."""
    text = (DOCS / "figures.md").read_text("utf-8")
    section = text[text.index("*Vision, language and diffusion models*") :]
    row = re.search(rf"^\| {re.escape(model)}, .*$", section, re.MULTILINE)
    if row is None:
        raise LookupError(f"figures.md has no {model}")
    cells = [cell.strip(" *") for cell in row.group().split("|")]
    return float(cells[2 if batch == 1 else 5])


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The rank correlation of two series."""
    return correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks; equal values share the middle of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def by_kind(result: Result) -> dict[str, float]:
    """Predicted milliseconds by kind of kernel; of what is no kind by itself, nothing."""
    times: dict[str, float] = defaultdict(float)
    for call in result.calls:
        for _, families in KINDS:
            if call.family.startswith(families):
                times[families[0]] += 1e3 * result.chip.seconds(call.cycles)
    return times


def accounted(case: Case) -> dict[str, float]:
    """Measured milliseconds by kind of kernel; empty where the step was not taken apart."""
    times: dict[str, float] = defaultdict(float)
    if case.chip != "h200":
        return times
    task, model, parameters = case.key
    for account in load_run(MEASURED).accounts:
        if (account.task, account.model, account.case) == (task, model, dict(parameters)):
            for name, ms, _ in account.rows:
                kind = next((families[0] for pattern, families in KINDS if re.search(pattern, name)), None)
                if kind is not None:
                    times[kind] += ms
    return times


def table(rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = ["| chip | program | dtype | predicted, ms | measured, ms | error | roofline, ms | measured in |"]
    lines.append("|---|---|---|--:|--:|--:|--:|---|")
    for row in rows:
        times = f"{row.predicted_ms:.3g} | {row.measured_ms:.3g} | {row.error:+.0%} | {row.roofline_ms:.3g}"
        lines.append(f"| {row.chip} | {row.title} | {row.dtype} | {times} | {row.source} |")
    return "\n".join(lines) + "\n"


def rows_of_file(path: Path) -> list[Row]:
    """The rows that this benchmark wrote."""
    return [Row(**row) for row in json.loads(path.read_text("utf-8"))["rows"]]


def rank_of(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The rank correlation of (predicted, measured); None of fewer than two pairs."""
    return spearman(*zip(*pairs, strict=True)) if len(pairs) > 1 else None


def save(path: Path, rows: Sequence[Row], pairs: Sequence[tuple[float, float]]) -> None:
    """Write what there is so far as JSON."""
    data = {"rows": [asdict(row) for row in rows], "rank_correlation": rank_of(pairs), "kinds": len(pairs)}
    write_atomically(path, (json.dumps(data, indent=1) + "\n").encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=CHIPS, nargs="*", default=CHIPS)
    parser.add_argument("--chip-file", type=Path, help="use this chip instead of the shipped one")
    parser.add_argument("--programs", type=Path, default=PROGRAMS, help="where compiled programs are kept")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    pairs: list[tuple[float, float]] = []
    for case in (*cases(), *cpu_cases()):
        if case.chip not in arguments.chip:
            continue
        result = simulate(case.program(arguments.programs), load_chip(arguments.chip_file or case.chip))
        roofline = 1e3 * result.chip.seconds(result.roofline_cycles)
        rows.append(
            Row(case.chip, case.title, case.dtype, 1e3 * result.seconds, measured(case)[0], roofline, measured(case)[1])
        )
        predicted = by_kind(result)
        pairs += [(predicted[kind], ms) for kind, ms in accounted(case).items() if kind in predicted]
        if arguments.json:
            save(arguments.json, rows, pairs)
    print(table(rows), end="")
    print(f"rank correlation over kinds of kernels: {rank_of(pairs)} ({len(pairs)} pairs)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
