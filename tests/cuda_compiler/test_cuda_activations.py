"""Activations with attributes on CUDA: convolutions and products apply them to their results themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F
from cuda_on_cpu import EmulatedBackend
from cuda_reference import LaidOut, ReferenceBackend
from cuda_toolchain import compile_in_turn
from drawn import drawn
from torch import Tensor, nn
from torch_ir import extract_ir

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from npu_runtime import Executor, NPUBuffer, load_weights

ACTIVATIONS: dict[str, Callable[[Random], Callable[[Tensor], Tensor]]] = {
    "leaky_relu": lambda draw: nn.LeakyReLU(draw.uniform(0.01, 0.4)),
    "elu": lambda draw: nn.ELU(draw.uniform(0.2, 2)),
    "celu": lambda draw: nn.CELU(draw.uniform(0.2, 2)),
    "selu": lambda draw: nn.SELU(),
    "hardtanh": lambda draw: nn.Hardtanh(draw.uniform(-2, -0.1), draw.uniform(0.1, 2)),
    "softplus": lambda draw: nn.Softplus(draw.uniform(0.5, 2)),
    "mish": lambda draw: F.mish,
    "tanh": lambda draw: torch.tanh,
    "silu": lambda draw: F.silu,
}


class Layers(nn.Module):
    """Convolutions of all kinds and a product, each with an activation, and some with a sum behind or before it."""

    def __init__(self, activate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.dense = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.grouped, self.each = nn.Conv2d(32, 32, 3, padding=1, groups=4), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.last, self.activate = nn.Linear(32, 40), activate

    def forward(self, x: Tensor) -> Tensor:
        y = self.activate(self.first(x))
        y = y + self.activate(self.dense(y))
        y = self.activate(self.grouped(y) + y)
        y = self.activate(self.each(y)) + y
        return self.activate(self.last(y.flatten(2).transpose(1, 2)))


@pytest.mark.parametrize("name", drawn(ACTIVATIONS, 1 / 8))
def test_kernels_apply_activations_and_what_is_added_behind_them(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    module, x = Layers(ACTIVATIONS[name](Random(seed))).eval(), torch.randn(2, 3, 11, 14)
    ir = extract_ir(module, (x,), strict=False).to_dict()
    capability = Random(seed).choice([80, 90])
    options = npu_compiler.CompileOptions(compute_dtype="float16")
    plan = npu_compiler.compile(ir, CUDACodegenTarget(GPU(capability=capability)), options).plan
    kernels = [call.kernel for call in plan.calls]
    assert not [kernel for kernel in kernels if name in kernel or "add" in kernel]
    compile_in_turn(plan.sources.values())
    program = npu_compiler.compile(ir, LaidOut(), npu_compiler.CompileOptions(compute_dtype="float32"))
    backend = ReferenceBackend()
    (spec,) = program.input_specs
    given = {spec.name: NPUBuffer.from_numpy(x.numpy(), backend, spec=spec)}
    weights = load_weights(module.state_dict(), program, backend)
    (result,) = Executor(program, backend).run(given, weights).values()
    torch.testing.assert_close(torch.from_numpy(result.to_numpy()), module(x), rtol=1e-4, atol=1e-5)


def test_powers_are_those_of_torch(seed: int, tmp_path: Path) -> None:
    """Kernels multiply where the exponent is 2 or 3, be it a number or an element of a tensor."""
    draw, x = Random(seed), torch.linspace(-3, 3, 40)
    number, exponents = draw.choice([2, 3, 2.0, 3.0]), torch.tensor([2.0, 3.0, draw.choice([0.0, 1.0, 4.0, -1.0])])

    class Powers(nn.Module):
        def forward(self, x: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
            return x**number, x[:, None] ** exponents

    module, backend = Powers(), EmulatedBackend(tmp_path)
    ir = extract_ir(module, (x, exponents), strict=False).to_dict()
    program = npu_compiler.compile(ir, CUDACodegenTarget(), npu_compiler.CompileOptions(compute_dtype="float32"))
    given = {
        spec.name: NPUBuffer.from_numpy(value.numpy(), backend, spec=spec)
        for spec, value in zip(program.input_specs, (x, exponents), strict=True)
    }
    found = Executor(program, backend).run(given, {}).values()
    for result, expected in zip(found, module(x, exponents), strict=True):
        torch.testing.assert_close(torch.from_numpy(result.to_numpy()), expected, rtol=1e-6, atol=0)
