"""Products over a dimension before the last: which calls become some, that they spare copies, and their results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from cuda_gpu import PROBLEM, cuda_backends
from cuda_on_cpu import EmulatedBackend
from cuda_products import products_of
from cuda_reference import LaidOut, ReferenceBackend
from torch import Tensor, nn
from zoo_runs import extract, weights_of

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import GemmLaunch
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Executor, NPUBuffer, load_weights
from npu_runtime.backend import Backend

HALVES = npu_compiler.CompileOptions(compute_dtype="float16")
AMPERE = CUDACodegenTarget(GPU(capability=80))
MOVING = ("copy", "transpose", "to_channels_last")


class TalkingHeads(nn.Module):
    """Attention whose scores, and then whose probabilities, are mixed among heads."""

    def __init__(self, before: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.before, self.after = before, after

    def forward(self, scores: Tensor, values: Tensor) -> Tensor:
        mixed = self._mixed(self.before, 0.5 * scores).softmax(-1)
        return self._mixed(self.after, mixed) @ values

    def _mixed(self, layer: nn.Module, scores: Tensor) -> Tensor:
        if isinstance(layer, nn.Conv2d):
            return layer(scores)
        return layer(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Mixer(nn.Module):
    """A residual block whose layers mix tokens."""

    def __init__(self, channels: int, layers: nn.Module) -> None:
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(channels), layers

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x).transpose(1, 2)).transpose(1, 2)


class Gate(nn.Module):
    """Half of the channels, multiplied by the other half mixed among tokens."""

    def __init__(self, tokens: int, bias: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(tokens, tokens, bias)

    def forward(self, x: Tensor) -> Tensor:
        u, v = x.chunk(2, dim=-1)
        return u * self.mix(v.relu().transpose(1, 2)).transpose(1, 2)


class Einsum(nn.Module):
    """Channels mixed by an einsum, in the order in which they lie."""

    def __init__(self, channels: int, results: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(results, channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bcs,dc->bds", x.relu(), self.weight).sigmoid()


def talking(draw: Random, convolution: bool = False) -> tuple[nn.Module, list[tuple[int, ...]]]:
    first, heads, last = (draw.randint(2, 16) for _ in range(3))
    batch, rows, columns, width = draw.randint(1, 3), draw.randint(4, 20), draw.randint(4, 20), 8 * draw.randint(1, 3)
    layers: list[nn.Module] = []
    for inner, outer in ((first, heads), (heads, last)):
        bias = draw.random() < 0.7
        layers.append(nn.Conv2d(inner, outer, 1, bias=bias) if convolution else nn.Linear(inner, outer, bias))
    return TalkingHeads(*layers), [(batch, first, rows, columns), (batch, last, columns, width)]


def mixing(draw: Random) -> tuple[nn.Module, list[tuple[int, ...]]]:
    tokens, hidden, channels = draw.randint(17, 70), draw.randint(17, 70), 8 * draw.randint(2, 8)
    activation = draw.choice([nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.SiLU()])
    layers = nn.Sequential(nn.Linear(tokens, hidden, draw.random() < 0.7), activation, nn.Linear(hidden, tokens))
    return Mixer(channels, draw.choice([layers, nn.Linear(tokens, tokens)])), [(draw.randint(1, 3), tokens, channels)]


def gating(draw: Random) -> tuple[nn.Module, list[tuple[int, ...]]]:
    tokens, channels = draw.randint(17, 70), 8 * draw.randint(2, 8)
    return Gate(tokens, draw.random() < 0.7), [(draw.randint(1, 3), tokens, 2 * channels)]


def summing(draw: Random) -> tuple[nn.Module, list[tuple[int, ...]]]:
    channels, results = draw.choice([(5, 9), (16, 3), (20, 24), (7, 40)])
    return Einsum(channels, results), [(draw.randint(1, 3), channels, 8 * draw.randint(2, 9))]


KINDS: dict[str, Callable[[Random], tuple[nn.Module, list[tuple[int, ...]]]]] = {
    "talking heads": talking,
    "talking heads by convolutions": lambda draw: talking(draw, convolution=True),
    "mixed tokens": mixing,
    "gates": gating,
    "einsum": summing,
}


def compiled(model: nn.Module, inputs: list[Tensor], target: CUDACodegenTarget | LaidOut) -> CompiledProgram:
    return npu_compiler.compile(extract(model, inputs), target, HALVES)


def result(program: CompiledProgram, backend: Backend, model: nn.Module, inputs: list[Tensor]) -> Tensor:
    bound = {
        spec.name: NPUBuffer.from_numpy(x.half().numpy(), backend, spec=spec)
        for spec, x in zip(program.input_specs, inputs, strict=True)
    }
    loaded = load_weights(weights_of(model), program, backend)
    (out,) = Executor(program, backend).run(bound, loaded).values()
    return torch.from_numpy(out.to_numpy()).float()


def copies(program: CompiledProgram) -> list[str]:
    return [call.kernel for call in program.plan.calls if any(word in call.kernel for word in MOVING)]


@pytest.mark.gpu
@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_modules_mix_in_planes_on_a_gpu(kind: str, seed: int) -> None:
    draw, backend = Random(f"{seed} {kind} gpu"), cuda_backends()[0]
    torch.manual_seed(seed)
    for _ in range(4):
        model, shapes = KINDS[kind](draw)
        inputs = [torch.randn(shape) for shape in shapes]
        with torch.no_grad():
            expected = model.eval()(*(x.half().float() for x in inputs))
        found = result(compiled(model, inputs, CUDACodegenTarget()), backend, model, inputs)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_modules_mix_in_planes_without_copies(kind: str, seed: int, tmp_path: Path) -> None:
    draw = Random(f"{seed} {kind}")
    torch.manual_seed(seed)
    for _ in range(2):
        model, shapes = KINDS[kind](draw)
        inputs = [torch.randn(shape) for shape in shapes]
        with torch.no_grad():
            expected = model.eval()(*(x.half().float() for x in inputs))
        for target, backend in ((LaidOut(), ReferenceBackend()), (AMPERE, EmulatedBackend(tmp_path, AMPERE))):
            program = compiled(model, inputs, target)
            assert not copies(program), model
            found = result(program, backend, model, inputs)
            torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-2)


class Applied(nn.Module):
    """A function of a layer and a tensor."""

    def __init__(self, layer: nn.Module, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer, x)


def launches(layer: nn.Module, function: Callable[[nn.Module, Tensor], Tensor], *shape: int) -> list[GemmLaunch]:
    """Return the products of cuBLASLt that the program of a function of a layer and a tensor may launch."""
    program = compiled(Applied(layer, function).eval(), [torch.empty(shape)], CUDACodegenTarget())
    return products_of(program)


def test_a_weight_whose_rows_are_not_aligned_is_stored_with_rows_that_are() -> None:
    def twice(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(layer(x.relu().transpose(1, 2)).relu()).transpose(1, 2).relu()

    mixed = launches(nn.Linear(196, 196), twice, 16, 196, 384)
    assert [(gemm.batch, gemm.m, gemm.n, gemm.lda) for gemm in mixed] == 2 * [(16, 196, 384, 200)]
    assert all(gemm.has_residual and gemm.stride_r == 0 for gemm in mixed)


def test_a_result_that_a_convolution_reads_as_an_image_keeps_its_channels_innermost() -> None:
    def image(layers: nn.Module, x: Tensor) -> Tensor:
        linear, convolution = layers.children()
        return convolution(linear(x).transpose(1, 2).unflatten(2, (16, 16)))

    found = launches(nn.ModuleList([nn.Linear(32, 64), nn.Conv2d(64, 64, 3)]), image, 4, 256, 32)
    assert [(gemm.batch, gemm.m, gemm.n) for gemm in found] == [(1, 1024, 64)]


@pytest.mark.parametrize(("outputs", "batches"), [(32, [4]), (31, [])])
def test_only_a_product_whose_rows_are_aligned_reads_planes(outputs: int, batches: list[int]) -> None:
    def activated(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.tanh().transpose(1, 2)).relu()

    found = launches(nn.Linear(64, outputs), activated, 4, 64, 256)
    assert [gemm.batch for gemm in found if gemm.batch > 1] == batches
