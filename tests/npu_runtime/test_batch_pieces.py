"""Convolutions of a batch that the CPU device runs some images at a time."""

from __future__ import annotations

import copy
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_ir import extract_ir

from npu_compiler import CompiledProgram, CompileOptions, compile
from npu_compiler.program.plan import ExecutionPlan
from npu_runtime import CPUBackend, Executor, NPUBuffer, Profiler, load_weights
from npu_runtime.cpu import backend as cpu_backend
from npu_runtime.cpu.batch_pieces import run_in_pieces
from npu_runtime.cpu.native import available, build

needs_kernels = pytest.mark.skipif(not available(), reason=f"no native kernels: {build.failure_reason()}")
ALIGNMENT = 64


class Network(nn.Module):
    """A chain of drawn convolutions with gates, residuals, pooling and calls that need the whole batch in between."""

    def __init__(self, draw: Random, channels: int) -> None:
        super().__init__()
        self.layers, self.forms = nn.ModuleList(), []
        for _ in range(draw.randint(3, 7)):
            groups = draw.choice([1, 1, channels])
            self.layers.append(nn.Conv2d(channels, channels, 3, padding=1, groups=groups))
            self.forms.append(draw.choice(["plain", "residual", "gate", "excite", "pool", "concat", "batch"]))
        self.excite = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 6, 1), nn.ReLU(), nn.Conv2d(6, channels, 1), nn.Sigmoid()
        )
        self.last = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer, form in zip(self.layers, self.forms, strict=True):
            y = torch.relu(layer(x))
            if form == "residual":
                y = y + x
            elif form == "gate":
                y = y * torch.sigmoid(y.mean((2, 3), keepdim=True))
            elif form == "excite":
                y = y * self.excite(y)
            elif form == "pool":
                y = nn.functional.max_pool2d(y, 3, 1, 1)
            elif form == "concat":
                y = torch.cat([y[:, :2], x[:, 2:]], 1)
            elif form == "batch":
                y = y - y.mean(0, keepdim=True)
            x = y
        return self.last(x.mean((2, 3)))


def program_of(module: nn.Module, example: Tensor, dtype: str = "float32") -> CompiledProgram:
    ir = extract_ir(copy.deepcopy(module).to("meta"), (example.to("meta"),))
    return compile(ir, None, CompileOptions(compute_dtype=dtype))


def plan_of(batch: int, forms: list[str], size: int = 14) -> ExecutionPlan:
    module = Network(Random(0), 16)
    module.layers, module.forms = module.layers[: len(forms)], forms
    return program_of(module.eval(), torch.empty(batch, 16, size, size)).plan


def convolved(plan: ExecutionPlan) -> list[tuple[int, str, int]]:
    """The images of each convolution's result, with its buffer and where it begins there."""
    outs = [call.outputs[0] for call in plan.calls if call.kernel == "conv2d_kernel"]
    return [(out.shape[0], out.buffer, out.offset) for out in outs]


def test_each_piece_passes_its_convolutions_in_memory_of_its_own() -> None:
    plan = plan_of(4, ["plain", "plain"])
    (_, first, _), (_, second, _) = convolved(plan)
    cut = run_in_pieces(plan, 2, ALIGNMENT)
    found = convolved(cut)
    assert [images for images, _, _ in found] == [2, 2, 2, 2]
    assert [name for _, name, _ in found][::2] == [f"{first}.0", f"{first}.1"]
    assert first not in cut.buffers and cut.buffers[f"{first}.0"].offset == cut.buffers[f"{first}.1"].offset
    assert cut.buffers[f"{first}.0"].size_bytes * 2 == plan.buffers[first].size_bytes
    assert cut.arena_bytes < plan.arena_bytes
    # The mean is for the whole batch, and so is what it reads.
    size = plan.buffers[second].size_bytes // 4
    assert found[1::2] == [(2, second, 0), (2, second, size // 2)]


@pytest.mark.parametrize(("batch", "threads"), [(1, 1), (2, 2), (3, 2), (8, 8)])
def test_a_batch_is_not_cut_into_fewer_images_than_threads(batch: int, threads: int) -> None:
    plan = plan_of(batch, ["plain", "plain"])
    assert run_in_pieces(plan, threads, ALIGNMENT) is plan


def test_there_are_at_most_eight_pieces() -> None:
    cut = run_in_pieces(plan_of(24, ["plain", "plain"]), 1, ALIGNMENT)
    assert [images for images, _, _ in convolved(cut)] == [3] * 16


def test_a_single_convolution_between_calls_for_the_whole_batch_stays_whole() -> None:
    plan = plan_of(4, ["batch", "plain"])
    assert run_in_pieces(plan, 1, ALIGNMENT) is plan


# Two readings of 2,320 weights and 2 · 4 · 16 · 6² or 7² values of images.
@pytest.mark.parametrize(("size", "pieces"), [(6, 1), (7, 2)])
def test_convolutions_that_would_read_more_weights_than_images_stay_whole(size: int, pieces: int) -> None:
    cut = run_in_pieces(plan_of(4, ["plain", "plain"], size), 2, ALIGNMENT)
    assert [images for images, _, _ in convolved(cut)] == [4 // pieces] * 2 * pieces


# The two small products read 214 weights for each piece, and images of 22 values. What counts is the image that the
# pooling reads, the gate reads again and writes.
@pytest.mark.parametrize(("size", "pieces"), [(14, 4), (100, 1)])
def test_squeeze_and_excite_is_cut_where_a_piece_of_its_images_is_small(size: int, pieces: int) -> None:
    cut = run_in_pieces(plan_of(8, ["excite", "plain"], size), 2, ALIGNMENT)
    assert [images for images, _, _ in convolved(cut)] == [8 // pieces] * 4 * pieces


@needs_kernels
@pytest.mark.parametrize("number", range(12))
def test_drawn_networks_compute_the_same_in_pieces(number: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Random(f"{seed} {number}")
    torch.manual_seed(draw.randrange(2**30))
    channels, dtype = draw.choice([3, 8, 17, 32]), draw.choice(["float32", "float16", "bfloat16"])
    module = Network(draw, channels).eval()
    example = torch.randn(draw.choice([4, 6, 8, 9]), channels, draw.choice([7, 14]), draw.choice([5, 14]))
    program = program_of(module, example, dtype)
    results = []
    for threads in (draw.choice([1, 2, 3]), len(example)):
        monkeypatch.setattr(cpu_backend, "usable_threads", lambda count=threads: count)
        backend = CPUBackend(tune=False)
        executor, weights = Executor(program, backend), load_weights(module.state_dict(), program, backend)
        (spec,), (result,) = program.input_specs, program.output_specs
        inputs = {spec.name: NPUBuffer.from_numpy(example.numpy(), backend, spec)}
        profiler = Profiler()
        for _ in range(2):  # a result must not depend on what an earlier run left
            found = executor.run(inputs, weights, profiler)[result.name].to_numpy(result).astype(np.float32)
        seconds = profiler.seconds_per_call(program.kernels)
        assert len(seconds) == len(program.kernels) and sum(seconds) == pytest.approx(
            sum(timed.seconds for timed in profiler.calls)
        )
        results.append(found)
    np.testing.assert_allclose(*results, rtol=0, atol=1e-3 * np.abs(results[1]).max())
