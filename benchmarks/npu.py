"""The speed of the simulated NPU on this machine: timing programs, computing on them, compiling and sweeping.

    python -m benchmarks.npu [--only resnet,smollm2,qwen,sweep,trace] [--document docs/measurements/npu.md]

All is for the chip `edge`. ResNets have seeded random weights and are quantized to int8 here; Qwen2.5-1.5B is compiled
by its configuration, without weights. A program is timed as `simulate` does, decoding and verifying it included.
"""

from __future__ import annotations

import os
import platform
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.cpu.machine import cpu_name, usable_cores

if TYPE_CHECKING:
    from npu_model import Chip

CHIP = "edge"
ROUNDS = 3
CALIBRATION = 2  # images
TOKENS = 4  # of SmolLM2
CACHE_LENGTH = 512
CHECKED_FACTOR = 5  # a limit with all checks, by that without
SWEEP = "sram=512K..4M,arrays=1..8,lanes=32..256"  # 64 chips
LIMITS = {SWEEP: 10.0, f"{SWEEP},bandwidth=6.4..51.2": 60.0}  # sweep → seconds on two cores; the second is of 256 chips
REQUESTS = 10_000
ARRIVALS = 20.0  # requests a second


@dataclass(frozen=True)
class Line:
    """One measurement.

    Attributes:
        what: Description of what was timed.
        limit: Seconds that it should stay below; None if no limit is stated.
        first: Seconds of the first time, which includes preparations for later ones.
        again: Median seconds of later times; None if there was only one.
        processor: Median seconds of processor time, of later times if there are any. None: not measured.
        problem: Reason why it was not measured; empty if it was.
    """

    what: str
    limit: float | None
    first: float = 0.0
    again: float | None = None
    processor: float | None = None
    problem: str = ""

    def row(self) -> str:
        """Return the measurement as a row of a Markdown table."""
        if self.problem:
            return f"| {self.what} | not measured: {self.problem} | | | {_seconds(self.limit)} |"
        numbers = (self.first, self.again, self.processor, self.limit)
        return f"| {' | '.join([self.what, *map(_seconds, numbers)])} |"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def timed(what: str, limit: float | None, run: Callable[[], object], rounds: int = ROUNDS) -> Line:
    """Time a function once, and then `rounds` times more."""
    seconds, busy = [], []
    for _ in range(1 + rounds):
        start = time.perf_counter(), time.process_time()
        run()
        seconds.append(time.perf_counter() - start[0])
        busy.append(time.process_time() - start[1])
    again = statistics.median(seconds[1:]) if rounds else None
    return Line(what, limit, seconds[0], again, statistics.median(busy[1:] or busy))


def resnet_lines() -> Iterator[Line]:
    """Measure ResNet-18 and ResNet-50 in int8: compiling, simulating time, computing results, and all checks."""
    from npu_compiler import CompileOptions
    from npu_compiler import compile as compile_ir
    from npu_model import NPUBackend, NPUTarget, load_chip, simulate
    from npu_runtime import Executor, load_weights
    from npu_sim.cache import compile_cached

    chip, options = load_chip(CHIP), CompileOptions(compute_dtype="float32")
    for name, limit in (("ResNet-50", 3.0), ("ResNet-18", 1.0)):
        title, (ir, state, x) = f"{name}, int8", quantized(name.replace("-", "").lower())
        compiled = partial(compile_ir, ir, NPUTarget(chip), options)
        if name == "ResNet-50":
            yield timed(f"compile {title}, cold", 3.0, compiled, rounds=0)
            with _empty_cache():
                compile_cached(ir, NPUTarget(chip), options)
                yield timed(f"compile {title}, cached", None, partial(compile_cached, ir, NPUTarget(chip), options))
        program = compiled()
        yield timed(f"time {title}", 0.5, partial(simulate, program, chip))
        for checked in (False, True):
            backend = NPUBackend(chip, checked)
            executor, weights = Executor(program, backend), load_weights(state, program, backend)
            inputs = {program.input_specs[0].name: x}
            yield timed(*_computed(title, limit, checked), partial(executor.run, inputs, weights))


def quantized(name: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return the IR and the weights of a ResNet in int8, and an input."""
    from npu_sim.extract import extract_ir
    from npu_sim.quantizing.networks.quantize import quantize_network
    from npu_sim.vision import resnet

    model = getattr(resnet, name)().eval()
    resnet.seed_weights(model, seed=0)
    x, *images = (resnet.random_images(1, seed=seed) for seed in range(1 + CALIBRATION))
    network = quantize_network(extract_ir(model, (x,)), model.state_dict(), [image.numpy() for image in images])
    return network.ir, network.weights, x.numpy()


def _computed(title: str, limit: float, checked: bool) -> tuple[str, float]:
    """Return the name and the limit of a line for computing results."""
    return (f"compute {title}, all checks", CHECKED_FACTOR * limit) if checked else (f"compute {title}", limit)


def smollm2_lines() -> Iterator[Line]:
    """Measure a token of SmolLM2-135M with the 4-bit weights of its file, and in bfloat16."""
    from npu_model import NPUBackend, load_chip
    from npu_runtime import Device
    from npu_sim.llm import LanguageModel, load_checkpoint

    for quantization, says in (("checkpoint", "4-bit weights"), ("none", "bfloat16")):
        checkpoint = load_checkpoint("smollm2", "bfloat16", quantization)
        for checked in (False, True):
            device = Device(f"npu:{CHIP}")
            device.backend = NPUBackend(load_chip(CHIP), checked)
            model = LanguageModel(checkpoint, device=device, cache_length=CACHE_LENGTH)
            tokens = iter(model.generate([1, 2, 3], 2 + TOKENS))
            next(tokens)  # the prefill's
            title = f"a token of SmolLM2-135M, {says}"
            yield timed(*_computed(title, 1.0, checked), partial(next, tokens), rounds=TOKENS)


def qwen_lines() -> Iterator[Line]:
    """Measure the simulation of time for a decode step of Qwen2.5-1.5B, without computing results."""
    from benchmarks.configurations import qwen2_1_5b
    from npu_compiler.errors import NPUError
    from npu_model import NPUTarget, load_chip, simulate
    from npu_sim.llm import Checkpoint, compile_decode_loop

    chip = load_chip(CHIP)
    for quantization in (None, "int8", "int4"):
        what = f"time a decode step of Qwen2.5-1.5B, {quantization or 'bfloat16'}"
        checkpoint = Checkpoint(
            "qwen2.5-1.5b", qwen2_1_5b(), {}, "bfloat16", load_tokenizer=lambda: None, quantization=quantization
        )
        try:
            program = compile_decode_loop(checkpoint, 2048, NPUTarget(chip))
        except NPUError as error:
            yield Line(what, 1.0, problem=str(error).splitlines()[0].removesuffix(":"))
            continue
        yield timed(what, 1.0, partial(simulate, program, chip))


def sweep_lines() -> Iterator[Line]:
    """Measure lowering and timing ResNet-50 in float16: on a chip whose DRAM has banks, and on those of sweeps."""
    from npu_compiler import CompileOptions
    from npu_compiler import compile as compile_ir
    from npu_model import load_chip, simulate
    from npu_model.analysis.sweep import parse_sweep, sweep
    from npu_sim.vision.models import extract_model_ir, find_model

    chip = load_chip(CHIP)
    program = compile_ir(extract_model_ir(find_model("resnet50")), options=CompileOptions(compute_dtype="float16"))
    yield timed("lower and time ResNet-50, float16, DRAM with banks", 2.0, partial(simulate, program, with_banks(chip)))
    for ranges, limit in LIMITS.items():
        chips, before = parse_sweep(ranges, chip), _of_children()
        what = f"sweep of ResNet-50, float16, {len(chips)} chips"
        line = timed(what, limit, partial(sweep, program, chips), rounds=0)
        yield replace(line, processor=_of_children() - before)


def with_banks(chip: Chip) -> Chip:
    """Return a chip whose DRAM has four channels of LPDDR5, at its own bandwidth and latency."""
    from npu_model.chip import DramBanks
    from npu_model.chip.description import DRAM_KINDS

    assert chip.dram is not None
    values: dict[str, Any] = dict(DRAM_KINDS["lpddr5"])
    return replace(chip, dram=replace(chip.dram, banks=DramBanks(kind="lpddr5", channels=4, **values)))


def _of_children() -> float:
    """Return the seconds of processor time of all processes that this one started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def trace_lines() -> Iterator[Line]:
    """Measure the simulation of a server on a chip, without and then with the prices of its steps."""
    from typer.testing import CliRunner

    from npu_sim.cli import app

    rng, now = random.Random(0), 0.0
    rows = ["arrival_seconds,prompt_tokens,new_tokens"]
    for _ in range(REQUESTS):
        now += rng.expovariate(ARRIVALS)
        rows.append(f"{now:.4f},{rng.randint(16, 512)},{rng.randint(8, 128)}")
    with _empty_cache(), tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "requests.csv"
        trace.write_text("\n".join(rows), encoding="utf-8")

        def serve() -> None:
            result = CliRunner().invoke(app, ["simulate", "smollm2", "--npu", "datacenter", "--trace", str(trace)])
            if result.exit_code:
                raise RuntimeError(result.output)

        yield timed(f"serve {REQUESTS:,} requests, SmolLM2-135M on `datacenter`", 30.0, serve, rounds=1)


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Use an empty folder as the cache of programs within this context."""
    before = os.environ.get("NPU_SIM_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NPU_SIM_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("NPU_SIM_CACHE")
            if before is not None:
                os.environ["NPU_SIM_CACHE"] = before


PARTS: dict[str, Callable[[], Iterator[Line]]] = {
    "resnet": resnet_lines,
    "smollm2": smollm2_lines,
    "qwen": qwen_lines,
    "sweep": sweep_lines,
    "trace": trace_lines,
}


def machine() -> dict[str, Any]:
    """Return the CPU, its load, and the versions of Python and NumPy."""
    import numpy as np

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "load": load,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": date.today().isoformat(),
    }


def page(lines: list[Line], where: dict[str, Any]) -> str:
    """Return the page of measurements in Markdown."""
    busy = f", beside {where['load']:.0f} other processes" if where["load"] >= 1 else ""
    versions = f"Python {where['python']}, NumPy {where['numpy']}"
    return PAGE.format(
        machine=f"{where['cpu']}, {where['cores']} cores{busy}; {versions}, {where['date']}",
        rows="\n".join(line.row() for line in lines),
        factor=CHECKED_FACTOR,
    )


PAGE = """# The simulated NPU

Seconds that a machine takes to simulate the chip `edge`. `python -m benchmarks.npu` writes this page.

{machine}.

| what | first time | again | processor | limit |
|---|--:|--:|--:|--:|
{rows}

- *again* is the median of later times, *processor* the processor's time of these, which other processes disturb less.
- *time*: `simulate` on a compiled program, without data: decode it, verify it, run all engines.
- *compute*: the program with data, on the device `npu:edge`. The first time binds instructions to memories and
  schedules them; later runs compute in the order of the first. A token includes the host's part of a step.
- *all checks*: every read is of something written, and nothing races. Each run is scheduled. The limit is {factor}
  times that without checks.
- *compile, cached*: find the program in the cache by its IR.
- *lower and time*: choose tilings and cascades, and run all engines; the DRAM is four channels of LPDDR5.
- A sweep lowers and times the network for each chip, in a process for each core; *processor* is that of all of them.
- *serve*: `simulate --trace`. The first time simulates the programs of the steps, in a process for each core; their
  prices are kept.
"""


def main(
    only: Annotated[str, typer.Option(help=f"Comma-separated parts: {', '.join(PARTS)}.")] = ",".join(PARTS),
    document: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
) -> None:
    """Measure, and print or write the page."""
    unknown = set(only.split(",")) - set(PARTS)
    if unknown:
        raise typer.BadParameter(f"unknown part {', '.join(sorted(unknown))}; choose of {', '.join(PARTS)}")
    where, lines = machine(), []
    for name in only.split(","):
        for line in PARTS[name]():
            typer.echo(line.row(), err=True)
            lines.append(line)
    text = page(lines, where)
    if document is None:
        typer.echo(text, nl=False)
    else:
        document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
