"""Networks in 8 bits on the CPU device against ONNX Runtime and OpenVINO, on the same integers and scales.

    python -m benchmarks.cpu.int8 [--only resnet50,mobilenet-v2] [--batch 1] [--rounds 20] [--threads 2]

The networks are quantized here, with four other inputs for calibration. The contenders read one ONNX file with
`QuantizeLinear` and `DequantizeLinear` at the same places as our graph has them. They are timed in turns; errors are
relative to the float network. Where a processor has no 8-bit dot products, contenders may compute with other integers
than those of the file, which shows in their errors.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu.contender import Array, Contender, prepare
from benchmarks.cpu.machine import limit_threads, usable_cores
from benchmarks.cpu.models import NETWORKS
from benchmarks.cpu.onnx import onnx_runtime, openvino
from benchmarks.cpu.onnx_int8 import write_onnx
from benchmarks.figures import OURS
from benchmarks.timing import interleave, settled, wall_time

_CALIBRATION_SEEDS = range(1, 5)


def contenders(name: str, batch: int, threads: int, folder: Path) -> tuple[dict[str, tuple[Contender, Array]], Array]:
    """Return the contenders for a network in 8 bits, each with its output, and the output of the float network."""
    from npu_sim.extract import extract_ir
    from npu_sim.quantizing.networks.quantize import quantize_network
    from npu_sim.vision.resnet import random_images

    network = NETWORKS[name]
    module, x = network.build(), network.inputs(batch)
    images = [random_images(batch, seed=seed).numpy() for seed in _CALIBRATION_SEEDS]
    quantized = quantize_network(extract_ir(module, (x,)), module.state_dict(), images)
    path = folder / f"{name}.onnx"
    inputs = {write_onnx(quantized.ir, quantized.weights, path): x.numpy()}
    prepared = prepare(
        {
            f"{OURS} int8": lambda: ours(quantized.ir, quantized.weights, x.numpy()),
            "ONNX Runtime int8": lambda: onnx_runtime(path, inputs, threads),
            "OpenVINO int8": lambda: openvino(path, inputs, threads, "f32"),
        },
        lambda name: True,
    )
    with torch.no_grad():
        return prepared, module(x).numpy()


def ours(ir: dict[str, Any], weights: dict[str, Array], x: Array) -> Contender:
    """Return our program on the CPU device as a contender."""
    import npu_compiler
    from npu_runtime import Device, Executor, NPUBuffer, load_weights

    program, device = (
        npu_compiler.compile(ir, options=npu_compiler.CompileOptions(compute_dtype="float32")),
        Device("cpu"),
    )
    executor, loaded = Executor(program, device), load_weights(weights, program, device)
    (spec,), (result,) = program.input_specs, program.output_specs
    inputs = {spec.name: NPUBuffer.from_numpy(x, device, spec=spec)}
    return Contender(
        wall_time(lambda: executor.run(inputs, loaded)),
        lambda: np.asarray(executor.run(inputs, loaded)[result.name].to_numpy(spec=result), np.float32),
    )


def measure(name: str, batch: int, rounds: int, threads: int) -> Table:
    """Return a table with the least and the median time and the error of each contender."""
    table = Table("contender", "least ms", "median ms", "error", title=f"{NETWORKS[name].name}, batch {batch}")
    with tempfile.TemporaryDirectory() as folder:
        prepared, exact = contenders(name, batch, threads, Path(folder))
        timers = {contender: settled(runner.seconds) for contender, (runner, _) in prepared.items()}
        results = interleave(timers, rounds, warmup=2)
    for contender, result in results.items():
        error = np.linalg.norm(prepared[contender][1] - exact) / np.linalg.norm(exact)
        table.add_row(contender, f"{1e3 * result.best:.2f}", f"{1e3 * result.median:.2f}", f"{error:.4f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", default="resnet50,mobilenet-v2,efficientnet-lite0", help="comma-separated networks")
    add("--batch", type=int, default=1, help="batch size (default: %(default)s)")
    add("--rounds", type=int, default=20, help="rounds of all contenders (default: %(default)s)")
    add("--threads", type=int, default=usable_cores(), help="number of threads (default: all usable cores)")
    arguments = parser.parse_args()
    limit_threads(arguments.threads)
    for name in arguments.only.split(","):
        Console().print(measure(name, arguments.batch, arguments.rounds, arguments.threads))


if __name__ == "__main__":
    main()
