"""Overhead of a compiled module's call over its program: `python -m benchmarks.call_overhead [--device cuda]`.

The program's own time is that of its launches alone, in the same process and in turns with calls of the module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer
from torch import nn

import npu_sim
from benchmarks.timing import back_to_back, interleave, wall_time
from npu_sim.module.compiled import CompiledModule
from npu_sim.module.runner import DeviceStep

ROUNDS = 15


def models(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Return small models, for which the overhead is large compared with the program, with inputs."""
    from npu_sim.vision.resnet import resnet18

    torch.manual_seed(0)
    perceptron = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    image = torch.randn(1, 3, 64, 64, device=device, dtype=dtype)
    modules: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "MLP, 4 weights": (perceptron, (torch.randn(8, 64, device=device, dtype=dtype),)),
        "ResNet-18, 102 weights": (resnet18(), (image,)),
    }
    return {name: (model.to(device, dtype).eval(), args) for name, (model, args) in modules.items()}


def measure(compiled: CompiledModule, args: tuple[torch.Tensor, ...]) -> tuple[float, float, float]:
    """Return median seconds of the program alone, of a call, and of the host's part of a call on an idle device."""
    for _ in range(5):
        compiled(*args)
    (runner,) = compiled._programs.runners.values()
    (step,) = runner._steps
    assert isinstance(step, DeviceStep)
    call, wait = partial(compiled, *args), waiting(compiled.device)
    launches, host_part = back_to_back(step.bound.launch, wait), wall_time(call)

    def program() -> float:
        step.ports.go_home()
        return launches()

    def host() -> float:
        wait()
        return host_part()

    results = interleave({"program": program, "call": back_to_back(call, wait), "host": host}, ROUNDS)
    return results["program"].median, results["call"].median, results["host"].median


def waiting(device: torch.device) -> Callable[[], object]:
    """Return a function that waits until a device has finished its work."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


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
        eager = back_to_back(partial(model, *args), waiting(where))()
        print(
            f"{name} | {1e6 * alone:.1f} | {1e6 * whole:.1f} | {1e6 * (whole - alone):.1f} | {1e6 * host:.1f} | "
            f"{1e6 * eager:.1f}"
        )


if __name__ == "__main__":
    typer.run(main)
