"""Small models that become resident kernels of unusual structure, and a check of their results."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_ir import extract_ir

import npu_compiler
from cuda_runtime import CUDABackend
from npu_compiler import CodegenTarget, CompiledProgram
from npu_runtime import Executor, load_weights
from npu_runtime.torch_arrays import tensor_to_numpy

CACHE = 512


class Wired(nn.Module):
    """Four attention heads of width 64 between linear layers, connected in ways that language models are not."""

    def __init__(self, value_width: int = 64) -> None:
        super().__init__()
        sizes = {"q": (256, 256), "gate": (256, 256), "up": (256, 256), "o": (4 * value_width, 256), "p": (256, 256)}
        for name, (inputs, outputs) in sizes.items():
            setattr(self, name, nn.Linear(inputs, outputs, bias=False))

    def attend(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x).view(1, 1, 4, 64).transpose(1, 2), k, v)

    def joined(self, attended: Tensor) -> Tensor:
        return attended.transpose(1, 2).reshape(1, 1, -1)


class AddsItsInput(Wired):
    """A product's residual is made by the step before it, whose rows are shared out in another way."""

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h = F.silu(self.gate(x)) * self.up(x)
        return self.p(self.o(h) + h)


class AddsAttention(Wired):
    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = self.joined(self.attend(x, k, v))
        return self.o(attended) + attended


class AttendsTwice(Wired):
    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.o(self.joined(F.scaled_dot_product_attention(self.attend(x, k, v), v, k)))


class ReturnsAttention(Wired):
    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.joined(self.attend(x, k, v))
        return self.o(attended), attended


class NarrowValues(Wired):
    def __init__(self) -> None:
        super().__init__(value_width=40)

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.o(self.joined(self.attend(x, k, v[..., :40])))


class SoftmaxBetween(Wired):
    """A softmax, which has no phase, between two runs of products."""

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.p(self.o(F.softmax(self.up(self.gate(x)), dim=-1)))


# Which of the steps read the mailbox of the step before.
WIRED = {
    AddsItsInput: [False, False, True],
    AddsAttention: [False, True, False],
    AttendsTwice: [False, True, False, True],
    ReturnsAttention: [False, True, True],
}


def wired_program(kind: type[Wired], target: CodegenTarget) -> CompiledProgram:
    shapes = (1, 1, 256), (1, 4, CACHE, 64), (1, 4, CACHE, 64)
    with torch.device("meta"):
        inputs = tuple(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
        ir = extract_ir(kind().bfloat16().eval(), inputs, model_name="wired")
    return npu_compiler.compile(ir.to_dict(), target=target)


def check_wired(kind: type[Wired], gpu: CUDABackend, seed: int, times: int) -> None:
    """Compare a resident kernel's results for new inputs each time with PyTorch in float32."""
    torch.manual_seed(seed)
    module, rng = kind().bfloat16().eval(), np.random.default_rng(seed)
    program, wide = wired_program(kind, gpu.target), copy.deepcopy(module).float()
    executor, weights = Executor(program, gpu), load_weights(module.state_dict(), program, gpu)
    k, v = (torch.from_numpy(rng.standard_normal((1, 4, CACHE, 64)).astype(np.float32)).bfloat16() for _ in "kv")
    for _ in range(times):
        x = torch.from_numpy(rng.standard_normal((1, 1, 256)).astype(np.float32)).bfloat16()
        inputs = {spec.name: tensor_to_numpy(value) for spec, value in zip(program.input_specs, (x, k, v), strict=True)}
        found = executor.run(inputs, weights)
        with torch.no_grad():
            expected = wide(x.float(), k.float(), v.float())
        for buffer, value in zip(found.values(), expected if isinstance(expected, tuple) else (expected,), strict=True):
            ours, reference = buffer.to_numpy().astype(np.float32).ravel(), value.numpy().ravel()
            assert np.linalg.norm(ours - reference) / np.linalg.norm(reference) < 2e-2
