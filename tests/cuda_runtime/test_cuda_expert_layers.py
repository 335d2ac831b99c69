"""A mixture-of-experts layer of a decode step on the GPU: its results are those of PyTorch, run after run."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from cuda_gpu import cuda_backends, need_gpu
from torch import Tensor, nn

import npu_compiler
from npu_compiler import CompileOptions
from npu_runtime import Executor, load_weights
from npu_sim.llm.experts import expert_linear
from npu_sim.module.trace import export, plain_ir, trace

need_gpu()
pytestmark = pytest.mark.gpu


class Layer(nn.Module):
    """The feed-forward part of a layer, with its norm, router and experts."""

    def __init__(self, width: int, inner: int, experts: int, choices: int, generator: torch.Generator) -> None:
        super().__init__()
        self.choices = choices
        self.norm, self.rate = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, experts, bias=False)
        shapes = (experts, 2 * inner, width), (experts, width, inner)
        self.up, self.down = (
            nn.Parameter(torch.randn(shape, generator=generator) / shape[2] ** 0.5) for shape in shapes
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        values, chosen = self.rate(normed).softmax(-1, dtype=torch.float32).topk(self.choices, dim=-1)
        weights = (values / values.sum(-1, keepdim=True)).to(x.dtype)
        experts = chosen.reshape(-1)
        gate, up = expert_linear(normed, self.up, experts, None, len(self.up)).chunk(2, dim=-1)
        y = expert_linear(nn.functional.silu(gate) * up, self.down, experts, None, len(self.down))
        return x + (y * weights.reshape(-1, 1)).view(*weights.shape, -1).sum(1), chosen + 1


@pytest.mark.parametrize(("width", "inner", "experts", "choices"), [(2048, 768, 128, 8), (1032, 200, 32, 2)])
def test_a_layer_is_that_of_pytorch(width: int, inner: int, experts: int, choices: int, seed: int) -> None:
    """Compare rows with PyTorch, except those for which it chooses other experts because of its rounding."""
    (backend,) = cuda_backends()
    generator = torch.Generator().manual_seed(seed)
    module = Layer(width, inner, experts, choices, generator).bfloat16()
    ir = plain_ir(trace(export(module, (torch.empty(1, width).bfloat16(),)), "layer"))
    program = npu_compiler.compile(ir, backend.target, CompileOptions("bfloat16"))
    kernels = [call.kernel for call in program.kernels]
    assert kernels[-3:-1] == ["expert_tiles", "expert_sum"] and "silu_mul_kernel" not in kernels
    state = {name: value.detach().cuda() for name, value in module.named_parameters()}
    weights = load_weights(state, program, backend)
    executor = Executor(program, backend)
    (spec,) = program.input_specs
    compared = 0
    for _ in range(20):
        x = torch.randn(1, width, generator=generator).bfloat16()
        run = executor.run({spec.name: x.float().numpy().astype(ml_dtypes.bfloat16)}, weights)
        found, chosen = (torch.from_numpy(y.to_numpy().astype(np.float32)) for y in run.values())
        expected, order = module.float()(x.float())
        module.bfloat16()
        if chosen.long().tolist() == order.tolist():
            compared += 1
            torch.testing.assert_close(found, expected, atol=2.0**-5, rtol=2.0**-7)
    assert compared >= 5
