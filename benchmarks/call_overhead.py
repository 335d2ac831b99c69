"""Overhead of a compiled module's call over its program: `python -m benchmarks.call_overhead [--device cuda]`.

The program's own time is that of its launches alone, in the same process and in turns with calls of the module.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import nn

import npu_sim
from npu_sim.module.compiled import CompiledModule
from npu_sim.module.runner import DeviceStep

ROUNDS = 15


def models(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Small models, of which the overhead is a large part, and one with many weights."""
    from npu_sim.vision.resnet import resnet18

    torch.manual_seed(0)
    perceptron = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    image = torch.randn(1, 3, 64, 64, device=device, dtype=dtype)
    found: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "MLP, 4 weights": (perceptron, (torch.randn(8, 64, device=device, dtype=dtype),)),
        "ResNet-18, 102 weights": (resnet18(), (image,)),
    }
    return {name: (model.to(device, dtype).eval(), args) for name, (model, args) in found.items()}


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds a call, back to back."""
    call()
    count = 1
    while True:
        _wait(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        _wait(device)
        elapsed = time.perf_counter() - start
        if elapsed > 0.02:
            return elapsed / count
        count *= 4


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(compiled: CompiledModule, args: tuple[torch.Tensor, ...]) -> tuple[float, float, float]:
    """Medians in seconds: of the program alone, of a call, and of the host's part of a call on an idle device."""
    for _ in range(5):
        compiled(*args)
    (runner,) = compiled._programs.runners.values()
    (step,) = runner._steps
    assert isinstance(step, DeviceStep)
    device = compiled.device
    alone, whole, host = [], [], []
    for _ in range(ROUNDS):
        step.ports.go_home()
        alone.append(seconds(step.bound.launch, device))
        whole.append(seconds(partial(compiled, *args), device))
        _wait(device)
        start = time.perf_counter()
        compiled(*args)
        host.append(time.perf_counter() - start)
    return statistics.median(alone), statistics.median(whole), statistics.median(host)


def main(device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu") -> None:
    """Print the overhead of a call for each model."""
    torch.set_grad_enabled(False)
    where = torch.device(device)
    dtype = torch.float16 if where.type == "cuda" else torch.float32
    print("model | program, µs | call, µs | overhead, µs | host's part, µs | eager, µs")
    for name, (model, args) in models(where, dtype).items():
        compiled = npu_sim.compile(model, args)
        assert isinstance(compiled, CompiledModule)
        alone, whole, host = measure(compiled, args)
        eager = seconds(partial(model, *args), where)
        print(
            f"{name} | {1e6 * alone:.1f} | {1e6 * whole:.1f} | {1e6 * (whole - alone):.1f} | {1e6 * host:.1f} | "
            f"{1e6 * eager:.1f}"
        )


if __name__ == "__main__":
    typer.run(main)
