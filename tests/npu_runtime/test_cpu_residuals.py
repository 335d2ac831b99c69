"""Convolutions on the CPU device that write their result over the tensor that they add."""

from __future__ import annotations

import copy
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_ir import extract_ir

from npu_compiler import CompileOptions, compile
from npu_compiler.program.kernels import KERNELS
from npu_compiler.program.plan import ExecutionPlan
from npu_runtime import CPUBackend, Executor, NPUBuffer, load_weights
from npu_runtime.cpu.native import available, build

needs_kernels = pytest.mark.skipif(not available(), reason=f"no native kernels: {build.failure_reason()}")
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1}


class Residuals(nn.Module):
    """A chain of drawn convolutions, each of which adds its input; some of these are read again later."""

    def __init__(self, draw: Random, channels: int) -> None:
        super().__init__()
        self.layers, self.forms = nn.ModuleList(), []
        for _ in range(draw.randint(2, 5)):
            size, groups = draw.choice([1, 3]), draw.choice([1, 1, channels])
            self.layers.append(nn.Conv2d(channels, channels, size, padding=size // 2, groups=groups))
            self.forms.append((draw.choice(["before", "after", "none"]), draw.random() < 1 / 4))

    def forward(self, x: Tensor) -> Tensor:
        h, kept = torch.relu(x) * 0.5, []
        for layer, (activation, is_kept) in zip(self.layers, self.forms, strict=True):
            if is_kept:
                kept.append(h)
            y = layer(torch.tanh(h))
            h = torch.relu(y + h) if activation == "before" else h + (torch.relu(y) if activation == "after" else y)
        for value in kept:
            h = h * 0.5 + value
        return h


def overwritten(plan: ExecutionPlan) -> list[bool]:
    """Whether each convolution with a residual in a plan writes over it."""
    found = []
    for call in plan.calls:
        if call.kernel == "conv2d_kernel" and (residual := KERNELS[call.kernel].inputs_of(call)["residual"]):
            old, new = plan.buffers[residual.buffer], plan.buffers[call.outputs[0].buffer]
            found.append((old.kind, old.offset) == (new.kind, new.offset) and old.kind == "arena")
    return found


@needs_kernels
@pytest.mark.parametrize("number", range(12))
def test_drawn_residuals_are_added_before_they_are_overwritten(number: int, seed: int) -> None:
    draw = Random(f"{seed} {number}")
    torch.manual_seed(draw.randrange(2**30))
    channels, dtype = draw.choice([3, 8, 17, 32, 40]), draw.choice(list(TOLERANCES))
    module = Residuals(draw, channels).eval()
    example = torch.randn(draw.choice([1, 3]), channels, draw.choice([1, 7, 14]), draw.choice([5, 14]))
    ir = extract_ir(copy.deepcopy(module).to("meta"), (example.to("meta"),))
    backend = CPUBackend(tune=False)
    program = compile(ir, None, CompileOptions(compute_dtype=dtype))
    executor, weights = Executor(program, backend), load_weights(module.state_dict(), program, backend)
    (spec,), (result,) = program.input_specs, program.output_specs
    inputs = {spec.name: NPUBuffer.from_numpy(example.numpy(), backend, spec)}
    with torch.no_grad():
        expected = module(example).numpy()
    for _ in range(2):  # a result must not depend on what an earlier run left
        found = executor.run(inputs, weights)[result.name].to_numpy(result).astype(np.float32)
        np.testing.assert_allclose(found, expected, atol=TOLERANCES[dtype] * np.abs(expected).max(), rtol=0)


@needs_kernels
def test_a_residual_that_nobody_reads_later_is_overwritten() -> None:
    module = Residuals(Random(0), 32).eval()
    for form, expected in ((("before", False), True), (("before", True), False)):
        module.forms = [form] * len(module.layers)
        ir = extract_ir(copy.deepcopy(module).to("meta"), (torch.empty(1, 32, 14, 14, device="meta"),))
        plan = compile(ir, None, CompileOptions(compute_dtype="bfloat16")).plan
        *inner, last = overwritten(CPUBackend(tune=False).laid_out(plan))
        assert inner and all(inner) == any(inner) == expected
        assert not last  # an output has memory of its own
