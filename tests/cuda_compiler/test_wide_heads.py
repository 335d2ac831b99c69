"""Heads of attention that end with zeros, as products of constant weights make and read them on the CUDA target."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from cuda_reference import LaidOut, ReferenceBackend
from torch import Tensor, nn

import npu_compiler
from cuda_compiler import CUDACodegenTarget
from npu_runtime import DAGExecutor
from npu_sim.extract import extract_ir


class DrawnAttention(nn.Module):
    """Attention over drawn heads: of one product or of three, with or without biases, a mask, and a product behind it.

    Attributes:
        example: Tokens [B, T, C].
        is_plain: Whether nothing but one product makes the heads, and one reads the result.
        is_read_by_product: Whether a product alone reads the result.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.heads, self.width = draw.choice([1, 2, 3, 4]), draw.choice([6, 10, 12, 20, 30, 36, 8])
        batch, tokens, channels = draw.choice([1, 3]), draw.choice([8, 17]), draw.choice([16, 40, 36])
        inner = self.heads * self.width
        self.example = torch.randn(batch, tokens, channels)
        self.joined, self.tail, self.masked = (
            draw.random() < 0.6,
            draw.choice(["", "", "tanh", "add", "norm"]),
            draw.random() < 0.3,
        )
        bias = draw.random() < 0.7
        self.qkv = nn.Linear(channels, 3 * inner, bias)
        self.parts = nn.ModuleList(nn.Linear(channels, inner, bias) for _ in range(3))
        self.out = nn.Linear(inner, channels)
        self.register_buffer("mask", torch.randn(tokens, tokens) if self.masked else None)
        self.is_plain = not self.tail and self.width % 8 != 0 and channels % 8 == 0
        self.is_read_by_product = self.tail != "tanh" and self.width % 8 != 0

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        made = self.qkv(x).chunk(3, -1) if self.joined else [part(x) for part in self.parts]
        q, k, v = (each.view(batch, tokens, self.heads, self.width).transpose(1, 2) for each in made)
        if self.tail == "add":
            v = v + q
        elif self.tail == "norm":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, self.mask).transpose(1, 2).reshape(batch, tokens, -1)
        return self.out(y.tanh() if self.tail == "tanh" else y)


@pytest.mark.parametrize("number", range(24))
def test_drawn_attention_has_pytorchs_results(number: int, seed: int) -> None:
    module = DrawnAttention(seed + number).eval()
    with torch.no_grad():
        ir, expected = extract_ir(module, (module.example,)), module(module.example)
    dag = DAGExecutor(npu_compiler.partition(ir, target=LaidOut(), compute_dtype="float16"), ReferenceBackend())
    dag.load_weights(module.state_dict())
    (result,) = dag.execute({ir["graph_inputs"][0]["name"]: module.example.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(result).float(), expected, atol=2e-2, rtol=2e-2)
    options = npu_compiler.CompileOptions(compute_dtype="float16")
    kernels = [call.kernel for call in npu_compiler.compile(ir, CUDACodegenTarget(), options).plan.calls]
    if module.is_plain:
        assert not {"copy_kernel", "to_channels_last"}.intersection(kernels), "products make and read wide heads"
    if module.is_read_by_product:
        assert "copy_kernel" not in kernels, "a product reads wide heads"
