"""The CPU device against PyTorch: SmolLM2 decode and prefill, ResNet-50.

    python -m benchmarks.cpu [--quick] [--json results.json] [--only decode,prefill,resnet50]

Each task times all contenders in turns in one run, with the same weights: the CPU device in 16 bits, PyTorch eager and
`torch.compile` in float32 and bfloat16. The floor is a lower bound of the time: a decode step must read every weight
once from memory; prefill and ResNet-50 are compared with the speed of PyTorch's own float32 matrix multiplication.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.peers import generation_step, language_model, module_step
from benchmarks.timing import Result, interleave, matrix_rate, read_bandwidth

POSITION = 128
PROMPT = 128


@dataclass
class Task:
    """The measurements of one task.

    Attributes:
        results: By contender, ours first.
        floor: A lower bound in seconds.
        floor_says: How the floor is derived.
    """

    name: str
    results: dict[str, Result]
    floor: float
    floor_says: str

    @property
    def ours(self) -> Result:
        return min((r for name, r in self.results.items() if name.startswith("npu-sim")), key=lambda r: r.median)

    @property
    def best_peer(self) -> tuple[str, Result]:
        peers = {name: result for name, result in self.results.items() if not name.startswith("npu-sim")}
        return min(peers.items(), key=lambda item: item[1].median)


def measure_language_model(cache_length: int, rounds: int, compiled: bool, only: set[str]) -> list[Task]:
    """Decode of one token at position 128, and prefill of 128 tokens; all compute the last token's logits only."""
    from npu_sim.llm import LanguageModel, load_checkpoint

    checkpoint = load_checkpoint("smollm2", "bfloat16")
    model = LanguageModel(checkpoint, device="cpu", cache_length=cache_length, chunk=PROMPT)
    prompt = list(np.random.default_rng(0).integers(0, model.vocab_size, PROMPT))

    def prefill() -> None:
        model.reset()
        model.prefill(prompt)

    def decode() -> None:
        del model.tokens[POSITION:]
        model.decode(1)

    prefill()
    contenders: dict[str, dict[str, Callable[[], object]]] = {
        "decode": {"npu-sim bfloat16": decode},
        "prefill": {"npu-sim bfloat16": prefill},
    }
    for dtype in (torch.bfloat16, torch.float32):
        peer = language_model(checkpoint.config, checkpoint.state, dtype)
        for mode in (False, True) if compiled else (False,):
            name = f"torch {'compile' if mode else 'eager'} {str(dtype).removeprefix('torch.')}"
            contenders["decode"][name] = generation_step(peer, 1, POSITION, cache_length, mode)
            contenders["prefill"][name] = generation_step(peer, PROMPT, 0, cache_length, mode)
    plan = model.decode_program.plan
    weight_bytes = sum(b.size_bytes for b in plan.buffers.values() if b.kind == "weight")
    bandwidth = read_bandwidth()
    assert model.prefill_program is not None
    flops = sum(call.flops for call in model.prefill_program.kernels if "matmul" in call.kernel)
    floors = {
        "decode": (weight_bytes / bandwidth, f"{weight_bytes / 1e6:.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s"),
        "prefill": (
            flops / (2 * matrix_rate()),
            f"{flops / 1e9:.1f} GFLOP at twice PyTorch's float32 rate, for bfloat16",
        ),
    }
    return [
        Task(f"SmolLM2-135M {name}", interleave(contenders[name], rounds), *floors[name])
        for name in contenders
        if name in only
    ]


def measure_resnet50(rounds: int, compiled: bool) -> list[Task]:
    """Classification of one 224 × 224 image, with random weights."""
    import npu_compiler
    from npu_runtime import Device, Executor, NPUBuffer, load_weights
    from npu_sim.vision import extract_model_ir, find_model
    from npu_sim.vision.resnet import random_images, resnet50, seed_weights

    model = resnet50().eval()
    seed_weights(model, 0)
    x = random_images(1, 0)
    device = Device("cpu")
    ir = extract_model_ir(find_model("resnet50"))

    def ours(compute_dtype: str) -> Callable[[], object]:
        program = npu_compiler.compile(ir, compute_dtype=compute_dtype)
        executor, weights = Executor(program, device), load_weights(model.state_dict(), program, device)
        spec = program.input_specs[0]
        inputs = {spec.name: NPUBuffer.from_numpy(x.numpy(), device, spec=spec)}
        return lambda: executor.run(inputs, weights)

    contenders = {f"npu-sim {dtype}": ours(dtype) for dtype in ("bfloat16", "float16")}
    for dtype in (torch.float32, torch.bfloat16):
        peer = resnet50().eval()
        peer.load_state_dict(model.state_dict())
        for mode in (False, True) if compiled else (False,):
            name = f"torch {'compile' if mode else 'eager'} {str(dtype).removeprefix('torch.')}"
            contenders[name] = module_step(peer.to(dtype), x.to(dtype), mode)
    flops = sum(call.flops for call in npu_compiler.compile(ir).kernels)
    floor = flops / matrix_rate()
    return [
        Task("ResNet-50", interleave(contenders, rounds), floor, f"{flops / 1e9:.1f} GFLOP at PyTorch's float32 rate")
    ]


def print_task(task: Task, console: Console) -> None:
    table = Table(title=f"{task.name}: floor {1e3 * task.floor:.1f} ms ({task.floor_says})")
    for heading in ("contender", "median ms", "best ms", "× ours", "× floor"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for name, result in task.results.items():
        ratio, above = result.median / task.ours.median, result.median / task.floor
        table.add_row(name, f"{1e3 * result.median:.1f}", f"{1e3 * result.best:.1f}", f"{ratio:.2f}", f"{above:.2f}")
    console.print(table)
    name, best = task.best_peer
    console.print(f"{task.name}: {best.median / task.ours.median:.2f} × as fast as the best of PyTorch ({name})\n")


def to_json(task: Task) -> dict[str, Any]:
    return {
        "name": task.name,
        "floor_ms": 1e3 * task.floor,
        "floor": task.floor_says,
        "median_ms": {name: 1e3 * result.median for name, result in task.results.items()},
        "best_ms": {name: 1e3 * result.best for name, result in task.results.items()},
        "speedup_over_best_peer": task.best_peer[1].median / task.ours.median,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="skip torch.compile and time fewer rounds")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument(
        "--only", default="decode,prefill,resnet50", help="comma-separated tasks (default: %(default)s)"
    )
    parser.add_argument(
        "--cache-length", type=int, default=512, help="capacity of the KV cache in tokens (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=0, help="rounds per task (default: 15, with --quick 5)")
    arguments = parser.parse_args()
    only = set(arguments.only.split(","))
    compiled, rounds = not arguments.quick, arguments.rounds or (5 if arguments.quick else 15)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "npu-sim-inductor"))
    tasks: list[Task] = []
    if only & {"decode", "prefill"}:
        tasks += measure_language_model(arguments.cache_length, rounds, compiled, only)
    if "resnet50" in only:
        tasks += measure_resnet50(rounds, compiled)
    console = Console()
    for task in tasks:
        print_task(task, console)
    if arguments.json:
        arguments.json.write_text(json.dumps([to_json(task) for task in tasks], indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
