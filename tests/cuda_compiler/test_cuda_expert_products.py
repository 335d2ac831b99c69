"""Products by experts on CUDA are one kernel with the gate or the weighted sum behind them, and compute the same."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import cuda_toolchain
import pytest
import torch
from cuda_on_cpu import run_on_cpu
from drawn import drawn
from torch import Tensor, nn
from zoo_runs import extract

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from npu_compiler import CompiledProgram
from npu_sim.llm.experts import expert_linear

WIDTH, INNER, EXPERTS, CHOICES = 72, 40, 16, 2


class FeedForward(nn.Module):
    """Experts of a layer; `interleaved` gates every other column, which no kernel does."""

    def __init__(self, biased: bool, interleaved: bool = False, experts: int = EXPERTS) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.up, self.down = (
            nn.Parameter(0.1 * torch.randn(experts, n, k)) for n, k in ((2 * INNER, WIDTH), (WIDTH, INNER))
        )
        self.up_bias, self.down_bias = (
            nn.Parameter(torch.randn(experts, n)) if biased else None for n in (2 * INNER, WIDTH)
        )

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
        experts = chosen.reshape(-1)
        h = expert_linear(x, self.up, experts, self.up_bias, len(self.up))
        gate, up = (h[:, ::2], h[:, 1::2]) if self.interleaved else h.chunk(2, dim=-1)
        y = expert_linear(nn.functional.silu(gate) * up, self.down, experts, self.down_bias, len(self.down))
        return residual + (y * weights.reshape(-1, 1)).view(*weights.shape, -1).sum(1)


def given(tokens: int, experts: int = EXPERTS) -> list[Tensor]:
    chosen = torch.stack([torch.randperm(experts)[:CHOICES] for _ in range(tokens)])
    return [torch.randn(tokens, WIDTH), chosen, torch.rand(tokens, CHOICES), torch.randn(tokens, WIDTH)]


def program(module: FeedForward, tokens: int, dtype: str = "bfloat16", gpu: GPU | None = None) -> CompiledProgram:
    ir = extract(module, given(tokens, len(module.up)))
    return npu_compiler.compile(ir, CUDACodegenTarget(gpu), npu_compiler.CompileOptions(compute_dtype=dtype))


def kernels(module: FeedForward, tokens: int, dtype: str = "bfloat16", gpu: GPU | None = None) -> list[str]:
    calls = program(module, tokens, dtype, gpu).plan.calls
    return [call.kernel for call in calls if not call.kernel.startswith("copy")]


@pytest.mark.parametrize("biased", [False, True])
def test_a_token_takes_two_kernels(biased: bool) -> None:
    assert kernels(FeedForward(biased), 1) == ["expert_tiles", "expert_sum"]


def test_tokens_that_share_experts_have_sums_of_their_own() -> None:
    """Each expert's matrix is then read once."""
    assert kernels(FeedForward(False), 3) == ["expert_tiles", "expert_tiles", "weighted_sum"]
    assert kernels(FeedForward(False, experts=48), 3) == ["expert_tiles", "expert_sum"]


@pytest.mark.parametrize(("dtype", "gpu"), [("float32", None), ("float16", GPU(capability=75))])
def test_what_tensor_cores_do_not_take_stays_apart(dtype: str, gpu: GPU | None) -> None:
    found = kernels(FeedForward(False), 1, dtype, gpu)
    assert found.count("expert_matmul_kernel") == 2 and "weighted_sum" in found


def test_a_gate_of_other_columns_stays_apart() -> None:
    found = kernels(FeedForward(False, interleaved=True), 1)
    assert found[0] == "expert_tiles" and found[-1] == "expert_sum" and len(found) > 2


@pytest.mark.parametrize("layer", drawn(product((torch.bfloat16, torch.float16), (False, True), (1, 3)), 1 / 8))
def test_the_layer_is_that_of_pytorch(layer: tuple[torch.dtype, bool, int], seed: int, tmp_path: Path) -> None:
    """Compare with the reference, also where a choice is no expert, whose result is 0."""
    dtype, biased, tokens = layer
    torch.manual_seed(seed)
    module = FeedForward(biased)
    x, chosen, weights, residual = given(tokens)
    chosen[0, 1] = (-1, EXPERTS)[seed % 2]
    made = program(module, tokens, str(dtype).removeprefix("torch."))
    parameters = {f"p_{name}": value.detach().to(dtype) for name, value in module.named_parameters()}
    inputs = {"x": x, "weights": weights, "residual": residual}
    inputs = {name: value.to(dtype) for name, value in inputs.items()}
    held = {name: _bits(value) for name, value in (parameters | inputs).items()} | {"chosen": chosen.int().numpy()}
    memory = run_on_cpu(made.plan, held, tmp_path)
    (view,) = made.plan.output_views.values()
    found = torch.from_numpy(memory[view.buffer].reshape(-1).view("int16").copy()).view(dtype).reshape(tokens, WIDTH)
    rounded = FeedForward(biased)
    rounded.load_state_dict({name.removeprefix("p_"): value.float() for name, value in parameters.items()})
    wide = {name: value.float() for name, value in inputs.items()}
    expected = rounded(wide["x"], chosen, wide["weights"], wide["residual"])
    error = 4 * torch.finfo(dtype).eps  # of a few roundings
    torch.testing.assert_close(found.float(), expected, atol=error * float(expected.abs().max()), rtol=error)


def _bits(value: Tensor) -> object:
    return value.view(torch.int16).numpy()


@pytest.mark.parametrize("turn", range(3))
def test_the_sources_compile(turn: int) -> None:
    cuda_toolchain.architectures()
    sources: dict[str, str] = {}
    for biased in (False, True):
        sources |= (
            program(FeedForward(biased), 1).plan.sources | program(FeedForward(biased), 3, "float16").plan.sources
        )
    cuda_toolchain.compile_in_turn(sources.values(), turn)
