"""The CUDA device against PyTorch eager and `torch.compile` on one GPU: Qwen2.5-1.5B decode and prefill, ResNets.

Decode of Qwen3-8B, which needs 110 GB of the GPU's memory, is measured with `--only large-decode`; decode with weights
in few bits with `--only quantized-decode,large-quantized-decode`, prefill with activations in 8 bits too with
`rounded-prefill` and, on a GPU with 100 GB, `large-rounded-prefill`, vision models in 8 bits with `quantized-vision`.

    python -m benchmarks.cuda [--only decode,prefill,…] [--quick] [--json cuda.json] [--merge]
    python -m benchmarks.cuda --only none --merge --json docs/measurements/cuda.json
        --document docs/measurements/cuda.md

Every contender is timed in turns in the same process, with the same weights. The floor is a lower bound from this GPU's
memory bandwidth and matrix multiplication rate, which every run measures. A long run can be split into parts: `--merge`
keeps the results that the file already holds.
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

from benchmarks.cuda.page import document, draw
from benchmarks.figures import Account, Figure, Run, load_run

if TYPE_CHECKING:
    from benchmarks.cuda.timing import Budget, Ceilings

TASKS = ("decode", "prefill", "resnet18", "resnet50", "start")
LARGE_DECODE = "large-decode"
QUANTIZED_DECODE, LARGE_QUANTIZED_DECODE = "quantized-decode", "large-quantized-decode"
QUANTIZATIONS = ("int4", "int8", "fp8")
ROUNDED_PREFILL, LARGE_ROUNDED_PREFILL = "rounded-prefill", "large-rounded-prefill"
QUANTIZED_VISION = "quantized-vision"
EXTRA_TASKS = (
    LARGE_DECODE,
    QUANTIZED_DECODE,
    LARGE_QUANTIZED_DECODE,
    QUANTIZED_VISION,
    ROUNDED_PREFILL,
    LARGE_ROUNDED_PREFILL,
)


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
    """Yield the measurements to make, one iterator of results for each compiled graph."""
    yield from _extra_measurements(only, ceilings, budget)
    yield from _language_measurements(only, quick, ceilings, budget)
    yield from _vision_measurements(only, ceilings, budget)


def _extra_measurements(only: set[str], ceilings: Ceilings, budget: Budget) -> Iterator[Iterator[Figure | Account]]:
    """Yield measurements of decode of larger or quantized models, and of prefill with activations in 8 bits."""
    from benchmarks.configurations import llama3_1_8b, qwen2_1_5b, qwen3_8b
    from benchmarks.cuda import llm, quantized, rounded

    if LARGE_DECODE in only:
        models = llm.Models(llm.LARGE_MODEL, qwen3_8b(), seed=0)
        for cache_length, positions in llm.LARGE_POSITIONS.items():
            yield llm.measure_decode(LARGE_DECODE, models, cache_length, positions, ceilings, budget)
        del models  # whose memory the next ones may need
    small, large = (llm.MODEL, qwen2_1_5b()), (quantized.LARGE_MODEL, llama3_1_8b())
    for task, (name, config) in {QUANTIZED_DECODE: small, LARGE_QUANTIZED_DECODE: large}.items():
        for quantization in QUANTIZATIONS if task in only else ():
            few = quantized.QuantizedModels(name, config, quantization, seed=0)
            yield llm.measure_decode(task, few, 2048, llm.FEW_POSITIONS[2048], ceilings, budget)
            del few
    for task, (name, config) in {ROUNDED_PREFILL: small, LARGE_ROUNDED_PREFILL: large}.items():
        if task in only:
            yield rounded.measure_rounded_prefill(task, name, config, 2048, ceilings, budget)


def _language_measurements(
    only: set[str], quick: bool, ceilings: Ceilings, budget: Budget
) -> Iterator[Iterator[Figure | Account]]:
    """Yield measurements of decode and prefill of Qwen2.5-1.5B, which share one set of weights."""
    from benchmarks.configurations import qwen2_1_5b
    from benchmarks.cuda import llm

    if not only & {"decode", "prefill"}:
        return
    models = llm.Models(llm.MODEL, qwen2_1_5b(), seed=0)
    if "decode" in only:
        for cache_length, positions in (llm.FEW_POSITIONS if quick else llm.POSITIONS).items():
            yield llm.measure_decode("decode", models, cache_length, positions, ceilings, budget)
    if "prefill" in only:
        for tokens in llm.FEW_PROMPTS if quick else llm.PROMPTS:
            yield llm.measure_prefill(models, tokens, ceilings, budget)


def _vision_measurements(only: set[str], ceilings: Ceilings, budget: Budget) -> Iterator[Iterator[Figure | Account]]:
    """Yield measurements of ResNets in float16, and of networks in 8 bits."""
    from benchmarks.cuda import integers, vision

    for task in sorted(only & vision.MODELS.keys()):
        for batch in vision.BATCHES:
            yield vision.measure_resnet(task, batch, ceilings, budget)
    for name, batches in integers.BATCHES.items() if QUANTIZED_VISION in only else ():
        for batch in batches:
            yield integers.measure_integers(name, batch, ceilings, budget)


def line(entry: Figure | Account) -> str:
    case = ", ".join(f"{name} {value}" for name, value in entry.case.items())
    if isinstance(entry, Account):
        rows = [f"    {ms:8.4f} ms {launches:5.0f} × {name[:70]}" for name, ms, launches in entry.rows[:10]]
        busy = sum(ms for _, ms, _ in entry.rows)
        return "\n".join([f"  breakdown of {case}: step {entry.step_ms:.4f} ms, kernels {busy:.4f} ms", *rows])
    times = ", ".join(f"{name} {ms:.4f}" for name, ms in entry.ms.items())
    errors = ", ".join(f"{error:.2e}" for error in entry.errors.values())
    return (
        f"{entry.model} {entry.task} ({case}): {times} ms; floor {entry.floor_ms:.4f} ms ({entry.floor}); "
        f"errors {errors}; {entry.steady} {entry.notes}"
    )


def run_all(only: set[str], quick: bool, limit: float, path: Path | None, earlier: Run | None) -> tuple[Run, int]:
    """Measure, printing and saving each result at once.

    A measurement that fails is reported and does not stop the others.

    Args:
        only: The tasks to measure.
        quick: Measure fewer cases and rounds.
        limit: Seconds after which no further `torch.compile` is started.
        path: File to save to. None: results are not saved.
        earlier: A run to merge the results into. None: there is none.

    Returns:
        The merged run, and the exit status.
    """
    from benchmarks.cuda.timing import Budget, measure_ceilings

    started, status = time.perf_counter(), 0
    ceilings = measure_ceilings()
    run = Run(machine(ceilings))
    print(run.machine, flush=True)
    budget = Budget(rounds=5 if quick else 9, may_compile=lambda: time.perf_counter() - started < limit)

    def save() -> Run:
        whole = earlier.merged(run) if earlier else run
        if path is not None:
            whole.save(path)
        return whole

    save()  # before measuring, so that results of another machine are refused at once
    for measurement in measurements(only, quick, ceilings, budget):
        try:
            for entry in measurement:
                print(f"[{time.perf_counter() - started:.0f} s] {line(entry)}", flush=True)
                if isinstance(entry, Figure):
                    run.figures = [*(figure for figure in run.figures if figure.key != entry.key), entry]
                else:
                    run.accounts.append(entry)
                save()
        except Exception:
            traceback.print_exc()
            status = 1
    if "start" in only:
        from benchmarks.cuda.start import measure_start

        run.other = measure_start()
        print(run.other, flush=True)
    return save(), status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only_help = f"comma-separated tasks, also {', '.join(EXTRA_TASKS)}, or none (default: %(default)s)"
    parser.add_argument("--only", default=",".join(TASKS), help=only_help)
    parser.add_argument("--quick", action="store_true", help="measure fewer positions, prompts and rounds")
    parser.add_argument("--limit", type=float, default=420, help="start no torch.compile after this many seconds")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--merge", action="store_true", help="keep the other results in the file")
    parser.add_argument("--document", type=Path, help="write a Markdown page of tables")
    parser.add_argument("--chart", type=Path, help="draw a chart, as .svg or .png")
    arguments = parser.parse_args()
    only = set(arguments.only.split(",")) - {"none"}
    if unknown := only - {*TASKS, *EXTRA_TASKS}:
        parser.error(f"unknown task {', '.join(sorted(unknown))}; choose from {', '.join((*TASKS, *EXTRA_TASKS))}")
    run = load_run(arguments.json) if arguments.merge and arguments.json and arguments.json.is_file() else None
    status = 0
    if only:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "npu-sim-inductor"))
        run, status = run_all(only, arguments.quick, arguments.limit, arguments.json, run)
    if run is None:
        parser.error("there are no results: give tasks to measure, or a file of results with --json and --merge")
    if arguments.chart:
        draw(run, arguments.chart)
    if arguments.document:
        arguments.document.write_text(document(run), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
