"""Parts of concatenations on the CPU device, computed where they lie in them."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from random_concatenations import RandomConcatenations
from torch import Tensor, nn
from torch_ir import extract_ir

from npu_compiler import CompileOptions, compile, partition
from npu_compiler.program.placement import is_copy
from npu_compiler.program.plan import ExecutionPlan
from npu_runtime import CPUBackend, DAGExecutor, Executor, NPUBuffer, load_weights
from npu_runtime.cpu.native import available, build
from npu_sim.extract import extract_ir as extract

needs_kernels = pytest.mark.skipif(not available(), reason=f"no native kernels: {build.failure_reason()}")


class Growing(nn.Module):
    """A block in which each layer reads the concatenation of all results before it, as DenseNet's do."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(channels * (index + 1), channels, size, padding=size // 2)
            for index, size in zip(range(layers), itertools.cycle((1, 3)), strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        values = [x * 2]
        for layer in self.layers:
            values.append(torch.relu(layer(torch.cat(values, 1))))
        return torch.cat(values, 1).mean((2, 3))


def run(module: nn.Module, example: Tensor, dtype: str) -> tuple[list[np.ndarray], ExecutionPlan, ExecutionPlan]:
    """A module's results, the plan as it was compiled, and as the CPU device runs it."""
    backend = CPUBackend(tune=False)
    program = compile(
        extract_ir(copy.deepcopy(module).to("meta"), (example.to("meta"),)), None, CompileOptions(compute_dtype=dtype)
    )
    executor, weights = Executor(program, backend), load_weights(module.state_dict(), program, backend, strict=False)
    (spec,) = program.input_specs
    outputs = executor.run({spec.name: NPUBuffer.from_numpy(example.numpy(), backend, spec)}, weights)
    values = [outputs[spec.name].to_numpy(spec).astype(np.float64) for spec in program.output_specs]
    return values, program.plan, backend.laid_out(program.plan)


@needs_kernels
@pytest.mark.parametrize("number", range(30))
def test_drawn_concatenations_are_those_of_pytorch(number: int, seed: int) -> None:
    module = RandomConcatenations(seed + number).eval()
    with torch.no_grad():
        ir, expected = extract(module, (module.example,)), module(module.example)
    dag = DAGExecutor(partition(ir, compute_dtype="float32"), CPUBackend(tune=False))
    dag.load_weights(module.state_dict())
    results = dag.execute({ir["graph_inputs"][0]["name"]: module.example.numpy()})
    for result, reference in zip(results.values(), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(result), reference, atol=1e-4, rtol=1e-4, msg=module.source)


@needs_kernels
@pytest.mark.parametrize(("batch", "channels"), [(1, 12), (1, 16), (3, 16)])
def test_chained_concatenations_copy_nothing(batch: int, channels: int) -> None:
    module = Growing(channels, 6).eval()
    example = torch.randn(batch, channels, 7, 9)
    (value,), compiled, laid_out = run(module, example, "bfloat16")
    with torch.no_grad():
        expected = module(example).double().numpy()
    assert np.abs(value - expected).max() <= 2.0**-5 * np.abs(expected).max()
    copies = [plan_copies(plan) for plan in (compiled, laid_out)]
    # Planar images of several pieces of a batch stay whole; which layout a machine's kernels prefer is its own matter.
    assert copies[0] > 15 and (copies[1] == 0 or batch > 1)
    assert laid_out.arena_bytes <= 1.1 * compiled.arena_bytes


def plan_copies(plan: ExecutionPlan) -> int:
    return sum(is_copy(call) for call in plan.calls)


@needs_kernels
def test_a_plan_without_concatenations_keeps_its_memory() -> None:
    module = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    _, compiled, laid_out = run(module, torch.randn(1, 8, 9, 9), "float32")
    assert compiled.buffers == laid_out.buffers
