"""Sums of convolutions of one tensor: which become one convolution, and that it computes what they did."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from textwrap import dedent

import numpy as np
import pytest
import torch
from ir_builder import IRBuilder, Tensor
from torch import nn
from torch_ir import extract_ir

import npu_compiler
from npu_compiler import CompileOptions, print_graph, read_ir
from npu_compiler.fusions.convolution_sums import sum_convolutions
from npu_compiler.options import Stage
from npu_compiler.passes.batch_norm import fold_batch_norm, lower_batch_norm
from npu_compiler.passes.dead_code import eliminate_dead_code
from npu_runtime import CPUBackend, Executor, NPUBuffer, load_weights


def summed(g: IRBuilder) -> str:
    """The printed graph after the pass and those before it."""
    graph = sum_convolutions(lower_batch_norm(fold_batch_norm(read_ir(g.ir()))))
    lines = print_graph(eliminate_dead_code(graph), types=False).split("\n")[1:]
    return dedent("\n".join(lines))


def conv(
    g: IRBuilder, x: Tensor, name: str, *weight: int, padding: tuple[int, int] = (0, 0), groups: int = 1
) -> Tensor:
    return g("aten.conv2d.default", x, g.weight(name, *weight), None, [1, 1], list(padding), [1, 1], groups)


def norm(g: IRBuilder, x: Tensor, name: str, channels: int) -> Tensor:
    parts = [g.weight(f"{name}.{part}", channels) for part in "gbmv"]
    return g("aten.batch_norm.default", x, *parts, False, 0.1, 1e-3, True)


def test_branches_and_their_batch_norms_become_one_convolution() -> None:
    g = IRBuilder()
    x = g.input("x", 1, 4, 8, 8)
    wide, narrow = conv(g, x, "v", 4, 1, 3, 3, padding=(1, 1), groups=4), conv(g, x, "w", 4, 1, 1, 1, groups=4)
    sums = g("aten.add.Tensor", g("aten.add.Tensor", wide, narrow), x)
    g.output(g("aten.relu.default", norm(g, sums, "n", 4)))
    scale = "bn_scale(n.g, n.v, eps=0.001)"
    weights = (
        f"scale_axis(v, {scale}, axis=0), pad(scale_axis(w, {scale}, axis=0), pads=[[1, 1], [1, 1]]), "
        f"pad(scale_axis(identity_kernel(shape=[4, 1, 1, 1]), {scale}, axis=0), pads=[[1, 1], [1, 1]])"
    )
    attrs = "{dilation=[1, 1], groups=4, padding=[1, 1], stride=[1, 1]}"
    assert summed(g) == dedent(
        f"""
        weight %batch_norm.weight = sum({weights})
        weight %batch_norm.bias = bn_shift(n.g, n.b, n.m, n.v, eps=0.001)
        %batch_norm = aten.conv2d(%x, %batch_norm.weight, %batch_norm.bias) {attrs}
        %relu = aten.relu(%batch_norm)
        return %relu
    """
    ).strip("\n")


def test_a_batch_norm_of_the_source_is_a_summand() -> None:
    g = IRBuilder()
    x = g.input("x", 1, 4, 8, 8)
    g.output(g("aten.add.Tensor", norm(g, x, "n", 4), conv(g, x, "v", 4, 4, 1, 1)))
    identity = "scale_axis(identity_kernel(shape=[4, 4, 1, 1]), bn_scale(n.g, n.v, eps=0.001), axis=0)"
    attrs = "{dilation=[1, 1], groups=1, padding=[0, 0], stride=[1, 1]}"
    assert summed(g) == dedent(
        f"""
        weight %add.weight = sum({identity}, v)
        weight %add.bias = bn_shift(n.g, n.b, n.m, n.v, eps=0.001)
        %add = aten.conv2d(%x, %add.weight, %add.bias) {attrs}
        return %add
    """
    ).strip("\n")


def read_between(g: IRBuilder) -> None:
    x = g.input("x", 1, 4, 8, 8)
    one = conv(g, x, "v", 4, 4, 1, 1)
    g.output(g("aten.add.Tensor", one, conv(g, x, "w", 4, 4, 1, 1)))
    g.output(g("aten.relu.default", one))


def returned_between(g: IRBuilder) -> None:
    x = g.input("x", 1, 4, 8, 8)
    one = conv(g, x, "v", 4, 4, 1, 1)
    g.output(one)
    g.output(g("aten.add.Tensor", one, conv(g, x, "w", 4, 4, 1, 1)))


def activated_between(g: IRBuilder) -> None:
    x = g.input("x", 1, 4, 8, 8)
    one = g("aten.relu.default", conv(g, x, "v", 4, 4, 1, 1))
    g.output(g("aten.add.Tensor", one, conv(g, x, "w", 4, 4, 1, 1)))


def other_source(g: IRBuilder) -> None:
    x, y = g.input("x", 1, 4, 8, 8), g.input("y", 1, 4, 8, 8)
    g.output(g("aten.add.Tensor", conv(g, x, "v", 4, 4, 1, 1), conv(g, y, "w", 4, 4, 1, 1)))


def variable_weight(g: IRBuilder) -> None:
    x = g.input("x", 1, 4, 8, 8)
    other = g("aten.conv2d.default", x, g.input("w", 4, 4, 1, 1))
    g.output(g("aten.add.Tensor", conv(g, x, "v", 4, 4, 1, 1), other))


def a_residual(g: IRBuilder) -> None:
    x = g.input("x", 1, 4, 8, 8)
    g.output(g("aten.add.Tensor", conv(g, x, "v", 4, 4, 3, 3, padding=(1, 1)), x))


def more_products(g: IRBuilder) -> None:
    x = g.input("x", 1, 4, 8, 8)
    tall, flat = conv(g, x, "v", 4, 4, 5, 1, padding=(2, 0)), conv(g, x, "w", 4, 4, 1, 5, padding=(0, 2))
    g.output(g("aten.add.Tensor", tall, flat))


def other_groups(g: IRBuilder) -> None:
    x = g.input("x", 1, 4, 8, 8)
    g.output(g("aten.add.Tensor", conv(g, x, "v", 4, 4, 1, 1), conv(g, x, "w", 4, 2, 1, 1, groups=2)))


def a_broadcast_sum(g: IRBuilder) -> None:
    x = g.input("x", 1, 4, 8, 1)
    g.output(g("aten.add.Tensor", conv(g, x, "v", 4, 4, 1, 1), conv(g, x, "w", 4, 4, 8, 1)))


@pytest.mark.parametrize(
    "build",
    [
        read_between,
        returned_between,
        activated_between,
        other_source,
        variable_weight,
        a_residual,
        more_products,
        other_groups,
        a_broadcast_sum,
    ],
)
def test_other_sums_stay_as_they_are(build: Callable[[IRBuilder], None]) -> None:
    g = IRBuilder()
    build(g)
    graph = read_ir(g.ir())
    assert sum_convolutions(graph).nodes == graph.nodes


class Branches(nn.Module):
    """A drawn sum of branches over one image, each with a batch norm, or a factor, or neither."""

    def __init__(self, draw: Random, rank: int, *, alike: bool) -> None:
        super().__init__()
        convolution = nn.Conv2d if rank == 2 else nn.Conv1d
        batch_norm = nn.BatchNorm2d if rank == 2 else nn.BatchNorm1d
        self.channels = channels = draw.choice([4, 6, 12])
        groups = draw.choice([1, 2, channels])
        self.stride = stride = draw.choice([1, 1, 2])
        self.image = tuple(draw.randint(9, 14) if stride == 1 else draw.choice([10, 14]) for _ in range(rank))
        step = tuple(draw.choice([1, 1, 2]) for _ in range(rank))
        outputs = channels if stride == 1 else draw.choice([1, 2]) * channels
        branches: list[nn.Module] = []
        for _ in range(draw.randint(2, 4)):
            kind = draw.random()
            kernel = tuple(draw.choice([1, 3, 5, 2, 4]) for _ in range(rank))
            padding: str | tuple[int, ...] = "same"
            if stride == 2:  # of as many results whatever the size, which may be even without gaps
                kernel = tuple(size if gap == 1 else 3 for size, gap in zip(kernel, step, strict=True))
                padding = tuple((size - 1) // 2 * gap for size, gap in zip(kernel, step, strict=True))
            own = groups if alike or draw.random() < 0.8 else 1
            layers: list[nn.Module] = []
            if kind < 0.7 or stride != 1:
                bias = draw.random() < 0.5
                layers.append(
                    convolution(channels, outputs, kernel, stride, padding, dilation=step, groups=own, bias=bias)
                )
            if draw.random() < 0.6:
                layers.append(batch_norm(outputs))
            branches.append(nn.Sequential(*layers))
        self.branches = nn.ModuleList(branches)
        self.signs = [draw.choice([1, 1, 1, -1]) for _ in branches]
        self.last = draw.choice([nn.Identity(), batch_norm(outputs), nn.ReLU()])
        self.factor = nn.Parameter(torch.randn(outputs, *(1 for _ in range(rank))))
        self.scales, self.keeps = draw.random() < 0.4, draw.random() < 0.3
        for module in self.modules():
            if isinstance(module, batch_norm):
                nn.init.normal_(module.running_mean, 0, 0.3)
                nn.init.uniform_(module.running_var, 0.5, 1.5)
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.3)
        self.eval()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [branch(x) for branch in self.branches]
        total: torch.Tensor | int = 0
        for sign, part in zip(self.signs, parts, strict=True):
            total = total + part if sign > 0 else total - part
        assert isinstance(total, torch.Tensor)
        total = self.last(total * self.factor if self.scales else total)
        return (total, torch.relu(parts[0])) if self.keeps else (total,)


def results(model: nn.Module, x: torch.Tensor, dtype: str, *, sums: bool) -> tuple[list[np.ndarray], int]:
    """The outputs of the compiled model, and its number of calls.

    Args:
        sums: Whether the pass is among the stages.
    """

    def edited(stages: list[Stage]) -> list[Stage]:
        return [stage for stage in stages if sums or stage[0] != "sum_convolutions"]

    backend = CPUBackend()
    ir = extract_ir(copy.deepcopy(model).to("meta"), (x.to("meta"),))
    program = npu_compiler.compile(ir, backend.target, CompileOptions(compute_dtype=dtype, stages=edited))
    executor = Executor(program, backend)
    weights = load_weights(model.state_dict(), program, backend, strict=False)
    (spec,) = program.input_specs
    outputs = executor.run({spec.name: NPUBuffer.from_numpy(x.numpy(), backend, spec)}, weights)
    values = [outputs[spec.name].to_numpy(spec).astype(np.float64) for spec in program.output_specs]
    return values, len(program.plan.calls)


def exact(model: nn.Module, x: torch.Tensor) -> list[np.ndarray]:
    with torch.no_grad():
        return [value.numpy() for value in copy.deepcopy(model).double()(x.double())]


@pytest.mark.parametrize("rank", [1, 2])
def test_drawn_sums_are_those_of_pytorch(rank: int, seed: int) -> None:
    draw = Random(f"{seed} {rank}")
    torch.manual_seed(seed)
    fewer = tried = 0
    while fewer < 4 and tried < 60:
        tried += 1
        model = Branches(draw, rank, alike=draw.random() < 0.5)
        x = torch.randn(draw.randint(1, 2), model.channels, *model.image)
        before, calls = results(model, x, "float32", sums=False)
        found, left = results(model, x, "float32", sums=True)
        fewer += left < calls
        assert left <= calls
        for value, old, expected in zip(found, before, exact(model, x), strict=True):
            np.testing.assert_allclose(old, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert fewer


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sum_rounded_once_is_as_near_as_its_rounded_summands(dtype: str, seed: int) -> None:
    """The errors of both programs, over several drawn blocks of one kind each."""
    draw = Random(f"{seed} {dtype}")
    torch.manual_seed(seed)
    errors = []
    for _ in range(8):
        model = Branches(draw, 2, alike=True)
        x = torch.randn(2, model.channels, *model.image).to(getattr(torch, dtype)).float()
        expected = exact(model, x)[0]
        if not expected.any():  # two branches cancel each other
            continue
        runs = [results(model, x, dtype, sums=sums)[0][0] for sums in (False, True)]
        errors.append([np.sqrt(np.mean((run - expected) ** 2) / np.mean(expected**2)) for run in runs])
    before, after = np.mean(errors, axis=0)
    assert after < 1.15 * before
