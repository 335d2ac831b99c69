"""Copies that the CUDA target leaves out: what is written to their targets instead, and that answers stay the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_on_cpu import run_on_cpu
from cuda_reference import LaidOut, ReferenceBackend
from drawn import drawn
from random_concatenations import RandomConcatenations
from torch import nn

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import ConvolutionLaunch, launch_of
from cuda_runtime.tuned_convolutions import kernels_of
from npu_runtime import CPUBackend, DAGExecutor, load_weights
from npu_sim.extract import extract_ir


class Rotation(nn.Module):
    """Rotary embedding of all tokens but the first, as EVA-02 writes it."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rest = x[:, :, 1:]
        turned = torch.stack([-rest[..., 1::2], rest[..., ::2]], -1).reshape(rest.shape)
        return torch.cat([x[:, :, :1], rest * cos + turned * sin], 2)


def test_rotated_rows_are_written_into_a_concatenation() -> None:
    x, cos, sin = torch.randn(2, 3, 9, 8), torch.randn(8, 8), torch.randn(8, 8)
    ir = extract_ir(Rotation(), (x, cos, sin))
    plan = npu_compiler.partition(ir, target=LaidOut(), compute_dtype="float32")
    dag = DAGExecutor(plan, ReferenceBackend())
    names = [meta["name"] for meta in ir["graph_inputs"]]
    (found,) = dag.execute(dict(zip(names, (x.numpy(), cos.numpy(), sin.numpy()), strict=True))).values()
    torch.testing.assert_close(torch.from_numpy(found), Rotation()(x, cos, sin))
    program = npu_compiler.compile(ir, LaidOut(), npu_compiler.CompileOptions(compute_dtype="float32"))
    copies = [call for call in program.kernels if call.kernel.startswith("copy")]
    assert [call.outputs[0].shape[2] for call in copies] == [1], "only the first token is copied"


DRAWS = 12


@pytest.mark.parametrize("number", range(DRAWS))
def test_drawn_concatenations_have_pytorchs_results(number: int, seed: int) -> None:
    module = RandomConcatenations(seed + number).eval()
    with torch.no_grad():
        ir, expected = extract_ir(module, (module.example,)), module(module.example)
    dag = DAGExecutor(npu_compiler.partition(ir, target=LaidOut(), compute_dtype="float32"), ReferenceBackend())
    dag.load_weights(module.state_dict())
    results = dag.execute({ir["graph_inputs"][0]["name"]: module.example.numpy()})
    for result, reference in zip(results.values(), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(result), reference, atol=2e-3, rtol=2e-3, msg=module.source)


class Dense(nn.Module):
    """A block of DenseNet: each layer reads all results before it, and the pooled input."""

    def __init__(self, channels: int, growth: int, depth: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(3, 2, 1)
        widths = range(channels, channels + depth * growth, growth)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, 2 * growth, 1, bias=False),
                nn.BatchNorm2d(2 * growth),
                nn.ReLU(),
                nn.Conv2d(2 * growth, growth, 3, padding=1),
            )
            for width in widths
        )
        self.last = nn.Conv2d(channels + depth * growth, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.pool(x)]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1)))
        result: torch.Tensor = self.last(torch.cat(parts, 1))
        return result


class OneShot(nn.Module):
    """A block of VoVNet: each layer reads the result of the one before, and the last one reads all of them."""

    def __init__(self, channels: int, growth: int, depth: int) -> None:
        super().__init__()
        widths = [channels, *[growth] * depth]
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.ModuleList(nn.Conv2d(width, growth, 3, padding=1) for width in widths[:-1])
        self.last = nn.Conv2d(sum(widths), channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.pool(x)]
        for layer in self.layers:
            parts.append(layer(parts[-1]).relu())
        result: torch.Tensor = self.last(torch.cat(parts, 1))
        return result


@pytest.mark.parametrize("kind", drawn([Dense, OneShot], 1 / 2, lambda kind: kind.__name__))
def test_chained_concatenations_copy_nothing(kind: type[nn.Module], seed: int, tmp_path: Path) -> None:
    """Right by the real kernels too, in the form for GPUs whose instructions a CPU can follow."""
    torch.manual_seed(seed)
    module, x = kind(8, 8, 2).eval(), torch.randn(2, 8, 4, 4)
    with torch.no_grad():
        ir, expected = extract_ir(module, (x,)), module(x)
    target = CUDACodegenTarget(GPU(capability=70, shared_memory=64 * 1024))
    program = npu_compiler.compile(ir, target, npu_compiler.CompileOptions(compute_dtype="float16"))
    plan = program.plan
    (view,) = plan.output_views.values()
    copies = [call.outputs[0].buffer for call in plan.calls if call.kernel in ("copy_kernel", "transpose")]
    assert copies == [view.buffer], "only the result is copied, from channels-last to row-major"
    calls = [kernels_of(call)[0] if isinstance(launch_of(call), ConvolutionLaunch) else call for call in plan.calls]
    weights = load_weights(module.state_dict(), program, CPUBackend(), strict=False)
    values = {name: buffer.to_numpy() for name, buffer in weights.items()}
    (spec,) = program.input_specs
    values[spec.name] = x.numpy().astype(np.float16)
    memory = run_on_cpu(replace(plan, calls=calls), values, tmp_path)
    found = torch.from_numpy(memory[view.buffer].astype(np.float32)).reshape(expected.shape)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
