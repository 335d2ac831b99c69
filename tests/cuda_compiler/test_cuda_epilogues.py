"""Epilogues on CUDA: element-wise ops that the kernels of convolutions and products compute themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from cuda_gpu import PROBLEM, cuda_backends
from cuda_on_cpu import EmulatedBackend
from cuda_reference import LaidOut, ReferenceBackend
from cuda_toolchain import compile_in_turn
from drawn import drawn
from torch import Tensor, nn
from torch_ir import extract_ir

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import ConvolutionLaunch, convolution_of, launch_of
from cuda_runtime.tuned_convolutions import kernels_of
from npu_compiler import CompiledProgram
from npu_compiler.program.elementwise import elementwise_kernel
from npu_runtime import Executor, NPUBuffer, load_weights
from npu_runtime.backend import Backend

STEPS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "square": lambda x, one, each, number: x**2,
    "cube": lambda x, one, each, number: x**3,
    "tanh": lambda x, one, each, number: torch.tanh(x),
    "leaky-relu": lambda x, one, each, number: nn.functional.leaky_relu(x, abs(number)),
    "times-itself": lambda x, one, each, number: x * x,
    "times-a-number": lambda x, one, each, number: x * number,
    "number-minus": lambda x, one, each, number: number - x,
    "times-one": lambda x, one, each, number: one * x,
    "plus-one": lambda x, one, each, number: x + one,
    "times-each": lambda x, one, each, number: x * each,
    "minus-each": lambda x, one, each, number: x - each,
    "much-of-each": lambda x, one, each, number: torch.add(x, each, alpha=3),
}


class Chain(nn.Module):
    """Drawn element-wise ops in a row, with one element, one for each channel, or a number as their other operand."""

    def __init__(self, draw: Random, channels: int) -> None:
        super().__init__()
        self.names = draw.choices(sorted(STEPS), k=draw.randint(1, 4))
        self.number = round(draw.uniform(-0.5, 0.5), 3)
        self.one, self.each = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = STEPS[name](x, self.one, self.each, self.number)
        return torch.tanh(x)  # which keeps powers of powers from overflowing


KINDS: dict[str, Callable[[Random], nn.Conv2d]] = {
    "pointwise": lambda draw: nn.Conv2d(32, 32, 1, bias=draw.random() < 0.5),
    "dense": lambda draw: nn.Conv2d(32, 32, 3, padding=1, bias=draw.random() < 0.5),
    "narrow-groups": lambda draw: nn.Conv2d(32, 32, 3, padding=1, groups=draw.choice([4, 8])),
    "depthwise": lambda draw: nn.Conv2d(32, 32, draw.choice([3, 7]), padding="same", groups=32),
    "odd": lambda draw: nn.Conv2d(21, 21, 3, padding=1, groups=draw.choice([1, 3])),
}


class Block(nn.Module):
    """A convolution with a chain behind it, and another one whose result is added to the scaled input."""

    def __init__(self, draw: Random, kind: str) -> None:
        super().__init__()
        self.first, self.second = KINDS[kind](draw), KINDS[kind](draw)
        channels = self.first.in_channels
        self.enter, self.leave = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
        self.chain = Chain(draw, channels)
        self.factor = nn.Parameter(torch.randn(channels, 1, 1) if draw.random() < 0.7 else torch.randn(1))
        self.is_last = draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        scaled = x * self.factor
        y = self.second(self.chain(self.first(x)))
        z: Tensor = self.leave(scaled + torch.relu(y) if self.is_last else torch.relu(scaled + y))
        return z


def results(program: CompiledProgram, module: nn.Module, x: Tensor, backend: Backend) -> Tensor:
    """Return the output of a module's program."""
    (spec,) = program.input_specs
    given = {spec.name: NPUBuffer.from_numpy(x.numpy(), backend, spec=spec)}
    weights = load_weights(module.state_dict(), program, backend)
    (result,) = Executor(program, backend).run(given, weights).values()
    return torch.from_numpy(result.to_numpy(spec=program.output_specs[0])).float()


def compiled(module: nn.Module, x: Tensor, gpu: GPU | None = None, dtype: str = "float16") -> CompiledProgram:
    ir = extract_ir(module, (x,), strict=False).to_dict()
    return npu_compiler.compile(ir, CUDACodegenTarget(gpu or GPU()), npu_compiler.CompileOptions(compute_dtype=dtype))


def drawn_block(kind: str, seed: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    draw = Random(seed)
    block = Block(draw, kind).eval()
    shape = draw.choice([1, 2]), block.enter.in_channels, draw.randint(3, 9), draw.randint(3, 9)
    return block, torch.randn(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_chains_and_scaled_sums_are_the_convolutions_own(kind: str, seed: int) -> None:
    module, x = drawn_block(kind, seed)
    plan = compiled(module, x, GPU(capability=Random(seed).choice([80, 90]))).plan
    names = ("conv", "direct_conv", "to_channels_last", "transpose", "copy")
    assert not [call.kernel for call in plan.calls if not call.kernel.startswith(names)]
    if kind == drawn(KINDS, 1 / len(KINDS))[seed % len(KINDS)].id:
        compile_in_turn(plan.sources.values())
    ir = extract_ir(module, (x,), strict=False).to_dict()
    program = npu_compiler.compile(ir, LaidOut(), npu_compiler.CompileOptions(compute_dtype="float32"))
    found = results(program, module, x, ReferenceBackend())
    torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", drawn(KINDS, 2 / 5))
def test_kernels_compute_their_chains(kind: str, seed: int, tmp_path: Path) -> None:
    module, x = drawn_block(kind, seed)
    dtype = "float32" if kind == "odd" and seed % 2 else "float16"
    program = compiled(module, x, GPU(capability=70, shared_memory=64 * 1024), dtype)
    calls = [
        kernels_of(call)[seed % len(kernels_of(call))] if isinstance(launch_of(call), ConvolutionLaunch) else call
        for call in program.plan.calls
    ]
    program = replace(program, plan=replace(program.plan, calls=calls))
    found = results(program, module, x, EmulatedBackend(tmp_path))
    torch.testing.assert_close(found, module(x), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_computes_its_chains(kind: str, dtype: str, seed: int) -> None:
    module, x = drawn_block(kind, seed)
    (backend,) = cuda_backends()
    found = results(compiled(module, x, dtype=dtype), module, x, backend)
    torch.testing.assert_close(found, module(x), rtol=6e-2, atol=6e-2)


def convolutions(program: CompiledProgram) -> list[bool]:
    """Return for each convolution of several forms whether it has an epilogue, for which cuDNN is not asked then."""
    calls = [call for call in program.plan.calls if isinstance(launch_of(call), ConvolutionLaunch)]
    have = ["EPILOGUE" in program.plan.sources[call.source] for call in calls]
    assert [convolution_of(call).computes.only_ours for call in calls] == have
    return have


class Applied(nn.Module):
    """A function of two layers and an input, between two convolutions that keep images in the layout of the kernels."""

    def __init__(self, function: Callable[..., Tensor], one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.function, self.one, self.two = function, one, two
        self.enter, self.leave = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.leave(self.function(self.one, self.two, self.enter(x)))
        return y


def test_an_image_may_be_added_several_times(seed: int) -> None:
    times = Random(seed).choice([-3.0, 0.5, 2.0])
    layers = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 3, padding=1)
    module = Applied(lambda one, two, x: torch.add(two(one(x)), x, alpha=times), *layers).eval()
    torch.manual_seed(seed)
    x = torch.randn(1, 16, 5, 6)
    program = npu_compiler.compile(
        extract_ir(module, (x,), strict=False).to_dict(),
        LaidOut(),
        npu_compiler.CompileOptions(compute_dtype="float32"),
    )
    assert not [
        call.kernel for call in program.plan.calls if (kernel := elementwise_kernel(call)) and kernel.op.name != "copy"
    ]
    torch.testing.assert_close(results(program, module, x, ReferenceBackend()), module(x), rtol=1e-4, atol=1e-4)


def test_a_sum_with_what_the_convolution_reads_stays_right(seed: int) -> None:
    torch.manual_seed(seed)
    layers = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 3, padding=1)
    module = Applied(lambda one, two, x: two(y := torch.tanh(one(x)) * x) + y, *layers).eval()
    x = torch.randn(1, 16, 5, 6)
    program = npu_compiler.compile(
        extract_ir(module, (x,), strict=False).to_dict(),
        LaidOut(),
        npu_compiler.CompileOptions(compute_dtype="float32"),
    )
    torch.testing.assert_close(results(program, module, x, ReferenceBackend()), module(x), rtol=1e-4, atol=1e-4)


def test_a_chain_that_another_kernel_goes_on_with_is_left_to_that() -> None:
    layers = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1)
    x = torch.randn(1, 16, 5, 6)
    three = Applied(lambda one, two, x: (one(x) * 2 + x) * two(x), *layers)
    program = compiled(three.eval(), x)
    assert sum("mul" in call.kernel for call in program.plan.calls) == 1
    assert sorted(convolutions(program)) == [False, False, False, True]


def test_a_residual_that_needs_a_kernel_anyway_is_computed_by_that() -> None:
    layers = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Sigmoid()), nn.Conv2d(32, 32, 1)
    gated = Applied(lambda one, two, x: x * one(x) * 2 + two(x), *layers)
    assert convolutions(compiled(gated.eval(), torch.randn(2, 16, 5, 6))) == [False, False, False]


@pytest.mark.parametrize("follower", ["linear", "norm"])
def test_a_product_has_a_chain_unless_a_norm_computes_it(follower: str, seed: int) -> None:
    draw = Random(seed)
    rows, width = 8 * draw.randint(20, 40), 8 * draw.randint(4, 8)
    scale, shift = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(width))

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = scale, shift
            self.first, self.last = nn.Linear(32, width), nn.Linear(width, 40)
            self.norm = nn.LayerNorm(width) if follower == "norm" else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.norm(torch.relu(self.first(x)) ** 2 * self.scale + self.shift))
            return y

    module, x = Tokens().eval(), torch.randn(rows, 32)
    program = compiled(module, x)
    assert (True in convolutions(program)) == (follower == "linear")
    assert len(program.plan.calls) == 2 + (follower == "norm")


def test_an_epilogue_survives_the_file(seed: int, tmp_path: Path) -> None:
    module, x = drawn_block("dense", seed)
    program = compiled(module, x)
    program.save(tmp_path / "program")
    again = CompiledProgram.load(tmp_path / "program")
    assert convolutions(again) == convolutions(program) and True in convolutions(again)
    assert [call.inputs for call in again.plan.calls] == [call.inputs for call in program.plan.calls]


def test_a_squeeze_and_excitation_has_what_follows_as_its_epilogue(seed: int) -> None:
    torch.manual_seed(seed)
    gate = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 8, 1), nn.ReLU(), nn.Conv2d(8, 32, 1, bias=seed % 2 == 0), nn.Sigmoid()
    )
    chain, is_added = Chain(Random(seed), 32), Random(seed).random() < 0.5
    module = Applied(lambda one, two, x: two(x * one(x)) + (x if is_added else 1), gate, chain).eval()
    x = torch.randn(2, 16, 7, 9)
    plan = compiled(module, x).plan
    assert [call.kernel for call in plan.calls if not call.kernel.startswith(("conv", "copy", "to_", "trans"))] == [
        "squeeze_excite"
    ]
    compile_in_turn(plan.sources[call.source] for call in plan.calls if call.kernel == "squeeze_excite")
    ir = extract_ir(module, (x,), strict=False).to_dict()
    halves = results(
        npu_compiler.compile(ir, LaidOut(), npu_compiler.CompileOptions(compute_dtype="float16")),
        module.half().float(),
        x,
        ReferenceBackend(),
    )
    torch.testing.assert_close(halves, module(x), rtol=2e-2, atol=2e-2)
