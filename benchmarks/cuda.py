"""The CUDA device against PyTorch eager and `torch.compile` on one GPU: Qwen2.5-1.5B decode and prefill, ResNets.

    python -m benchmarks.cuda [--only decode,prefill,…] [--quick] [--json docs/cuda.json] [--merge]
    python -m benchmarks.cuda --only none --merge --json docs/cuda.json --document docs/cuda.md --chart docs/cuda.svg

Every figure stands beside those of its peers, from the same process and on the same weights, timed in turn, and beside
the floor that this GPU's own bandwidth and matrix rate set, which each run measures too. A long run can be made in
parts: `--merge` keeps the figures that the file holds already.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Account, Figure, Run, load_run
from benchmarks.report import document, draw

if TYPE_CHECKING:
    from benchmarks.gpu_timing import Budget, Ceilings

TASKS = ("decode", "prefill", "resnet18", "resnet50", "start")


def machine(ceilings: Ceilings) -> dict[str, Any]:
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": date.today().isoformat(),
        "read_tb_per_s": ceilings.bandwidth / 1e12,
        "bfloat16_tflop_per_s": ceilings.matrix_rate / 1e12,
    }


def measurements(
    only: set[str], quick: bool, ceilings: Ceilings, budget: Budget
) -> Iterator[Iterator[Figure | Account]]:
    """What there is to measure, one graph at a time."""
    from benchmarks import cuda_llm, cuda_vision

    if only & {"decode", "prefill"}:
        models = cuda_llm.Models(seed=0)
        if "decode" in only:
            for cache_length, positions in (cuda_llm.FEW_POSITIONS if quick else cuda_llm.POSITIONS).items():
                yield cuda_llm.measure_decode(models, cache_length, positions, ceilings, budget)
        if "prefill" in only:
            for tokens in cuda_llm.FEW_PROMPTS if quick else cuda_llm.PROMPTS:
                yield cuda_llm.measure_prefill(models, tokens, ceilings, budget)
    for task in sorted(only & cuda_vision.MODELS.keys()):
        for batch in cuda_vision.BATCHES:
            yield cuda_vision.measure_resnet(task, batch, ceilings, budget)


def line(entry: Figure | Account) -> str:
    case = ", ".join(f"{name} {value}" for name, value in entry.case.items())
    if isinstance(entry, Account):
        rows = [f"    {ms:8.4f} ms {launches:5.0f} × {name[:70]}" for name, ms, launches in entry.rows[:10]]
        busy = sum(ms for _, ms, _ in entry.rows)
        return "\n".join([f"  account of {case}: step {entry.step_ms:.4f} ms, kernels {busy:.4f} ms", *rows])
    times = ", ".join(f"{name} {ms:.4f}" for name, ms in entry.ms.items())
    errors = ", ".join(f"{error:.2e}" for error in entry.errors.values())
    return (
        f"{entry.model} {entry.task} ({case}): {times} ms; floor {entry.floor_ms:.4f} ms ({entry.floor}); "
        f"errors {errors}; {entry.steady} {entry.notes}"
    )


def run_all(only: set[str], quick: bool, limit: float, path: Path | None, found: Run | None) -> tuple[Run, int]:
    """Measure, print and save as it goes; the run, merged into what was found before, and the exit status.

    A measurement that fails is reported, and the others are still made.
    """
    from benchmarks.gpu_timing import Budget, measure_ceilings

    started, status = time.perf_counter(), 0
    ceilings = measure_ceilings()
    run = Run(machine(ceilings))
    print(run.machine, flush=True)
    budget = Budget(rounds=5 if quick else 9, may_compile=lambda: time.perf_counter() - started < limit)

    def save() -> Run:
        whole = found.merged(run) if found else run
        if path is not None:
            whole.save(path)
        return whole

    save()  # before anything is measured, so that figures of another machine are refused at once
    for measurement in measurements(only, quick, ceilings, budget):
        try:
            for entry in measurement:
                print(f"[{time.perf_counter() - started:.0f} s] {line(entry)}", flush=True)
                if isinstance(entry, Figure):
                    run.figures.append(entry)
                else:
                    run.accounts.append(entry)
                save()
        except Exception:
            traceback.print_exc()
            status = 1
    if "start" in only:
        from benchmarks.cuda_start import measure_start

        run.other = measure_start()
        print(run.other, flush=True)
    return save(), status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TASKS), help="tasks, by commas, or none (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few positions, prompts and rounds")
    parser.add_argument("--limit", type=float, default=420, help="seconds after which no torch.compile is started")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--merge", action="store_true", help="keep what the file holds of other figures")
    parser.add_argument("--document", type=Path, help="write the page of tables")
    parser.add_argument("--chart", type=Path, help="draw the chart: .svg or .png")
    arguments = parser.parse_args()
    only = set(arguments.only.split(",")) - {"none"}
    if unknown := only - set(TASKS):
        parser.error(f"no task {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    run = load_run(arguments.json) if arguments.merge and arguments.json and arguments.json.is_file() else None
    status = 0
    if only:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "npu-sim-inductor"))
        run, status = run_all(only, arguments.quick, arguments.limit, arguments.json, run)
    if run is None:
        parser.error("there are no figures: name tasks, or a file of them with --json and --merge")
    if arguments.chart:
        draw(run, arguments.chart)
    if arguments.document:
        chart = arguments.chart.name if arguments.chart else "cuda.svg"
        arguments.document.write_text(document(run, chart), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
