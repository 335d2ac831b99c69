"""Products of many rows of 16-bit floats by warpgroups: where they are offered, and what they compute on a GPU."""

from __future__ import annotations

import cuda_gpu
import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import ConvolutionLaunch, launch_of
from cuda_compiler.rules import conv, linear_halves
from cuda_runtime.tuned_convolutions import kernels_of
from npu_compiler import CompiledProgram
from npu_runtime import Executor, NPUBuffer, load_weights
from npu_sim.extract import extract_ir

NO_GPU = pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)
ACTIVATIONS = {"gelu": nn.GELU(), "silu": nn.SiLU(), "none": nn.Identity(), "tanh": nn.Tanh()}


class Layer(nn.Module):
    """A linear layer, or a convolution of single pixels, with an activation, and a residual behind or before that."""

    def __init__(
        self, terms: int, columns: int, activation: str, residual: str, bias: bool = True, pixels: bool = False
    ) -> None:
        super().__init__()
        self.linear = nn.Conv2d(terms, columns, 1, bias=bias) if pixels else nn.Linear(terms, columns, bias)
        self.activation, self.residual = ACTIVATIONS[activation], residual
        self.terms, self.columns, self.pixels = terms, columns, pixels

    def shapes(self, rows: int) -> list[tuple[int, ...]]:
        """Return the shapes of the inputs, of so many rows or pixels."""
        sizes = [self.terms, *([self.columns] if self.residual != "none" else [])]
        return [(1, size, rows, 1) if self.pixels else (rows, size) for size in sizes]

    def forward(self, x: torch.Tensor, *added: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.residual == "inside":
            return self.activation(y + added[0])
        return self.activation(y) + added[0] if self.residual == "behind" else self.activation(y)


def compiled(layer: Layer, rows: int, dtype: torch.dtype, gpu: GPU | None = None) -> CompiledProgram:
    ir = extract_ir(layer.to(dtype), tuple(torch.zeros(shape, dtype=dtype) for shape in layer.shapes(rows)))
    return npu_compiler.compile(ir, CUDACodegenTarget(gpu or GPU()))


def offered(program: CompiledProgram) -> list[str]:
    (call,) = program.kernels
    return [form.kernel for form in kernels_of(call)] if isinstance(launch_of(call), ConvolutionLaunch) else []


def test_large_products_with_an_activation_are_offered_it() -> None:
    layer = Layer(512, 2048, "gelu", "none")
    assert "linear_halves" in offered(compiled(layer, 3136, torch.float16))
    assert "linear_halves" not in offered(compiled(layer, 128, torch.float16))  # too few tiles


def test_gpus_without_warpgroups_are_not_offered_it() -> None:
    program = compiled(Layer(64, 256, "gelu", "none"), 3136, torch.float16, GPU(capability=80))
    assert "linear_halves" not in offered_by(program)


def offered_by(program: CompiledProgram) -> list[str]:
    calls = [call for call in program.kernels if isinstance(launch_of(call), ConvolutionLaunch)]
    return [form.kernel for call in calls for form in kernels_of(call)]


def test_its_tensor_maps_are_kept_in_a_program() -> None:
    program = compiled(Layer(512, 2048, "gelu", "none"), 3136, torch.float16)
    again = CompiledProgram.from_bytes(program.to_bytes())
    forms = [form for call in again.kernels for form in kernels_of(call) if form.kernel == "linear_halves"]
    assert [len(launch_of(form).maps) for form in forms] == [3]  # type: ignore[union-attr]


SIZES = [  # rows, columns, terms: parts of tiles, one tile for each block, several
    (65, 72, 64),
    (129, 64, 136),
    (300, 272, 208),
    (1000, 1536, 512),
    (2048, 4096, 384),
]


FINISHED = [("gelu", "none"), ("tanh", "inside"), ("silu", "behind")]


@pytest.mark.parametrize(("activation", "residual"), FINISHED)
@pytest.mark.parametrize(("rows", "columns", "terms"), SIZES, ids=str)
def test_convolutions_of_single_pixels_are_offered_it_with_what_follows(
    rows: int, columns: int, terms: int, activation: str, residual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_halves, "FEWEST_TILES", 1)
    layer = Layer(terms, columns, activation, residual, pixels=True)
    assert offered_by(compiled(layer, rows, torch.float16))[-1] == "linear_halves"


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("activation", "residual"), FINISHED)
@pytest.mark.parametrize(("rows", "columns", "terms"), SIZES, ids=str)
def test_each_result_is_what_pytorch_computes(
    rows: int,
    columns: int,
    terms: int,
    activation: str,
    residual: str,
    dtype: torch.dtype,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_halves, "FEWEST_TILES", 1)
    monkeypatch.setattr(conv, "_tiled", lambda make, call, aligned: ())
    torch.manual_seed(seed)
    layer = Layer(terms, columns, activation, residual, bias=rows % 2 == 0, pixels=True)
    inputs = [torch.randn(shape).to(dtype) for shape in layer.shapes(rows)]
    program = compiled(layer, rows, dtype)
    assert offered_by(program) == ["linear_halves"]
    backend = cuda_gpu.cuda_backends()[0]
    weights = load_weights(layer.state_dict(), program, backend)
    specs = program.input_specs
    bound = {
        spec.name: NPUBuffer.from_numpy(x.float().numpy(), backend, spec=spec)
        for spec, x in zip(specs, inputs, strict=True)
    }
    found = Executor(program, backend).run(bound, weights)[program.output_specs[0].name].to_numpy()
    with torch.no_grad():
        expected = layer.float()(*(x.float() for x in inputs)).numpy()
    tolerance = 4e-3 if dtype is torch.float16 else 3e-2
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=tolerance, rtol=tolerance)
